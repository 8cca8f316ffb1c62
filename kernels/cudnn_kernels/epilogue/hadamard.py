"""The Hadamard transform of 16 values, neighbours in a row or in a column: four steps of sums and differences."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout, pick, upper_lane
from cudnn_kernels.epilogue.operation import Operation, Tile


class Hadamard(Operation):
    """A step pairs values of the same thread, or of lanes whose numbers differ in one bit."""

    reduces = True  # a column's last rows may be those of nobody

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x = values[self.o.value]
        rounded = self.plan.fragment(BFloat16, x.width)
        rounded.store(x.values.load().to(BFloat16))
        y = self.plan.fragment(Float32, x.width)
        y.store(rounded.load().to(Float32))
        orders = [x.rows.order(x.width, slot) for slot in range(x.rows.slots)]
        for step in (1, 2, 4, 8):
            if self.o.along == "n":
                lanes, apart = column_step(x.rows, step)
                lines = orders
            else:
                lanes, apart = row_step(x.rows, step)
                lines = list(zip(*orders, strict=True))
            if lanes:
                combine_lanes(y, lanes)
            else:
                for line in lines:
                    combine_pairs(y, line, apart)
        y.store(y.load() * Float32(self.o.factor))
        values[self.o.result] = Fragment(y, x.width, x.rows)


def column_step(rows: RowLayout, step: int) -> tuple[int, int]:
    """How far apart two values are that are so many columns apart: lanes, or positions of a thread."""
    if step < rows.run:
        return 0, step
    if step < rows.run * rows.neighbours:
        return step // rows.run, 0
    return 0, step // rows.neighbours


def row_step(rows: RowLayout, step: int) -> tuple[int, int]:
    """How far apart two values are that are so many rows apart: lanes, or slots of a thread."""
    lanes = next((lanes for lanes in (1, 2, 4, 8, 16) if rows.row(lanes, 0) == step), 0)
    return lanes, 0 if lanes else next(slot for slot in range(rows.slots) if rows.row(0, slot) == step)


def combine_lanes(y: Any, distance: int) -> None:
    """Sums in the lower one of two lanes, differences in the upper one."""
    sign = pick(upper_lane(distance), -1.0, 1.0)
    for i in range(cute.size(y)):
        y[i] = fma(y[i], sign, cute.arch.shuffle_sync_bfly(y[i], distance))


def combine_pairs(y: Any, line: Any, distance: int) -> None:
    """The same for values of a thread."""
    for first in range(len(line)):
        if first // distance % 2 == 0:
            a, b = y[line[first]], y[line[first + distance]]
            y[line[first]], y[line[first + distance]] = a + b, a - b
