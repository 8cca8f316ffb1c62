"""TMA loads of A and B, tile by tile: what is the same on all architectures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.gemm.configuration import GemmConfiguration
from cudnn_kernels.schedule.tile_maps import TileMap
from cudnn_kernels.pipeline.tma import concat_glu_shape, concat_glu_view, ragged_coord, ragged_step


class TileOperand(ABC):
    """An argument of the kernel that TMA loads: A (``operand_index`` 0) or B (1).

    ``tile_map``: that of the schedule. With ragged k, groups may end in the middle of a k tile. TMA rounds float32 to tf32 to nearest; the tensor cores
    would truncate.
    """

    def __init__(self, c: GemmConfiguration, operand_index: int, tile_map: TileMap) -> None:
        self.c, self.operand_index, self.tile_map, self.tile_k = c, operand_index, tile_map, c.tile[2]
        self.operand, self.name = (c.a, c.b)[operand_index], "ab"[operand_index]
        self.element = DTYPES[self.operand.dtype]
        self.tma_dtype = TFloat32 if self.element == Float32 else None
        self.concat_glu = bool(operand_index) and c.concat_glu

    @property
    def rows(self) -> Any:
        """The shape of a tile's rows, as modes of the view."""
        return concat_glu_shape(self.c.tile[1], self.c.block) if self.concat_glu else self.c.tile[self.operand_index]

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """The tensor in the order of the GEMM's rows."""
        return concat_glu_view(tensor, self.c.block) if self.concat_glu else tensor

    def tile_at(self, tensor: cute.Tensor, row: Int32, k: Int32, k_end: Int32, batch: Any) -> cute.Tensor:
        """The tile of the TMA coordinate tensor that begins at a row and a k, at the coordinate ``batch``."""
        k, batch = self.tile_map.operand_coord(k, batch)
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
