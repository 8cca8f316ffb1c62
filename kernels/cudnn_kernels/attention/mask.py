"""Which keys a query row sees: causal, sliding-window and compressed masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_

from cudnn_kernels.epilogue.fragment import RowLayout

WORD = 32  # mask bits


@dataclass
class Mask:
    """The window of a sequence: row q sees the keys q + offset - left to q + offset + right, both included.

    ``right`` and ``left`` are None on a side without a bound.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    offset: Int32
    right: Any
    left: Any

    def end(self, row: Any) -> Int32:
        """One past the last key that a row sees; 0 or less if it sees none."""
        if const_expr(self.right is None):
            return self.seqlen_k
        return cutlass.min(self.seqlen_k, row + self.offset + self.right + 1)

    def begin(self, row: Any) -> Int32:
        """The first key that a row sees."""
        if const_expr(self.left is None):
            return Int32(0)
        return cutlass.max(Int32(0), row + self.offset - self.left)

    def n_block_range(self, first: Any, last: Any, size: int) -> tuple[Int32, Int32, Int32, Int32]:
        """n_blocks of ``size`` keys for the rows ``first`` to ``last``: begin, full begin, full end, end.

        All rows see all keys of the n_blocks from full begin to full end (none if full end is not larger): they need no
        mask.
        """
        end = cute.ceil_div(cutlass.max(self.end(last), Int32(0)), size)
        begin = cutlass.min(self.begin(first) // size, end)
        full_end = cutlass.min(cutlass.max(self.end(first), Int32(0)) // size, end)
        full_begin = cutlass.max(cute.ceil_div(self.begin(last), size), begin)
        return begin, full_begin, full_end, end

    def transposed(self) -> Mask:
        """The mask of the transposed problem: which rows see a key, with rows and keys exchanged."""
        return Mask(self.seqlen_k, self.seqlen_q, -self.offset, self.left, self.right)

    def is_full_tile(self, row: Any, rows: int, key: Any, keys: int) -> Boolean:
        """Whether all of ``rows`` rows exist and see all of ``keys`` keys."""
        last = row + rows - 1
        return (last < self.seqlen_q) & (key + keys <= self.end(row)) & (key >= self.begin(last))

    def apply(self, scores: cute.Tensor, layout: RowLayout, thread: Int32, row: Any, key: Any, width: int) -> None:
        """Sets the masked scores of a tile that begins at (row, key) to -inf.

        A word of mask bits per 32 columns: ptxas moves seven of its bits to predicates with one instruction (R2P).
        """
        for slot in range(layout.slots):
            row_idx, order = row + layout.row(thread, slot), layout.order(width, slot)
            end = Int32(select_(row_idx < self.seqlen_q, self.end(row_idx) - key, Int32(0)))
            for word in range(0, len(order), WORD):
                visible = low_bits(layout.columns_before(thread, end) - word)
                if self.left is not None:
                    visible = visible & ~low_bits(layout.columns_before(thread, self.begin(row_idx) - key) - word)
                for bit, i in enumerate(order[word : word + WORD]):
                    scores[i] = Float32(select_((visible & 1 << bit) != 0, scores[i], -Float32.inf))


def low_bits(count: Int32) -> Int32:
    """A word whose ``count`` lowest bits are 1: 0 for counts below 0, all bits from 32 on, since PTX shifts clamp."""
    shift, count = "shl.b32 {$w0}, 1, {$r0};", cutlass.max(count, Int32(0))
    return cute.arch.inline_ptx(shift, write_only_types=[Int32], read_only_args=[count]) - 1


@dataclass
class PackGQAMask(Mask):
    """PackGQA: rows are (query, head in group) pairs; the ``qhead_per_kvhead`` heads of a query are adjacent rows."""

    qhead_per_kvhead: Int32

    def end(self, row: Any) -> Int32:
        return super().end(row // self.qhead_per_kvhead)

    def begin(self, row: Any) -> Int32:
        return super().begin(row // self.qhead_per_kvhead)


@dataclass
class CompressedMask(Mask):
    """NSA's compressed keys, each of ``ratio`` rows: row q sees those whose last row is q or before."""

    ratio: Int32

    def end(self, row: Any) -> Int32:
        return cutlass.min(self.seqlen_k, (row + 1) // self.ratio)

    def transposed(self) -> Mask:
        return TransposedCompressedMask(self.seqlen_k, self.seqlen_q, Int32(0), None, Int32(0), self.ratio)


def make_mask(configuration: Any, seqlen_q: Int32, seqlen_k: Int32, right: Int32, left: Int32) -> Mask:
    """The mask of a sequence: a window, or the causal mask of compressed keys."""
    c = configuration
    if c.compressed:
        return CompressedMask(
            seqlen_q, seqlen_k, Int32(0), None, None, cutlass.max(seqlen_q // cutlass.max(seqlen_k, 1), 1)
        )
    offset = Int32(0) if c.top_left else seqlen_k - seqlen_q
    return Mask(seqlen_q, seqlen_k, offset, right if c.right else None, left if c.left else None)


@dataclass
class TransposedCompressedMask(CompressedMask):
    """The transposed :class:`CompressedMask`: a compressed key is seen by the last of its rows and by later ones."""

    def begin(self, row: Any) -> Int32:
        return (row + 1) * self.ratio - 1

    def end(self, row: Any) -> Int32:
        return self.seqlen_k
