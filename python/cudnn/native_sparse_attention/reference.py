"""Native sparse attention in PyTorch, in float32 (float64 for float64): sequence by sequence, head of K by head."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cudnn.gemm.formats import wide
from cudnn.lazy import torch
from cudnn.sdpa.layouts import by_head
from cudnn.sdpa.reference import Window, backward, forward
from cudnn_kernels.attention.sparse import ALWAYS, NEWEST


def selection(tensors: Mapping[str, Any], scale: float, block_size: int, causal: bool = False) -> None:
    """Writes O, L and M. The exponentials are rounded to the inputs' type. Rows without a key: 0, 0 and -inf."""
    for rows, head, heads, q, k, v in _heads(tensors):
        scores = scale * q @ k.mT
        times = _times_selected(tensors, rows, head, block_size, causal)
        scores = scores.masked_fill(times == 0, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        weights = times * (scores - largest.masked_fill(largest == -math.inf, 0)).exp()
        total = weights.sum(-1, keepdim=True)
        products = wide(weights.to(tensors["v"].dtype)) @ v
        found = torch.where(total == 0, 0, products / total)
        tensors["o"][rows, heads] = found.transpose(0, 1).to(tensors["o"].dtype)
        tensors["l"][rows, heads] = total.squeeze(-1).T
        tensors["m"][rows, heads] = largest.squeeze(-1).T


def selection_backward(tensors: Mapping[str, Any], scale: float, block_size: int, causal: bool = False) -> None:
    """Writes dQ, dK and dV from the LSE. P and dS are rounded to the inputs' type."""
    dtype = tensors["q"].dtype
    for rows, head, heads, q, k, v in _heads(tensors):
        o, do = (wide(tensors[name][rows, heads]).transpose(0, 1) for name in ("o", "do"))
        times = _times_selected(tensors, rows, head, block_size, causal)
        scores = scale * q @ k.mT - tensors["lse"][rows, heads].T[..., None]
        weights = times * scores.masked_fill(times == 0, -math.inf).exp()
        gradients = wide((weights * (do @ v.mT - (o * do).sum(-1, keepdim=True))).to(dtype))
        tensors["dq"][rows, heads] = (scale * gradients @ k).transpose(0, 1).to(dtype)
        tensors["dk"][rows, head] = (scale * gradients.mT @ q).sum(0).to(dtype)
        tensors["dv"][rows, head] = (wide(weights.to(dtype)).mT @ do).sum(0).to(dtype)


@contextlib.contextmanager
def added(tensors: Mapping[str, Any], names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """The tensors with zeros for ``names``; at the end these are added to the originals (accumulation)."""
    targets = {name: torch.zeros_like(tensors[name]) for name in names}
    yield {**tensors, **targets}
    for name, x in targets.items():
        tensors[name].add_(x)


def _heads(tensors: Mapping[str, Any]) -> Iterator[tuple[slice, int, slice, Any, Any, Any]]:
    """Every sequence's rows and head of K, its heads of Q, and their Q (heads, rows, d), K and V."""
    hk = tensors["k"].shape[1]
    group = tensors["q"].shape[1] // hk
    for first, last in pairwise(tensors["cum_seqlen_q"].tolist()):
        rows = slice(first, last)
        for head in range(hk if last > first else 0):
            heads = slice(head * group, (head + 1) * group)
            q = wide(tensors["q"][rows, heads]).transpose(0, 1)
            yield rows, head, heads, q, *(wide(tensors[name][rows, head]) for name in "kv")


def _times_selected(tensors: Mapping[str, Any], rows: slice, head: int, block_size: int, causal: bool) -> Any:
    """How often each row of a sequence has each key in its list, and, if ``causal``, at or before it: (rows, keys)."""
    block_indices, counts = tensors["block_indices"][rows, head].long(), tensors["block_counts"][rows, head]
    length = len(counts)
    blocks = -(-length // block_size)
    listed = torch.arange(block_indices.shape[1], dtype=torch.int64, device=block_indices.device) < counts[:, None]
    listed &= (block_indices >= 0) & (block_indices < blocks)
    times = torch.zeros(length, blocks, dtype=torch.float32, device=block_indices.device)
    times.scatter_add_(1, block_indices.clamp(0, blocks - 1), listed.float())
    times = times.repeat_interleave(block_size, 1)[:, :length]
    return times.tril() if causal else times


def top_k(
    tensors: Mapping[str, Any], scale: float, block: int, stride: int, count: int, packed: bool, fixed: bool = False
) -> None:
    """Writes the scores and the blocks, the largest first. Missing ones: -inf and -1.

    ``fixed``: the fixed blocks of every row come before them, and the log-sum-exp is a natural one.
    """
    names = ("q", "lse", "topk_scores", "topk_indices")
    if packed:
        ends_q, ends_k = (tensors[name].tolist() for name in ("cum_seqlen_q", "cum_seqlen_k"))
        sequences = [
            {**{n: tensors[n][slice(*q)].transpose(0, 1) for n in names}, "k": tensors["k"][slice(*k)].transpose(0, 1)}
            for q, k in zip(pairwise(ends_q), pairwise(ends_k), strict=True)
        ]
    else:
        sequences = [{n: tensors[n][i] for n in (*names, "k")} for i in range(tensors["q"].shape[0])]
    for x in sequences:
        if fixed:
            x["lse"] = -x["lse"] * math.log2(math.e)
            x["topk_indices"][..., :ALWAYS] = _always(x["q"].shape[1], block, x["q"].device)
        best = x["topk_indices"][..., ALWAYS * fixed :]
        _top_k_of_sequence({**x, "topk_indices": best}, scale, block, block // stride, count)


def _always(rows: int, block: int, device: Any) -> Any:
    """The blocks that every row of a sequence has in its whole list, missing ones -1: (rows, 4)."""
    place = torch.arange(rows, dtype=torch.int64, device=device)
    newest = torch.arange(NEWEST, dtype=torch.int64, device=device)
    newest = ((place + 1) // block - (NEWEST - 1)).clamp(min=1)[:, None] + newest
    newest = newest.masked_fill(newest > (place // block)[:, None], -1)
    return torch.nn.functional.pad(newest, (1, 0)).int()


def _top_k_of_sequence(x: Mapping[str, Any], scale: float, block: int, ratio: int, count: int) -> None:
    queries, (hk, keys, _) = x["q"].shape[1], x["k"].shape
    blocks = -(-keys // ratio)
    row = torch.arange(queries, dtype=torch.int64, device=x["q"].device)[:, None]
    index = torch.arange(blocks, dtype=torch.int64, device=x["q"].device)
    candidates = (index > 0) & (index < (row + 1) // block - 2)
    for head, q in enumerate(x["q"].unflatten(0, (hk, -1))):
        lse = x["lse"].unflatten(0, (hk, -1))[head]
        p = torch.exp2(scale * math.log2(math.e) * (wide(q) @ wide(x["k"][head]).T) + lse[..., None]).sum(0)
        p = torch.nn.functional.pad(p, (0, blocks * ratio - keys)).unflatten(-1, (blocks, ratio)).sum(-1)
        scores = p.masked_fill(~candidates, -math.inf)
        scores = torch.nn.functional.pad(scores, (0, max(count - blocks, 0)), value=-math.inf)
        scores, indices = scores.sort(dim=-1, descending=True, stable=True)
        x["topk_scores"][head] = scores[:, :count]
        x["topk_indices"][head] = indices.int().masked_fill(scores == -math.inf, -1)[:, :count]


class Complete(Window):
    """The compressed keys that a row sees: those that stand for no later row."""

    def hidden(self, queries: int, keys: int, device: Any) -> Any:
        """True for keys that a row does not see: (queries, keys)."""
        ratio = max(queries // max(keys, 1), 1)
        row = torch.arange(queries, dtype=torch.int64, device=device)[:, None]
        key = torch.arange(keys, dtype=torch.int64, device=device)
        return key >= (row + 1) // ratio


def compression(tensors: Mapping[str, Any], scale: float, scale_output: float, packed: bool) -> None:
    """Writes O and, if requested, LSE. Fully masked rows: 0 and -inf."""
    q, lse = tensors["q"], tensors["lse"]
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    row_lse = torch.empty(q.shape[:2] if packed else q.shape[:3], dtype=dtype, device=q.device)
    forward({**tensors, "lse": row_lse}, Complete(None, None), scale, scale_output, 0.0, packed)
    if lse is not None:
        lse.copy_(by_head(row_lse, True).T if packed else row_lse)


def compression_backward(tensors: Mapping[str, Any], scale: float, packed: bool) -> None:
    """Writes dQ, dK and dV from the LSE."""
    lse = tensors["lse"]
    row_lse = lse.T.contiguous().view(lse.shape) if packed else lse  # head by head, as attention has it
    backward({**tensors, "lse": row_lse}, Complete(None, None), scale, packed)


def decode(
    q: Any,
    k: Any,
    v: Any,
    ck: Any,
    cv: Any,
    gates: Any,
    lengths: list[int],
    compressed_lengths: list[int],
    o: Any,
    scale: float,
    sizes: tuple[int, int, int, int],
) -> None:
    """Writes O of the newest row of each sequence, (b, h, d), from caches (b, h, s, d).

    ``sizes``: rows of a block, rows of a compressed key, the best blocks of a list, keys of the window.
    """
    block, stride, count, window = sizes
    group = q.shape[1] // k.shape[1]
    for b, (length, small) in enumerate(zip(lengths, compressed_lengths, strict=True)):
        for head in range(k.shape[1]):
            heads = slice(head * group, (head + 1) * group)
            scaled_q = scale * wide(q[b, heads])
            p = (scaled_q @ wide(ck[b, head, :small]).T).softmax(-1)
            key = torch.arange(length, dtype=torch.int64, device=q.device)
            ratio = block // stride
            sums = torch.nn.functional.pad(p.sum(0), (0, -small % ratio)).unflatten(0, (-1, ratio)).sum(-1)
            candidates = sums[1 : max(length // block - (NEWEST - 1), 1)]
            best = 1 + candidates.sort(descending=True, stable=True).indices[:count]
            selected = torch.cat([best, _always(max(length, 1), block, q.device)[-1]])
            seen = (key[:, None] // block == selected).any(-1)
            found = [p @ wide(cv[b, head, :small])]
            for mask in (seen, key >= length - window):
                scores = (scaled_q @ wide(k[b, head, :length]).T).masked_fill(~mask, -math.inf)
                found.append(scores.softmax(-1) @ wide(v[b, head, :length]))
            weights = wide(gates[b, heads]).unbind(-1)
            branches = [x * g[:, None] for x, g in zip(found, weights, strict=True)]
            o[b, heads] = torch.stack(branches).sum(0).to(o.dtype)
