#!/usr/bin/env python3
"""Compares our tokenizer with the packages tokenizers and tiktoken: all ids must be equal.

Makes tokenizers of the styles that models use (GPT-2, Llama-3, Qwen2, SmolLM2, DeepSeek, o200k, and
one of our own trainer), trained on six English novels and on odd Unicode text, encodes several
megabytes with them, and compares our ids (prepare_data tokenize) with theirs, document by document.
The two packages are installed into a virtual environment in the build folder.

  scripts/test_tokenizers.py [--prepare-data build/release/bin/prepare_data] [--work DIR] [--mb N]
"""
import argparse
import array
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
import unicodedata

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT_END = "<|endoftext|>"  # appears in the texts, as text
END = "<|end_of_text|>"     # opens each document in our shards
PACKAGES = ["tokenizers==0.23.3", "tiktoken==0.14.0"]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
          r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = CL100K.replace("{1,3}", "")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
         r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
            r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def enter_environment(work):
    """Runs this script again inside a virtual environment that has the packages."""
    python = work / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(work / "venv")], check=True)
    probe = "import tokenizers, tiktoken"
    if subprocess.run([python, "-c", probe], capture_output=True, check=False).returncode != 0:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    if pathlib.Path(sys.prefix).resolve() != (work / "venv").resolve():
        os.execv(python, [str(python), *sys.argv])


# --- text ---------------------------------------------------------------------------------------
WORDS = "the Of and TO a in Is it's you're we'll I'd they've can't o'clock 'tis rock'n'roll".split()
SNIPPETS = [
    "'s", "'S", "'T", "'RE", "'Ve", "'m", "'LL", "'d", "'\u017f", "\u2019s", "''ll", "'sX", " 's",
    "\u0130\u0131\u017f\u212a\u00df\u1e9e\ufb06", "e\u0301a\u0308\u0323", "\u0915\u094d\u0937",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627", "\u4f60\u597d\uff0c\u4e16\u754c",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab", "\u3072\u3089\u304c\u306a\u30ab\u30bf",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f44d\U0001f3fd\U0001f1e9\U0001f1ea"
    "\u2764\ufe0f",
    "\u0661\u0662\u0663\u0664\u0665\u00b2\u00bd\u2167\u3007\u4e00", "1234567890", "3.14159e-10",
    "0x7fFF", "\r\n", "\r", "\n\n\n", "\t", "\v", "\f", "\x1c", "\x85", "\xa0", "\u180e", "\u200b",
    "\u2028", "\u2029", "\u202f", "\u3000", "\ufeff", "\x00", "\x1b[31m", "\u202e",
    TEXT_END, "<|", "|>",
    "https://example.org/a_b?c=%20&d#e", "snake_case CamelCase HTMLParser2", "a\u0300" * 5,
    "\U000e0041", "\uffff", "\U0010ffff", "\ue000", "\u0378", "$\u20ac\u00a5+<=>~^`|",
    "--- ... !!?",
]
# What normalization works on: letters that compose, marks of many classes, jamo, excluded ones.
MARKED = ("aeoAEOszq \u0915\u05d0\u0f40\u3046\u1112\u1161\u11ab\ud558\u00e4\u1e69\u212b\u0958\u2adc"
          "\u0300\u0301\u0302\u0308\u0323\u0327\u0328\u0331\u0338\u0345\u0334\u05b0"
          "\u05bc\u093c\u094d"
          "\u0f71\u0f72\u3099\u064b\u0655\u1dce\u20d0\U0001d157\U0001d165\U00011131\U00011127")


