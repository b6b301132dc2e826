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
import runner

TYPES = ("f32", "f16", "bf16", "q8_0", "f8_e5m2")


def measure(args, dtype):
    calls = runner.medians(args, args.shape, ["qkv_attention"], 5, dtype)
    # Kernels have no other type than that in their name.
    names = [f"dot_{dtype}", "scale_softmax_f32", f"weighted_sum_{dtype}"]
    kernels = runner.medians(args, args.shape, names, 5)
    return {isa: (times["qkv_attention"], sum(kernels[isa].values())) for isa, times in calls.items()}


def main():
    parser = runner.parser(__doc__, seconds=0.1)
    parser.add_argument("--shape", default="1,1,1,16,64,64")
    parser.add_argument("--most", type=float, default=150.0, metavar="NS")
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
    runner.end(args, rows, slow and f"more than {args.most:.0f} ns: {', '.join(slow)}")


if __name__ == "__main__":
    main()
