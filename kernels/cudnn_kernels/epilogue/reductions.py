"""Operations that reduce a tile: over everything, or over the columns of a row."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cudnn_kernels.epilogue import BLOCK, BLOCK_ROWS, TILE_COLUMNS
from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.fragment import (
    WARP,
    Fragment,
    Some,
    accumulate,
    indices,
    reduce_scatter,
)
from cudnn_kernels.epilogue.operation import Operation, Plan, Tile
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.copy import unwoven
from cudnn_kernels.schedule.tiles import expert_range


class ColumnBlocks:
    """Reduces every column of a part over blocks of ``rows`` rows: warps theirs, into shared memory, then a thread."""

    def __init__(self, plan: Plan, width: int, rows: int, combine: Callable[[Any, Any], Any]) -> None:
        layout = plan.layout
        self.plan, self.width, self.combine = plan, width, combine
        self.stack = sum(layout.row(0, slot) < rows for slot in range(layout.slots))  # slots of a thread in a block
        self.warp_rows = self.stack * WARP // layout.neighbours  # of a block, in one warp
        self.warps = rows // self.warp_rows  # that share a block

    def bytes(self) -> int:
        """Shared memory that ``enter`` takes."""
        return self.plan.groups * self.plan.rows // self.warp_rows * self.width * 4 + 16

    def enter(self, smem: Any) -> None:
        """In the kernel, first of all."""
        layout = cute.make_layout((self.width, self.plan.rows // self.warp_rows, self.plan.groups))
        self.buffers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def gather(self, tile: Tile, x: Fragment, reduce: Callable[[list[Float32]], Float32]) -> cute.Tensor:
        """The warps' results, there for the whole group; ``reduce`` makes one of a thread's values of a column."""
        layout, results = self.plan.layout, self.buffers[None, None, tile.group]
        orders = [x.rows.order(self.width, slot) for slot in range(layout.slots)]
        for slot in range(0, layout.slots, self.stack):
            columns = zip(*orders[slot : slot + self.stack], strict=True)
            found = [reduce([x.values[i] for i in column]) for column in columns]
            mine, first = reduce_scatter(found, self.combine, layout.neighbours, WARP)
            for i, value in enumerate(mine):
                column = layout.column(tile.thread, first + i)
                results[column, layout.row(tile.thread, slot) // self.warp_rows] = value
        tile.barrier()
        return results

    def result(self, results: cute.Tensor, column: Int32, block: Any) -> Float32:
        """That of a column and a block, from the warps'."""
        found = results[column, block * self.warps]
        for warp in range(1, self.warps):
            found = self.combine(found, results[column, block * self.warps + warp])
        return found


class Amax(Operation):
    """A maximum in registers over the tile, then one atomic for each warp: on bits, which order as the values do."""

    reduces = streams = observes = True

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x, role = values[self.o.value], self.role_of(values[self.o.value])
        for _, places in indices(x, some):
            for mine, largest in enumerate(self.largest):
                few = [cute.math.absf(x.values[i]) for i in places if role[i] == mine]
                accumulate(largest, few, maximum)

    def begin(self, tile: Tile) -> None:
        self.largest = [[Float32(0.0)] * self.plan.layout.chains for _ in range(self.o.roles)]

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

    reduces = streams = observes = True

    def step(self, tile: Tile, values: dict[str, Fragment], some: Some) -> None:
        x = values[self.o.value]
        for slot, places in indices(x, some):
            accumulate(self.sums[slot], [x.values[i] for i in places], operator.add)

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        if declaration.ordered and plan.parts * width < TILE_COLUMNS:
            raise ValueError(f"tile: got {plan.parts * width} columns; allowed: at least {TILE_COLUMNS}, for sums")

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        sums = arguments[self.o.tensor]
        if not self.o.ordered:
            return (sums,)
        # A tensor (m, 1, l) of the first tiles' sums, and how far those of the next tiles are from there.
        rows, batch = sums.shape[0], sums.shape[2]
        blocks = cute.recast_ptr(arguments[f"{self.o.tensor} sums"], dtype=Float32)
        return cute.make_tensor(blocks, cute.make_layout((rows, 1, batch), stride=(1, 0, rows))), Int32(rows * batch)

    def begin(self, tile: Tile) -> None:
        layout = self.plan.layout
        self.sums = [[Float32(0.0)] * layout.chains for _ in range(layout.slots)]

    def end(self, tile: Tile) -> None:
        sums, *apart = self.parameters
        layout = self.plan.layout
        for slot, mine in enumerate(self.sums):
            total = layout.across(functools.reduce(operator.add, mine), operator.add)
            chosen = tile.thread % layout.neighbours == 0
            first = Int64(tile.column) * apart[0] if apart else None
            give_to_row(sums, self.row(tile, slot), tile, first, total, chosen)

    def follow(self, arguments: Mapping[str, Any]) -> None:
        if not self.o.ordered:
            return
        target, offsets = arguments[self.o.tensor], arguments.get(self.plan.offsets)
        tiles = Int32(cute.ceil_div(arguments["n"], self.plan.tile_columns))
        kernel = self.add_tiles(*self.prepare(arguments), target, offsets, tiles)
        launch(kernel, target.shape[0], target.shape[2], arguments["stream"])

    @cute.kernel
    def add_tiles(
        self, sums: cute.Tensor, apart: Int32, target: cute.Tensor, offsets: cute.Tensor | None, tiles: Int32
    ) -> None:
        """A thread for each row: the sums of its tiles, in their order."""
        thread, _, _ = cute.arch.thread_idx()
        height, _, _ = cute.arch.block_dim()
        part, batch, _ = cute.arch.block_idx()
        row, end = part * height + thread, Int32(target.shape[0])
        if const_expr(offsets is not None):
            end = offsets[offsets.shape[0] - 1]
        if row < end:
            total = Float32(0.0)
            first = sums.iterator + cute.crd2idx((row, 0, batch), sums.layout)
            for i in cutlass.range(tiles, unroll=4):
                total += cute.arch.load(first + Int64(i) * apart, Float32)
            target[row, 0, batch] = target[row, 0, batch] + total

    name(add_tiles, "cudnn_sum_rows")