def odd_text(rng, size):
    """About `size` characters of what breaks tokenizers."""
    out, n = [], 0
    while n < size:
        kind = rng.randrange(10)
        if kind == 0:
            part = rng.choice(" \n\t\r\xa0\u3000-=*0 \n") * rng.choice([1, 2, 3, 7, 40, 300])
        elif kind == 1:
            part = "".join(rng.choice(" \n\r\t\x0b\xa0\u2003") for _ in range(rng.randrange(1, 12)))
        elif kind == 2:
            digits = "0123456789\u0661\u00b2\u2167"
            part = "".join(rng.choice(digits) for _ in range(rng.randrange(1, 30)))
        elif kind == 3:  # any character of any plane
            part = "".join(chr(c) for c in (rng.randrange(0x110000) for _ in range(8))
                           if not 0xd800 <= c < 0xe000)
        elif kind == 4:  # a run inside one script
            start = rng.choice([0x80, 0x100, 0x250, 0x370, 0x400, 0x590, 0x600, 0x900, 0xe00,
                                0x1100, 0x1c80, 0x2000, 0x2150, 0x3040, 0x4e00, 0xac00, 0xa720,
                                0xfb00, 0x10400, 0x105c0, 0x1d400, 0x1f300, 0x20000, 0x31350])
            part = "".join(chr(start + rng.randrange(0x80)) for _ in range(rng.randrange(1, 20)))
        elif kind == 5 and rng.randrange(2):  # letters under heaps of marks
            part = "".join(rng.choice(MARKED) for _ in range(rng.randrange(1, 12)))
        elif kind == 5:
            part = "".join(rng.choice(SNIPPETS) for _ in range(3))
        elif kind == 6:
            part = rng.choice(SNIPPETS)
        elif kind == 7:
            part = "".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 20)))
        else:
            part = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 8)))
        out.append(part)
        n += len(part)
    return "".join(out)


def documents(work, megabytes):
    """[(name, text)]: the novels, and odd texts of many sizes."""
    novels = work / "novels"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "read_r_strings.py"), "--output",
                    str(novels)], check=True, stdout=subprocess.DEVNULL)
    docs = [(p.name, p.read_text(encoding="utf-8")) for p in sorted(novels.glob("*.txt"))]
    docs += [(p.name + " upper", p.read_text(encoding="utf-8").upper())
             for p in sorted(novels.glob("[mn]*.txt"))]
    rng, size = random.Random(2026), 0
    every = [chr(c) for c in range(0x110000) if not 0xd800 <= c < 0xe000]
    for i in range(0, len(every), 1024):  # in parts: theirs is slow on very long pieces
        part = every[i:i + 1024]
        docs.append((f"from U+{ord(part[0]):04X}", "".join(part)))
        docs.append((f"from U+{ord(part[0]):04X}, spaced", " ".join(part)))
    docs += [(f"snippet {s!r}", s) for s in SNIPPETS + WORDS + [" ", "  ", " a", "a ", " \n a"]]
    while size < megabytes << 20:
        text = odd_text(rng, rng.choice([1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000]))
        docs.append((f"odd {len(docs)}", text))
        size += len(text.encode())
    return docs


# --- tokenizers ---------------------------------------------------------------------------------
def make_tokenizers(work, docs):
    """Trains one tokenizer of each style with the package and saves it: {name: path}."""
    import tokenizers
    from tokenizers import Regex, models, pre_tokenizers as pre, trainers

    def split(pattern, behavior="isolated", invert=False):
        return pre.Split(Regex(pattern), behavior=behavior, invert=invert)

    def plain():
        return pre.ByteLevel(add_prefix_space=False, use_regex=False)

    styles = {
        "gpt2": (pre.ByteLevel(add_prefix_space=False), False),
        "prefix_space": (pre.ByteLevel(add_prefix_space=True), False),
        "no_regex": (plain(), False),
        "llama3": (pre.Sequence([split(CL100K), plain()]), True),
        "gpt4_removed": (pre.Sequence([split(CL100K, "removed", True), plain()]), False),
        "qwen2": (pre.Sequence([split(QWEN2), plain()]), False),
        "smollm2": (pre.Sequence([pre.Digits(individual_digits=True),
                                  pre.ByteLevel(add_prefix_space=False)]), False),
        "digit_runs_prefix": (pre.Sequence([pre.Digits(individual_digits=False),
                                            pre.ByteLevel(add_prefix_space=True)]), False),
        "deepseek": (pre.Sequence([split(r"\p{N}{1,3}"),
                                   split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
                                   split(DEEPSEEK), plain()]), False),
        "o200k": (pre.Sequence([split(O200K), plain()]), False),
        "qwen2_nfc": (pre.Sequence([split(QWEN2), plain()]), False),
        "literal_split": (pre.Sequence([pre.Split("a.", behavior="isolated"),
                                        pre.ByteLevel(add_prefix_space=False)]), False),
    }
    paths = {}
    for name, (pre_tokenizer, ignore_merges) in styles.items():
        path = work / "tokenizers" / name / "tokenizer.json"
        paths[name] = path
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
        tokenizer.pre_tokenizer = pre_tokenizer
        if name == "qwen2_nfc":
            tokenizer.normalizer = tokenizers.normalizers.NFC()
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=6000, special_tokens=[END], show_progress=False,
                                      initial_alphabet=pre.ByteLevel.alphabet())
        # Its time grows with the square of a piece's length, so no long runs in training.
        texts = [t for _, t in docs if len(t) < 200] + [docs[0][1], docs[1][1]][:name != "no_regex"]
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))
    return paths


