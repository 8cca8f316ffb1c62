"""A, B and their scale factors on their way from global to shared memory, tile by tile."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, TFloat32, Uint8
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.pipeline.copy import clipped, ending, everywhere, far, granule, matrices, woven, woven_rows
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


class TileOperand(ABC):
    """One argument of the kernel that the copy engine brings to shared memory.

    ``mma`` says how the CTAs of a pair share it, ``shared_along`` which CTAs of a cluster need the same tile: those of
    a row, or of a column.
    """

    name: str
    shared_along: int
    compact = False  # whether the tensor repeats elements, with stride 0, which are copied once

    def __init__(self, c: GemmConfiguration, element: Any, mma: cute.TiledMma, clips: bool = False) -> None:
        self.c, self.element, self.mma, self.clips = c, element, mma, clips

    @abstractmethod
    def layout(self, stages: int) -> Any:
        """The ring of tiles in shared memory."""

    @abstractmethod
    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """The copy engine's atom and view of the operand."""

    @abstractmethod
    def share(self, part: Any, tile: cute.Tensor) -> cute.Tensor:
        """What this CTA needs of a tile; ``part`` is its share of ``mma``."""

    @abstractmethod
    def bits(self) -> int:
        """Of a tile in one CTA."""

    @abstractmethod
    def view(self, tensor: cute.Tensor | None, arguments: Any) -> cute.Tensor:
        """The argument as the tensor cores know it, or any at an address; ``arguments`` has the operands before it."""

    def tiler(self) -> tuple[Any, ...]:
        """The tile (m, n, k), as modes of the view."""
        return self.c.tile

    def tile(self, tensor: cute.Tensor, place: Place, last: Any) -> cute.Tensor:
        """A tile of the copy engine's view, of the last index ``last``."""
        depth, k = self.c.tile[2], place.k
        if self.clips:
            k, last = clipped(k, place.work.k_end, depth, granule(self.element, self.operand.major == "k"))
        moved = cute.domain_offset((place.start[self.side], k, 0), tensor)
        return cute.local_tile(moved, (self.tiler()[self.side], depth), (0, 0, last))

    @property
    def operand(self) -> Any:
        """A or B, as declared."""
        return (self.c.a, self.c.b)[self.side]

    @property
    def side(self) -> int:
        """0 for A, 1 for B."""
        return 0 if self.shared_along == ROW else 1

    def cluster(self) -> cute.Layout:
        """The CTAs of a cluster, by pair, row, column."""
        return cute.tiled_divide(cute.make_layout((*self.c.cluster, 1)), (self.mma.thr_id.shape,))

    def one(self) -> Any:
        """The layout of one tile in shared memory."""
        return cute.slice_(self.layout(1), (None, None, None, 0))

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        """The ring."""
        layout = self.layout(stages)
        return smem.allocate_tensor(self.element, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def place(self, row: int, k: int) -> int:
        """Where an element (row, k) of what a CTA has of a tile lies in the first buffer."""
        layout = self.layout(1).outer
        depth = cute.size(layout, mode=[0, 1])
        return cute.crd2idx(((row, k % depth), 0, k // depth, 0), layout)

    def partition(
        self, atom: Any, tile: cute.Tensor, ring: cute.Tensor, rank: Int32
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """This CTA's share of the ring and of a tile, and the CTAs of the cluster that get it."""
        cluster = self.cluster()
        place = cluster.get_flat_coord(rank)
        target, source = cpasync.tma_partition(
            atom,
            place[self.shared_along],
            cute.make_layout(cluster.shape[self.shared_along]),
            cute.group_modes(ring, 0, 3),
            cute.group_modes(self.share(self.mma.get_slice(place[0]), tile), 0, 3),
        )
        if self.compact:
            target, source = cute.filter_zeros(target), cute.filter_zeros(source)
        return target, source, cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=self.shared_along)


class _Values(TileOperand):
    """Elements. The copy engine rounds float32 to tf32, to nearest; the tensor cores would truncate."""

    def view(self, tensor: cute.Tensor | None, arguments: Any) -> cute.Tensor:
        if tensor is None:
            packed = self.operand.packed
            element = Uint8 if packed > 1 else self.element
            k = arguments["a"].shape[1] // packed
            tensor = matrices(element, arguments["n"], k, self.operand.major == "k", arguments["b_ptrs"])
        if self.clips:
            tensor = ending(tensor, 1)
        return cute.recast_tensor(tensor, self.element) if self.element.width == 4 else tensor

    def rounded(self) -> Any:
        return TFloat32 if self.element == Float32 else None


class OperandA(_Values):
    """A tile of A; a pair's CTAs have half of its rows each."""

    name, shared_along = "a", ROW

    def layout(self, stages: int) -> Any:
        return sm100.make_smem_layout_a(self.mma, self.c.tile, self.element, stages)

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        op = sm100.cluster_shape_to_tma_atom_A(self.c.cluster, self.mma.thr_id)
        shape = self.cluster().shape
        return cute.nvgpu.make_tiled_tma_atom_A(
            op, tensor, self.one(), self.c.tile, self.mma, shape, internal_type=self.rounded()
        )

    def share(self, part: Any, tile: cute.Tensor) -> cute.Tensor:
        return part.partition_A(tile)

    def bits(self) -> int:
        return ROWS * self.c.tile[2] * self.element.width


class OperandB(_Values):
    """A tile of B; a pair's CTAs have half of it each."""

    name, shared_along = "b", COLUMN

    def view(self, tensor: cute.Tensor | None, arguments: Any) -> cute.Tensor:
        viewed = super().view(tensor, arguments)
        return woven(viewed, self.c.block) if self.c.halves else viewed

    def tiler(self) -> tuple[Any, ...]:
        m, n, k = self.c.tile
        return (m, woven_rows(n, self.c.block) if self.c.halves else n, k)

    def layout(self, stages: int) -> Any:
        return sm100.make_smem_layout_b(self.mma, self.c.tile, self.element, stages)

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        op = sm100.cluster_shape_to_tma_atom_B(self.c.cluster, self.mma.thr_id)
        shape = self.cluster().shape
        return cute.nvgpu.make_tiled_tma_atom_B(
            op, tensor, self.one(), self.tiler(), self.mma, shape, internal_type=self.rounded()
        )

    def share(self, part: Any, tile: cute.Tensor) -> cute.Tensor:
        return part.partition_B(tile)

    def bits(self) -> int:
        m, n, k = self.c.tile
        return n * k * self.element.width // (m // ROWS)


class _Factors(TileOperand):
    """Scale factors, in atoms of 128 x 4; the view repeats each of them ``vector`` times, with stride 0.

    The ring is that of the operation, the CTAs of ``mma`` are those that share: of B's factors, each CTA of a pair
    needs all of the tile's. Where experts have parts of k, the distance between rows of atoms differs from expert to
    expert: a copy has 128 rows then, so a tile has 128 columns, and the CTAs of a pair fetch their rows of A's factors
    on their own.
    """

    compact = True

    def __init__(
        self, c: GemmConfiguration, element: Any, mma: cute.TiledMma, operation: cute.TiledMma, clips: bool = False
    ) -> None:
        super().__init__(c, element, mma, clips)
        self.operation = operation
        self.atom = 4 * self.vector  # values along k whose factors are in an atom
        self.atoms = c.tile[2] // self.atom  # of a k tile and 128 rows

    def view(self, tensor: cute.Tensor | None, arguments: Any) -> cute.Tensor:
        if self.clips:  # of 128 rows, as by ``ending``: the last index is the number of the atom where a k tile ends
            steps, end = far(1)
            shape = (((32, 4), 1), ((self.vector, 4), end), (tensor.shape[0] // ATOM + 1, steps + 1))
            stride = (((16, 4), 0), ((0, 1), ATOM), (ATOM, (1 << 64) // steps - ATOM))
            return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))
        rows, k, batch = arguments[self.name.removeprefix("sf")].shape
        shape = (cute.size(rows), k, batch)
        if tensor is None:
            layout = blockscaled.tile_atom_to_shape_SF((*shape[:2], 1), self.vector)
            pointers = arguments[f"{self.name}_ptrs"]
            return everywhere(self.element, layout.shape[:2], layout.stride[:2], pointers)
        return cute.make_tensor(tensor.iterator, blockscaled.tile_atom_to_shape_SF(shape, self.vector))

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        return smem.allocate_tensor(self.element, self.layout(stages), byte_alignment=1024)

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

    @property
    def vector(self) -> int:
        assert self.c.tensor_core_scale is not None
        return self.c.tensor_core_scale.vector


class FactorsA(_Factors):
    """A's factors, of a CTA's rows."""

    name, shared_along = "sfa", ROW

    def layout(self, stages: int) -> Any:
        return blockscaled.make_smem_layout_sfa(self.operation, self.c.tile, self.vector, stages)

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        op = sm100.cluster_shape_to_tma_atom_A(self.c.cluster, self.operation.thr_id)
        tile, shape = (ROWS if self.clips else self.c.tile[0], *self.c.tile[1:]), self.cluster().shape
        return cute.nvgpu.make_tiled_tma_atom_A(
            op, tensor, self.one(), tile, self.mma, shape, internal_type=cutlass.Int16
        )

    def share(self, part: Any, tile: cute.Tensor) -> cute.Tensor:
        return part.partition_A(tile)

    def bits(self) -> int:
        return ROWS * self.c.tile[2] // self.vector * 8


class FactorsB(_Factors):
    """B's factors, of a tile's columns."""

    name, shared_along = "sfb", COLUMN

    def view(self, tensor: cute.Tensor | None, arguments: Any) -> cute.Tensor:
        viewed = super().view(tensor, arguments)
        if not self.c.halves:
            return viewed
        (rows, atoms), (inner, far) = viewed.shape[0], viewed.stride[0]  # atoms of both halves in turn
        shape = ((rows, (2, atoms // 2)), *viewed.shape[1:])
        stride = ((inner, (atoms // 2 * far, far)), *viewed.stride[1:])
        return cute.make_tensor(viewed.iterator, cute.make_layout(shape, stride=stride))

    def layout(self, stages: int) -> Any:
        return blockscaled.make_smem_layout_sfb(self.operation, self.c.tile, self.vector, stages)

    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        op = sm100.cluster_shape_to_tma_atom_SFB(self.c.cluster, self.operation.thr_id)
        tile, shape = (ROWS, *self.c.tile[1:]), self.cluster().shape
        return cute.nvgpu.make_tiled_tma_atom_B(
            op, tensor, self.one(), tile, self.mma, shape, internal_type=cutlass.Int16
        )

    def share(self, part: Any, tile: cute.Tensor) -> cute.Tensor:
        return part.partition_B(tile)

    def bits(self) -> int:
        return self.c.tile[1] * self.c.tile[2] // self.vector * 8


def tile_operands(
    c: GemmConfiguration, mma: cute.TiledMma, whole: cute.TiledMma, clips_k: bool = False
) -> list[TileOperand]:
    """All operands. ``mma`` is the operation, ``whole`` that of one CTA; ``clips_k``: k tiles end where experts do."""
    found: list[TileOperand] = [
        OperandA(c, DTYPES[c.a.dtype], mma, clips_k),
        OperandB(c, DTYPES[c.b.dtype], mma, clips_k),
    ]
    if c.tensor_core_scale:
        element = DTYPES[c.tensor_core_scale.dtype]
        found.append(FactorsA(c, element, whole if clips_k else mma, mma, clips_k))
        found.append(FactorsB(c, element, whole, mma, clips_k))
    return found
