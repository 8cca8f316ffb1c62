"""Attention of each row to blocks of keys of its own choice, on Blackwell: as on Hopper, with products of warps.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.attention import sequences
from cudnn_kernels.sm90 import selection
from cudnn_kernels.sm100.warp_products import ROWS, WarpProducts


class Selection(WarpProducts, selection.Selection):
    """The kernel for one :class:`SelectionConfiguration`."""

    score_mma = product_mma = WarpProducts.mma

    def operands(self, buffers: Any, group: Int32, thread: Int32) -> Any:
        own = cute.local_tile(buffers["q"][None, None, 0], (ROWS, self.s.head), (group, 0))
        keys, values = self.right(buffers["k"], thread), self.right(sequences.turned(buffers["v"]), thread, True)
        return self.left(own, thread), keys, values

    def multiply_scores(self, scores: cute.Tensor, tSrQ: Any, tSrK: Any, stage: Int32) -> None:
        self.multiply_shared(scores, tSrQ, tSrK, self.tile_n, self.s.head, stage)

    def multiply_values(self, acc: cute.Tensor, words: cute.Tensor, tOrV: Any, stage: Int32) -> None:
        shape = cute.make_layout(self.mma().partition_shape_A((ROWS, self.tile_n)))
        weights = cute.make_tensor(cute.recast_ptr(words.iterator, dtype=self.dtype), shape)
        self.add_product(acc, weights, tOrV, self.s.head_v, stage)

    def finish(self) -> None:
        """A product of a warp is done when the next instruction runs."""
