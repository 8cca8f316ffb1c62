"""A and B on their way from global to shared memory, tile by tile: what is the same on all architectures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, TFloat32

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.pipeline.copy import clipped, granule, woven, woven_rows


class TileOperand(ABC):
    """One argument of the kernel that the copy engine brings to shared memory: of the side 0, A, or 1, B.

    Where k ``clips``, tiles along k end where experts do. The copy engine rounds float32 to tf32, to nearest; the
    tensor cores would truncate.
    """

    def __init__(self, c: GemmConfiguration, side: int, clips: bool) -> None:
        self.c, self.side, self.clips, self.depth = c, side, clips, c.tile[2]
        self.operand, self.name = (c.a, c.b)[side], "ab"[side]
        self.element = DTYPES[self.operand.dtype]
        self.kind = TFloat32 if self.element == Float32 else None
        self.halves = bool(side) and c.halves

    @property
    def rows(self) -> Any:
        """The shape of a tile's rows, as modes of the view."""
        return woven_rows(self.c.tile[1], self.c.block) if self.halves else self.c.tile[self.side]

    def view(self, tensor: cute.Tensor) -> cute.Tensor:
        """The tensor as tiles take it."""
        return woven(tensor, self.c.block) if self.halves else tensor

    def part(self, tensor: cute.Tensor, row: Int32, k: Int32, k_end: Int32, last: Any) -> cute.Tensor:
        """The tile of the copy engine's view that begins at a row and a k, of the last index ``last``."""
        if self.clips:
            k, last = clipped(k, k_end, self.depth, granule(self.element, self.operand.major == "k"))
        moved = cute.domain_offset((row, k, 0), tensor)
        return cute.local_tile(moved, (self.rows, self.depth), (0, 0, last))

    @abstractmethod
    def layout(self, stages: int) -> Any:
        """The ring of tiles in shared memory."""

    @abstractmethod
    def descriptor(self, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """The copy engine's atom and view of the operand."""

    @abstractmethod
    def bits(self) -> int:
        """Of a tile in one CTA."""

    @abstractmethod
    def place(self, row: int, k: int) -> int:
        """Where an element (row, k) of what a CTA has of a tile lies in the first buffer."""

    def allocate(self, smem: Any, stages: int) -> cute.Tensor:
        """The ring."""
        layout = self.layout(stages)
        return smem.allocate_tensor(self.element, layout.outer, byte_alignment=1024, swizzle=layout.inner)
