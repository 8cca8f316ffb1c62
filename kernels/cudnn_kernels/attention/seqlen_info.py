"""Sequence lengths and offsets, and ragged (varlen) TMA views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cudnn_kernels.threads import WARP_SIZE

RAGGED_EXTENT = 1 << 30  # extent of the row mode of a ragged view


@dataclass
class SeqlenInfo:
    """The lengths of a sequence, and its first rows in the packed tensors: offsets are 0 unless the batch is varlen."""

    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    offset_q: Int32
    offset_k: Int32


def num_sequences(c: Any, arguments: Mapping[str, Any]) -> Any:
    """The number of sequences of a call's arguments."""
    return arguments["cum_seqlen_q"].shape[0] - 1 if c.varlen else arguments["q"].shape[0]


def num_blocks(rows: Any, num_sequences: Any, size: int, is_varlen: bool) -> Any:
    """Blocks of ``size`` rows of a sequence, or an upper bound for a whole varlen batch: some of them are empty."""
    return rows // size + num_sequences if is_varlen else cute.ceil_div(rows, size)


@cute.jit
def find_block(cu_seqlens: cute.Tensor, block: Int32, size: int) -> tuple[Int32, Int32]:
    """The sequence that block number ``block`` of a varlen batch belongs to, and its index in it. Warp-collective.

    Sequence i has the blocks from cu_seqlens[i] / size + i on, so no two sequences share a block.
    """
    sequence = count_started_sequences(cu_seqlens, block, size) - 1
    return sequence, block - first_block(cu_seqlens, sequence, size)


def first_block(cu_seqlens: cute.Tensor, sequence: Any, size: int) -> Int32:
    """The first block of a sequence of a varlen batch."""
    return Int32(cu_seqlens[sequence]) // size + sequence


@cute.jit
def count_started_sequences(cu_seqlens: cute.Tensor, block: Int32, size: int) -> Int32:
    """How many sequences begin at this block or before."""
    lane, num_sequences, count = cute.arch.lane_idx(), cu_seqlens.shape[0] - 1, Int32(0)
    for first in cutlass.range(0, num_sequences, WARP_SIZE, unroll=1):
        started = Boolean(False)
        if first + lane < num_sequences:
            started = first_block(cu_seqlens, first + lane, size) <= block
        count += cute.arch.popc(cute.arch.vote_ballot_sync(started))
    return count


def varlen_seqlen_info(cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, batch: Int32) -> SeqlenInfo:
    """One sequence of a varlen batch."""
    offset_q, offset_k = Int32(cu_seqlens_q[batch]), Int32(cu_seqlens_k[batch])
    seqlen_q, seqlen_k = Int32(cu_seqlens_q[batch + 1]) - offset_q, Int32(cu_seqlens_k[batch + 1]) - offset_k
    return SeqlenInfo(batch, seqlen_q, seqlen_k, offset_q, offset_k)


def as_sdhb(tensor: cute.Tensor, is_varlen: bool) -> cute.Tensor:
    """Reorders (b, h, s, d), or (t, h, d), to (s, d, h, b); varlen tensors get a batch of 1."""
    if is_varlen:
        layout = cute.append(cute.select(tensor.layout, mode=[0, 2, 1]), cute.make_layout(1))
    else:
        layout = cute.select(tensor.layout, mode=[2, 3, 1, 0])
    return cute.make_tensor(tensor.iterator, layout)


def ragged_tma_view(tensor: cute.Tensor, is_varlen: bool) -> cute.Tensor:
    """:func:`as_sdhb` as a TMA tensor whose boxes are clipped at the end of each sequence (ragged TMA).

    TMA clips at the bounds of the tensor, not at those of a sequence in a varlen batch. So the row mode has 2^30 rows,
    and a sequence ends at row 2^30: a box that starts ``length`` rows before is clipped after ``length`` rows. Two more
    modes place that end in memory: one counts rows, the other, by one step, goes back by 2^30 rows, as 64-bit addresses
    wrap around.
    """
    tensor_sdhb = as_sdhb(tensor, is_varlen)
    return tensor_sdhb if not is_varlen else ragged_view(tensor_sdhb, tensor_sdhb.shape[0] + 1, tensor_sdhb.stride[0])


def ragged_view(tensor: cute.Tensor, steps: Any, step: Any) -> cute.Tensor:
    """A ragged view for sequences that end at a multiple of ``step`` elements, of which there are ``steps``."""
    _, head, heads, _ = tensor.shape
    (row, elem_stride, head_stride, _), width = tensor.stride, tensor.element_type.width
    row, step = aligned_stride(row, width), aligned_stride(step, width)
    wrap = Int64((1 << 34) * 8 // width)  # 2^30 steps of 2^34 bytes are 2^64: addresses wrap around
    shape = (RAGGED_EXTENT, head, heads, steps, RAGGED_EXTENT + 1)
    stride = (row, elem_stride, head_stride, step, wrap - row)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def aligned_stride(stride: Any, width: int) -> Any:
    """A stride as a multiple of 16 bytes, which TMA requires. Modes of one element may have any stride, which is
    rounded.
    """
    vector = 128 // width
    return cute.assume(Int64(stride) // vector * vector, divby=vector)


def tma_rows(tensor: cute.Tensor, head: Int32, batch: Int32, first: Int32, length: Int32) -> cute.Tensor:
    """(s, d) of one head of a sequence, from the coordinates of a :func:`ragged_tma_view`."""
    if cute.rank(tensor) == 4:
        return tensor[None, None, head, batch]
    return ragged_rows(tensor, head, first + length, length)


def ragged_rows(tensor: cute.Tensor, head: Int32, end: Int32, length: Int32) -> cute.Tensor:
    """(s, d) of one head of a sequence that ends after ``end`` steps, from a :func:`ragged_view`."""
    return cute.domain_offset((RAGGED_EXTENT - length, 0), tensor[None, None, head, end, RAGGED_EXTENT])


def lse_view(tensor: cute.Tensor, is_varlen: bool, by_head: bool = True) -> cute.Tensor:
    """Reorders (b, h, s), or (t, h), to (s, h, b).

    ``by_head``: each head's values of a varlen batch are contiguous, whatever the strides are, as in the existing API.
    """
    if not is_varlen:
        layout = cute.select(tensor.layout, mode=[2, 1, 0])
    else:
        layout = cute.append(cute.make_layout(tensor.shape) if by_head else tensor.layout, cute.make_layout(1))
    return cute.make_tensor(tensor.iterator, layout)
