"""Products of 64 rows by a warpgroup, on Hopper, with sums in registers.

Those of :mod:`cudnn_kernels.attention.warp_products` have the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import sequences
from cudnn_kernels.pipeline.wgmma import MN, K, Product, register_operand

ROWS = 64


class WarpgroupProducts:
    """To be a kernel's base; ``dtype`` is that of the operands, ``widths`` are elements of heads, by their names."""

    dtype: Any
    widths: Mapping[str, int]

    def layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        """A swizzled layout of rows of contiguous elements: (rows, columns, stages)."""
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (rows, ROWS, columns), dtype or self.dtype, stages)

    def buffers(self, smem: Any, shapes: dict[str, tuple[int, int, int]], dtype: Any = None) -> dict[str, cute.Tensor]:
        """Operands in shared memory, by name: (rows, columns, stages)."""
        layouts = {x: self.layout(*shape, dtype=dtype) for x, shape in shapes.items()}
        return {
            x: smem.allocate_tensor(dtype or self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for x, layout in layouts.items()
        }

    def atoms(self, given: Mapping[str, Any], heads: int, keys: int) -> dict[str, Any]:
        """How the copy engine fetches boxes of packed tensors, atoms and views: of those like Q, some heads of a row,
        and of K and V, some keys.
        """
        found = {}
        for x, width in self.widths.items():
            if x in ("k", "v"):
                view, rows = sequences.copied(given[x], True), keys
            else:
                view, rows = cute.make_tensor(given[x].iterator, cute.select(given[x].layout, mode=[1, 2, 0])), heads
            layout = cute.slice_(self.layout(max(rows, ROWS), width), (None, None, 0))
            box = cute.composition(layout, (rows, width))
            found[x] = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), view, box, (rows, width))
        return found

    def product(self, columns: int, transposed: bool = False, registers: bool = False) -> Product:
        """The product. ``transposed``: columns of the right operand follow each other; ``registers`` have the left."""
        return Product(self.dtype, columns, b=MN if transposed else K, registers=registers)

    def accumulator(self, columns: int) -> cute.Tensor:
        """A thread's sums."""
        return self.product(columns).accumulator()

    def left(self, tensor: cute.Tensor, thread: Int32) -> Any:
        """A left operand in shared memory, (rows, depth)."""
        return self.product(ROWS).left(tensor, thread)

    def right(self, tensor: cute.Tensor, thread: Int32, transposed: bool = False) -> Any:
        """A right operand in shared memory, (columns, depth, stages); ``transposed``: columns follow each other."""
        return self.product(cute.size(tensor, mode=[0]), transposed).right(tensor, thread)

    def multiply_shared(self, acc: cute.Tensor, left: Any, right: Any, columns: int, depth: int, stage: Any) -> None:
        """Issues acc = left right^T."""
        self.product(columns).issue(acc, left, right[None, None, None, stage], False)

    def add_product(
        self, acc: cute.Tensor, left: cute.Tensor, right: Any, columns: int, depth: int, stage: Any, adds: bool = True
    ) -> None:
        """Issues acc += left right^T, or =: ``left`` has rounded sums, (rows, depth).

        The right one is transposed, unless it has 8 bits, which no instruction takes so.
        """
        product = self.product(columns, self.dtype.width == 16, True)
        product.issue(acc, register_operand(product.mma(), left, (ROWS, depth)), right[None, None, None, stage], adds)

    def finish(self, more: int) -> None:
        """Waits for products but the last ones, so many."""
        warpgroup.wait_group(more)
