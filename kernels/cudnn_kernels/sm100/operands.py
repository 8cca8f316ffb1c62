"""TMA loads of A, B and their scale factors (SFA, SFB) on Blackwell, for one CTA or a pair, with multicast."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm import tile_operand
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.pipeline.tma import address_space_view, ragged_coord, ragged_wrap
from cudnn_kernels.schedule.tile_maps import ProblemTiles, TileMap, WorkTileInfo

ROWS = 128  # rows of a CTA's tile: lanes of tensor memory, and threads of the epilogue
ATOM = 512  # bytes of an atom: 128 rows x 4 scale factors of one byte
MULTICAST_B, MULTICAST_A = 1, 2  # modes of a cluster's layout (V, M, N, K) along which tiles of B, or of A, are shared


@dataclass(frozen=True)
class KTileCoord:
    """A k tile of a work tile: its first k, and the first rows of A and of B, for the pair of CTAs and for this CTA."""

    work: WorkTileInfo
    pair_origin: tuple[Int32, Int32]
    cta_origin: tuple[Int32, Int32]
    problem: ProblemTiles
    k: Int32


class TileOperand(tile_operand.TileOperand):
    """An operand or its scale factors. The CTA group of ``mma`` determines which slice each CTA of a pair loads."""

    def __init__(self, c: GemmConfiguration, operand_index: int, mma: cute.TiledMma, tile_map: TileMap) -> None:
        super().__init__(c, operand_index, tile_map)
        self.mma = mma

    @abstractmethod
    def mma_view(self, arguments: Any) -> cute.Tensor:
        """The argument in the layout of the MMA, or a ptr-array; ``arguments`` has the views of earlier operands."""

    @abstractmethod
    def tiler(self) -> tuple[Any, ...]:
        """The tile (m, n, k), as modes of the view."""

    @abstractmethod
    def tma_op(self) -> Any:
        """The TMA operation."""

    @abstractmethod
    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any, block: int) -> cute.Tensor:
        """A tile of the TMA coordinate tensor, or one of its blocks, at the batch coordinate ``batch``."""

    def cluster(self) -> cute.Layout:
        """The layout (V, M, N, K) of a cluster's CTAs; V is the index in the pair."""
        return cute.tiled_divide(cute.make_layout((*self.c.cluster, 1)), (self.mma.thr_id.shape,))

    def tma_atom(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[self.operand_index]
        one_stage, shape = cute.slice_(self.layout(1), (None, None, None, 0)), self.cluster().shape
        return make(self.tma_op(), tensor, one_stage, self.tiler(), self.mma, shape, internal_type=self.tma_dtype)

    def smem_offset(self, row: int, k: int) -> int:
        layout = self.layout(1).outer
        depth = cute.size(layout, mode=[0, 1])
        return cute.crd2idx(((row, k % depth), 0, k // depth, 0), layout)

    def partition(
        self, atom: Any, tile: cute.Tensor, smem: cute.Tensor, rank: Int32, block: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """This CTA's slice of the stages and of a tile, or of a block of it, for TMA, and the multicast mask."""
        cluster, multicast_mode = self.cluster(), MULTICAST_B if self.operand_index else MULTICAST_A
        cta_coord = cluster.get_flat_coord(rank)
        stages, cta_tile = self.cta_slices(tile, smem, cta_coord[0], block)
        target, source = cpasync.tma_partition(
            atom, cta_coord[multicast_mode], cute.make_layout(cluster.shape[multicast_mode]), stages, cta_tile
        )
        return target, source, cpasync.create_tma_multicast_mask(cluster, cta_coord, mcast_mode=multicast_mode)

    def cta_slices(self, tile: cute.Tensor, smem: cute.Tensor, cta: Int32, block: int) -> tuple[Any, Any]:
        """The stages, and the part of a tile that CTA ``cta`` of a pair holds, each with one mode for a load."""
        thr_mma = self.mma.get_slice(cta)
        cta_tile = thr_mma.partition_B(tile) if self.operand_index else thr_mma.partition_A(tile)
        return cute.group_modes(smem, 0, 3), cute.group_modes(cta_tile, 0, 3)


class Values(TileOperand):
    """The elements of A or B; each CTA of a pair holds half of A's rows and half of B's."""

    def mma_view(self, arguments: Any) -> cute.Tensor:
        return self.view(arguments[self.name])

    def tiler(self) -> tuple[Any, ...]:
        m, n, k = self.c.tile
        return (m, self.rows if self.operand_index else n, k)

    @property
    def cta_rows(self) -> int:
        m, n, _ = self.c.tile
        return n // (m // ROWS) if self.operand_index else ROWS

    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any, block: int) -> cute.Tensor:
        return self.tile_at(tensor, coord.pair_origin[self.operand_index], coord.k, coord.work.k_end, batch)

    def layout(self, stages: int) -> Any:
        make = (sm100.make_smem_layout_a, sm100.make_smem_layout_b)[self.operand_index]
        return make(self.mma, self.c.tile, self.element, stages)

    def tma_op(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_B)[self.operand_index]
        return make(self.c.cluster, self.mma.thr_id)

    def bits(self) -> int:
        return self.cta_rows * self.c.tile[2] * self.element.width


class GateAndUp(Values):
    """B of gate and up weights at separate addresses, K-major: each CTA loads its rows in blocks of 32."""

    def block_layout(self, blocks: int, stages: int) -> Any:
        """The layout of stages of ``blocks`` blocks in shared memory: that of the MMA, as (rows, k, stages)."""
        shape = (blocks * GLU_BLOCK, self.tile_k)
        return sm100.make_smem_layout(OperandMajorMode.K, shape, self.element, stages)

    def tma_atom(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        layout = cute.slice_(self.block_layout(1, 1), (None, None, 0))
        return cpasync.make_tiled_tma_atom(
            self.tma_op(), tensor, layout, (GLU_BLOCK, self.tile_k), num_multicast=self.cluster().shape[MULTICAST_B]
        )

    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any, block: int) -> cute.Tensor:
        bm, _, _ = cute.arch.block_idx()
        row = coord.pair_origin[1] + bm % (self.c.tile[0] // ROWS) * self.cta_rows
        return self.tile_at(tensor, row, coord.k, coord.work.k_end, batch, block)

    def cta_slices(self, tile: cute.Tensor, smem: cute.Tensor, cta: Int32, block: int) -> tuple[Any, Any]:
        stages = cute.size(smem, mode=[3])
        rows = cute.make_tensor(smem.iterator, self.block_layout(self.blocks, stages).outer)
        target = cute.local_tile(rows, (GLU_BLOCK, self.tile_k), (block, 0, None))
        return cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)


class ScaleFactors(TileOperand):
    """SFA or SFB, in atoms of 128 x 4. The view has one element for each element of the operand: ``vector`` elements
    along k have the same scale factor, by stride 0.

    ``operation``, the MMA of the pair, determines the layout of the stages. ``mma`` determines what each CTA loads: for
    SFB it is the MMA of one CTA, since each CTA of a pair needs the SFB of the whole tile. With ragged k, the stride
    between rows of atoms differs from group to group. A TMA box then has 128 rows: a tile has 128 columns, and each CTA
    of a pair loads the SFA of its rows.
    """

    def __init__(
        self, c: GemmConfiguration, operand_index: int, mma: cute.TiledMma, operation: cute.TiledMma, tile_map: TileMap
    ) -> None:
        assert c.tensor_core_scale is not None
        super().__init__(c, operand_index, mma, tile_map)
        self.element, self.vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
        self.name, self.operation, self.tma_dtype = f"sf{self.name}", operation, cutlass.Int16
        self.atom = 4 * self.vector  # elements along k whose scale factors are in one atom
        self.atoms = c.tile[2] // self.atom  # atoms of a k tile, for 128 rows

    def mma_view(self, arguments: Any) -> cute.Tensor:
        tensor = arguments.get(self.name)
        # A ragged view, as in ``ragged_view``: the last coordinate is the atom where a k tile ends.
        if self.tile_map.ragged_k:
            assert tensor is not None
            steps, end = ragged_wrap(1)
            shape = (((32, 4), 1), ((self.vector, 4), end), (tensor.shape[0] // ATOM + 1, steps + 1))
            stride = (((16, 4), 0), ((0, 1), ATOM), (ATOM, (1 << 64) // steps - ATOM))
            return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        rows, k, batch = arguments["ab"[self.operand_index]].shape
        shape = (cute.size(rows), k, batch)
        if tensor is None:
            layout = blockscaled.tile_atom_to_shape_SF((*shape[:2], 1), self.vector)
            view = address_space_view(self.element, layout.shape[:2], layout.stride[:2], arguments[f"{self.name}_ptrs"])
        else:
            view = cute.make_tensor(tensor.iterator, blockscaled.tile_atom_to_shape_SF(shape, self.vector))
        if not (self.operand_index and self.c.concat_glu):
            return view
        (rows, atoms), (inner, atom_stride) = view.shape[0], view.stride[0]  # atoms of both halves alternate
        shape = ((rows, (2, atoms // 2)), *view.shape[1:])
        stride = ((inner, (atoms // 2 * atom_stride, atom_stride)), *view.stride[1:])
        return cute.make_tensor(view.iterator, cute.make_layout(shape, stride=stride))

    def tiler(self) -> tuple[Any, ...]:
        return (ROWS if self.operand_index or self.tile_map.ragged_k else self.c.tile[0], *self.c.tile[1:])

    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any, block: int) -> cute.Tensor:
        extent, depth = self.c.tile[self.operand_index], self.c.tile[2]
        if not self.tile_map.ragged_k:  # groups end at atoms
            return cute.local_tile(
                tensor, (extent, depth), (coord.pair_origin[self.operand_index] // extent, coord.k // depth, batch)
            )
        work, rows = coord.work, (coord.problem.m, coord.problem.n)[self.operand_index]
        # Along k: the atoms before the group, the atom of the k tile in the group, the atoms of the group.
        before, atom = work.k // self.atom, (coord.k - work.k) // self.atom
        count = (work.k_end - work.k + self.atom - 1) // self.atom
        first, (end, steps) = ragged_coord(atom, count, self.atoms, 1)
        end = end + (rows + ROWS - 1) // ROWS * before + coord.cta_origin[self.operand_index] // ROWS * count
        shifted = cute.domain_offset((0, ((0, 0), first), 0), tensor)
        return cute.local_tile(shifted, (ROWS, depth), (0, 0, (end, steps)))

    def layout(self, stages: int) -> Any:
        make = (blockscaled.make_smem_layout_sfa, blockscaled.make_smem_layout_sfb)[self.operand_index]
        return make(self.operation, self.c.tile, self.vector, stages)

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        return smem.allocate_tensor(self.element, self.layout(stages), byte_alignment=1024)

    def partition(
        self, atom: Any, tile: cute.Tensor, smem: cute.Tensor, rank: Int32, block: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        target, source, mask = super().partition(atom, tile, smem, rank, block)
        return cute.filter_zeros(target), cute.filter_zeros(source), mask  # broadcast elements are loaded once

    def tma_op(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_SFB)[self.operand_index]
        return make(self.c.cluster, self.operation.thr_id)

    def bits(self) -> int:
        return (self.c.tile[1] if self.operand_index else ROWS) * self.c.tile[2] // self.vector * 8


def tile_operands(
    c: GemmConfiguration, mma: cute.TiledMma, cta_mma: cute.TiledMma, tile_map: TileMap
) -> list[TileOperand]:
    """A, B and, for block-scaled MMAs, SFA and SFB. ``mma`` is the MMA of the pair, ``cta_mma`` that of one CTA."""
    b = GateAndUp if c.concat_glu and c.b.halves else Values
    operands: list[TileOperand] = [Values(c, 0, mma, tile_map), b(c, 1, mma, tile_map)]
    if c.tensor_core_scale:
        operands.append(ScaleFactors(c, 0, cta_mma if tile_map.ragged_k else mma, mma, tile_map))
        operands.append(ScaleFactors(c, 1, cta_mma, mma, tile_map))
    return operands
