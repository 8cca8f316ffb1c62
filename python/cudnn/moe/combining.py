"""Combining: the sum of what experts made of a token."""

# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import refused
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


def combine(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: Maybe = None) -> torch.Tensor:
    """For each token, the sum of its rows times its weights: (T, H), in the type of rows. Differentiable.

        out[t] = sum over k of weights[t, k] * rows[row_of_choice[t, k]]        in float32, in the order of k

    Choices whose row is -1 add nothing. A row belongs to one choice at most, as those of :func:`cudnn.moe.route` and
    :func:`cudnn.moe.sort` do; the gradient relies on it. On CUDA tensors it is one kernel, and another one for the
    gradients, in which nothing waits.

    Args:
        rows: (R, H), bfloat16, float16 or float32, on the CPU also float64, contiguous; H a multiple of 8.
        row_of_choice: int32 (T, K), contiguous, K from 1 to 32.
        weights: float32 (T, K), or float64 for rows of float64, contiguous; None: the plain sum.

    Raises:
        TypeError: an argument that is no tensor.
        ValueError: a shape, type or stride that is not allowed.
    """
    for name, tensor in (("rows", rows), ("row_of_choice", row_of_choice), ("weights", weights)):
        if name != "weights" or tensor is not None:
            check_tensor("combine", name, tensor)
    return moe_combine(rows, row_of_choice, weights)


def _refuse(what: str, got: object, allowed: str, cure: str = "") -> None:
    raise refused(ValueError, "combine", what, got, allowed, cure)


def _check(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: Maybe) -> None:
    if rows.ndim != 2 or rows.shape[1] % 8 or not rows.shape[1]:
        _refuse("shape of rows", tuple(rows.shape), "(R, H), H a multiple of 8")
    is_double = rows.dtype is torch.float64
    if rows.dtype not in _TYPES and (not is_double or architecture(rows)):
        allowed = f"{', '.join(map(str, _TYPES))}; on the CPU, not emulated, torch.float64 too"
        _refuse("type of rows", rows.dtype, allowed)
    if row_of_choice.ndim != 2 or not 0 < row_of_choice.shape[1] <= MOST_SUMMED:
        _refuse("shape of row_of_choice", tuple(row_of_choice.shape), f"(T, K), K from 1 to {MOST_SUMMED}")
    if row_of_choice.dtype != torch.int32:
        _refuse("type of row_of_choice", row_of_choice.dtype, "torch.int32", "pass row_of_choice.int()")
    kind = torch.float64 if is_double else torch.float32
    if weights is not None and (weights.shape != row_of_choice.shape or weights.dtype != kind):
        got = f"{weights.dtype} of the shape {tuple(weights.shape)}"
        _refuse("weights", got, f"{kind} of the shape {tuple(row_of_choice.shape)}")
    given = {"rows": rows, "row_of_choice": row_of_choice, "weights": weights}
    for name, tensor in given.items():
        if tensor is not None and not tensor.is_contiguous():
            _refuse(f"strides of {name}", tensor.stride(), "contiguous", f"pass {name}.contiguous()")
        if tensor is not None and tensor.device != rows.device:
            _refuse(f"device of {name}", tensor.device, f"that of rows, {rows.device}")


@custom_op("moe_combine", flops=flops.none)
def moe_combine(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """See :func:`combine`."""
    _check(rows, row_of_choice, weights)
    weights = None if weights is None else placed(weights)
    return sum_rows(placed(rows), placed(row_of_choice), weights)


def sum_rows(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: Maybe = None) -> torch.Tensor:
    """:func:`combine` of tensors that were checked, without gradients."""
    if not has_kernel(rows, "combine"):
        return reference.combine(rows, row_of_choice, weights)
    tokens = row_of_choice.shape[0]
    if not rows.shape[0]:
        return rows.new_zeros(tokens, rows.shape[1])
    out = rows.new_empty(tokens, rows.shape[1])
    if tokens:
        sum_into(out, rows, row_of_choice, weights)
    return out


def sum_into(out: torch.Tensor, rows: torch.Tensor, row_of_choice: torch.Tensor, weights: Maybe) -> None:
    """The kernel of :func:`sum_rows`."""
    given, of = () if weights is None else (weights,), (rows.dtype, rows.shape[1], row_of_choice.shape[1])
    kernel(_COMBINE, CombineConfiguration, *of, weights is not None)(rows, row_of_choice, *given, out)


@moe_combine.register_fake
def _(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    _check(rows, row_of_choice, weights)
    return rows.new_empty(row_of_choice.shape[0], rows.shape[1])


@custom_op("moe_combine_bwd", flops=flops.none)
def moe_combine_bwd(
    gradient: torch.Tensor, rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and weights; that of weights has no elements where there are none."""
    if not has_kernel(rows, "combine"):
        return reference.combine_gradients(gradient, rows, row_of_choice, weights)
    gradient, rows, row_of_choice = placed(gradient), placed(rows), placed(row_of_choice)
    weights = None if weights is None else placed(weights)
    d_rows = torch.zeros_like(rows)  # of rows that no choice names
    d_weights = rows.new_zeros(0) if weights is None else torch.zeros_like(weights)
    if row_of_choice.shape[0] and rows.shape[0]:
        if weights is None:
            spread(gradient, row_of_choice, d_rows)
        else:
            of = (rows.dtype, rows.shape[1], row_of_choice.shape[1], True, True)
            made = kernel(_GRADIENT, CombineConfiguration, *of)
            made(rows, row_of_choice, weights, gradient, d_rows, d_weights)
    return d_rows, d_weights


def spread(tokens: torch.Tensor, row_of_choice: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies each token to the rows of its choices, in a kernel that reads it once; other rows stay what they are."""
    of = (tokens.dtype, tokens.shape[1], row_of_choice.shape[1], False, True)
    kernel(_GRADIENT, CombineConfiguration, *of)(row_of_choice, tokens, rows)


def values_of_rows(
    of_choices: torch.Tensor, row_of_choice: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of choices (T, K), float32 or float64, as those of rows (R, 1, 1), and zeros for as many sums.

    Neither is written in rows of nobody.
    """
    of_rows, sums = of_choices.new_empty(2, rows, 1, 1).unbind(0)
    if has_kernel(of_choices, "combine"):
        kernel(_VALUES, ValuesConfiguration, row_of_choice.shape[1])(row_of_choice, of_choices, of_rows, sums)
    else:
        kept = row_of_choice >= 0
        of_rows[row_of_choice[kept].long(), 0, 0] = of_choices[kept]
        sums.zero_()
    return of_rows, sums


def values_of_choices(of_rows: torch.Tensor, row_of_choice: torch.Tensor) -> torch.Tensor:
    """Numbers of rows (R, 1, 1), float32 or float64, as those of choices (T, K), 0 where one was dropped."""
    if not has_kernel(of_rows, "combine"):
        return of_rows[row_of_choice.long(), 0, 0].where(row_of_choice >= 0, 0.0)
    of_choices = of_rows.new_empty(row_of_choice.shape)
    kernel(_VALUES, ValuesConfiguration, row_of_choice.shape[1], True)(row_of_choice, of_choices, of_rows)
    return of_choices


@moe_combine_bwd.register_fake
def _(
    gradient: torch.Tensor, rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows), rows.new_empty(0) if weights is None else torch.empty_like(weights)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    rows, row_of_choice, weights = ctx.saved_tensors
    d_rows, d_weights = moe_combine_bwd(gradient.contiguous(), rows, row_of_choice, weights)
    return d_rows, None, None if weights is None else d_weights


moe_combine.register_autograd(_backward, setup_context=_setup)
