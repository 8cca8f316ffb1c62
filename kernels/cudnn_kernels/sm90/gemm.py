"""The persistent, warp-specialized GEMM of Hopper: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

Warp roles. A CTA has three warpgroups, whose register budgets ``setmaxnreg`` sets:

    warpgroup 0 (producer)    warp 0        load warp: issues the TMA loads of A and B
                              warp 1        scheduler warp, if the map from tile index to tile needs a search
                              warps 2, 3    load fp32 scale factors (SFA, SFB), or gather rows
    warpgroups 1, 2 (MMA)     issue wgmma, accumulate in registers and run the epilogue

Pipelines. A and B pass through up to eight stages of shared memory, each with a full and an empty mbarrier. TMA
completes the transaction bytes of the full barrier; one lane of every MMA warp arrives on the empty barrier. fp32
scale factors share the operands' stages; every lane that copies them arrives on the full barrier. The scheduler's work
tiles have a separate pipeline. CTAs are persistent, so that the loads of the next tile overlap with the epilogue.

Tiles. Cooperative: both MMA warpgroups share a tile, half of its rows each. Ping-pong: each MMA warpgroup has its own
tile, every second one of the CTA. Their mainloops alternate, so that the epilogue of one overlaps with the MMAs of the
other. Both read the same operand pipeline: each skips the stages of the other's tiles.

Synchronization. Named barriers: PINGPONG + wg_idx orders the mainloops (the warpgroup waits, the other one arrives),
EPILOGUE + wg_idx synchronizes the epilogue of one warpgroup. Clusters: the CTAs of a row of the cluster multicast A to
each other, those of a column B. A consumer therefore arrives on the empty barrier in each CTA that writes to its shared
memory. The cluster synchronizes after the mbarriers are initialized, and before CTAs exit.

Promotion. The tensor cores accumulate fp8 products with fewer bits than float32 has. For fp8, the accumulator of each k
tile is therefore partial: it is added to float32 registers. With fp32 scale factors (DeepGEMM's 1D1D and 1D2D), the
partial accumulator spans the k tiles that share a scale factor, and is multiplied by SFA * SFB when it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue import MultiplyGroup, Scale, traits_of
from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.operation import Tile
from cudnn_kernels.gemm.configuration import GemmConfiguration as Configuration
from cudnn_kernels.gemm.gather import GATHER_WARPS, CpAsyncGather, GatherProducer, TmaRowGather, tma_row_view
from cudnn_kernels.gemm.mainloop import Mainloop
from cudnn_kernels.gemm.prepare_operand import prepare
from cudnn_kernels.gemm.projection_kernel import ViewedProjection
from cudnn_kernels.gemm.scale_factors import ScaleFactorPipeline
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import HopperGemm as Barrier
from cudnn_kernels.pipeline.cluster import Cluster, cluster_sync, consumer_release
from cudnn_kernels.pipeline.fragment import Fragment
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance, init_mbarriers, producer_acquire
from cudnn_kernels.pipeline.wgmma import WgmmaRows, mma_operation, opaque
from cudnn_kernels.schedule.tile_scheduler import TileScheduler
from cudnn_kernels.sm90.heuristics.gemm import needs_promotion
from cudnn_kernels.sm90.tile_operand import TileOperand
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

WARPS_PER_WARPGROUP = WARPGROUP_SIZE // WARP_SIZE
MMA_WARPGROUPS = 2
NUM_REGS = (24, 240)  # setmaxnreg: registers of a thread of the producer warpgroup, and of an MMA warpgroup
NUM_REGS_COPY = (40, 232)  # the same where producer threads copy operands, or the load warp has two kinds of tiles
LOAD_WARP, SCHEDULER_WARP, COPY_WARPS = 0, 1, (2, 3)  # warp indices in the producer warpgroup
PROMOTION_UNROLL = 4
MAX_PARTIAL_N = 192  # columns of a partial accumulator (64 rows) that fit into registers next to the accumulators


class Gemm(Mainloop):
    """The kernel for one :class:`Configuration`."""

    promotes_k_groups, epilogue_barrier, overhead = True, Barrier.EPILOGUE, 896
    threads = WARPGROUP_SIZE * (1 + MMA_WARPGROUPS)

    def __init__(self, configuration: Configuration) -> None:
        c = configuration
        self.tile_m, self.tile_n, self.tile_k = c.tile
        self.cluster = Cluster(*c.cluster)
        super().__init__(c, self.tile_m)
        tile_map = self.tile_map
        self.operands = [TileOperand(c, i, tile_map, multicast_dim=i) for i in range(2)]
        self.tail_operands = [
            TileOperand(c, i, tile_map, multicast_dim=1 - i) for i in range(2) if c.schedule.split_tail_n
        ]
        self.wg_rows = self.tile_m if c.pingpong else self.tile_m // MMA_WARPGROUPS
        self.may_lack_rows = self.tile_map.ragged_m and self.tile_map.rows > self.wg_rows  # of a tail tile
        self.promotion = needs_promotion(c)
        self.promotion_interval = c.a.scale.vector // self.tile_k if c.scales_accumulator else 1  # k tiles
        self.reads_columns_late = bool(self.operand_scales) and self.operand_scales[1].granule == 1
        # Only for GEMMs that are ragged along m: the epilogues of others would spill registers.
        self.promotion_unroll = PROMOTION_UNROLL if self.operand_scales and self.tile_map.ragged_m else 1  # k tiles
        self.partial_n = self.tile_n if self.tile_n <= MAX_PARTIAL_N else self.tile_n // 2
        # The sub-accumulators use one partial accumulator in sequence, so it cannot span several k tiles.
        if self.promotion_interval > 1 and len(self.acc_tiles(0)) > 1:
            vector = c.a.scale.vector
            allowed = f"k tiles of {vector}, or at most 128 rows and {MAX_PARTIAL_N} columns, with such scale factors"
            raise ValueError(f"tile: got {c.tile}; allowed: {allowed}")
        self.gathers_by_tma = bool(c.gathers) and not tile_map.ragged_k
        self.gathers_by_threads = bool(c.gathers) and not self.gathers_by_tma
        # With 232 registers ptxas keeps all operands of a promotion by scale factors in one bank, with 240 in both.
        copies = not self.operand_scales and (self.gathers_by_threads or c.schedule.split_tail_n)
        self.num_regs = NUM_REGS_COPY if copies else NUM_REGS
        self.tiled_operands = [x for x in self.operands if not x.operand.index]  # loaded by tiled TMA
        self.epilogue = self.epilogue_of(
            rows=self.wg_rows,
            num_warpgroups=MMA_WARPGROUPS,
            threads=WARPGROUP_SIZE,
            layout=WgmmaRows(slots=2 * (self.wg_rows // 64)),
            tiled_copy=lambda atom, width: cute.make_tiled_copy_C(atom, self.tiled_mma(width)),
            fragment=self.fragment,
            overlaps_stores=self.overlaps_stores(),
        )

    def launch(self, arguments: Mapping[str, Any]) -> None:
        super().launch(prepare(self.c, arguments) if self.c.prepared else arguments)

    def tma_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        operands = [*self.tiled_operands, *self.tail_operands]
        tma = [operand.tma_atom(operand.view(arguments[operand.name])) for operand in operands]
        pointers = arguments["b_ptrs"] if self.c.b.pointers else None  # a prepared operand is a tensor
        return [atom for atom, _ in tma], [tensor for _, tensor in tma], pointers

    def gather_source(self, tensor: cute.Tensor) -> Any:
        return tma_row_view(tensor) if self.gathers_by_tma else tensor

    def tiled_mma(self, width: int) -> cute.TiledMma:
        """One warpgroup's wgmma with ``width`` columns."""
        a, b = self.operands
        return cute.make_tiled_mma(cute.make_mma_atom(mma_operation(a.element, b.element, width, a.major, b.major)))

    def fragment(self, dtype: Any, width: int, rows: int = 0) -> cute.Tensor:
        """Registers for ``width`` columns of a warpgroup's rows, or of ``rows`` rows, in the accumulator's order."""
        return cute.make_rmem_tensor(self.tiled_mma(width).partition_shape_C((rows or self.wg_rows, width)), dtype)

    def overlaps_stores(self) -> bool:
        """Whether the arithmetic of a subtile overlaps with the TMA store of the one before.

        Ping-pong does not need it: the other warpgroup's MMAs overlap with the stores. The epilogue must need few
        registers and scale the accumulator: the volatile load in ``ScaleImpl`` keeps ptxas from undoing the overlap.
        """
        traits = traits_of(self.c.epilogue)
        scaled = any(isinstance(o, (Scale, MultiplyGroup)) for o in self.c.epilogue)
        return scaled and not (self.c.pingpong or self.promotion or traits.extra_registers or traits.width > 1)

    def stage_bytes(self) -> int:
        return sum(x.bits() for x in self.operands) // 8 + ScaleFactorPipeline.stage_bytes(self.operand_scales)

    @cute.kernel
    def kernel(
        self,
        atoms: list,
        tensors: list,
        pointers: cute.Tensor | None,
        gathered: Any,
        scales: Any,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """Sets up shared memory and dispatches the warp roles."""
        stages = self.stages()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)

        smem = SmemAllocator()
        self.smem_operands = [operand.allocate(smem, stages) for operand in self.operands]
        self.epilogue.setup_smem(parameters, smem)
        pipeline = self.pipeline = MbarrierPipeline.allocate(smem, stages)
        gather_warps = const_expr(GATHER_WARPS if self.c.gathers else 0)
        mma_warps = MMA_WARPGROUPS * WARPS_PER_WARPGROUP
        scheduler_readers = 1 + max(len(self.operand_scales), gather_warps) + mma_warps
        semaphore = scheduled[-1] if self.c.dynamic_scheduler else None
        self.scheduler = TileScheduler(
            self.tile_map, scheduled, scheduler_readers, smem, self.c.pingpong, semaphore, self.cluster
        )
        if const_expr(self.operand_scales):
            self.scale_pipeline = ScaleFactorPipeline(
                self.operand_scales, scales, self.scheduler, pipeline, smem, self.sfa_layout()
            )
        if thread == 0:
            copy_warps = GATHER_WARPS if self.gathers_by_threads else len(self.operand_scales)
            producers = const_expr(1 + copy_warps * WARP_SIZE)
            consumer_wgs = 1 if self.c.pingpong else MMA_WARPGROUPS
            init_mbarriers(pipeline, producers, self.cluster.consumer_ctas * WARPS_PER_WARPGROUP * consumer_wgs)
            self.init_barriers(atoms)
        cute.arch.mbarrier_init_fence()
        cluster_sync(self.cluster)

        if const_expr(gather_warps):
            self.gather_producer = self.make_gather_producer(gathered, smem)
        if wg_idx == 0:
            cute.arch.setmaxregister_decrease(self.num_regs[0])
            if warp == LOAD_WARP:
                self.load(atoms, tensors, pointers)
            if const_expr(self.scheduler.has_scheduler_warp):
                if warp == SCHEDULER_WARP:
                    self.scheduler.run_scheduler_warp()
            if const_expr(len(self.operand_scales) > gather_warps):
                for i in cutlass.range_constexpr(len(self.operand_scales)):
                    if warp == COPY_WARPS[i]:
                        self.scale_pipeline.run(self.tile_origin, self.tile_k, (i,))
            if const_expr(gather_warps):
                if warp >= COPY_WARPS[0]:
                    self.gather_producer.run(warp - COPY_WARPS[0], self.tile_origin)
        else:
            cute.arch.setmaxregister_increase(self.num_regs[1])
            self.mma_warpgroup(wg_idx - 1, thread % WARPGROUP_SIZE)
        if const_expr(self.cluster.size > 1):
            cluster_sync(self.cluster)  # no CTA exits while others write to its shared memory or mbarriers

    set_kernel_name(kernel, "cudnn_gemm_sm90")

    @cute.jit
    def load(self, atoms: list, tensors: list, pointers: cute.Tensor | None) -> None:
        """The load warp (producer): issues the TMA loads of all tiles of this CTA."""
        pipeline, multicast = self.pipeline, [self.cluster.multicast(i) for i in range(2)]
        tma_operands = const_expr(self.operands if self.gathers_by_tma else self.tiled_operands)
        stage, phase = Int32(0), Int32(1)  # a producer's first wait does not block
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            batch_a, batch_b, _ = self.tile_map.batch_coords(work.group)
            batch = (batch_a, self.operands[1].batch_coord(pointers, batch_b))
            origin = self.tile_origin(work)
            for k in cutlass.range(work.k_tiles(self.tile_k), unroll=1):
                # (1) Wait until the stage is empty; its full barrier expects the bytes of all TMA loads, including
                # those of the gather warps.
                producer_acquire(pipeline, stage, phase, sum(x.bits() for x in tma_operands) // 8)
                full = pipeline.full + stage
                coord = (origin, work.k + k * self.tile_k, work.k_end, batch)
                # (2) Issue the TMA loads of A and B.
                if const_expr(self.tail_operands):
                    if work.valid == 2:  # split_tail_n: both CTAs of the cluster have the same rows, and share A
                        self.load_k_tile(self.tail_operands, atoms[2:], tensors[2:], coord, multicast, stage, full)
                    else:
                        self.load_k_tile(self.tiled_operands, atoms[:2], tensors[:2], coord, multicast, stage, full)
                else:
                    self.load_k_tile(self.tiled_operands, atoms, tensors, coord, multicast, stage, full)
                stage, phase = advance(pipeline, stage, phase)
            cursor = self.scheduler.advance_to_next_work(cursor)

    def load_k_tile(
        self,
        operands: Sequence[TileOperand],
        atoms: list,
        tensors: list,
        coord: tuple[Any, ...],
        multicast: list,
        stage: Int32,
        full: Any,
    ) -> None:
        """Issues the loads of a k tile at ``coord``: (first row and column, first k, end of k, batch coordinates)."""
        origin, k, k_end, batch = coord
        for operand, atom, tensor in zip(operands, atoms, tensors, strict=True):
            i = operand.operand_index
            for block in range(operand.blocks):
                tile = operand.tile_at(tensor, origin[i], k, k_end, batch[i], block)
                operand.load(atom, tile, self.smem_operands[i], stage, full, multicast[operand.multicast_dim], block)

    def make_gather_producer(self, gathered: Any, smem: Any) -> GatherProducer:
        """The producer of gathered operands, from their tensors and index tensors."""
        sources: list[CpAsyncGather] = []
        operands = [x for x in self.operands if x not in self.tiled_operands]
        for operand, tensors in zip(operands, gathered, strict=True):
            i = operand.operand_index
            shape, stages = (self.c.tile[i], self.tile_k), self.smem_operands[i]
            if self.gathers_by_tma:
                multicast = (operand.num_multicast, *self.cluster.multicast(i))
                source = TmaRowGather(*tensors, stages, shape, operand.smem_offset, smem, self.pipeline, multicast)
                sources.append(source)
            else:
                sources.append(CpAsyncGather(i, True, *tensors, stages, shape, operand.smem_offset, smem))
        scales = self.scale_pipeline if self.operand_scales else None
        return GatherProducer(tuple(sources), self.pipeline, self.scheduler, self.tile_k, None, scales)

    @cute.jit
    def mma_warpgroup(self, wg_idx: Int32, thread: Int32) -> None:
        """An MMA warpgroup (consumer): mainloop and epilogue of each of its tiles.

        ``position`` counts the stages that have passed through the operand pipeline before the tile's first k tile; it
        gives the stage and the phase.
        """
        c, (sA, sB), cta_coord = self.c, self.smem_operands, self.cluster.cta_coord()
        mma = self.tiled_mma(self.tile_n)
        thr_mma = mma.get_slice(thread)
        wg_in_tile = const_expr(0) if const_expr(c.pingpong) else wg_idx
        sA_wg = cute.local_tile(sA, (self.wg_rows, self.tile_k), (wg_in_tile, 0, None))
        tCrA = mma.make_fragment_A(thr_mma.partition_A(sA_wg))
        tCrB = mma.make_fragment_B(thr_mma.partition_B(sB))
        acc = self.fragment(Float32, self.tile_n)
        iteration, position = Int32(0), Int32(0)
        if const_expr(c.pingpong):
            cursor, first = self.scheduler.initial_work_pingpong(wg_idx)
            position = wg_idx * first.k_tiles(self.tile_k)  # warpgroup 1 skips the first tile
            # Warpgroup 0 may start.
            if wg_idx == 1 and first.valid != 0:
                barriers.arrive(Barrier.PINGPONG, MMA_WARPGROUPS * WARPGROUP_SIZE)
        else:
            cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            tile = self.tile(work, cta_coord, wg_in_tile, iteration, thread, wg_idx)
            k_tiles = work.k_tiles(self.tile_k)
            self.epilogue.begin_tile(tile)
            # (1) Ping-pong: wait until the other warpgroup has issued the MMAs of its tile.
            if const_expr(c.pingpong):
                cursor = self.scheduler.advance_to_next_work(cursor)  # the other warpgroup's tile
                self.pingpong_barrier_sync(wg_idx)
            has_rows = cutlass.Boolean(True)
            if const_expr(self.may_lack_rows):
                has_rows = cute.arch.make_warp_uniform(tile.row) < work.end
            # (2) Mainloop over the k tiles. At its end, the other warpgroup may start its mainloop.
            self.mma_tile(mma, acc, tCrA, tCrB, position, k_tiles, wg_in_tile, thread, wg_idx, cursor, has_rows)
            position += k_tiles
            if const_expr(c.pingpong):
                if self.scheduler.is_valid(cursor):  # skip the stages of the other warpgroup's tile
                    position += self.scheduler.work_tile(cursor).k_tiles(self.tile_k)
            # (3) Epilogue: transform and store the accumulator, subtile by subtile.
            self.run_epilogue(acc, tile)
            iteration += 1
            cursor = self.scheduler.advance_to_next_work(cursor)
        self.epilogue.store_tail(thread)

    @cute.jit
    def mma_tile(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        position: Int32,
        k_tiles: Int32,
        wg_in_tile: Any,
        thread: Int32,
        wg_idx: Int32,
        cursor: Any,
        has_rows: cutlass.Boolean,
    ) -> None:
        """The MMAs of a tile, if the group's tail leaves rows for this warpgroup; then the other warpgroup may start
        (ping-pong).
        """
        if const_expr(self.promotion):
            if has_rows:
                self.mainloop_with_promotion(acc, position, k_tiles, wg_in_tile, thread)
            else:
                self.skip_tile(position, k_tiles)
            self.pingpong_barrier_arrive(wg_idx, cursor)
        else:
            # Zero k tiles instead of a branch: inside a branch, ptxas serializes wgmma.
            k_tiles_with_rows = k_tiles
            if const_expr(self.may_lack_rows):
                k_tiles_with_rows = Int32(select_(has_rows, k_tiles, 0))
            self.mainloop(mma, acc, tCrA, tCrB, position, k_tiles_with_rows)
            if const_expr(self.may_lack_rows):
                self.skip_tile(position + k_tiles_with_rows, k_tiles - k_tiles_with_rows)
            self.pingpong_barrier_arrive(wg_idx, cursor)
            self.wait_last_mma(position, k_tiles_with_rows)

    @cute.jit
    def pingpong_barrier_sync(self, wg_idx: Int32) -> None:
        """Waits until the other warpgroup has issued its MMAs."""
        barriers.sync(Barrier.PINGPONG + wg_idx, MMA_WARPGROUPS * WARPGROUP_SIZE)

    @cute.jit
    def pingpong_barrier_arrive(self, wg_idx: Int32, cursor: Any) -> None:
        """Ping-pong: lets the other warpgroup start its mainloop, if it has a tile at the cursor. The last MMAs of this
        warpgroup are still in flight, so that the tensor cores do not idle.
        """
        if const_expr(self.c.pingpong):
            if self.scheduler.is_valid(cursor):
                barriers.arrive(Barrier.PINGPONG + 1 - wg_idx, MMA_WARPGROUPS * WARPGROUP_SIZE)

    @cute.jit
    def mainloop(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        position: Int32,
        k_tiles: Int32,
    ) -> None:
        """Issues the MMAs of a tile. The MMAs of one k tile stay in flight while those of the next are issued; those of
        the last k tile are in flight on return.
        """
        pipeline = self.pipeline
        stage, phase = position % pipeline.stages, position // pipeline.stages % 2
        previous_stage = stage
        if const_expr(self.tile_map.may_lack_k):
            if k_tiles == 0:  # an empty group
                acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(k_tiles, unroll=1):
            # (1) Wait for the operands of the k tile.
            cute.arch.mbarrier_wait(pipeline.full + stage, phase)
            if const_expr(self.gathers_by_threads):
                cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote, wgmma reads by the async proxy
            # (2) Issue acc += A B^T.
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, acc, tCrA[None, None, block, stage], tCrB[None, None, block, stage], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            # (3) Wait for the MMAs of the previous k tile and release its stage.
            warpgroup.wait_group(1)
            if k > 0:
                consumer_release(self.cluster, pipeline.empty + previous_stage)
            previous_stage = stage
            stage, phase = advance(pipeline, stage, phase)

    @cute.jit
    def wait_last_mma(self, position: Int32, k_tiles: Int32) -> None:
        """Waits for the MMAs of the last k tile and releases its stage."""
        warpgroup.wait_group(0)
        if const_expr(self.tile_map.may_lack_k or self.may_lack_rows):
            if k_tiles > 0:
                consumer_release(self.cluster, self.pipeline.empty + (position + k_tiles - 1) % self.pipeline.stages)
        else:
            consumer_release(self.cluster, self.pipeline.empty + (position + k_tiles - 1) % self.pipeline.stages)

    @cute.jit
    def skip_tile(self, position: Int32, k_tiles: Int32) -> None:
        """Releases the stages of a tile in which this warpgroup has no rows, without MMAs. The tensor cores are then
        free for the other warpgroup.
        """
        pipeline = self.pipeline
        stage, phase = position % pipeline.stages, position // pipeline.stages % 2
        for _ in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(pipeline.full + stage, phase)
            consumer_release(self.cluster, pipeline.empty + stage)
            stage, phase = advance(pipeline, stage, phase)

    @cute.jit
    def mainloop_with_promotion(
        self, acc: cute.Tensor, position: Int32, k_tiles: Int32, wg_in_tile: Any, thread: Int32
    ) -> None:
        """The MMAs of a tile, one M64 x N sub-accumulator after the other. Every ``promotion_interval`` k tiles, the
        partial accumulator is added to the sub-accumulator in float32. Meanwhile the MMAs of the other warpgroup run.
        """
        pipeline, mma = self.pipeline, self.tiled_mma(self.partial_n)
        thr_mma = mma.get_slice(thread)
        acc_tiles = self.acc_tiles(wg_in_tile)
        operands = [self.acc_tile_operands(mma, thr_mma, acc_tile) for acc_tile in acc_tiles]
        partial = self.fragment(Float32, self.partial_n, 64)
        scale_row = self.scale_row(wg_in_tile, thread) if self.operand_scales else None
        stage, phase = position % pipeline.stages, position // pipeline.stages % 2
        acc.fill(0.0)
        # Unrolled: ptxas then asks for the next k tile's operands before the last promotion, and computes the MMA's
        # descriptors during it. Between two k tiles, a warp issues 11 instructions before its MMAs instead of 40.
        for k in cutlass.range(k_tiles, unroll=self.promotion_unroll):
            state = (k, k_tiles, stage, phase)
            self.promote_k_tile(mma, acc, partial, acc_tiles, operands, scale_row, thread, state)
            stage, phase = advance(pipeline, stage, phase)

    def promote_k_tile(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        partial: cute.Tensor,
        acc_tiles: Sequence[tuple[Any, int]],
        operands: Sequence[tuple[Any, Any]],
        scale_row: Int32 | None,
        thread: Int32,
        state: tuple[Any, ...],
    ) -> None:
        """The MMAs and the promotion of a k tile. ``state``: (k tile index, number of k tiles, stage, phase)."""
        interval, pipeline, (k, k_tiles, stage, phase) = self.promotion_interval, self.pipeline, state
        # (1) Wait for the operands and the scale factors of the k tile. Load the latter: they arrive during the MMAs.
        cute.arch.mbarrier_wait(pipeline.full + stage, phase)
        scales = self.acc_tile_scales(acc_tiles, scale_row, stage, thread)
        for i, (tCrA, tCrB) in enumerate(operands):
            # (2) Issue partial (+)= A B^T; it starts from zero at the first k tile of an interval.
            mma.set(warpgroup.Field.ACCUMULATE, k % interval != 0)
            warpgroup.fence()
            for block in range(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, partial, tCrA[None, None, block, stage], tCrB[None, None, block, stage], partial)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            scale = scales(i)
            # (3) Wait for the MMAs, and release the stage after the last ones.
            warpgroup.wait_group(0)
            if i == len(acc_tiles) - 1 and not self.reads_columns_late:
                consumer_release(self.cluster, pipeline.empty + stage)
            # (4) acc += scale * partial.
            if interval == 1:
                self.promote_acc(i, acc, partial, scale)
            else:
                self.promote_at_interval_end(i, acc, partial, scale, k, k_tiles)
        if self.reads_columns_late:
            consumer_release(self.cluster, pipeline.empty + stage)

    @cute.jit
    def promote_at_interval_end(
        self,
        i: cutlass.Constexpr[int],
        acc: cute.Tensor,
        partial: cute.Tensor,
        scales: cutlass.Constexpr[Any],
        k: Int32,
        k_tiles: Int32,
    ) -> None:
        """:meth:`promote_acc`, if the k tile is the last one of a promotion interval, or of the tile."""
        if k % self.promotion_interval == self.promotion_interval - 1 or k == k_tiles - 1:
            self.promote_acc(i, acc, partial, scales)

    def acc_tiles(self, wg_in_tile: Any) -> list[tuple[Any, int]]:
        """The M64 x N sub-accumulators of a warpgroup, in the accumulator's order: each is the indices of an M64 block
        and of an N block of the CTA's tile.
        """
        blocks = self.wg_rows // 64
        return [
            (wg_in_tile * blocks + block, column)
            for block in range(blocks)
            for column in range(self.tile_n // self.partial_n)
        ]

    def acc_tile_operands(self, mma: Any, thr_mma: Any, acc_tile: tuple[Any, int]) -> tuple[Any, Any]:
        """The MMA operands of a sub-accumulator, in shared memory."""
        sizes = zip(self.smem_operands, (64, self.partial_n), acc_tile, strict=True)
        a, b = (cute.local_tile(x, (size, self.tile_k), (block, 0, None)) for x, size, block in sizes)
        return mma.make_fragment_A(thr_mma.partition_A(a)), mma.make_fragment_B(thr_mma.partition_B(b))

    def sfa_layout(self) -> cute.Layout | None:
        """SFA in shared memory: the rows of a thread, 8 apart in each of its M64 blocks, are neighbors. None if rows
        share scale factors.
        """
        if self.operand_scales[0].granule > 1:
            return None
        blocks, wgs = self.wg_rows // 64, self.tile_m // self.wg_rows
        return cute.make_layout((8, 2, 4, blocks, wgs), stride=(2 * blocks, 1, 16 * blocks, 2, 64 * blocks))

    def scale_row(self, wg_in_tile: Any, thread: Int32) -> Int32:
        """A thread's first row in a tile with scale factors, or its position in :meth:`sfa_layout`. The compiler would
        compute it again in each k tile, before the MMAs.
        """
        row, layout = wg_in_tile * self.wg_rows + self.epilogue.params.layout.row(thread, 0), self.sfa_layout()
        return opaque(Int32(row if layout is None else cute.crd2idx(row, layout)))

    def thread_sfa(self, stage: Int32, row: Int32) -> list[Float32]:
        """SFA of a thread's rows, two for each M64 block; ``row`` is :meth:`scale_row`."""
        scales, slots = self.scale_pipeline, self.wg_rows // 32
        if self.operand_scales[0].granule == 1:
            return scales.neighbors(stage, row, slots)
        return [scales.row(stage, row + slot // 2 * 64 + slot % 2 * 8) for slot in range(slots)]

    def acc_tile_scales(
        self, acc_tiles: Sequence[tuple[Any, int]], scale_row: Int32 | None, stage: Int32, thread: Int32
    ) -> Callable[[int], Callable[[int, int], Float32] | None]:
        """SFA * SFB of a stage: a function of the sub-accumulator that returns a function of a row slot and a position,
        see :class:`RowLayout`.

        The scale factors of all sub-accumulators are loaded here, before the MMAs, but for those of each column, which
        registers do not hold: they are loaded when they are needed.
        """
        if not self.operand_scales:
            return lambda i: None
        scales, layout, granule = self.scale_pipeline, self.epilogue.params.layout, self.operand_scales[1].granule
        blocks_n = self.tile_n // self.partial_n
        rows = self.thread_sfa(stage, scale_row)
        columns: dict[int, Any] = {}
        if granule > 1:
            columns = {column: scales.column(stage, column) for column in range(0, self.tile_n, granule)}

        def scale_of(i: int) -> Callable[[int, int], Float32]:
            block, first = i // blocks_n, acc_tiles[i][1] * self.partial_n
            sfa = rows[2 * block : 2 * block + 2]
            if granule == 1:

                def scale(slot: int, position: int) -> Float32:
                    if first + position not in columns:
                        columns[first + position] = scales.column(stage, first + layout.column(thread, position))
                    return sfa[slot] * columns[first + position]

                return scale
            per_row = [[row * columns[first + column] for column in range(0, self.partial_n, granule)] for row in sfa]
            return lambda slot, position: per_row[slot][
                position // layout.run * layout.run * layout.lanes_per_row // granule
            ]

        return scale_of

    def promote_acc(self, i: int, acc: cute.Tensor, partial: cute.Tensor, scales: Any) -> None:
        """Adds the scaled partial accumulator to sub-accumulator i."""
        for slot in range(2):
            for position, index in enumerate(self.epilogue.params.layout.order(self.partial_n, slot)):
                target = i * (self.partial_n // 2) + index
                if scales is None:
                    acc[target] = acc[target] + partial[index]
                else:
                    acc[target] = fma(partial[index], scales(slot, position), acc[target])

    def run_epilogue(self, acc: cute.Tensor, tile: Tile) -> None:
        """The epilogue of a tile: copies each subtile out of the accumulator and processes it."""
        params = self.epilogue.params
        subtile_values = params.width // 2  # values of a thread in a subtile and an M64 block
        segment_values = subtile_values // params.num_segments
        self.epilogue.zero_out_of_bounds(tile, 0, Fragment(acc, self.tile_n, params.layout))
        for subtile, process in self.epilogue.subtile_passes():
            values = self.fragment(Float32, params.width)
            for block in range(self.wg_rows // 64):
                for segment in range(params.num_segments):
                    source = params.segment(subtile, segment) * segment_values + block * (self.tile_n // 2)
                    target = segment * segment_values + block * subtile_values
                    for i in range(segment_values):
                        values[target + i] = acc[source + i]
            process(tile, subtile, Fragment(values, params.width, params.layout))
        self.epilogue.end_tile(tile)


class Projection(ViewedProjection):
    """The projection of queries around this GEMM."""

    gemm = Gemm
