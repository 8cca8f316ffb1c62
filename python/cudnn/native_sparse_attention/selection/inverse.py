"""The lists of blocks that rows chose, turned around: for each block, the rows that chose it."""

from __future__ import annotations

from typing import Any

from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn_kernels.attention.sparse import LIST_CHUNK, CsrTransposeConfiguration

_SOURCE = "cudnn_kernels.attention.csr_transpose:CsrTranspose"
ROWS = (16, 32, 64, 128)
WARPS = 2048
"""Rows of lists that a warp may have, one after the other, and how many warps are enough for all multiprocessors."""


def choosing_rows(
    block_indices: Any,
    block_counts: Any,
    cum_seqlen: Any,
    block_size: int,
    is_causal: bool = False,
    part: int = LIST_CHUNK,
    tells: bool = False,
) -> tuple[Any, ...]:
    """The rows that chose each block, in ascending order, and where each block's rows end; on the lists' device.

    Args:
        block_indices, block_counts, cum_seqlen: (t, hk, n), (t, hk) and (sequences + 1,), int32. Dimensions of size 1
            may stand around the last one's.
        block_size: rows of a block.
        is_causal: leaves out blocks that begin behind a row.
        part: rows of a list that the kernel takes at a time.
        tells: there is a third result.

    Returns:
        ``choosing``, int32, (t * hk * n,): rows. ``choosing_ends``, int32, (hk * blocks + 1, 3), where blocks are
        ``t // block_size + sequences``: block b of sequence i has number ``cum_seqlen[i] // block_size + i + b`` of its
        head of k, and the rows from ``choosing_ends[number, 0]`` to the next. A block that a row lists twice has it
        twice. The other columns count the parts before: all, and those of lists with several. ``choosing`` is not
        written behind the last list. The third result, int32, (t, hk, n), says where in ``choosing`` each entry of
        the lists is; -1: nowhere.
    """
    rows, heads, most = block_indices.shape
    cum_seqlen = cum_seqlen.flatten()
    device, sequences = block_indices.device, cum_seqlen.shape[0] - 1
    blocks = rows // block_size + sequences
    if block_indices.numel() and (block_indices.is_cuda or launch.emulated_architecture()):
        lists = (block_indices, block_counts, cum_seqlen)
        choosing, ends, *places = _sorted(*lists, block_size, is_causal, heads * blocks, tells)
    else:
        numbers = _numbers(block_indices, block_counts, cum_seqlen, block_size, is_causal)
        numbers, order = numbers.flatten().sort(stable=True)
        choosing = (order // (heads * most)).int()
        ends = torch.searchsorted(numbers, torch.arange(heads * blocks + 1, device=device, dtype=torch.int32)).int()
        found = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), dtype=torch.int64, device=device))
        places = [found.where(found < ends[-1], -1).int().view(block_indices.shape)]
    parts = (ends.diff() + part - 1).div(part, rounding_mode="floor").clamp_(min=1)
    several = parts.where(parts > 1, 0)
    before = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (parts, several))
    return choosing, torch.stack([ends, *before], 1), *places[: int(tells)]


def _sorted(
    indices: Any, counts: Any, ends: Any, block: int, causal: bool, blocks: int, tells: bool
) -> tuple[Any, ...]:
    """By the kernel: rows by block, where each block's begin and the last one's end, and where entries went."""
    from cudnn.runtime.run import run

    rows, heads, _ = indices.shape
    each = next((x for x in ROWS if x * WARPS >= rows * heads), ROWS[-1])
    passes = [CsrTransposeConfiguration(block, causal, puts, each, puts and tells) for puts in (False, True)]
    places = indices.new_zeros(blocks, -(-rows // each))
    run(_SOURCE, passes[0], indices, counts, ends, places)
    total = places.view(-1).cumsum(0, dtype=torch.int32)
    begins = (total - places.view(-1)).view(places.shape)
    found = torch.cat([begins[:, 0], total[-1:]])
    choosing = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    told = [torch.full_like(indices, -1)] if tells else []
    run(_SOURCE, passes[1], indices, counts, ends, begins, choosing, *told)
    return choosing, found, *told


def _numbers(block_indices: Any, block_counts: Any, cum_seqlen: Any, block_size: int, is_causal: bool) -> Any:
    """In PyTorch, the number of the block of every entry of the lists, those of all heads of k; behind them: none."""
    rows, heads, most = block_indices.shape
    device, sequences = block_indices.device, cum_seqlen.shape[0] - 1
    blocks = rows // block_size + sequences
    row = torch.arange(rows, device=device, dtype=torch.int32)
    sequence = torch.searchsorted(cum_seqlen, row, right=True).sub_(1).clamp_(0, sequences - 1)
    first, last = cum_seqlen[sequence], cum_seqlen[sequence + 1]
    length = torch.where((row >= first) & (row < last), row - first + 1 if is_causal else last - first, 0)
    present = (length + block_size - 1) // block_size  # blocks that the row may have
    listed = torch.arange(most, dtype=torch.int64, device=device) < block_counts[..., None]
    listed &= (block_indices >= 0) & (block_indices < present[:, None, None])
    number = block_indices + (first // block_size + sequence).int()[:, None, None]
    number += (blocks * torch.arange(heads, device=device, dtype=torch.int32))[:, None]
    return number.masked_fill(~listed, heads * blocks)
