"""Attention over all pairs of rows and keys, in PyTorch's own operations: what every test of attention compares with.

Shares no code with the library. Computes in the type of its tensors, float64 for exact results.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch


class Attended(NamedTuple):
    """``o`` (..., h, s_q, d); ``lse`` and ``largest`` (..., h, s_q): of the scores; ``weights`` (..., h, s_q, s_kv).

    Rows that see nothing have 0 in ``o`` and ``weights``, and -inf in the others.
    """

    o: torch.Tensor
    lse: torch.Tensor
    largest: torch.Tensor
    weights: torch.Tensor


def band(
    rows: int,
    keys: int,
    left: int | None = None,
    right: int | None = None,
    bottom_right: bool = False,
    device: Any = None,
) -> torch.Tensor:
    """(rows, keys), boolean: row r sees keys from r - ``left`` to r + ``right``; None: no end on that side.

    ``bottom_right``: the last row stands at the last key, else the first row at the first key.
    """
    first = keys - rows if bottom_right else 0
    distance = torch.arange(keys, device=device) - torch.arange(first, first + rows, device=device)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if right is not None:
        seen &= distance <= right
    return seen if left is None else seen & (distance >= -left)


def flat(x: torch.Tensor) -> torch.Tensor:
    """(b, h, s, d) as varlen sequences (t, h, d)."""
    return x.transpose(1, 2).flatten(0, 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    modify: Callable[[torch.Tensor], torch.Tensor] | None = None,
    bias: torch.Tensor | float = 0.0,
    sink: torch.Tensor | None = None,
    kept: torch.Tensor | float = 1.0,
) -> Attended:
    """q (..., h, s_q, d), k and v (..., fewer heads, s_kv, d); the scale is 1 / sqrt(d) unless given.

    In this order: the scale, ``modify``, ``bias`` added; pairs that are not ``seen`` (to be broadcast) left out; a
    score of each head, ``sink``, that joins the softmax; weights times ``kept``.
    """
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores if modify is None else modify(scores)) + bias
    if seen is None:
        seen = torch.ones_like(scores, dtype=torch.bool)
    if sink is not None:  # one more column, whose weight is not kept
        seen = torch.nn.functional.pad(seen, (0, 1), value=True)
        scores = torch.cat([scores, sink.to(scores).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    alive = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen & alive, -torch.inf)  # rows that see nothing are put right below
    weights = (torch.where(alive, scores.softmax(-1), 0.0)[..., : k.shape[-2]] * kept).to(v.dtype)
    maxima = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).amax(-1)  # also of no keys
    lse, largest = (torch.where(alive[..., 0], x, -torch.inf) for x in (scores.logsumexp(-1), maxima))
    return Attended(weights @ v, lse, largest, weights)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends_q: torch.Tensor,
    ends_kv: torch.Tensor,
    seen: Callable[[int, int], torch.Tensor],
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O (t, h, d) and LSE (t, h) of sequences one after the other, (t, h, d), with the mask of their rows and keys."""
    actual = []
    for (a, b), (c, d) in zip(*(pairwise(ends.tolist()) for ends in (ends_q, ends_kv)), strict=True):
        parts = (x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d]))
        one = attend(*parts, seen(b - a, d - c).to(q.device), **options)
        actual.append((one.o.transpose(0, 1), one.lse.T))
    o, lse = (torch.cat(parts) for parts in zip(*actual, strict=True))
    return o, lse


def slopes(heads: int) -> torch.Tensor:
    """ALiBi's, for each head, in float64 (Press et al., 2022, and their code for numbers that are no power of two)."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
    return torch.tensor(first + [2.0 ** (-4 * (2 * j + 1) / power) for j in range(heads - power)], dtype=torch.float64)


def times_seen(
    indices: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor, block: int, causal: bool = False
) -> torch.Tensor:
    """(key heads, rows, rows): how often a row sees a key, by lists of blocks (rows, key heads, n) of its sequence."""
    times = torch.zeros(indices.shape[1], *indices.shape[:1] * 2, dtype=torch.int32)
    for first, last in pairwise(ends.tolist()):
        for row in range(first, last):
            end = row + 1 if causal else last
            for head, count in enumerate(counts[row].tolist()):
                for start in (first + block * b for b in indices[row, head, :count].tolist() if b >= 0):
                    times[head, row, start : min(start + block, end)] += 1
    return times


def attend_selected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, times: torch.Tensor, scale: float) -> Attended:
    """Tensors (t, h, d), keys as often as ``times`` says, which changes no score; results with heads first."""
    times = times.repeat_interleave(q.shape[1] // k.shape[1], 0)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    once = attend(q, k, v, times > 0, scale=scale)
    return attend(q, k, v, times > 0, scale=scale, bias=times.clamp(min=1).to(q).log())._replace(largest=once.largest)


def with_gradients(function: Callable[..., torch.Tensor], arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    """The function's result on all tensors but the last, and the gradients of its product with the last."""
    leaves = [x.detach().requires_grad_() for x in arguments[:-1]]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result, leaves, arguments[-1].to(result.dtype))]
