"""TMA loads of A and B on Hopper, with multicast: each CTA loads a slice of a tile and writes it to all CTAs that need
it.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm import tile_operand
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.schedule.tile_maps import TileMap


class TileOperand(tile_operand.TileOperand):
    """An operand whose tile is the same for ``num_multicast`` CTAs of a cluster. Each loads one slice and multicasts
    it.

    ``multicast_dim``: 0 for the CTAs of a row of the cluster, which share tiles of A; 1 for those of a column, which
    share tiles of B. With ``split_tail_n``, tail tiles use the other dimension.
    """

    def __init__(self, c: GemmConfiguration, operand_index: int, tile_map: TileMap, multicast_dim: int) -> None:
        super().__init__(c, operand_index, tile_map)
        self.multicast_dim, self.num_multicast = multicast_dim, c.cluster[1 - multicast_dim]
        self.major = OperandMajorMode.K if self.operand.major == "k" else OperandMajorMode.MN

    def layout(self, stages: int, blocks: int = 0) -> Any:
        """The layout of the stages in shared memory; with ``blocks``, of that number of blocks."""
        order = LayoutEnum.ROW_MAJOR if self.operand.major == "k" else LayoutEnum.COL_MAJOR
        make = (sm90.make_smem_layout_a, sm90.make_smem_layout_b)[self.operand_index]
        m, n, k = self.c.tile
        return make(order, (m, blocks * GLU_BLOCK or n, k), self.element, stages)

    def tma_atom(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        multicast = self.num_multicast > 1
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast else cpasync.CopyBulkTensorTileG2SOp()
        layout = cute.slice_(self.layout(1, int(self.alternates)), (None, None, 0))
        shape = (self.rows, self.tile_k)
        return cpasync.make_tiled_tma_atom(
            op, tensor, layout, shape, num_multicast=self.num_multicast, internal_type=self.tma_dtype
        )

    def bits(self) -> int:
        return self.c.tile[self.operand_index] * self.tile_k * self.element.width

    def smem_offset(self, row: int, k: int) -> int:
        return cute.crd2idx((row, k, 0), self.layout(1).outer)

    def load(
        self,
        atom: Any,
        tile: cute.Tensor,
        smem: cute.Tensor,
        stage: Int32,
        full: Any,
        multicast: tuple[Int32, Int32],
        block: int,
    ) -> None:
        """Issues the TMA load of this CTA's slice of a tile, or block, to a stage of all CTAs that share it."""
        rank, mask = multicast
        smem = cute.local_tile(smem, (GLU_BLOCK, self.tile_k), (block, 0, None)) if self.alternates else smem
        target, source = cpasync.tma_partition(
            atom, rank, cute.make_layout(self.num_multicast), cute.group_modes(smem, 0, 2), cute.group_modes(tile, 0, 2)
        )
        mcast_mask = mask if self.num_multicast > 1 else None
        cute.copy(atom, source, target[None, stage], tma_bar_ptr=full, mcast_mask=mcast_mask)
