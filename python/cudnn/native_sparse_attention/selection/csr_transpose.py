"""The CSR transpose of block lists: for each KV block, the rows (queries) whose lists have it."""

from __future__ import annotations

from typing import Any

from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn_kernels.attention.sparse import LIST_CHUNK, CsrTransposeConfiguration

_SOURCE = "cudnn_kernels.attention.csr_transpose:CsrTranspose"
ROWS = (16, 32, 64, 128)
WARPS = 2048
"""Rows of lists that a warp processes one after the other; the number of warps that fills all SMs."""


def choosing_rows(
    block_indices: Any,
    block_counts: Any,
    cum_seqlen: Any,
    block_size: int,
    is_causal: bool = False,
    part: int = LIST_CHUNK,
    tells: bool = False,
) -> tuple[Any, ...]:
    """The CSR transpose of block lists: the rows of each block in ascending order, on the lists' device.

    Args:
        block_indices, block_counts, cum_seqlen: (t, hk, n), (t, hk) and (sequences + 1,), int32. cum_seqlen may have
            further dimensions of size 1.
        block_size: Rows of a block.
        is_causal: Leaves out blocks that begin after a row.
        part: Rows of a block's list that the kernel processes at a time (a chunk).
        tells: Returns the third result too.

    Returns:
        - ``choosing``, int32, (t * hk * n,): row indices, not initialized after the last block's.
        - ``choosing_ends``, int32, (hk * blocks + 1, 3) with blocks = ``t // block_size + sequences``. Block b of
            sequence i has the index ``cum_seqlen[i] // block_size + i + b`` within its head of k; its rows are from
            ``choosing_ends[index, 0]`` to ``choosing_ends[index + 1, 0]``. A block that a row lists twice has it twice.
            The other columns are cumulative numbers of chunks: all, and those of blocks with several.
        - With ``tells``, int32, (t, hk, n): the position of each list entry in ``choosing``, -1 if it has none.
    """
    rows, heads, most = block_indices.shape
    cum_seqlen = cum_seqlen.flatten()
    device, sequences = block_indices.device, cum_seqlen.shape[0] - 1
    blocks = rows // block_size + sequences
    if block_indices.numel() and (block_indices.is_cuda or launch.emulated_architecture()):
        lists = (block_indices, block_counts, cum_seqlen)
        choosing, ends, *positions = _sorted(*lists, block_size, is_causal, heads * blocks, tells)
    else:
        indices = _block_ids(block_indices, block_counts, cum_seqlen, block_size, is_causal)
        indices, order = indices.flatten().sort(stable=True)
        choosing = (order // (heads * most)).int()
        ends = torch.searchsorted(indices, torch.arange(heads * blocks + 1, device=device, dtype=torch.int32)).int()
        position = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), dtype=torch.int64, device=device)
        )
        positions = [position.where(position < ends[-1], -1).int().view(block_indices.shape)]
    chunks = (ends.diff() + part - 1).div(part, rounding_mode="floor").clamp_(min=1)
    split_chunks = chunks.where(chunks > 1, 0)
    before = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (chunks, split_chunks))
    return choosing, torch.stack([ends, *before], 1), *positions[: int(tells)]


def _sorted(
    indices: Any, counts: Any, ends: Any, block: int, causal: bool, blocks: int, tells: bool
) -> tuple[Any, ...]:
    """By the kernel, a counting sort: rows by block, the blocks' offsets, and the positions of entries."""
    from cudnn.runtime.run import run

    rows, heads, _ = indices.shape
    rows_per_warp = next((x for x in ROWS if x * WARPS >= rows * heads), ROWS[-1])
    # Pass 0 counts entries by block and warp; pass 1 writes them after a prefix sum.
    passes = [CsrTransposeConfiguration(block, causal, puts, rows_per_warp, puts and tells) for puts in (False, True)]
    counts_by_warp = indices.new_zeros(blocks, -(-rows // rows_per_warp))
    run(_SOURCE, passes[0], indices, counts, ends, counts_by_warp)
    total = counts_by_warp.view(-1).cumsum(0, dtype=torch.int32)
    begins = (total - counts_by_warp.view(-1)).view(counts_by_warp.shape)
    offsets = torch.cat([begins[:, 0], total[-1:]])
    choosing = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    positions = [torch.full_like(indices, -1)] if tells else []
    run(_SOURCE, passes[1], indices, counts, ends, begins, choosing, *positions)
    return choosing, offsets, *positions


def _block_ids(block_indices: Any, block_counts: Any, cum_seqlen: Any, block_size: int, is_causal: bool) -> Any:
    """In PyTorch: the block index of each list entry over all heads of k; unused entries have the largest index."""
    rows, heads, most = block_indices.shape
    device, sequences = block_indices.device, cum_seqlen.shape[0] - 1
    blocks = rows // block_size + sequences
    row = torch.arange(rows, device=device, dtype=torch.int32)
    sequence = torch.searchsorted(cum_seqlen, row, right=True).sub_(1).clamp_(0, sequences - 1)
    first, last = cum_seqlen[sequence], cum_seqlen[sequence + 1]
    length = torch.where((row >= first) & (row < last), row - first + 1 if is_causal else last - first, 0)
    present = (length + block_size - 1) // block_size  # blocks that the row may attend to
    listed = torch.arange(most, dtype=torch.int64, device=device) < block_counts[..., None]
    listed &= (block_indices >= 0) & (block_indices < present[:, None, None])
    block = block_indices + (first // block_size + sequence).int()[:, None, None]
    block += (blocks * torch.arange(heads, device=device, dtype=torch.int32))[:, None]
    return block.masked_fill(~listed, heads * blocks)
