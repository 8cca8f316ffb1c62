"""Quantizes tokens to e4m3 in the order of experts, by rows and by token columns, in one read.

A CTA has 128 rows of one expert, and one or two tiles of 128 columns. It gathers the rows and stores them

- by rows, as the GEMMs of tokens with weights read them: a float32 scale factor for 128 columns of a row;
- by token columns, transposed, as the GEMMs of weight gradients read them: a scale factor for 128 tokens of a column.

The second tile is loaded to registers before the first one is processed. Consecutive CTAs have the same columns of all
experts' rows. A token has rows of several experts: those columns of all tokens stay in L2 between its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE, QuantizeTokensConfiguration
from cudnn_kernels.moe.transpose import LANES, THREADS, VALUES, TransposedTile
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.fragment import all_gather, reduce_scatter
from cudnn_kernels.threads import WARP_SIZE

CTAS_PER_SM = 2


class QuantizeTokens(Kernel):
    """The kernel for one :class:`QuantizeTokensConfiguration`."""

    def __init__(self, configuration: QuantizeTokensConfiguration) -> None:
        super().__init__(configuration)
        self.tiles = 1 + (configuration.columns // BLOCK % 2 == 0)

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("x", "gather_idx", "offsets", "rows", "row_scales", "blocks", "block_scales")
        self.kernel(*map(arguments.get, names)).launch(
            grid=[arguments["blocks"].shape[0] * (self.c.columns // BLOCK // self.tiles), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        gather_idx: Any,
        offsets: cute.Tensor,
        rows: Any,
        row_scales: Any,
        blocks: cute.Tensor,
        block_scales: cute.Tensor,
    ) -> None:
        thread, index = thread_block_idx()
        block, first_tile = index % blocks.shape[0], index // blocks.shape[0] * self.tiles
        expert = self.expert_of(offsets, block, thread % WARP_SIZE)
        start = Int32(0)
        if expert > 0:
            start = offsets[expert - 1]
        first, end = start + (block - start // BLOCK - expert) * BLOCK, offsets[expert]
        if first < end:
            row = first + thread // LANES * VALUES
            outputs = (rows, row_scales, blocks, block_scales)
            self.quantize(x, self.sources(gather_idx, row, end), outputs, thread, (row, end, block), first_tile)

    set_kernel_name(kernel, "cudnn_moe_quantize_tokens")

    def quantize(
        self,
        x: cute.Tensor,
        sources: list[Int32],
        outputs: tuple[Any, ...],
        thread: Int32,
        position: tuple[Int32, Int32, Int32],
        first_tile: Int32,
    ) -> None:
        """Quantizes the CTA's tiles. ``position``: the thread's first row, the expert's end, and the block."""
        row, end, _ = position
        tile, loaded = TransposedTile(thread), self.load(x, sources, row, end, first_tile)
        for i in range(self.tiles):
            wide = [vector.load().to(Float32) for vector in loaded]
            values = [[vector[j] for j in range(VALUES)] for vector in wide]
            if i + 1 < self.tiles:
                loaded = self.load(x, sources, row, end, first_tile + i + 1)
            self.process(tile, values, *outputs, *position, first_tile + i)

    def sources(self, gather_idx: Any, row: Int32, end: Int32) -> list[Int32]:
        """The rows of x that a thread's 8 rows are; for rows behind the expert's last one, that one."""
        indices = [cutlass.min(row + i, end - 1) for i in range(VALUES)]
        return indices if gather_idx is None else [gather_idx[index] for index in indices]

    def load(self, x: cute.Tensor, sources: list[Int32], row: Int32, end: Int32, tile: Int32) -> list[cute.Tensor]:
        """Loads 16 bytes of each of a thread's rows; zeros behind the expert's last one."""
        vectors = []
        for i, source in enumerate(sources):
            vector = cute.make_rmem_tensor(VALUES, x.element_type)
            vector.fill(x.element_type(0.0))
            self.load_row(x[source, None], tile, row + i < end, vector)
            vectors.append(vector)
        return vectors

    @cute.jit
    def load_row(self, row: cute.Tensor, tile: Int32, in_bounds: Any, vector: cute.Tensor) -> None:
        if in_bounds:
            lane = cute.arch.lane_idx() % LANES
            cute.autovec_copy(cute.local_tile(row, (VALUES,), (tile * LANES + lane,)), vector)

    def expert_of(self, offsets: cute.Tensor, block: Int32, lane: Int32) -> Int32:
        """The last expert whose first block, start // BLOCK + expert, is not behind ``block``."""
        count = Int32(0)
        for base in range(0, self.c.experts, WARP_SIZE):
            expert = base + lane
            end = offsets[cutlass.min(cutlass.max(expert - 1, 0), self.c.experts - 1)]
            start = Int32(select_(expert > 0, end, Int32(0)))
            begins = (expert < self.c.experts) & (start // BLOCK + expert <= block)
            count += Int32(select_(begins, Int32(1), Int32(0)))
        for distance in (1, 2, 4, 8, 16):
            count += cute.arch.shuffle_sync_bfly(count, distance)
        return count - 1

    def process(
        self,
        tile: TransposedTile,
        values: list[list[Float32]],
        rows: Any,
        row_scales: Any,
        blocks: cute.Tensor,
        block_scales: cute.Tensor,
        row: Int32,
        end: Int32,
        block: Int32,
        column: Int32,
    ) -> None:
        """Quantizes a tile of 128 columns, of which a thread has the 8 rows from ``row`` on."""
        # (1) By rows: lanes reduce-scatter the maxima, compute the scale factors and all-gather the multipliers.
        if const_expr(rows is not None):
            (amax,), first = reduce_scatter([magnitude(vector) for vector in values], maximum, 1, LANES)
            scale, multiplier = compute_block_scale(amax, FP8_DTYPE, "float32")
            self.store_row_scale(row_scales, row + first, end, column, scale)
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
