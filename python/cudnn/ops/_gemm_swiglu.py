# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.errors import refusal
from cudnn.gemm_swiglu.api import GemmSwiglu, gemm_swiglu_wrapper, wrapper_results
from cudnn.gemm_swiglu.reference import swiglu_backward
from cudnn.ops._gemm import operator


@operator(
    GemmSwiglu,
    ("ab12", "c", "sfc", "amax"),
    lambda o: wrapper_results(o["a"], o["sfa"], o["c_major"], o["ab12_dtype"], o["c_dtype"]),
)
def gemm_swiglu(
    a: torch.Tensor,
    b: torch.Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: torch.dtype | None = torch.float32,
    c_dtype: torch.dtype | None = torch.float16,
    sfa: torch.Tensor | None = None,
    sfb: torch.Tensor | None = None,
    norm_const: torch.Tensor | None = None,
    sf_vec_size: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A GEMM and the SwiGLU of its columns: (ab12, c, sfc, amax).

    Shapes, types and errors as those of :class:`cudnn.GemmSwiglu`. A result that there is not has no elements.
    ``c_dtype=None``: the type of ``a``.
    Gradients flow to ``a`` and ``b`` of 16 or 32 bits, from ``ab12``, which must be stored, and ``c``.
    """
    options = {"sfa_tensor": sfa, "sfb_tensor": sfb, "norm_const_tensor": norm_const, "sf_vec_size": sf_vec_size}
    results: Any = gemm_swiglu_wrapper(a, b, alpha, c_major, ab12_dtype, c_dtype, **options)
    return results


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    a, b, alpha, _, ab12_dtype, _, sfa, *_ = inputs
    ctx.save_for_backward(a, b, output[0])
    ctx.alpha, ctx.reason = alpha, ""
    if ab12_dtype is None:
        ctx.reason = "ab12_dtype=None"
    elif sfa is not None or a.element_size() == 1 or output[2].numel():
        ctx.reason = f"operands of {a.dtype} and c of {output[1].dtype}"


def _backward(ctx: Any, d_ab12: Any, d_c: Any, d_sfc: Any, d_amax: Any) -> tuple[Any, ...]:
    if ctx.reason:
        allowed = "a stored ab12, operands and c of 16 or 32 bits"
        raise RuntimeError(refusal("cudnn::gemm_swiglu", "gradient", ctx.reason, allowed))
    a, b, ab12 = ctx.saved_tensors
    gradient = torch.zeros_like(ab12, dtype=torch.float32)
    if d_c is not None:
        gradient = swiglu_backward(ab12.float(), d_c.float())
    if d_ab12 is not None:
        gradient = gradient + d_ab12
    gradient = (ctx.alpha * gradient).to(a.dtype).permute(2, 0, 1)
    d_a = (gradient @ b.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[0] else None
    d_b = (gradient.mT @ a.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[1] else None
    return d_a, d_b, *[None] * 8


gemm_swiglu.register_autograd(_backward, setup_context=_setup)
