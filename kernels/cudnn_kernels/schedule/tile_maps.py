"""Tile maps: from a linear tile index to the tile, for dense, varlen_m and varlen_k GEMMs, in the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from cudnn_kernels.schedule import Dense, VarlenK, VarlenM, first_block
from cudnn_kernels.threads import WARP_SIZE

TilesOf = Callable[[Any, Any], Any]
"""The number of tiles of a group, from its rows and the tiles in a row of tiles."""


@dataclass(frozen=True)
class WorkTileInfo:
    """A cluster's tile, if ``valid`` is not 0. If it is 2, CTAs that would otherwise have the same columns have the
    same rows instead: the tail rows of a group are split along n.

    ``row`` is its first row; the group's rows are those from ``start`` to before ``end``. ``column`` counts the
    cluster's tiles along n. ``k`` and ``k_end`` are the range of k. ``group`` is the batch index or the group (expert)
    index.
    """

    row: Int32
    start: Int32
    end: Int32
    column: Int32
    k: Int32
    k_end: Int32
    group: Int32
    valid: Int32

    def k_tiles(self, depth: int) -> Int32:
        """The number of k tiles in the range."""
        return (self.k_end - self.k + (depth - 1)) // depth


@dataclass(frozen=True)
class ProblemTiles:
    """The problem size in elements, in tiles, and the largest possible number of tiles; computed on the host."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    tile_rows: Int32
    tile_columns: Int32
    max_tiles: Int32

    def tiles(self) -> tuple[Any, Any]:
        """Tiles along m and n."""
        return self.tile_rows, self.tile_columns


SIZES = len(fields(ProblemTiles))


