"""The Hadamard transform of 16 consecutive values of a row or of a column: four butterfly steps."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32

from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout, pick, upper_lane
from cudnn_kernels.epilogue.operation import EpiOpImpl, Tile


class HadamardImpl(EpiOpImpl):
    """The butterfly step d = 1, 2, 4, 8 combines values i and i + d of 16: two values of a thread, or the values of two
    lanes whose indices differ in one bit.
    """

    reduces = True  # 16 values of a column may include out-of-bounds rows

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.op.value]
        rounded = self.params.fragment(BFloat16, x.width)
        rounded.store(x.values.load().to(BFloat16))
        y = self.params.fragment(Float32, x.width)
        y.store(rounded.load().to(Float32))
        orders = [x.layout.order(x.width, slot) for slot in range(x.layout.slots)]
        for step in (1, 2, 4, 8):
            if self.op.along == "n":
                lanes, distance = column_step(x.layout, step)
                groups_of_16 = orders
            else:
                lanes, distance = row_step(x.layout, step)
                groups_of_16 = list(zip(*orders, strict=True))
            if lanes:
                combine_lanes(y, lanes)
            else:
                for group_of_16 in groups_of_16:
                    combine_pairs(y, group_of_16, distance)
        y.store(y.load() * Float32(self.op.factor))
        values[self.op.result] = Fragment(y, x.width, x.layout)


def column_step(rows: RowLayout, step: int) -> tuple[int, int]:
    """The distance of two values that are ``step`` columns apart: in lanes, or in positions of a thread."""
    if step < rows.run:
        return 0, step
    if step < rows.run * rows.lanes_per_row:
        return step // rows.run, 0
    return 0, step // rows.lanes_per_row


def row_step(rows: RowLayout, step: int) -> tuple[int, int]:
    """The distance of two values that are ``step`` rows apart: in lanes, or in row slots of a thread."""
    lanes = next((lanes for lanes in (1, 2, 4, 8, 16) if rows.row(lanes, 0) == step), 0)
    return lanes, 0 if lanes else next(slot for slot in range(rows.slots) if rows.row(0, slot) == step)


def combine_lanes(y: Any, distance: int) -> None:
    """A butterfly between lanes: sums in the lower lane, differences in the upper one."""
    sign = pick(upper_lane(distance), -1.0, 1.0)
    for i in range(cute.size(y)):
        y[i] = fma(y[i], sign, cute.arch.shuffle_sync_bfly(y[i], distance))


def combine_pairs(y: Any, group_of_16: Any, distance: int) -> None:
    """A butterfly between values of a thread."""
    for first in range(len(group_of_16)):
        if first // distance % 2 == 0:
            a, b = y[group_of_16[first]], y[group_of_16[first + distance]]
            y[group_of_16[first]], y[group_of_16[first + distance]] = a + b, a - b
