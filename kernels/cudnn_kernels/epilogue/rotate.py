"""Rotation of pairs of columns by angles of rows, both of them in one thread, in one part; and their order in heads.

A thread reads its share of the cosines and sines straight from memory: rows of the tables are short, and the same for
every head, so that most reads find them in a cache. Those of a part are asked for while the stores of the one before it
read shared memory, those of a tile's first part during the products.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.fragment import Fragment, pick
from cudnn_kernels.epilogue.operation import Operation, Plan, Tile
from cudnn_kernels.fakes import DTYPES

VECTOR = 16  # bytes that a thread reads at once, at most
EARLY = 64  # registers of a thread for the cosines and sines of a part, at most, where they are read ahead


@dataclass(frozen=True)
class Unit:
    """Columns of a part that are rotated or not as one: ``start`` is the first of them in the part."""

    start: int
    lefts: Sequence[int]  # positions of left columns, of those that a thread has of a row


class _Heads(Operation):
    """Works on ``size`` of a head's columns, those of a part unit by unit; a unit begins every ``step`` columns."""

    def __init__(self, declaration: Any, plan: Plan, width: int, size: int, step: int) -> None:
        super().__init__(declaration, plan, width)
        self.size = size
        self.columns = min(width, step, size)  # of a unit
        self.starts = range(0, width, min(width, step))

    def wanted(self, tile: Tile, part: int, start: int) -> Any:
        """Whether a unit's columns are some to work on. Known when the kernel is compiled, if possible."""
        o = self.o
        whole = self.plan.tile_columns % o.head == 0  # heads in a tile
        place = (self.place(part, start) if whole else self.column(tile, part, start)) % o.head
        conditions = [place >= o.first] if o.first else []
        conditions += [place < o.first + self.size] if o.first + self.size < o.head else []
        return met(conditions + self.further(tile, part, start))

    def further(self, tile: Tile, part: int, start: int) -> list[Any]:
        """More conditions of that."""
        return []


