"""What the kernels of routing compute, in PyTorch: on CPU tensors, and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cudnn.gemm.formats import QUANTIZED_LIMIT, wide
from cudnn.gemm.scales import compute_block_scales, round_to

if TYPE_CHECKING:
    from cudnn_kernels.moe.configuration import Rule


def keys(values: torch.Tensor) -> torch.Tensor:
    """Integers, as wide as the values, in their order: -0 equals 0, and a NaN is above all numbers, as in
    ``torch.topk``. The least integer is no number's.
    """
    kind = torch.int64 if values.dtype is torch.float64 else torch.int32
    bits, limits = (values + 0.0).contiguous().view(kind), torch.iinfo(kind)
    return torch.where(values.isnan(), limits.max, bits ^ ((bits >> limits.bits - 1) & limits.max))


def choose(logits: torch.Tensor, bias: torch.Tensor | None, rule: Rule) -> torch.Tensor:
    """The experts of each token, int32 (T, K): by selection value, the lower expert first where they are equal."""
    values = wide(logits)
    if bias is not None:
        values = (_scores(values, rule) if rule.is_scored_before else values) + bias
    order = keys(values)
    if rule.n_group > 1:
        groups = values.unflatten(1, (rule.n_group, values.shape[1] // rule.n_group))
        best = groups.amax(2) if bias is None else groups.topk(2)[0].sum(2)
        kept = keys(best).sort(dim=1, descending=True, stable=True)[1][:, : rule.topk_group]
        is_kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
        order = order.where(is_kept.repeat_interleave(groups.shape[2], 1), torch.iinfo(order.dtype).min)
    return order.sort(dim=1, descending=True, stable=True)[1][:, : rule.top_k].int()


def _scores(values: torch.Tensor, rule: Rule) -> torch.Tensor:
    return values.softmax(-1) if rule.score == "softmax" else values.sigmoid()


def weigh(logits: torch.Tensor, indices: torch.Tensor, rule: Rule, scaling_factor: float) -> torch.Tensor:
    """The weights of chosen experts (T, K), float32 or, of logits in float64, that."""
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
        mine = g * picked
    elif rule.score == "softmax":
        p = values.softmax(-1)
        mine = p * (g - (g * p).sum(-1, keepdim=True))
    else:
        s = values.sigmoid()
        if rule.renormalize:
            sums = s.sum(-1, keepdim=True) + 1e-20
            g = (g - (g * s).sum(-1, keepdim=True) / sums) / sums
        mine = g * s * (1 - s)
    if rows is not None:
        row_of_choice, of_rows = rows
        others = row_of_choice.shape[1] - mine.shape[1]
        of_rows[row_of_choice.flatten().long(), 0, 0] = torch.nn.functional.pad(mine, (0, others)).flatten()
    return total.scatter_add_(1, chosen, mine).to(logits.dtype)


def sort(indices: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Offsets, token_of_row and row_of_choice of :func:`cudnn.moe.sort`."""
    flat = indices.reshape(-1).long()
    expert = flat.where((flat >= 0) & (flat < experts), experts)
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device)
    offsets = counts.index_add_(0, expert, torch.ones_like(expert))[:experts].cumsum(0)
    place = torch.arange(flat.numel(), dtype=torch.int64, device=flat.device)
    is_row = place < offsets[-1]
    token_of_row = (order // max(1, indices.shape[1])).where(is_row, 0)
    row_of_choice = torch.empty_like(place).scatter_(0, order, place.where(is_row, -1))
    return offsets.int(), token_of_row.int(), row_of_choice.int().view(indices.shape)


def combine(rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Sums of rows in float32 or float64, one choice after the other, rounded to the type of rows."""
    total = wide(rows.new_zeros(row_of_choice.shape[0], rows.shape[1]))
    for choice in range(row_of_choice.shape[1]):
        total += _part(rows, row_of_choice[:, choice], None if weights is None else weights[:, choice])
    return total.to(rows.dtype)


def _part(rows: torch.Tensor, row: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """The rows of one choice times their weights; zeros where there is no row."""
    if not rows.shape[0]:
        return wide(rows.new_zeros(row.shape[0], rows.shape[1]))
    found = wide(rows[row.long().clamp(min=0)])
    found = found if weight is None else found * weight[:, None]
    return found.where(row[:, None] >= 0, 0.0)


def combine_gradients(
    gradient: torch.Tensor, rows: torch.Tensor, row_of_choice: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of rows and weights, in their types; the latter has no elements where there are none."""
    d_rows = torch.zeros_like(rows)
    d_weights = rows.new_zeros(0) if weights is None else torch.zeros_like(weights)
    gradient = wide(gradient)
    for choice in range(row_of_choice.shape[1]):
        (token,) = (row_of_choice[:, choice] >= 0).nonzero(as_tuple=True)
        row, mine = row_of_choice[token, choice].long(), gradient[token]
        if weights is not None:
            d_weights[token, choice] = (mine * wide(rows[row])).sum(-1)
            mine = mine * weights[token, choice, None]
        d_rows[row] = mine.to(rows.dtype)
    return d_rows, d_weights


def quantize(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 of (R, n), and float32 factors of so many rows by 128 columns."""
    parts = x.float().unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    limit = QUANTIZED_LIMIT["float8_e4m3fn"]
    factors, inverse = compute_block_scales(parts.abs().amax((1, 3)), limit, torch.float32)
    return round_to(parts * inverse[:, None, :, None], torch.float8_e4m3fn).view(x.shape), factors
