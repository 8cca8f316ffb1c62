"""Rotary embedding (RoPE) in the epilogue. Both columns of a pair are in the same thread and subtile. And the
deinterleaving of columns.

A thread loads its cosines and sines from global memory to registers, without shared memory: rows of the tables are
short and the same for every head, so that most loads hit a cache. The loads of a subtile are issued before the wait for
its stage, those of a tile's first subtile before the mainloop.
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
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.fakes import DTYPES

VECTOR = 16  # bytes of a vector load, at most
PREFETCH_REGISTERS = 64  # cosines and sines of a subtile are prefetched if they fit into this many registers


@dataclass(frozen=True)
class Unit:
    """Columns of a subtile that are all rotated or all unchanged, from column ``start`` on."""

    start: int
    lefts: Sequence[int]  # positions of the left columns of pairs


class _Heads(EpiOpImpl):
    """Transforms ``size`` of a head's columns, unit by unit; a unit begins every ``step`` columns."""

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int, size: int, step: int) -> None:
        super().__init__(epi_op, params, width)
        self.size = size
        self.columns = min(width, step, size)  # of a unit
        self.starts = range(0, width, min(width, step))

    def selected(self, tile: Tile, subtile: int, start: int) -> Any:
        """Whether a unit's columns are transformed: a bool, if that is known at compile time."""
        o = self.op
        whole_heads = self.params.tile_columns % o.head == 0  # tiles begin at heads
        column = self.tile_column(subtile, start) if whole_heads else self.column(tile, subtile, start)
        column_of_head = column % o.head
        conditions = [column_of_head >= o.first] if o.first else []
        conditions += [column_of_head < o.first + self.size] if o.first + self.size < o.head else []
        return all_of(conditions + self.extra_conditions(tile, subtile, start))

    def extra_conditions(self, tile: Tile, subtile: int, start: int) -> list[Any]:
        """Further conditions of :meth:`selected`."""
        return []


