"""Scaled dot-product attention and its gradients, by the textbook formulas.

Shapes: Q ``[b, h_q, s_q, d_qk]``, K ``[b, h_k, s_kv, d_qk]``, V ``[b, h_v, s_kv, d_v]``; a head of K or V serves
``h_q / h_k`` (``h_q / h_v``) consecutive heads of Q.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from cudnn.lazy import torch

Modifiers = Callable[[int, Any], Any]  # which function (0 forward, 1 backward), scores -> scores


@dataclasses.dataclass
class Masks:
    """Scale, mask and dropout between ``Q K^T``, the softmax and ``P V``.

    Attributes:
        scale: Factor on ``Q K^T``, a number or a tensor of one element; None for 1.
        modifiers: The user's function of the scaled scores, and of the gradient of its result.
        bias: Added to the scores; broadcasts to ``[b, h_q, s_q, s_kv]``.
        alibi: Adds ``slope * (column - row)``, with ``alibi_slopes``.
        seq_len_q, seq_len_kv: Valid rows and columns of each batch entry, ``[b, 1, 1, 1]``; None for all.
        left_bound: A query sees only keys less than this many places to the left of the diagonal; None for all.
        right_bound: A query sees keys up to this many places to the right of the diagonal; None for all.
        bottom_right: The diagonal ends at the last valid row and column, instead of starting at the first ones.
        block_mask: Which tiles of 128 rows and 128 columns take part, ``[b, h_q, tiles, tiles / 8]`` bytes; bit i of
            byte j is tile 8 j + i.
        sink: One more score for every row of a head, ``[1, h_q, 1, 1]``, whose weight is dropped.
        dropout: Factors on the weights: a mask that broadcasts to the scores, and a scale.
    """

    scale: Any = None
    modifiers: Modifiers | None = None
    bias: Any = None
    alibi: bool = False
    seq_len_q: Any = None
    seq_len_kv: Any = None
    left_bound: int | None = None
    right_bound: int | None = None
    bottom_right: bool = False
    block_mask: Any = None
    sink: Any = None
    dropout: tuple[Any, Any] | None = None

    def visible(self, s_q: int, s_kv: int, device: Any) -> Any:
        """Which of the scores take part, as a boolean tensor that broadcasts to ``[b, h_q, s_q, s_kv]``."""
        row = torch.arange(s_q, dtype=torch.int64, device=device).view(1, 1, -1, 1)
        column = torch.arange(s_kv, dtype=torch.int64, device=device).view(1, 1, 1, -1)
        seen = torch.ones(1, 1, s_q, s_kv, dtype=torch.bool, device=device)
        rows, columns = s_q, s_kv
        if self.seq_len_q is not None:
            rows, columns = self.seq_len_q, self.seq_len_kv
            seen = seen & (row < rows) & (column < columns)
        diagonal = row + (columns - rows) if self.bottom_right else row
        if self.right_bound is not None:
            seen = seen & (column <= diagonal + self.right_bound)
        if self.left_bound is not None:
            seen = seen & (column > diagonal - self.left_bound)
        if self.block_mask is not None:
            tile = column // 128
            used = self.block_mask.long()[:, :, row.view(-1) // 128][..., tile.view(-1) // 8]
            seen = seen & ((used >> (tile % 8) & 1) == 1)
        return seen

    def scores(self, q: Any, k: Any) -> Any:
        """Scaled, modified, biased and masked ``Q K^T``, -inf where masked."""
        scores = q @ k.transpose(-1, -2)
        if self.scale is not None:
            scores = scores * self.scale
        if self.modifiers is not None:
            scores = self.modifiers(0, scores)
        if self.bias is not None:
            scores = scores + self.bias
        if self.alibi:
            row = torch.arange(scores.shape[2], dtype=torch.int64, device=scores.device).view(-1, 1)
            column = torch.arange(scores.shape[3], dtype=torch.int64, device=scores.device)
            slopes = torch.tensor(alibi_slopes(scores.shape[1]), dtype=torch.float32, device=scores.device)
            scores = scores + slopes.view(1, -1, 1, 1) * (column - row)
        return scores.masked_fill(~self.visible(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))

    def dropped(self, weights: Any) -> Any:
        """Weights, or their gradients, after dropout."""
        if self.dropout is None:
            return weights
        mask, scale = self.dropout
        return weights * mask * scale


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head (Press et al., Train Short, Test Long, 2022): a geometric sequence from ``2^(-8/n)``.

    For a number that is no power of two, n is the next smaller one; the other heads get every second slope of 2 n.

    >>> alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    n = 1 << (heads.bit_length() - 1)
    return [2.0 ** (-8 * (i + 1) / n) for i in range(n)] + [2.0 ** (-4 * (2 * j + 1) / n) for j in range(heads - n)]


def random_mask(seed: Any, offset: Any, probability: float, dims: Sequence[int]) -> Any:
    """FLOAT ones with this probability and else zeros, on the CPU; the same for the same seed and offset.

    cuDNN samples from a Philox stream whose order it does not document, so these are not the numbers of a GPU.
    """
    generator = torch.Generator("cpu").manual_seed(int(seed) ^ (int(offset) * 0x9E3779B97F4A7C15 & (1 << 63) - 1))
    return (torch.rand(tuple(dims), generator=generator, dtype=torch.float32, device="cpu") < probability).float()


def gathered(container: Any, table: Any, s_kv: int) -> Any:
    """``[b, h, s_kv, d]``: each entry's tokens, from pages ``[pages, h, tokens, d]`` numbered by ``[b, 1, n, 1]``.

    The pages beyond an entry's length may have any number; they are read as page 0, to be masked.
    """
    pages = table[:, 0, :, 0].long()
    pages = torch.where((pages >= 0) & (pages < container.shape[0]), pages, 0)
    return container[pages].transpose(1, 2).flatten(2, 3)[:, :, :s_kv]


def softmax(scores: Any, sink: Any = None) -> tuple[Any, dict[str, Any]]:
    """The softmax over the last dimension, and by port its Stats, Max and Sum_exp, ``[b, h, s_q, 1]``.

    A row without any visible key has weights of 0 and statistics of -inf (the convention of cuDNN from 9.14).
    """
    largest = scores.amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink)
    origin = torch.where(torch.isneginf(largest), 0.0, largest)
    powers = torch.exp(scores - origin)
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - origin)
    weights = torch.where(total == 0, 0.0, powers / total)  # a total of NaN is passed on
    return weights, {"Stats": origin + torch.log(total), "Max": largest, "Sum_exp": total}


def largest(x: Any) -> Any:
    """The largest absolute value, ``[1, 1, 1, 1]``."""
    return x.abs().amax().view(1, 1, 1, 1)


def _heads(x: Any, count: int) -> Any:
    return x.repeat_interleave(count // x.shape[1], dim=1)


def _grouped(gradient: Any, heads: int) -> Any:
    """Sums the gradients of the query heads that share a head of K or V."""
    return gradient.unflatten(1, (heads, -1)).sum(2)


def _valid(x: Any, lengths: Any) -> Any:
    """Zeros in the rows beyond each entry's length: they may hold anything, and zero times NaN is NaN."""
    if lengths is None:
        return x
    return torch.where(torch.arange(x.shape[2], dtype=torch.int64, device=x.device).view(1, 1, -1, 1) < lengths, x, 0.0)


