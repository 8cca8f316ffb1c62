"""The CSR transpose of the selection: for each KV block, the query rows that select it."""

from __future__ import annotations

import warnings
from typing import Any

from cudnn.deprecation import renamed_arguments
from cudnn.lazy import torch
from cudnn.runtime import launch
from cudnn_kernels.attention.sparse import LIST_CHUNK, CsrTransposeConfiguration

_SOURCE = "cudnn_kernels.attention.csr_transpose:CsrTranspose"
ROWS = (16, 32, 64, 128)
WARPS = 2048
"""Rows of lists that a warp processes one after the other; the number of warps that fills all SMs."""


def transpose_selection(
    block_indices: Any,
    block_counts: Any,
    cum_seqlen: Any,
    block_size: int,
    is_causal: bool = False,
    chunk_size: int = LIST_CHUNK,
    return_positions: bool = False,
) -> tuple[Any, ...]:
    """The CSR transpose of the selection: for each KV block, the query rows that select it, in ascending order.

    Args:
        block_indices, block_counts, cum_seqlen: (t, hk, n), (t, hk) and (sequences + 1,), int32. cum_seqlen may have
            further dimensions of size 1.
        block_size: Rows of a block.
        is_causal: Leaves out blocks that begin after a row.
        chunk_size: Query rows of a block that a CTA of the KV-stationary kernels processes.
        return_positions: Returns the third result too.

    Returns:
        - ``query_indices``, int32, (t * hk * n,): the query rows, not initialized after the last block's.
        - ``query_offsets``, int32, (hk * blocks + 1, 3) with blocks = ``t // block_size + sequences``. Block b of
            sequence i has the index ``cum_seqlen[i] // block_size + i + b`` within its head of k; its rows are from
            ``query_offsets[index, 0]`` to ``query_offsets[index + 1, 0]``. A block that a row lists twice has it
            twice. The other columns are cumulative numbers of chunks: all, and those of blocks with several.
        - With ``return_positions``, int32, (t, hk, n): where each list entry is in ``query_indices``; -1: nowhere.
    """
    rows, heads, most = block_indices.shape
    cum_seqlen = cum_seqlen.flatten()
    device, sequences = block_indices.device, cum_seqlen.shape[0] - 1
    blocks = rows // block_size + sequences
    if block_indices.numel() and (block_indices.is_cuda or launch.emulated_architecture()):
        lists = (block_indices, block_counts, cum_seqlen)
        query_indices, ends, *positions = _sorted(*lists, block_size, is_causal, heads * blocks, return_positions)
    else:
        indices = _block_ids(block_indices, block_counts, cum_seqlen, block_size, is_causal)
        indices, order = indices.flatten().sort(stable=True)
        query_indices = (order // (heads * most)).int()
        ends = torch.searchsorted(indices, torch.arange(heads * blocks + 1, device=device, dtype=torch.int32)).int()
        position = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), dtype=torch.int64, device=device)
        )
        positions = [position.where(position < ends[-1], -1).int().view(block_indices.shape)]
    chunks = (ends.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor").clamp_(min=1)
    split_chunks = chunks.where(chunks > 1, 0)
    before = (torch.nn.functional.pad(x.cumsum(0, dtype=torch.int32), (1, 0)) for x in (chunks, split_chunks))
    return query_indices, torch.stack([ends, *before], 1), *positions[: int(return_positions)]


@renamed_arguments(part="chunk_size", tells="return_positions")
def choosing_rows(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """The deprecated name of :func:`transpose_selection`."""
    warnings.warn("NSA.choosing_rows is deprecated: use transpose_selection", DeprecationWarning, stacklevel=3)
    return transpose_selection(*args, **kwargs)


def _sorted(
    indices: Any, counts: Any, ends: Any, block: int, causal: bool, blocks: int, return_positions: bool
) -> tuple[Any, ...]:
    """By the kernel, a counting sort: rows by block, the blocks' offsets, and the positions of entries."""
    from cudnn.runtime.run import run

    rows, heads, _ = indices.shape
    rows_per_warp = next((x for x in ROWS if x * WARPS >= rows * heads), ROWS[-1])
    # Pass 0 counts entries by block and warp; pass 1 writes them after a prefix sum.
    passes = [
        CsrTransposeConfiguration(block, causal, writes, rows_per_warp, writes and return_positions)
        for writes in (False, True)
    ]
    counts_by_warp = indices.new_zeros(blocks, -(-rows // rows_per_warp))
    run(_SOURCE, passes[0], indices, counts, ends, counts_by_warp)
    total = counts_by_warp.view(-1).cumsum(0, dtype=torch.int32)
    begins = (total - counts_by_warp.view(-1)).view(counts_by_warp.shape)
    offsets = torch.cat([begins[:, 0], total[-1:]])
    query_indices = torch.empty(indices.numel(), dtype=torch.int32, device=indices.device)
    positions = [torch.full_like(indices, -1)] if return_positions else []
    run(_SOURCE, passes[1], indices, counts, ends, begins, query_indices, *positions)
    return query_indices, offsets, *positions


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
