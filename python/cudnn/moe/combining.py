"""Permute and combine: tokens to rows sorted by expert, and the weighted sum of a token's rows."""

# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.deprecation import renamed_arguments
from cudnn.errors import make_error
from cudnn.moe import reference
from cudnn.runtime import flops
from cudnn.runtime.memory import placed
from cudnn.runtime.registration import custom_op
from cudnn.runtime.run import architecture, has_kernel, kernel
from cudnn_kernels.moe.configuration import MOST_SUMMED, CombineConfiguration, ValuesConfiguration

_COMBINE, _GRADIENT = "cudnn_kernels.moe.combining:Combine", "cudnn_kernels.moe.combining:CombineGradient"
_VALUES = "cudnn_kernels.moe.values:Values"
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
Maybe = torch.Tensor | None


@renamed_arguments(row_of_choice="scatter_idx")
def combine(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: Maybe = None) -> torch.Tensor:
    """Combines (unpermutes): each token's weighted sum of its rows, (T, H), in the dtype of rows. Differentiable.

        out[t] = sum over k of weights[t, k] * rows[scatter_idx[t, k]]        in float32, in the order of k

    Slots whose row is -1 add nothing. A row belongs to at most one slot, as in the results of :func:`cudnn.moe.route`
    and :func:`cudnn.moe.sort`; the gradient relies on it. On CUDA tensors forward is one kernel and backward another;
    neither synchronizes with the host.

    Args:
        rows: (R, H), bfloat16, float16 or float32, on the CPU also float64, contiguous; H a multiple of 8.
        scatter_idx: int32 (T, K), contiguous, K from 1 to 32: the row of each (token, k) slot, as
            ``Routing.scatter_idx``.
        weights: float32 (T, K), or float64 for rows of float64, contiguous; None: the plain sum.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: a shape, dtype or stride that is not allowed.
    """
    for name, tensor in (("rows", rows), ("scatter_idx", scatter_idx), ("weights", weights)):
        if name != "weights" or tensor is not None:
            check_tensor("combine", name, tensor)
    return moe_combine(rows, scatter_idx, weights)


def _refuse(what: str, got: object, allowed: str, hint: str = "") -> None:
    raise make_error(ValueError, "combine", what, got, allowed, hint)


def _check(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: Maybe) -> None:
    if rows.ndim != 2 or rows.shape[1] % 8 or not rows.shape[1]:
        _refuse("shape of rows", tuple(rows.shape), "(R, H), H a multiple of 8")
    is_double = rows.dtype is torch.float64
    if rows.dtype not in _TYPES and (not is_double or architecture(rows)):
        allowed = f"{', '.join(map(str, _TYPES))}; on the CPU, not emulated, torch.float64 too"
        _refuse("type of rows", rows.dtype, allowed)
    if scatter_idx.ndim != 2 or not 0 < scatter_idx.shape[1] <= MOST_SUMMED:
        _refuse("shape of scatter_idx", tuple(scatter_idx.shape), f"(T, K), K from 1 to {MOST_SUMMED}")
    if scatter_idx.dtype != torch.int32:
        _refuse("type of scatter_idx", scatter_idx.dtype, "torch.int32", "pass scatter_idx.int()")
    dtype = torch.float64 if is_double else torch.float32
    if weights is not None and (weights.shape != scatter_idx.shape or weights.dtype != dtype):
        got = f"{weights.dtype} of the shape {tuple(weights.shape)}"
        _refuse("weights", got, f"{dtype} of the shape {tuple(scatter_idx.shape)}")
    for name, tensor in (("rows", rows), ("scatter_idx", scatter_idx), ("weights", weights)):
        if tensor is not None and not tensor.is_contiguous():
            _refuse(f"strides of {name}", tensor.stride(), "contiguous", f"pass {name}.contiguous()")
        if tensor is not None and tensor.device != rows.device:
            _refuse(f"device of {name}", tensor.device, f"that of rows, {rows.device}")