def attention_forward(q: Any, k: Any, v: Any, masks: Masks) -> dict[str, Any]:
    """``O = softmax(scores) V`` and, each ``[b, h_q, s_q, 1]``, Stats ``log(sum(exp(scores)))``, Max and Sum_exp."""
    weights, statistics = attention_weights(q, k, masks)
    return {"O": weighted_sum(weights, v, masks), **statistics}


def weighted_sum(weights: Any, v: Any, masks: Masks) -> Any:
    """``weights V`` without the padding of V."""
    return weights @ _heads(_valid(v, masks.seq_len_kv), weights.shape[1])


def attention_weights(q: Any, k: Any, masks: Masks) -> tuple[Any, dict[str, Any]]:
    """What V is summed with, after dropout, and the statistics of the softmax by port."""
    k = _valid(k, masks.seq_len_kv)
    weights, statistics = softmax(masks.scores(q, _heads(k, q.shape[1])), masks.sink)
    if masks.seq_len_q is not None:
        # Rows of padding: a sink would give them statistics, and they are not to be read.
        rows = torch.arange(q.shape[2], dtype=torch.int64, device=q.device).view(1, 1, -1, 1)
        statistics = {port: torch.where(rows < masks.seq_len_q, x, NO_ROW[port]) for port, x in statistics.items()}
    return masks.dropped(weights), statistics


