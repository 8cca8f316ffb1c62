"""The backward pass of experts whose GEMMs take e4m3, with the scales of DeepSeek-V3's recipe.

Steps as in :mod:`cudnn.moe.layer`. A 16-bit or float32 value is rounded to e4m3 once for each GEMM that reads it, with
scales of 1 x 128 along the dimension that the GEMM sums over: hidden or intermediate size for the gradients of rows,
tokens for the gradients of weights (:class:`cudnn.moe.quantizing.TokenColumns`).

    (1) quantize dy        g[r] = dy[t], by rows and by token columns, in one read
    (2) down GEMM^T + dGLU dh by rows and by token columns; act times weights by token columns
    (3) down wgrad         token columns of g and act
    (4) up GEMM^T          rows of dh
    (5) up wgrad           token columns of dh, and of x, which are made here: in e4m3 they take K/2 times x's memory
    (6) combine            dx[t] = sum over k of dx_row[scatter_idx[t, k]]

Over ranks, x and dy arrive in e4m3 by rows. The GEMMs of (2) read dy as it is; token columns are rounded twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn.lazy import torch
from cudnn.moe.experts import (
    Experts,
    GroupedGemmOps,
    Permutation,
    SortedRows,
    matrix,
    ones,
    shape_of,
)
from cudnn.moe.quantized_rows import Rows
from cudnn.moe.quantizing import (
    Pair,
    TokenColumns,
    empty_columns,
    empty_quantized,
    gemm_quantizes,
    quantized_both_ways,
    quantized_tokens,
)

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = {"sf_vec_size": 128}


class DPreact(NamedTuple):
    """The gradient of the pre-activation, by rows (R, N) and by token columns."""

    rows: Pair
    columns: TokenColumns


def preact_of(saved: Tensor, rows: int, n: int) -> tuple[Tensor, Tensor | None]:
    """The pre-activation (R, N) that was saved, and its scales (R, N / 128) if it is in e4m3."""
    if saved.dtype is not torch.uint8:
        return saved, None
    values, scales = saved.split([rows * n, saved.numel() - rows * n])
    return values.view(torch.float8_e4m3fn).view(rows, n), scales.view(torch.float32).view(rows, n // 128)


def rows_operand(rows: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The A operand in e4m3, (R, n), and its scales (R, n / 128)."""
    return {"a": matrix(rows), "sfa": scales.unsqueeze(2)}


def weight_operand(values: Tensor, scales: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The B operand in e4m3, (E, n, k), with its scales, and the GEMM's options."""
    return {"b": values.permute(1, 2, 0), "sfb": scales.permute(1, 2, 0)}, _BLOCK


def backward_down(
    ops: GroupedGemmOps,
    dy: Rows,
    preact: Tensor,
    weights: Tensor | None,
    permutation: Permutation | SortedRows,
    e: Experts,
    needs_up_bias: bool,
    wgrad: Callable[[Callable[[], dict[str, Any]]], Tensor | None] | None,
    into_preact: bool,
) -> tuple[DPreact, Tensor | None, Tensor | None, Tensor | None]:
    """Steps (1) to (3): see :func:`cudnn.moe.layer._backward_down`."""
    (experts, _, intermediate), count, offsets = shape_of(e.down), permutation.rows, permutation.offsets
    like = e.down[0]
    # (1) Quantize dy.
    (rows, scales), dy_columns = quantized_tokens(dy, permutation.gather_idx, offsets, count, True)
    # (2) Down GEMM^T, the activation's derivative, and the activation.
    prob, dprob = permutation.weights_of_rows(weights)
    n = 2 * intermediate
    dup_bias = like.new_empty(experts, n, dtype=torch.bfloat16) if needs_up_bias else None
    copies = quantized_both_ways(e.down)
    tensors, options = weight_operand(copies.transposed, copies.transposed_scales)
    tensors |= {**rows_operand(rows, scales), "padded_offsets": offsets, "alpha": ones(experts, like.device)}
    preact, preact_scales = preact_of(preact, count, n)
    tensors |= {"c": matrix(preact), "prob": prob, "dprob": dprob, "dbias": dup_bias}
    tensors["sfc"] = None if preact_scales is None else preact_scales.unsqueeze(2)
    dh, act = like.new_empty(0), like.new_empty(0)
    if fused := gemm_quantizes(like):
        dh_rows = empty_quantized(like, count, n, preact if into_preact and preact_scales is not None else None)
        dh_columns, act_columns = (empty_columns(like, count, experts, columns) for columns in (n, intermediate))
        tensors |= {"d_row": matrix(dh_rows[0]), "sfd_row": dh_rows[1].unsqueeze(2)}
        tensors |= {"d_blocks": dh_columns.blocks, "sfd_blocks": dh_columns.scales}
        tensors |= {"activation_blocks": act_columns.blocks, "sfactivation_blocks": act_columns.scales}
    else:
        dh, act = like.new_empty(count, n), like.new_empty(count, intermediate)
        tensors |= {"d_row": matrix(dh), "activation": matrix(act)}
    key = ("fp8 dact", needs_up_bias, prob is None)
    ops.run(key, "grouped_gemm_dglu", tensors, options, ops.dact_options)
    del tensors, rows, scales
    if not fused:
        _, act_columns = quantized_tokens(act, None, offsets, count, False)
        del act
        dh_rows, dh_columns = quantized_tokens(dh, None, offsets, count, True)
    # (3) Weight gradient of down.
    operands = _wgrad_operands(dy_columns, act_columns, offsets)
    dw_down = None if wgrad is None else wgrad(lambda: operands)
    return DPreact(dh_rows, dh_columns), dprob, dw_down, dup_bias


def dx_operands(up: Sequence[Tensor], dpreact: DPreact) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Step (4): the operands of the up GEMM^T, and its options."""
    copies = quantized_both_ways(up)
    tensors, options = weight_operand(copies.transposed, copies.transposed_scales)
    return {**tensors, **rows_operand(*dpreact.rows)}, options


def wgrad_up_operands(x: Rows, dpreact: DPreact, permutation: Permutation | SortedRows) -> dict[str, Tensor]:
    """Step (5): the operands of the weight gradient of up."""
    _, x_columns = quantized_tokens(x, permutation.gather_idx, permutation.offsets, permutation.rows, False)
    return _wgrad_operands(dpreact.columns, x_columns, permutation.offsets)


def _wgrad_operands(a: TokenColumns, b: TokenColumns, offsets: Tensor) -> dict[str, Tensor]:
    """The operands of a weight gradient."""
    return {"offsets": offsets, "a": a.blocks, "sfa": a.scales, "b": b.blocks, "sfb": b.scales}