def end_id(tokenizer):
    own = tokenizer.token_to_id(END)
    return tokenizer.token_to_id(TEXT_END) if own is None else own


def split_at(ids, end):
    out = []
    for token in ids:
        if token == end:
            out.append([])
        else:
            out[-1].append(token)
    return out


def run_ours(program, tokenizer, source, folder):
    """Ids of our program for a .txt or .jsonl file."""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([program, "tokenize", "--input", str(source), "--tokenizer", str(tokenizer),
                    "--output", str(folder), "--shard-tokens", "2000000000"], check=True,
                   stdout=subprocess.DEVNULL)
    data = (folder / "train_000000.bin").read_bytes()
    header = array.array("i", data[:1024])
    ids = array.array("H" if header[0] == 20240520 else "I", data[1024:])
    assert len(ids) == header[2]
    return ids


def compare(name, docs, ours, theirs):
    """Prints the first difference; True when there is none."""
    if len(ours) != len(docs):
        print(f"  {name}: {len(ours)} documents instead of {len(docs)}")
        return False
    bad = 0
    for (title, text), a, b in zip(docs, ours, theirs):
        if a == list(b):
            continue
        bad += 1
        if bad <= 3:
            i = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            print(f"  {name}: {title[:60]} ({len(text)} characters) differs at token {i}: "
                  f"ours {a[max(0, i - 2):i + 4]}, theirs {list(b)[max(0, i - 2):i + 4]}")
    return bad == 0


def reference_bytes(tokenizer, data):
    """Theirs for any bytes by our rule: valid runs as text, each invalid byte as its byte token."""
    alphabet = sorted_alphabet()
    ids, text = [], ""
    for c in data.decode("utf-8", "surrogateescape") + "\udc80":
        if 0xdc80 <= ord(c) <= 0xdcff:
            ids += tokenizer.encode(text, add_special_tokens=False).ids if text else []
            ids.append(tokenizer.token_to_id(alphabet[ord(c) - 0xdc00]))
            text = ""
        else:
            text += c
    return ids[:-1]


def sorted_alphabet():
    """GPT-2's character for each byte."""
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b]
    rest = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(rest)}}


# --- checks -------------------------------------------------------------------------------------
def check_tokenizers(program, work, docs, source, paths):
    import tokenizers
    good = True
    total = sum(len(t.encode()) for _, t in docs)
    for name, path in paths.items():
        # Without a pre-tokenizer regex theirs is slow on long texts: a part is enough there.
        some = [d for d in docs if len(d[1]) < 20000] if name == "no_regex" else docs
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True  # also in the text, they are text
        end = end_id(tokenizer)
        start = time.time()
        ours = split_at(run_ours(program, path, source, work / "out"), end)
        ours_time = time.time() - start
        if some is not docs:
            ours = [ids for ids, d in zip(ours, docs) if len(d[1]) < 20000]
        start = time.time()
        theirs = [e.ids for e in tokenizer.encode_batch([t for _, t in some],
                                                        add_special_tokens=False)]
        theirs_time = time.time() - start
        ok = compare(name, some, ours, theirs)
        good &= ok
        size = total if some is docs else sum(len(t.encode()) for _, t in some)
        print(f"{'ok  ' if ok else 'FAIL'} tokenizers {name}: {len(some)} documents, {size} bytes, "
              f"{sum(map(len, theirs))} ids ({ours_time:.1f} s, theirs {theirs_time:.1f} s)",
              flush=True)
    return good


