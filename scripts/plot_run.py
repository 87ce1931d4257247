#!/usr/bin/env python3
"""Plots runs from their logs (--log-dir's log.jsonl) and compares them with a reference curve.

  plot_run.py RUN...                       writes run.png: loss, validation loss, lr, tokens/s
  plot_run.py RUN... --reference FILE      with another curve beside them
  plot_run.py RUN... --text                a table and a curve on the console, no matplotlib needed

A RUN is a log.jsonl or a folder with one. A reference is any file of JSON lines with "step" and
"loss" or "val_loss": a log, or the curve.jsonl of scripts/make_reference.py.
"""
import argparse
import json
import math
import os
import sys

FIELDS = [("loss", "training loss"), ("val_loss", "validation loss"), ("lr", "learning rate"),
          ("tokens_per_s", "tokens/s")]


class Curves:
    """The columns of one log: for each field the steps where it has a value, and the values."""

    def __init__(self, path):
        if os.path.isdir(path):
            path = os.path.join(path, "log.jsonl")
        self.name = os.path.basename(os.path.dirname(os.path.abspath(path))) or path
        self.points = {field: ([], []) for field, _ in FIELDS}
        try:
            with open(path, encoding="utf-8") as f:
                lines = f.readlines()
        except OSError as e:
            sys.exit(f"error: {path}: {e.strerror}; give a log.jsonl or a folder with one")
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
                step = int(record["step"])
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    break  # the run is still writing its last line
                sys.exit(f"error: {path}:{number}: not a log record; expected {{\"step\": ...}}")
            for field, (steps, values) in self.points.items():
                if isinstance(record.get(field), (int, float)):
                    steps.append(step)
                    values.append(record[field])
        if not any(steps for steps, _ in self.points.values()):
            sys.exit(f"error: {path}: no records yet")

    def at(self, field, step):
        """The value at `step`, between the neighbours where there is none; None outside."""
        steps, values = self.points[field]
        if not steps or not steps[0] <= step <= steps[-1]:
            return None
        for i, s in enumerate(steps):
            if s == step:
                return values[i]
            if s > step:
                part = (step - steps[i - 1]) / (s - steps[i - 1])
                return values[i - 1] + part * (values[i] - values[i - 1])
        return None


def table(runs, reference, field):
    """Rows of up to ten steps: each run, the reference, and the first run's distance from it."""
    steps = runs[0].points[field][0]
    count = min(10, len(steps))
    chosen = sorted({steps[round(i * (len(steps) - 1) / max(1, count - 1))] for i in range(count)})
    names = [r.name for r in runs] + (["expected", "difference"] if reference else [])
    width = max(10, *(len(n) for n in names))
    print(f"{'step':>8}  " + "  ".join(f"{n:>{width}}" for n in names))
    for step in chosen:
        values = [r.at(field, step) for r in runs]
        if reference:
            expected = reference.at(field, step)
            values.append(expected)
            known = expected is not None and values[0] is not None
            values.append(values[0] - expected if known else None)
        cells = ["-" if v is None else f"{v:.4f}" for v in values]
        print(f"{step:>8}  " + "  ".join(f"{c:>{width}}" for c in cells))


def chart(curves, field, columns=64, rows=16):
    """Curves as characters: the last one given is drawn first, so that the first stays visible."""
    known = [c for c in curves if c.points[field][0]]
    last = max(c.points[field][0][-1] for c in known)
    first = min(c.points[field][0][0] for c in known)
    values = [v for c in known for v in c.points[field][1] if math.isfinite(v)]
    low, high = min(values), max(values)
    height = (high - low) or 1.0
    grid = [[" "] * columns for _ in range(rows)]
    marks = "*o+x"
    for index in reversed(range(len(known))):
        curve = known[index]
        mark = "." if curve.name == "expected" else marks[index % len(marks)]
        for column in range(columns):
            step = first + (last - first) * column / max(1, columns - 1)
            value = curve.at(field, step)
            if value is not None and math.isfinite(value):
                row = round((high - value) / height * (rows - 1))
                grid[row][column] = mark
    for row, line in enumerate(grid):
        label = f"{high - height * row / (rows - 1):8.3f}" if row % 5 == 0 else " " * 8
        print(f"{label} |{''.join(line).rstrip()}")
    print(" " * 8 + " +" + "-" * columns)
    print(f"{'step':>8}  {first:<{columns // 2}}{last:>{columns - columns // 2}}")
    legend = [("." if c.name == "expected" else marks[i % len(marks)]) + " " + c.name
              for i, c in enumerate(known)]
    print(" " * 10 + "   ".join(legend))


def plot(runs, reference, output):
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: matplotlib is missing; apt-get install python3-matplotlib, or use --text")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = runs + ([reference] if reference else [])
    shown = [(f, t) for f, t in FIELDS if any(c.points[f][0] for c in curves)]
    rows = (len(shown) + 1) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 4 * rows), squeeze=False)
    for axis in axes.flat[len(shown):]:
        axis.set_visible(False)
    for axis, (field, title) in zip(axes.flat, shown):
        for curve in curves:
            steps, values = curve.points[field]
            style = {"color": "black", "linestyle": ":"} if curve is reference else {}
            if steps:
                axis.plot(steps, values, label=curve.name, linewidth=1.2, **style)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(output)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("runs", nargs="+", metavar="RUN")
    p.add_argument("--reference", metavar="FILE")
    p.add_argument("--output", default="run.png", metavar="PNG")
    p.add_argument("--text", action="store_true")
    p.add_argument("--field", choices=[f for f, _ in FIELDS], help="with --text: only this one")
    a = p.parse_args()
    runs = [Curves(path) for path in a.runs]
    reference = Curves(a.reference) if a.reference else None
    if reference:
        reference.name = "expected"
    if not a.text:
        plot(runs, reference, a.output)
        return
    curves = runs + ([reference] if reference else [])
    for field, title in FIELDS:
        wanted = field == a.field if a.field else field in ("loss", "val_loss")
        if wanted and runs[0].points[field][0]:
            print(f"{title}:")
            table(runs, reference, field)
            chart(curves, field)
            print()


if __name__ == "__main__":
    main()
