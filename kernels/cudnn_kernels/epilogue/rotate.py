"""Rotation of pairs of columns by angles of rows: both columns of a pair are in one thread, in one part.

A thread reads its share of the cosines and sines straight from memory: rows of the tables are short, and the same for
every head, so that most reads find them in a cache. Those of a part are asked for while the stores of the one before it
read shared memory, those of a tile's first part during the products.
"""

from __future__ import annotations

import functools
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


@dataclass(frozen=True)
class Unit:
    """Columns of a part that are rotated or not as one: ``start`` is the first of them in the part."""

    start: int
    lefts: Sequence[int]  # positions of left columns, of those that a thread has of a row


class Rotate(Operation):
    """Two products and two sums for every pair."""

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        o, layout = declaration, plan.layout
        self.element = DTYPES[o.dtype]
        self.columns = min(width, o.rotary)  # of a unit
        apart = 1 if o.interleaved else (self.columns // 2) // layout.neighbours
        self.apart = apart  # positions from left to right
        held = self.columns // layout.neighbours
        lefts = range(0, held, 2) if o.interleaved else range(held // 2)
        self.units = [
            Unit(start, [start // layout.neighbours + left for left in lefts])
            for start in range(0, width, self.columns)
        ]  # fmt: skip
        run = layout.run // 2 if o.interleaved else layout.run
        self.run = min(run, len(lefts), VECTOR * 8 // self.element.width)  # pairs next to each other
        if not o.interleaved and self.columns // 2 % (layout.neighbours * layout.run) and layout.neighbours > 1:
            raise ValueError(f"rotary: got {o.rotary}; allowed: multiples of {2 * layout.neighbours * layout.run}")

    def begin(self, tile: Tile) -> None:
        self.rows = [self.table_row(tile, slot) for slot in range(self.plan.layout.slots)]
        self.fetch(tile, 0)

    def ahead(self, tile: Tile, part: int) -> None:
        if part > 0:
            self.fetch(tile, part)

    def table_row(self, tile: Tile, slot: int) -> tuple[Int32, Any]:
        """The row of the tables for one of the thread's, and whether there is such a row."""
        cos, _, *positions = self.parameters
        row = cutlass.min(self.row(tile, slot), tile.end - 1)
        wanted = positions[0][row] if positions else row
        there = cutlass.max(cutlass.min(wanted, cos.shape[0] - 1), 0)
        return there, there == wanted

    def turns(self, tile: Tile, part: int, unit: Unit) -> Any:
        """Whether the columns are rotated. Known when the kernel is compiled, if possible."""
        o, column = self.o, self.column(tile, part, unit.start)
        whole = self.plan.tile_columns % o.head == 0  # heads in a tile
        place = (self.place(part, unit.start) if whole else column) % o.head
        conditions = [] if o.head == o.rotary else [place < o.rotary]
        conditions += [column >= o.begin] if o.begin else []
        conditions += [column < o.end] if o.end is not None else []
        if False in [x for x in conditions if isinstance(x, bool)]:
            return False
        return functools.reduce(operator.and_, [x for x in conditions if not isinstance(x, bool)], True)

    def fetch(self, tile: Tile, part: int) -> None:
        """Asks for the cosines and sines of a part: for every unit, those of each of the thread's rows."""
        self.tables: list[list[list[cute.Tensor]]] = []
        for unit in self.units:
            turns = self.turns(tile, part, unit)
            pairs = [
                [cute.make_rmem_tensor(len(unit.lefts), self.element) for _ in range(2)] for _ in self.rows
            ]  # fmt: skip
            provided(turns, lambda unit=unit, pairs=pairs: self.load(tile, part, unit, pairs))
            self.tables.append(pairs)

    def load(self, tile: Tile, part: int, unit: Unit, pairs: list[list[cute.Tensor]]) -> None:
        """Reads the cosines and sines of a unit."""
        first = self.first_pair(tile, part, unit)
        for (row, _), both in zip(self.rows, pairs, strict=True):
            for table, target in zip(self.parameters[:2], both, strict=True):
                start = table.iterator + cute.crd2idx((row, first), table.layout)
                for i in range(0, len(unit.lefts), self.run):
                    place = (start + self.pair(i)).align(self.run * self.element.width // 8)
                    source = cute.make_tensor(place, cute.make_layout(self.run))
                    cute.autovec_copy(source, cute.local_tile(target, (self.run,), (i // self.run,)))

    def first_pair(self, tile: Tile, part: int, unit: Unit) -> Any:
        """The number of the thread's first pair."""
        o, layout = self.o, self.plan.layout
        column = self.place(part, unit.start) if self.plan.tile_columns % o.rotary == 0 else self.column(tile, part, 0)
        pair = column % o.rotary // (2 if o.interleaved else 1)
        return pair + layout.column(tile.thread, 0) // (2 if o.interleaved else 1)

    def pair(self, index: int) -> int:
        """How far behind a thread's first pair in a unit another one is."""
        run = self.plan.layout.run // (2 if self.o.interleaved else 1)
        return index // run * run * self.plan.layout.neighbours + index % run

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        for unit, pairs in zip(self.units, self.tables, strict=True):
            turns = self.turns(tile, part, unit)
            provided(turns, lambda unit=unit, pairs=pairs: self.rotate(values["x"], unit, pairs))

    def rotate(self, x: Fragment, unit: Unit, pairs: list[list[cute.Tensor]]) -> None:
        """Rotates the pairs of a unit."""
        for slot, ((_, exists), tables) in enumerate(zip(self.rows, pairs, strict=True)):
            order = x.rows.order(self.width, slot)
            cosines, sines = (table.load().to(Float32) for table in tables)
            for i, position in enumerate(unit.lefts):
                one, other = order[position], order[position + self.apart]
                left, right, cos, sin = x.values[one], x.values[other], cosines[i], sines[i]
                if self.o.positions:
                    cos = pick(exists, cos, float("nan"))
                if self.o.inverse:
                    sin = -sin
                x.values[one] = fma(left, cos, -(right * sin))
                x.values[other] = fma(right, cos, left * sin)


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
