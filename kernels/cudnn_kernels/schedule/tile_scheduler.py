"""The persistent tile scheduler: which tile the warps of a CTA work on next.

If the tile index maps to a tile by arithmetic, every warp computes it. If the map needs a search (groups of varlen_m or
varlen_k), a scheduler warp runs ahead of the others and broadcasts :class:`WorkTileInfo` through a pipeline in shared
memory.

Static persistent: cluster i of n takes the tiles i, i + n, i + 2 n, ...; n is the smallest number of clusters with the
same number of waves. Dynamic: clusters claim the next tile from an atomic counter in global memory (a tile count
semaphore) when they are about to need it. A cluster on slower SMs then does not fall behind, and the tiles in flight
stay close in L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import atomic_inc
from cudnn_kernels.pipeline.cluster import Cluster
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance, init_mbarriers
from cudnn_kernels.schedule.tile_maps import ProblemTiles, TileMap, WorkTileInfo, trim_clusters

STAGES = 4
INDEX_BYTES = 4  # of a tile index
NO_TILE = 1 << 30  # a tile index beyond all tiles

WorkCursor = tuple[Any, ...]
"""A warp's position: the tile index or, behind a scheduler warp, the stage, its phase and the tile read from it.

What lives across the mainloop costs registers: tiles that arithmetic finds are computed again.
"""


class TileScheduler:
    """The tiles of this cluster, read by ``consumer_warps`` warps of the CTA.

    Once a warp has read a work tile, it must keep reading until it gets an invalid one. ``pingpong``: each warpgroup
    takes every second tile and may read one invalid tile more. ``semaphore``: the tile counter of a dynamic schedule; a
    tile is claimed once all warps have read the tile before or, with ``pingpong``, the one before that.
    """

    def __init__(
        self,
        tile_map: TileMap,
        parameters: Any,
        consumer_warps: Any,
        smem: Any,
        pingpong: bool = False,
        semaphore: Any = None,
        cluster: Cluster | None = None,
    ) -> None:
        _, _, self.index = cute.arch.block_idx()
        _, _, self.step = cute.arch.grid_dim()
        self.tile_map, self.parameters, self.consumer_warps = tile_map, parameters, consumer_warps
        self.invalid_tiles = 2 if pingpong else 1  # that end the broadcast
        self.has_scheduler_warp = tile_map.o.searches
        self.semaphore, self.cluster = semaphore, cluster
        if self.has_scheduler_warp:
            stages = STAGES if semaphore is None else self.invalid_tiles
            self.pipeline = MbarrierPipeline.allocate(smem, stages)
            common = tile_map.common(parameters)
            self.payload_fields = [field.name for field in fields(WorkTileInfo) if field.name not in common]
            layout = cute.make_layout((len(self.payload_fields), stages))
            self.payload = smem.allocate_tensor(Int32, layout, byte_alignment=16)
        if semaphore is not None:
            self.claim_pipeline = MbarrierPipeline.allocate(smem, 1)
            self.claimed_index = smem.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)

    def problem(self) -> ProblemTiles:
        """The problem size in elements and tiles."""
        return self.tile_map.problem(self.parameters)

    def init_barriers(self) -> None:
        """One thread, before the cluster synchronizes."""
        if self.has_scheduler_warp:
            init_mbarriers(self.pipeline, 1, self.consumer_warps)
        if self.semaphore is not None:
            init_mbarriers(self.claim_pipeline, 1, self.cluster.size)

    def initial_work(self) -> WorkCursor:
        """The cursor at a warp's first tile."""
        return self.read(Int32(0), Int32(0)) if self.has_scheduler_warp else (self.index,)

    def advance_to_next_work(self, cursor: WorkCursor) -> WorkCursor:
        """The cursor at the next tile. The whole warp calls this."""
        if self.has_scheduler_warp:
            return self.read(*advance(self.pipeline, *cursor[:2]))
        return (cursor[0] + self.step,)

    def initial_work_pingpong(self, warpgroup: Int32) -> tuple[WorkCursor, WorkTileInfo]:
        """The cursor at the first tile of MMA warpgroup 0 or 1, and the CTA's first tile.

        Both warpgroups run the same instructions: if only one read the pipeline, the compiler would take the values for
        lane-dependent and move them to uniform registers at every MMA.
        """
        if not self.has_scheduler_warp:
            return (self.index + warpgroup * self.step,), self.work_tile((self.index,))
        return self.read_pingpong(warpgroup)

    @cute.jit
    def read_pingpong(self, warpgroup: Int32) -> tuple[WorkCursor, WorkTileInfo]:
        """:meth:`initial_work_pingpong` from the scheduler warp's pipeline."""
        cute.arch.mbarrier_wait(self.pipeline.full, 0)
        first = self.work_of(self.read_payload(Int32(0)))
        cute.arch.mbarrier_wait(self.pipeline.full + warpgroup, 0)
        work = self.work_of(self.read_payload(warpgroup))
        lane = cute.arch.lane_idx()
        if lane <= warpgroup:
            cute.arch.mbarrier_arrive(self.pipeline.empty + lane)
        return (warpgroup, Int32(0), work), first

    def read_payload(self, stage: Int32) -> list[Int32]:
        """The fields in a stage. All lanes read the same words; the shuffles order the reads before the release."""
        return [cute.arch.make_warp_uniform(self.payload[i, stage]) for i in range(len(self.payload_fields))]

    def work_of(self, payload: Sequence[Int32]) -> WorkTileInfo:
        """The tile of a payload, completed by the fields that all tiles have in common."""
        return WorkTileInfo(
            **dict(zip(self.payload_fields, payload, strict=True)), **self.tile_map.common(self.parameters)
        )

    def is_valid(self, cursor: WorkCursor) -> Any:
        """Whether there is a tile at the cursor."""
        if self.has_scheduler_warp:
            return cursor[2].valid != 0
        return self.tile_map.exists(self.parameters, cursor[0])

    def work_tile(self, cursor: WorkCursor) -> WorkTileInfo:
        """The tile at the cursor."""
        return cursor[2] if self.has_scheduler_warp else self.tile_map.find(self.parameters, cursor[0], None)[0]

    @cute.jit
    def read(self, stage: Int32, phase: Int32) -> WorkCursor:
        """One warp: waits for a stage, reads its tile and releases the stage."""
        cute.arch.mbarrier_wait(self.pipeline.full + stage, phase)
        payload = self.read_payload(stage)
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.pipeline.empty + stage)
        return stage, phase, self.work_of(payload)

    @cute.jit
    def run_scheduler_warp(self) -> None:
        """The scheduler warp: finds tiles and broadcasts them, until it has broadcast the invalid ones."""
        stage, phase = Int32(0), Int32(1)
        index, step, invalid_left = self.index, self.step, Int32(self.invalid_tiles)
        state, iteration = self.tile_map.start(), Int32(0)
        while invalid_left > 0:
            if const_expr(self.semaphore is not None):
                cute.arch.mbarrier_wait(self.pipeline.empty + stage, phase)
                if iteration > 0:
                    index = self.step + self.claim_tile(iteration - 1)
                iteration += 1
            work, state = self.tile_map.find(self.parameters, index, state)
            if const_expr(self.semaphore is None):
                cute.arch.mbarrier_wait(self.pipeline.empty + stage, phase)
            if cute.arch.lane_idx() == 0:
                self.write(stage, work)
                cute.arch.mbarrier_arrive(self.pipeline.full + stage)
            stage, phase = advance(self.pipeline, stage, phase)
            invalid_left -= Int32(work.valid == 0)
            if const_expr(not self.tile_map.counts and self.semaphore is None):
                if index == self.index and work.valid != 0:
                    # Every cluster has its first tile. The number of tiles is known only on the device, so the clusters
                    # that would idle in the last wave stop here.
                    step = trim_clusters(self.tile_map.total_tiles(self.parameters) - self.step, self.step)
                    index = self.step - step + self.index if self.index < step else Int32(NO_TILE)
            index += step

    @cute.jit
    def claim_tile(self, iteration: Int32) -> Int32:
        """One warp: CTA (0, 0) increments the tile counter and sends the value to all CTAs by ``st.async``."""
        phase, lane, (m, n) = iteration % 2, cute.arch.lane_idx(), self.cluster.cta_coord()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(self.claim_pipeline.full, INDEX_BYTES)
        if (m == 0) & (n == 0):
            cute.arch.mbarrier_wait(self.claim_pipeline.empty, phase ^ 1)
            claimed = Int32(0)
            if lane == 0:
                claimed = atomic_inc(self.semaphore)
            claimed = cute.arch.shuffle_sync(claimed, 0)
            if lane < self.cluster.size:
                target, full = (
                    cute.arch.map_dsmem_ptr(x, lane).toint()
                    for x in (self.claimed_index.iterator, self.claim_pipeline.full)
                )
                cute.arch.inline_ptx(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [{$r0}], {$r1}, [{$r2}];",
                    read_only_args=[target, claimed, full],
                )
        cute.arch.mbarrier_wait(self.claim_pipeline.full, phase)
        index = cute.arch.make_warp_uniform(self.claimed_index[0])
        if lane == 0:
            cute.arch.mbarrier_arrive(self.claim_pipeline.empty, 0)
        return index

    def write(self, stage: Int32, work: WorkTileInfo) -> None:
        """One thread: writes a tile's fields to a stage."""
        for i, field in enumerate(self.payload_fields):
            self.payload[i, stage] = getattr(work, field)
