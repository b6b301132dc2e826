#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""qkv beside other libraries: one thread each, identical inputs, turns in rounds.

    bench/peers/run.py BUILD [--shape P512 | D4096:f16]... [--decode] [--rounds 5] [--json FILE]

Each library runs in a process of its own, all on the same core, one at a
time. A library that offers several ways uses its fastest. Printed are the
median of the rounds' medians, the fastest run, the fraction of the limit
that qkv-bench measured in the same rounds, and the largest error of a
sample of rows against f64. Needs the packages of requirements.txt.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = ("qkv", "torch", "onnxruntime", "openblas")
SHAPES = {  # q_heads, kv_heads, q_len, kv_len, head_dim
    "P512": (8, 8, 512, 512, 64),
    "P1024": (8, 2, 1024, 1024, 128),
    "P4096": (8, 2, 4096, 4096, 128),
    "ViT197": (12, 12, 197, 197, 64),
    "D1024": (32, 8, 1, 1024, 128),
    "D4096": (32, 8, 1, 4096, 128),
    "D32768": (32, 8, 1, 32768, 128),
    "Dmha512": (12, 12, 1, 512, 64),
}
DECODE = [f"{s}:{t}" for s in ("D1024", "D4096", "D32768") for t in ("f32", "f16", "bf16")]
DECODE_BAR = 2.5  # how much faster than the fastest other library decoding is to be
DEFAULT = "P512 P512c P1024 P1024c ViT197 D1024 D4096 Dmha512".split()
SAMPLED_ROWS = 64


def shape_sizes(name):
    """Sizes, causal, dtype of "P512c" or "D4096:f16"."""
    name, _, dtype = name.partition(":")
    causal = name.endswith("c")
    return SHAPES[name[:-1] if causal else name], causal, dtype or "f32"


def rounded(x, dtype):
    """The nearest numbers of a narrower type, as f32."""
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        bits = x.view(np.uint32)
        bits = bits + 0x7FFF + (bits >> 16 & 1)
        return (bits & 0xFFFF0000).view(np.float32)
    return x


def write_problem(folder, name):
    (heads, kv_heads, q_len, kv_len, dim), causal, dtype = shape_sizes(name)
    random = np.random.default_rng(1)
    sizes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len)}
    for array, size in sizes.items():
        data = random.standard_normal((*size, dim), dtype=np.float32)
        np.save(os.path.join(folder, array + ".npy"), rounded(data, dtype))
    with open(os.path.join(folder, "problem.json"), "w", encoding="utf-8") as file:
        json.dump({"causal": causal, "dtype": dtype}, file)