def check_invalid(program, work, paths):
    import tokenizers
    rng = random.Random(7)
    good = True
    blobs = [bytes(rng.randrange(256) for _ in range(20000)),
             b"".join(rng.choice([b"\xc3", b"\xe2\x82", b"\xf0\x9f\x98", b"ab ", "é".encode(),
                                  b"\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80",
                                  b"  ", b"1", b"'s"])
                      for _ in range(20000))]
    alphabet = {c: b for b, c in sorted_alphabet().items()}
    for name in [n for n in ["gpt2", "llama3", "smollm2", "deepseek"] if n in paths]:
        tokenizer = tokenizers.Tokenizer.from_file(str(paths[name]))
        for blob in blobs:
            blob = b"x" + blob  # not a byte-order mark, and no separator line
            source = work / "invalid.txt"
            source.write_bytes(blob)
            ours = list(run_ours(program, paths[name], source, work / "out"))[1:]
            back = bytes(alphabet[c] for i in ours for c in tokenizer.id_to_token(i))
            ok = ours == reference_bytes(tokenizer, blob) and back == blob
            good &= ok
            print(f"{'ok  ' if ok else 'FAIL'} invalid UTF-8 {name}: {len(blob)} bytes, "
                  f"{len(ours)} ids, decoded back {back == blob}")
    return good


def check_tiktoken(program, work, docs, source, paths):
    import tiktoken
    import tokenizers
    alphabet = {c: b for b, c in sorted_alphabet().items()}
    good = True
    for name, pattern in {"gpt2": GPT2, "llama3": CL100K, "qwen2": QWEN2, "o200k": O200K}.items():
        if name not in paths:
            continue
        tokenizer = tokenizers.Tokenizer.from_file(str(paths[name]))
        end = end_id(tokenizer)
        # tiktoken merges by id, which is the order of the merges in a trained tokenizer.
        ranks = {bytes(alphabet[c] for c in token): i
                 for token, i in tokenizer.get_vocab(with_added_tokens=False).items() if i != end}
        encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                     special_tokens={END: end})
        ours = split_at(run_ours(program, paths[name], source, work / "out"), end)
        theirs = [encoding.encode_ordinary(text) for _, text in docs]
        ok = compare("tiktoken " + name, docs, ours, theirs)
        good &= ok
        print(f"{'ok  ' if ok else 'FAIL'} tiktoken {name}: {len(docs)} documents, "
              f"{sum(map(len, theirs))} ids", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare-data", default=str(ROOT / "build/release/bin/prepare_data"))
    parser.add_argument("--work", default=str(ROOT / "build/tokenizers"))
    parser.add_argument("--mb", type=int, default=3, help="megabytes of odd text")
    parser.add_argument("--styles", help="only these, separated by commas")
    options = parser.parse_args()
    work = pathlib.Path(options.work)
    work.mkdir(parents=True, exist_ok=True)
    enter_environment(work)
    program = shutil.which(options.prepare_data)
    if program is None:
        sys.exit(f"error: {options.prepare_data}: not there; build it or give --prepare-data")

    docs = documents(work, options.mb)
    source = work / "documents.jsonl"
    with source.open("w", encoding="utf-8", newline="\n") as out:
        for i, (_, text) in enumerate(docs):
            out.write(json.dumps({"text": text}, ensure_ascii=i % 2 == 0) + "\n")
    paths = make_tokenizers(work, docs)
    for pattern in ["gpt2", "llama3"]:
        ours = work / "tokenizers" / f"trained_here_{pattern}"
        subprocess.run([program, "train-bpe", "--input", str(work / "novels" / "*.txt"),
                        "--pattern", pattern, "--vocab-size", "4096", "--output", str(ours)],
                       check=True)
        paths[ours.name] = ours / "tokenizer.json"
    if options.styles:
        paths = {name: paths[name] for name in options.styles.split(",")}
    good = check_tokenizers(program, work, docs, source, paths)
    good &= check_invalid(program, work, paths)
    good &= check_tiktoken(program, work, docs, source, paths)
    print("all ids are equal" if good else "there are differences")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
