#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The Attention cases among the backend node tests of the package 'onnx'.

    run.py LIBRARY [CASE...]

Every case is described to qkv_attention() by one descriptor, as
kernels/SEMANTICS.md maps the operator's attributes, and run on every
instruction set of this machine. Only the appending of new keys to a past
cache is done here: qkv takes a cache as it is.
"""
import sys
import warnings

import ml_dtypes
import numpy as np

import qkv

warnings.filterwarnings("ignore")

DTYPES = {np.dtype(np.float32): qkv.F32, np.dtype(np.float16): qkv.F16,
          np.dtype(ml_dtypes.bfloat16): qkv.BF16, np.dtype(np.bool_): qkv.BOOL}
STAGES = {0: qkv.SCALED, 1: qkv.CAPPED, 2: qkv.MASKED, 3: qkv.SOFTMAX}

# The expected values are made in the tensors' own type, 16-bit ones too, step
# by step; qkv rounds once, at the end. What the reference loses on the way:
# the weights and the output are rounded (u each), and a logit's error
# changes its weight by as much. Logits of the cases are below 4.
UNIT = {np.dtype(np.float32): 2.0**-24, np.dtype(np.float16): 2.0**-11,
        np.dtype(ml_dtypes.bfloat16): 2.0**-8}


def tensor_of(array, heads):
    """A descriptor of [batch][head][row][dim], or of [batch][row][head * dim]."""
    step = array.itemsize
    if array.ndim == 3:
        batch, row, _ = (s // step for s in array.strides)
        head = array.shape[2] // heads
    else:
        batch, head, row, _ = (s // step for s in array.strides)
    return qkv.Tensor(array.ctypes.data, batch, head, row, DTYPES[array.dtype], qkv.STRIDED)


def mask_of(mask):
    """The strides of a mask whose missing and single axes are repeated."""
    shape = (1,) * (4 - mask.ndim) + mask.shape
    strides = (0,) * (4 - mask.ndim) + tuple(s // mask.itemsize for s in mask.strides)
    strides = [0 if n == 1 else s for n, s in zip(shape, strides)]
    return qkv.Mask(mask.ctypes.data, *strides, DTYPES[mask.dtype], qkv.STRIDED)


def appended(past, new, heads):
    """Past keys or values with new ones behind them, [batch][head][row][dim]."""
    if new.ndim == 3:
        new = new.reshape(*new.shape[:2], heads, -1).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(np.concatenate((past, new), axis=2))


class Problem:
    """One node's inputs as a descriptor; 'keep' holds what it points to."""

    def __init__(self, inputs, attributes, qk_output):
        query, key, value = inputs["Q"], inputs["K"], inputs["V"]
        a = attributes
        self.d = d = qkv.Desc(q_heads=a.get("q_num_heads", query.shape[1]),
                              kv_heads=a.get("kv_num_heads", key.shape[1]))
        self.present = []
        past = 0
        if "past_key" in inputs:
            past = inputs["past_key"].shape[2]
            key = appended(inputs["past_key"], key, d.kv_heads)
            value = appended(inputs["past_value"], value, d.kv_heads)
            self.present = [key, value]
        d.batch, d.q_len = query.shape[0], query.shape[-2]
        d.kv_len = key.shape[-2]
        d.head_dim = query.shape[-1] // (d.q_heads if query.ndim == 3 else 1)
        d.value_dim = value.shape[-1] // (d.kv_heads if value.ndim == 3 else 1)
        shape = (*query.shape[:2], d.q_heads * d.value_dim)
        if query.ndim == 4:
            shape = (*query.shape[:3], d.value_dim)
        self.out = np.full(shape, np.nan, dtype=query.dtype)
        self.weights = np.full((d.batch, d.q_heads, d.q_len, d.kv_len), np.nan, dtype=np.float32)
        d.query, d.key = tensor_of(query, d.q_heads), tensor_of(key, d.kv_heads)
        d.value, d.out = tensor_of(value, d.kv_heads), tensor_of(self.out, d.q_heads)
        if qk_output:
            d.weights = tensor_of(self.weights, d.q_heads)
            d.weights_stage = STAGES[a.get("qk_matmul_output_mode", 0)]
        self.lengths(inputs, past)
        self.options(a)
        self.keep = [query, key, value, inputs]

    def lengths(self, inputs, past):
        """Where keys end and queries stand: after the past, or at the end of the padded."""
        d, mask = self.d, inputs.get("attn_mask")
        lens = np.full(d.batch, d.kv_len, dtype=np.int64)
        offsets = np.full(d.batch, past, dtype=np.int64)
        if "nonpad_kv_seqlen" in inputs:
            lens = inputs["nonpad_kv_seqlen"].astype(np.int64)
            offsets = lens - d.q_len
        if mask is not None:
            d.mask = mask_of(mask)
            if mask.shape[-1] != 1: # keys beyond a short mask are hidden
                lens = np.minimum(lens, mask.shape[-1])
        self.arrays = [lens, offsets]
        d.kv_lens, d.q_offsets = lens.ctypes.data, offsets.ctypes.data

    def options(self, a):
        d = self.d
        d.flags = qkv.CAUSAL if a.get("is_causal", 0) else 0
        d.softcap = a.get("softcap", 0.0)
        if "scale" in a:
            d.flags |= qkv.SCALE_SET
            d.scale = a["scale"]
        left, right = a.get("left_window_size", -1), a.get("right_window_size", -1)
        if left >= 0 or right >= 0:
            d.flags |= qkv.WINDOW
            d.window_left, d.window_right = left, right


