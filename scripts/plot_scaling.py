#!/usr/bin/env python3
"""Tables and plots of scripts/bench_scaling.sh's results.

  plot_scaling.py DIR          writes DIR/tokens_over_gpus.png and DIR/tokens_over_length.png
  plot_scaling.py DIR --text   tables on the console, no matplotlib needed

Speed-up is tokens/s over those of one GPU at the same shape, share that over the number of GPUs.
Exposed is what exchange adds to one layer's attention, forward and backward, and its part of them.
"""
import argparse
import json
import os
import sys

# EasyContext's own table: Llama-2-7B on 8 A100, tokens/s.
PUBLISHED = {("data_parallel", 65536): 10240, ("zigzag_ring", 65536): 7816,
             ("zigzag_ring", 131072): 4266, ("zigzag_ring", 524288): 2133,
             ("zigzag_ring", 716800): 1603}
KEY = ("part", "model", "mode", "seq_length", "batch", "gpus", "bytes")


def read(folder):
    """The last record of each row, in the order of the rows' first."""
    path = os.path.join(folder, "results.jsonl")
    rows = {}
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                try:
                    record = json.loads(line)
                    rows[tuple(record.get(k) for k in KEY)] = record
                except (ValueError, AttributeError):
                    sys.exit(f"error: {path}:{number}: not a result of bench_scaling.sh")
    except OSError as e:
        sys.exit(f"error: {path}: {e.strerror}; give a folder that bench_scaling.sh has written")
    if not rows:
        sys.exit(f"error: {path}: no results yet")
    return list(rows.values())


def thousands(tokens):
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


class Results:
    def __init__(self, records):
        self.records = records
        self.trained = [r for r in records if r["part"] in ("modes", "easycontext", "weak")]
        self.attention = {tuple(r[k] for k in ("model", "mode", "seq_length", "gpus")): r
                          for r in records if r["part"] == "attention"}

    def speed_up(self, r):
        """None where one GPU has no rate, or recomputes something else."""
        one = [o for o in self.trained if o["status"] == "ok" and o["gpus"] == 1 and
               all(o[k] == r[k] for k in ("part", "model", "seq_length", "batch", "recompute"))]
        return r["tokens_per_s"] / one[0]["tokens_per_s"] if one else None

    def groups(self, parts):
        """Training records by part and model."""
        out = {}
        for r in self.trained:
            if r["part"] in parts:
                out.setdefault(f"{r['part']}: {r['model']}", []).append(r)
        return out


def cell(value, pattern):
    return "-" if value is None or value == "" else pattern.format(value)


def links_table(records):
    links = [r for r in records if r["part"] == "links"]
    ops = list(dict.fromkeys(k for r in links for k in r
                             if k not in KEY + ("status", "reason", "unit")))
    if links:
        print("\nlinks: GB/s each way and GPU\n" + f"{'GPUs':>4} {'bytes':>11}" +
              "".join(f" {op:>14}" for op in ops))
    for r in links:
        row = (f" {r['status']}: {r['reason']}" if "reason" in r else
               f" {r['bytes']:>11}" + "".join(f" {cell(r.get(op), '{:.1f}'):>14}" for op in ops))
        print(f"{r['gpus']:>4}" + row)


def training_table(results, title, records):
    print(f"\n{title}")
    print(f"{'S':>6} {'B':>3} {'GPUs':>4} {'mode':<14} {'recompute':<13} {'tokens/s':>10} "
          f"{'speed-up':>8} {'share':>6} {'MFU':>6} {'GiB':>6} {'exposed ms':>10} {'':>5} "
          f"{'error':>7} {'published':>9}")
    for r in records:
        start = f"{thousands(r['seq_length']):>6} {r['batch']:>3} {r['gpus']:>4} {r['mode']:<14}"
        if r["status"] != "ok":
            print(f"{start} {r['status']}: {r.get('reason', '')}")
            continue
        speed = results.speed_up(r)
        alone = results.attention.get(tuple(r[k] for k in ("model", "mode", "seq_length", "gpus")))
        exposed = alone and alone.get("exposed_ms")
        part = exposed and 100 * exposed / (alone["forward_ms"] + alone["backward_ms"])
        published = PUBLISHED.get((r["mode"], r["seq_length"]))
        print(f"{start} {r['recompute']:<13} {r['tokens_per_s']:>10.0f} {cell(speed, '{:.2f}'):>8} "
              f"{cell(speed and 100 * speed / r['gpus'], '{:.0f}%'):>6} "
              f"{cell(r['mfu'] and 100 * r['mfu'], '{:.1f}%'):>6} {r['peak_gib']:>6.1f} "
              f"{cell(exposed, '{:.2f}'):>10} {cell(part, '{:.0f}%'):>5} "
              f"{cell(r['error'], '{:.0e}'):>7} "
              f"{cell(published if r['part'] == 'easycontext' else None, '{}'):>9}")


