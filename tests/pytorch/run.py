#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""qkv_attention() beside PyTorch's scaled_dot_product_attention and flex_attention.

    run.py LIBRARY [CASES [SEED]]

Random problems, as far as PyTorch has the feature: causal order, masks that
hide or are added, query heads in groups, scales; by flex_attention windows,
softcap, ALiBi, documents, prefixes, and the log-sum-exp. PyTorch computes in
f64 from the same inputs, so that it is the truth; how far f32 may be off is
computed from the inputs as include/qkv/qkv.h says. Every instruction set of
this machine.
"""
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "onnx"))
import qkv  # noqa: E402

warnings.filterwarnings("ignore")  # that flex_attention is not compiled
U = 2.0**-24
KEY_BLOCK = 512
TYPES = {torch.float32: qkv.F32, torch.float16: qkv.F16, torch.bfloat16: qkv.BF16}
HALF_ULP = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def tensor_of(x):
    batch, head, row, _ = x.stride()
    return qkv.Tensor(x.data_ptr(), batch, head, row, TYPES[x.dtype], qkv.STRIDED)


class Problem:
    """Sizes and inputs at random; a feature is a function that sets fields."""

    def __init__(self, rng):
        self.rng = rng
        self.batch = int(rng.integers(1, 3))
        self.kv_heads = int(rng.integers(1, 3))
        self.q_heads = self.kv_heads * int(rng.choice([1, 1, 2, 4]))
        self.q_len = int(rng.choice([1, 2, 5, 17, 40]))
        self.kv_len = int(rng.integers(1, 90))
        self.dim, self.value_dim = (int(n) for n in rng.choice([4, 8, 16, 40, 64], 2))
        self.dtype = list(TYPES)[int(rng.choice([0, 0, 0, 1, 2]))]
        self.desc = qkv.Desc()
        self.scale = 1.0 / math.sqrt(self.dim)
        self.keep = []  # what the descriptor points to
        self.extra = 0.0  # error of a logit beyond that of its dot product

    def random(self, *shape):
        x = torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))
        return x.to(self.dtype)

    def make_inputs(self):
        # [batch][row][head][dim], as a projection leaves it, half of the time
        def tensor(heads, rows, dim):
            if self.rng.integers(0, 2):
                return self.random(self.batch, rows, heads, dim).transpose(1, 2)
            return self.random(self.batch, heads, rows, dim)

        self.q = tensor(self.q_heads, self.q_len, self.dim)
        self.k = tensor(self.kv_heads, self.kv_len, self.dim)
        self.v = tensor(self.kv_heads, self.kv_len, self.value_dim)

    def set_scale(self, *scales):
        if self.rng.integers(0, 3) == 0:
            self.scale = float(np.float32(self.rng.choice(scales)))
            self.desc.scale = self.scale
            self.desc.flags |= qkv.SCALE_SET

    def set_offsets(self, offset):
        """PyTorch counts positions of queries from the first key on."""
        array = np.full(self.batch, offset, np.int64)
        self.keep.append(array)
        self.desc.q_offsets = array.ctypes.data

    def set_mask(self, mask):
        shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        strides = (0,) * (4 - mask.dim()) + mask.stride()
        strides = [0 if n == 1 else s for n, s in zip(shape, strides)]
        kind = qkv.BOOL if mask.dtype == torch.bool else TYPES[mask.dtype]
        self.keep.append(mask)
        self.desc.mask = qkv.Mask(mask.data_ptr(), *strides, kind, qkv.STRIDED)

    def run(self, library):
        d, out_type = self.desc, self.dtype
        d.batch, d.q_heads, d.kv_heads = self.batch, self.q_heads, self.kv_heads
        d.q_len, d.kv_len = self.q_len, self.kv_len
        d.head_dim, d.value_dim = self.dim, self.value_dim
        d.query, d.key, d.value = tensor_of(self.q), tensor_of(self.k), tensor_of(self.v)
        out = torch.full((self.batch, self.q_heads, self.q_len, self.value_dim), math.nan,
                         dtype=out_type)
        lse = torch.full((self.batch, self.q_heads, self.q_len, 1), math.nan)
        d.out, d.lse = tensor_of(out), tensor_of(lse)
        library.attention(d)
        return out.double(), lse.double()[..., 0]

    def grouped(self, x):
        return x.double().repeat_interleave(self.q_heads // self.kv_heads, dim=1)

    def bounds(self, logits):
        """Of the outputs and of the log-sum-exps, from the exact logits."""
        q, k, v = self.q.double(), self.grouped(self.k), self.grouped(self.v)
        ds = (self.dim + 2) * U * abs(self.scale) * (q.abs() @ k.abs().transpose(2, 3))
        ds = ds + self.extra
        ds = torch.where(logits == -math.inf, 0.0, ds).amax(3)
        blocks = KEY_BLOCK + math.ceil(self.kv_len / KEY_BLOCK) + 2 + 32
        weights = torch.nan_to_num(torch.softmax(logits, 3))
        out = (weights @ v.abs()) * (torch.expm1(2 * ds) + blocks * U)[..., None] + 2.0**-126
        top = torch.nan_to_num(logits.amax(3), neginf=0.0).abs()
        lse = ds + blocks * U + 8 * U * top + 4 * U * math.log(self.kv_len + 1)
        return out, lse


def worst(got, want, bound, half_ulp):
    """The largest error as a part of what it may be; NaN and infinity must match."""
    if not torch.equal(got.isnan(), want.isnan()) or not torch.equal(got.isinf(), want.isinf()):
        return math.inf
    finite = want.isfinite()
    allowed = (bound + half_ulp * (want.abs() + bound) + half_ulp * 2.0**-14)[finite]
    return float(((got - want).abs()[finite] / allowed).max()) if finite.any() else 0.0


# ------------------------------------------- scaled_dot_product_attention


def sdpa_case(problem):
    """Causal order or a mask, groups of heads, scales."""
    p, rng = problem, problem.rng
    p.set_scale(0.05, 0.7)  # of 0 and below PyTorch takes the square root here
    p.make_inputs()
    kind = rng.choice(["plain", "causal", "bool", "float"])
    options = {"scale": p.scale, "enable_gqa": p.q_heads != p.kv_heads}
    added = torch.zeros(p.q_len, p.kv_len, dtype=torch.float64)
    if kind == "causal":
        p.desc.flags |= qkv.CAUSAL
        p.set_offsets(0)
        options["is_causal"] = True
        added = added.masked_fill(~torch.ones(p.q_len, p.kv_len).tril().bool(), -math.inf)
    elif kind in ("bool", "float"):
        shape = [(p.q_len, p.kv_len), (p.batch, 1, 1, p.kv_len),
                 (p.batch, p.q_heads, p.q_len, p.kv_len)][int(rng.integers(0, 3))]
        seen = torch.from_numpy(rng.random(shape) < 0.7)
        seen[..., 0] = True  # PyTorch's rows without any key have meant different things
        mask = seen
        if kind == "float":
            mask = torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
            mask = mask.masked_fill(~seen, -math.inf)
        p.set_mask(mask)
        options["attn_mask"] = mask if kind == "bool" else mask.double()
        added = added.masked_fill(~seen, -math.inf) if kind == "bool" else mask.double()
    want = F.scaled_dot_product_attention(p.q.double(), p.k.double(), p.v.double(), **options)
    logits = p.scale * (p.q.double() @ p.grouped(p.k).transpose(2, 3)) + added
    if kind == "float":  # the header's terms for an added number: 2 |mask| + |t|
        finite = torch.nan_to_num(added, neginf=0.0)
        p.extra = U * (2 * finite.abs() + torch.nan_to_num(logits, neginf=0.0).abs())
    return kind, want, torch.logsumexp(logits, 3), logits


# ---------------------------------------------------------- flex_attention


def positions(p):
    rows = torch.arange(p.q_len, dtype=torch.float64)[:, None]
    return rows, torch.arange(p.kv_len, dtype=torch.float64)[None, :]


def sliding_window(p):
    left, right = (int(n) for n in p.rng.integers(0, 20, 2))
    p.desc.flags |= qkv.WINDOW
    p.desc.window_left, p.desc.window_right = left, right
    return None, lambda b, h, i, j: (i - j <= left) & (j - i <= right)


def causal(p):
    p.desc.flags |= qkv.CAUSAL
    return None, lambda b, h, i, j: j <= i


def documents(p):
    """Keys and queries of one document see each other: a mask for qkv."""
    ids = torch.from_numpy(np.sort(p.rng.integers(0, 3, p.q_len + p.kv_len)))
    of_keys, of_queries = ids[:p.kv_len].clone(), ids[:p.q_len].clone()
    p.set_mask((of_queries[:, None] == of_keys[None, :]).contiguous())
    return None, lambda b, h, i, j: of_queries[i] == of_keys[j]


def prefix(p):
    """All of a prompt, and causal order behind it."""
    length = int(p.rng.integers(0, p.kv_len + 1))
    rows, keys = positions(p)
    p.set_mask(((keys <= rows) | (keys < length)).contiguous())
    return None, lambda b, h, i, j: (j <= i) | (j < length)


def softcap(p):
    cap = float(p.rng.choice([0.5, 5.0, 30.0]))
    p.desc.softcap = cap
    p.extra = p.extra + 9 * U * cap  # 7 u |t| of the capped logit, 2 u of its argument
    return lambda s, b, h, i, j: cap * torch.tanh(s / cap), None


def alibi(p):
    slopes = np.array([2.0 ** (-8.0 * (h + 1) / p.q_heads) for h in range(p.q_heads)], np.float32)
    p.keep.append(slopes)
    p.desc.slopes = slopes.ctypes.data
    of_head = torch.from_numpy(slopes.astype(np.float64))
    reach = float(slopes.max()) * (p.q_len + p.kv_len)
    p.extra = p.extra + U * (3 * reach + reach + 40)
    return lambda s, b, h, i, j: s + of_head[h] * (j - i), None


def flex_case(problem):
    """A change of the logits, a rule that hides, or one of each."""
    p, rng = problem, problem.rng
    p.dtype = torch.float32
    p.value_dim = p.dim
    p.set_scale(0.0, -0.3, 0.7)
    p.make_inputs()
    p.set_offsets(0)
    changes = [None, softcap, alibi]
    rules = [None, sliding_window, causal, documents, prefix]
    change, rule = changes[int(rng.integers(0, 3))], rules[int(rng.integers(0, 5))]
    score_mod = change(p)[0] if change else None
    mask_mod = rule(p)[1] if rule else None

    def score(s, b, h, i, j):
        s = score_mod(s, b, h, i, j) if score_mod else s
        return torch.where(mask_mod(b, h, i, j), s, -math.inf) if mask_mod else s

    want, lse = flex_attention(p.q.double(), p.k.double(), p.v.double(), score_mod=score,
                               scale=p.scale, enable_gqa=p.q_heads != p.kv_heads, return_lse=True)
    logits = p.scale * (p.q.double() @ p.grouped(p.k).transpose(2, 3))
    rows, keys = (x.long() for x in positions(p))
    for h in range(p.q_heads):
        logits[:, h] = score(logits[:, h], 0, h, rows, keys)
    # A row that sees nothing is NaN or 0 there, depending on the version; 0 here.
    empty = logits.amax(3) == -math.inf
    want = torch.where(empty[..., None], 0.0, want)
    lse = torch.where(empty, -math.inf, lse)
    name = " and ".join(f.__name__ for f in (change, rule) if f) or "plain"
    return f"flex, {name}", want, lse, logits


def main():
    library = qkv.Library(sys.argv[1])
    cases = int(sys.argv[2]) if len(sys.argv) > 2 else 400
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    isas, most, failed = library.isas(), {}, 0
    for seed in range(first, first + cases):
        case = sdpa_case if seed % 2 else flex_case
        problem = Problem(np.random.default_rng(seed))
        name, want, want_lse, logits = case(problem)
        out_bound, lse_bound = problem.bounds(logits)
        for isa in isas:
            library.select(isa)
            out, lse = problem.run(library)
            error = max(worst(out, want, out_bound, HALF_ULP[problem.dtype]),
                        worst(lse, want_lse, lse_bound, 0.0))
            most[name] = max(most.get(name, 0.0), error)
            if not error <= 1.0:
                failed += 1
                print(f"seed {seed}, {name}, {isa}: {error:.3g} of the bound")
    for name in sorted(most):
        print(f"{most[name]:8.3g} of the bound at most: {name}")
    print(f"PyTorch {torch.__version__}: {cases} cases on {', '.join(isas)}, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
