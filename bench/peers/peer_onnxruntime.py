# SPDX-License-Identifier: MIT
"""ONNX Runtime: its operators for attention, inputs and outputs bound once."""
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from worker import Problem, serve


def session(node, inputs, outputs, domain, opset):
    """A model of one node; 'inputs' are arrays, 'outputs' shapes."""
    kinds = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.float16): TensorProto.FLOAT16,
        np.dtype(np.int32): TensorProto.INT32,
    }
    kind = kinds[inputs["q"].dtype]
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(n, kinds[x.dtype], x.shape) for n, x in inputs.items()],
        [helper.make_tensor_value_info(n, kind, s) for n, s in outputs.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    if domain:
        opsets.append(helper.make_opsetid(domain, 1))
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def bound(node, inputs, outputs, domain="", opset=23, share=()):
    """A function that runs the node; 'share' binds an output to an input's memory."""
    run = session(node, inputs, outputs, domain, opset)
    binding = run.io_binding()
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(x) for n, x in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    shared = dict(share)
    results = {}
    for name, shape in outputs.items():
        if name in shared:
            results[name] = values[shared[name]]
        else:
            zeros = np.zeros(shape, inputs["q"].dtype)
            results[name] = onnxruntime.OrtValue.ortvalue_from_numpy(zeros)
        binding.bind_ortvalue_output(name, results[name])

    def call():
        run.run_with_iobinding(binding)
        return results["o"]

    return call


def joined(x):
    """[heads][rows][dim] -> [1][rows][heads * dim]"""
    return np.ascontiguousarray(x.transpose(1, 0, 2).reshape(1, x.shape[1], -1))


def standard(p):
    """ai.onnx Attention of opset 23."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["o"], is_causal=int(p.causal))
    inputs = {"q": p.query[None], "k": p.key[None], "v": p.value[None]}
    return bound(node, inputs, {"o": (1, *p.query.shape)})


def multi_head(p):
    """com.microsoft MultiHeadAttention; keys and values repeated outside the timing."""
    heads = p.query.shape[0]
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=heads,
        unidirectional=int(p.causal),
    )
    repeated = (np.repeat(x, p.group, axis=0) for x in (p.key, p.value))
    inputs = dict(zip("qkv", (joined(p.query), *(joined(x) for x in repeated))))
    out = (1, p.query.shape[1], heads * p.query.shape[2])
    return bound(node, inputs, {"o": out}, "com.microsoft", 17)


def grouped(p):
    """com.microsoft GroupQueryAttention, causal; a cache in place, its last keys new."""
    heads, q_len, dim = p.query.shape
    kv_heads, kv_len, _ = p.key.shape
    node = helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "last", "total"],
        ["o", "present_k", "present_v"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
    )
    cache = (1, kv_heads, kv_len, dim)
    inputs = {
        "q": joined(p.query),
        "k": joined(p.key[:, kv_len - q_len :]),
        "v": joined(p.value[:, kv_len - q_len :]),
        "past_k": p.key[None].copy(),
        "past_v": p.value[None].copy(),
        "last": np.array([kv_len - 1], np.int32),
        "total": np.array([kv_len], np.int32),
    }
    outputs = {"o": (1, q_len, heads * dim), "present_k": cache, "present_v": cache}
    share = (("present_k", "past_k"), ("present_v", "past_v"))
    return bound(node, inputs, outputs, "com.microsoft", 17, share)


def make_modes(problem):
    """Those of its operators that take the shape and the type; none of them bf16."""
    if problem.dtype == "bf16":
        return {}
    if problem.dtype == "f16":
        narrow = (x.astype(np.float16) for x in (problem.query, problem.key, problem.value))
        problem = Problem(*narrow, problem.causal, problem.dtype)
    q_len, kv_len = problem.query.shape[1], problem.key.shape[1]
    ways = {}
    if not problem.causal or q_len == kv_len:
        ways["Attention"] = standard
        ways["MultiHeadAttention"] = multi_head
    if q_len == 1 or problem.causal:
        ways["GroupQueryAttention"] = grouped
    HEADS[0] = problem.query.shape[0]
    modes = {}
    for name, way in ways.items():
        try:
            modes[name] = way(problem)
        except Exception as error:  # no such operator, or not of this type
            print(f"{name}, {problem.dtype}: {error}", file=sys.stderr)
    return modes


HEADS = [1]


def to_rows(value):
    out = value.numpy()[0]
    if out.ndim == 3:
        return out
    return out.reshape(out.shape[0], HEADS[0], -1).transpose(1, 0, 2)


def describe():
    return {
        "library": f"ONNX Runtime {onnxruntime.__version__}",
        "detail": f"onnx {onnx.__version__}",
    }


if __name__ == "__main__":
    serve(make_modes, to_rows, describe)