class Deinterleave(_Heads):
    """Where a thread has a whole row, values change places. Else four threads share it, which exchange values."""

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width, declaration.size, declaration.size)
        layout = plan.layout
        if layout.neighbours > 1 and ((layout.neighbours, layout.run) != (4, 2) or declaration.size % 16):
            raise ValueError(f"size: got {declaration.size}; allowed: multiples of 16")

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        for start in self.starts:
            provided(
                self.wanted(tile, part, start), lambda start=start: self.reorder(values["x"], tile.thread % 4, start)
            )

    def reorder(self, x: Fragment, quarter: Int32, start: int) -> None:
        """Puts the columns of a unit into their order. ``quarter`` tells apart threads that share rows."""
        neighbours = x.rows.neighbours
        for slot in range(x.rows.slots):
            first = start // neighbours
            order = x.rows.order(self.width, slot)[first : first + self.columns // neighbours]
            mine = [x.values[i] for i in order]
            mine = [*mine[0::2], *mine[1::2]] if neighbours == 1 else self.exchanged(mine, quarter)
            for i, value in zip(order, mine, strict=True):
                x.values[i] = value

    def exchanged(self, mine: list[Float32], quarter: Int32) -> list[Float32]:
        """A thread's values in the new order, from those in the old. Thread q has columns 8 j + 2 q and the next.

        Of the new order's first half, columns 8 i + 2 q and the next are the old ones 16 i + 4 q and 16 i + 4 q + 2:
        the threads 2 q and 2 q + 1, modulo four, have them, in the lower eight of sixteen columns for q < 2, in the
        upper eight for others. So each thread has a value for one thread of either kind. In a first exchange even
        threads send that of the lower eight and odd ones that of the upper, in a second one the other way round.
        """
        odd, upper = quarter % 2 == 1, quarter // 2 == 1
        near = cute.arch.lane_idx() // 4 * 4 + quarter % 2 * 2
        lanes = [near + quarter // 2, near + 1 - quarter // 2]
        found = []
        for side in range(2):
            for i in range(0, len(mine), 4):
                low, high = mine[i + side], mine[i + 2 + side]
                sent = [pick(odd, high, low), pick(odd, low, high)]
                got = [cute.arch.shuffle_sync(value, lane) for value, lane in zip(sent, lanes, strict=True)]
                found += [pick(upper, got[1], got[0]), pick(upper, got[0], got[1])]
        return found


class Rotate(_Heads):
    """Two products and two sums for every pair."""

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        o, layout = declaration, plan.layout
        step = math.gcd(width, o.head, o.rotary) if o.interleaved else o.step
        super().__init__(declaration, plan, width, o.rotary, step)
        self.element = DTYPES[o.dtype]
        held = layout.slots * len(self.starts) * self.columns // layout.neighbours * self.element.width // 32
        self.early = not o.whole and held <= EARLY  # whole rows would take too many registers for long
        self.apart = 1 if o.interleaved else self.columns // 2 // layout.neighbours  # positions from left to right
        held = self.columns // layout.neighbours
        lefts = range(0, held, 2) if o.interleaved else range(held // 2)
        self.units = [Unit(start, [start // layout.neighbours + left for left in lefts]) for start in self.starts]
        run = layout.run // 2 if o.interleaved else layout.run
        self.run = min(run, len(lefts), VECTOR * 8 // self.element.width)  # pairs next to each other
        if not o.interleaved and self.columns // 2 % (layout.neighbours * layout.run) and layout.neighbours > 1:
            raise ValueError(f"rotary: got {o.rotary}; allowed: multiples of {2 * layout.neighbours * layout.run}")

    def begin(self, tile: Tile) -> None:
        if self.o.positions:
            slots = range(self.plan.layout.slots)
            self.positions = [self.parameters[2][self.last_row(tile, slot)] for slot in slots]
        if self.early:
            self.fetch(tile, 0)

    def ahead(self, tile: Tile, part: int) -> None:
        if self.early and part > 0:
            self.fetch(tile, part)

    def last_row(self, tile: Tile, slot: int) -> Int32:
        """One of the thread's rows, or the last one that there is."""
        return cutlass.min(self.row(tile, slot), tile.end - 1)

    def table_row(self, tile: Tile, slot: int) -> Int32:
        """The row of the tables for one of the thread's."""
        if not self.o.positions:
            return self.last_row(tile, slot)
        return cutlass.max(cutlass.min(self.positions[slot], self.parameters[0].shape[0] - 1), 0)

    def further(self, tile: Tile, part: int, start: int) -> list[Any]:
        column, o = self.column(tile, part, start), self.o
        return ([column >= o.begin] if o.begin else []) + ([column < o.end] if o.end is not None else [])

    def fetch(self, tile: Tile, part: int) -> None:
        """Asks for the cosines and sines of a part: for every unit, those of each of the thread's rows. Also for units
        that only the kernel finds not to be rotated: registers that are filled in a branch would be spilled.
        """
        self.tables = [self.registers(unit) for unit in self.units]
        for unit, pairs in zip(self.units, self.tables, strict=True):
            if self.wanted(tile, part, unit.start) is not False:
                self.load(tile, part, unit, pairs)

    def registers(self, unit: Unit) -> list[list[cute.Tensor]]:
        """Registers for the cosines and sines of a unit, for each of the thread's rows."""
        count = 4 if self.o.whole else 2
        return [
            [cute.make_rmem_tensor(len(unit.lefts), self.element) for _ in range(count)]
            for _ in range(self.plan.layout.slots)
        ]

    def load(self, tile: Tile, part: int, unit: Unit, pairs: list[list[cute.Tensor]]) -> None:
        """Reads the cosines and sines of a unit."""
        first = self.first_pair(tile, part, unit)
        for slot, both in enumerate(pairs):
            row = self.table_row(tile, slot)
            for which, target in enumerate(both):  # for lefts, then for rights
                table, right = self.parameters[which % 2], which // 2 * (self.o.rotary // 2)
                start = table.iterator + cute.crd2idx((row, first + right), table.layout)
                for i in range(0, len(unit.lefts), self.run):
                    place = (start + self.pair(i)).align(self.run * self.element.width // 8)
                    source = cute.make_tensor(place, cute.make_layout(self.run))
                    cute.autovec_copy(source, cute.local_tile(target, (self.run,), (i // self.run,)))

    def first_pair(self, tile: Tile, part: int, unit: Unit) -> Any:
        """The number of the thread's first pair."""
        o, layout = self.o, self.plan.layout
        period = o.rotary if o.head % o.rotary == 0 else o.head
        aligned = self.plan.tile_columns % period == 0
        column = self.place(part, unit.start) if aligned else self.column(tile, part, unit.start)
        pair = column % period % o.rotary // (2 if o.interleaved else 1)
        return pair + layout.column(tile.thread, 0) // (2 if o.interleaved else 1)

    def pair(self, index: int) -> int:
        """How far behind a thread's first pair in a unit another one is."""
        run = self.plan.layout.run // (2 if self.o.interleaved else 1)
        return index // run * run * self.plan.layout.neighbours + index % run

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        for index, unit in enumerate(self.units):
            wanted = self.wanted(tile, part, unit.start)
            if not self.early:
                provided(wanted, lambda unit=unit: self.turn(tile, part, values["x"], unit))
            elif wanted is not False:
                self.rotate(tile, values["x"], unit, self.tables[index], wanted)

    def turn(self, tile: Tile, part: int, x: Fragment, unit: Unit) -> None:
        """Rotates a unit, by cosines and sines that are read now."""
        pairs = self.registers(unit)
        self.load(tile, part, unit, pairs)
        self.rotate(tile, x, unit, pairs, True)

    def rotate(self, tile: Tile, x: Fragment, unit: Unit, pairs: list[list[cute.Tensor]], wanted: Any) -> None:
        """Rotates the pairs of a unit, if that is wanted."""
        for slot, tables in enumerate(pairs):
            order = x.rows.order(self.width, slot)
            wide = [table.load().to(Float32) for table in tables]
            for i, position in enumerate(unit.lefts):
                one, other = order[position], order[position + self.apart]
                left, right = x.values[one], x.values[other]
                angles = [table[i] for table in wide] * (4 // len(wide))  # cos and sin of the left, and of the right
                if self.o.positions:
                    exists = self.positions[slot] == self.table_row(tile, slot)
                    angles[0::2] = [pick(exists, cos, float("nan")) for cos in angles[0::2]]
                if self.o.inverse:
                    angles[1::2] = [-sin for sin in angles[1::2]]
                turned = fma(left, angles[0], -(right * angles[1])), fma(right, angles[2], left * angles[3])
                for place, new, old in zip((one, other), turned, (left, right), strict=True):
                    x.values[place] = new if wanted is True else pick(wanted, new, old)


def met(conditions: list[Any]) -> Any:
    """Whether all are, of which some may be known when the kernel is compiled."""
    if any(known is False for known in conditions):
        return False
    return functools.reduce(operator.and_, [x for x in conditions if x is not True], True)


def provided(condition: Any, act: Callable[[], None]) -> None:
    """Acts where the condition is met, which it is for all threads of a group or for none."""
    if isinstance(condition, bool):
        if condition:
            act()
    else:
        branch(condition, act)


@cute.jit
def branch(condition: Any, act: cutlass.Constexpr[Callable[[], None]]) -> None:
    """Acts where the condition is met."""
    if condition:
        act()
