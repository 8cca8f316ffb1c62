"""mma.sync GEMMs with M = 64: four warps with 16 rows each, accumulators in registers.

Accumulator and operand fragments have the register order of Hopper's wgmma, and the methods the names of
:mod:`cudnn_kernels.sm90.wgmma_utils`, so that kernels for Hopper run on Blackwell with this mixin as a base. tcgen05
would be faster; these kernels wait for K and V most of the time.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

MMA_M = 64
MMA_K = 16  # k of one instruction


class MmaSyncMixin:
    """First base of a kernel; ``dtype`` is that of the operands."""

    dtype: Any

    def tiled_mma(self) -> cute.TiledMma:
        """mma.sync.m16n8k16, tiled to 64 rows."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, MMA_K))
        return cute.make_tiled_mma(op, (4, 1, 1), permutation_mnk=(MMA_M, 16, MMA_K))

    def accumulator(self, columns: int) -> cute.Tensor:
        """A thread's accumulator of 64 x ``columns``, float32."""
        return cute.make_rmem_tensor(self.tiled_mma().partition_shape_C((MMA_M, columns)), Float32)

    def operand_a(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """The A operand in shared memory, (rows, k)."""
        return self.smem_operand(cute.make_tiled_copy_A, tensor, thread, False)

    def operand_b(self, tensor: cute.Tensor, thread: Int32, transposed: bool = False) -> Any:
        """The B operand in shared memory, (columns, k, stages); ``transposed``: MN-major."""
        return self.smem_operand(cute.make_tiled_copy_B, tensor, thread, transposed)

    def smem_operand(self, make_tiled_copy: Any, tensor: cute.Tensor, thread: Int32, transposed: bool) -> Any:
        copy = make_tiled_copy(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), self.dtype), self.tiled_mma())
        thr_copy = copy.get_slice(thread)
        return copy, thr_copy, thr_copy.partition_S(tensor)

    def load_fragment(self, source: Any, shape: Any, coord: tuple[Any, ...]) -> cute.Tensor:
        """Loads a k-block's fragment with ldmatrix."""
        copy, thr_copy, tensor = source
        fragment = cute.make_rmem_tensor(shape, self.dtype)
        cute.copy(copy, tensor[(None, None, *coord)], thr_copy.retile(fragment)[None, None, 0])
        return fragment[None, None, 0]

    def mma_ss(
        self, acc: cute.Tensor, a_operand: Any, b_operand: Any, columns: int, k_extent: int, stage: Int32
    ) -> None:
        """acc = A B^T, both from shared memory."""
        mma = self.tiled_mma()
        shapes = mma.partition_shape_A((MMA_M, MMA_K)), mma.partition_shape_B((columns, MMA_K))
        acc.fill(0.0)
        for k in range(k_extent // MMA_K):
            a, b = self.load_fragment(a_operand, shapes[0], (k,)), self.load_fragment(b_operand, shapes[1], (k, stage))
            cute.gemm(mma, acc, a, b, acc)

    def mma_rs(
        self,
        acc: cute.Tensor,
        a_operand: cute.Tensor,
        b_operand: Any,
        columns: int,
        k_extent: int,
        stage: Any,
        accumulate: bool = True,
    ) -> None:
        """acc += A B^T, or = without ``accumulate``: A is a converted accumulator, (rows, k), B is MN-major."""
        mma = self.tiled_mma()
        if not accumulate:
            acc.fill(0.0)
        shape = mma.partition_shape_B((columns, MMA_K))
        operand = cute.make_tensor(a_operand.iterator, cute.make_layout(mma.partition_shape_A((MMA_M, k_extent))))
        for k in range(k_extent // MMA_K):
            cute.gemm(mma, acc, operand[None, None, k], self.load_fragment(b_operand, shape, (k, stage)), acc)

    def wait_mma(self, in_flight: int) -> None:
        """mma.sync is synchronous: nothing to wait for."""
