"""Blocks of keys, on Hopper, with the rows that chose each."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from cudnn_kernels.attention import sequences
from cudnn_kernels.sm90.attention_forward import ROWS
from cudnn_kernels.sm90.selected_rows import SelectedRows


@dataclass
class Chosen:
    """What a CTA has: some keys of a block, their head, and a part of the list of rows that chose it.

    ``key`` is the first one of its sequence's, ``first`` that of the sequence, ``keys`` are what the CTA has. Where the
    list has several ``parts``, sums of each go to its ``slot``.
    """

    head: Int32
    key: Int32
    first: Int32
    keys: Int32
    begin: Int32
    end: Int32
    parts: Int32
    slot: Int32


class ChosenRows(SelectedRows):
    """What kernels have in common whose CTAs have a block of keys, and a part of the list of rows that chose it."""

    @cute.jit
    def part(self, part: Int32, tile: Int32, ends: cute.Tensor, offsets: cute.Tensor) -> Chosen:
        """What a CTA has: a part, of those of all lists. All lanes of a warp take part."""
        lists = ends.shape[0] - 1
        low, high = Int32(0), Int32(lists)  # the last list that begins with this part or before
        while low + 1 < high:
            middle = (low + high) // 2
            before = ends[middle, 1] <= part
            low, high = Int32(select_(before, middle, low)), Int32(select_(before, high, middle))
        mine = self.chosen(low, tile, ends, offsets)
        number = part - ends[low, 1]
        begin = mine.begin + number * self.s.part
        keys = Int32(select_(part < ends[lists, 1], mine.keys, Int32(0)))
        end = cutlass.min(begin + self.s.part, mine.end)
        return replace(mine, keys=keys, begin=begin, end=end, slot=mine.slot + number)

    @cute.jit
    def chosen(self, number: Int32, tile: Int32, ends: cute.Tensor, offsets: cute.Tensor) -> Chosen:
        """A list by its number, and what of its block's keys a tile has."""
        s = self.s
        blocks = (ends.shape[0] - 1) // s.key_heads
        sequence, own = sequences.find_block(offsets, number % blocks, s.block)
        first = Int32(offsets[sequence])
        key = own * s.block + tile * ROWS
        keys = cutlass.min(offsets[sequence + 1] - first - key, min(s.block, ROWS))
        parts = ends[number + 1, 1] - ends[number, 1]
        return Chosen(number // blocks, key, first, keys, ends[number, 0], ends[number + 1, 0], parts, ends[number, 2])