def attributes_of(node):
    from onnx import helper
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def check(what, got, want, case):
    """Within the case's tolerance, or what the reference loses in 16 bits.

    It rounds weights and outputs, a unit each of the largest value, and logits,
    whose error counts twice: those of 8 products of numbers from 0 to 1 are
    below 8 / sqrt(8) = 2.9. The largest difference seen is 1.3 units.
    """
    got, want = got.astype(np.float64), np.asarray(want)
    unit = UNIT[want.dtype]
    want = want.astype(np.float64)
    finite = np.isfinite(want)
    scale = np.max(np.abs(want[finite]), initial=0.0)
    allowed = case.atol + case.rtol * np.abs(np.where(finite, want, 0))
    if unit > 2.0**-24:
        allowed = np.maximum(allowed, (2 + 2 * 2.9) * unit * scale)
    with np.errstate(invalid="ignore"):
        right = np.where(finite, np.abs(got - want) <= allowed,
                         (got == want) | (np.isnan(got) & np.isnan(want)))
    if got.shape != want.shape or not right.all():
        at = tuple(np.argwhere(~right)[0])
        raise AssertionError(f"{what}{list(map(int, at))} is {got[at]}, expected {want[at]}")


def run_case(library, case):
    node = case.model.graph.node[0]
    given, expected = case.data_sets[0]
    inputs = {n: np.ascontiguousarray(x) for n, x in zip([n for n in node.input if n], given)}
    # By place, whatever a model calls them.
    roles = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    inputs = {role: inputs[name] for role, name in zip(roles, node.input) if name}
    outputs = dict(zip([n for n in node.output if n], expected))
    names = list(node.output) + [""] * (4 - len(node.output))
    for isa in library.isas():
        library.select(isa)
        p = Problem(inputs, attributes_of(node), bool(names[3]))
        library.attention(p.d)
        check(f"{isa}: Y", p.out, outputs[names[0]], case)
        for name, present in zip(names[1:3], p.present):
            if name:
                check(f"{isa}: {name}", present, outputs[name], case)
        if names[3]:
            check(f"{isa}: qk_matmul_output", p.weights, outputs[names[3]], case)


def main():
    from onnx.backend.test.case.node import collect_testcases
    library = qkv.Library(sys.argv[1])
    wanted = sys.argv[2:]
    passed = failed = 0
    for case in collect_testcases("Attention"):
        # Others of that name are the operator written out in simpler ones.
        if len(case.model.graph.node) != 1 or case.model.graph.node[0].op_type != "Attention":
            continue
        if wanted and case.name not in wanted:
            continue
        try:
            run_case(library, case)
            passed += 1
        except (AssertionError, RuntimeError) as error:
            failed += 1
            print(f"{case.name}: {error}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
