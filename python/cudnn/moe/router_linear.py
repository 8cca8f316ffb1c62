"""A router's logits whose bits do not depend on the number of tokens."""

# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.errors import make_error
from cudnn.fused import plain_gemm
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import custom_op
from cudnn.runtime.run import has_kernel

_WHERE = "moe_router_linear"
_TYPES = (torch.bfloat16, torch.float16)


def _flops(x: Any, weight: Any) -> int:
    return 2 * x[0] * x[1] * weight[0]


@custom_op(_WHERE, autocast=("x", "weight"), flops=_flops)
def moe_router_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Logits x weight^T, (T, E), by a kernel whose tiles and order of sums do not depend on T, unlike cuBLAS's.

    Args:
        x: Tokens (T, H), bfloat16 or float16.
        weight: The router's weight (E, H) of the same dtype; E is a multiple of 8.

    Raises:
        ValueError: another dtype or number of experts.
    """
    is_reference = not has_kernel(x, _WHERE)
    of_kernel = x.dtype in _TYPES and not weight.shape[0] % 8
    if weight.dtype is not x.dtype or not (of_kernel or is_reference):
        got = f"{x.dtype} and a weight {weight.dtype} of {weight.shape[0]} experts"
        allowed = "both torch.bfloat16 or torch.float16, and a multiple of 8 experts"
        raise make_error(ValueError, _WHERE, "x", got, allowed, "leave batch_invariant out")
    if is_reference:
        return torch.nn.functional.linear(x, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    if x.shape[0]:
        plain_gemm.run(aligned(x), aligned(weight), out, False)
    return out


moe_router_linear.register_fake(lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs_input_grad
    return gradient @ weight if needs_x else None, gradient.T @ x if needs_weight else None


moe_router_linear.register_autograd(_backward, setup_context=_setup)
