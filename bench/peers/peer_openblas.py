# SPDX-License-Identifier: MIT
"""OpenBLAS with a softmax between two products: openblas.c, built by run.py."""
import ctypes
import os

import numpy as np

from worker import serve

LIBRARY = ctypes.CDLL(os.environ["OPENBLAS_ATTENTION"])
LIBRARY.openblas_get_corename.restype = ctypes.c_char_p
LIBRARY.openblas_get_config.restype = ctypes.c_char_p
LIBRARY.openblas_set_num_threads(1)
assert LIBRARY.openblas_get_num_threads() == 1


def make_modes(problem):
    q, k, v = problem.query, problem.key, problem.value
    if q.shape[2] != v.shape[2] or problem.dtype != "f32":
        return {}
    out = np.zeros_like(q)
    scores = np.zeros(problem.group * q.shape[1] * k.shape[1], np.float32)
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (q, k, v, out, scores)]
    sizes = (q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2])
    arguments = [*pointers, *map(ctypes.c_int64, sizes), ctypes.c_int(problem.causal)]

    def run(keep=(problem, scores)):
        LIBRARY.attention(*arguments)
        return out

    return {"sgemm": run}


def describe():
    version = LIBRARY.openblas_get_config().decode().split()[1]
    return {"library": f"OpenBLAS {version}", "detail": LIBRARY.openblas_get_corename().decode()}


if __name__ == "__main__":
    serve(make_modes, lambda out: out, describe)
