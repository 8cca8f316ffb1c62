"""How the roles of a kernel learn which tile is next.

Where a tile is found by arithmetic, every role computes it. Where it takes a search, one warp of the CTA finds it,
ahead of the others, and puts it in a small ring in shared memory that all other roles read.

Each of n clusters takes every n-th tile. n is the least number of clusters that need no more turns than all that fit.
Or clusters draw tiles: each takes the next one of all when it is about to need it. Then none is ahead of others that
have slower SMs, and what runs at a time reads what is near to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import count_up
from cudnn_kernels.pipeline.cluster import Cluster
from cudnn_kernels.pipeline.ring import Ring, advanced, initialise
from cudnn_kernels.schedule.tiles import Extent, Tiles, Work, share

STAGES = 4
WORD = 4  # bytes of a tile's number
NONE = 1 << 30  # the number of no tile

Cursor = tuple[Any, ...]
"""A role's place: the number of a tile, or a buffer of the ring, its phase, and the tile that was in it.

What a role keeps during its work costs registers: tiles that are found by arithmetic are computed again.
"""


class Feed:
    """The tiles of this cluster. So many warps of the CTA as there are ``readers`` ask for them.

    A warp that has asked once asks until it is told that there is none; with ``turns``, where warpgroups take every
    second tile, it may then ask once more. ``counter``: in global memory, how many tiles the clusters have drawn, where
    they draw them; a tile is drawn when all readers have the one before, or the last but one, with ``turns``.
    """

    def __init__(
        self,
        tiles: Tiles,
        parameters: Any,
        readers: Any,
        smem: Any,
        turns: bool = False,
        counter: Any = None,
        cluster: Cluster | None = None,
    ) -> None:
        _, _, self.index = cute.arch.block_idx()
        _, _, self.step = cute.arch.grid_dim()
        self.tiles, self.parameters, self.readers = tiles, parameters, readers
        self.ends = 2 if turns else 1  # tiles that there are not, at the end of the ring
        self.broadcast = tiles.o.searches
        self.counter, self.cluster = counter, cluster
        if self.broadcast:
            stages = STAGES if counter is None else self.ends
            self.ring = Ring.allocate(smem, stages)
            common = tiles.common(parameters)
            self.told = [field.name for field in fields(Work) if field.name not in common]
            self.words = smem.allocate_tensor(Int32, cute.make_layout((len(self.told), stages)), byte_alignment=16)
        if counter is not None:
            self.numbers = Ring.allocate(smem, 1)
            self.number = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)

    def extent(self) -> Extent:
        """The product's size."""
        return self.tiles.extent(self.parameters)

    def ready(self) -> None:
        """One thread, before all meet."""
        if self.broadcast:
            initialise(self.ring, 1, self.readers)
        if self.counter is not None:
            initialise(self.numbers, 1, self.cluster.size)

    def first(self) -> Cursor:
        """A role's place at its first tile."""
        return self.read(Int32(0), Int32(0)) if self.broadcast else (self.index,)

    def next(self, cursor: Cursor) -> Cursor:
        """The place after another. The whole warp asks."""
        if self.broadcast:
            return self.read(*advanced(self.ring, *cursor[:2]))
        return (cursor[0] + self.step,)

    def in_turn(self, number: Int32) -> tuple[Cursor, Work]:
        """The place of a warpgroup's first tile, the first one or the second by ``number``, and the first tile.

        All warpgroups run the same instructions: where only one of them reads, the compiler takes what is read for
        different in different lanes, and moves it into uniform registers at every product.
        """
        if not self.broadcast:
            return (self.index + number * self.step,), self.work((self.index,))
        return self.read_in_turn(number)

    @cute.jit
    def read_in_turn(self, number: Int32) -> tuple[Cursor, Work]:
        """The same, from the ring."""
        cute.arch.mbarrier_wait(self.ring.full, 0)
        first = self.tile(self.words_of(Int32(0)))
        cute.arch.mbarrier_wait(self.ring.full + number, 0)
        mine = self.tile(self.words_of(number))
        lane = cute.arch.lane_idx()
        if lane <= number:
            cute.arch.mbarrier_arrive(self.ring.empty + lane)
        return (number, Int32(0), mine), first

    def words_of(self, stage: Int32) -> list[Int32]:
        """What a buffer tells. All lanes read the same, and have read it when these shuffles are done."""
        return [cute.arch.make_warp_uniform(self.words[i, stage]) for i in range(len(self.told))]

    def tile(self, told: Sequence[Int32]) -> Work:
        """A tile by what is particular to it."""
        return Work(**dict(zip(self.told, told, strict=True)), **self.tiles.common(self.parameters))

    def more(self, cursor: Cursor) -> Any:
        """Whether there is a tile at a place."""
        return cursor[2].valid != 0 if self.broadcast else self.tiles.exists(self.parameters, cursor[0])

    def work(self, cursor: Cursor) -> Work:
        """The tile at a place."""
        return cursor[2] if self.broadcast else self.tiles.find(self.parameters, cursor[0], None)[0]

    @cute.jit
    def read(self, stage: Int32, phase: Int32) -> Cursor:
        """The tile in a buffer, with its place."""
        cute.arch.mbarrier_wait(self.ring.full + stage, phase)
        told = self.words_of(stage)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.ring.empty + stage)
        return stage, phase, self.tile(told)

    @cute.jit
    def serve(self) -> None:
        """One warp: finds the tiles for all roles."""
        stage, phase = Int32(0), Int32(1)
        index, step, ends = self.index, self.step, Int32(self.ends)
        state, turn = self.tiles.start(), Int32(0)
        while ends > 0:
            if const_expr(self.counter is not None):
                cute.arch.mbarrier_wait(self.ring.empty + stage, phase)
                if turn > 0:
                    index = self.step + self.draw(turn - 1)
                turn += 1
            work, state = self.tiles.find(self.parameters, index, state)
            if const_expr(self.counter is None):
                cute.arch.mbarrier_wait(self.ring.empty + stage, phase)
            if cute.arch.lane_idx() == 0:
                self.write(stage, work)
                cute.arch.mbarrier_arrive(self.ring.full + stage)
            stage, phase = advanced(self.ring, stage, phase)
            ends -= Int32(work.valid == 0)
            if const_expr(not self.tiles.counts and self.counter is None):
                if index == self.index and work.valid != 0:
                    # All have their first tile. The others are for as many clusters as take no more turns.
                    step = share(self.tiles.all(self.parameters) - self.step, self.step)
                    index = self.step - step + self.index if self.index < step else Int32(NONE)
            index += step

    @cute.jit
    def draw(self, turn: Int32) -> Int32:
        """One warp: what the cluster's first CTA draws in a turn, and tells all of its CTAs."""
        phase, lane, (m, n) = turn % 2, cute.arch.lane_idx(), self.cluster.place()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.numbers.full, WORD)
        if (m == 0) & (n == 0):
            cute.arch.mbarrier_wait(self.numbers.empty, phase ^ 1)
            number = Int32(0)
            if lane == 0:
                number = count_up(self.counter)
            number = cute.arch.shuffle_sync(number, 0)
            if lane < self.cluster.size:
                target, full = (
                    cute.arch.map_dsmem_ptr(x, lane).toint() for x in (self.number.iterator, self.numbers.full)
                )
                cute.arch.inline_ptx(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
                    read_only_args=[target, number, full],
                )
        cute.arch.mbarrier_wait(self.numbers.full, phase)
        found = cute.arch.make_warp_uniform(self.number[0])
        if lane == 0:
            cute.arch.mbarrier_arrive(self.numbers.empty, 0)
        return found

    def write(self, stage: Int32, work: Work) -> None:
        """One thread: puts a tile into a buffer."""
        for i, field in enumerate(self.told):
            self.words[i, stage] = getattr(work, field)
