"""The part of a tile that one thread holds, as epilogue operations see it, wherever the accumulator was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from cudnn_kernels.epilogue import BLOCK

WARP = 32
FEW = 8  # values that stream through operations at a time, at most


@dataclass(frozen=True)
class RowLayout:
    """Which rows and columns of a group's tile a thread holds.

    A thread has ``slots`` rows. ``neighbours`` threads, next to each other in a warp, share a row: each has every
    ``neighbours``-th run of ``run`` columns. ``matrices``: a warp's values are 8 x 8 matrices as stmatrix has them.
    A reduction keeps ``chains`` results at first, which do not wait for each other, and combines them in the end.
    ``few`` values of a row stream through operations at a time.
    """

    slots: int
    neighbours: int
    run: int
    matrices: bool
    chains: int = 1
    few: int = FEW

    def order(self, width: int, slot: int) -> Sequence[int]:
        """Indices of the values of a row slot, from left to right, in a fragment of ``width`` columns."""
        raise NotImplementedError

    def row(self, thread: Any, slot: Any) -> Any:
        """The row of a slot, counted from the group's first."""
        raise NotImplementedError

    def column(self, thread: Int32, position: Any) -> Int32:
        """The column of the value at a position of ``order``."""
        run, offset = position // self.run, position % self.run
        return (run * self.neighbours + thread % self.neighbours) * self.run + offset

    def before(self, thread: Int32, column: Int32) -> Int32:
        """How many of a thread's positions are columns before this one."""
        wide, own = self.neighbours * self.run, cutlass.max(column - thread % self.neighbours * self.run, Int32(0))
        return own // wide * self.run + cutlass.min(own % wide, self.run)

    def inside(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        """Tells of a position of ``order`` whether it is in the group's first so many rows and columns."""
        row_exists = self.row(thread, slot) < rows
        return lambda position: row_exists & (self.column(thread, position) < columns)

    def across(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """``combine`` over the threads that share a row: all of them get the result."""
        distance = 1
        while distance < self.neighbours:
            value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
            distance *= 2
        return value


@dataclass
class Fragment:
    """float32 values of one thread: ``width`` columns of the group's rows."""

    values: cute.Tensor
    width: int
    rows: RowLayout

    def row_values(self, slot: int) -> list[Float32]:
        """The values of a row slot, from left to right."""
        return [self.values[i] for i in self.rows.order(self.width, slot)]


@dataclass(frozen=True)
class Some:
    """Some of a thread's values: row slots, and positions in the order of ``width`` columns."""

    width: int
    places: Sequence[tuple[int, Sequence[int]]]


def indices(x: Fragment, some: Some) -> Iterator[tuple[int, list[int]]]:
    """By row slot, the indices of some values.

    Where x is twice as wide as these are of, two blocks of 32 columns stand for each.
    """
    block = BLOCK // x.rows.neighbours  # values of a row in 32 columns
    for slot, positions in some.places:
        order = x.rows.order(x.width, slot)
        if x.width == some.width:
            yield slot, [order[p] for p in positions]
        else:
            first = [p // block * 2 * block + p % block for p in positions]
            yield slot, [order[p + distance] for distance in (0, block) for p in first]


def accumulate(chains: list[Float32], values: Sequence[Float32], combine: Callable[[Any, Any], Any]) -> None:
    """Combines values with results that are kept: each with the next of them or, where several are kept and the values
    are few, as a tree, so that none waits for the others.
    """
    if len(chains) > 1 and 1 < len(values) <= FEW:
        values = [tree(values, combine)]
    for i, value in enumerate(values):
        chains[i % len(chains)] = combine(chains[i % len(chains)], value)


def tree(values: Sequence[Float32], combine: Callable[[Any, Any], Any]) -> Float32:
    """Combines values by pairs, so that none of them waits for more than one other."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return combine(tree(values[:half], combine), tree(values[half:], combine))


def halvings(count: int, first: int, end: int) -> list[tuple[int, bool]]:
    """Distances from lane to lane, and whether lanes so far apart share what is left of ``count`` values."""
    steps, distance = [], first
    while distance < end:
        steps.append((distance, count % 2 == 0))
        count //= 1 + steps[-1][1]
        distance *= 2
    return steps


def reduce_scatter(
    values: Sequence[Float32], combine: Callable[[Any, Any], Any], first: int, end: int
) -> tuple[list[Float32], Int32]:
    """Combines each value over the lanes whose numbers differ in nothing but the bits from ``first`` to below ``end``.

    Each of these lanes keeps as few of the results as halving allows: those, and the index of the first one.
    """
    mine, start = list(values), Int32(0)
    for distance, halved in halvings(len(mine), first, end):
        if halved:
            half, upper = len(mine) // 2, upper_lane(distance)
            sent = [pick(upper, mine[i], mine[half + i]) for i in range(half)]
            mine = [pick(upper, mine[half + i], mine[i]) for i in range(half)]
            start = start + Int32(select_(upper, Int32(half), Int32(0)))
        else:
            sent = mine
        mine = [combine(a, cute.arch.shuffle_sync_bfly(b, distance)) for a, b in zip(mine, sent, strict=True)]
    return mine, start


def gather(values: Sequence[Float32], count: int, first: int, end: int) -> list[Float32]:
    """All ``count`` values for every lane, of which ``reduce_scatter`` has left it these."""
    mine = list(values)
    for distance, halved in reversed(halvings(count, first, end)):
        if halved:
            upper = upper_lane(distance)
            others = [cute.arch.shuffle_sync_bfly(value, distance) for value in mine]
            pairs = list(zip(mine, others, strict=True))
            mine = [pick(upper, b, a) for a, b in pairs] + [pick(upper, a, b) for a, b in pairs]
    return mine


def upper_lane(distance: int) -> Any:
    """Whether the lane is the upper one of two that are so far apart."""
    return cute.arch.lane_idx() // distance % 2 == 1


def pick(condition: Any, chosen: Any, other: Any) -> Float32:
    """One of two values, without a branch."""
    return Float32(select_(condition, Float32(chosen), Float32(other)))
