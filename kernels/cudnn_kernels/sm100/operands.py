"""A, B and their scale factors on their way from global to shared memory, tile by tile."""

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
from cudnn_kernels.pipeline.copy import clipped, everywhere, far
from cudnn_kernels.schedule.tiles import Extent, Work

ROWS = 128  # of a CTA's tile: lanes of tensor memory, and threads of the epilogue
ATOM = 512  # bytes of an atom of factors, which has 128 rows
COLUMN, ROW = 1, 2  # modes of a cluster's layout, along which CTAs lie that share a tile of B, or of A


@dataclass(frozen=True)
class Place:
    """A k tile of a tile: the first rows in A and in B, of the pair and of this CTA, and the first k."""

    work: Work
    start: tuple[Int32, Int32]
    mine: tuple[Int32, Int32]
    extent: Extent
    k: Int32


class TileOperand(tile_operand.TileOperand):
    """An operand, or its factors. ``mma`` says how the CTAs of a pair share it."""

    def __init__(self, c: GemmConfiguration, side: int, mma: cute.TiledMma, clips: bool) -> None:
        super().__init__(c, side, clips)
        self.mma = mma

    @abstractmethod
    def viewed(self, arguments: Any) -> cute.Tensor:
        """The argument as the tensor cores know it, or any at an address; ``arguments`` has the operands before it."""

    @abstractmethod
    def tiler(self) -> tuple[Any, ...]:
        """The tile (m, n, k), as modes of the view."""

    @abstractmethod
    def engine(self) -> Any:
        """The copy engine's operation."""

    @abstractmethod
    def tile(self, tensor: cute.Tensor, place: Place, last: Any) -> cute.Tensor:
        """A tile of the copy engine's view, of the last index ``last``."""

    def cluster(self) -> cute.Layout:
        """The CTAs of a cluster, by pair, row, column."""
        return cute.tiled_divide(cute.make_layout((*self.c.cluster, 1)), (self.mma.thr_id.shape,))

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[self.side]
        one, shape = cute.slice_(self.layout(1), (None, None, None, 0)), self.cluster().shape
        return make(self.engine(), tensor, one, self.tiler(), self.mma, shape, internal_type=self.kind)

    def place(self, row: int, k: int) -> int:
        layout = self.layout(1).outer
        depth = cute.size(layout, mode=[0, 1])
        return cute.crd2idx(((row, k % depth), 0, k // depth, 0), layout)

    def partition(
        self, atom: Any, tile: cute.Tensor, ring: cute.Tensor, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """This CTA's share of the ring and of a tile, and the CTAs of the cluster that get it."""
        cluster, along = self.cluster(), COLUMN if self.side else ROW
        place = cluster.get_flat_coord(rank)
        part = self.mma.get_slice(place[0])
        share = part.partition_B(tile) if self.side else part.partition_A(tile)
        target, source = cpasync.tma_partition(
            atom,
            place[along],
            cute.make_layout(cluster.shape[along]),
            cute.group_modes(ring, 0, 3),
            cute.group_modes(share, 0, 3),
        )
        return target, source, cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=along)


class Values(TileOperand):
    """Elements, of which a pair's CTAs have half of A's rows each, and half of B's."""

    def viewed(self, arguments: Any) -> cute.Tensor:
        return self.view(arguments[self.name])

    def tiler(self) -> tuple[Any, ...]:
        m, n, k = self.c.tile
        return (m, self.rows if self.side else n, k)

    def tile(self, tensor: cute.Tensor, place: Place, last: Any) -> cute.Tensor:
        return self.part(tensor, place.start[self.side], place.k, place.work.k_end, last)

    def layout(self, stages: int) -> Any:
        make = (sm100.make_smem_layout_a, sm100.make_smem_layout_b)[self.side]
        return make(self.mma, self.c.tile, self.element, stages)

    def engine(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_B)[self.side]
        return make(self.c.cluster, self.mma.thr_id)

    def bits(self) -> int:
        m, n, k = self.c.tile
        return (n // (m // ROWS) if self.side else ROWS) * k * self.element.width


class ScaleFactors(TileOperand):
    """Scale factors, in atoms of 128 x 4; the view repeats each of them ``vector`` times, with stride 0.

    The ring is that of the operation, the CTAs of ``mma`` are those that share: of B's factors, each CTA of a pair
    needs all of the tile's. Where experts have parts of k, the distance between rows of atoms differs from expert to
    expert: a copy has 128 rows then, so a tile has 128 columns, and the CTAs of a pair fetch their rows of A's factors
    on their own.
    """

    def __init__(
        self, c: GemmConfiguration, side: int, mma: cute.TiledMma, operation: cute.TiledMma, clips: bool
    ) -> None:
        assert c.tensor_core_scale is not None
        super().__init__(c, side, mma, clips)
        self.element, self.vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
        self.name, self.operation, self.kind = f"sf{self.name}", operation, cutlass.Int16
        self.atom = 4 * self.vector  # values along k whose factors are in an atom
        self.atoms = c.tile[2] // self.atom  # of a k tile and 128 rows

    def viewed(self, arguments: Any) -> cute.Tensor:
        tensor = arguments.get(self.name)
        if self.clips:  # of 128 rows, as by ``ending``: the last index is the number of the atom where a k tile ends
            assert tensor is not None
            steps, end = far(1)
            shape = (((32, 4), 1), ((self.vector, 4), end), (tensor.shape[0] // ATOM + 1, steps + 1))
            stride = (((16, 4), 0), ((0, 1), ATOM), (ATOM, (1 << 64) // steps - ATOM))
            return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        rows, k, batch = arguments["ab"[self.side]].shape
        shape = (cute.size(rows), k, batch)
        if tensor is None:
            layout = blockscaled.tile_atom_to_shape_SF((*shape[:2], 1), self.vector)
            viewed = everywhere(self.element, layout.shape[:2], layout.stride[:2], arguments[f"{self.name}_ptrs"])
        else:
            viewed = cute.make_tensor(tensor.iterator, blockscaled.tile_atom_to_shape_SF(shape, self.vector))
        if not (self.side and self.c.halves):
            return viewed
        (rows, atoms), (inner, apart) = viewed.shape[0], viewed.stride[0]  # atoms of both halves in turn
        shape = ((rows, (2, atoms // 2)), *viewed.shape[1:])
        stride = ((inner, (atoms // 2 * apart, apart)), *viewed.stride[1:])
        return cute.make_tensor(viewed.iterator, cute.make_layout(shape, stride=stride))

    def tiler(self) -> tuple[Any, ...]:
        return (ROWS if self.side or self.clips else self.c.tile[0], *self.c.tile[1:])

    def tile(self, tensor: cute.Tensor, place: Place, last: Any) -> cute.Tensor:
        extent, depth = self.c.tile[self.side], self.c.tile[2]
        if not self.clips:  # experts end where atoms do
            return cute.local_tile(tensor, (extent, depth), (place.start[self.side] // extent, place.k // depth, last))
        work, rows = place.work, (place.extent.m, place.extent.n)[self.side]
        before, mine = work.k // self.atom, (place.k - work.k) // self.atom
        count = (work.k_end - work.k + self.atom - 1) // self.atom
        first, (last, steps) = clipped(mine, count, self.atoms, 1)
        last = last + (rows + ROWS - 1) // ROWS * before + place.mine[self.side] // ROWS * count
        moved = cute.domain_offset((0, ((0, 0), first), 0), tensor)
        return cute.local_tile(moved, (ROWS, depth), (0, 0, (last, steps)))

    def layout(self, stages: int) -> Any:
        make = (blockscaled.make_smem_layout_sfa, blockscaled.make_smem_layout_sfb)[self.side]
        return make(self.operation, self.c.tile, self.vector, stages)

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        return smem.allocate_tensor(self.element, self.layout(stages), byte_alignment=1024)

    def partition(
        self, atom: Any, tile: cute.Tensor, ring: cute.Tensor, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        target, source, mask = super().partition(atom, tile, ring, rank)
        return cute.filter_zeros(target), cute.filter_zeros(source), mask  # repeated elements are copied once

    def engine(self) -> Any:
        make = (sm100.cluster_shape_to_tma_atom_A, sm100.cluster_shape_to_tma_atom_SFB)[self.side]
        return make(self.c.cluster, self.operation.thr_id)

    def bits(self) -> int:
        return (self.c.tile[1] if self.side else ROWS) * self.c.tile[2] // self.vector * 8


def tile_operands(
    c: GemmConfiguration, mma: cute.TiledMma, whole: cute.TiledMma, clips_k: bool = False
) -> list[TileOperand]:
    """All operands. ``mma`` is the operation, ``whole`` that of one CTA; ``clips_k``: k tiles end where experts do."""
    found: list[TileOperand] = [Values(c, side, mma, clips_k) for side in range(2)]
    if c.tensor_core_scale:
        found.append(ScaleFactors(c, 0, whole if clips_k else mma, mma, clips_k))
        found.append(ScaleFactors(c, 1, whole, mma, clips_k))
    return found
