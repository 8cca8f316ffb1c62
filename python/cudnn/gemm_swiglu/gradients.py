"""The gradients of GEMM + SwiGLU's operator: the activation's in PyTorch, then two products."""

from __future__ import annotations

from typing import Any

from cudnn.errors import make_error
from cudnn.lazy import torch

BLOCK = 32  # columns of one role


def swiglu_backward(ab12: Any, gradient: Any, concat_glu: bool = False, gate_first: bool = False) -> Any:
    """The gradient (m, n, l) of ``ab12``, from that of the SwiGLU of its columns."""
    block = gradient.shape[1] if concat_glu else BLOCK
    first, second = ab12.unflatten(1, (-1, 2, block)).unbind(2)
    up, gate = (second, first) if gate_first else (first, second)
    gradient = gradient.unflatten(1, (-1, block))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    gradients = [gradient * silu, gradient * up * (sigmoid + silu * (1 - sigmoid))]
    return torch.stack(gradients[::-1] if gate_first else gradients, dim=2).flatten(1, 3)


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """Saves tensors for the backward pass, or the reason why the call has no gradient."""
    a, b, alpha, _, ab12_dtype, _, sfa, *_ = inputs
    ctx.save_for_backward(a, b, output[0])
    ctx.alpha, ctx.count, ctx.reason = alpha, len(inputs), ""
    layout, order, _ = inputs[-3:]
    ctx.concat_glu, ctx.gate_first = layout == "concatenated", order == "gate_up"
    if ab12_dtype is None:
        ctx.reason = "ab12_dtype=None"
    elif sfa is not None or a.element_size() == 1 or output[2].numel():
        ctx.reason = f"operands of {a.dtype} and c of {output[1].dtype}"


def backward(ctx: Any, d_ab12: Any, d_c: Any, d_sfc: Any, d_amax: Any) -> tuple[Any, ...]:
    """Gradients of ``a`` and ``b``.

    Raises:
        RuntimeError: ab12 was not stored, or a type has 8 bits or fewer.
    """
    if ctx.reason:
        allowed = "a stored ab12, operands and c of 16 or 32 bits"
        raise make_error(RuntimeError, "cudnn::gemm_swiglu", "gradient", ctx.reason, allowed)
    a, b, ab12 = ctx.saved_tensors
    gradient = torch.zeros_like(ab12, dtype=torch.float32)
    if d_c is not None:
        gradient = swiglu_backward(ab12.float(), d_c.float(), ctx.concat_glu, ctx.gate_first)
    if d_ab12 is not None:
        gradient = gradient + d_ab12
    gradient = (ctx.alpha * gradient).to(a.dtype).permute(2, 0, 1)
    d_a = (gradient @ b.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[0] else None
    d_b = (gradient.mT @ a.permute(2, 0, 1)).permute(1, 2, 0) if ctx.needs_input_grad[1] else None
    return d_a, d_b, *[None] * (ctx.count - 2)