NO_ROW = {"Stats": float("-inf"), "Max": float("-inf"), "Sum_exp": 0.0}


def attention_gradients(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    d_o: Any,
    stats: Any,
    masks: Masks,
    *,
    row_scale: Any = 1.0,
    d_weights_scale: Any = 1.0,
    score_scale: Any = None,
    store_weights: Callable[[Any], Any] = lambda x: x,
    store_scores: Callable[[Any], Any] = lambda x: x,
    d_o_of_rows: Any = None,
    again: Sequence[Any] = (),
) -> dict[str, Any]:
    """dQ, dK, dV, dS of the scores, and dSink ``[1, h_q, 1, 1]``, from the forward pass's O and Stats.

    The formulas of Dao et al., FlashAttention (2022), appendix B.2: ``dS = P * (dO V^T - rowsum(dO * O))``.

    Args:
        row_scale, d_weights_scale: Scales of ``rowsum(dO * O)`` and on ``dO V^T``, where these are in fp8.
        score_scale: Factor on dS before the dQ and dK GEMMs; None for ``masks.scale``.
        store_weights, store_scores: How P, for dV, and dS, for dQ and dK, are rounded.
        d_o_of_rows: dO as ``rowsum(dO * O)`` has it, where that is another rounding of it.
        again: Q, K and dO as the dK, dQ and dV GEMMs read them, if these are other roundings.
    """
    q_again, k_again, d_o_again = again or (q, k, d_o)
    d_o_of_rows = d_o if d_o_of_rows is None else d_o_of_rows
    row_tensors = (q, o, d_o, stats, d_o_of_rows, q_again, d_o_again)
    q, o, d_o, stats, d_o_of_rows, q_again, d_o_again = (_valid(x, masks.seq_len_q) for x in row_tensors)
    k, v, k_again = (_valid(x, masks.seq_len_kv) for x in (k, v, k_again))
    k_heads, v_heads = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    scores = masks.scores(q, k_heads)
    # A row without any visible key has weights of 0; one with NaN among its scores has NaN everywhere.
    p = torch.exp(scores - stats).masked_fill(torch.isneginf(scores) & ~torch.isnan(stats), 0.0)
    row_sums = (d_o_of_rows * o).sum(-1, keepdim=True) * row_scale
    d_v = store_weights(masks.dropped(p)).transpose(-1, -2) @ d_o_again
    d_weights = masks.dropped(d_o @ v_heads.transpose(-1, -2) * d_weights_scale)
    d_scores = p * (d_weights - row_sums)
    inner = d_scores if masks.modifiers is None else masks.modifiers(1, d_scores)
    factor = masks.scale if score_scale is None else score_scale
    scaled = store_scores(inner if factor is None else inner * factor)
    gradients = {
        "dQ": scaled @ _heads(k_again, q.shape[1]),
        "dK": _grouped(scaled.transpose(-1, -2) @ q_again, k.shape[1]),
        "dV": _grouped(d_v, v.shape[1]),
        "dS": d_scores,
    }
    if masks.sink is not None:
        weight = torch.exp(masks.sink - stats).masked_fill(torch.isneginf(stats), 0.0)
        gradients["dSink"] = -(weight * row_sums).sum((0, 2, 3), keepdim=True)
    return gradients
