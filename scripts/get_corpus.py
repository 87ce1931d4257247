#!/usr/bin/env python3
"""Fetches a text corpus and cuts it into training and held-out text.

  get_corpus.py NAME DIR    writes DIR/train/*.txt and DIR/val/*.txt: the last tenth of each text
                            is held out, at a line's end (fineweb-edu: token shards, *.bin)

  austen           six novels by Jane Austen, 4 MB, from Debian's package r-cran-janeaustenr
  docs             this project's own documentation: always there, and small
  tinyshakespeare  1 MB       from the internet, compared with a checksum
  tinystories      19 MB      TinyStories' validation set (Eldan and Li 2023), the same way
  fineweb-edu      200 MB     one shard of GPT-2 tokens (Penedo et al. 2024), the same way
"""
import argparse
import glob
import os
import subprocess
import sys

from fetch import fetch

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
HELD_OUT = 10  # one part in ten

# The checksum makes sure that it is the same file as ever.
DOWNLOADS = {
    "tinyshakespeare": (
        "https://raw.githubusercontent.com/karpathy/char-rnn/"
        "master/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"),
    "tinystories": (
        "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/"
        "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64/TinyStories-valid.txt",
        "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4"),
    "fineweb-edu": (
        "https://huggingface.co/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/"
        "a33f75d78c7f74236fb03754ec1eb3cc77507d64/edu_fineweb_train_000001.bin",
        "6bb7ce7bcac8e11463433767ec3402311c7527c3d8d766e7d65ef86dc4546bb2"),
}


def download(name, folder):
    url, checksum = DOWNLOADS[name]
    return fetch(url, checksum, os.path.join(folder, os.path.basename(url)),
                 "use --corpus austen or docs")


def read(path):
    with open(path, encoding="utf-8", errors="replace") as f:
        return f.read()


def split(texts, folder):
    """Writes {name: text} as training and held-out files."""
    sizes = {}
    for name, text in texts.items():
        cut = text.rfind("\n", 0, len(text) - len(text) // HELD_OUT) + 1
        for part, piece in (("train", text[:cut]), ("val", text[cut:])):
            os.makedirs(os.path.join(folder, part), exist_ok=True)
            with open(os.path.join(folder, part, name + ".txt"), "w", encoding="utf-8") as f:
                f.write(piece)
            sizes[part] = sizes.get(part, 0) + len(piece.encode())
    print(f"corpus: {len(texts)} texts, {sizes['train']:,} bytes to train on, "
          f"{sizes['val']:,} held out")


def split_shard(path, folder):
    """Token shards of llm.c's format: 256 int32 of header, then 16-bit tokens."""
    with open(path, "rb") as f:
        header, tokens = bytearray(f.read(1024)), f.read()
    count = len(tokens) // 2
    cut = count - count // HELD_OUT
    for part, piece in (("train", tokens[:2 * cut]), ("val", tokens[2 * cut:])):
        os.makedirs(os.path.join(folder, part), exist_ok=True)
        header[8:12] = (len(piece) // 2).to_bytes(4, "little")
        with open(os.path.join(folder, part, "tokens.bin"), "wb") as f:
            f.write(header + piece)
    print(f"corpus: {cut:,} tokens to train on, {count - cut:,} held out")


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", choices=["austen", "docs", *DOWNLOADS])
    p.add_argument("folder", metavar="DIR")
    a = p.parse_args()
    os.makedirs(a.folder, exist_ok=True)
    if a.name == "austen":
        novels = os.path.join(a.folder, "novels")
        reader = os.path.join(ROOT, "scripts", "read_r_strings.py")
        status = subprocess.call([sys.executable, reader, "--output", novels])
        if status != 0:
            sys.exit(status)
        files = sorted(glob.glob(os.path.join(glob.escape(novels), "*.txt")))
        split({os.path.splitext(os.path.basename(f))[0]: read(f) for f in files}, a.folder)
    elif a.name == "docs":
        files = sorted(glob.glob(os.path.join(glob.escape(ROOT), "*.md")) +
                       glob.glob(os.path.join(glob.escape(ROOT), "docs", "*.md")))
        split({os.path.splitext(os.path.basename(f))[0]: read(f) for f in files}, a.folder)
    elif a.name == "fineweb-edu":
        split_shard(download(a.name, a.folder), a.folder)
    else:
        split({a.name: read(download(a.name, a.folder))}, a.folder)


if __name__ == "__main__":
    main()
