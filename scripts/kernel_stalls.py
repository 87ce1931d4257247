#!/usr/bin/env python3
"""Where in a kernel its warps spend their time, from Nsight Compute's samples of each instruction.

    scripts/kernel_stalls.py FILE.csv [--top N] [--loop SHARE]

Per kernel: what its warps waited for; the instructions of its main loop by kind, with the cycles
that a warp spends on them in one pass; and the N instructions where most samples fell. Most
samples fall on instructions that were executed equally often; to the loop belongs what was
executed at least SHARE times as often as these, and no more than four times. The file is
NAME.source.csv of `scripts/profile.sh kernels`, or from
`ncu --import NAME.ncu-rep --page source --csv`.
"""
import argparse
import collections
import csv
import re
import sys

NAME, SAMPLES, EXECUTED, SOURCE = "Kernel Name", "# Samples", "Instructions Executed", "Source"


def fail(message):
    sys.exit(f"error: {message}")


def number(text):
    return float(text.replace(",", "") or 0)


class Line:
    """One instruction: its text, how often warps executed it, its samples by what they waited for."""

    def __init__(self, row):
        self.text = " ".join(row[SOURCE].split())
        self.executed = number(row[EXECUTED])
        self.samples = number(row[SAMPLES])
        self.reasons = collections.Counter(
            {column[len("stall_"):]: number(cell) for column, cell in row.items()
             if column and column.startswith("stall_") and "(" not in column and cell})

    def kind(self):
        return re.sub(r"^@!?U?P\w+ ", "", self.text).split(".")[0].split()[0]


def read(path):
    """(name, lines) of each kernel; a report may show one twice in a row."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.reader(file) if row]
    except OSError as e:
        fail(f"{path}: {e.strerror}")
    starts = [i for i, row in enumerate(rows) if row[0] == NAME] + [len(rows)]
    last = None
    for begin, end in zip(starts, starts[1:]):
        table = rows[begin + 1:end]
        if rows[begin:end] == last or not table:
            continue
        last = rows[begin:end]
        missing = {SAMPLES, EXECUTED, SOURCE} - set(table[0])
        if missing:
            fail(f"{path}: no column {sorted(missing)[0]}; record the section SourceCounters")
        yield rows[begin][1], [Line(dict(zip(table[0], row))) for row in table[1:]]


def share(part, whole):
    return f"{100 * part / whole:5.1f}%"


def show(name, lines, top, least):
    total = sum(line.samples for line in lines)
    if not total:
        fail(f"{name}: no samples; the kernel may be too short for them")
    reasons = sum((line.reasons for line in lines), collections.Counter())
    print(f"{name}\n{total:.0f} samples; warps waited for: " +
          ", ".join(f"{r} {share(n, total).strip()}" for r, n in reasons.most_common(8)))

    weight = collections.Counter()
    for line in lines:
        weight[line.executed] += line.samples
    often = max(weight, key=weight.get)
    loop = [line for line in lines if least * often <= line.executed <= 4 * often]
    # A warp issues an instruction in one cycle, in which it is "selected".
    cycle = sum(line.reasons["selected"] for line in loop) / len(loop) or 1
    count, cycles = collections.Counter(), collections.Counter()
    for line in loop:
        count[line.kind()] += 1
        cycles[line.kind()] += line.samples / cycle
    print(f"\nThe loop: {len(loop)} instructions, {sum(cycles.values()):.0f} cycles of a warp")
    print(f"{'count':>6} {'cycles':>8}  kind")
    for kind, n in cycles.most_common(top):
        print(f"{count[kind]:6} {n:8.1f}  {kind}")

    print(f"\n{'share':>6} {'line':>6} {'executed':>12}  instruction: waited for")
    order = sorted(range(len(lines)), key=lambda i: (-lines[i].samples, i))
    for i in order[:top]:
        line = lines[i]
        why = ", ".join(f"{r} {n:.0f}" for r, n in line.reasons.most_common(2) if n)
        print(f"{share(line.samples, total)} {i + 1:6} {line.executed:12.0f}  {line.text}: {why}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--top", type=int, default=16)
    parser.add_argument("--loop", type=float, default=0.5)
    args = parser.parse_args()
    found = list(read(args.file))
    if not found:
        fail(f"{args.file}: no kernel in it; make the file with scripts/profile.sh kernels")
    for i, (name, lines) in enumerate(found):
        print("\n\n" if i else "", end="")
        show(name, lines, args.top, args.loop)


if __name__ == "__main__":
    main()
