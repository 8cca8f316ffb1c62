"""Quantizes tokens to e4m3 in the order of experts, by rows and by token columns, in one read.

A CTA takes a few blocks, one after the other: 128 rows of one expert x 128 columns. It gathers the rows and stores them

- by rows, as the GEMMs of tokens with weights read them: a float32 scale factor for 128 columns of a row;
- by token columns, transposed, as the GEMMs of weight gradients read them: a scale factor for 128 tokens of a column.

Rows that come in e4m3 with their scale factors are copied by rows, and quantized again by token columns.

The next block's rows are copied to shared memory by cp.async meanwhile; a thread reads what it has copied itself.
Consecutive CTAs have the same columns of all experts' rows. A token has rows of several experts: those columns of all
tokens stay in L2 between its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE
from cudnn_kernels.moe.transpose import LANES, THREADS, VALUES, TransposedTile
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.fragment import all_gather, reduce_scatter, scattered_index
from cudnn_kernels.pipeline.tma import cp_async_zfill
from cudnn_kernels.threads import WARP_SIZE

CTAS_PER_SM = 2
BLOCKS = 4  # of a CTA


class QuantizeTokens(Kernel):
    """The kernel for one :class:`QuantizeTokensConfiguration`."""

    tile: TransposedTile
    stages: cute.Tensor  # (rows, columns, stage) of the rows that cp.async copies

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("x", "x_scales", "gather_idx", "offsets", "rows", "row_scales", "blocks", "block_scales")
        groups = cute.ceil_div(arguments["blocks"].shape[0], BLOCKS)
        self.kernel(*map(arguments.get, names)).launch(
            grid=[groups * (self.c.columns // BLOCK), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        x_scales: Any,
        gather_idx: Any,
        offsets: cute.Tensor,
        rows: Any,
        row_scales: Any,
        blocks: cute.Tensor,
        block_scales: cute.Tensor,
    ) -> None:
        thread, index = thread_block_idx()
        groups = cute.ceil_div(blocks.shape[0], BLOCKS)
        block, column = index % groups * BLOCKS, index // groups
        self.tile = TransposedTile(thread)
        layout = cute.make_layout((BLOCK, BLOCK, 2), stride=(BLOCK, 1, BLOCK * BLOCK))
        self.stages = SmemAllocator().allocate_tensor(x.element_type, layout, byte_alignment=16)
        row, end = self.locate(offsets, block, blocks.shape[0])
        self.load(x, gather_idx, row, end, column, 0)
        scale = self.load_scale(x_scales, gather_idx, row, end, column)
        for i in cutlass.range_constexpr(BLOCKS):
            this_row, this_end, this_scale = row, end, scale
            if const_expr(i + 1 < BLOCKS):
                row, end = self.locate(offsets, block + i + 1, blocks.shape[0])
                self.load(x, gather_idx, row, end, column, (i + 1) % 2)
                scale = self.load_scale(x_scales, gather_idx, row, end, column)
            cute.arch.cp_async_wait_group(1 if i + 1 < BLOCKS else 0)
            if this_row - thread // LANES * VALUES < this_end:
                of_rows, of_columns = (rows, row_scales, this_scale), (blocks, block_scales)
                self.process(*of_rows, *of_columns, this_row, this_end, block + i, column, i % 2)

    set_kernel_name(kernel, "cudnn_moe_quantize_tokens")

    def locate(self, offsets: cute.Tensor, block: Int32, blocks: Int32) -> tuple[Int32, Int32]:
        """The first of a thread's 8 rows of a block, and the end of its expert; all are behind it if the block has no
        rows.
        """
        expert = self.expert_of(offsets, block)
        before = offsets[cutlass.max(expert - 1, 0)]
        start = Int32(select_(expert > 0, before, Int32(0)))
        end = Int32(select_(block < blocks, offsets[expert], Int32(0)))
        return start + (block - start // BLOCK - expert) * BLOCK + self.tile.group * VALUES, end

    def expert_of(self, offsets: cute.Tensor, block: Int32) -> Int32:
        """The last expert whose first block, start // BLOCK + expert, is not behind ``block``."""
        count, lane = Int32(0), cute.arch.lane_idx()
        for base in range(0, self.c.experts, WARP_SIZE):
            expert = base + lane
            end = offsets[cutlass.min(cutlass.max(expert - 1, 0), self.c.experts - 1)]
            start = Int32(select_(expert > 0, end, Int32(0)))
            begins = (expert < self.c.experts) & (start // BLOCK + expert <= block)
            count += cute.arch.popc(cute.arch.vote_ballot_sync(begins))
        return count - 1

    def load(self, x: cute.Tensor, gather_idx: Any, row: Int32, end: Int32, column: Int32, stage: int) -> None:
        """Copies a vector of each of a thread's rows to shared memory; zeros for rows behind the expert's last one."""
        last = cutlass.max(end - 1, 0)
        sources = [cutlass.min(row + i, last) for i in range(VALUES)]
        if const_expr(gather_idx is not None):
            sources = [gather_idx[source] for source in sources]
        for i, source in enumerate(sources):
            target = self.stages[self.tile.group * VALUES + i, None, stage]
            pair = [
                cute.local_tile(each, (VALUES,), (lane,))
                for each, lane in ((target, self.tile.lane), (x[source, None], column * LANES + self.tile.lane))
            ]
            cp_async_zfill(
                *(each.iterator.toint() for each in pair), row + i >= end, VALUES * x.element_type.width // 8
            )
        cute.arch.cp_async_commit_group()

    def load_scale(self, x_scales: Any, gather_idx: Any, row: Int32, end: Int32, column: Int32) -> Any:
        """Loads the scale factor of one of a thread's rows in e4m3, :func:`scattered_index`; 0 behind the last one."""
        if const_expr(x_scales is None):
            return None
        index = row + scattered_index(VALUES, 1, LANES)
        source = cutlass.min(index, cutlass.max(end - 1, 0))
        if const_expr(gather_idx is not None):
            source = gather_idx[source]
        return Float32(select_(index < end, x_scales[source, column], Float32(0.0)))

    def process(
        self,
        rows: Any,
        row_scales: Any,
        scale: Any,
        blocks: cute.Tensor,
        block_scales: cute.Tensor,
        row: Int32,
        end: Int32,
        block: Int32,
        column: Int32,
        stage: int,
    ) -> None:
        """Quantizes a block, of which a thread has the 8 rows from ``row`` on; ``scale``: of :meth:`load_scale`."""
        tile, vectors, values = self.tile, [], []
        for i in range(VALUES):
            vector = cute.make_rmem_tensor(VALUES, self.stages.element_type)
            source = self.stages[tile.group * VALUES + i, None, stage]
            cute.autovec_copy(cute.local_tile(source, (VALUES,), (tile.lane,)), vector)
            wide = vector.load().to(Float32)
            vectors.append(vector)
            values.append([wide[j] for j in range(VALUES)])
        # (1) By rows: lanes reduce-scatter the maxima, compute the scale factors and all-gather the multipliers. Rows
        # in e4m3 are copied, and multiplied by their scale factors.
        if const_expr(self.c.dequantizes):
            if const_expr(rows is not None):
                self.store_row_scale(row_scales, row + scattered_index(VALUES, 1, LANES), end, column, scale)
                for i, vector in enumerate(vectors):
                    self.store_row(rows[row + i, None], row + i < end, column, vector)
            scales = all_gather([scale], VALUES, 1, LANES)
            values = [[value * each for value in vector] for vector, each in zip(values, scales, strict=True)]
        elif const_expr(rows is not None):
            (amax,), first = reduce_scatter([magnitude(vector) for vector in values], maximum, 1, LANES)
            row_scale, multiplier = compute_block_scale(amax, FP8_DTYPE, "float32")
            self.store_row_scale(row_scales, row + first, end, column, row_scale)
            for i, each in enumerate(all_gather([multiplier], VALUES, 1, LANES)):
                quantized = rounded([value * each for value in values[i]], DTYPES[FP8_DTYPE])
                self.store_row(rows[row + i, None], row + i < end, column, quantized)
        # (2) By token columns.
        tile.reduce_columns(values)
        cute.arch.sync_threads()
        tile.scale_columns(cute.local_tile(block_scales[block, None], (BLOCK,), (column,)))
        cute.arch.sync_threads()
        multipliers = tile.column_multipliers()
        of_columns = [[a * b for a, b in zip(vector, multipliers, strict=True)] for vector in values]
        tile.store(of_columns, cute.local_tile(blocks[block, None, None], (BLOCK, BLOCK), (column, 0)))

    @cute.jit
    def store_row_scale(self, scales: cute.Tensor, row: Int32, end: Int32, column: Int32, scale: Float32) -> None:
        """The scale factor of a row, which two lanes have."""
        if (row < end) & (cute.arch.lane_idx() % LANES < VALUES):
            scales[row, column] = scale

    @cute.jit
    def store_row(self, row: cute.Tensor, in_bounds: Any, column: Int32, vector: cute.Tensor) -> None:
        """Stores a thread's vector of a row, if in bounds."""
        if in_bounds:
            lane = cute.arch.lane_idx() % LANES
            cute.autovec_copy(vector, cute.local_tile(row, (VALUES,), (column * LANES + lane,)))
