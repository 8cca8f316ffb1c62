"""Compares weights with their e4m3 copies in one row of each 128 x 128 block: whether they have changed since."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_

from cudnn_kernels.epilogue.arithmetic import minimum
from cudnn_kernels.epilogue.quantize import LARGEST, SCALE_ROUNDING
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.combining import rounded
from cudnn_kernels.moe.configuration import BLOCK, FP8_DTYPE
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

WARPS = 8
VALUES = BLOCK // WARP_SIZE  # elements of a lane


class CheckQuantized(Kernel):
    """The kernel for one :class:`cudnn_kernels.moe.configuration.CheckQuantizedConfiguration`. A warp has one block."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        names = ("x", "quantized", "scales", "changed", "row")
        blocks = arguments["scales"].shape[0] * (self.c.columns // BLOCK)
        self.kernel(*(arguments[name] for name in names)).launch(
            grid=[cute.ceil_div(blocks, WARPS), 1, 1],
            block=[WARPS * WARP_SIZE, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, quantized: cute.Tensor, scales: cute.Tensor, changed: cute.Tensor, row: Int32
    ) -> None:
        thread, index = thread_block_idx()
        across = self.c.columns // BLOCK
        block = index * WARPS + thread // WARP_SIZE
        if block < scales.shape[0] * across:
            block_row, column = block // across, block % across
            position = (column * WARP_SIZE + thread % WARP_SIZE,)
            values = self.load(x[block_row * BLOCK + row, None], position)
            copies = self.load(quantized[block_row * BLOCK + row, None], position)
            if cute.arch.vote_ballot_sync(self.differ(values, copies, scales[block_row, column])) != 0:
                changed[0] = Int32(1)

    set_kernel_name(kernel, "cudnn_moe_check_quantized")

    def differ(self, values: list[Float32], copies: list[Float32], scale: Float32) -> Any:
        """Whether a value is not rounded to its copy. A copy that is NaN says nothing."""
        multiplier = minimum(SCALE_ROUNDING["float32"](scale)[1], LARGEST)
        multiplier = Float32(select_(scale == 0.0, Float32(LARGEST), multiplier))  # a block of zeros
        again = rounded([value * multiplier for value in values], DTYPES[FP8_DTYPE]).load().to(Float32)
        result = cutlass.Boolean(False)
        for i, copy in enumerate(copies):
            result = result | ((again[i] != copy) & (copy == copy))
        return result

    def load(self, row: cute.Tensor, position: tuple[Int32, ...]) -> list[Float32]:
        """A lane's elements of a row as float32."""
        vector = cute.make_rmem_tensor(VALUES, row.element_type)
        cute.autovec_copy(cute.local_tile(row, (VALUES,), position), vector)
        wide = vector.load().to(Float32)
        return [wide[i] for i in range(VALUES)]
