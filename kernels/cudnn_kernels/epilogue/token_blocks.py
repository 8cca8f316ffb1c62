"""Blocks of 128 rows of a group, quantized column by column and stored transposed: the K-major operands of the weight
gradients of fp8 training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from cudnn_kernels.epilogue import TOKEN_BLOCK, StoreTokenBlocks
from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.operation import EpilogueParams, Tile
from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.epilogue.reductions import ColumnBlocks
from cudnn_kernels.epilogue.tiles import StagedTile
from cudnn_kernels.pipeline.fragment import Fragment, upper_lane
from cudnn_kernels.schedule import first_block


class StoreTokenBlocksImpl(StagedTile):
    """Warps reduce the amax of their rows to shared memory; one thread per column computes the scale factor. The
    elements pass through shared memory, tokens contiguous: a warpgroup stores its tokens of a block by one TMA store.

    Two warpgroups that share a tile share its blocks: they exchange the amax through shared memory.
    """

    op: StoreTokenBlocks
    reduces = read_only = True

    def __init__(self, epi_op: Any, params: EpilogueParams, width: int) -> None:
        super().__init__(epi_op, params, width)
        self.sharers = TOKEN_BLOCK // params.rows  # warpgroups that share a block
        if self.sharers not in (1, params.num_warpgroups) or params.segment_stride:
            raise ValueError(f"{epi_op.tensor}: got {params}; allowed: tiles of whole blocks of {TOKEN_BLOCK} rows")
        self.blockwise = ColumnBlocks(params, width, TOKEN_BLOCK, maximum)

    def view(self, arguments: Mapping[str, Any]) -> cute.Tensor:
        """The blocks as (tokens of a block, columns, blocks)."""
        blocks = arguments[self.op.tensor]
        return cute.make_tensor(blocks.iterator, cute.select(blocks.layout, mode=[2, 1, 0]))

    def tma_op(self) -> Any:
        return cute.nvgpu.cpasync.CopyBulkTensorTileS2GOp()

    def prepare(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        return (*super().prepare(arguments), arguments[self.op.scales])

    def bytes(self) -> int:
        return super().bytes() + self.blockwise.bytes() + self.params.num_warpgroups * self.width * 4 + 16

    def setup_smem(self, parameters: Sequence[Any], smem: Any) -> None:
        super().setup_smem(parameters, smem)
        self.blockwise.setup_smem(smem)
        layout = cute.make_layout((self.width, self.params.num_warpgroups))
        self.multipliers = smem.allocate_tensor(Float32, layout, byte_alignment=16)

    def block(self, tile: Tile) -> tuple[Int32, Int32, cutlass.Boolean]:
        """The index of the tile's block, its first token of the warpgroup, and whether the block exists."""
        token = (tile.row - tile.start) % TOKEN_BLOCK
        first = tile.row - token
        number = first_block(tile.start, tile.expert, TOKEN_BLOCK) + (first - tile.start) // TOKEN_BLOCK
        return number, token, first < tile.end

    def rows(self, tile: Tile) -> tuple[Any, Any]:
        number, token, exists = self.block(tile)
        _, tensor, _ = self.parameters
        return token, Int32(select_(exists, number, Int32(tensor.shape[2])))  # out of bounds: TMA stores nothing

    def apply(self, tile: Tile, subtile: int, values: dict[str, Fragment]) -> None:
        x, layout = values[self.op.value], self.params.layout
        use = tile.iteration * self.params.num_subtiles + subtile
        amax = self.blockwise.reduce_warps(tile, x, magnitude, use)
        for start in range(0, self.width, self.params.threads):
            self.compute_scale_in_bounds(tile, subtile, tile.thread + start, amax)
        tile.barrier()
        scaled = self.params.fragment(Float32, self.width)
        for position in range(self.width // layout.lanes_per_row):
            multiplier = self.multipliers[layout.column(tile.thread, position), tile.wg_idx]
            for slot in range(layout.slots):
                i = layout.order(self.width, slot)[position]
                scaled[i] = x.values[i] * multiplier
        rounded = self.params.fragment(self.element, self.width)
        rounded.store(scaled.load().to(self.element))
        if layout.matrices:
            self.store_transposed(rounded, tile, subtile)
        else:
            buffer = self.buffer(tile, subtile)
            for position in range(self.width):
                buffer[layout.row(tile.thread, 0), position] = rounded[position]

    @cute.jit
    def compute_scale_in_bounds(self, tile: Tile, subtile: int, column: Int32, amax: cute.Tensor) -> None:
        """One thread: :meth:`compute_scale` of a column of the subtile, if there is one."""
        if column < self.width:
            self.compute_scale(tile, subtile, column, amax)

    def compute_scale(self, tile: Tile, subtile: int, column: Int32, amax: cute.Tensor) -> None:
        """One thread: computes the scale factor of a column of the subtile, and writes it if the block exists."""
        largest = self.blockwise.result(amax, column, 0)
        code, multiplier = compute_block_scale(largest, self.op.dtype, "float32", 1.0, self.op.power_of_two)
        self.multipliers[column, tile.wg_idx] = multiplier
        number, token, exists = self.block(tile)
        *_, scales = self.parameters
        write_scale(scales, number, self.column(tile, subtile, column), code, exists & (token == 0))

    def store_transposed(self, rounded: cute.Tensor, tile: Tile, subtile: int) -> None:
        """Transposes the bytes of wgmma's accumulators, four tokens of a column to a word, and stores the words.

        A word of a thread holds two columns of the rows r and r + 8. Lanes whose rows are neighbours exchange columns,
        then the lanes of two pairs of rows exchange the upper rows for the lower ones. Stores have no bank conflicts.
        """
        layout, lane, words = self.params.layout, tile.thread % 32, cute.recast_tensor(rounded, Int32)
        by_column = Int32(select_(upper_lane(4), Int32(0x3715), Int32(0x6240)))
        by_row = Int32(select_(upper_lane(8), Int32(0x3276), Int32(0x5410)))
        stage = self.buffers.iterator.toint() + self.stage(tile, subtile) * self.subtile_bytes()
        column, count = lane % 4 * 2 + lane // 4 % 2, self.width // 8
        for block in range(layout.slots // 2):
            token = layout.row(tile.thread, 2 * block) - lane // 4 + lane // 16 * 4 + lane // 8 % 2 * 8
            # The swizzle of the stage, 64 or 128 bytes, is the same every 8 columns: their addresses differ by a
            # constant. Swizzled one by one, ptxas would keep all addresses in registers during the mainloop.
            offset = column * self.params.rows + token
            offset = offset ^ (offset >> 3 & self.params.rows - 16)
            target = cute.make_ptr(Int32, stage + offset, cute.AddressSpace.smem, assumed_align=4)
            for i in range(count):
                word = words[block * count + i]
                word = cute.arch.prmt(word, cute.arch.shuffle_sync_bfly(word, 4), by_column)
                word = cute.arch.prmt(word, cute.arch.shuffle_sync_bfly(word, 8), by_row)
                cute.arch.store(target + i * 2 * self.params.rows, word)

    def issue_tma(self, tile: Tile, subtile: int) -> None:
        for source, target in self.tma_partitions(tile, subtile):
            cute.copy(self.parameters[0], source, target)


@cute.jit
def write_scale(scales: cute.Tensor, block: Int32, column: Int32, code: Float32, in_bounds: Any) -> None:
    """Writes the scale factor of a block and a column, if it is in bounds."""
    if in_bounds and column < scales.shape[1]:
        scales[block, column] = code
