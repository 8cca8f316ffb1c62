"""Tile schedules: how a GEMM's tiles are grouped (dense, varlen_m, varlen_k) and rastered. Plain data, part of a
kernel's configuration.

``cudnn_kernels.schedule.tile_maps`` maps tile indices to tiles, ``cudnn_kernels.schedule.tile_scheduler`` is the
persistent tile scheduler of the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from cudnn_kernels.signature import Tensor, vector


@dataclass(frozen=True)
class Schedule:
    """``b``, ``d`` and ``groups`` name the sizes that count the matrices of B, of the outputs, and the groups.

    ``row_alignment``: the rows of every group are a multiple of it; 0: all rows are one group. ``searches``: finding a
    tile takes a search, which a scheduler warp does for the CTA. ``varlen_k``: groups are ranges of k, each with
    separate scale factors. ``swizzle_size``: rows of tiles that are rastered together. ``split_tail_n``: see
    :class:`VarlenM`.
    """

    swizzle_size: int = 8
    split_tail_n: ClassVar[bool] = False
    row_alignment: ClassVar[int] = 0
    b: ClassVar[str] = "l"
    d: ClassVar[str] = "l"
    groups: ClassVar[str] = "l"
    searches: ClassVar[bool] = False
    varlen_k: ClassVar[bool] = False

    def slots(self) -> tuple[Tensor, ...]:
        """The schedule's arguments of the kernel."""
        return ()


def first_block(start: Any, group: Any, size: int) -> Any:
    """The number of a group's first block of ``size`` elements; ``start``: the elements of all groups before it.

    Every group has room for its last, partial block, without a prefix sum: ceil((end - start) / size) is at most
    end // size - start // size + 1. ``elements // size + groups`` blocks hold all groups; some of them are unused.
    """
    return start // size + group


@dataclass(frozen=True)
class Dense(Schedule):
    """One GEMM, or a batch along l."""


@dataclass(frozen=True)
class Grouped(Schedule):
    """A GEMM for each group (expert). ``offsets``, int32 (experts,), has the end of each group's rows, or k."""

    offsets: str = "offsets"
    groups: ClassVar[str] = "experts"
    searches: ClassVar[bool] = True

    def slots(self) -> tuple[Tensor, ...]:
        return (vector(self.offsets, "int32", "experts"),)


@dataclass(frozen=True)
class VarlenM(Grouped):
    """varlen_m: groups are consecutive ranges of the rows of A, and each group has a matrix B, along l.

    Groups end at multiples of ``row_alignment``, and may be empty. Rows beyond the last group are not accessed. Tiles
    begin where groups do; rows of a tile that belong to the next group are not stored. It costs less without such rows:
    if the rows of a cluster's tiles divide ``row_alignment``.

    ``split_tail_n``, for clusters of two rows of CTAs: if a group has an odd number of CTA rows of tiles, both CTAs of
    the cluster take the tail row, next to each other along n, and share A. Otherwise one of them would idle.
    """

    row_alignment: int = 1
    split_tail_n: bool = False  # pyright: ignore[reportIncompatibleVariableOverride]
    b: ClassVar[str] = "experts"


@dataclass(frozen=True)
class VarlenK(Grouped):
    """varlen_k: groups are consecutive ranges of k of A and B, and each group has an output matrix, along l.

    Groups end at any k if A and B are MN-major, at multiples of 16 bytes if one is K-major: TMA can begin nowhere else,
    and a misaligned group ends the kernel with an illegal instruction. An empty group gets zeros. k beyond the last
    group is not read.

    Scale factors are a tensor of bytes, (count,): those of one group after the other, in atoms of 128 rows x 4 blocks,
    each group's rows of atoms one after the other. All groups but the last have multiples of 4 blocks.

    ``k_block``, the k tile: groups end at any k of K-major operands, because each begins a new block of ``k_block``
    elements. A and B are batches (rows, k_block, blocks); block j of group e is number :func:`first_block` + j. The
    last block of a group is filled up with zeros. fp32 scale factors are (rows, 1, blocks).
    """

    k_block: int = 0
    d: ClassVar[str] = "experts"
    varlen_k: ClassVar[bool] = True
