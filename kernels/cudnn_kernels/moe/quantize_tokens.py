"""Quantizes tokens to e4m3 in the order of experts, by rows and by token columns, in one read.

A CTA has 128 rows of one expert x 128 columns. It gathers the rows and stores them

- by rows, as the GEMMs of tokens with weights read them: a float32 scale factor for 128 columns of a row;
- by token columns, transposed, as the GEMMs of weight gradients read them: a scale factor for 128 tokens of a column.

Consecutive CTAs have the same columns of all experts' rows. A token has rows of several experts: those columns of all
tokens stay in L2 between its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_

from cudnn_kernels.epilogue.quantize import compute_block_scale, magnitude
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE, QuantizeTokensConfiguration
from cudnn_kernels.moe.transpose import LANES, THREADS, VALUES, TransposedTile, lanes_max, load_vector
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE


class QuantizeTokens(Kernel):
    """The kernel for one :class:`QuantizeTokensConfiguration`."""

    def __init__(self, configuration: QuantizeTokensConfiguration) -> None:
        super().__init__(configuration)

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("x", "gather_idx", "offsets", "rows", "row_scales", "blocks", "block_scales")
        self.kernel(*map(arguments.get, names)).launch(
            grid=[arguments["blocks"].shape[0] * (self.c.columns // BLOCK), 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=3,
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
        block, column_block = index % blocks.shape[0], index // blocks.shape[0]
        expert = self.expert_of(offsets, block, thread % WARP_SIZE)
        start = Int32(0)
        if expert > 0:
            start = offsets[expert - 1]
        first, end = start + (block - start // BLOCK - expert) * BLOCK, offsets[expert]
        if first < end:
            self.tile(x, gather_idx, rows, row_scales, blocks, block_scales, thread, (first, end, block, column_block))

    set_kernel_name(kernel, "cudnn_moe_quantize_tokens")

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

    def tile(
        self,
        x: cute.Tensor,
        gather_idx: Any,
        rows: Any,
        row_scales: Any,
        blocks: cute.Tensor,
        block_scales: cute.Tensor,
        thread: Int32,
        position: tuple[Int32, Int32, Int32, Int32],
    ) -> None:
        """Quantizes 128 columns of block ``block``: the rows from ``first`` to before ``end``, at most 128."""
        first, end, block, column_block = position
        lane, vec_idx = thread % LANES, column_block * LANES + thread % LANES
        indices = [first + thread // LANES * VALUES + i for i in range(VALUES)]
        values = []
        # (1) Gather the rows.
        for row in indices:
            in_bounds = row < end
            source = Int32(select_(in_bounds, row, Int32(0)))
            if const_expr(gather_idx is not None):
                source = gather_idx[source]
            vector = load_vector(x[source, None], vec_idx)
            values.append([Float32(select_(in_bounds, value, Float32(0.0))) for value in vector])
        # (2) Quantize by rows.
        if const_expr(rows is not None):
            for row, vector in zip(indices, values, strict=True):
                amax = lanes_max(magnitude(vector), LANES)
                scale, inverse = compute_block_scale(amax, FP8_DTYPE, "float32")
                quantized = rounded([value * inverse for value in vector], DTYPES[FP8_DTYPE])
                self.store_row(rows, row_scales, row, row < end, vec_idx, lane == 0, column_block, quantized, scale)
        # (3) Quantize by token columns.
        tile = TransposedTile(thread)
        scales, inverses = cute.make_rmem_tensor(VALUES, Float32), []
        for j, amax in enumerate(tile.columns_max(values)):
            scales[j], inverse = compute_block_scale(amax, FP8_DTYPE, "float32")
            inverses.append(inverse)
        self.store_column_scales(block_scales[block, None], vec_idx, thread < LANES, scales)
        of_columns = [[a * b for a, b in zip(vector, inverses, strict=True)] for vector in values]
        tile.store(of_columns, cute.local_tile(blocks[block, None, None], (BLOCK, BLOCK), (column_block, 0)))

    @cute.jit
    def store_row(
        self,
        rows: cute.Tensor,
        scales: cute.Tensor,
        row: Int32,
        in_bounds: Any,
        vec_idx: Int32,
        is_first: Any,
        block: Int32,
        vector: cute.Tensor,
        scale: Float32,
    ) -> None:
        """Stores a thread's vector of a row, if in bounds; one lane stores the scale factor."""
        if in_bounds:
            cute.autovec_copy(vector, cute.local_tile(rows[row, None], (VALUES,), (vec_idx,)))
            if is_first:
                scales[row, block] = scale

    @cute.jit
    def store_column_scales(self, scales: cute.Tensor, vec_idx: Int32, stores: Any, vector: cute.Tensor) -> None:
        """The first 16 threads store the scale factors of their columns."""
        if stores:
            cute.autovec_copy(vector, cute.local_tile(scales, (VALUES,), (vec_idx,)))
