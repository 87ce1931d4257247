#!/usr/bin/env python3
"""Writes a shard of random tokens for the benchmarks: random_tokens.py FILE COUNT BELOW

The rate of training does not depend on what is learnt. The same numbers in every run."""
import array
import random
import sys

path, count, below = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(1)
tokens = array.array("H", (int(below * random.random()) for _ in range(count)))
with open(path, "wb") as f:
    array.array("i", [20240520, 1, count] + [0] * 253).tofile(f)
    tokens.tofile(f)