def text(results):
    links_table(results.records)
    for title, records in results.groups(("modes", "easycontext", "weak")).items():
        training_table(results, title, records)
    failed = [r for r in results.attention.values() if r["status"] == "failed"]
    for r in failed:
        print(f"{r['mode']} attention of {r['model']} at S {thousands(r['seq_length'])} on "
              f"{r['gpus']} GPUs failed: {r['reason']}")


def measured(results, parts, keep):
    """Training records with a rate by title, those for which keep(record, all of its title)."""
    groups = {title: [r for r in records if r["status"] == "ok"]
              for title, records in results.groups(parts).items()}
    groups = {title: [r for r in records if keep(r, records)]
              for title, records in groups.items()}
    return {title: records for title, records in groups.items() if records}


def over_gpus(results):
    """(title, lines, dotted) of each model at its shortest S: {name: [(GPUs, tokens/s)]}."""
    groups = measured(results, ("modes", "weak"), lambda r, all: r["seq_length"] == min(
        o["seq_length"] for o in all))
    for title, records in groups.items():
        lines, dotted = {}, {}
        for r in records:
            lines.setdefault(r["mode"], []).append((r["gpus"], r["tokens_per_s"]))
        one = [r["tokens_per_s"] for r in records if r["gpus"] == 1]
        if one:
            lines = {mode: [(1, one[0])] + [p for p in points if p[0] > 1]
                     for mode, points in lines.items()}
            dotted["GPUs x one"] = [(r["gpus"], r["gpus"] * one[0]) for r in records]
        yield title, lines, dotted


def over_length(results):
    """The same over S, on one GPU and on the most."""
    groups = measured(results, ("modes", "easycontext"), lambda r, all: r["gpus"] in (
        1, max(o["gpus"] for o in all)))
    for title, records in groups.items():
        lines = {}
        for r in records:
            name = "one GPU" if r["gpus"] == 1 else f"{r['mode']} on {r['gpus']}"
            lines.setdefault(name, []).append((r["seq_length"], r["tokens_per_s"]))
        published = [(S, rate) for (mode, S), rate in PUBLISHED.items() if mode == "zigzag_ring"]
        easycontext = records[0]["part"] == "easycontext"
        yield title, lines, {"published ring, 8 A100": published} if easycontext else {}


def plot(fields, label, axis_title, output):
    fields = list(fields)
    if not fields:
        return
    try:
        import matplotlib
    except ImportError:
        sys.exit("error: matplotlib is missing; apt-get install python3-matplotlib, or use --text")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = (len(fields) + 1) // 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 4 * rows), squeeze=False)
    for axis in axes.flat[len(fields):]:
        axis.set_visible(False)
    for axis, (title, lines, dotted) in zip(axes.flat, fields):
        for name, points in dotted.items():
            axis.plot(*zip(*sorted(points)), label=name, color="black", linestyle=":")
        for name, points in lines.items():
            axis.plot(*zip(*sorted(points)), label=name, linewidth=1.2, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(ticks, [label(x) for x in ticks])
        axis.minorticks_off()
        axis.set_title(title)
        axis.set_xlabel(axis_title)
        axis.set_ylabel("tokens/s")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(output, dpi=120)
    print(output)


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", metavar="DIR")
    p.add_argument("--text", action="store_true")
    a = p.parse_args()
    results = Results(read(a.folder))
    if a.text:
        text(results)
    else:
        plot(over_gpus(results), str, "GPUs", os.path.join(a.folder, "tokens_over_gpus.png"))
        plot(over_length(results), thousands, "S", os.path.join(a.folder, "tokens_over_length.png"))


if __name__ == "__main__":
    main()
