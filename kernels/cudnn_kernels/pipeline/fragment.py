"""A thread's fragment of a tile: its values in registers, and the rows and columns that they belong to.

The layout depends on where accumulators are: in registers (wgmma) or in tensor memory (tcgen05). Epilogue operations
and the softmax of attention are written against this interface. Warp-level reductions are here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass._mlir_helpers.vector import Vector

from cudnn_kernels.formats import GLU_BLOCK

STREAM_WIDTH = 8  # the largest ``stream_width``


@dataclass(frozen=True)
class RowLayout:
    """Which rows and columns of a warpgroup's tile a thread holds.

    A thread holds values of ``slots`` rows: a row slot is the index of a row among those. ``lanes_per_row`` consecutive
    lanes share a row; each holds runs of ``run`` contiguous columns, one run in every ``lanes_per_row``. A position is
    the index of a value among a thread's values of a row, from left to right.

    ``matrices``: a warp's values form the 8 x 8 matrices of stmatrix. A reduction keeps ``chains`` independent partial
    results, which shortens the dependency chain, and combines them at the end. ``stream_width``: values of a row that
    consecutive elementwise operations process at a time, if they run together.
    """

    slots: int
    lanes_per_row: int
    run: int
    matrices: bool
    chains: int = 1
    stream_width: int = STREAM_WIDTH

    def values(self, width: int) -> int:
        """How many values a thread holds of ``width`` columns."""
        return self.slots * width // self.lanes_per_row

    def order(self, width: int, slot: int) -> Sequence[int]:
        """Register indices of the values of a row slot, by position, in a fragment of ``width`` columns."""
        raise NotImplementedError

    def row(self, thread: Any, slot: Any) -> Any:
        """The row of a slot, counted from the warpgroup's first row."""
        raise NotImplementedError

    def column(self, thread: Any, position: Any) -> Any:
        """The column of a position."""
        run, offset = position // self.run, position % self.run
        return (run * self.lanes_per_row + thread % self.lanes_per_row) * self.run + offset

    def columns_before(self, thread: Int32, column: Int32) -> Int32:
        """How many of a thread's positions are columns before ``column``."""
        period = self.lanes_per_row * self.run  # columns between the starts of a thread's runs
        offset = cutlass.max(column - thread % self.lanes_per_row * self.run, Int32(0))
        return offset // period * self.run + cutlass.min(offset % period, self.run)

    def in_bounds(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        """A predicate of a position: whether it is in the first ``rows`` rows and ``columns`` columns."""
        row_exists, first = self.row(thread, slot) < rows, self.column(thread, 0)
        return lambda position: row_exists & (first + self.column(0, position) < columns)

    def all_reduce_row(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All-reduces a value over the lanes that share a row, by butterfly shuffles."""
        distance = 1
        while distance < self.lanes_per_row:
            value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
            distance *= 2
        return value


class Registers:
    """A thread's values by index, as the SSA values that tracing yields.

    An element access of a register tensor is a memory operation, and the compiler spends more time on its removal than
    on the arithmetic. Only copies, MMAs and values that dynamic control flow writes need a register tensor.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = list(values)

    def __getitem__(self, i: int) -> Any:
        return self._values[i]

    def __setitem__(self, i: int, value: Any) -> None:
        self._values[i] = value

    def load(self) -> cute.TensorSSA:
        """All values as a vector."""
        dtype = type(self._values[0])
        vector = Vector.from_elements(tuple(self._values), dtype)
        return cute.TensorSSA(vector, (len(self._values),), dtype)

    def store(self, vector: cute.TensorSSA) -> None:
        """Takes all values from a vector."""
        self._values = elements(vector)


def elements(vector: cute.TensorSSA) -> list[Any]:
    """The elements of a vector of any shape, in the order of its registers."""
    count = vector.type.shape[0]
    flat = cute.TensorSSA(vector, (count,), vector.dtype)
    return [Vector.__getitem__(flat, i) for i in range(count)]


@dataclass
class Fragment:
    """float32 values of one thread, of ``width`` columns of the warpgroup's rows."""

    values: cute.Tensor | Registers
    width: int
    layout: RowLayout

    @classmethod
    def empty(cls, width: int, layout: RowLayout) -> Fragment:
        """A fragment whose values are assigned later."""
        return cls(Registers([None] * layout.values(width)), width, layout)

    def in_registers(self) -> Fragment:
        """The same values, not as a register tensor."""
        if isinstance(self.values, Registers):
            return self
        return replace(self, values=Registers(self.values[i] for i in range(self.layout.values(self.width))))

    def row_values(self, slot: int) -> list[Float32]:
        """The values of a row slot, by position."""
        return [self.values[i] for i in self.layout.order(self.width, slot)]


@dataclass(frozen=True)
class ValueSubset:
    """A subset of a thread's values: positions of row slots, in a fragment of ``width`` columns."""

    width: int
    slots: Sequence[tuple[int, Sequence[int]]]


def indices(x: Fragment, subset: ValueSubset) -> Iterator[tuple[int, list[int]]]:
    """Each row slot of a subset, with the register indices of its values in x.

    If x is twice as wide as the subset (gate and up columns), each block of 32 columns of the subset selects the gate
    and the up block of x: the indices in the first of both blocks come first.
    """
    block = GLU_BLOCK // x.layout.lanes_per_row  # values of a row in 32 columns
    for slot, positions in subset.slots:
        order = x.layout.order(x.width, slot)
        if x.width == subset.width:
            yield slot, [order[p] for p in positions]
        else:
            first = [p // block * 2 * block + p % block for p in positions]
            yield slot, [order[p + distance] for distance in (0, block) for p in first]


def accumulate(chains: list[Float32], values: Sequence[Float32], combine: Callable[[Any, Any], Any]) -> None:
    """Combines values with the partial results, round robin. With several chains and few values, the values are first
    combined as a tree, which shortens the dependency chains.
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


def butterfly_steps(count: int, first: int, end: int) -> list[tuple[int, bool]]:
    """The steps of a reduce-scatter of ``count`` values: each lane distance from ``first`` to below ``end``, and
    whether the two lanes split the remaining values in halves (if their number is even) or both keep all of them.
    """
    steps, distance = [], first
    while distance < end:
        steps.append((distance, count % 2 == 0))
        count //= 1 + steps[-1][1]
        distance *= 2
    return steps


def reduce_scatter(
    values: Sequence[Float32], combine: Callable[[Any, Any], Any], first: int, end: int
) -> tuple[list[Float32], Int32]:
    """Reduce-scatter of each value over the lanes whose distances have only the bits ``first``, 2 ``first``, ... below
    ``end``.

    Returns the results that the lane keeps (half as many after each step, while the count is even), and the index of
    the first one, :func:`scattered_index`.
    """
    results, start = list(values), scattered_index(len(values), first, end)
    for distance, halved in butterfly_steps(len(results), first, end):
        if halved:
            half, upper = len(results) // 2, upper_lane(distance)
            sent = [pick(upper, results[i], results[half + i]) for i in range(half)]
            results = [pick(upper, results[half + i], results[i]) for i in range(half)]
        else:
            sent = results
        results = [combine(a, cute.arch.shuffle_sync_bfly(b, distance)) for a, b in zip(results, sent, strict=True)]
    return results, start


def scattered_index(count: int, first: int, end: int) -> Int32:
    """The index of the first of ``count`` results that ``reduce_scatter`` leaves to the lane."""
    start = Int32(0)
    for distance, halved in butterfly_steps(count, first, end):
        if halved:
            count //= 2
            start = start + Int32(select_(upper_lane(distance), Int32(count), Int32(0)))
    return start


def all_gather(values: Sequence[Float32], count: int, first: int, end: int) -> list[Float32]:
    """The inverse of ``reduce_scatter``: returns all ``count`` results, of which each lane has some."""
    results = list(values)
    for distance, halved in reversed(butterfly_steps(count, first, end)):
        if halved:
            upper = upper_lane(distance)
            received = [cute.arch.shuffle_sync_bfly(value, distance) for value in results]
            pairs = list(zip(results, received, strict=True))
            results = [pick(upper, b, a) for a, b in pairs] + [pick(upper, a, b) for a, b in pairs]
    return results


def upper_lane(distance: int) -> Any:
    """Whether the lane is the upper one of a pair ``distance`` lanes apart."""
    return cute.arch.lane_idx() // distance % 2 == 1


def pick(condition: Any, chosen: Any, other: Any) -> Float32:
    """``chosen`` if the condition holds, else ``other``, without a branch."""
    return Float32(select_(condition, Float32(chosen), Float32(other)))
