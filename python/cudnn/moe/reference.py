"""The reference of the routing, combine and quantization kernels in PyTorch, for CPU tensors and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cudnn.gemm.formats import QUANTIZED_LIMIT, wide
from cudnn.gemm.scales import compute_block_scales, reciprocal, round_to

if TYPE_CHECKING:
    from cudnn_kernels.moe.configuration import Rule


def keys(values: torch.Tensor) -> torch.Tensor:
    """Sort keys: integers of the values' width in the same order; -0 equals 0, and NaN is the largest, as in
    ``torch.topk``. No value maps to the least integer.
    """
    integer = torch.int64 if values.dtype is torch.float64 else torch.int32
    bits, limits = (values + 0.0).contiguous().view(integer), torch.iinfo(integer)
    return torch.where(values.isnan(), limits.max, bits ^ ((bits >> limits.bits - 1) & limits.max))


def top_k(logits: torch.Tensor, bias: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """The experts of each token, int32 (T, K): by score, of equal ones the lower index first."""
    values = wide(logits)
    if bias is not None:
        values = (_scores(values, rule) if rule.is_scored_before else values) + bias
    order = keys(values)
    if rule.n_group > 1:
        groups = values.unflatten(1, (rule.n_group, values.shape[1] // rule.n_group))
        best = groups.amax(2) if bias is None else groups.topk(2)[0].sum(2)
        top_groups = keys(best).sort(dim=1, descending=True, stable=True)[1][:, : rule.topk_group]
        is_allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top_groups, True)
        order = order.where(is_allowed.repeat_interleave(groups.shape[2], 1), torch.iinfo(order.dtype).min)
    return order.sort(dim=1, descending=True, stable=True)[1][:, : rule.top_k].int()


def _scores(values: torch.Tensor, rule: Rule) -> torch.Tensor:
    return values.softmax(-1) if rule.score == "softmax" else values.sigmoid()


def router_weights(logits: torch.Tensor, indices: torch.Tensor, rule: Rule, scaling_factor: float) -> torch.Tensor:
    """The weights of the chosen experts (T, K), float32, or float64 for logits in float64."""
    values = wide(logits)
    if rule.is_dense:
        chosen = values.softmax(-1).gather(1, indices.long())
    else:
        chosen = _scores(values.gather(1, indices.long()), rule)
        if rule.score == "sigmoid" and rule.renormalize:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scaling_factor


def logits_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    indices: torch.Tensor,
    experts: int,
    rule: Rule,
    scaling_factor: float,
    rows: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """See :func:`cudnn.moe.routing.logits_gradient`."""
    chosen = indices.long()
    values, g = wide(logits), wide(gradient) * scaling_factor
    total = values.new_zeros(values.shape[0], experts)
    if rule.is_dense:
        p = values.softmax(-1)
        picked = p.gather(1, chosen)
        total = -p * (g * picked).sum(-1, keepdim=True)
        dchosen = g * picked
    elif rule.score == "softmax":
        p = values.softmax(-1)
        dchosen = p * (g - (g * p).sum(-1, keepdim=True))
    else:
        s = values.sigmoid()
        if rule.renormalize:
            sums = s.sum(-1, keepdim=True) + 1e-20
            g = (g - (g * s).sum(-1, keepdim=True) / sums) / sums
        dchosen = g * s * (1 - s)
    if rows is not None:
        scatter_idx, dlogit_of_row = rows
        shared = scatter_idx.shape[1] - dchosen.shape[1]
        dlogit_of_row[scatter_idx.flatten().long(), 0, 0] = torch.nn.functional.pad(dchosen, (0, shared)).flatten()
    return total.scatter_add_(1, chosen, dchosen).to(logits.dtype)


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``offsets``, ``gather_idx`` and ``scatter_idx`` of :func:`cudnn.moe.sort`."""
    flat = indices.reshape(-1).long()
    expert = flat.where((flat >= 0) & (flat < experts), experts)
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    offsets = counts.index_add_(0, expert, torch.ones_like(expert))[:experts].cumsum(0)
    row = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    is_row = row < offsets[-1]
    gather_idx = (order // max(1, indices.shape[1])).where(is_row, 0)
    scatter_idx = torch.empty_like(row).scatter_(0, order, row.where(is_row, -1))
    return offsets.int(), gather_idx.int(), scatter_idx.int().view(indices.shape)


def combine(rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums of rows in float32 or float64, one slot after the other, rounded to the type of rows."""
    total = wide(rows.new_zeros(scatter_idx.shape[0], rows.shape[1]))
    for k in range(scatter_idx.shape[1]):
        total += _weighted_rows(rows, scatter_idx[:, k], None if weights is None else weights[:, k])
    return total.to(rows.dtype)


def _weighted_rows(rows: torch.Tensor, row: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The rows of one slot of each token times their weights; zeros for dropped slots."""
    if not rows.shape[0]:
        return wide(rows.new_zeros(row.shape[0], rows.shape[1]))
    values = wide(rows[row.long().clamp(min=0)])
    values = values if weight is None else values * weight[:, None]
    return values.where(row[:, None] >= 0, 0.0)


def combine_gradients(
    gradient: torch.Tensor, rows: torch.Tensor, scatter_idx: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of rows and weights, in their dtypes; the latter has no elements without weights."""
    d_rows = torch.zeros_like(rows)
    d_weights = rows.new_zeros(0) if weights is None else torch.zeros_like(weights)
    gradient = wide(gradient)
    for k in range(scatter_idx.shape[1]):
        (token,) = (scatter_idx[:, k] >= 0).nonzero(as_tuple=True)
        row, drow = scatter_idx[token, k].long(), gradient[token]
        if weights is not None:
            d_weights[token, k] = (drow * wide(rows[row])).sum(-1)
            drow = drow * weights[token, k, None]
        d_rows[row] = drow.to(rows.dtype)
    return d_rows, d_weights


def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows in e4m3 (R, n) times their scales (R, n / 128), in float32."""
    return (values.float().unflatten(1, (-1, 128)) * scales[..., None]).flatten(1)


def quantize(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, n) in e4m3, and float32 scales of blocks of ``rows`` x 128."""
    blocks = x.float().unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    limit = QUANTIZED_LIMIT["float8_e4m3fn"]
    scales, inverse = compute_block_scales(blocks.abs().amax((1, 3)), limit, torch.float32)
    return round_to(blocks * inverse[:, None, :, None], torch.float8_e4m3fn).view(x.shape), scales


def differ(
    x: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor, row: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Whether ``row`` of any 128 rows of x (R, n) is not rounded to its e4m3 copy, by its scales: bool (). A copy
    that is NaN says nothing. ``dtype``: x is cast to it first.
    """
    values, copies = x[row::128].to(dtype or x.dtype).float(), quantized[row::128].float()
    inverse = reciprocal(scales).where(scales != 0, torch.finfo(torch.float32).max)  # a block of zeros
    again = round_to(values * inverse.repeat_interleave(128, 1), torch.float8_e4m3fn).float()
    return ((again != copies) & ~copies.isnan()).any()
