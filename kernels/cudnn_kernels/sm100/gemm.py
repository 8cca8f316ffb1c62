"""The persistent, warp-specialized GEMM of Blackwell: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

Warp roles:

    warps 0 to 3     epilogue: load accumulators from tensor memory (TMEM), transform and store them
    warp 4           MMA warp: issues tcgen05.mma
    warp 5           load warp: issues the TMA loads of A, B and block scale factors (SFA, SFB)
    next warp        scheduler warp, if the map from tile index to tile needs a search
    next warp        loads fp32 scale factors
    next two warps   gather rows

With a tile of 256 rows, a pair of CTAs (cta_group::2) works on it. Each CTA holds half of the rows of A, half of B and
half of the accumulator, and runs the epilogue of its rows; the MMA warp of the leader CTA issues the MMAs for both.

Pipelines. Operands pass through stages of shared memory: TMA completes the transaction bytes of the leader's full
barrier, tcgen05.commit arrives on the empty barriers. Accumulators pass through stages of TMEM, two if they fit, so
that the MMAs of the next tile overlap with the epilogue: tcgen05.commit arrives on the full barriers of the pair, the
epilogue threads of both CTAs arrive on the leader's empty barrier.

Tensor memory. The MMA warp and the epilogue warps take part in the allocation of all 512 columns; the named barrier
POINTER publishes the address. Accumulator stages come first, then SFA and SFB of one k tile, copied from shared memory
by tcgen05.cp. The epilogue warps deallocate; in a pair, an mbarrier orders this after the last read of both CTAs.

Synchronization. The named barrier EPILOGUE synchronizes the epilogue warps. Clusters multicast A along rows and B along
columns, so tcgen05.commit arrives on the empty barrier in each CTA whose loads write to the stage. The cluster
synchronizes after the mbarriers are initialized, and before CTAs exit. Before that, the producers wait until all stages
are empty (``producer_tail``): no commit arrives on an mbarrier of a CTA that has exited.

Promotion, with fp32 scale factors: each k tile has a separate accumulator stage. The epilogue warps load it, multiply
it by SFA * SFB and add it to float32 registers. They then store the row to TMEM, from where the epilogue loads its
subtiles as usual: it has no registers for the whole row.

Never run on a Blackwell GPU: correct in the emulator, not timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.pipeline import NamedBarrier

from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.formats import GLU_BLOCK
from cudnn_kernels.gemm.configuration import GemmConfiguration as Configuration
from cudnn_kernels.gemm.gather import GATHER_WARPS, CpAsyncGather, GatherProducer
from cudnn_kernels.gemm.mainloop import Mainloop
from cudnn_kernels.gemm.prepare_operand import prepare
from cudnn_kernels.gemm.projection_kernel import ViewedProjection
from cudnn_kernels.gemm.scale_factors import ScaleFactorPipeline
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.barriers import BlackwellGemm as Barrier
from cudnn_kernels.pipeline.barriers import elect_arrive
from cudnn_kernels.pipeline.cluster import Cluster, cluster_sync
from cudnn_kernels.pipeline.fragment import Fragment
from cudnn_kernels.pipeline.mbarrier_pipeline import (
    MbarrierPipeline,
    advance,
    init_mbarriers,
    producer_acquire,
    producer_tail,
)
from cudnn_kernels.schedule.tile_scheduler import TileScheduler
from cudnn_kernels.sm100.operands import ROWS, KTileCoord, TileOperand, tile_operands
from cudnn_kernels.sm100.tensor_memory import COLUMNS, TensorMemoryRows, commit
from cudnn_kernels.threads import WARP_SIZE

MMA_WARP, LOAD_WARP, SCHEDULER_WARP = 4, 5, 6
SCALE_STAGES = 4  # k tiles whose fp32 scale factors are in shared memory
SCALED_STAGES = 3  # accumulator stages with promotion; one more stage holds the promoted accumulator
CHUNK = 32  # columns that are promoted at a time


class Gemm(Mainloop):
    """The kernel for one :class:`Configuration`."""

    promotes_k_groups, epilogue_barrier, overhead = False, Barrier.EPILOGUE, 2048

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration, ROWS)
        c = configuration
        self.overhead += SCALE_STAGES * ScaleFactorPipeline.stage_bytes(self.operand_scales)
        if c.schedule.split_tail_n:
            raise ValueError(f"split_tail_n: got {c.schedule}; allowed: False, on Blackwell")
        if c.concat_glu and c.b.halves and c.tile[1] < c.tile[0] // 2:
            raise ValueError(f"tile: got {c.tile}; allowed: 64 columns in each CTA, with halves of B")
        self.cluster = Cluster(*c.cluster)
        self.pair = c.tile[0] // ROWS  # CTAs that share a tile
        self.group = tcgen05.CtaGroup.TWO if self.pair == 2 else tcgen05.CtaGroup.ONE
        max_stages = SCALED_STAGES if self.operand_scales else 2
        self.acc_stages = min(max_stages, (COLUMNS - self.scale_factor_columns()) // c.tile[1])
        # Columns from a gate block to its up block in an accumulator, if the blocks are wider than the epilogue's.
        self.half_stride = c.block if c.concat_glu and c.block > GLU_BLOCK else 0
        self.scale_warp = SCHEDULER_WARP + c.schedule.searches
        self.gather_warp = self.scale_warp + bool(self.operand_scales)
        self.threads = 32 * (self.gather_warp + (GATHER_WARPS if c.gathers else 0))
        self.epilogue = self.epilogue_of(
            rows=ROWS,
            num_warpgroups=1,
            threads=ROWS,
            layout=TensorMemoryRows(),
            tiled_copy=lambda atom, width: cute.make_tiled_copy_tv(
                atom, cute.make_layout((ROWS, 1)), cute.make_layout((1, width))
            ),
            fragment=lambda dtype, width: cute.make_rmem_tensor(((1, width), 1, 1), dtype),
        )

    def launch(self, arguments: Mapping[str, Any]) -> None:
        super().launch(prepare(self.c, arguments) if self.c.prepared else arguments)

    def tma_arguments(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        c, views = self.c, dict(arguments)
        mma, cta_mma = self.tiled_mma(), self.tiled_mma(tcgen05.CtaGroup.ONE)
        operands = tile_operands(c, mma, cta_mma, self.tile_map)
        for operand in operands:
            views[operand.name] = operand.mma_view(views)
        tiled = [operand for operand in operands if operand.name not in c.gathers]
        tma = [operand.tma_atom(views[operand.name]) for operand in tiled]
        pointers = [arguments.get(f"{operand.name}_ptrs") for operand in tiled]
        return mma, cta_mma, [atom for atom, _ in tma], [tensor for _, tensor in tma], pointers

    def tiled_mma(self, group: Any = None) -> cute.TiledMma:
        """The tcgen05.mma of a tile; with ``group``, that of one CTA's rows."""
        c = self.c
        a, b = DTYPES[c.a.dtype], DTYPES[c.b.dtype]
        majors = [OperandMajorMode.K if x.major == "k" else OperandMajorMode.MN for x in (c.a, c.b)]
        rows = c.tile[0] if group is None else ROWS
        group = group or self.group
        if c.tensor_core_scale:
            scale, vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
            return sm100.make_blockscaled_trivial_tiled_mma(a, b, *majors, scale, vector, group, (rows, c.tile[1]))
        return sm100.make_trivial_tiled_mma(a, b, *majors, Float32, group, (rows, c.tile[1]))

    def stage_bytes(self, without: Sequence[str] = ()) -> int:
        """Bytes of the operands' tiles in one CTA, except for those named in ``without``."""
        return sum(x.bits() for x in tile_operands(self.c, None, None, self.tile_map) if x.name not in without) // 8

    def scale_factor_columns(self) -> int:
        """Columns of tensor memory for the SFA and SFB of a k tile: an atom, 128 rows x 4 scale factors, fills four
        columns.
        """
        c, scale = self.c, self.c.tensor_core_scale
        return (1 + -(-c.tile[1] // ROWS)) * c.tile[2] // scale.vector if scale else 0

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        cta_mma: cute.TiledMma,
        atoms: list,
        tensors: list,
        pointers: list,
        gathered: Any,
        scales: Any,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """Sets up shared memory, pipelines and tensor memory, and dispatches the warp roles."""
        stages = const_expr(self.stages())
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        operands = tile_operands(self.c, mma, cta_mma, self.tile_map)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        is_leader = operands[0].cluster().get_flat_coord(rank)[0] == 0

        smem = SmemAllocator()
        smem_operands = [operand.allocate(smem, stages) for operand in operands]
        self.epilogue.setup_smem(parameters, smem)
        pipeline = self.pipeline = MbarrierPipeline.allocate(smem, stages)
        acc_pipeline = self.acc_pipeline = MbarrierPipeline.allocate(smem, self.acc_stages)
        dealloc_mbarrier = smem.allocate_array(cutlass.Int64, 1)
        tmem_holder = smem.allocate_array(Int32, 1)
        scheduler_readers = 1 + ROWS // 32 + is_leader  # load, epilogue and, in a pair's leader CTA, MMA warps
        gather_warps = const_expr(GATHER_WARPS if self.c.gathers else 0)
        self.scheduler = TileScheduler(
            self.tile_map, scheduled, scheduler_readers + bool(self.operand_scales) + gather_warps, smem
        )
        if const_expr(self.operand_scales):
            scale_pipeline = MbarrierPipeline.allocate(smem, SCALE_STAGES)
            self.scale_pipeline = ScaleFactorPipeline(self.operand_scales, scales, self.scheduler, scale_pipeline, smem)
        if thread == 0:
            init_mbarriers(pipeline, 1 + gather_warps * self.pair, self.cluster.m // self.pair + self.cluster.n - 1)
            init_mbarriers(acc_pipeline, 1, ROWS * self.pair)
            if const_expr(self.pair == 2):
                cute.arch.mbarrier_init(dealloc_mbarrier, WARP_SIZE)
            if const_expr(self.operand_scales):
                init_mbarriers(scale_pipeline, WARP_SIZE, ROWS // WARP_SIZE)
            self.init_barriers(atoms)
        tmem = TmemAllocator(
            tmem_holder,
            barrier_for_retrieve=NamedBarrier(barrier_id=int(Barrier.POINTER), num_threads=32 * (MMA_WARP + 1)),
            is_two_cta=self.pair == 2,
            two_cta_tmem_dealloc_mbar_ptr=dealloc_mbarrier,
            initialize_mbarrier=False,
        )
        cute.arch.mbarrier_init_fence()
        cluster_sync(self.cluster, relaxed=True)

        if const_expr(self.scheduler.has_scheduler_warp):
            if warp == SCHEDULER_WARP:
                self.scheduler.run_scheduler_warp()
        if const_expr(self.operand_scales):
            if warp == self.scale_warp:
                self.scale_pipeline.run(self.tile_origin, self.c.tile[2], (0, 1))
        if const_expr(gather_warps):
            self.gather_producer = self.make_gather_producer(gathered, operands, smem_operands, rank, smem)
            if warp >= self.gather_warp:
                self.gather_producer.run(warp - self.gather_warp, self.cta_origin)
        tiled = [(x, s) for x, s in zip(operands, smem_operands, strict=True) if x.name not in self.c.gathers]
        tiled_operands, tiled_smem = [x for x, _ in tiled], [s for _, s in tiled]
        if warp == LOAD_WARP:
            self.load(tiled_operands, atoms, tensors, pointers, tiled_smem, rank, is_leader)
        if warp <= MMA_WARP:
            tmem.allocate(COLUMNS)
            tmem.wait_for_alloc()
            pointer = tmem.retrieve_ptr(Float32)
            shape = mma.partition_shape_C(self.c.tile[:2])
            count = self.acc_stages + bool(self.operand_scales)
            acc = cute.make_tensor(pointer, mma.make_fragment_C(cute.append(shape, count)).layout)
            if warp == MMA_WARP:
                if is_leader:
                    self.mma(mma, acc, smem_operands, rank)
            else:
                self.epilogue_warps(acc, rank, thread)
                tmem.relinquish_alloc_permit()
                tmem.free(pointer)  # after the last subtile's barrier, which follows all TMEM loads
        if const_expr(self.cluster.size > 1):
            cluster_sync(self.cluster)  # no CTA exits while others write to its shared memory or mbarriers

    set_kernel_name(kernel, "cudnn_gemm_sm100")

    def cta_origin(self, work: Any) -> tuple[Int32, Int32]:
        """The first row of A and of B in this CTA's shared memory. Each CTA of a pair holds half of B."""
        bm, _, _ = cute.arch.block_idx()
        row, column = self.tile_origin(work)
        return row, column + bm % self.pair * (self.c.tile[1] // self.pair)

    def leader(self, rank: Int32) -> Int32:
        """The rank of the leader CTA of this CTA's pair."""
        return rank - rank % self.pair

    def make_gather_producer(
        self,
        gathered: Any,
        operands: Sequence[TileOperand],
        smem_operands: Sequence[Any],
        rank: Int32,
        smem: Any,
    ) -> GatherProducer:
        """The producer of gathered operands; it arrives on the full barrier of the pair's leader CTA, which issues the
        MMAs.
        """
        c, leader = self.c, self.leader(rank)
        shapes = {"a": (ROWS, c.tile[2]), "b": (c.tile[1] // self.pair, c.tile[2])}
        gathered_operands = [(x, s) for x, s in zip(operands, smem_operands, strict=True) if x.name in c.gathers]
        sources = [
            CpAsyncGather(x.operand_index, self.tile_map.ragged_k, *tensors, s, shapes[x.name], x.smem_offset, smem)
            for (x, s), tensors in zip(gathered_operands, gathered, strict=True)
        ]
        return GatherProducer(
            tuple(sources), self.pipeline, self.scheduler, c.tile[2], lambda barrier: elect_arrive(barrier, leader)
        )

    @cute.jit
    def load(
        self,
        operands: cutlass.Constexpr[list],
        atoms: list,
        tensors: list,
        pointers: list,
        smem_operands: list,
        rank: Int32,
        is_leader: Any,
    ) -> None:
        """The load warp (producer): issues the TMA loads of all tiles."""
        c, pipeline = self.c, self.pipeline
        tx_bytes = const_expr(self.stage_bytes(c.gathers) * self.pair)
        bm, bn, _ = cute.arch.block_idx()
        stage, phase = Int32(0), Int32(1)  # a producer's first wait does not block
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            columns = (work.column * c.cluster[1] + bn) * c.tile[1]
            pair_origin = (work.row + bm // self.pair * c.tile[0], columns)
            cta_origin = (work.row + bm * ROWS, columns)
            batch_coords = self.tile_map.batch_coords(work.group)
            batch = [
                operand.batch_coord(x, batch_coords[operand.operand_index])
                for x, operand in zip(pointers, operands, strict=True)
            ]
            for k in cutlass.range(work.k_tiles(c.tile[2]), unroll=1):
                # (1) Wait until the stage is empty. The leader's full barrier expects the bytes of all TMA loads of the
                # pair.
                producer_acquire(pipeline, stage, phase, tx_bytes, is_leader)
                coord = KTileCoord(work, pair_origin, cta_origin, self.scheduler.problem(), work.k + k * c.tile[2])
                # (2) Issue the TMA loads of A, B and their scale factors.
                for i in cutlass.range_constexpr(len(atoms)):
                    for block in cutlass.range_constexpr(operands[i].blocks):
                        tile = operands[i].tile(tensors[i], coord, batch[i], block)
                        target, source, mask = operands[i].partition(atoms[i], tile, smem_operands[i], rank, block)
                        cute.copy(
                            atoms[i],
                            source,
                            target[None, stage],
                            tma_bar_ptr=pipeline.full + stage,
                            mcast_mask=mask if const_expr(self.cluster.size > 1) else None,
                        )
                stage, phase = advance(pipeline, stage, phase)
            cursor = self.scheduler.advance_to_next_work(cursor)
        producer_tail(pipeline, stage, phase)

    @cute.jit
    def mma(self, mma: cute.TiledMma, acc: cute.Tensor, smem_operands: list, rank: Int32) -> None:
        """The MMA warp of a pair's leader CTA: issues the MMAs of all tiles."""
        c, pipeline, acc_pipeline = self.c, self.pipeline, self.acc_pipeline
        pair_mask, consumer_mask = self.commit_masks(rank)
        stage, phase = Int32(0), Int32(0)
        acc_stage, acc_phase = Int32(0), Int32(1)
        tCrA, tCrB = mma.make_fragment_A(smem_operands[0]), mma.make_fragment_B(smem_operands[1])
        tmem_scales, copies = self.scale_factors(mma, acc, smem_operands)
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            k_tiles = work.k_tiles(c.tile[2])
            # A tile has one accumulator stage or, with promotion, one for each k tile.
            acc_stages, k_tiles_per_stage = (k_tiles, 1) if const_expr(self.operand_scales) else (1, k_tiles)
            for _ in cutlass.range(acc_stages, unroll=1):
                # (1) Wait for an empty accumulator stage.
                cute.arch.mbarrier_wait(acc_pipeline.empty + acc_stage, acc_phase)
                target = acc[None, None, None, acc_stage]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(k_tiles_per_stage, unroll=1):
                    # (2) Wait for the operands of a k tile; copy its scale factors to tensor memory (tcgen05.cp).
                    cute.arch.mbarrier_wait(pipeline.full + stage, phase)
                    for i in cutlass.range_constexpr(len(copies)):
                        copy, source, target_scales = copies[i]
                        cute.copy(copy, source[None, None, None, None, stage], target_scales)
                    # (3) Issue acc (+)= A B^T.
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        if const_expr(c.tensor_core_scale is not None):
                            mma.set(tcgen05.Field.SFA, tmem_scales[0][None, None, block].iterator)
                            mma.set(tcgen05.Field.SFB, tmem_scales[1][None, None, block].iterator)
                        k_block = (None, None, block, stage)
                        cute.gemm(mma, target, tCrA[k_block], tCrB[k_block], target)
                        mma.set(tcgen05.Field.ACCUMULATE, True)
                    # (4) tcgen05.commit: the operand stage is released when its MMAs are complete.
                    commit(pipeline.empty + stage, consumer_mask, self.group)
                    stage, phase = advance(pipeline, stage, phase)
                # (5) tcgen05.commit: the accumulator stage is full when its MMAs are complete.
                commit(acc_pipeline.full + acc_stage, pair_mask, self.group)
                acc_stage, acc_phase = advance(acc_pipeline, acc_stage, acc_phase)
            cursor = self.scheduler.advance_to_next_work(cursor)
        producer_tail(acc_pipeline, acc_stage, acc_phase)

    def commit_masks(self, rank: Int32) -> tuple[Any, Any]:
        """Multicast masks of tcgen05.commit: the CTAs of the pair, and those whose loads write to the stages that the
        pair's MMAs read.
        """
        if self.cluster.size == 1:
            return None, None
        m, n = self.cluster.m, self.cluster.n
        pair_mask = Int32((1 << self.pair) - 1) << self.leader(rank)
        row_mask = Int32(sum(((1 << self.pair) - 1) << (m * j) for j in range(n))) << self.leader(rank % m)
        column_mask = Int32((1 << m) - 1) << (rank // m * m)
        return pair_mask, row_mask | column_mask

    def scale_factors(
        self, mma: cute.TiledMma, acc: cute.Tensor, smem_operands: list
    ) -> tuple[list[cute.Tensor], list[Any]]:
        """SFA and SFB in tensor memory, behind the accumulators, and the copies from shared to tensor memory."""
        c = self.c
        if c.tensor_core_scale is None:
            return [], []
        element, vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
        tmem_scales, copies = [], []
        pointer = acc.iterator + self.acc_stages * c.tile[1]
        makers = (blockscaled.make_tmem_layout_sfa, blockscaled.make_tmem_layout_sfb)
        for make, source in zip(makers, smem_operands[2:], strict=True):
            one_stage = cute.slice_(source.layout, (None, None, None, 0))
            target = cute.make_tensor(cute.recast_ptr(pointer, dtype=element), make(mma, c.tile, vector, one_stage))
            pointer = pointer + tcgen05.find_tmem_tensor_col_offset(target)
            compact = cute.filter_zeros(target)
            copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), element), compact)
            thr_copy = copy.get_slice(0)
            descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, thr_copy.partition_S(cute.filter_zeros(source)))
            tmem_scales.append(target)
            copies.append((copy, descriptors, thr_copy.partition_D(compact)))
        return tmem_scales, copies

    @cute.jit
    def epilogue_warps(self, acc: cute.Tensor, rank: Int32, thread: Int32) -> None:
        """The four epilogue warps (consumers of accumulators): the epilogue of all tiles."""
        c, params, cta_coord = self.c, self.epilogue.params, cute.arch.block_idx()
        acc_pipeline, leader = self.acc_pipeline, self.leader(rank) if const_expr(self.pair == 2) else None
        copy, source = self.tmem_copy(acc, tcgen05.Ld32x32bOp, self.load_width(), thread)
        if const_expr(self.operand_scales):
            acc_copy, acc_source = self.tmem_copy(acc, tcgen05.Ld32x32bOp, CHUNK, thread)
            store_copy, store_target = self.tmem_copy(acc, tcgen05.St32x32bOp, CHUNK, thread)
        iteration = Int32(0)
        acc_stage, acc_phase, scale_stage, scale_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        cursor = self.scheduler.initial_work()
        while self.scheduler.is_valid(cursor):
            work = self.scheduler.work_tile(cursor)
            tile = self.tile(work, cta_coord, 0, iteration, thread, 0)
            self.epilogue.begin_tile(tile)
            if const_expr(self.operand_scales):
                # (1) Promotion: promoted += scale * acc for the accumulator of each k tile.
                promoted = params.fragment(Float32, c.tile[1])
                promoted.fill(0.0)
                for _ in cutlass.range(work.k_tiles(c.tile[2]), unroll=1):
                    cute.arch.mbarrier_wait(self.scale_pipeline.pipeline.full + scale_stage, scale_phase)
                    scale = self.row_scales(scale_stage, thread)
                    cute.arch.mbarrier_wait(acc_pipeline.full + acc_stage, acc_phase)
                    for chunk in cutlass.range_constexpr(c.tile[1] // CHUNK):
                        partial = params.fragment(Float32, CHUNK)
                        self.tmem_load(acc_copy, acc_source, [chunk], acc_stage, partial)
                        if const_expr(chunk == c.tile[1] // CHUNK - 1):
                            cute.arch.mbarrier_arrive(acc_pipeline.empty + acc_stage, leader)
                        for i in cutlass.range_constexpr(CHUNK):
                            column = const_expr(chunk * CHUNK + i)
                            promoted[column] = fma(partial[i], scale(column), promoted[column])
                    cute.arch.sync_warp()
                    elect_arrive(self.scale_pipeline.pipeline.empty + scale_stage)
                    acc_stage, acc_phase = advance(acc_pipeline, acc_stage, acc_phase)
                    scale_stage, scale_phase = advance(self.scale_pipeline.pipeline, scale_stage, scale_phase)
                # (2) Store the promoted row to tensor memory: the epilogue has no registers for it.
                for chunk in cutlass.range_constexpr(c.tile[1] // CHUNK):
                    values = cute.make_tensor(promoted.iterator + chunk * CHUNK, cute.make_layout(((CHUNK, 1), 1)))
                    cute.copy(store_copy, values, store_target[None, None, ((0, chunk), 0, 0, self.acc_stages)])
                cute.arch.fence_view_async_tmem_store()
            else:
                cute.arch.mbarrier_wait(acc_pipeline.full + acc_stage, acc_phase)
            # (3) Load each subtile from tensor memory and run the epilogue operations on it.
            subtile_passes = self.epilogue.subtile_passes()
            for step in cutlass.range_constexpr(len(subtile_passes)):
                subtile, process = subtile_passes[step]
                values = params.fragment(Float32, params.width)
                if const_expr(self.operand_scales):
                    self.tmem_load(copy, source, self.chunks(subtile), self.acc_stages, values)
                elif const_expr(self.tile_map.may_lack_k):
                    values.fill(0.0)  # no MMA wrote the accumulator of an empty group
                    if work.k < work.k_end:
                        self.tmem_load(copy, source, self.chunks(subtile), acc_stage, values)
                else:
                    self.tmem_load(copy, source, self.chunks(subtile), acc_stage, values)
                if const_expr(step == len(subtile_passes) - 1 and not self.operand_scales):
                    cute.arch.mbarrier_arrive(acc_pipeline.empty + acc_stage, leader)
                    acc_stage, acc_phase = advance(acc_pipeline, acc_stage, acc_phase)
                fragment = Fragment(values, params.width, params.layout)
                first_column = params.segment(subtile) * params.width // params.num_segments
                self.epilogue.zero_out_of_bounds(tile, first_column, fragment)
                process(tile, subtile, fragment)
            self.epilogue.end_tile(tile)
            iteration += 1
            cursor = self.scheduler.advance_to_next_work(cursor)
        self.epilogue.store_tail(thread)

    def tmem_copy(self, acc: cute.Tensor, operation: Any, width: int, thread: Int32) -> tuple[Any, cute.Tensor]:
        """The copy of ``width`` columns of a thread's row from or to tensor memory, and its partition of all
        accumulators.
        """
        atom = cute.make_copy_atom(operation(tcgen05.Repetition(width)), Float32)
        chunks = cute.zipped_divide(acc, ((ROWS, width),))  # ((rows, columns), (chunk, 1, 1, accumulator stage))
        copy = tcgen05.make_tmem_copy(atom, chunks[None, (0, 0, 0, 0)])
        thr_copy = copy.get_slice(thread)
        return copy, thr_copy.partition_S(chunks) if operation is tcgen05.Ld32x32bOp else thr_copy.partition_D(chunks)

    def load_width(self) -> int:
        """Columns that one tcgen05.ld loads: a power of two."""
        width = self.epilogue.params.width // self.epilogue.params.num_segments
        return GLU_BLOCK if self.half_stride else width & -width

    def chunks(self, subtile: int) -> list[int]:
        """The chunks of ``load_width`` accumulator columns that make up a subtile: those of its segments or, with
        ``half_stride``, blocks of 32 gate and 32 up columns in alternation.
        """
        params = self.epilogue.params
        if not self.half_stride:
            count = params.width // params.num_segments // self.load_width()
            segments = range(params.num_segments)
            return [params.segment(subtile, which) * count + i for which in segments for i in range(count)]
        pairs, stride = params.width // (2 * GLU_BLOCK), self.half_stride // GLU_BLOCK
        return [x for i in range(subtile * pairs, (subtile + 1) * pairs) for x in (i, i + stride)]

    def tmem_load(self, copy: Any, source: cute.Tensor, chunks: list[int], stage: Any, values: cute.Tensor) -> None:
        """Loads chunks of an accumulator stage from tensor memory."""
        count = cute.size(values) // len(chunks)
        for i, chunk in enumerate(chunks):
            flat = cute.make_tensor(values.iterator + i * count, cute.make_layout(((count, 1), 1)))
            cute.copy(copy, source[None, None, ((0, chunk), 0, 0, stage)], flat)
        cute.arch.fence_view_async_tmem_load()

    def row_scales(self, stage: Int32, thread: Int32) -> Any:
        """SFA * SFB for a row and the k tile in a stage: a function of the column."""
        granule = self.operand_scales[1].granule
        row = self.scale_pipeline.row(stage, thread)
        if granule == 1:  # too many values to hold in registers
            return lambda column: row * self.scale_pipeline.column(stage, column)
        per_granule = [row * self.scale_pipeline.column(stage, start) for start in range(0, self.c.tile[1], granule)]
        return lambda column: per_granule[column // granule]


class Projection(ViewedProjection):
    """The projection of queries around this GEMM."""

    gemm = Gemm
