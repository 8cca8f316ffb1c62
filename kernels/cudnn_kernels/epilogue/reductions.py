"""Epilogue reductions: amax of a tile, sums over the columns of a row, sums over the rows of a column (dbias)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from cudnn_kernels.epilogue import BLOCK_ROWS, TILE_COLUMNS
from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.operation import EpilogueParams, EpiOpImpl, Tile
from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.fragment import Fragment, ValueSubset, accumulate, indices, reduce_scatter
from cudnn_kernels.pipeline.tma import concat_glu_row
from cudnn_kernels.schedule.tile_maps import group_range
from cudnn_kernels.threads import WARP_SIZE


class ColumnBlocks:
    """Reduces each column of a subtile over blocks of ``rows`` rows, in two steps: each warp reduces its rows of a
    block and stores the results to shared memory; then one thread per column and block combines the results of the
    warps.

    A block of more rows than a warpgroup has spans all warpgroups, which share the CTA's tile. Two buffers then replace
    a second barrier: a warpgroup cannot pass the barrier of a use before the other one has read the use before.
    """

    def __init__(self, params: EpilogueParams, width: int, rows: int, combine: Callable[[Any, Any], Any]) -> None:
        layout = params.layout
        self.spans_warpgroups = rows > params.rows
        self.buffers = 1 + self.spans_warpgroups
        self.params, self.width, self.combine = params, width, combine
        self.slots_per_block = sum(layout.row(0, slot) < rows for slot in range(layout.slots))  # of a thread
        self.warp_rows = self.slots_per_block * WARP_SIZE // layout.lanes_per_row  # of a block, in one warp
        self.warps = rows // self.warp_rows  # that share a block

    def bytes(self) -> int:
        """Bytes of shared memory that ``setup_smem`` allocates."""
        return self.buffers * self.params.num_warpgroups * self.params.rows // self.warp_rows * self.width * 4 + 16

    def setup_smem(self, smem: Any) -> None:
        """At the start of the kernel: allocates shared memory."""
        warps = self.params.rows // self.warp_rows
        layout = cute.make_layout((self.width, warps, self.params.num_warpgroups, self.buffers))
        self.warp_results = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def reduce_warps(
        self, tile: Tile, x: Fragment, reduce: Callable[[list[Float32]], Float32], use: Any = 0
    ) -> cute.Tensor:
        """The first step: the warps' results in shared memory; ``reduce`` combines a thread's values of a column.
        ``use`` counts the calls, for blocks that span warpgroups.
        """
        layout, buffer = self.params.layout, self.warp_results[None, None, None, use % self.buffers]
        warp_results = buffer[None, None, tile.wg_idx]
        orders = [x.layout.order(self.width, slot) for slot in range(layout.slots)]
        for slot in range(0, layout.slots, self.slots_per_block):
            columns = zip(*orders[slot : slot + self.slots_per_block], strict=True)
            thread_results = [reduce([x.values[i] for i in column]) for column in columns]
            lane_results, first = reduce_scatter(thread_results, self.combine, layout.lanes_per_row, WARP_SIZE)
            for i, value in enumerate(lane_results):
                column = layout.column(tile.thread, first + i)
                warp_results[column, layout.row(tile.thread, slot) // self.warp_rows] = value
        if not self.spans_warpgroups:
            tile.barrier()
            return warp_results
        tile.barrier_all()
        return cute.group_modes(buffer, 1, 3)

    def result(self, warp_results: cute.Tensor, column: Int32, block: Any) -> Float32:
        """The second step, for a column and a block."""
        result = warp_results[column, block * self.warps]
        for warp in range(1, self.warps):
            result = self.combine(result, warp_results[column, block * self.warps + warp])
        return result


class AmaxImpl(EpiOpImpl):
    """A maximum in registers over the tile, then one integer atomic max per warp: the bits of non-negative floats have
    the order of the floats, and NaN is the largest.
    """

    reduces = elementwise = read_only = True

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x, role_of = values[self.op.value], self.roles_of(values[self.op.value])
        for _, value_indices in indices(x, subset):
            for role, chains in enumerate(self.amax):
                magnitudes = [cute.math.absf(x.values[i]) for i in value_indices if role_of[i] == role]
                accumulate(chains, magnitudes, maximum)

    def begin_tile(self, tile: Tile) -> None:
        self.amax = [[Float32(0.0)] * self.params.layout.chains for _ in range(self.op.roles)]

    def roles_of(self, x: Fragment) -> dict[int, int]:
        """The role (gate or up) of each value of a fragment, by register index."""
        block = GLU_BLOCK // x.layout.lanes_per_row  # values of a row in 32 columns
        orders = (x.layout.order(x.width, slot) for slot in range(x.layout.slots))
        return {i: position // block % self.op.roles for order in orders for position, i in enumerate(order)}

    def end_tile(self, tile: Tile) -> None:
        (amax,) = self.parameters
        first = tile.expert * self.op.roles if self.op.by_expert else Int32(0)
        for role, chains in enumerate(self.amax):
            atomic_amax(amax, first + role, functools.reduce(maximum, chains))


class SumRowImpl(EpiOpImpl):
    """A sum in registers over the tile's columns, then one atomic add per row; if ordered (deterministic), a partial
    sum per tile, which a second kernel adds up.
    """

    reduces = elementwise = read_only = True

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        if epi_op.ordered and params.num_subtiles * width < TILE_COLUMNS:
            raise ValueError(
                f"tile: got {params.num_subtiles * width} columns; allowed: at least {TILE_COLUMNS}, for sums"
            )

    def apply_subset(self, tile: Tile, values: dict[str, Fragment], subset: ValueSubset) -> None:
        x = values[self.op.value]
        for slot, value_indices in indices(x, subset):
            accumulate(self.sums[slot], [x.values[i] for i in value_indices], operator.add)

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        sums = arguments[self.op.tensor]
        if not self.op.ordered:
            return (sums,)
        # A tensor (m, 1, l) of the first tiles' partial sums, and the stride to those of the next tiles.
        rows, batch = sums.shape[0], sums.shape[2]
        blocks = cute.recast_ptr(arguments[f"{self.op.tensor} sums"], dtype=Float32)
        return cute.make_tensor(blocks, cute.make_layout((rows, 1, batch), stride=(1, 0, rows))), Int32(rows * batch)

    def begin_tile(self, tile: Tile) -> None:
        layout = self.params.layout
        self.sums = [[Float32(0.0)] * layout.chains for _ in range(layout.slots)]

    def end_tile(self, tile: Tile) -> None:
        sums, *tile_stride = self.parameters
        layout = self.params.layout
        for slot, chains in enumerate(self.sums):
            total = layout.all_reduce_row(functools.reduce(operator.add, chains), operator.add)
            is_first_lane = tile.thread % layout.lanes_per_row == 0
            tile_offset = Int64(tile.column) * tile_stride[0] if tile_stride else None
            add_to_row(sums, self.row(tile, slot), tile, tile_offset, total, is_first_lane)

    def launch_follow_up(self, arguments: Mapping[str, Any]) -> None:
        if not self.op.ordered:
            return
        target, offsets = arguments[self.op.tensor], arguments.get(self.params.offsets)
        tiles = Int32(cute.ceil_div(arguments["n"], self.params.tile_columns))
        kernel = self.add_tiles(*self.prepare(arguments), target, offsets, tiles)
        launch(kernel, target.shape[0], target.shape[2], arguments["stream"])

    @cute.kernel
    def add_tiles(
        self, sums: cute.Tensor, tile_stride: Int32, target: cute.Tensor, offsets: cute.Tensor | None, tiles: Int32
    ) -> None:
        """One thread per row: adds up the partial sums of its tiles, in order."""
        thread, _, _ = cute.arch.thread_idx()
        height, _, _ = cute.arch.block_dim()
        block, batch, _ = cute.arch.block_idx()
        row, end = block * height + thread, Int32(target.shape[0])
        if const_expr(offsets is not None):
            end = offsets[offsets.shape[0] - 1]
        if row < end:
            total = Float32(0.0)
            first = sums.iterator + cute.crd2idx((row, 0, batch), sums.layout)
            for i in cutlass.range(tiles, unroll=4):
                total += cute.arch.load(first + Int64(i) * tile_stride, Float32)
            target[row, 0, batch] = target[row, 0, batch] + total

    set_kernel_name(add_tiles, "cudnn_sum_rows")


class SumColumnImpl(EpiOpImpl):
    """Warps reduce their rows to shared memory; one thread per column adds up and stores the partial sum of 64 rows."""

    reduces = read_only = True

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        self.blockwise = ColumnBlocks(params, width, BLOCK_ROWS, operator.add)

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return self.blocks(arguments), Int32(arguments[self.op.tensor].shape[1]), self.stride(arguments)

    def blocks(self, arguments: Mapping[str, Any]) -> cute.Pointer:
        """The partial sums of blocks, in the workspace."""
        return cute.recast_ptr(arguments[f"{self.op.tensor} sums"], dtype=Float32)

    def stride(self, arguments: Mapping[str, Any]) -> Int32:
        """The stride of block indices between groups. With varlen_m, a block's index is its first row / 64 plus the
        group index: the tail of a group and the head of the next one may be in the same 64 rows of the tensor.
        """
        return Int32(1) if self.params.offsets else Int32(cute.ceil_div(arguments["m"], BLOCK_ROWS))

    def bytes(self) -> int:
        return self.blockwise.bytes()

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        self.blockwise.setup_smem(smem)

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x = values[self.op.value]
        warp_sums = self.blockwise.reduce_warps(tile, x, lambda column: functools.reduce(operator.add, column))
        for start in range(0, self.width, self.params.threads):
            self.write(tile, subtile, tile.thread + start, warp_sums)

    @cute.jit
    def write(self, tile: Tile, subtile: int, column: Int32, warp_sums: cute.Tensor) -> None:
        """One thread: stores the partial sums of a column of the subtile."""
        blocks, columns, stride = self.parameters
        column_index = self.column(tile, subtile, column)
        if column < self.width and column_index < columns:
            for block in cutlass.range_constexpr(self.params.rows // BLOCK_ROWS):
                row = tile.row + block * BLOCK_ROWS
                if row < tile.end:
                    total = self.blockwise.result(warp_sums, column, block)
                    block_index = row // BLOCK_ROWS + tile.expert * stride
                    cute.arch.store(blocks + (Int64(block_index) * columns + column_index), total)

    def launch_follow_up(self, arguments: Mapping[str, Any]) -> None:
        target, offsets = arguments[self.op.tensor], arguments.get(self.params.offsets)
        kernel_arguments = (self.blocks(arguments), target, offsets, Int32(arguments["m"]), self.stride(arguments))
        launch(self.add_blocks(*kernel_arguments), target.shape[1], target.shape[0], arguments["stream"])

    @cute.kernel
    def add_blocks(
        self, blocks: cute.Pointer, target: cute.Tensor, offsets: cute.Tensor | None, m: Int32, stride: Int32
    ) -> None:
        """One thread per column: adds up the partial sums of its group's blocks, in order."""
        thread, _, _ = cute.arch.thread_idx()
        width, _, _ = cute.arch.block_dim()
        block, group, _ = cute.arch.block_idx()
        column, columns = block * width + thread, target.shape[1]
        start, end = Int32(0), m
        if const_expr(offsets is not None):
            start, end, _ = group_range(offsets, group)
        if column < columns:
            first = start // BLOCK_ROWS + group * stride
            total = Float32(0.0)
            for i in cutlass.range((end - start + BLOCK_ROWS - 1) // BLOCK_ROWS, unroll=4):
                total += cute.arch.load(blocks + (Int64(first + i) * columns + column), Float32)
            if const_expr(self.op.concat_glu):
                column = concat_glu_row(column, columns, GLU_BLOCK)
            target[group, column] = total.to(target.element_type)

    set_kernel_name(add_blocks, "cudnn_sum_columns")


def launch(kernel: Any, count: Any, groups: Any, stream: Any) -> None:
    """Launches a kernel with one thread for each of ``count`` sums of each group."""
    threads = 256
    kernel.launch(grid=[cute.ceil_div(count, threads), groups, 1], block=[threads, 1, 1], stream=stream)


@cute.jit
def atomic_amax(amax: cute.Tensor, index: Int32, value: Float32) -> None:
    """Atomic max of an element of ``amax`` and the largest value of a warp; values are >= 0 or NaN."""
    bits = cute.arch.warp_redux_sync(value.bitcast(Int32), "max")
    if cute.arch.lane_idx() == 0:
        address = cute.recast_ptr(amax.iterator + index, dtype=Int32)
        cute.arch.red(address, bits, op="max", dtype="s32", sem="relaxed", scope="gpu")


@cute.jit
def add_to_row(
    sums: cute.Tensor, row: Int32, tile: Tile, tile_offset: Int64 | None, value: Float32, is_first_lane: Any
) -> None:
    """The first lane of a row adds a value to the row's sum in a tensor (m, 1, l) or, with ``tile_offset``, stores it
    as the tile's partial sum, if the row is in bounds.
    """
    if is_first_lane and row < tile.end:
        offset = cute.crd2idx((row, 0, tile.batch), sums.layout)
        if const_expr(tile_offset is None):
            cute.arch.red(sums.iterator + offset, value, op="add", dtype="f32", sem="relaxed", scope="gpu")
        else:
            cute.arch.store(sums.iterator + (tile_offset + offset), value)
