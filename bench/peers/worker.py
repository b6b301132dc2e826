# SPDX-License-Identifier: MIT
"""What every peer's process does: read the problem, take its turns, write its output.

A peer is a script that calls serve() with a function that takes a Problem
and returns its modes: a dictionary of name -> function without arguments
that computes the attention once and returns an object, from which the
second function makes the output as [heads][queries][value_dim].
"""
import json
import os
import sys
import time
from dataclasses import dataclass

import numpy as np


@dataclass
class Problem:
    query: np.ndarray  # [q_heads][q_len][head_dim]
    key: np.ndarray  # [kv_heads][kv_len][head_dim]
    value: np.ndarray
    causal: bool
    dtype: str  # f32, f16 or bf16: the arrays are f32, of numbers that this type has

    @property
    def group(self):
        return self.query.shape[0] // self.key.shape[0]


def load(folder):
    with open(os.path.join(folder, "problem.json"), encoding="utf-8") as file:
        about = json.load(file)
    arrays = (np.load(os.path.join(folder, name + ".npy")) for name in ("q", "k", "v"))
    return Problem(*arrays, about["causal"], about["dtype"])


# The process's own time counts its helpers too, and does not count other programs.
CLOCK = time.process_time_ns if os.environ.get("BENCH_CLOCK") == "cpu" else time.perf_counter_ns


def sample(run, seconds):
    """The median and the fastest time of one run in nanoseconds."""
    times = []
    end = time.perf_counter_ns() + seconds * 1e9
    while not times or time.perf_counter_ns() < end:
        start = CLOCK()
        run()
        times.append(CLOCK() - start)
    times.sort()
    return times[len(times) // 2], times[0]


def threads_alive():
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else None


def serve(make_modes, to_rows, describe):
    """One command a line on stdin, one JSON object a line on stdout."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers
    modes, chosen = {}, None
    for line in sys.stdin:
        command, *rest = line.split()
        answer = {}
        try:
            if command == "load":
                modes = make_modes(load(rest[0]))
                chosen = None
                if modes:  # the fastest way that this library offers
                    chosen = min(modes, key=lambda name: sample(modes[name], 0.2)[0])
                answer = {"mode": chosen, "threads": threads_alive(), **describe()}
            elif command == "round":
                median, fastest = sample(modes[chosen], float(rest[0]))
                answer = {"median_ns": median, "min_ns": fastest}
            elif command == "save":
                rows = to_rows(modes[chosen]())
                np.save(rest[0], np.ascontiguousarray(rows, dtype=np.float32))
        except Exception as error:  # the others go on without this one
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
