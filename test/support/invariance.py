"""Sequences among others: their results and gradients, to be compared bit for bit whatever the others are."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from cudnn.ops import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Lengths = tuple[int, int]
"""Queries and keys."""


def drawn(lengths: Lengths, heads: tuple[int, int], head: tuple[int, int], own: bool, device: Any) -> list[Any]:
    """q, k, v and the gradient of O of a sequence, (s, h, d) in bfloat16: its ``own``, always the same, or any."""
    (queries, keys), (hq, hk), (d, dv) = lengths, heads, head
    shapes = (queries, hq, d), (keys, hk, d), (keys, hk, dv), (queries, hq, dv)
    if not own:
        return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes]


def packed(
    own: Lengths, others: list[Lengths], place: int, heads: tuple[int, int], head: tuple[int, int], **options: Any
) -> list[torch.Tensor]:
    """O, LSE and the gradients of a sequence that has others before and behind it, by ``flash_attn_varlen_func``."""
    device = options.pop("device", None)
    sequences = [drawn(x, heads, head, False, device) for x in others]
    sequences.insert(place, drawn(own, heads, head, True, device))
    q, k, v, do = (torch.cat(x) for x in zip(*sequences, strict=True))
    counts = [*others[:place], own, *others[place:]]
    ends = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=device) for n in zip(*counts, strict=True)]
    longest = [max(n) for n in zip(*counts, strict=True)]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-1, 1, heads[0], dtype=torch.float32, device=device)
    o, lse = flash_attn_varlen_func(*leaves, *ends, *longest, learnable_sink=sinks, return_lse=True, **options)
    rows, keys = (slice(sum(n[:place]), sum(n[: place + 1])) for n in zip(*counts, strict=True))
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    return [o.detach()[rows], lse.detach()[:, rows], dq[rows], dk[keys], dv[keys]]


def batched(
    own: Lengths, batch: int, place: int, heads: tuple[int, int], head: tuple[int, int], **options: Any
) -> list[torch.Tensor]:
    """The same of an entry of a batch, by ``flash_attn_func``."""
    device = options.pop("device", None)
    entries = [drawn(own, heads, head, i == place, device) for i in range(batch)]
    q, k, v, do = (torch.stack(x) for x in zip(*entries, strict=True))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = flash_attn_func(*leaves, return_lse=True, **options)
    return [x.detach()[place] for x in (o, lse, *torch.autograd.grad(o, leaves, do))]


def decoded(own: int, others: list[int], place: int, rows: int, page: int = 0, **options: Any) -> list[torch.Tensor]:
    """O and LSE of ``rows`` new tokens of a sequence with ``own`` keys, by ``flash_attn_with_kvcache``."""
    device, heads, head = options.pop("device", None), (8, 2), (64, 64)
    lengths = [*others[:place], own, *others[place:]]
    room = max(lengths) + rows + 7
    room += -room % max(page, 1)
    entries = [drawn((rows, n + rows), heads, head, i == place, device) for i, n in enumerate(lengths)]
    caches: Any = [
        torch.full((len(lengths), room, heads[1], 64), 3.0, dtype=torch.bfloat16, device=device) for _ in "kv"
    ]
    for i, (_, k, v, _) in enumerate(entries):
        for cache, x in zip(caches, (k, v), strict=True):
            cache[i, : lengths[i]] = x[: lengths[i]]
    table = None
    if page:
        table = torch.arange(len(lengths) * room // page, dtype=torch.int32, device=device).view(len(lengths), -1)
        caches = [x.view(-1, page, *x.shape[2:]) for x in caches]
    q, k, v = (torch.stack([x[i][-rows:] for x in entries]) for i in range(3))
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    results = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=counts, block_table=table, causal=True, return_softmax_lse=True, **options
    )
    return [x[place] for x in results]
