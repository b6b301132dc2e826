#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""qkv beside other libraries: one thread each, identical inputs, turns in rounds.

    bench/peers/run.py BUILD [--shape P512]... [--rounds 5] [--json FILE]

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
DEFAULT = "P512 P512c P1024 P1024c ViT197 D1024 D4096 Dmha512".split()
SAMPLED_ROWS = 64


def shape_sizes(name):
    causal = name.endswith("c")
    return SHAPES[name[:-1] if causal else name], causal


def write_problem(folder, name):
    (heads, kv_heads, q_len, kv_len, dim), causal = shape_sizes(name)
    random = np.random.default_rng(1)
    sizes = {"q": (heads, q_len), "k": (kv_heads, kv_len), "v": (kv_heads, kv_len)}
    for array, size in sizes.items():
        data = random.standard_normal((*size, dim), dtype=np.float32)
        np.save(os.path.join(folder, array + ".npy"), data)
    with open(os.path.join(folder, "problem.json"), "w", encoding="utf-8") as file:
        json.dump({"causal": causal}, file)


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
    command = [bench, "--kernel", "qkv_attention", "--shape", name, "--json", "--rounds", "1"]
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
            f"{r['shape']:8} {r['library']:18} {r['mode']:19} {r['median_ns'] / 1e6:8.3f} "
            f"{r['min_ns'] / 1e6:8.3f} {r['gflops']:6.1f} {r['gbps']:5.1f} {r['limit']:>5} "
            f"{100 * r['fraction']:4.0f}% {ratio:>6} {r['max_error']:7.1e}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", help="build folder of qkv")
    parser.add_argument("--shape", action="append", help="default: " + ", ".join(DEFAULT))
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
            f"{'shape':8} {'library':18} {'way':19} {'ms':>8} {'min':>8} {'GF/s':>6} {'GB/s':>5} "
            f"{'limit':>5} {'of it':>5} {'to qkv':>6} {'error':>7}"
        )
        for name in args.shape or DEFAULT:
            rows = measure_shape(name, peers, bench, args, folder)
            print_shape(rows)
            results += rows
        for peer in peers:
            peer.end()
    for library in sorted({f"{r['library']}: {r['detail']}" for r in results}):
        print(library)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
