"""Scaled dot-product attention and its gradients, by the textbook formulas.

Shapes: Q ``[b, h_q, s_q, d_qk]``, K ``[b, h_k, s_kv, d_qk]``, V ``[b, h_v, s_kv, d_v]``; a head of K or V serves
``h_q / h_k`` (``h_q / h_v``) consecutive heads of Q.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cudnn.lazy import torch


@dataclasses.dataclass
class Masks:
    """What turns ``Q K^T`` into the scores that the softmax sees.

    Attributes:
        scale: Factor on ``Q K^T``, a number or a tensor of one element; None for 1.
        bias: Added to the scores; broadcasts to ``[b, h_q, s_q, s_kv]``.
        seq_len_q, seq_len_kv: Valid rows and columns of each batch entry, ``[b, 1, 1, 1]``; None for all.
        left_bound: A query sees only keys less than this many places to the left of the diagonal; None for all.
        right_bound: A query sees keys up to this many places to the right of the diagonal; None for all.
        bottom_right: The diagonal ends at the last valid row and column, instead of starting at the first ones.
    """

    scale: Any = None
    bias: Any = None
    seq_len_q: Any = None
    seq_len_kv: Any = None
    left_bound: int | None = None
    right_bound: int | None = None
    bottom_right: bool = False

    def visible(self, s_q: int, s_kv: int, device: Any) -> Any:
        """Which of the scores take part, as a boolean tensor that broadcasts to ``[b, h_q, s_q, s_kv]``."""
        row = torch.arange(s_q, device=device).view(1, 1, -1, 1)
        column = torch.arange(s_kv, device=device).view(1, 1, 1, -1)
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
        return seen

    def scores(self, q: Any, k: Any) -> Any:
        """Scaled, biased and masked ``Q K^T``, -inf where masked."""
        scores = q @ k.transpose(-1, -2)
        if self.scale is not None:
            scores = scores * self.scale
        if self.bias is not None:
            scores = scores + self.bias
        return scores.masked_fill(~self.visible(scores.shape[-2], scores.shape[-1], scores.device), float("-inf"))


def _heads(x: Any, count: int) -> Any:
    return x.repeat_interleave(count // x.shape[1], dim=1)


def _grouped(gradient: Any, heads: int) -> Any:
    """Sums the gradients of the query heads that share a head of K or V."""
    return gradient.unflatten(1, (heads, -1)).sum(2)


def _valid(x: Any, lengths: Any) -> Any:
    """Zeros in the rows beyond each entry's length: they may hold anything, and zero times NaN is NaN."""
    if lengths is None:
        return x
    return torch.where(torch.arange(x.shape[2], device=x.device).view(1, 1, -1, 1) < lengths, x, 0.0)


def attention_forward(q: Any, k: Any, v: Any, masks: Masks) -> tuple[Any, Any]:
    """``O = softmax(scores) V`` and the statistics ``log(sum(exp(scores)))``, shape ``[b, h_q, s_q, 1]``.

    A row without any visible key gives O = 0 and statistics of -inf (the convention of cuDNN from 9.14).
    """
    v = _valid(v, masks.seq_len_kv)
    scores = masks.scores(q, _heads(k, q.shape[1]))
    stats = torch.logsumexp(scores, -1, keepdim=True)
    return _probabilities(scores, stats) @ _heads(v, q.shape[1]), stats


def _probabilities(scores: Any, stats: Any) -> Any:
    return torch.exp(scores - stats).masked_fill(torch.isneginf(scores), 0.0)


def attention_backward(q: Any, k: Any, v: Any, o: Any, d_o: Any, stats: Any, masks: Masks) -> tuple[Any, Any, Any, Any]:
    """Gradients dQ, dK, dV and that of the scores, from the forward pass's O and statistics.

    The formulas of Dao et al., FlashAttention (2022), appendix B.2: ``dS = P * (dO V^T - rowsum(dO * O))``.
    """
    q, o, d_o = (_valid(x, masks.seq_len_q) for x in (q, o, d_o))
    k, v = (_valid(x, masks.seq_len_kv) for x in (k, v))
    k_heads, v_heads = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    p = _probabilities(masks.scores(q, k_heads), stats)
    d_v = p.transpose(-1, -2) @ d_o
    d_scores = p * (d_o @ v_heads.transpose(-1, -2) - (d_o * o).sum(-1, keepdim=True))
    scaled = d_scores if masks.scale is None else d_scores * masks.scale
    d_k = scaled.transpose(-1, -2) @ q
    return scaled @ k_heads, _grouped(d_k, k.shape[1]), _grouped(d_v, v.shape[1]), d_scores
