# SPDX-License-Identifier: MIT
"""PyTorch: scaled_dot_product_attention."""
import torch

from worker import serve

torch.set_num_threads(1)
torch.set_num_interop_threads(1)
torch.set_grad_enabled(False)


def make_modes(problem):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[problem.dtype]
    arrays = (problem.query, problem.key, problem.value)
    q, k, v = (torch.from_numpy(x)[None].to(dtype) for x in arrays)
    causal = problem.causal
    if causal and q.shape[2] != k.shape[2]:
        return {}  # its causal mask begins at the other corner
    attend = torch.nn.functional.scaled_dot_product_attention

    # Keys and values repeated for every query head, outside the timing.
    many_k, many_v = (x.repeat_interleave(problem.group, dim=1).contiguous() for x in (k, v))
    modes = {"repeated": lambda: attend(q, many_k, many_v, is_causal=causal)}
    if problem.group > 1:
        modes["enable_gqa"] = lambda: attend(q, k, v, is_causal=causal, enable_gqa=True)
    return modes


def describe():
    return {
        "library": f"PyTorch {torch.__version__.split('+')[0]}",
        "detail": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread",
    }


if __name__ == "__main__":
    serve(make_modes, lambda out: out[0].float().numpy(), describe)
