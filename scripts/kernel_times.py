#!/usr/bin/env python3
"""Sums the kernel times that Nsight Compute wrote as CSV, largest sum first.

    scripts/kernel_times.py FILE.csv [--by kernel|op|part] [--top N]

One line is a kernel in one op of one part of the step, or with --by a whole op (of
kernels/kernels.h), or a whole part (data, forward, head, backward, optimizer). Ops and parts are
the NVTX ranges in which a kernel was launched. The file comes from `scripts/profile.sh times`.
"""
import argparse
import collections
import csv
import re
import sys

DURATION = "gpu__time_duration.sum"
TO_MS = {"ns": 1e-6, "nsecond": 1e-6, "us": 1e-3, "usecond": 1e-3, "ms": 1.0, "msecond": 1.0,
         "s": 1e3, "second": 1e3}
PARTS = {"forward", "head", "backward", "optimizer", "data"}


def fail(message):
    sys.exit(f"error: {message}")


def short(name):
    """A demangled name without return type, arguments and the namespaces and casts around."""
    name = re.sub(r"\((int|bool|unsigned int|long|torus::[\w:]+)\)", "", name)
    name = re.sub(r"^(void|static void) ", "", name)
    name = re.sub(r"(torus|cuda|flash|std|<unnamed>|\(anonymous namespace\)|_INTERNAL_\w+)::", "", name)
    depth = 0
    for i, c in enumerate(name):  # up to the parameter list: the ( outside of <>
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            name = name[:i]
            break
    return name if len(name) <= 60 else name[:57] + "..."


def ranges(row):
    """The open ranges at the launch, outermost first: "step 3", "backward", "layer 7", an op."""
    for column, cell in row.items():
        if column and "push" in column.lower() and cell:
            return re.findall(r"torus:([\w ]+?)(?=:|\"|$)", cell)
    return []


def read(path):
    """(kernel, ranges, milliseconds) of each launch."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if line.startswith('"')]
    except OSError as e:
        fail(f"{path}: {e.strerror}")
    rows = csv.DictReader(lines)
    if not rows.fieldnames or DURATION not in rows.fieldnames:
        fail(f"{path}: no column {DURATION}; make the file with scripts/profile.sh times")
    scale = None
    for row in rows:
        if scale is None:  # the first row holds the units
            if row[DURATION] not in TO_MS:
                fail(f"{path}: the unit of {DURATION} is '{row[DURATION]}', known are "
                     + ", ".join(TO_MS))
            scale = TO_MS[row[DURATION]]
            continue
        yield row["Kernel Name"], ranges(row), float(row[DURATION].replace(",", "")) * scale


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--by", choices=["kernel", "op", "part"], default="kernel")
    parser.add_argument("--top", type=int, default=40)
    args = parser.parse_args()
    total, count = collections.Counter(), collections.Counter()
    for kernel, stack, ms in read(args.file):
        op = stack[-1] if stack else "none"
        part = next((r for r in stack if r in PARTS), "none")
        key = {"kernel": f"{part:9} {op:22}  {short(kernel)}", "op": op, "part": part}[args.by]
        total[key] += ms
        count[key] += 1
    everything = sum(total.values())
    if not everything:
        fail(f"{args.file}: no kernel was recorded")
    heading = f"{'part':9} {'op':22}  kernel" if args.by == "kernel" else args.by
    print(f"{'count':>6} {'ms':>9} {'share':>6}  {heading}")
    for key, ms in total.most_common(args.top):
        print(f"{count[key]:6} {ms:9.3f} {100 * ms / everything:5.1f}%  {key}")
    print(f"{sum(count.values()):6} {everything:9.3f}         all {len(total)}")


if __name__ == "__main__":
    main()
