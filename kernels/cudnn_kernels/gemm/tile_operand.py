"""TMA loads of A and B, tile by tile: what is the same on all architectures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32, select_

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.pipeline.tma import concat_glu_shape, concat_glu_view, ptr_array_coord, ragged_coord, ragged_step
from cudnn_kernels.schedule.tile_maps import TileMap


class TileOperand(ABC):
    """An argument of the kernel that TMA loads: A (``operand_index`` 0) or B (1).

    ``tile_map``: that of the schedule. With ragged k, groups may end in the middle of a k tile. TMA rounds float32 to
    tf32 to nearest; the tensor cores would truncate.

    If gate and up weights are at separate addresses, no TMA box reaches both: a tile is loaded in ``blocks`` of 32
    rows, which alternate between them.
    """

    def __init__(self, c: GemmConfiguration, operand_index: int, tile_map: TileMap) -> None:
        self.c, self.operand_index, self.tile_map, self.tile_k = c, operand_index, tile_map, c.tile[2]
        self.operand, self.name = (c.a, c.b)[operand_index], "ab"[operand_index]
        self.element = DTYPES[self.operand.dtype]
        self.tma_dtype = TFloat32 if self.element == Float32 else None
        self.alternates = self.operand.halves and c.concat_glu
        self.concat_glu = bool(operand_index) and c.concat_glu and not self.alternates

    @property
    def rows(self) -> Any:
        """The shape of the rows that are loaded at a time, as modes of the view."""
        if self.alternates:
            return GLU_BLOCK
        return concat_glu_shape(self.c.tile[1], self.c.block) if self.concat_glu else self.c.tile[self.operand_index]

    @property
    def blocks(self) -> int:
        """How many blocks of rows a CTA's tile is loaded in."""
        return self.cta_rows // GLU_BLOCK if self.alternates else 1

    @property
    def cta_rows(self) -> int:
        """Rows of the tile in one CTA."""
        return self.c.tile[self.operand_index]

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """The tensor in the order of the GEMM's rows."""
        return concat_glu_view(tensor, self.c.block) if self.concat_glu else tensor

    def batch_coord(self, pointers: cute.Tensor | None, group: Int32) -> Any:
        """The batch coordinate of a group; those of both matrices, if it has halves."""
        if not self.operand.halves:
            return ptr_array_coord(pointers, group)
        assert pointers is not None
        return tuple(ptr_array_coord(pointers, group + half * (pointers.shape[0] // 2)) for half in range(2))

    def tile_at(
        self, tensor: cute.Tensor, row: Int32, k: Int32, k_end: Int32, batch: Any, block: int = 0
    ) -> cute.Tensor:
        """The tile of the TMA coordinate tensor that begins at a row and a k, at the coordinate ``batch``; of a tile in
        blocks, one of them.
        """
        k, batch = self.tile_map.operand_coord(k, batch)
        if self.alternates:
            row, batch = row // 2 + block // 2 * GLU_BLOCK, batch[block % 2]
        elif self.operand.halves:
            half = Int32(tensor.shape[1])
            is_second = k >= half
            k = Int32(select_(is_second, k - half, k))
            batch = tuple(Int32(select_(is_second, second, first)) for first, second in zip(*batch, strict=True))
        if self.tile_map.ragged_k:
            k, batch = ragged_coord(k, k_end, self.tile_k, ragged_step(self.element, self.operand.major == "k"))
        shifted = cute.domain_offset((row, k, 0), tensor)
        return cute.local_tile(shifted, (self.rows, self.tile_k), (0, 0, batch))

    @abstractmethod
    def layout(self, stages: int) -> Any:
        """The layout of the stages in shared memory."""

    @abstractmethod
    def tma_atom(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """The TMA atom and the TMA coordinate tensor of the operand."""

    @abstractmethod
    def bits(self) -> int:
        """Bits of a tile in one CTA."""

    @abstractmethod
    def smem_offset(self, row: int, k: int) -> int:
        """The position of an element (row, k) of the CTA's tile in the first stage."""

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        """Allocates the stages."""
        layout = self.layout(stages)
        return smem.allocate_tensor(self.element, layout.outer, byte_alignment=1024, swizzle=layout.inner)
