"""End offsets of experts' rows from token counts, and zeros in the padding rows behind the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.moe.configuration import WARPS, RowOffsetsConfiguration
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

MOST_BLOCKS = 512
ROWS_PER_BLOCK = 64


class RowOffsets(Kernel):
    """The kernel for one ``RowOffsetsConfiguration``. Each warp scans the counts; the first one stores the offsets."""

    def __init__(self, configuration: RowOffsetsConfiguration) -> None:
        super().__init__(configuration)
        self.dtype = DTYPES[configuration.dtype]

    def launch(self, arguments: Mapping[str, Any]) -> None:
        rows = arguments["rows"]
        blocks = cutlass.min(cute.ceil_div(rows.shape[0], ROWS_PER_BLOCK), MOST_BLOCKS)
        self.kernel(arguments.get("counts"), arguments["offsets"], rows).launch(
            grid=[cutlass.max(blocks, 1), 1, 1], block=[WARPS * WARP_SIZE, 1, 1], stream=arguments["stream"]
        )

    @cute.kernel
    def kernel(self, counts: Any, offsets: cute.Tensor, rows: cute.Tensor) -> None:
        thread, block = thread_block_idx()
        lane, warp = thread % WARP_SIZE, cute.arch.make_warp_uniform(thread // WARP_SIZE)
        if const_expr(self.c.count_dtype):
            end = self.scan(counts, offsets, rows.shape[0], lane, (block == 0) & (warp == 0))
        else:
            end = offsets[self.c.experts - 1]
        blocks, _, _ = cute.arch.grid_dim()
        for row in cutlass.range(end + block * WARPS + warp, rows.shape[0], blocks * WARPS, unroll=1):
            self.clear(rows[row, None], lane)

    set_kernel_name(kernel, "cudnn_moe_row_offsets")

    @cute.jit
    def scan(self, counts: cute.Tensor, offsets: cute.Tensor, most: Int32, lane: Int32, stores: Any) -> Int32:
        """The inclusive scan of the counts, saturating at ``most`` + 1; traps if a count or the total is out of range.

        Returns:
            The total.
        """
        end, is_valid = Int32(0), Int32(1)
        for j in cutlass.range_constexpr(-(-self.c.experts // WARP_SIZE)):
            expert, count = lane + j * WARP_SIZE, Int32(0)
            if expert < self.c.experts:
                wide = counts[expert]
                if (wide < 0) | (wide > most):
                    is_valid = Int32(0)
                else:
                    count = Int32(wide)
            for i in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(count, 1 << i, mask_and_clamp=0)
                if lane >= 1 << i:
                    count = cutlass.min(count + other, most + 1)
            count = cutlass.min(count + end, most + 1)
            if stores & (expert < self.c.experts):
                offsets[expert] = cutlass.min(count, most)
            end = cute.arch.shuffle_sync(count, WARP_SIZE - 1)
        if cute.arch.vote_ballot_sync((is_valid == 0) | (end > most)) != 0:
            cute.arch.inline_ptx("trap;")
        return end

    @cute.jit
    def clear(self, row: cute.Tensor, lane: Int32) -> None:
        """A warp stores zeros to a row, 16 bytes per lane at a time."""
        c = self.c
        zeros = cute.make_rmem_tensor(c.vector, self.dtype)
        zeros.fill(self.dtype(0.0))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.dtype, num_bits_per_copy=128)
        for column in cutlass.range(lane, c.hidden // c.vector, WARP_SIZE, unroll=1):
            cute.copy(atom, zeros, cute.local_tile(row, (c.vector,), (column,)))
