#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What a short call costs beside the kernels that it comes down to.

    bench/call.py BUILD/bench/qkv-bench [--shape 1,1,1,16,64,64] [--isa avx2]
                  [--clock cpu] [--alone] [--json FILE]

One query against 16 keys of 64: qkv_attention() with its checks and its plan, and the
kernels for dot products, softmax and weighted sum added up, for caches of several
types. Ends with status 1 where the call takes 150 ns more, or the figure that
--most gives.
"""
import argparse
import json
import subprocess
import sys

TYPES = ("f32", "f16", "bf16", "q8_0", "f8_e5m2")


def run(args, names, dtype):
    command = [args.bench, "--json", "--shape", args.shape, "--dtype", dtype]
    command += ["--seconds", str(args.seconds), "--rounds", "5", "--clock", args.clock]
    for name in names:
        command += ["--kernel", name]
    if args.isa:
        command += ["--isa", args.isa]
    if args.alone:
        command.append("--alone")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    times = {}
    for line in done.stdout.splitlines():
        result = json.loads(line)
        times[result["isa"]] = times.get(result["isa"], 0.0) + result["median_ns"]
    return times


def measure(args, dtype):
    calls = run(args, ["qkv_attention"], dtype)
    # Kernels have no other type than that in their name.
    kernels = run(args, [f"dot_{dtype}", "scale_softmax_f32", f"weighted_sum_{dtype}"], "f32")
    return {isa: (calls[isa], kernels[isa]) for isa in calls}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", help="path of qkv-bench")
    parser.add_argument("--shape", default="1,1,1,16,64,64")
    parser.add_argument("--most", type=float, default=150.0, metavar="NS")
    parser.add_argument("--isa")
    parser.add_argument("--clock", default="wall")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()

    rows, slow = [], []
    print(f"{'cache':8} {'isa':6} {'call':>9} {'kernels':>9} {'more':>9}")
    for dtype in TYPES:
        for isa, (call, kernels) in measure(args, dtype).items():
            rows.append({"dtype": dtype, "isa": isa, "call_ns": call, "kernels_ns": kernels})
            more = call - kernels
            print(f"{dtype:8} {isa:6} {call:>6.0f} ns {kernels:>6.0f} ns {more:>+6.0f} ns")
            if more > args.most:
                slow.append(f"{dtype} on {isa}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
            file.write("\n")
    if slow:
        print(f"more than {args.most:.0f} ns: {', '.join(slow)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