class DeinterleaveImpl(_Heads):
    """A thread that holds a whole row permutes its values; four threads that share a row use shuffles."""

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width, epi_op.size, epi_op.size)
        layout = params.layout
        if layout.lanes_per_row > 1 and ((layout.lanes_per_row, layout.run) != (4, 2) or epi_op.size % 16):
            raise ValueError(f"size: got {epi_op.size}; allowed: multiples of 16")

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        for start in self.starts:
            run_if(
                self.selected(tile, subtile, start),
                lambda start=start: self.reorder(values["x"], tile.thread % 4, start),
            )

    def reorder(self, x: Fragment, quarter: Int32, start: int) -> None:
        """Permutes the columns of a unit. ``quarter`` is the index of the thread among those that share a row."""
        lanes_per_row = x.layout.lanes_per_row
        for slot in range(x.layout.slots):
            first = start // lanes_per_row
            order = x.layout.order(self.width, slot)[first : first + self.columns // lanes_per_row]
            row_values = [x.values[i] for i in order]
            row_values = (
                [*row_values[0::2], *row_values[1::2]] if lanes_per_row == 1 else self.exchanged(row_values, quarter)
            )
            for i, value in zip(order, row_values, strict=True):
                x.values[i] = value

    def exchanged(self, row_values: list[Float32], quarter: Int32) -> list[Float32]:
        """A thread's values in the new order, from those in the old. Thread q has columns 8 j + 2 q and the next.

        In the first half of the new order, columns 8 i + 2 q and the next are the old columns 16 i + 4 q and
        16 i + 4 q + 2. Threads 2 q and 2 q + 1, modulo four, hold them: in the lower eight of sixteen columns if q < 2,
        else in the upper eight. So each thread has one value for a thread with q < 2 and one for a thread with q >= 2.
        In the first shuffle, even threads send the value of the lower eight columns and odd threads that of the upper;
        in the second shuffle, even threads send the upper one and odd threads the lower one.
        """
        odd, upper = quarter % 2 == 1, quarter // 2 == 1
        near = cute.arch.lane_idx() // 4 * 4 + quarter % 2 * 2
        lanes = [near + quarter // 2, near + 1 - quarter // 2]
        exchanged = []
        for parity in range(2):
            for i in range(0, len(row_values), 4):
                low, high = row_values[i + parity], row_values[i + 2 + parity]
                sent = [pick(odd, high, low), pick(odd, low, high)]
                received = [cute.arch.shuffle_sync(value, lane) for value, lane in zip(sent, lanes, strict=True)]
                first, second = pick(upper, received[1], received[0]), pick(upper, received[0], received[1])
                exchanged += [first, second]
        return exchanged


class RotateImpl(_Heads):
    """Rotates pairs of columns by two multiplications and two FMAs each."""

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        o, layout = epi_op, params.layout
        step = math.gcd(width, o.head, o.rotary) if o.interleaved else o.column_multiple
        super().__init__(epi_op, params, width, o.rotary, step)
        self.element = DTYPES[o.dtype]
        registers = layout.slots * len(self.starts) * self.columns // layout.lanes_per_row * self.element.width // 32
        self.prefetches = not o.full_tables and registers <= PREFETCH_REGISTERS
        positions = self.columns // layout.lanes_per_row  # of a thread, in a unit
        self.pair_distance = 1 if o.interleaved else positions // 2  # positions from the left to the right column
        lefts = range(0, positions, 2) if o.interleaved else range(positions // 2)
        self.units = [Unit(start, [start // layout.lanes_per_row + left for left in lefts]) for start in self.starts]
        run = layout.run // 2 if o.interleaved else layout.run
        self.run = min(run, len(lefts), VECTOR * 8 // self.element.width)  # pairs per vector load
        if not o.interleaved and self.columns // 2 % (layout.lanes_per_row * layout.run) and layout.lanes_per_row > 1:
            raise ValueError(f"rotary: got {o.rotary}; allowed: multiples of {2 * layout.lanes_per_row * layout.run}")

    def begin_tile(self, tile: Tile) -> None:
        if self.op.positions:
            slots = range(self.params.layout.slots)
            self.positions = [self.parameters[2][self.last_row(tile, slot)] for slot in slots]
        if self.prefetches:
            self.load_angles(tile, 0)

    def prefetch(self, tile: Tile, subtile: int) -> None:
        if self.prefetches and subtile > 0:
            self.load_angles(tile, subtile)

    def last_row(self, tile: Tile, slot: int) -> Int32:
        """One of the thread's rows, clamped to the last row."""
        return cutlass.min(self.row(tile, slot), tile.end - 1)

    def table_row(self, tile: Tile, slot: int) -> Int32:
        """The row of the tables for one of the thread's rows, clamped to the tables."""
        if not self.op.positions:
            return self.last_row(tile, slot)
        return cutlass.max(cutlass.min(self.positions[slot], self.parameters[0].shape[0] - 1), 0)

    def extra_conditions(self, tile: Tile, subtile: int, start: int) -> list[Any]:
        column, o = self.column(tile, subtile, start), self.op
        return ([column >= o.begin] if o.begin else []) + ([column < o.end] if o.end is not None else [])

    def load_angles(self, tile: Tile, subtile: int) -> None:
        """Issues the loads of the cosines and sines of a subtile, also for units that are not rotated at run time:
        registers that are written inside a branch would be spilled.
        """
        self.tables = [self.registers(unit) for unit in self.units]
        for unit, row_tables in zip(self.units, self.tables, strict=True):
            if self.selected(tile, subtile, unit.start) is not False:
                self.load(tile, subtile, unit, row_tables)

    def registers(self, unit: Unit) -> list[list[cute.Tensor]]:
        """Registers for the cosines and sines of a unit, for each of the thread's rows."""
        count = 4 if self.op.full_tables else 2
        return [
            [cute.make_rmem_tensor(len(unit.lefts), self.element) for _ in range(count)]
            for _ in range(self.params.layout.slots)
        ]

    def load(self, tile: Tile, subtile: int, unit: Unit, row_tables: list[list[cute.Tensor]]) -> None:
        """Loads the cosines and sines of a unit."""
        first = self.first_pair(tile, subtile, unit)
        for slot, tables in enumerate(row_tables):
            row = self.table_row(tile, slot)
            for which, target in enumerate(tables):  # for left columns, then for right columns
                table, right = self.parameters[which % 2], which // 2 * (self.op.rotary // 2)
                start = table.iterator + cute.crd2idx((row, first + right), table.layout)
                for i in range(0, len(unit.lefts), self.run):
                    source = (start + self.pair(i)).align(self.run * self.element.width // 8)
                    source = cute.make_tensor(source, cute.make_layout(self.run))
                    cute.autovec_copy(source, cute.local_tile(target, (self.run,), (i // self.run,)))

    def first_pair(self, tile: Tile, subtile: int, unit: Unit) -> Any:
        """The index of the thread's first pair."""
        o, layout = self.op, self.params.layout
        period = o.rotary if o.head % o.rotary == 0 else o.head
        whole_periods = self.params.tile_columns % period == 0  # tiles begin at periods
        column = self.tile_column(subtile, unit.start) if whole_periods else self.column(tile, subtile, unit.start)
        pair = column % period % o.rotary // (2 if o.interleaved else 1)
        return pair + layout.column(tile.thread, 0) // (2 if o.interleaved else 1)

    def pair(self, index: int) -> int:
        """The offset of a thread's pair from its first pair in a unit."""
        run = self.params.layout.run // (2 if self.op.interleaved else 1)
        return index // run * run * self.params.layout.lanes_per_row + index % run

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        for index, unit in enumerate(self.units):
            selected = self.selected(tile, subtile, unit.start)
            if not self.prefetches:
                run_if(selected, lambda unit=unit: self.load_and_rotate(tile, subtile, values["x"], unit))
            elif selected is not False:
                self.rotate(tile, values["x"], unit, self.tables[index], selected)

    def load_and_rotate(self, tile: Tile, subtile: int, x: Fragment, unit: Unit) -> None:
        """Loads the cosines and sines of a unit and rotates it."""
        row_tables = self.registers(unit)
        self.load(tile, subtile, unit, row_tables)
        self.rotate(tile, x, unit, row_tables, True)

    def rotate(self, tile: Tile, x: Fragment, unit: Unit, row_tables: list[list[cute.Tensor]], selected: Any) -> None:
        """Rotates the pairs of a unit where it is selected."""
        for slot, tables in enumerate(row_tables):
            order = x.layout.order(self.width, slot)
            float_tables = [table.load().to(Float32) for table in tables]
            for i, position in enumerate(unit.lefts):
                left_index, right_index = order[position], order[position + self.pair_distance]
                left, right = x.values[left_index], x.values[right_index]
                # cos and sin for the left column, then for the right column
                angles = [table[i] for table in float_tables] * (4 // len(float_tables))
                if self.op.positions:
                    exists = self.positions[slot] == self.table_row(tile, slot)
                    angles[0::2] = [pick(exists, cos, float("nan")) for cos in angles[0::2]]
                if self.op.inverse:
                    angles[1::2] = [-sin for sin in angles[1::2]]
                rotated = fma(left, angles[0], -(right * angles[1])), fma(right, angles[2], left * angles[3])
                for index, new, old in zip((left_index, right_index), rotated, (left, right), strict=True):
                    x.values[index] = new if selected is True else pick(selected, new, old)


def all_of(conditions: list[Any]) -> Any:
    """The conjunction of conditions, some of which may be known at compile time."""
    if any(condition is False for condition in conditions):
        return False
    return functools.reduce(operator.and_, [x for x in conditions if x is not True], True)


def run_if(condition: Any, act: Callable[[], None]) -> None:
    """Runs ``act`` if the condition holds, which is uniform over the warpgroup."""
    if isinstance(condition, bool):
        if condition:
            act()
    else:
        branch(condition, act)


@cute.jit
def branch(condition: Any, act: cutlass.Constexpr[Callable[[], None]]) -> None:
    """Runs ``act`` inside a branch."""
    if condition:
        act()
