"""Which keys a query row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_

from cudnn_kernels.epilogue.fragment import RowLayout

WORD = 32  # bits


@dataclass
class Mask:
    """The window of a sequence: row q sees the keys from q + offset - left to q + offset + right, both included.

    ``right`` and ``left`` are None where the window has no end on that side.
    """

    queries: Int32
    keys: Int32
    offset: Int32
    right: Any
    left: Any

    def end(self, row: Any) -> Int32:
        """One more than the last key that a row sees; 0 or less where it sees none."""
        if const_expr(self.right is None):
            return self.keys
        return cutlass.min(self.keys, row + self.offset + self.right + 1)

    def begin(self, row: Any) -> Int32:
        """The first key that a row sees."""
        if const_expr(self.left is None):
            return Int32(0)
        return cutlass.max(Int32(0), row + self.offset - self.left)

    def blocks(self, first: Any, last: Any, size: int) -> tuple[Int32, Int32, Int32, Int32]:
        """Blocks of ``size`` keys for the rows from ``first`` to ``last``: begin, whole begin, whole end, end.

        All rows see all keys of the blocks from the whole begin to the whole end, if it is larger.
        """
        end = cute.ceil_div(cutlass.max(self.end(last), Int32(0)), size)
        begin = cutlass.min(self.begin(first) // size, end)
        whole_end = cutlass.min(cutlass.max(self.end(first), Int32(0)) // size, end)
        whole_begin = cutlass.max(cute.ceil_div(self.begin(last), size), begin)
        return begin, whole_begin, whole_end, end

    def turned(self) -> Mask:
        """Which rows see a key: the same with rows for keys."""
        return Mask(self.keys, self.queries, -self.offset, self.left, self.right)

    def whole(self, row: Any, rows: int, key: Any, keys: int) -> Boolean:
        """Whether all of so many rows exist and see all of so many keys."""
        last = row + rows - 1
        return (last < self.queries) & (key + keys <= self.end(row)) & (key >= self.begin(last))

    def hide(self, scores: cute.Tensor, layout: RowLayout, thread: Int32, row: Any, key: Any, width: int) -> None:
        """Makes scores that do not count -inf, of a tile that begins at a row and a key.

        Which ones count are bits of a word: machine code turns seven of them into predicates at a time.
        """
        for slot in range(layout.slots):
            mine, order = row + layout.row(thread, slot), layout.order(width, slot)
            end = Int32(select_(mine < self.queries, self.end(mine) - key, Int32(0)))
            for word in range(0, len(order), WORD):
                seen = ones(layout.before(thread, end) - word)
                if self.left is not None:
                    seen = seen & ~ones(layout.before(thread, self.begin(mine) - key) - word)
                for place, i in enumerate(order[word : word + WORD]):
                    scores[i] = Float32(select_((seen & 1 << place) != 0, scores[i], -Float32.inf))


def ones(count: Int32) -> Int32:
    """A word whose lowest bits, so many, are 1: none below 0, and all from 32 on, since PTX shifts as far as told."""
    shift, count = "shl.b32 {$w0}, 1, {$r0};", cutlass.max(count, Int32(0))
    return cute.arch.inline_ptx(shift, write_only_types=[Int32], read_only_args=[count]) - 1


@dataclass
class SharedMask(Mask):
    """Rows of ``share`` heads, of which each query has one after the other."""

    share: Int32

    def end(self, row: Any) -> Int32:
        return super().end(row // self.share)

    def begin(self, row: Any) -> Int32:
        return super().begin(row // self.share)


@dataclass
class CompressedMask(Mask):
    """Keys that stand for ``ratio`` rows each: row q sees those whose rows end with it or before it."""

    ratio: Int32

    def end(self, row: Any) -> Int32:
        return cutlass.min(self.keys, (row + 1) // self.ratio)

    def turned(self) -> Mask:
        return LaterRows(self.keys, self.queries, Int32(0), None, Int32(0), self.ratio)


def mask_of(configuration: Any, queries: Int32, keys: Int32, right: Int32, left: Int32) -> Mask:
    """A sequence's mask, of a kernel's configuration: the window's ends, or that of compressed keys."""
    c = configuration
    if c.compressed:
        return CompressedMask(queries, keys, Int32(0), None, None, cutlass.max(queries // cutlass.max(keys, 1), 1))
    offset = Int32(0) if c.top_left else keys - queries
    return Mask(queries, keys, offset, right if c.right else None, left if c.left else None)


@dataclass
class LaterRows(CompressedMask):
    """:class:`CompressedMask` turned: a key is seen by the last of the rows that it stands for, and by later ones."""

    def begin(self, row: Any) -> Int32:
        return (row + 1) * self.ratio - 1

    def end(self, row: Any) -> Int32:
        return self.keys
