"""The part of a tile that one thread holds, as epilogue operations see it, wherever the accumulator was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32


@dataclass(frozen=True)
class RowLayout:
    """Which rows and columns of a group's tile a thread holds.

    A thread has ``slots`` rows. ``neighbours`` threads, next to each other in a warp, share a row: each has every
    ``neighbours``-th run of ``run`` columns.
    """

    slots: int
    neighbours: int
    run: int

    def order(self, width: int, slot: int) -> Sequence[int]:
        """Indices of the values of a row slot, from left to right, in a fragment of ``width`` columns."""
        raise NotImplementedError

    def row(self, thread: Int32, slot: int) -> Int32:
        """The row of a slot, counted from the group's first."""
        raise NotImplementedError

    def column(self, thread: Int32, position: int) -> Int32:
        """The column of the value at a position of ``order``."""
        run, offset = divmod(position, self.run)
        return (run * self.neighbours + thread % self.neighbours) * self.run + offset

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
