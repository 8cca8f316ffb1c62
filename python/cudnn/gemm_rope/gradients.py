"""The gradients of GEMM + RoPE's operator: the rotation back, as the kernels' reference has it, then two products."""

from __future__ import annotations

from typing import Any

from cudnn.errors import make_error
from cudnn.gemm import reference
from cudnn_kernels.epilogue import Rotate


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Saves tensors for the backward pass, or the reason why the call has no gradient."""
    a, b, cos, sin, positions, head, rotary, begin, end, interleaved, inverse, alpha, *_ = inputs
    ctx.save_for_backward(a, b, cos, sin, positions)
    ctx.rotate = Rotate(
        head,
        rotary or head,
        interleaved=interleaved,
        inverse=not inverse,
        begin=begin,
        end=end,
        positions="" if positions is None else "positions",
    )
    ctx.alpha, ctx.count = alpha, len(inputs)
    narrow = [x.dtype for x in (a, output[0]) if x.element_size() == 1]
    ctx.reason = f"a of {a.dtype} and c of {output[0].dtype}" if narrow else ""


def backward(ctx: Any, d_c: Any, d_sfc: Any) -> tuple[Any, ...]:
    """Gradients of ``a`` and ``b``. The angles have none.

    Raises:
        RuntimeError: a type has 8 bits or fewer.
    """
    if ctx.reason:
        raise make_error(RuntimeError, "cudnn::gemm_rope", "gradient", ctx.reason, "a and c of 16 or 32 bits")
    a, b, cos, sin, positions = ctx.saved_tensors
    values = {"x": d_c.float()}
    reference.rotate(ctx.rotate, values, {"cos": cos, "sin": sin, "positions": positions})
    gradient = (ctx.alpha * values["x"]).to(a.dtype).permute(2, 0, 1)
    d_a = (gradient @ b.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[0] else None
    d_b = (gradient.mT @ a.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[1] else None
    return d_a, d_b, *[None] * (ctx.count - 2)
