"""wgmma GEMMs with M = 64, one warpgroup, accumulators in registers.

:mod:`cudnn_kernels.attention.mma_sync_utils` has the same methods for mma.sync.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import seqlen_info
from cudnn_kernels.pipeline.wgmma import MN, K, WarpgroupMma, register_operand

WGMMA_M = 64


class WgmmaMixin:
    """A base of kernels; ``dtype`` is that of the operands, ``head_dims`` are the head dimensions by tensor name."""

    dtype: Any
    head_dims: Mapping[str, int]

    def smem_layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        """The swizzled layout of a row-major (K-major) operand: (rows, columns, stages)."""
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, WGMMA_M, columns), dtype or self.dtype, stages)

    def allocate_smem(
        self, smem: Any, shapes: dict[str, tuple[int, int, int]], dtype: Any = None
    ) -> dict[str, cute.Tensor]:
        """Allocates operands in shared memory, by name: (rows, columns, stages)."""
        layouts = {x: self.smem_layout(*shape, dtype=dtype) for x, shape in shapes.items()}
        return {
            x: smem.allocate_tensor(dtype or self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for x, layout in layouts.items()
        }

    def make_tma_atoms(self, args: Mapping[str, Any], head_box: int, kv_box: int) -> dict[str, Any]:
        """TMA atoms and coordinate tensors of varlen tensors: a box is ``head_box`` heads of a row of Q (or dO), or
        ``kv_box`` keys.
        """
        tma_atoms = {}
        for x, width in self.head_dims.items():
            if x in ("k", "v"):
                view, rows = seqlen_info.ragged_tma_view(args[x], True), kv_box
            else:
                view, rows = cute.make_tensor(args[x].iterator, cute.select(args[x].layout, mode=[1, 2, 0])), head_box
            layout = cute.slice_(self.smem_layout(max(rows, WGMMA_M), width), (None, None, 0))
            box = cute.composition(layout, (rows, width))
            tma_atoms[x] = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, (rows, width))
        return tma_atoms

    def wgmma(self, columns: int, transposed: bool = False, registers: bool = False) -> WarpgroupMma:
        """The GEMM. ``transposed``: B is MN-major. ``registers``: A is a register operand (RS)."""
        return WarpgroupMma(self.dtype, columns, b=MN if transposed else K, registers=registers)

    def accumulator(self, columns: int) -> cute.Tensor:
        """A thread's accumulator of 64 x ``columns``, float32."""
        return self.wgmma(columns).accumulator()

    def operand_a(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """The descriptor of the A operand in shared memory, (rows, k)."""
        return self.wgmma(WGMMA_M).fragment_a(tensor, thread)

    def operand_b(self, tensor: cute.Tensor, thread: Int32, transposed: bool = False) -> Any:
        """The descriptor of the B operand in shared memory, (columns, k, stages); ``transposed``: MN-major."""
        return self.wgmma(cute.size(tensor, mode=[0]), transposed).fragment_b(tensor, thread)

    def mma_ss(self, acc: cute.Tensor, a_operand: Any, b_operand: Any, columns: int, k_extent: int, stage: Any) -> None:
        """Issues acc = A B^T, both from shared memory."""
        self.wgmma(columns).issue(acc, a_operand, b_operand[None, None, None, stage], False)

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
        """Issues acc += A B^T, or = without ``accumulate``: A is a converted accumulator, (rows, k).

        B is MN-major, unless it has 8 bits, which wgmma takes K-major only.
        """
        mma = self.wgmma(columns, self.dtype.width == 16, True)
        mma.issue(
            acc,
            register_operand(mma.mma(), a_operand, (WGMMA_M, k_extent)),
            b_operand[None, None, None, stage],
            accumulate,
        )

    def wait_mma(self, in_flight: int) -> None:
        """wgmma.wait_group: waits until at most ``in_flight`` GEMMs are pending."""
        warpgroup.wait_group(in_flight)
