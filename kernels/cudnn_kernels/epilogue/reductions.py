"""Operations that reduce a tile: over everything, or over the columns of a row."""

from __future__ import annotations

import functools
import operator
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.epilogue import BLOCK
from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.fragment import Fragment, Some, accumulate, accumulate_few, indices
from cudnn_kernels.epilogue.operation import Operation, Tile


class Amax(Operation):
    """A maximum in registers over the tile, then one atomic for each warp: on bits, which order as the values do."""

    reduces = streams = True

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x, role = values[self.o.value], self.role_of(values[self.o.value])
        for _, places in indices(x, self.plan.width, some):
            for mine, largest in enumerate(self.largest):
                few = [cute.math.absf(x.values[i]) for i in places if role[i] == mine]
                accumulate_few(largest, few, maximum)

    def begin(self, tile: Tile) -> None:
        self.largest = [[Float32(0.0)] * self.plan.layout.chains for _ in range(self.o.roles)]

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        x, role = values[self.o.value], self.role_of(values[self.o.value])
        for mine, largest in enumerate(self.largest):
            of_role = (i for i in range(cute.size(x.values)) if role[i] == mine)
            accumulate(largest, [cute.math.absf(x.values[i]) for i in of_role], maximum)

    def role_of(self, x: Fragment) -> dict[int, int]:
        """Of each value of a fragment."""
        block = BLOCK // x.rows.neighbours  # values of a row in 32 columns
        orders = (x.rows.order(x.width, slot) for slot in range(x.rows.slots))
        return {i: position // block % self.o.roles for order in orders for position, i in enumerate(order)}

    def end(self, tile: Tile) -> None:
        (amax,) = self.parameters
        first = tile.expert * self.o.roles if self.o.by_expert else Int32(0)
        for mine, largest in enumerate(self.largest):
            raise_amax(amax, first + mine, functools.reduce(maximum, largest))


class SumRow(Operation):
    """A sum in registers over the tile's columns, one atomic addition for each row."""

    reduces = streams = True

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x = values[self.o.value]
        for slot, places in indices(x, self.plan.width, some):
            accumulate_few(self.sums[slot], [x.values[i] for i in places], operator.add)

    def begin(self, tile: Tile) -> None:
        layout = self.plan.layout
        self.sums = [[Float32(0.0)] * layout.chains for _ in range(layout.slots)]

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        for slot, sums in enumerate(self.sums):
            accumulate(sums, values[self.o.value].row_values(slot), operator.add)

    def end(self, tile: Tile) -> None:
        (sums,) = self.parameters
        layout = self.plan.layout
        for slot, mine in enumerate(self.sums):
            total = layout.across(functools.reduce(operator.add, mine), operator.add)
            add_to_row(sums, self.row(tile, slot), tile, total, tile.thread % layout.neighbours == 0)


@cute.jit
def raise_amax(amax: cute.Tensor, index: Int32, largest: Float32) -> None:
    """The element of a number becomes max(itself, the warp's largest), for largest >= 0 or NaN."""
    bits = cute.arch.warp_redux_sync(largest.bitcast(Int32), "max")
    if cute.arch.lane_idx() == 0:
        place = cute.recast_ptr(amax.iterator + index, dtype=Int32)
        cute.arch.red(place, bits, op="max", dtype="s32", sem="relaxed", scope="gpu")


@cute.jit
def add_to_row(sums: cute.Tensor, row: Int32, tile: Tile, value: Float32, chosen: Any) -> None:
    """Adds to an element of a tensor (m, 1, l), if the row is the tile's and the thread is chosen."""
    if chosen and row < tile.end:
        place = sums.iterator + cute.crd2idx((row, 0, tile.batch), sums.layout)
        cute.arch.red(place, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
