"""A and B on Hopper, on their way from global to shared memory, tile by tile."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.pipeline import tile_operand


class TileOperand(tile_operand.TileOperand):
    """An operand of which the CTAs of a cluster's row, or column, fetch a part of each tile and send it to all.

    ``alike``: the side that all these CTAs have in common, so 0 in a row.
    """

    def __init__(self, c: GemmConfiguration, side: int, clips: bool, alike: int) -> None:
        super().__init__(c, side, clips)
        self.alike, self.share = alike, c.cluster[1 - alike]
        self.major = OperandMajorMode.K if self.operand.major == "k" else OperandMajorMode.MN

    def layout(self, stages: int) -> Any:
        order = LayoutEnum.ROW_MAJOR if self.operand.major == "k" else LayoutEnum.COL_MAJOR
        make = (sm90.make_smem_layout_a, sm90.make_smem_layout_b)[self.side]
        return make(order, self.c.tile, self.element, stages)

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        op = cpasync.CopyBulkTensorTileG2SOp() if self.share == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout, shape = cute.slice_(self.layout(1), (None, None, 0)), (self.rows, self.depth)
        return cpasync.make_tiled_tma_atom(op, tensor, layout, shape, num_multicast=self.share, internal_type=self.kind)

    def bits(self) -> int:
        return self.c.tile[self.side] * self.depth * self.element.width

    def place(self, row: int, k: int) -> int:
        return cute.crd2idx((row, k, 0), self.layout(1).outer)

    def fetch(
        self, atom: Any, tile: cute.Tensor, ring: cute.Tensor, stage: Int32, full: Any, sharers: tuple[Int32, Int32]
    ) -> None:
        """Starts the copy of this CTA's part of a tile to all that share it, into a buffer."""
        number, mask = sharers
        target, source = cpasync.tma_partition(
            atom, number, cute.make_layout(self.share), cute.group_modes(ring, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, source, target[None, stage], tma_bar_ptr=full, mcast_mask=mask if self.share > 1 else None)
