# SPDX-License-Identifier: MIT
"""qkv itself, through its shared library: the path is in QKV_LIBRARY."""
import ctypes
import os

import numpy as np

from worker import serve


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 3),
        ("dtype", ctypes.c_int32),
        ("flags", ctypes.c_int32),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("batch", ctypes.c_int64),
        ("q_heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("q_len", ctypes.c_int64),
        ("kv_len", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("query", Tensor),
        ("key", Tensor),
        ("value", Tensor),
        ("out", Tensor),
        ("lse", Tensor),
    ]


LIBRARY = ctypes.CDLL(os.environ["QKV_LIBRARY"])
LIBRARY.qkv_isa_name.restype = ctypes.c_char_p
LIBRARY.qkv_strerror.restype = ctypes.c_char_p
CAUSAL = 1


def must(status):
    if status != 0:
        raise RuntimeError(LIBRARY.qkv_strerror(status).decode())


DTYPES = {"f32": 0, "f16": 1, "bf16": 2}


def narrowed(x, dtype):
    """The array as its type stores it; every element fits."""
    if dtype == "f16":
        return x.astype(np.float16)
    if dtype == "bf16":
        return (x.view(np.uint32) >> 16).astype(np.uint16)
    return x


def to_rows(out):
    """What the library has written, as f32: 16 bits that are no f16 are a bf16."""
    if out.dtype == np.uint16:
        return (out.astype(np.uint32) << 16).view(np.float32)
    return out


def aligned(size):
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def make_modes(problem):
    arrays = (problem.query, problem.key, problem.value)
    q, k, v = (narrowed(x, problem.dtype) for x in arrays)
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]), q.dtype)
    tensors = (Tensor(x.ctypes.data, dtype=DTYPES[problem.dtype]) for x in (q, k, v, out))
    query, key, value, result = tensors
    desc = Attention(
        size=ctypes.sizeof(Attention),
        flags=CAUSAL if problem.causal else 0,
        q_heads=q.shape[0],
        kv_heads=k.shape[0],
        q_len=q.shape[1],
        kv_len=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        query=query,
        key=key,
        value=value,
        out=result,
    )
    size = ctypes.c_size_t()
    reference = ctypes.byref(desc)
    must(LIBRARY.qkv_attention_scratch_size(reference, ctypes.c_int64(1), ctypes.byref(size)))
    scratch = aligned(size.value)
    address = ctypes.c_void_p(scratch.ctypes.data)

    def run(keep=(q, k, v, scratch, desc)):
        must(LIBRARY.qkv_attention(reference, address, size))
        return out

    return {"qkv_attention": run}


def describe():
    return {"library": "qkv", "detail": LIBRARY.qkv_isa_name().decode()}


if __name__ == "__main__":
    serve(make_modes, to_rows, describe)
