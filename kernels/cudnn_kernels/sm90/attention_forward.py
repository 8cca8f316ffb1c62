"""Attention forward on Hopper: O = softmax(scale Q K^T + mask) V, a FlashAttention-3 style kernel.

Q (sq, d), K (sk, d), V (sk, dv), O (sq, dv) of every head; LSE (sq). A work tile is tile_m query rows of one head; the
main loop runs over n_blocks of tile_n keys, from the last to the first, so that masked n_blocks at the causal edge come
first.

Warps: warpgroup 0 is the producer: warp 0 issues the TMA loads of Q, K and V; for fp8, two more of its warps transpose
V in shared memory, as wgmma takes 8-bit operands K-major only. Warpgroups 1 to tile_m / 64 are MMA warpgroups, each
with 64 rows: S and O are in registers, P is a register operand (RS wgmma). setmaxnreg moves registers to the MMA
warpgroups.

Pipelines: K and V have ``stages`` buffers each (mbarriers full/empty: TMA transaction bytes / one arrival per MMA
warp), fp8 also has V^T. Q has one buffer and a full/empty mbarrier pair per MMA warpgroup. The producer loads the next
tile while the last n_blocks of the current one are computed; counts of n_blocks, not tiles, give stage and phase.

Software pipelining: an MMA warpgroup issues S(n) = Q K(n)^T and then O += P(n+1) V(n+1), and computes the softmax of
S(n) while the PV GEMM runs. Ping-pong named barriers let one warpgroup's softmax overlap the other's GEMMs.

Speculative maximum: unmasked n_blocks keep the running maximum and skip the row-max reduction; if a partial sum exceeds
its bound, the warpgroup recomputes S and takes the new maximum. O is then rescaled.

Scheduling: dense batches have persistent CTAs with a static schedule; varlen batches use a dynamic scheduler (atomic
counter), or one tile per CTA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import ForwardConfiguration, softmax
from cudnn_kernels.attention.forward import Forward, K, Params, TileInfo, V
from cudnn_kernels.pipeline import barriers, mbarrier_pipeline
from cudnn_kernels.pipeline.shared_memory import BARRIERS, SHARED_MEMORY
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.pipeline.wgmma import WgmmaRows, opaque
from cudnn_kernels.sm90.fp8_transpose import transpose_fp8
from cudnn_kernels.sm90.wgmma_utils import WGMMA_M, WgmmaMixin
from cudnn_kernels.threads import WARPGROUP_SIZE

NUM_REGS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
"""setmaxnreg of the producer and of the MMA warpgroups, for 1 to 3 MMA warpgroups."""
NUM_REGS_FP8 = {2: (40, 232), 3: (32, 160)}
"""The same with V-transpose warps."""
NUM_TRANSPOSE_WARPS = 2
WARPGROUP_BARRIER = 1  # named barrier of MMA warpgroup 0; warpgroup i uses ID + i
PINGPONG_BARRIER = 4  # named barrier: MMA warpgroup 0 may issue GEMMs; warpgroup i uses ID + i
SCHED_STAGES = 2  # stages of the scheduler pipeline


@dataclass
class SharedStorage:
    """Shared memory: Q and O by MMA warpgroup, the stages of K and V, and their mbarriers.

    ``sVt`` is V as the B operand of PV, (head_dim_v, keys, stages): a transposed view of sV, or for fp8 the buffers
    that the transpose warps write.
    """

    sQ: cute.Tensor
    sK: cute.Tensor
    sV: cute.Tensor
    sO: cute.Tensor
    sVt: cute.Tensor
    q_full: Any
    q_empty: Any
    k_pipeline: mbarrier_pipeline.MbarrierPipeline
    v_pipeline: mbarrier_pipeline.MbarrierPipeline
    vt_pipeline: mbarrier_pipeline.MbarrierPipeline


@dataclass
class MmaContext:
    """What an MMA warpgroup computes with: operand descriptors of shared memory, accumulators, softmax state.

    ``p_words`` is P in the MMA's type as 32-bit words: narrower values that live across iterations cost extra moves.
    """

    tSrQ: Any
    tSrK: Any
    tOrV: Any
    acc_S: cute.Tensor
    acc_O: cute.Tensor
    p_words: cute.Tensor
    softmax_state: softmax.OnlineSoftmax
    softcap_scale: Any
    wg_idx: Int32
    thread: Int32


class AttentionForward(WgmmaMixin, Forward):
    """The kernel for one :class:`ForwardConfiguration`."""

    rows, score_rows = WGMMA_M, WgmmaRows(slots=2)
    q_arrivals = 1  # at Q's full mbarrier, besides the TMA bytes
    consumer_release = staticmethod(barriers.elect_arrive)  # one arrival per warp

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        self.num_mma_warpgroups = self.tile_m // WGMMA_M
        self.num_mma_warps, self.threads = 4 * self.num_mma_warpgroups, WARPGROUP_SIZE * (1 + self.num_mma_warpgroups)
        self.lazy_rescale = configuration.head_dim_v > 192  # skips the rescale of O if all scales are 1
        self.num_transpose_warps = NUM_TRANSPOSE_WARPS if self.dtype.width == 8 else 0  # transpose V for fp8

    @property
    def pingpong(self) -> bool:
        """Whether MMA warpgroups alternate in issuing GEMMs (ping-pong): not where it was measured slower."""
        c = self.c
        unmasked_128 = (c.head_dim, c.head_dim_v) == (128, 128) and self.dtype.width == 16 and not (c.right or c.left)
        return self.num_mma_warpgroups > 1 and not (c.n_blocks_per_warpgroup or unmasked_128)

    @property
    def speculative_max(self) -> bool:
        """Whether unmasked n_blocks keep the old maximum. Not for fp8, as P has no headroom, and not for three MMA
        warpgroups with a softcap, which lack registers.
        """
        lacks_registers = self.num_mma_warpgroups > 2 and self.c.softcap
        return not (self.num_transpose_warps or self.c.compressed or lacks_registers)

    @property
    def persistent(self) -> bool:
        """Whether CTAs are persistent with static scheduling: tiles of varlen batches differ too much in cost."""
        return not self.c.varlen

    @property
    def separate_so(self) -> bool:
        """Whether O has its own shared memory; else an MMA warpgroup reuses its rows of sQ."""
        c = self.c
        operands = self.tile_bytes(self.tile_m, c.head_dim) + c.stages * self.tile_bytes(
            self.tile_n, c.head_dim + c.head_dim_v
        )
        if self.num_transpose_warps:
            operands += c.stages * self.tile_bytes(self.tile_n, c.head_dim_v)
        return operands + self.tile_m * c.head_dim_v * self.out_dtype.width // 8 <= SHARED_MEMORY - BARRIERS

    @cute.jit
    def body(self, params: Params) -> None:
        """Dispatches the warps to their roles."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        if thread == 0:
            self.prefetch_descriptors(params)
        storage = self.allocate_storage()
        num_regs_load, num_regs_mma = (NUM_REGS_FP8 if self.num_transpose_warps else NUM_REGS)[self.num_mma_warpgroups]
        if wg_idx == 0:
            cute.arch.setmaxregister_decrease(num_regs_load)
            if warp_index == 0:  # TMA producer
                self.for_each_tile(params, lambda *tile: self.load_tile(params, storage, *tile), True)
            if const_expr(self.num_transpose_warps > 0):
                if warp_index >= 4 - self.num_transpose_warps:
                    self.for_each_tile(params, lambda *tile: self.transpose_v(storage, *tile))
        else:
            cute.arch.setmaxregister_increase(num_regs_mma)
            self.mma(params, storage, wg_idx - 1, thread - WARPGROUP_SIZE * wg_idx)

    @cute.jit
    def allocate_storage(self) -> SharedStorage:
        """Allocates shared memory and initializes the mbarriers. All threads."""
        c, smem = self.c, SmemAllocator()
        thread, _, _ = cute.arch.thread_idx()
        shapes = {
            "q": (self.tile_m, c.head_dim, 1),
            "k": (self.tile_n, c.head_dim, c.stages),
            "v": (self.tile_n, c.head_dim_v, c.stages),
        }
        buffers = self.allocate_smem(
            smem, shapes | ({"vt": (c.head_dim_v, self.tile_n, c.stages)} if self.num_transpose_warps else {})
        )
        if const_expr(self.separate_so):
            buffers |= self.allocate_smem(smem, {"o": (self.tile_m, c.head_dim_v, 1)}, self.out_dtype)
        else:
            buffers["o"] = cute.make_tensor(buffers["q"].iterator, self.smem_layout(self.tile_m, c.head_dim_v).outer)
        sQ, sO = (
            cute.local_tile(buffers[x][None, None, 0], (WGMMA_M, width), (None, 0))
            for x, width in (("q", c.head_dim), ("o", c.head_dim_v))
        )
        q_full, q_empty = (smem.allocate_array(cutlass.Int64, self.num_mma_warpgroups) for _ in range(2))
        pipelines = [
            mbarrier_pipeline.MbarrierPipeline.allocate(smem, c.stages)
            for _ in range(3 if self.num_transpose_warps else 2)
        ]
        warps, transpose_warps = self.num_mma_warps, self.num_transpose_warps
        arrivals = (1, warps), (1, transpose_warps or warps), (transpose_warps, warps)  # of producers and consumers
        if const_expr(c.dynamic_scheduler):  # not a field of the storage: the DSL would carry it through loops
            self.sched_pipeline = (
                mbarrier_pipeline.MbarrierPipeline.allocate(smem, SCHED_STAGES),
                smem.allocate_tensor(Int32, cute.make_layout((1, SCHED_STAGES))),
            )
        if thread == 0:
            for wg_idx in cutlass.range_constexpr(self.num_mma_warpgroups):
                cute.arch.mbarrier_init(q_full + wg_idx, self.q_arrivals)
                cute.arch.mbarrier_init(q_empty + wg_idx, 4)
            for idx in cutlass.range_constexpr(len(pipelines)):
                mbarrier_pipeline.init_mbarriers(pipelines[idx], *arrivals[idx])
            if const_expr(c.dynamic_scheduler):
                mbarrier_pipeline.init_mbarriers(
                    self.sched_pipeline[0], 1, self.num_mma_warps + self.num_transpose_warps + 1
                )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sVt = buffers["vt"] if self.num_transpose_warps else transposed(buffers["v"])
        return SharedStorage(
            sQ, buffers["k"], buffers["v"], sO, sVt, q_full, q_empty, pipelines[0], pipelines[1], pipelines[-1]
        )

    @cute.jit
    def for_each_tile(self, params: Params, process: Any, is_scheduler: bool = False) -> None:
        """Calls ``process`` for each of the CTA's tiles with its info, the n_blocks done before, and Q's phase.

        With a dynamic scheduler, the producer warp (``is_scheduler``) takes the next tile from the atomic counter,
        while others compute the current one, and broadcasts it through the scheduler pipeline.
        """
        scheduler, n_blocks_done, q_phase = params.scheduler, Int32(0), Int32(0)
        if const_expr(self.c.dynamic_scheduler):
            iteration, tile_idx, num_tiles = Int32(0), Int32(0), scheduler.tile_order[1, 0] * scheduler.total_heads
            while tile_idx < num_tiles:
                (tile_idx,) = mbarrier_pipeline.fetch_work(
                    *self.sched_pipeline, scheduler.tile_order, iteration, (), is_scheduler
                )
                if tile_idx < num_tiles:
                    n_blocks_done, q_phase = self.process_tile(params, process, tile_idx, n_blocks_done, q_phase)
                iteration += 1
        else:
            for iteration in cutlass.range(scheduler.num_waves, unroll=1):
                n_blocks_done, q_phase = self.process_tile(params, process, iteration, n_blocks_done, q_phase)

    @cute.jit
    def process_tile(
        self, params: Params, process: Any, tile_idx: Int32, n_blocks_done: Int32, q_phase: Int32
    ) -> tuple[Int32, Int32]:
        """Processes a tile, if it exists; the n_blocks done and Q's phase after it."""
        m_block, head = self.tile_coord(params.scheduler, tile_idx)
        if m_block >= 0:
            info = self.tile_info(params.scheduler, m_block, head)
            if self.has_rows(info):
                process(info, n_blocks_done, q_phase)
                begin, _, _, end = self.n_block_range(info)
                n_blocks_done += end - begin
                q_phase ^= 1
        return n_blocks_done, q_phase

    @cute.jit
    def load_tile(
        self, params: Params, storage: SharedStorage, info: TileInfo, n_blocks_done: Int32, q_phase: Int32
    ) -> None:
        """Producer: issues the loads of a tile: K(last), Q, then in each iteration K(n) and V(n + 1)."""
        begin, _, _, end = self.n_block_range(info)
        for step in cutlass.range(end - begin + 1, unroll=1):
            if step < end - begin:
                self.load_n_block(params, storage.sK, storage.k_pipeline, info, K, n_blocks_done + step, end - 1 - step)
            if step == 0:
                self.load_q_tiles(params, storage, info, q_phase)
            else:
                self.load_n_block(params, storage.sV, storage.v_pipeline, info, V, n_blocks_done + step - 1, end - step)

    def load_q_tiles(self, params: Params, storage: SharedStorage, info: TileInfo, q_phase: Int32) -> None:
        """Issues the loads of each MMA warpgroup's rows of Q."""
        for wg_idx in range(self.num_mma_warpgroups):
            cute.arch.mbarrier_wait(storage.q_empty + wg_idx, q_phase ^ 1)
            self.load_q(params, storage.sQ, storage.q_full, info, wg_idx)

    def load_n_block(
        self,
        params: Params,
        smem_stages: cute.Tensor,
        pipeline: mbarrier_pipeline.MbarrierPipeline,
        info: TileInfo,
        operand: int,
        count: Int32,
        n_block: Int32,
    ) -> None:
        """Acquires a stage and issues the load of a block of K or V into it."""
        stage, phase = self.pipeline_state(count)
        mbarrier_pipeline.producer_acquire(
            pipeline, stage, phase ^ 1, self.tile_bytes(self.tile_n, self.tma_boxes[operand][1])
        )
        self.load_kv(params, smem_stages[None, None, stage], pipeline.full + stage, info, operand, n_block)

    @cute.jit
    def transpose_v(self, storage: SharedStorage, info: TileInfo, n_blocks_done: Int32, phase: Int32) -> None:
        """fp8: a transpose warp's part of V^T of each n_block of a tile."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) - (4 - self.num_transpose_warps)
        begin, _, _, end = self.n_block_range(info)
        for step in cutlass.range(end - begin, unroll=1):
            stage, phase = self.pipeline_state(n_blocks_done + step)
            cute.arch.mbarrier_wait(storage.v_pipeline.full + stage, phase)
            cute.arch.mbarrier_wait(storage.vt_pipeline.empty + stage, phase ^ 1)
            transpose_fp8(
                storage.sV[None, None, stage], storage.sVt[None, None, stage], warp_index, self.num_transpose_warps
            )
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self.consumer_release(storage.vt_pipeline.full + stage)
            self.consumer_release(storage.v_pipeline.empty + stage)

    def warpgroup_n_block_range(self, info: TileInfo, wg_idx: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """The n_blocks that an MMA warpgroup's 64 rows see."""
        if not self.c.n_blocks_per_warpgroup:
            return self.n_block_range(info)
        row = info.row + wg_idx * WGMMA_M
        return info.mask.n_block_range(row, cutlass.min(row + WGMMA_M, info.mask.seqlen_q) - 1, self.tile_n)

    def pipeline_state(self, count: Any) -> tuple[Any, Any]:
        """The stage and the phase of the ``count``-th n_block of the CTA."""
        count = Uint32(count) if self.c.loop_bounds_in_registers else count
        return Int32(count % self.c.stages), Int32(count // self.c.stages % 2)

    def n_block_range(self, info: TileInfo) -> tuple[Int32, Int32, Int32, Int32]:
        begin, full_begin, full_end, end = super().n_block_range(info)
        if self.c.loop_bounds_in_registers:  # opaque: else the compiler recomputes them in every iteration
            return opaque(begin), opaque(full_begin), opaque(full_end), opaque(end)
        return begin, full_begin, full_end, end

    @cute.jit
    def mma(self, params: Params, storage: SharedStorage, wg_idx: Int32, thread: Int32) -> None:
        """An MMA warpgroup: its 64 rows of each of the CTA's tiles."""
        c = self.c
        tSrQ = self.operand_a(storage.sQ[None, None, wg_idx], thread)
        tSrK = self.operand_b(storage.sK, thread)
        tOrV = self.operand_b(storage.sVt, thread, not self.num_transpose_warps)
        acc_S, acc_O = self.accumulator(self.tile_n), self.accumulator(c.head_dim_v)
        p_words = cute.make_rmem_tensor(self.tile_n * self.dtype.width // 64, Int32)
        ctx = MmaContext(
            tSrQ, tSrK, tOrV, acc_S, acc_O, p_words, self.make_softmax(params), params.softcap_scale, wg_idx, thread
        )
        self.pingpong_init(wg_idx, True)
        self.for_each_tile(params, lambda *tile: self.compute_tile(params, storage, ctx, *tile))
        self.pingpong_init(wg_idx, False)
        if const_expr(self.separate_so):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def compute_tile(
        self,
        params: Params,
        storage: SharedStorage,
        ctx: MmaContext,
        info: TileInfo,
        n_blocks_done: Int32,
        q_phase: Int32,
    ) -> None:
        """An MMA warpgroup's rows of one tile."""
        self.skip_n_blocks(storage, ctx, info, n_blocks_done, True)
        lse = self.mainloop(params, storage, ctx, info, n_blocks_done, q_phase)
        self.store_lse(params, info, info.row + ctx.wg_idx * WGMMA_M, ctx.thread, lse)
        self.store_o(params, storage, ctx, info)
        self.skip_n_blocks(storage, ctx, info, n_blocks_done, False)

    @cute.jit
    def skip_n_blocks(
        self, storage: SharedStorage, ctx: MmaContext, info: TileInfo, n_blocks_done: Int32, before: bool
    ) -> None:
        """Waits for and releases the tile's n_blocks that the warpgroup's rows do not see: those ``before`` its range
        or after it.
        """
        if const_expr(self.c.n_blocks_per_warpgroup):
            begin, _, _, end = self.n_block_range(info)
            wg_begin, _, _, wg_end = self.warpgroup_n_block_range(info, ctx.wg_idx)
            skip_end, skip_begin = (end, wg_end) if const_expr(before) else (wg_begin, begin)
            for n in cutlass.range(skip_end - 1, skip_begin - 1, -1, unroll=1):
                stage, phase = self.pipeline_state(n_blocks_done + end - 1 - n)
                for pipeline in (storage.k_pipeline, storage.v_pipeline):
                    cute.arch.mbarrier_wait(pipeline.full + stage, phase)
                    self.consumer_release(pipeline.empty + stage)

    @cute.jit
    def pingpong_init(self, wg_idx: Int32, is_start: bool) -> None:
        """Lets MMA warpgroup 0 issue first; in the end it takes the last warpgroup's arrival, so that the barrier is
        balanced.
        """
        if const_expr(self.pingpong):
            if const_expr(is_start):
                if wg_idx == self.num_mma_warpgroups - 1:
                    barriers.arrive(PINGPONG_BARRIER, 2 * WARPGROUP_SIZE)
            elif wg_idx == 0:
                barriers.sync(PINGPONG_BARRIER, 2 * WARPGROUP_SIZE)

    @cute.jit
    def mainloop(
        self,
        params: Params,
        storage: SharedStorage,
        ctx: MmaContext,
        info: TileInfo,
        n_blocks_done: Int32,
        q_phase: Int32,
    ) -> cute.Tensor:
        """O of the warpgroup's rows (in acc_O), and the LSE of a thread's rows."""
        # (1) Initialize m = -inf, l = 0, O = 0 and wait for Q.
        ctx, scale_output = self.descaled(params, ctx, info)
        self.reset_softmax(ctx.softmax_state, params, info, ctx.thread)
        ctx.acc_O.fill(0.0)
        last_count = n_blocks_done + self.n_block_range(info)[3] - 1  # count of n_block n is last_count - n
        begin, full_begin, full_end, end = self.warpgroup_n_block_range(info, ctx.wg_idx)
        cute.arch.mbarrier_wait(storage.q_full + ctx.wg_idx, q_phase)
        if end > begin:
            # (2) S and P of the last n_block, always masked: the sequence may end within it.
            self.first_n_block(storage, ctx, info, end - 1, last_count - end + 1)
            # (3) n_blocks at the causal (right) edge, masked.
            masked_end = end - 1
            if const_expr(self.c.right):  # without a right bound only the last n_block may be partial
                masked_end = cutlass.max(begin, cutlass.min(masked_end, full_end))
                for n in cutlass.range(end - 2, masked_end - 1, -1, unroll=1):
                    self.mainloop_step(storage, ctx, info, n, last_count - n, True)
            # (4) Full n_blocks, without a mask.
            full_stop = cutlass.max(begin, cutlass.min(masked_end, full_begin)) if const_expr(self.c.left) else begin
            for n in cutlass.range(masked_end - 1, full_stop - 1, -1, unroll=1):
                self.mainloop_step(storage, ctx, info, n, last_count - n, False)
            # (5) n_blocks at the left edge of the window, masked.
            if const_expr(self.c.left):
                for n in cutlass.range(full_stop - 1, begin - 1, -1, unroll=1):
                    self.mainloop_step(storage, ctx, info, n, last_count - n, True)
        # (6) Release Q, unless O overwrites it, and issue the last O += P V.
        if const_expr(self.separate_so):
            self.consumer_release(storage.q_empty + ctx.wg_idx)
        if end > begin:
            self.last_mma_pv(storage, ctx, last_count - begin)
        # (7) O /= l, LSE = m + log(l).
        row_results = [softmax.finalize(ctx.softmax_state, self.score_rows, slot) for slot in range(2)]
        self.rescale_o(ctx.acc_O, [inv_sum * scale_output for inv_sum, _ in row_results])
        lse = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            lse[slot] = row_results[slot][1]
        return lse

    def descaled(self, params: Params, ctx: MmaContext, info: TileInfo) -> tuple[MmaContext, Float32]:
        """The context and O's scale with the fp8 descales of the tile's sequence and head folded in."""
        if params.descales is None:
            return ctx, params.output_scale
        q, k, v = (x[info.batch, info.kv_head] for x in params.descales)
        scale_log2, softmax_state = params.scale_log2, ctx.softmax_state
        if ctx.softcap_scale is None:
            scale_log2 = cute.arch.fmax(scale_log2 * q * k, softmax.MIN_FP8_SCALE)
        else:
            ctx = replace(ctx, softcap_scale=ctx.softcap_scale * q * k)
        return replace(
            ctx,
            softmax_state=replace(
                softmax_state, scale_log2=scale_log2, fp8_max_offset=softmax.FP8_MAX_OFFSET / scale_log2
            ),
        ), params.output_scale * v

    def mma_qk(self, ctx: MmaContext, stage: Int32) -> None:
        """Issues S = Q K^T of a stage."""
        self.mma_ss(ctx.acc_S, ctx.tSrQ, ctx.tSrK, self.tile_n, self.c.head_dim, stage)

    def mma_pv(self, ctx: MmaContext, stage: Int32) -> None:
        """Issues O += P V of a stage."""
        tOrP = cute.recast_tensor(ctx.p_words, self.dtype)
        self.mma_rs(ctx.acc_O, tOrP, ctx.tOrV, self.c.head_dim_v, self.tile_n, stage)

    def first_n_block(
        self, storage: SharedStorage, ctx: MmaContext, info: TileInfo, n_block: Int32, count: Int32
    ) -> None:
        """S and P of the first n_block: no PV GEMM overlaps it."""
        stage, phase = self.pipeline_state(count)
        cute.arch.mbarrier_wait(storage.k_pipeline.full + stage, phase)
        self.mma_qk(ctx, stage)
        warpgroup.wait_group(0)
        self.consumer_release(storage.k_pipeline.empty + stage)
        self.softmax_step(ctx, info, n_block, True)
        self.convert_p(ctx)

    def softmax_step(self, ctx: MmaContext, info: TileInfo, n_block: Int32, masked: bool) -> Any:
        """Mask and online softmax of S; the row scales of O."""
        softmax.apply_softcap(ctx.acc_S, ctx.softcap_scale)
        if masked:
            self.apply_mask(ctx.acc_S, info, info.row + ctx.wg_idx * WGMMA_M, ctx.thread, n_block)
        rescale_threshold, chains = (
            (softmax.RESCALE_THRESHOLD, 2) if self.lazy_rescale and not self.num_transpose_warps else (0.0, 4)
        )
        return softmax.online_softmax(
            ctx.softmax_state, ctx.acc_S, self.score_rows, self.tile_n, rescale_threshold, chains
        )

    def mainloop_step(
        self, storage: SharedStorage, ctx: MmaContext, info: TileInfo, n_block: Int32, count: Int32, masked: bool
    ) -> None:
        """One iteration: S and P of n_block n, overlapped with O += P V of n_block n + 1."""
        (stage, phase), (v_stage, v_phase) = self.pipeline_state(count), self.pipeline_state(count - 1)
        # (1) Wait for K(n) and, with ping-pong, until the other warpgroups have issued their GEMMs.
        cute.arch.mbarrier_wait(storage.k_pipeline.full + stage, phase)
        if const_expr(self.pingpong):
            barriers.sync(PINGPONG_BARRIER + ctx.wg_idx, 2 * WARPGROUP_SIZE)
        # (2) Issue S(n) = Q K(n)^T.
        self.mma_qk(ctx, stage)
        # (3) Wait for V(n + 1) and issue O += P(n + 1) V(n + 1).
        cute.arch.mbarrier_wait(storage.vt_pipeline.full + v_stage, v_phase)
        self.mma_pv(ctx, v_stage)
        # (4) Let the next warpgroup issue: its GEMMs overlap this warpgroup's softmax.
        if const_expr(self.pingpong):
            next_wg = select_(ctx.wg_idx == self.num_mma_warpgroups - 1, Int32(0), ctx.wg_idx + 1)
            barriers.arrive(PINGPONG_BARRIER + next_wg, 2 * WARPGROUP_SIZE)
        # (5) Wait for S(n); O += P V stays in flight.
        warpgroup.wait_group(1)
        # (6) P(n) = exp2(scale S(n) - m): with a new row maximum m, or speculatively with the old one.
        speculative = const_expr(self.speculative_max and not masked)
        if const_expr(not speculative):
            self.consumer_release(storage.k_pipeline.empty + stage)
            row_scales = self.softmax_step(ctx, info, n_block, masked)
        else:
            row_sum_before = [ctx.softmax_state.row_sum[slot] for slot in range(2)]
            softmax.apply_softcap(ctx.acc_S, ctx.softcap_scale)
            in_range = softmax.speculative_softmax(ctx.softmax_state, ctx.acc_S, self.score_rows, self.tile_n)
            self.convert_p(ctx)
        # (7) Wait for O += P V and release V(n + 1).
        warpgroup.wait_group(0)
        self.consumer_release(storage.vt_pipeline.empty + v_stage)
        # (8) Recompute S(n) if the speculative maximum was too small; K(n) is held until then.
        if const_expr(speculative):
            self.recompute_if_any(
                in_range, ctx.wg_idx, lambda: self.recompute_with_max(ctx, info, n_block, stage, row_sum_before)
            )
            self.consumer_release(storage.k_pipeline.empty + stage)
            return
        # (9) Convert P(n) to the A operand of the next PV GEMM and rescale O to the new maximum.
        self.convert_p(ctx)
        if const_expr(self.lazy_rescale):
            self.lazy_rescale_o(ctx.acc_O, *row_scales)
        else:
            self.rescale_o(ctx.acc_O, row_scales)

    @cute.jit
    def recompute_if_any(self, in_range: Boolean, wg_idx: Int32, recompute: Any) -> None:
        """Calls ``recompute`` if a thread of the warpgroup is not ``in_range``: a barrier.red.or over the warpgroup."""
        if barriers.sync_or(WARPGROUP_BARRIER + wg_idx, WARPGROUP_SIZE, Int32(select_(in_range, Int32(0), Int32(1)))):
            recompute()

    def recompute_with_max(
        self, ctx: MmaContext, info: TileInfo, n_block: Int32, stage: Int32, row_sum_before: Sequence[Float32]
    ) -> None:
        """Recomputes S and its softmax with the true maximum; ``row_sum_before`` are the sums without the n_block."""
        self.mma_qk(ctx, stage)
        warpgroup.wait_group(0)
        for slot in range(2):
            ctx.softmax_state.row_sum[slot] = row_sum_before[slot]
        row_scales = self.softmax_step(ctx, info, n_block, False)
        self.convert_p(ctx)
        self.rescale_o(ctx.acc_O, row_scales)

    def last_mma_pv(self, storage: SharedStorage, ctx: MmaContext, count: Int32) -> None:
        """O += P V of the last n_block."""
        stage, phase = self.pipeline_state(count)
        cute.arch.mbarrier_wait(storage.vt_pipeline.full + stage, phase)
        self.mma_pv(ctx, stage)
        warpgroup.wait_group(0)
        self.consumer_release(storage.vt_pipeline.empty + stage)

    def convert_p(self, ctx: MmaContext) -> None:
        """Converts P to the MMA's type: an accumulator fragment in 16 bits is an A operand fragment, in the same
        register order.

        For fp8, a word holds two pairs of a row: registers are permuted, and V^T has its keys in the matching order.
        """
        ordered = ctx.acc_S
        if const_expr(self.num_transpose_warps > 0):
            ordered = cute.make_rmem_tensor(ctx.acc_S.shape, Float32)
            for i in range(cute.size(ordered)):
                ordered[i] = ctx.acc_S[i // 8 * 8 + i % 2 + i // 2 % 2 * 4 + i // 4 % 2 * 2]
        p_converted = cute.make_rmem_tensor(ctx.acc_S.shape, self.dtype)
        p_converted.store(ordered.load().to(self.dtype))
        words = cute.recast_tensor(p_converted, Int32)
        for i in range(cute.size(words)):
            ctx.p_words[i] = words[i]

    def rescale_o(self, acc_O: cute.Tensor, row_scales: Any) -> None:
        """O *= row_scale, row by row."""
        for slot in range(2):
            for i in self.score_rows.order(self.c.head_dim_v, slot):
                acc_O[i] = acc_O[i] * row_scales[slot]

    @cute.jit
    def lazy_rescale_o(self, acc_O: cute.Tensor, scale_0: Float32, scale_1: Float32) -> None:
        """Rescales O, unless all of a warp's scales are 1."""
        if cute.arch.vote_any_sync((scale_0 != 1.0) | (scale_1 != 1.0)):
            self.rescale_o(acc_O, [scale_0, scale_1])

    @cute.jit
    def store_o(self, params: Params, storage: SharedStorage, ctx: MmaContext, info: TileInfo) -> None:
        """Epilogue: converts O, writes it to shared memory (stmatrix) and issues the TMA store."""
        wg_idx, thread = ctx.wg_idx, ctx.thread
        tOrO = cute.make_rmem_tensor(ctx.acc_O.shape, self.out_dtype)
        tOrO.store(ctx.acc_O.load().to(self.out_dtype))
        sO = storage.sO[None, None, wg_idx]
        if const_expr(self.separate_so):  # the TMA store of the previous tile has read sO
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            barriers.sync(WARPGROUP_BARRIER + wg_idx, WARPGROUP_SIZE)
        self.wgmma(self.c.head_dim_v).r2s(tOrO, sO, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync(WARPGROUP_BARRIER + wg_idx, WARPGROUP_SIZE)
        if thread < 32:
            self.tma_store_o(params, sO, info, info.row + wg_idx * WGMMA_M)
            if const_expr(not self.separate_so):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(not self.separate_so):
            self.consumer_release(storage.q_empty + wg_idx)
