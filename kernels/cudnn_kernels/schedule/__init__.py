"""Which tile is next, and what it is made of: plain data, part of a kernel's configuration.

A schedule is an order, strips of tiles that stay in the L2 cache together, times a grouping: none, rows by expert, or
k by expert. How each one finds tiles is in ``cudnn_kernels.schedule.tiles``; how the roles of a kernel learn of them
is in ``cudnn_kernels.schedule.feed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cudnn_kernels.signature import Tensor, vector


@dataclass(frozen=True)
class Schedule:
    """``b``, ``d`` and ``groups`` name the sizes that count the matrices of B, of the outputs, and the groups.

    ``aligned``: every group's rows are a multiple of as many; 0: a group has all rows. ``searches``: to find a tile
    takes so long that one warp does it for all. ``splits_k``: groups have parts of k, and each has scale factors of its
    own. ``strip``: rows of tiles that are taken together. ``sideways`` as of :class:`GroupedRows`.
    """

    strip: int = 8
    sideways: ClassVar[bool] = False
    aligned: ClassVar[int] = 0
    b: ClassVar[str] = "l"
    d: ClassVar[str] = "l"
    groups: ClassVar[str] = "l"
    searches: ClassVar[bool] = False
    splits_k: ClassVar[bool] = False

    def slots(self) -> tuple[Tensor, ...]:
        """Its arguments of the kernel."""
        return ()


@dataclass(frozen=True)
class Dense(Schedule):
    """One product, or a batch of them along l."""


@dataclass(frozen=True)
class Grouped(Schedule):
    """A product for each expert. ``offsets``, int32 (experts,), says where each one's rows, or its part of k, end."""

    offsets: str = "offsets"
    groups: ClassVar[str] = "experts"
    searches: ClassVar[bool] = True

    def slots(self) -> tuple[Tensor, ...]:
        return (vector(self.offsets, "int32", "experts"),)


@dataclass(frozen=True)
class GroupedRows(Grouped):
    """The rows of A belong to experts, one after the other, and each expert has a B: those along l.

    Experts end at any multiple of ``aligned``, and may have no rows. Rows beyond the last one are not touched. Tiles
    begin where experts do; what reaches into the next expert is not stored. It costs less where nothing does: where the
    rows of a cluster's tiles divide ``aligned``.

    ``sideways``, for clusters of two rows of CTAs: if an expert's rows of tiles are odd in number, the CTAs take those
    of the last row side by side and share A, where else one of them would have nothing to do.
    """

    aligned: int = 1
    sideways: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    b: ClassVar[str] = "experts"


@dataclass(frozen=True)
class GroupedK(Grouped):
    """The columns of A and B along k belong to experts, one after the other: each has a product of its own, along l of
    the outputs.

    Experts end at any k if A and B are MN-major, at multiples of 16 bytes if one is K-major: the copy engine can begin
    nowhere else, and where an expert does, the kernel ends with an illegal instruction. An expert that has none gets
    zeros. k beyond the last one is not read.

    Scale factors are a tensor of bytes, (count,): those of one expert after the other, in atoms of 128 rows x 4 blocks,
    an expert's rows of atoms one after the other. All experts but the last have multiples of 4 blocks.
    """

    d: ClassVar[str] = "experts"
    splits_k: ClassVar[bool] = True
