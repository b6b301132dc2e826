#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A table over several runs of qkv-bench: medians of the runs, one row a shape.

    bench/prefill.py BUILD/bench/qkv-bench [--runs 5] [--isa avx2] [--clock cpu] [--alone] [--json FILE]

One process keeps its luck (where its memory lies, which core it got), so one
run proves little. Ends with status 1 if a figure stays below its bar.
"""
import argparse
import json
import statistics
import subprocess
import sys


def run_once(bench, table, extra):
    done = subprocess.run(
        [bench, "--table", table, "--json", *extra],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def summarise(runs):
    """One dictionary a row of the table, in the table's order."""
    rows = []
    for results in zip(*runs):
        first = results[0]
        alone = [r for r in results if r["alone"]]
        results = alone or results  # with --alone: where the core ever was
        fractions = [r["fraction"] for r in results]
        rows.append(
            {
                "shape": first["shape"],
                "kernel": first["kernel"],
                "isa": first["isa"],
                "cpu": first["cpu"],
                "version": first["version"],
                "limit": statistics.mode(r["limit"] for r in results),
                "bar": first.get("bar"),
                "fraction": statistics.median(fractions),
                "lowest": min(fractions),
                "highest": max(fractions),
                "gflops": statistics.median(r["gflops"] or 0.0 for r in results),
                "limit_rate": statistics.median(r["limit_rate"] or 0.0 for r in results),
                "median_ns": statistics.median(r["median_ns"] for r in results),
                "max_error": max(r["max_error"] for r in results),
                "alone": len(alone),
                "runs": len(results),
            }
        )
        for key in ("speedup", "speedup_limit"):
            if key in first:
                rows[-1][key] = statistics.median(r[key] for r in results)
    return rows


WIDTH = 40


def drawn(row):
    """The fraction as a bar, with a mark at what it is to reach."""
    filled = round(WIDTH * min(row["fraction"], 1.0))
    cells = ["#" if i < filled else " " for i in range(WIDTH)]
    if row["bar"]:
        cells[min(WIDTH - 1, round(WIDTH * row["bar"]))] = "|"
    return "".join(cells).rstrip()


def print_table(rows):
    print(
        f"{'shape':20} {'isa':6} {'limit':5} {'alone':>5} {'bar':>5} {'figure':>7} {'lowest':>7} {'highest':>7} "
        f"{'ratio':>6} {'GFLOP/s':>8} {'error':>8}  0 {'.' * (WIDTH - 5)} 100 %"
    )
    for r in rows:
        bar = f"{100 * r['bar']:.0f} %" if r["bar"] else "-"
        ratio = f"{r['fraction'] / r['bar']:.3f}" if r["bar"] else "-"
        gflops = f"{r['gflops']:.1f}" if r["gflops"] else "-"
        print(
            f"{r['shape']:20} {r['isa']:6} {r['limit']:5} {r['alone']:5} {bar:>5} {100 * r['fraction']:>5.1f} % "
            f"{100 * r['lowest']:>5.1f} % {100 * r['highest']:>5.1f} % {ratio:>6} "
            f"{gflops:>8} {r['max_error']:>8.1e}  {drawn(r)}"
        )


def print_speedups(rows, threads):
    print(
        f"{threads} threads beside one, and what their limits allow\n"
        f"{'shape':20} {'isa':6} {'limit':5} {'alone':>5} {'us':>8} {'speed-up':>8} {'allowed':>8} "
        f"{'bar':>5} {'figure':>7} {'lowest':>7} {'highest':>7} {'ratio':>6} {'error':>8}"
    )
    for r in rows:
        print(
            f"{r['shape']:20} {r['isa']:6} {r['limit']:5} {r['alone']:5} "
            f"{r['median_ns'] / 1e3:>8.1f} {r['speedup']:>8.2f} {r['speedup_limit']:>8.2f} "
            f"{100 * r['bar']:>3.0f} % {100 * r['fraction']:>5.1f} % {100 * r['lowest']:>5.1f} % "
            f"{100 * r['highest']:>5.1f} % {r['fraction'] / r['bar']:>6.3f} {r['max_error']:>8.1e}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", help="path of qkv-bench")
    parser.add_argument("--table", default="prefill", help="prefill or decode")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the rows here too")
    for name in ("--isa", "--clock", "--seconds", "--rounds", "--dtype", "--threads", "--rows"):
        parser.add_argument(name, help="passed on to qkv-bench")
    parser.add_argument("--alone", action="store_true", help="passed on to qkv-bench")
    args = parser.parse_args()
    extra = ["--alone"] if args.alone else []
    for name in ("isa", "clock", "seconds", "rounds", "dtype", "threads", "rows"):
        if getattr(args, name):
            extra += ["--" + name, getattr(args, name)]

    runs = []
    for i in range(args.runs):
        if sys.stderr.isatty():
            print(f"run {i + 1} of {args.runs}", file=sys.stderr)
        runs.append(run_once(args.bench, args.table, extra))
    rows = summarise(runs)
    if not rows:
        sys.exit("prefill.py: no ISA of the table runs here")
    print(f"qkv {rows[0]['version']}, {rows[0]['cpu']}, medians of {args.runs} runs")
    if "speedup" in rows[0]:
        print_speedups(rows, args.threads)
    else:
        print_table(rows)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    below = [r["shape"] for r in rows if r["bar"] and r["fraction"] < r["bar"]]
    if below:
        print(f"below the bar: {'; '.join(below)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