@custom_op("moe_combine", flops=flops.none)
def moe_combine(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """See :func:`combine`."""
    _check(rows, scatter_idx, weights)
    weights = None if weights is None else placed(weights)
    return combine_rows(placed(rows), placed(scatter_idx), weights)


def combine_rows(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: Maybe = None) -> torch.Tensor:
    """:func:`combine` of checked tensors, without autograd."""
    if not has_kernel(rows, "combine"):
        return reference.combine(rows, scatter_idx, weights)
    tokens = scatter_idx.shape[0]
    if not rows.shape[0]:
        return rows.new_zeros(tokens, rows.shape[1])
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens:
        combine_into(out, rows, scatter_idx, weights)
    return out


def combine_into(out: torch.Tensor, rows: torch.Tensor, scatter_idx: torch.Tensor, weights: Maybe) -> None:
    """Launches the kernel of :func:`combine_rows`, which writes to ``out``."""
    weight_args = () if weights is None else (weights,)
    options = (rows.dtype, rows.shape[1], scatter_idx.shape[1], weights is not None)
    kernel(_COMBINE, CombineConfiguration, *options)(rows, scatter_idx, *weight_args, out)


@moe_combine.register_fake
def _(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    _check(rows, scatter_idx, weights)
    return rows.new_empty(scatter_idx.shape[0], rows.shape[1])


@custom_op("moe_combine_bwd", flops=flops.none)
def moe_combine_bwd(
    gradient: torch.Tensor, rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and weights; the latter has no elements without weights."""
    if not has_kernel(rows, "combine"):
        return reference.combine_gradients(gradient, rows, scatter_idx, weights)
    gradient, rows, scatter_idx = placed(gradient), placed(rows), placed(scatter_idx)
    weights = None if weights is None else placed(weights)
    d_rows = torch.zeros_like(rows)  # zeros for rows without a slot
    d_weights = rows.new_zeros(0) if weights is None else torch.zeros_like(weights)
    if scatter_idx.shape[0] and rows.shape[0]:
        if weights is None:
            permute(gradient, scatter_idx, d_rows)
        else:
            options = (rows.dtype, rows.shape[1], scatter_idx.shape[1], True, True)
            launch = kernel(_GRADIENT, CombineConfiguration, *options)
            launch(rows, scatter_idx, weights, gradient, d_rows, d_weights)
    return d_rows, d_weights


def permute(tokens: torch.Tensor, scatter_idx: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies each token (T, n) to the rows (R, n) of its slots; reads it once. Rows without a slot are not written."""
    options = (tokens.dtype, tokens.shape[1], scatter_idx.shape[1], False, True)
    kernel(_GRADIENT, CombineConfiguration, *options)(scatter_idx, tokens, rows)


def permute_weights(weights: torch.Tensor, scatter_idx: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of slots (T, K), float32 or float64, by row (R, 1, 1), and zeros of that shape for their gradient.

    Rows without a slot are not initialized in either.
    """
    prob, dprob = weights.new_empty(2, rows, 1, 1).unbind(0)
    if has_kernel(weights, "combine"):
        kernel(_VALUES, ValuesConfiguration, scatter_idx.shape[1])(scatter_idx, weights, prob, dprob)
    else:
        is_routed = scatter_idx >= 0
        prob[scatter_idx[is_routed].long(), 0, 0] = weights[is_routed]
        dprob.zero_()
    return prob, dprob


def unpermute_weights(values: torch.Tensor, scatter_idx: torch.Tensor) -> torch.Tensor:
    """Values of rows (R, 1, 1), float32 or float64, by slot (T, K); 0 for a dropped slot."""
    if not has_kernel(values, "combine"):
        return values[scatter_idx.long(), 0, 0].where(scatter_idx >= 0, 0.0)
    of_slots = values.new_empty(scatter_idx.shape)
    kernel(_VALUES, ValuesConfiguration, scatter_idx.shape[1], True)(scatter_idx, of_slots, values)
    return of_slots


@moe_combine_bwd.register_fake
def _(
    gradient: torch.Tensor, rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), rows.new_empty(0) if weights is None else torch.empty_like(weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    rows, scatter_idx, weights = ctx.saved_tensors
    d_rows, d_weights = moe_combine_bwd(gradient.contiguous(), rows, scatter_idx, weights)
    return d_rows, None, None if weights is None else d_weights


moe_combine.register_autograd(_backward, setup_context=_setup)