class SumColumn(Operation):
    """Warps add up their rows, shared memory takes the sums; a thread for each column adds up those of 64 rows."""

    reduces = observes = True

    def __init__(self, declaration: Any, plan: Plan, width: int) -> None:
        super().__init__(declaration, plan, width)
        self.blockwise = ColumnBlocks(plan, width, BLOCK_ROWS, operator.add)

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return self.blocks(arguments), Int32(arguments[self.o.tensor].shape[1]), self.stride(arguments)

    def blocks(self, arguments: Mapping[str, Any]) -> cute.Pointer:
        """The sums of blocks."""
        return cute.recast_ptr(arguments[f"{self.o.tensor} sums"], dtype=Float32)

    def stride(self, arguments: Mapping[str, Any]) -> Int32:
        """How much a group's number adds to a block's: its rows do the rest, where groups share them."""
        return Int32(1) if self.plan.offsets else Int32(cute.ceil_div(arguments["m"], BLOCK_ROWS))

    def bytes(self) -> int:
        return self.blockwise.bytes()

    def enter(self, parameters: Sequence[Any], smem: Any) -> None:
        super().enter(parameters, smem)
        self.blockwise.enter(smem)

    def apply(self, tile: Tile, part: int, values: dict[str, Fragment]) -> None:
        sums = self.blockwise.gather(tile, values[self.o.value], lambda column: functools.reduce(operator.add, column))
        for start in range(0, self.width, self.plan.threads):
            self.write(tile, part, tile.thread + start, sums)

    @cute.jit
    def write(self, tile: Tile, part: int, column: Int32, sums: cute.Tensor) -> None:
        """One thread: the sums of a column of the part, if it has so many."""
        blocks, columns, stride = self.parameters
        place = self.column(tile, part, column)
        if column < self.width and place < columns:
            for block in cutlass.range_constexpr(self.plan.rows // BLOCK_ROWS):
                row = tile.row + block * BLOCK_ROWS
                if row < tile.end:
                    total = self.blockwise.result(sums, column, block)
                    number = row // BLOCK_ROWS + tile.expert * stride
                    cute.arch.store(blocks + (Int64(number) * columns + place), total)

    def follow(self, arguments: Mapping[str, Any]) -> None:
        target, offsets = arguments[self.o.tensor], arguments.get(self.plan.offsets)
        given = (self.blocks(arguments), target, offsets, Int32(arguments["m"]), self.stride(arguments))
        launch(self.add_blocks(*given), target.shape[1], target.shape[0], arguments["stream"])

    @cute.kernel
    def add_blocks(
        self, blocks: cute.Pointer, target: cute.Tensor, offsets: cute.Tensor | None, m: Int32, stride: Int32
    ) -> None:
        """A thread for each column: the blocks of its group, in their order."""
        thread, _, _ = cute.arch.thread_idx()
        width, _, _ = cute.arch.block_dim()
        part, group, _ = cute.arch.block_idx()
        column, columns = part * width + thread, target.shape[1]
        start, end = Int32(0), m
        if const_expr(offsets is not None):
            start, end, _ = expert_range(offsets, group)
        if column < columns:
            first = start // BLOCK_ROWS + group * stride
            total = Float32(0.0)
            for i in cutlass.range((end - start + BLOCK_ROWS - 1) // BLOCK_ROWS, unroll=4):
                total += cute.arch.load(blocks + (Int64(first + i) * columns + column), Float32)
            if const_expr(self.o.halves):
                column = unwoven(column, columns, BLOCK)
            target[group, column] = total.to(target.element_type)

    name(add_blocks, "cudnn_sum_columns")


def launch(kernel: Any, count: Any, groups: Any, stream: Any) -> None:
    """Launches a kernel with a thread for each of so many sums of each group."""
    threads = 256
    kernel.launch(grid=[cute.ceil_div(count, threads), groups, 1], block=[threads, 1, 1], stream=stream)


@cute.jit
def raise_amax(amax: cute.Tensor, index: Int32, largest: Float32) -> None:
    """The element of a number becomes max(itself, the warp's largest), for largest >= 0 or NaN."""
    bits = cute.arch.warp_redux_sync(largest.bitcast(Int32), "max")
    if cute.arch.lane_idx() == 0:
        place = cute.recast_ptr(amax.iterator + index, dtype=Int32)
        cute.arch.red(place, bits, op="max", dtype="s32", sem="relaxed", scope="gpu")


@cute.jit
def give_to_row(sums: cute.Tensor, row: Int32, tile: Tile, apart: Int64 | None, value: Float32, chosen: Any) -> None:
    """Adds to an element of a tensor (m, 1, l), if the row is the tile's and the thread is chosen; or writes one so far
    from there.
    """
    if chosen and row < tile.end:
        place = cute.crd2idx((row, 0, tile.batch), sums.layout)
        if const_expr(apart is None):
            cute.arch.red(sums.iterator + place, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
        else:
            cute.arch.store(sums.iterator + (apart + place), value)