def oracle_error(folder, path):
    """The largest difference from f64, over a sample of rows."""
    q, k, v = (np.load(os.path.join(folder, n + ".npy")) for n in ("q", "k", "v"))
    with open(os.path.join(folder, "problem.json"), encoding="utf-8") as file:
        causal = json.load(file)["causal"]
    out = np.load(path)
    heads, q_len, dim = q.shape
    group, kv_len = heads // k.shape[0], k.shape[1]
    rows = np.unique(np.linspace(0, heads * q_len - 1, SAMPLED_ROWS).astype(int))
    worst = 0.0
    for row in rows:
        h, i = divmod(int(row), q_len)
        seen = i + 1 + kv_len - q_len if causal else kv_len
        keys = k[h // group, :seen].astype(np.float64)
        logits = keys @ q[h, i].astype(np.float64) / np.sqrt(dim)
        weights = np.exp(logits - logits.max())
        exact = weights @ v[h // group, :seen].astype(np.float64) / weights.sum()
        worst = max(worst, float(np.abs(out[h, i] - exact).max()))
    return worst


class Peer:
    """A library's process."""

    def __init__(self, name, environment):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, os.path.join(HERE, f"peer_{name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def ask(self, command):
        try:
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": "the process has ended"}

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def build_openblas(folder):
    """openblas.c as a shared object; None where there is no OpenBLAS to build with."""
    path = os.path.join(folder, "openblas.so")
    source = os.path.join(HERE, "openblas.c")
    flags = ["-std=gnu17", "-Ofast", "-march=native", "-shared", "-fPIC"]
    compiler = os.environ.get("CC", "gcc")
    done = subprocess.run(
        [compiler, *flags, source, "-o", path, "-lopenblas", "-lmvec", "-lm"], check=False
    )
    return path if done.returncode == 0 else None


def openblas_core():
    """Old versions of OpenBLAS do not know new cores and fall back to SSE3."""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        flags = file.read()
    return "SkylakeX" if "avx512f" in flags else "Haswell" if "avx2" in flags else None


def environment(name, build, folder, clock):
    single = {
        "BENCH_CLOCK": clock,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    if name == "qkv":
        single["QKV_LIBRARY"] = os.path.join(build, "dispatch", "libqkv.so")
    if name == "openblas":
        single["OPENBLAS_ATTENTION"] = build_openblas(folder) or ""
        if openblas_core() and "OPENBLAS_CORETYPE" not in os.environ:
            single["OPENBLAS_CORETYPE"] = openblas_core()
    return single


def limit_now(bench, name, seconds, clock):
    """What qkv-bench takes for its limit in this moment."""
    shape, _, dtype = name.partition(":")
    command = [bench, "--kernel", "qkv_attention", "--shape", shape, "--json", "--rounds", "1"]
    command += ["--dtype", dtype or "f32"]
    isas = subprocess.run([bench, "--list"], capture_output=True, text=True, check=True).stdout
    best = [line.split()[0] for line in isas.splitlines() if "selected: " in line]
    done = subprocess.run(
        [*command, "--isa", best[0], "--seconds", str(seconds), "--clock", clock],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def measure_shape(name, peers, bench, args, folder):
    rounds, seconds = args.rounds, args.seconds
    write_problem(folder, name)
    loaded, times, limits = {}, {}, []
    for peer in peers:
        answer = peer.ask(f"load {folder}")
        if answer.get("mode"):
            loaded[peer], times[peer] = answer, []
        else:
            reason = answer.get("error", "it does not offer this")
            print(f"{name}: without {peer.name}: {reason}", file=sys.stderr)
    for _ in range(rounds):
        limits.append(limit_now(bench, name, seconds, args.clock))
        for peer in loaded:
            times[peer].append(peer.ask(f"round {seconds}"))

    first = limits[0]
    flops = first["gflops"] * first["median_ns"]
    kv_bytes = first["gbps"] * first["median_ns"]
    limit_ns = statistics.median(r["fraction"] * r["median_ns"] for r in limits)
    results = []
    for peer, answer in loaded.items():
        output = os.path.join(folder, "out.npy")
        peer.ask(f"save {output}")
        median = statistics.median(t["median_ns"] for t in times[peer])
        results.append(
            {
                "shape": name,
                **answer,
                "median_ns": median,
                "min_ns": min(t["min_ns"] for t in times[peer]),
                "gflops": flops / median,
                "gbps": kv_bytes / median,
                "limit": first["limit"],
                "fraction": limit_ns / median,
                "max_error": oracle_error(folder, output),
                "rounds": rounds,
                "cpu": first["cpu"],
                "limit_rate": statistics.median(r["limit_rate"] for r in limits),
            }
        )
    return results


def print_shape(results):
    ours = next((r["median_ns"] for r in results if r["library"] == "qkv"), None)
    for r in results:
        ratio = f"{r['median_ns'] / ours:.2f}" if ours else "-"
        print(
            f"{r['shape']:11} {r['library']:18} {r['mode']:19} {r['median_ns'] / 1e6:8.3f} "
            f"{r['min_ns'] / 1e6:8.3f} {r['gflops']:6.1f} {r['gbps']:5.1f} {r['limit']:>5} "
            f"{100 * r['fraction']:4.0f}% {ratio:>6} {r['max_error']:7.1e}",
            flush=True,
        )


def print_ratios(results):
    """How much faster qkv is than the fastest other library; False if less than asked for."""
    enough = True
    print(f"{'shape':11} {'fastest other':18} {'way':19} {'by medians':>10} {'by minima':>9} {'bar':>4}")
    for shape in dict.fromkeys(r["shape"] for r in results):
        rows = [r for r in results if r["shape"] == shape]
        ours = [r for r in rows if r["library"] == "qkv"]
        others = [r for r in rows if r["library"] != "qkv"]
        if not ours or not others:
            continue
        best = min(others, key=lambda r: r["median_ns"])
        medians = best["median_ns"] / ours[0]["median_ns"]
        minima = min(r["min_ns"] for r in others) / ours[0]["min_ns"]
        bar = DECODE_BAR if shape in DECODE else None
        enough = enough and (bar is None or medians >= bar)
        print(
            f"{shape:11} {best['library']:18} {best['mode']:19} {medians:>10.2f} {minima:>9.2f} "
            f"{bar or '-':>4}"
        )
    return enough


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", help="build folder of qkv")
    parser.add_argument("--shape", action="append", help="default: " + ", ".join(DEFAULT))
    parser.add_argument("--decode", action="store_true", help="the shapes of one token, by type")
    parser.add_argument("--peer", action="append", choices=PEERS, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="of a library's turn")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="as qkv-bench")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    build = os.path.abspath(args.build)
    bench = os.path.join(build, "bench", "qkv-bench")

    results = []
    with tempfile.TemporaryDirectory() as folder:
        peers = [Peer(n, environment(n, build, folder, args.clock)) for n in args.peer or PEERS]
        print(
            f"{'shape':11} {'library':18} {'way':19} {'ms':>8} {'min':>8} {'GF/s':>6} {'GB/s':>5} "
            f"{'limit':>5} {'of it':>5} {'to qkv':>6} {'error':>7}"
        )
        for name in args.shape or (DECODE if args.decode else DEFAULT):
            rows = measure_shape(name, peers, bench, args, folder)
            print_shape(rows)
            results += rows
        for peer in peers:
            peer.end()
    enough = print_ratios(results)
    for library in sorted({f"{r['library']}: {r['detail']}" for r in results}):
        print(library)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
            file.write("\n")
    if not enough:
        sys.exit("below the bar")


if __name__ == "__main__":
    main()
