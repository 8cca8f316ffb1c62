"""Transposes e4m3 weights with a scale factor for each 128 x 128, which is exact: it holds in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE
from cudnn_kernels.moe.transpose import LANES, THREADS, VALUES, TransposedTile
from cudnn_kernels.naming import set_kernel_name


class TransposeQuantized(Kernel):
    """The kernel for one :class:`cudnn_kernels.moe.configuration.TransposeQuantizedConfiguration`. A CTA has one block
    of 128 x 128.
    """

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("quantized", "scales", "transposed", "transposed_scales")
        blocks = arguments["scales"].shape[0] * (self.c.columns // BLOCK)
        self.kernel(*(arguments[name] for name in names)).launch(
            grid=[blocks, 1, 1],
            block=[THREADS, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self, quantized: cute.Tensor, scales: cute.Tensor, transposed: cute.Tensor, transposed_scales: cute.Tensor
    ) -> None:
        thread, block = thread_block_idx()
        across, down = self.c.columns // BLOCK, self.c.rows // BLOCK
        row_block, column_block = block // across, block % across
        position = (row_block // down * across + column_block, row_block % down)
        rows = [row_block * BLOCK + thread // LANES * VALUES + i for i in range(VALUES)]
        values = [self.load(quantized[row, None], column_block * LANES + thread % LANES) for row in rows]
        TransposedTile(thread).store(values, cute.local_tile(transposed, (BLOCK, BLOCK), position))
        transposed_scales[position] = scales[row_block, column_block]

    set_kernel_name(kernel, "cudnn_moe_transpose_quantized")

    def load(self, row: Any, vec_idx: Int32) -> list[Float32]:
        """Loads 8 elements of a row as float32, which are stored as e4m3 again without rounding."""
        vector = cute.make_rmem_tensor(VALUES, DTYPES[FP8_DTYPE])
        cute.autovec_copy(cute.local_tile(row, (VALUES,), (vec_idx,)), vector)
        wide = vector.load().to(Float32)
        return [wide[j] for j in range(VALUES)]
