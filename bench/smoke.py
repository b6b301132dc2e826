#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""qkv-bench runs, prints what it should, and refuses what it should. No time is looked at."""
import json
import subprocess
import sys

BENCH = sys.argv[1]
QUICK = ["--seconds", "0.0001", "--rounds", "1", "--json"]
KEYS = (
    "kernel shape isa dtype threads median_ns min_ns gflops gbps limit fraction max_error "
    "version cpu"
).split()

X86 = "avx2", "avx512"
# Outputs are of the order of 1: half a step of the narrow types, and room.
LARGEST_ERROR = {"f32": 1e-3, "f16": 2e-3, "bf16": 2e-2}
CACHES = "q8_0", "i8", "f8_e4m3", "f8_e5m2", "q4_0"
LARGEST_ERROR.update(dict.fromkeys(CACHES, LARGEST_ERROR["f32"]))  # their outputs are f32
# Of rows in a cache, of magnitudes up to 3.5, turned up to 5: half a step of the type, for
# q4_0 nearly a whole one at the end of its range.
LARGEST_IN_CACHE = {"f32": 1e-6, "f16": 2e-3, "bf16": 2e-2, "q8_0": 3e-2, "i8": 3e-2}
LARGEST_IN_CACHE.update({"f8_e4m3": 0.26, "f8_e5m2": 0.51, "q4_0": 0.65})
APPEND = ["qkv_kv_append", "qkv_kv_append_rotary"]


def run(*args):
    return subprocess.run([BENCH, *args], capture_output=True, text=True, check=False)


def names(section):
    """The names that --list prints under a heading."""
    found, inside = [], False
    for line in run("--list").stdout.splitlines():
        if not line.startswith(" "):
            inside = line.startswith(section)
        elif inside:
            found.append(line.split()[0])
    return found


def check_results(args, kernels):
    done = run(*QUICK, *args)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for result in results:
        assert all(key in result for key in KEYS), result
        assert result["median_ns"] > 0, result
        if result["max_error"] is not None:
            largest = LARGEST_IN_CACHE if result["kernel"] in APPEND else LARGEST_ERROR
            assert result["max_error"] < largest[result["dtype"]], result
    assert {r["kernel"] for r in results} == set(kernels), results
    return results


def check_refusals():
    for bad in (
        ["--shape", "P513"],
        ["--shape", "3,2,1,1,1,1"],
        ["--shape", "2,1,1,5++7,8,8"],
        ["--shape", "2,1,1,5+7,8,8p12"],
        ["--isa", "sse9"],
        ["--kernel", "nothing"],
        ["--dtype", "f8"],
        ["--threads", "0"],
        ["--seconds", "soon"],
        ["--rounds"],
        ["--what"],
        ["--threads", "2", "--kernel", "qkv_dot"],
        ["--table", "prefill", "--threads", "2"],
        ["--rows", "D1024"],
    ):
        done = run(*bad)
        assert done.returncode == 2, (bad, done)
        assert done.stderr.count("\n") == 1 and not done.stdout, (bad, done)


kernels = names("Kernels")
check_results(["--shape", "2,1,5,5,32,32"], kernels)
# A layer has as many queries as keys; blocks of 32 elements need whole ones.
odd = [k for k in kernels if k != "qkv_self_attention" and "_q" not in k]
check_results(["--shape", "2,1,5,7,8,6c"], odd)
check_results(["--shape", "3x5x7"], ["qkv_project"])
for dtype in "f16", "bf16", *CACHES:
    caches = [a for name in ["qkv_attention", *APPEND] for a in ("--kernel", name)]
    narrow = check_results(
        ["--shape", "4,2,9,40,32,32", "--dtype", dtype, *caches], ["qkv_attention", *APPEND]
    )
    assert all(r["dtype"] == dtype for r in narrow), narrow
    assert all(r["limit"] == "copy" for r in narrow if r["kernel"] in APPEND), narrow
    # Sequences that end in and at a page, with pages and without.
    for tail in "p16", "cp8", "c":
        check_results(
            ["--shape", "4,2,2,17+100+5+64,32,64" + tail, "--dtype", dtype], ["qkv_attention"]
        )
threaded = check_results(["--shape", "4,2,33,40,8,8", "--threads", "2"], ["qkv_attention"])
assert all(r["threads"] == 2 for r in threaded)
one = check_results(["--table", "decode", "--rows", "Dmha512"], ["qkv_attention"])
two = check_results(
    ["--table", "decode", "--rows", "Dmha512", "--threads", "2", "--alone"], ["qkv_attention"]
)
for single, double in zip(one, two, strict=True):
    assert double["threads"] == 2 and 0 < double["speedup_limit"] <= 2, double
    assert double["speedup"] > 0 and double["bar"] == 0.95, double
    assert double["max_error"] == single["max_error"], (single, double)  # the same bits
    by_fma = single["shape"] == "Dmha512 f16"
    # Bars are for the instruction sets of x86-64: nothing of Arm was measured.
    assert (single.get("bar") is not None) == (by_fma and single["isa"] in X86), single
    assert single["limit"] == "fma" or not by_fma, single
check_refusals()
