"""TMA loads of A, B and their scale factors (SFA, SFB) on Blackwell."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.pipeline import tile_operand
from cudnn_kernels.pipeline.tma import address_space_view, ragged_coord, ragged_wrap
from cudnn_kernels.schedule.tile_maps import ProblemTiles, WorkTileInfo

ROWS = 128  # of a CTA's tile: lanes of tensor memory, and threads of the epilogue
ATOM = 512  # bytes of an atom of scale factors, which has 128 rows
COLUMN, ROW = 1, 2  # modes of a cluster's layout along which a tile of B, or of A, is multicast


@dataclass(frozen=True)
class KTileCoord:
    """A k tile of a work tile: the first rows of A and of B, for the pair and for this CTA, and the first k."""

    work: WorkTileInfo
    pair_origin: tuple[Int32, Int32]
    cta_origin: tuple[Int32, Int32]
    problem: ProblemTiles
    k: Int32


class TileOperand(tile_operand.TileOperand):
    """An operand or its scale factors. ``mma`` determines how the CTAs of a pair share it."""

    def __init__(self, c: GemmConfiguration, operand_index: int, mma: cute.TiledMma, ragged_k: bool) -> None:
        super().__init__(c, operand_index, ragged_k)
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
    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any) -> cute.Tensor:
        """A tile of the TMA coordinate tensor, at the batch coordinate ``batch``."""

    def cluster(self) -> cute.Layout:
        """The CTAs of a cluster, by pair, row, column."""
        return cute.tiled_divide(cute.make_layout((*self.c.cluster, 1)), (self.mma.thr_id.shape,))

    def tma_atom(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[self.operand_index]
        one, shape = cute.slice_(self.layout(1), (None, None, None, 0)), self.cluster().shape
        return make(self.tma_op(), tensor, one, self.tiler(), self.mma, shape, internal_type=self.tma_dtype)

    def smem_offset(self, row: int, k: int) -> int:
        layout = self.layout(1).outer
        depth = cute.size(layout, mode=[0, 1])
        return cute.crd2idx(((row, k % depth), 0, k // depth, 0), layout)

    def partition(
        self, atom: Any, tile: cute.Tensor, smem: cute.Tensor, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """This CTA's slice of the stages and of a tile for TMA, and the multicast mask."""
        cluster, along = self.cluster(), COLUMN if self.operand_index else ROW
        cta_coord = cluster.get_flat_coord(rank)
        thr_mma = self.mma.get_slice(cta_coord[0])
        cta_tile = thr_mma.partition_B(tile) if self.operand_index else thr_mma.partition_A(tile)
        target, source = cpasync.tma_partition(
            atom,
            cta_coord[along],
            cute.make_layout(cluster.shape[along]),
            cute.group_modes(smem, 0, 3),
            cute.group_modes(cta_tile, 0, 3),
        )
        return target, source, cpasync.create_tma_multicast_mask(cluster, cta_coord, mcast_mode=along)


class Values(TileOperand):
    """The elements of A or B; each CTA of a pair holds half of A's rows and half of B's."""

    def mma_view(self, arguments: Any) -> cute.Tensor:
        return self.view(arguments[self.name])

    def tiler(self) -> tuple[Any, ...]:
        m, n, k = self.c.tile
        return (m, self.rows if self.operand_index else n, k)

    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any) -> cute.Tensor:
        return self.tile_at(tensor, coord.pair_origin[self.operand_index], coord.k, coord.work.k_end, batch)

    def layout(self, stages: int) -> Any:
        make = (sm100.make_smem_layout_a, sm100.make_smem_layout_b)[self.operand_index]
        return make(self.mma, self.c.tile, self.element, stages)

    def tma_op(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_B)[self.operand_index]
        return make(self.c.cluster, self.mma.thr_id)

    def bits(self) -> int:
        m, n, k = self.c.tile
        return (n // (m // ROWS) if self.operand_index else ROWS) * k * self.element.width


class ScaleFactors(TileOperand):
    """Scale factors, in atoms of 128 x 4; the view broadcasts each of them ``vector`` times, with stride 0.

    The layout of the stages is that of ``operation``; ``mma`` determines the CTAs that share them: each CTA of a pair
    needs the SFB of the whole tile. With ragged k, the stride between rows of atoms differs from group to group: a box
    has 128 rows then, so a tile has 128 columns, and each CTA of a pair loads its rows of SFA separately.
    """

    def __init__(
        self, c: GemmConfiguration, operand_index: int, mma: cute.TiledMma, operation: cute.TiledMma, ragged_k: bool
    ) -> None:
        assert c.tensor_core_scale is not None
        super().__init__(c, operand_index, mma, ragged_k)
        self.element, self.vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
        self.name, self.operation, self.tma_dtype = f"sf{self.name}", operation, cutlass.Int16
        self.atom = 4 * self.vector  # elements along k whose scale factors are in one atom
        self.atoms = c.tile[2] // self.atom  # of a k tile, for 128 rows

    def mma_view(self, arguments: Any) -> cute.Tensor:
        tensor = arguments.get(self.name)
        if (
            self.ragged_k
        ):  # boxes of 128 rows, as in ``ragged_view``: the last coordinate is the atom where a k tile ends
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
        return (ROWS if self.operand_index or self.ragged_k else self.c.tile[0], *self.c.tile[1:])

    def tile(self, tensor: cute.Tensor, coord: KTileCoord, batch: Any) -> cute.Tensor:
        extent, depth = self.c.tile[self.operand_index], self.c.tile[2]
        if not self.ragged_k:  # groups end at atoms
            return cute.local_tile(
                tensor, (extent, depth), (coord.pair_origin[self.operand_index] // extent, coord.k // depth, batch)
            )
        work, rows = coord.work, (coord.problem.m, coord.problem.n)[self.operand_index]
        before, atom = work.k // self.atom, (coord.k - work.k) // self.atom  # atoms before the group, and in it
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
        self, atom: Any, tile: cute.Tensor, smem: cute.Tensor, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        target, source, mask = super().partition(atom, tile, smem, rank)
        return cute.filter_zeros(target), cute.filter_zeros(source), mask  # broadcast elements are loaded once

    def tma_op(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_SFB)[self.operand_index]
        return make(self.c.cluster, self.operation.thr_id)

    def bits(self) -> int:
        return (self.c.tile[1] if self.operand_index else ROWS) * self.c.tile[2] // self.vector * 8


def tile_operands(
    c: GemmConfiguration, mma: cute.TiledMma, cta_mma: cute.TiledMma, ragged_k: bool = False
) -> list[TileOperand]:
    """A, B and, for block-scaled MMAs, SFA and SFB. ``mma`` is the MMA, ``cta_mma`` that of a single CTA."""
    operands: list[TileOperand] = [Values(c, i, mma, ragged_k) for i in range(2)]
    if c.tensor_core_scale:
        operands.append(ScaleFactors(c, 0, cta_mma if ragged_k else mma, mma, ragged_k))
        operands.append(ScaleFactors(c, 1, cta_mma, mma, ragged_k))
    return operands
