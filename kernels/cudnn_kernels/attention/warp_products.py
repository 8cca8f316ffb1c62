"""Products of 64 rows by four warps, each with its 16, on Blackwell: what kernels use that keep sums in registers.

Registers of an accumulator, and of an operand that was one, are in the same order as those of Hopper's warpgroup
products, and so are the names here as those of :mod:`cudnn_kernels.sm90.warpgroup_products`: kernels are the same but
for this base. Tensor memory would make them faster; these kernels wait for K and V most of the time.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp

ROWS = 64
DEPTH = 16  # of one instruction


class WarpProducts:
    """To be a kernel's first base; ``dtype`` is that of the operands."""

    dtype: Any

    def mma(self) -> cute.TiledMma:
        """The product."""
        op = warp.MmaF16BF16Op(self.dtype, Float32, (16, 8, DEPTH))
        return cute.make_tiled_mma(op, (4, 1, 1), permutation_mnk=(ROWS, 16, DEPTH))

    def accumulator(self, columns: int) -> cute.Tensor:
        """A thread's sums."""
        return cute.make_rmem_tensor(self.mma().partition_shape_C((ROWS, columns)), Float32)

    def left(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """A left operand in shared memory, (rows, depth)."""
        return self._source(cute.make_tiled_copy_A, tensor, thread, False)

    def right(self, tensor: cute.Tensor, thread: Int32, transposed: bool = False) -> Any:
        """A right operand in shared memory, (columns, depth, stages); ``transposed``: columns follow each other."""
        return self._source(cute.make_tiled_copy_B, tensor, thread, transposed)

    def _source(self, make: Any, tensor: cute.Tensor, thread: Int32, transposed: bool) -> Any:
        copy = make(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), self.dtype), self.mma())
        own = copy.get_slice(thread)
        return copy, own, own.partition_S(tensor)

    def fetched(self, source: Any, shape: Any, place: tuple[Any, ...]) -> cute.Tensor:
        """A step's operand in registers."""
        copy, own, tensor = source
        found = cute.make_rmem_tensor(shape, self.dtype)
        cute.copy(copy, tensor[(None, None, *place)], own.retile(found)[None, None, 0])
        return found[None, None, 0]

    def multiply_shared(self, acc: cute.Tensor, left: Any, right: Any, columns: int, depth: int, stage: Int32) -> None:
        """acc = left right^T."""
        mma = self.mma()
        shapes = mma.partition_shape_A((ROWS, DEPTH)), mma.partition_shape_B((columns, DEPTH))
        acc.fill(0.0)
        for k in range(depth // DEPTH):
            a, b = self.fetched(left, shapes[0], (k,)), self.fetched(right, shapes[1], (k, stage))
            cute.gemm(mma, acc, a, b, acc)

    def add_product(
        self, acc: cute.Tensor, left: cute.Tensor, right: Any, columns: int, depth: int, stage: Any, adds: bool = True
    ) -> None:
        """acc += left right^T, or =: ``left`` has rounded sums, (rows, depth), the right one is transposed."""
        mma = self.mma()
        if not adds:
            acc.fill(0.0)
        shape = mma.partition_shape_B((columns, DEPTH))
        operand = cute.make_tensor(left.iterator, cute.make_layout(mma.partition_shape_A((ROWS, depth))))
        for k in range(depth // DEPTH):
            cute.gemm(mma, acc, operand[None, None, k], self.fetched(right, shape, (k, stage)), acc)

    def finish(self, more: int) -> None:
        """A product of a warp is done when the next instruction runs."""
