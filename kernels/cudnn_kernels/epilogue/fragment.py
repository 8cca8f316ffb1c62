"""A thread's fragment of a subtile as epilogue operations see it, for accumulators in registers or tensor memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from cudnn_kernels.epilogue import BLOCK

STREAM_WIDTH = 8  # values per row that consecutive elementwise operations process at a time, at most


@dataclass(frozen=True)
class RowLayout:
    """Which rows and columns of a group's tile a thread holds.

    A thread has ``slots`` rows. ``neighbours`` consecutive lanes share a row: each has every ``neighbours``-th run of
    ``run`` columns. ``matrices``: a warp's values form the 8 x 8 matrices of stmatrix. A reduction keeps ``chains``
    independent partial results and combines them at the end.
    ``stream_width`` values of a row stream through operations at a time.
    """

    slots: int
    neighbours: int
    run: int
    matrices: bool
    chains: int = 1
    stream_width: int = STREAM_WIDTH

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
        """The number of a thread's positions that are columns before ``column``."""
        wide, offset_in_run = (
            self.neighbours * self.run,
            cutlass.max(column - thread % self.neighbours * self.run, Int32(0)),
        )
        return offset_in_run // wide * self.run + cutlass.min(offset_in_run % wide, self.run)

    def inside(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        """A predicate of a position of ``order``: whether it is in the first ``rows`` rows and ``columns`` columns."""
        row_exists = self.row(thread, slot) < rows
        return lambda position: row_exists & (self.column(thread, position) < columns)

    def across(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """``combine`` over the lanes that share a row, an all-reduce."""
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
class ValueSubset:
    """A subset of a thread's values: row slots, each with positions in the order of ``width`` columns."""

    width: int
    slots: Sequence[tuple[int, Sequence[int]]]


def indices(x: Fragment, some: ValueSubset) -> Iterator[tuple[int, list[int]]]:
    """By row slot, the register indices of a subset of values.

    If x is twice as wide as the subset's values, each block of 32 columns stands for two blocks of x.
    """
    block = BLOCK // x.rows.neighbours  # values of a row in 32 columns
    for slot, positions in some.slots:
        order = x.rows.order(x.width, slot)
        if x.width == some.width:
            yield slot, [order[p] for p in positions]
        else:
            first = [p // block * 2 * block + p % block for p in positions]
            yield slot, [order[p + distance] for distance in (0, block) for p in first]


def accumulate(chains: list[Float32], values: Sequence[Float32], combine: Callable[[Any, Any], Any]) -> None:
    """Combines values with the partial results, round robin; with several chains and few values, as a tree first, which
    shortens the dependency chains.
    """
    if len(chains) > 1 and 1 < len(values) <= STREAM_WIDTH:
        values = [tree(values, combine)]
    for i, value in enumerate(values):
        chains[i % len(chains)] = combine(chains[i % len(chains)], value)


def tree(values: Sequence[Float32], combine: Callable[[Any, Any], Any]) -> Float32:
    """Combines values pairwise, with logarithmic depth."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return combine(tree(values[:half], combine), tree(values[half:], combine))


def halvings(count: int, first: int, end: int) -> list[tuple[int, bool]]:
    """The lane distances of a butterfly, each with whether the lanes split the remaining ``count`` values in halves."""
    steps, distance = [], first
    while distance < end:
        steps.append((distance, count % 2 == 0))
        count //= 1 + steps[-1][1]
        distance *= 2
    return steps


def reduce_scatter(
    values: Sequence[Float32], combine: Callable[[Any, Any], Any], first: int, end: int
) -> tuple[list[Float32], Int32]:
    """Reduce-scatter of each value over the lanes whose indices differ only in the bits from ``first`` to below
    ``end``.

    Returns the results that the lane keeps (half as many after each step, while the count is even), and the index of
    the first one.
    """
    kept_values, start = list(values), Int32(0)
    for distance, halved in halvings(len(kept_values), first, end):
        if halved:
            half, upper = len(kept_values) // 2, upper_lane(distance)
            sent = [pick(upper, kept_values[i], kept_values[half + i]) for i in range(half)]
            kept_values = [pick(upper, kept_values[half + i], kept_values[i]) for i in range(half)]
            start = start + Int32(select_(upper, Int32(half), Int32(0)))
        else:
            sent = kept_values
        kept_values = [
            combine(a, cute.arch.shuffle_sync_bfly(b, distance)) for a, b in zip(kept_values, sent, strict=True)
        ]
    return kept_values, start


def gather(values: Sequence[Float32], count: int, first: int, end: int) -> list[Float32]:
    """All-gather of ``count`` values, of which ``reduce_scatter`` has left each lane a part."""
    kept_values = list(values)
    for distance, halved in reversed(halvings(count, first, end)):
        if halved:
            upper = upper_lane(distance)
            received = [cute.arch.shuffle_sync_bfly(value, distance) for value in kept_values]
            pairs = list(zip(kept_values, received, strict=True))
            kept_values = [pick(upper, b, a) for a, b in pairs] + [pick(upper, a, b) for a, b in pairs]
    return kept_values


def upper_lane(distance: int) -> Any:
    """Whether the lane is the upper one of a pair ``distance`` lanes apart."""
    return cute.arch.lane_idx() // distance % 2 == 1


def pick(condition: Any, chosen: Any, other: Any) -> Float32:
    """``chosen`` if the condition holds, else ``other``, without a branch."""
    return Float32(select_(condition, Float32(chosen), Float32(other)))
