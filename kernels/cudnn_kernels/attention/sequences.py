"""Where sequences lie: one value that answers all questions of their lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

WARP = 32
FAR = 1 << 30  # rows


@dataclass
class Sequence:
    """A sequence's lengths, and its first row among those of its batch: 0 unless sequences are packed."""

    batch: Int32
    queries: Int32
    keys: Int32
    first_query: Int32
    first_key: Int32


def count(c: Any, given: Mapping[str, Any]) -> Any:
    """How many there are, by a call's arguments."""
    return given["cum_seqlen_q"].shape[0] - 1 if c.packed else given["q"].shape[0]


def blocks_of(rows: Any, sequences: Any, size: int, packed: bool) -> Any:
    """Blocks of ``size`` rows, of a sequence or of all packed ones, of which some are empty."""
    return rows // size + sequences if packed else cute.ceil_div(rows, size)


@cute.jit
def find_block(offsets: cute.Tensor, block: Int32, size: int) -> tuple[Int32, Int32]:
    """The packed sequence that a block belongs to, and the block's number in it. All lanes of a warp take part.

    Sequence i has the blocks from offset[i] / size + i on, so that no two share one.
    """
    found = count_blocks(offsets, block, size) - 1
    return found, block - first_block(offsets, found, size)


def first_block(offsets: cute.Tensor, sequence: Any, size: int) -> Int32:
    """The first block of a packed sequence."""
    return Int32(offsets[sequence]) // size + sequence


@cute.jit
def count_blocks(offsets: cute.Tensor, block: Int32, size: int) -> Int32:
    """How many sequences begin with this block or an earlier one."""
    lane, sequences, found = cute.arch.lane_idx(), offsets.shape[0] - 1, Int32(0)
    for first in cutlass.range(0, sequences, WARP, unroll=1):
        begun = Boolean(False)
        if first + lane < sequences:
            begun = first_block(offsets, first + lane, size) <= block
        found += cute.arch.popc(cute.arch.vote_ballot_sync(begun))
    return found


def packed(offsets_q: cute.Tensor, offsets_k: cute.Tensor, batch: Int32) -> Sequence:
    """One of several sequences that follow each other."""
    first_query, first_key = Int32(offsets_q[batch]), Int32(offsets_k[batch])
    queries, keys = Int32(offsets_q[batch + 1]) - first_query, Int32(offsets_k[batch + 1]) - first_key
    return Sequence(batch, queries, keys, first_query, first_key)


def matrix(tensor: cute.Tensor, is_packed: bool) -> cute.Tensor:
    """(b, h, s, d), or (t, h, d), as kernels take it: (s, d, h, b), packed ones with a batch of 1."""
    if is_packed:
        layout = cute.append(cute.select(tensor.layout, mode=[0, 2, 1]), cute.make_layout(1))
    else:
        layout = cute.select(tensor.layout, mode=[2, 3, 1, 0])
    return cute.make_tensor(tensor.iterator, layout)


def copied(tensor: cute.Tensor, is_packed: bool) -> cute.Tensor:
    """:func:`matrix` as the copy engine takes it: so that copies of a packed sequence end where it ends.

    The engine knows the bounds of a tensor, not those of its sequences, whose rows it would read and write beyond their
    ends. So rows are counted to 2^30, where every sequence ends, and two dimensions move that place in memory: one by
    rows, and one whose last step leads back by 2^30 rows, as addresses of 64 bits wrap around.
    """
    made = matrix(tensor, is_packed)
    return made if not is_packed else ended(made, made.shape[0] + 1, made.stride[0])


def ended(made: cute.Tensor, steps: Any, step: Any) -> cute.Tensor:
    """:func:`copied` of a matrix whose sequences end after any of so many steps of so many elements."""
    _, head, heads, _ = made.shape
    (row, one, by_head, _), width = made.stride, made.element_type.width
    row, step = pitch(row, width), pitch(step, width)
    turn = Int64((1 << 34) * 8 // width)  # 2^30 steps of 2^34 bytes: once around
    shape, stride = (FAR, head, heads, steps, FAR + 1), (row, one, by_head, step, turn - row)
    return cute.make_tensor(made.iterator, cute.make_layout(shape, stride=stride))


def pitch(stride: Any, width: int) -> Any:
    """A stride in multiples of 16 bytes, as it is unless the dimension has one element: then it may be any."""
    vector = 128 // width
    return cute.assume(Int64(stride) // vector * vector, divby=vector)


def copied_rows(tensor: cute.Tensor, head: Int32, batch: Int32, first: Int32, length: Int32) -> cute.Tensor:
    """(s, d) of a head of a sequence, of the copy engine's coordinates of a :func:`copied` tensor."""
    if cute.rank(tensor) == 4:
        return tensor[None, None, head, batch]
    return ended_rows(tensor, head, first + length, length)


def ended_rows(tensor: cute.Tensor, head: Int32, end: Int32, length: Int32) -> cute.Tensor:
    """(s, d) of a head of a sequence that ends after so many steps, of an :func:`ended` tensor."""
    return cute.domain_offset((FAR - length, 0), tensor[None, None, head, end, FAR])


def rows(tensor: cute.Tensor, is_packed: bool, by_head: bool = True) -> cute.Tensor:
    """(b, h, s), or (t, h), as kernels take it: (s, h, b).

    ``by_head``: of packed sequences, every head's values follow each other, whatever the strides say: so existing
    programs have it.
    """
    if not is_packed:
        layout = cute.select(tensor.layout, mode=[2, 1, 0])
    else:
        layout = cute.append(cute.make_layout(tensor.shape) if by_head else tensor.layout, cute.make_layout(1))
    return cute.make_tensor(tensor.iterator, layout)
