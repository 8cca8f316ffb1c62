"""The blocks of keys with the largest probabilities, for every row, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.sm90 import top_k
from cudnn_kernels.sm100.warp_products import ROWS, WarpProducts


class TopK(WarpProducts, top_k.TopK):
    """The kernel for one :class:`TopKConfiguration`."""

    def operands(self, sQ: cute.Tensor, sK: cute.Tensor, group: Int32, thread: Int32) -> Any:
        own = cute.local_tile(sQ, (ROWS, self.c.head), (group, 0))
        return self.left(own, thread), self.right(sK, thread)

    def multiply(self, acc: cute.Tensor, left: Any, right: Any, stage: Int32) -> None:
        self.multiply_shared(acc, left, right, self.tile_n, self.c.head, stage)
