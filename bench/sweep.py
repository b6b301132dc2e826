#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Fused attention beside the three steps one by one, at every length from 1 to 512.

    bench/sweep.py BUILD/bench/qkv-bench [--lengths 1,2,...] [--head-dim 64] [--isa avx2]
                   [--clock cpu] [--alone] [--json FILE]

One head, as many queries as keys. The steps are qkv_dot, qkv_scale_softmax and
qkv_weighted_sum on the whole matrix; their times are added. Without --lengths:
every length to 32, every fourth to 128, then every 32nd and the numbers around
it. Ends with status 1 where fused attention took longer.
"""
import runner

STEPS = ("qkv_dot", "qkv_scale_softmax", "qkv_weighted_sum")


def default_lengths():
    lengths = set(range(1, 33)) | set(range(32, 129, 4))
    for middle in range(128, 513, 32):
        lengths |= {middle - 1, middle, middle + 1}
    return sorted(n for n in lengths if n <= 512)


def main():
    parser = runner.parser(__doc__, seconds=0.03)
    parser.add_argument("--lengths", help="separated by commas")
    parser.add_argument("--head-dim", type=int, default=64)
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else default_lengths()

    rows, slower = [], []
    print(f"{'length':>6} {'isa':6} {'fused':>11} {'steps':>11} {'ratio':>6}")
    for length in lengths:
        shape = f"1,1,{length},{length},{args.head_dim},{args.head_dim}"
        by_isa = runner.medians(args, shape, ("qkv_attention", *STEPS), rounds=3)
        for isa, times in by_isa.items():
            fused, steps = times["qkv_attention"], sum(times[name] for name in STEPS)
            rows.append({"length": length, "isa": isa, "fused_ns": fused, "steps_ns": steps})
            print(f"{length:>6} {isa:6} {fused:>8.0f} ns {steps:>8.0f} ns {steps / fused:>6.2f}")
            if fused > steps:
                slower.append(f"{length} on {isa}")
    runner.end(args, rows, slower and f"fused is slower at {', '.join(slower)}")


if __name__ == "__main__":
    main()
