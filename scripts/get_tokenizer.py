#!/usr/bin/env python3
"""Fetches the vocabulary of a published tokenizer, for --tokenizer DIR. None is part of this project.

  get_tokenizer.py gpt2 DIR           GPT-2's vocab.json and merges.txt, compared with checksums
  get_tokenizer.py OWNER/MODEL DIR    tokenizer.json of a public model on the Hugging Face hub, as it
                                      stands there today (SmolLM2, Qwen2.5, ...); it is read with the
                                      same care as any other file
"""
import argparse
import os
import sys

from fetch import fetch

OTHERWISE = "take a tokenizer.json from elsewhere, or train one: prepare_data train-bpe"
BASE = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2 = {
    "vocab.json": (BASE + "encoder.json",
                   "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    "merges.txt": (BASE + "vocab.bpe",
                   "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name")
    p.add_argument("folder", metavar="DIR")
    a = p.parse_args()
    if a.name == "gpt2":
        files = GPT2
    elif a.name.count("/") == 1 and all(a.name.split("/")):
        url = f"https://huggingface.co/{a.name}/resolve/main/tokenizer.json"
        files = {"tokenizer.json": (url, None)}
    else:
        sys.exit(f"error: {a.name}: give gpt2 or OWNER/MODEL")
    os.makedirs(a.folder, exist_ok=True)
    for name, (url, checksum) in files.items():
        fetch(url, checksum, os.path.join(a.folder, name), OTHERWISE)
    print(f"{a.folder}: {', '.join(files)}")


if __name__ == "__main__":
    main()