class TileMap(ABC):
    """The map of a declared schedule, for cluster tiles of ``rows`` x ``columns``."""

    ragged_k = False  # whether groups may end in the middle of a k tile of one matrix
    may_lack_k = False  # whether a group may have no k tile
    ragged_m = False  # whether groups may end in the middle of a tile's rows
    row_offsets = ""  # the argument with the end of each group of rows
    counts = True  # whether the host knows the number of tiles

    def __init__(self, schedule: Any, rows: int, columns: int) -> None:
        self.schedule, self.rows, self.columns = schedule, rows, columns

    def prepare(self, a: Any, n: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the kernel's parameters, for an A and ``n`` columns."""
        batch = 1 if self.may_lack_k else a.shape[2]  # groups along k are parts of one matrix, or entries of the batch
        m, n, k, batch = (Int32(size) for size in (a.shape[0], n, a.shape[1], batch))
        tiles = (Int32(cute.ceil_div(m, self.rows)), Int32(cute.ceil_div(n, self.columns)))
        offsets = [arguments[slot.name] for slot in self.schedule.slots()]
        return (m, n, k, batch, *tiles, Int32(self.count(*tiles, batch, *offsets)), *offsets)

    def problem(self, parameters: Any) -> ProblemTiles:
        """The problem size."""
        return ProblemTiles(*parameters[:SIZES])

    def clusters(self, parameters: Any, max_resident: Any) -> Any:
        """On the host: the number of persistent clusters to launch, at most ``max_resident``."""
        count = self.problem(parameters).max_tiles
        return trim_clusters(count, max_resident) if self.counts else cutlass.min(count, max_resident)

    @abstractmethod
    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        """On the host: the largest possible number of tiles, for m x n tiles of the whole problem."""

    @abstractmethod
    def find(self, parameters: Any, index: Any, state: Any) -> tuple[WorkTileInfo, Any]:
        """The tile with an index, and the search state for a later index. All lanes of a warp take part."""

    def exists(self, parameters: Any, index: Any) -> Any:
        """Whether there is a tile with an index, if the host knows the number of tiles."""
        return index < self.problem(parameters).max_tiles

    @abstractmethod
    def common(self, parameters: Any) -> dict[str, Any]:
        """The fields that all tiles have in common, which the scheduler warp need not broadcast."""

    def start(self) -> tuple[Int32, Int32]:
        """The initial search state."""
        return Int32(0), Int32(0)

    def batch_coords(self, group: Any) -> tuple[Any, Any, Any]:
        """The batch coordinates of A, B and the outputs."""
        return group, group, group

    def operand_coord(self, k: Any, batch: Any) -> tuple[Any, Any]:
        """The coordinates of a k tile in the operands: along k, and in the batch."""
        return k, batch


class DenseTileMap(TileMap):
    """Tiles of each GEMM of a batch, in swizzled order."""

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return m * n * batch

    def common(self, parameters: Any) -> dict[str, Any]:
        e = self.problem(parameters)
        return {"start": Int32(0), "end": e.m, "k": Int32(0), "k_end": e.k}

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[WorkTileInfo, Any]:
        e = self.problem(parameters)
        m, n = e.tiles()
        batch = index // (m * n)
        row, column = swizzled(index % (m * n), m, n, self.schedule.swizzle_size)
        valid = Int32(self.exists(parameters, index))
        return WorkTileInfo(row * self.rows, Int32(0), e.m, column, Int32(0), e.k, batch, valid), state


class VarlenMTileMap(TileMap):
    """varlen_m: tiles of each group's GEMM, group after group, in swizzled order."""

    counts = False

    def __init__(self, schedule: Any, rows: int, columns: int) -> None:
        super().__init__(schedule, rows, columns)
        self.ragged_m = schedule.row_alignment % rows != 0
        self.row_offsets = schedule.offsets
        self.split_tail_n = int(schedule.split_tail_n)

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return (m + offsets.shape[0]) * n

    def common(self, parameters: Any) -> dict[str, Any]:
        return {"k": Int32(0), "k_end": self.problem(parameters).k}

    def batch_coords(self, group: Any) -> tuple[Any, Any, Any]:
        return Int32(0), group, Int32(0)

    def total_tiles(self, parameters: Any) -> Int32:
        """The number of tiles. All lanes of a warp take part."""
        return count_tiles(parameters[SIZES], self.problem(parameters).tile_columns, self.tiles_of_rows)

    def tiles_of_rows(self, rows: Any, n: Any) -> Any:
        """The number of cluster tiles of a group of ``rows`` rows, with ``n`` tiles in a row of tiles."""
        tile_rows = self.tile_rows(rows)
        return (tile_rows * n + 1) >> 1 if self.split_tail_n else tile_rows * n

    def tile_rows(self, rows: Any) -> Any:
        """Rows of tiles of ``rows`` rows: of cluster tiles or, if tail rows are split along n, of CTA tiles."""
        height = self.rows // (1 + self.split_tail_n)
        return (rows + (height - 1)) // height

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[WorkTileInfo, Any]:
        e, offsets = self.problem(parameters), parameters[SIZES]
        _, n = e.tiles()
        expert, before, start, end, first, count = search(offsets, index, n, self.tiles_of_rows, *state)
        m = self.tile_rows(end - start) >> self.split_tail_n
        row, column = swizzled(index - before, cutlass.max(m, 1), n, self.schedule.swizzle_size)
        valid = Int32(expert < offsets.shape[0])
        if self.split_tail_n:
            last = (index - before - m * n) * 2  # the column in the tail row, if it is not negative
            row, column = Int32(select_(last < 0, row, m)), Int32(select_(last < 0, column, last))
            valid *= 1 + Int32((last >= 0) & (last + 1 < n))
        work = WorkTileInfo(start + row * self.rows, start, end, column, Int32(0), e.k, expert, valid)
        return work, (first, count)


class VarlenKTileMap(TileMap):
    """varlen_k: tiles of each group's GEMM, all of the same size, in swizzled order."""

    may_lack_k = True

    def __init__(self, schedule: Any, rows: int, columns: int) -> None:
        super().__init__(schedule, rows, columns)
        self.ragged_k = not schedule.k_block

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return m * n * offsets.shape[0]

    def common(self, parameters: Any) -> dict[str, Any]:
        return {"start": Int32(0), "end": self.problem(parameters).m}

    def batch_coords(self, group: Any) -> tuple[Any, Any, Any]:
        return Int32(0), Int32(0), group

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[WorkTileInfo, Any]:
        e, offsets = self.problem(parameters), parameters[SIZES]
        m, n = e.tiles()
        expert = index // (m * n)
        row, column = swizzled(index % (m * n), m, n, self.schedule.swizzle_size)
        k, k_end, valid = group_range(offsets, expert)
        if self.schedule.k_block:
            k, k_end = self.block_range(k, k_end, expert)
        return WorkTileInfo(row * self.rows, Int32(0), e.m, column, k, k_end, expert, valid), state

    def operand_coord(self, k: Any, batch: Any) -> tuple[Any, Any]:
        return (Int32(0), k // self.schedule.k_block) if self.schedule.k_block else (k, batch)

    def block_range(self, start: Any, end: Any, expert: Any) -> tuple[Any, Any]:
        """The range of k in whole blocks, counted through all blocks."""
        size = self.schedule.k_block
        first = first_block(start, expert, size) * size
        return first, first + (end - start + (size - 1)) // size * size


TILE_MAPS: Mapping[type, type[TileMap]] = {
    Dense: DenseTileMap,
    VarlenM: VarlenMTileMap,
    VarlenK: VarlenKTileMap,
}
"""The map of each declared schedule."""


def tile_map(schedule: Any, rows: int, columns: int) -> TileMap:
    """The map of a declared schedule for cluster tiles of ``rows`` x ``columns``."""
    return TILE_MAPS[type(schedule)](schedule, rows, columns)


def trim_clusters(tiles: Any, clusters: Any) -> Any:
    """The smallest cluster count with the same number of waves; SMs that would idle in the last wave stay idle
    throughout, which leaves power to the rest.
    """
    resident = cutlass.max(cutlass.min(tiles, clusters), 1)
    waves = cutlass.max((tiles + (resident - 1)) // resident, 1)
    return (tiles + (waves - 1)) // waves


def swizzled(index: Any, m: Any, n: Any, swizzle_size: int) -> tuple[Any, Any]:
    """Row and column of a tile where m x n tiles are rastered in groups of ``swizzle_size`` rows of tiles, column by
    column within a group. The tiles in flight then read a nearly square part of A and B, which stays in L2.
    """
    group, index = index // (swizzle_size * n), index % (swizzle_size * n)
    rows = cutlass.min(m - group * swizzle_size, swizzle_size)
    return group * swizzle_size + index % rows, index // rows


@cute.jit
def group_range(offsets: cute.Tensor, expert: Int32) -> tuple[Int32, Int32, Int32]:
    """Where a group begins and ends, and whether it exists."""
    start, end, valid = Int32(0), Int32(0), Int32(0)
    if expert < offsets.shape[0]:
        end = offsets[expert]
        valid = Int32(1)
        if expert > 0:
            start = offsets[expert - 1]
    return start, end, valid


@cute.jit
def count_tiles(offsets: cute.Tensor, n: Int32, of: cutlass.Constexpr[TilesOf]) -> Int32:
    """The number of tiles of all groups, n in a row of tiles. Each lane counts those of every 32nd group."""
    expert, tiles = cute.arch.lane_idx(), Int32(0)
    while expert < offsets.shape[0]:
        start, end, _ = group_range(offsets, expert)
        tiles += of(end - start, n)
        expert += WARP_SIZE
    cute.arch.sync_warp()
    for step in cutlass.range_constexpr(5):
        tiles += cute.arch.shuffle_sync_bfly(tiles, 1 << step)
    return tiles


@cute.jit
def search(
    offsets: cute.Tensor, index: Int32, n: Int32, of: cutlass.Constexpr[TilesOf], first: Int32, before: Int32
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The group that has a tile; the tiles before it; its first row and the one after its last.

    The search begins with group ``first``, before which there are ``before`` tiles, none of them after ``index``; the
    last two results are where a later search may begin. A warp looks at 32 groups at a time: each lane counts the tiles
    of one, n in a row of tiles, and a warp scan adds them up.
    """
    lane, experts = cute.arch.lane_idx(), offsets.shape[0]
    tiles, start, end, groups_before = Int32(0), Int32(0), Int32(0), Int32(WARP_SIZE)
    while first < experts and groups_before == WARP_SIZE:
        start, end, _ = group_range(offsets, first + lane)
        tiles = of(end - start, n)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(tiles, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                tiles += other
        groups_before = cute.arch.popc(cute.arch.vote_ballot_sync(before + tiles <= index))
        if groups_before == WARP_SIZE:
            first += WARP_SIZE
            before += cute.arch.shuffle_sync(tiles, WARP_SIZE - 1)
    expert, skipped = first, before
    if groups_before < WARP_SIZE:
        expert += groups_before
        previous = cute.arch.shuffle_sync(tiles, cutlass.max(groups_before - 1, 0))
        if groups_before > 0:
            skipped += previous
        start, end = cute.arch.shuffle_sync(start, groups_before), cute.arch.shuffle_sync(end, groups_before)
    return expert, skipped, start, end, first, before
