"""How schedules find tiles, in the kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from cudnn_kernels import schedule as declared

WARP = 32

TilesOf = Callable[[Any, Any], Any]
"""How many tiles an expert has, by its rows and the tiles in a row."""


@dataclass(frozen=True)
class Work:
    """A cluster's tile, if ``valid`` is not 0. If it is 2, CTAs that else have the same columns have the same rows.

    ``row`` is its first row; the group's rows are those from ``start`` to before ``end``, all of A. ``column`` counts
    the cluster's tiles. ``k`` and ``k_end`` are the range of k. ``group`` is the batch or the expert.
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
        """How many k tiles the range has."""
        return (self.k_end - self.k + (depth - 1)) // depth


@dataclass(frozen=True)
class Extent:
    """The product, its rows and columns of tiles, and how many tiles there can be; computed on the host."""

    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    tile_rows: Int32
    tile_columns: Int32
    limit: Int32

    def tiles(self) -> tuple[Any, Any]:
        """Rows and columns of tiles."""
        return self.tile_rows, self.tile_columns


SIZES = len(fields(Extent))


class Tiles(ABC):
    """A declared schedule at work on tiles of ``rows`` x ``columns``."""

    clips_k = False  # whether k tiles end where experts do
    clips_rows = False  # whether tiles of rows do
    row_offsets = ""  # the argument that says where groups of rows end
    counts = True  # whether the host knows how many tiles there are

    def __init__(self, declaration: Any, rows: int, columns: int) -> None:
        self.o, self.rows, self.columns = declaration, rows, columns

    def prepare(self, a: Any, b: Any, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        """On the host: the kernel's parameters."""
        batch = 1 if self.clips_k else a.shape[2]  # experts' parts of k are of one matrix
        m, n, k, batch = (Int32(size) for size in (a.shape[0], b.shape[0], a.shape[1], batch))
        tiles = (Int32(cute.ceil_div(m, self.rows)), Int32(cute.ceil_div(n, self.columns)))
        given = [arguments[slot.name] for slot in self.o.slots()]
        return (m, n, k, batch, *tiles, Int32(self.count(*tiles, batch, *given)), *given)

    def extent(self, parameters: Any) -> Extent:
        """The product's size."""
        return Extent(*parameters[:SIZES])

    def clusters(self, parameters: Any, most: Any) -> Any:
        """How many clusters to start, on the host, of ``most`` at a time."""
        count = self.extent(parameters).limit
        return share(count, most) if self.counts else cutlass.min(count, most)

    @abstractmethod
    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        """How many tiles there can be, on the host, for m x n tiles."""

    @abstractmethod
    def find(self, parameters: Any, index: Any, state: Any) -> tuple[Work, Any]:
        """The tile of a number, and what helps to find a later one. All lanes of a warp take part."""

    def exists(self, parameters: Any, index: Any) -> Any:
        """Whether there is a tile of a number, where arithmetic tells."""
        return index < self.extent(parameters).limit

    @abstractmethod
    def common(self, parameters: Any) -> dict[str, Any]:
        """What all tiles have in common, by field: nobody needs to be told."""

    def start(self) -> tuple[Int32, Int32]:
        """What helps to find the first tile."""
        return Int32(0), Int32(0)

    def last(self, group: Any) -> tuple[Any, Any, Any]:
        """The last indices of A, B and the outputs."""
        return group, group, group


class DenseTiles(Tiles):
    """Strips of each product of the batch."""

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return m * n * batch

    def common(self, parameters: Any) -> dict[str, Any]:
        e = self.extent(parameters)
        return {"start": Int32(0), "end": e.m, "k": Int32(0), "k_end": e.k}

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[Work, Any]:
        e = self.extent(parameters)
        m, n = e.tiles()
        batch = index // (m * n)
        row, column = strips(index % (m * n), m, n, self.o.strip)
        valid = Int32(self.exists(parameters, index))
        return Work(row * self.rows, Int32(0), e.m, column, Int32(0), e.k, batch, valid), state


class GroupedRowsTiles(Tiles):
    """Strips of each expert's product, experts one after the other."""

    counts = False

    def __init__(self, declaration: Any, rows: int, columns: int) -> None:
        super().__init__(declaration, rows, columns)
        self.clips_rows = declaration.aligned % rows != 0
        self.row_offsets = declaration.offsets
        self.sideways = int(declaration.sideways)

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return (m + offsets.shape[0]) * n

    def common(self, parameters: Any) -> dict[str, Any]:
        return {"k": Int32(0), "k_end": self.extent(parameters).k}

    def last(self, group: Any) -> tuple[Any, Any, Any]:
        return Int32(0), group, Int32(0)

    def all(self, parameters: Any) -> Int32:
        """How many tiles there are. All lanes of a warp take part."""
        return all_tiles(parameters[SIZES], self.extent(parameters).tile_columns, self.of)

    def of(self, rows: Any, n: Any) -> Any:
        """How many tiles so many rows of an expert have, ``n`` to a row."""
        lines = self.lines(rows)
        return (lines * n + 1) >> 1 if self.sideways else lines * n

    def lines(self, rows: Any) -> Any:
        """How many rows of tiles so many rows have: of single CTAs' tiles, where these may lie sideways."""
        height = self.rows // (1 + self.sideways)
        return (rows + (height - 1)) // height

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[Work, Any]:
        e, offsets = self.extent(parameters), parameters[SIZES]
        _, n = e.tiles()
        expert, before, start, end, first, count = search(offsets, index, n, self.of, *state)
        m = self.lines(end - start) >> self.sideways
        row, column = strips(index - before, cutlass.max(m, 1), n, self.o.strip)
        valid = Int32(expert < offsets.shape[0])
        if self.sideways:
            last = (index - before - m * n) * 2  # the column in the last row, if it is not negative
            row, column = Int32(select_(last < 0, row, m)), Int32(select_(last < 0, column, last))
            valid *= 1 + Int32((last >= 0) & (last + 1 < n))
        work = Work(start + row * self.rows, start, end, column, Int32(0), e.k, expert, valid)
        return work, (first, count)


class GroupedKTiles(Tiles):
    """Strips of each expert's product, all of the same size."""

    clips_k = True

    def count(self, m: Any, n: Any, batch: Any, offsets: Any = None) -> Any:
        return m * n * offsets.shape[0]

    def common(self, parameters: Any) -> dict[str, Any]:
        return {"start": Int32(0), "end": self.extent(parameters).m}

    def last(self, group: Any) -> tuple[Any, Any, Any]:
        return Int32(0), Int32(0), group

    def find(self, parameters: Any, index: Any, state: Any) -> tuple[Work, Any]:
        e, offsets = self.extent(parameters), parameters[SIZES]
        m, n = e.tiles()
        expert = index // (m * n)
        row, column = strips(index % (m * n), m, n, self.o.strip)
        k, k_end, valid = expert_range(offsets, expert)
        return Work(row * self.rows, Int32(0), e.m, column, k, k_end, expert, valid), state


TILES: Mapping[type, type[Tiles]] = {
    declared.Dense: DenseTiles,
    declared.GroupedRows: GroupedRowsTiles,
    declared.GroupedK: GroupedKTiles,
}
"""Which class runs which declaration."""


def tiles_of(declaration: Any, rows: int, columns: int) -> Tiles:
    """A declared schedule at work on a cluster's tiles."""
    return TILES[type(declaration)](declaration, rows, columns)


def share(tiles: Any, clusters: Any) -> Any:
    """The fewest clusters, of so many, that take no more turns for the tiles than all of them: the SMs that would have
    nothing to do in the last turn leave the others their power in all.
    """
    most = cutlass.max(cutlass.min(tiles, clusters), 1)
    turns = cutlass.max((tiles + (most - 1)) // most, 1)
    return (tiles + (turns - 1)) // turns


def strips(index: Any, m: Any, n: Any, height: int) -> tuple[Any, Any]:
    """Row and column of a tile where m x n tiles are taken ``height`` rows at a time, column after column.

    What runs at the same time then reads a nearly square part of A and B, which stays in the L2 cache.
    """
    strip, index = index // (height * n), index % (height * n)
    rows = cutlass.min(m - strip * height, height)
    return strip * height + index % rows, index // rows


@cute.jit
def expert_range(offsets: cute.Tensor, expert: Int32) -> tuple[Int32, Int32, Int32]:
    """Where an expert begins and ends, and whether it exists."""
    start, end, valid = Int32(0), Int32(0), Int32(0)
    if expert < offsets.shape[0]:
        end = offsets[expert]
        valid = Int32(1)
        if expert > 0:
            start = offsets[expert - 1]
    return start, end, valid


@cute.jit
def all_tiles(offsets: cute.Tensor, n: Int32, of: cutlass.Constexpr[TilesOf]) -> Int32:
    """The tiles of all experts, n to a row. Each lane counts those of every 32nd expert."""
    expert, tiles = cute.arch.lane_idx(), Int32(0)
    while expert < offsets.shape[0]:
        start, end, _ = expert_range(offsets, expert)
        tiles += of(end - start, n)
        expert += WARP
    cute.arch.sync_warp()
    for step in cutlass.range_constexpr(5):
        tiles += cute.arch.shuffle_sync_bfly(tiles, 1 << step)
    return tiles


@cute.jit
def search(
    offsets: cute.Tensor, index: Int32, n: Int32, of: cutlass.Constexpr[TilesOf], first: Int32, before: Int32
) -> tuple[Int32, Int32, Int32, Int32, Int32, Int32]:
    """The expert that has a tile; the tiles before it; its first row and the one after its last.

    The search begins with expert ``first``, before which there are ``before`` tiles, none of them after ``index``; the
    last two results are where a later search may begin. A warp looks at 32 experts at a time: each lane counts the
    tiles of one, n to a row.
    """
    lane, experts = cute.arch.lane_idx(), offsets.shape[0]
    tiles, start, end, here = Int32(0), Int32(0), Int32(0), Int32(WARP)
    while first < experts and here == WARP:
        start, end, _ = expert_range(offsets, first + lane)
        tiles = of(end - start, n)
        for step in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(tiles, 1 << step, mask_and_clamp=0)
            if lane >= 1 << step:
                tiles += other
        here = cute.arch.popc(cute.arch.vote_ballot_sync(before + tiles <= index))
        if here == WARP:
            first += WARP
            before += cute.arch.shuffle_sync(tiles, WARP - 1)
    expert, skipped = first, before
    if here < WARP:
        expert += here
        previous = cute.arch.shuffle_sync(tiles, cutlass.max(here - 1, 0))
        if here > 0:
            skipped += previous
        start, end = cute.arch.shuffle_sync(start, here), cute.arch.shuffle_sync(end, here)
    return expert, skipped, start, end, first, before
