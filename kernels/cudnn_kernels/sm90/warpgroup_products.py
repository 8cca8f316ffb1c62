"""Products of 64 rows by a warpgroup, on Hopper, with sums in registers.

Those of :mod:`cudnn_kernels.sm100.warp_products` have the same names.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.pipeline.wgmma import register_operand

ROWS = 64
DEPTH = 16  # of one instruction


class WarpgroupProducts:
    """To be a kernel's base; ``dtype`` is that of the operands."""

    dtype: Any

    def layout(self, rows: int, columns: int, stages: int = 1) -> Any:
        """A swizzled layout of rows of contiguous elements: (rows, columns, stages)."""
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, ROWS, columns), self.dtype, stages)

    def buffers(self, smem: Any, shapes: dict[str, tuple[int, int, int]]) -> dict[str, cute.Tensor]:
        """Operands in shared memory, by name: (rows, columns, stages)."""
        layouts = {x: self.layout(*shape) for x, shape in shapes.items()}
        return {
            x: smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for x, layout in layouts.items()
        }

    def product(self, columns: int, transposed: bool = False, registers: bool = False) -> cute.TiledMma:
        """The product. ``transposed``: columns of the right operand follow each other; ``registers`` have the left."""
        source = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
        major = OperandMajorMode.MN if transposed else OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (ROWS, columns, DEPTH), source, OperandMajorMode.K, major
        )  # fmt: skip
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def accumulator(self, columns: int) -> cute.Tensor:
        """A thread's sums."""
        return cute.make_rmem_tensor(self.product(columns).partition_shape_C((ROWS, columns)), Float32)

    def left(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """A left operand in shared memory, (rows, depth)."""
        mma = self.product(ROWS)
        return mma.make_fragment_A(mma.get_slice(thread).partition_A(tensor))

    def right(self, tensor: cute.Tensor, thread: Int32, transposed: bool = False) -> Any:
        """A right operand in shared memory, (columns, depth, stages); ``transposed``: columns follow each other."""
        mma = self.product(cute.size(tensor, mode=[0]), transposed)
        return mma.make_fragment_B(mma.get_slice(thread).partition_B(tensor))

    def multiply_shared(self, acc: cute.Tensor, left: Any, right: Any, columns: int, depth: int, stage: Any) -> None:
        """Issues acc = left right^T."""
        mma = self.product(columns)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in range(depth // DEPTH):
            cute.gemm(mma, acc, left[None, None, k], right[None, None, k, stage], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def add_product(
        self, acc: cute.Tensor, left: cute.Tensor, right: Any, columns: int, depth: int, stage: Any, adds: bool = True
    ) -> None:
        """Issues acc += left right^T, or =: ``left`` has rounded sums, (rows, depth), the right one is transposed."""
        mma = self.product(columns, True, True)
        operand = register_operand(mma, left, (ROWS, depth))
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, adds)
        for k in range(depth // DEPTH):
            cute.gemm(mma, acc, operand[None, None, k], right[None, None, k, stage], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def finish(self, more: int) -> None:
        """Waits for products but the last ones, so many."""
        warpgroup.wait_group(more)
