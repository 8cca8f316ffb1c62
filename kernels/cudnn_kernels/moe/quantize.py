"""Quantizes rows, permuted tokens, or weights to e4m3 with fp32 block scale factors.

There is a scale factor for each 128 elements of a row, or for each 128 x 128 weights. 16 lanes hold 128 elements of a
row, a 16-byte vector each. A CTA has 128 x 128 weights, or whole rows: each element is read once, and a token is stored
to the rows of all of its (token, k) slots, whose indices are loaded first.
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
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE, QuantizeConfiguration
from cudnn_kernels.moe.transpose import LANES, THREADS, VALUES, TransposedTile, lanes_max
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

MOST_THREADS = 512  # of a row


class Quantize(Kernel):
    """The kernel for one :class:`QuantizeConfiguration`."""

    def __init__(self, configuration: QuantizeConfiguration) -> None:
        super().__init__(configuration)
        self.lanes = LANES  # per block of a row

    def launch(self, arguments: Mapping[str, Any]) -> None:
        x, quantized, scales, count = (
            arguments["x"],
            arguments["quantized"],
            arguments["scales"],
            arguments["x"].shape[0],
        )
        if self.c.blocks:
            transposed = map(arguments.get, ("transposed", "transposed_scales"))
            self.blocks(x, quantized, scales, *transposed).launch(
                grid=[cute.ceil_div(count, BLOCK) * (self.c.columns // BLOCK), 1, 1],
                block=[THREADS, 1, 1],
                stream=arguments["stream"],
                min_blocks_per_mp=1,
            )
        else:
            vectors_per_row = self.c.columns // VALUES
            width = min(vectors_per_row, MOST_THREADS)  # threads of a row
            height = max(1, THREADS // width)  # rows of a CTA
            self.rows(x, arguments.get("scatter_idx"), quantized, scales, width, height).launch(
                grid=[cute.ceil_div(count, height), 1, 1],
                block=[-(-width * height // WARP_SIZE) * WARP_SIZE, 1, 1],
                stream=arguments["stream"],
                min_blocks_per_mp=1,
            )

    @cute.kernel
    def rows(
        self,
        x: cute.Tensor,
        scatter_idx: Any,
        quantized: cute.Tensor,
        scales: cute.Tensor,
        width: cutlass.Constexpr[int],
        height: cutlass.Constexpr[int],
    ) -> None:
        thread, block = thread_block_idx()
        row, lane = block * height + thread // width, thread % width
        is_row = (thread < width * height) & (row < x.shape[0])
        row = Int32(select_(is_row, row, Int32(0)))
        targets = self.targets(scatter_idx, row)
        for first in cutlass.range_constexpr(0, self.c.columns // VALUES, width):
            vec_idx = first + lane
            in_bounds = is_row & (vec_idx < self.c.columns // VALUES)
            vector = self.load(x, row, Int32(select_(in_bounds, vec_idx, Int32(0))), in_bounds)
            amax = lanes_max(magnitude(vector), self.lanes)
            scale, inverse = compute_block_scale(amax, FP8_DTYPE, "float32")
            quantized_vector = rounded([v * inverse for v in vector], DTYPES[FP8_DTYPE])
            for target in targets:
                self.store(quantized, scales, target, vec_idx, in_bounds & (target >= 0), quantized_vector, scale)

    set_kernel_name(rows, "cudnn_moe_quantize")

    def targets(self, scatter_idx: Any, row: Int32) -> list[Int32]:
        """The rows to which a row is stored, -1 for dropped slots."""
        if scatter_idx is None:
            return [row]
        wide = cute.make_rmem_tensor(self.c.top_k, Int32)
        cute.autovec_copy(scatter_idx[row, None], wide)
        return [wide[choice] for choice in range(self.c.top_k)]

    @cute.kernel
    def blocks(
        self, x: cute.Tensor, quantized: cute.Tensor, scales: cute.Tensor, transposed: Any, transposed_scales: Any
    ) -> None:
        thread, block = thread_block_idx()
        across = self.c.columns // BLOCK
        row_block, column_block = block // across, block % across
        rows = [row_block * BLOCK + thread // LANES * VALUES + i for i in range(VALUES)]
        vec_idx = column_block * LANES + thread % LANES
        vectors = [self.load(x, row, vec_idx, row < x.shape[0]) for row in rows]
        amax = self.of_block([magnitude(vector) for vector in vectors], thread)
        scale, inverse = compute_block_scale(amax, FP8_DTYPE, "float32")
        values = [[v * inverse for v in vector] for vector in vectors]
        for row, vector in zip(rows, values, strict=True):
            self.store(quantized, scales, row, vec_idx, True, rounded(vector, DTYPES[FP8_DTYPE]), scale)
        if const_expr(transposed is not None):
            down = self.c.matrix_rows // BLOCK
            matrix, of_matrix = row_block // down, row_block % down
            position = matrix * across + column_block, of_matrix
            TransposedTile(thread).store(values, cute.local_tile(transposed, (BLOCK, BLOCK), position))
            transposed_scales[position] = scale

    set_kernel_name(blocks, "cudnn_moe_quantize_weights")

    def load(self, x: cute.Tensor, row: Int32, vec_idx: Int32, in_bounds: cutlass.Boolean) -> list:
        """Loads a 16-byte vector of a row as float32; zeros if out of bounds."""
        vector = cute.make_rmem_tensor(VALUES, x.element_type)
        cute.autovec_copy(
            cute.local_tile(x[Int32(select_(in_bounds, row, Int32(0))), None], (VALUES,), (vec_idx,)), vector
        )
        wide = vector.load().to(Float32)
        return [Float32(select_(in_bounds, wide[i], Float32(0.0))) for i in range(VALUES)]

    def of_block(self, largest: list, thread: Int32) -> Float32:
        """The maximum over the CTA."""
        warps = THREADS // WARP_SIZE
        shared = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), byte_alignment=16)
        wide = largest[0]
        for other in largest[1:]:
            wide = maximum(wide, other)
        shared[thread // WARP_SIZE] = lanes_max(wide, WARP_SIZE)  # all lanes write the same value
        cute.arch.sync_threads()
        wide = shared[0]
        for warp in range(1, warps):
            wide = maximum(wide, shared[warp])
        return wide

    @cute.jit
    def store(
        self,
        quantized: cute.Tensor,
        scales: cute.Tensor,
        row: Int32,
        vec_idx: Int32,
        in_bounds: Any,
        vector: cute.Tensor,
        scale: Float32,
    ) -> None:
        """Stores a thread's vector of a row, if in bounds; one thread stores the scale factor of the block."""
        height = const_expr(BLOCK if self.c.blocks else 1)  # rows that share a scale factor
        if in_bounds & (row < quantized.shape[0]):
            cute.autovec_copy(vector, cute.local_tile(quantized[row, None], (VALUES,), (vec_idx,)))
            if (vec_idx % self.lanes == 0) & (row % height == 0):
                scales[row // height, vec_idx // self.lanes] = scale
