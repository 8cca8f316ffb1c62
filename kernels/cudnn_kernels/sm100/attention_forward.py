"""Attention forward on Blackwell: O = softmax(scale Q K^T + mask) V, FlashAttention-4 style.

Q (sq, d), K (sk, d), V (sk, dv), O (sq, dv) of every head; LSE (sq). A CTA has one or two q_tiles of 128 rows; n_blocks
of 128 keys run from the last to the first, so that masked n_blocks at the causal edge come first.

Tensor memory: S = Q K^T (128 x 128, float32) has 2 stages; P in 16 bits overwrites S and is the A operand of O += P V
(TS MMA); O stays in tensor memory until the end. With head_dim_v up to 128 there is room for two q_tiles, each with one
stage of S, and K and V are read once for both. Otherwise one q_tile alternates between the stages.

Warps: one softmax warpgroup per q_tile (a thread per row, lane of tensor memory: row max and sum need no shuffles), and
one more warpgroup with the MMA warp, which issues all tcgen05.mma, and the TMA load warp. The softmax warps also
rescale O: lazily, if the maximum has grown by more than a threshold, so no correction warpgroup is needed.

Pipelines: K and V come in chunks of 128 keys x 64 or 128 columns, which share one pipeline (full: TMA bytes; empty:
tcgen05.commit). Mbarriers: Q full by q_tile; by stage of S: S full (commit), P full (softmax warps), O full (commit of
PV). The MMA warp issues O += P V of an n_block, then S = Q K^T of the next n_block of the same stage: tcgen05.mma
executes in order, so no barrier has to signal that S's stage is free.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import ForwardConfiguration, softmax
from cudnn_kernels.attention.forward import Forward, K, Params, TileInfo, V
from cudnn_kernels.pipeline import barriers, mbarrier_pipeline
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.shared_memory import num_stages
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.tensor_memory import CHUNK, COLUMNS, LANES, TensorMemoryRows, Umma, commit
from cudnn_kernels.threads import WARPGROUP_SIZE

TILE_M = LANES  # rows of a q_tile
TILE_N = 128
S_STAGES = 2
NUM_REGS = {2: (72, 216)}  # setmaxnreg of MMA + load and of softmax warps, by q_tiles


@dataclass
class SharedStorage:
    """Tensor memory, and shared memory: Q by q_tile, chunks of K and V, O by q_tile (over Q, or separate).

    Mbarriers of P and O are per stage of S: with one for all PV MMAs of a q_tile, a wait for the last one could return
    while the one before still runs, since waits compare only the phase's parity.
    """

    tmem_ptr: cute.Pointer
    sQ: cute.Tensor
    sKV: cute.Tensor
    sO_ptr: cute.Pointer
    kv_pipeline: mbarrier_pipeline.MbarrierPipeline
    q_full: Any
    s_full: Any
    p_full: Any
    o_full: Any


class AttentionForward(Forward):
    """The kernel for one :class:`ForwardConfiguration`. Its tile is (128 or 256, 128)."""

    rows, score_rows = TILE_M, TensorMemoryRows()

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.num_q_tiles = self.tile_m // TILE_M
        self.qk_ahead = S_STAGES // self.num_q_tiles  # n_blocks whose S is issued before the first PV
        self.head_chunk = math.gcd(128, c.head_dim, c.head_dim_v)
        self.k_chunks, self.v_chunks = c.head_dim // self.head_chunk, c.head_dim_v // self.head_chunk
        self.tma_boxes[K] = self.tma_boxes[V] = (TILE_N, self.head_chunk)
        self.separate_so = self.out_dtype.width > self.dtype.width  # O is wider than Q, whose buffer it would reuse
        self.mma_warp, self.threads = self.num_q_tiles * WARPGROUP_SIZE // 32, (self.num_q_tiles + 1) * WARPGROUP_SIZE
        if (
            c.tile != (self.num_q_tiles * TILE_M, TILE_N)
            or self.num_q_tiles * c.head_dim_v > COLUMNS - S_STAGES * TILE_N
        ):
            raise ValueError(f"{c}: tiles are (128, 128) or, for head_v of at most 128, (256, 128)")

    def smem_layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        return sm100.make_smem_layout(OperandMajorMode.K, (rows, columns), dtype or self.dtype, stages)

    def num_stages(self) -> int:
        """Chunks of K and V that fit in shared memory with Q, and O."""
        o_bytes = self.tile_m * self.c.head_dim_v * self.out_dtype.width // 8 if self.separate_so else 0
        return num_stages(
            self.tile_bytes(self.tile_m, self.c.head_dim) + o_bytes, self.tile_bytes(TILE_N, self.head_chunk)
        )

    @cute.jit
    def body(self, params: Params) -> None:
        """Dispatches the warps to their roles."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        sQ, sKV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in (
                self.smem_layout(TILE_M, c.head_dim, self.num_q_tiles),
                self.smem_layout(TILE_N, self.head_chunk, self.num_stages()),
            )
        )
        sO_ptr = sQ.iterator
        if const_expr(self.separate_so):
            sO_ptr = smem.allocate_array(self.out_dtype, self.tile_m * c.head_dim_v, byte_alignment=1024)
        mbarrier_counts = {
            "q": (self.num_q_tiles, 1),
            "s": (S_STAGES, 1),
            "p": (S_STAGES, WARPGROUP_SIZE // 32),
            "o": (S_STAGES, 1),
        }
        mbarriers = barriers.allocate(smem, mbarrier_counts)
        kv_pipeline = mbarrier_pipeline.MbarrierPipeline.allocate(smem, self.num_stages())
        holder = tensor_memory.allocate(smem, warp)
        if thread == 0:
            mbarrier_pipeline.init_mbarriers(kv_pipeline, 1, 1)
            barriers.init_mbarriers(mbarriers, mbarrier_counts)
            self.prefetch_descriptors(params)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        info = self.tile_info(params.scheduler, *self.tile_coord(params.scheduler))
        begin, _, _, end = self.n_block_range(info)
        if not self.has_rows(info):
            end = begin
        tmem_ptr = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        storage = SharedStorage(tmem_ptr, sQ, sKV, sO_ptr, kv_pipeline, *(mbarriers[x] for x in "qspo"))
        if warp >= self.mma_warp:
            if const_expr(self.num_q_tiles in NUM_REGS):
                cute.arch.setmaxregister_decrease(NUM_REGS[self.num_q_tiles][0])
            if warp == self.mma_warp:
                self.mma(storage, end - begin)
            elif warp == self.mma_warp + 1:
                self.load(params, storage, info, begin, end)
        else:
            if const_expr(self.num_q_tiles in NUM_REGS):
                cute.arch.setmaxregister_increase(NUM_REGS[self.num_q_tiles][1])
            tile = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
            if self.has_rows(info):
                self.softmax_warpgroup(params, storage, info, tile, thread - tile * WARPGROUP_SIZE, begin, end)
            tensor_memory.free(tmem_ptr, warp, self.num_q_tiles * WARPGROUP_SIZE)

    @cute.jit
    def load(self, params: Params, storage: SharedStorage, info: TileInfo, begin: Int32, end: Int32) -> None:
        """Load warp: Q, then the chunks of K and V in the order in which the MMA warp uses them."""
        if end > begin:
            self.load_q_tiles(params, storage, info)
            chunks_done, blocks = Int32(0), end - begin
            for i in cutlass.range_constexpr(self.qk_ahead):
                if i < blocks:
                    chunks_done = self.load_chunks(params, storage, info, K, end - 1 - i, chunks_done)
            for block in cutlass.range(blocks, unroll=1):
                n_block = end - 1 - block
                chunks_done = self.load_chunks(params, storage, info, V, n_block, chunks_done)
                if n_block - self.qk_ahead >= begin:
                    n_block -= self.qk_ahead
                    chunks_done = self.load_chunks(params, storage, info, K, n_block, chunks_done)

    def load_q_tiles(self, params: Params, storage: SharedStorage, info: TileInfo) -> None:
        """Issues the TMA loads of Q."""
        for q_tile in range(self.num_q_tiles):
            self.load_q(params, storage.sQ, storage.q_full, info, q_tile)

    def load_chunks(
        self, params: Params, storage: SharedStorage, info: TileInfo, operand: int, n_block: Int32, chunks_done: Int32
    ) -> Int32:
        """Loads a block of K or V, chunk by chunk; the number of chunks done after it."""
        count = self.k_chunks if operand == K else self.v_chunks
        for chunk in range(count):
            stage = mbarrier_pipeline.producer_acquire_at(
                storage.kv_pipeline, chunks_done + chunk, self.tile_bytes(TILE_N, self.head_chunk)
            )
            self.load_kv(
                params, storage.sKV[None, None, stage], storage.kv_pipeline.full + stage, info, operand, n_block, chunk
            )
        return chunks_done + count

    @cute.jit
    def mma(self, storage: SharedStorage, blocks: Int32) -> None:
        """MMA warp: issues all tcgen05.mma."""
        chunks_done = Int32(0)
        for i in cutlass.range_constexpr(self.qk_ahead):
            if i < blocks:
                for q_tile in cutlass.range_constexpr(self.num_q_tiles):
                    if const_expr(i == 0):
                        cute.arch.mbarrier_wait(storage.q_full + q_tile, 0)
                    self.mma_qk(storage, q_tile, i + q_tile, chunks_done)
                chunks_done += self.k_chunks
        # For each n_block: (1) wait for P(n), (2) O += P(n) V(n), (3) S = Q K^T of the n_block that has the stage next.
        for block in cutlass.range(blocks, unroll=1):
            for q_tile in cutlass.range_constexpr(self.num_q_tiles):
                s_stage, phase = self.s_stage(block, q_tile)
                cute.arch.mbarrier_wait(storage.p_full + s_stage, phase)
                self.mma_pv(storage, q_tile, s_stage, chunks_done, block > 0)
                if block + self.qk_ahead < blocks:
                    self.mma_qk(storage, q_tile, s_stage, chunks_done + self.v_chunks)
            chunks_done += self.v_chunks
            if block + self.qk_ahead < blocks:
                chunks_done += self.k_chunks

    def s_stage(self, block: Int32, q_tile: Any) -> tuple[Any, Int32]:
        """The stage of S of a q_tile's ``block``-th n_block, and the phase of its mbarriers."""
        return (q_tile, block % 2) if self.num_q_tiles == S_STAGES else (block % S_STAGES, block // S_STAGES % 2)

    def mma_qk(self, storage: SharedStorage, q_tile: int, s_stage: Any, chunks_done: Int32) -> None:
        """Issues S = Q K^T of a q_tile and an n_block."""
        mma = Umma(self.dtype, TILE_N, self.head_chunk)
        tSrQ, tmem_S = mma.fragment_a(storage.sQ, q_tile), storage.tmem_ptr + s_stage * TILE_N
        for chunk in range(self.k_chunks):
            stage = mbarrier_pipeline.consumer_wait(storage.kv_pipeline, chunks_done + chunk)
            mma.issue(tmem_S, tSrQ, storage.sKV, stage, chunk > 0, chunk)
            if q_tile == self.num_q_tiles - 1:
                commit(storage.kv_pipeline.empty + stage)
        commit(storage.s_full + s_stage)

    def mma_pv(self, storage: SharedStorage, q_tile: int, s_stage: Any, chunks_done: Int32, accumulate: Any) -> None:
        """Issues O += P V of a q_tile and an n_block, or O = P V without ``accumulate``."""
        mma, tmem_o = Umma(self.dtype, self.head_chunk, TILE_N, a_in_tmem=True), self.tmem_o(storage, q_tile)
        tOrP = mma.tmem_fragment_a(storage.tmem_ptr + s_stage * TILE_N)
        for chunk in range(self.v_chunks):
            stage = mbarrier_pipeline.consumer_wait(storage.kv_pipeline, chunks_done + chunk)
            mma.issue(tmem_o + chunk * self.head_chunk, tOrP, storage.sKV, stage, accumulate)
            if q_tile == self.num_q_tiles - 1:
                commit(storage.kv_pipeline.empty + stage)
        commit(storage.o_full + s_stage)

    def tmem_o(self, storage: SharedStorage, q_tile: Any) -> cute.Pointer:
        """A q_tile's O in tensor memory, after the stages of S."""
        return storage.tmem_ptr + (S_STAGES * TILE_N + q_tile * self.c.head_dim_v)

    @cute.jit
    def softmax_warpgroup(
        self,
        params: Params,
        storage: SharedStorage,
        info: TileInfo,
        q_tile: Int32,
        thread: Int32,
        begin: Int32,
        end: Int32,
    ) -> None:
        """Softmax warpgroup of a q_tile: P of each n_block, then O and LSE."""
        row, tmem_o = info.row + q_tile * TILE_M, self.tmem_o(storage, q_tile)
        state = self.make_softmax(params)
        self.reset_softmax(state, params, info, thread)
        _, full_begin, full_end, _ = info.mask.n_block_range(
            row, cutlass.min(row + TILE_M, info.mask.seqlen_q) - 1, TILE_N
        )
        for block in cutlass.range(end - begin, unroll=1):
            n_block = end - 1 - block
            s_stage, phase = self.s_stage(block, q_tile)
            tmem_S = storage.tmem_ptr + s_stage * TILE_N
            # (1) Wait for S(n) = Q K(n)^T and load the thread's row.
            cute.arch.mbarrier_wait(storage.s_full + s_stage, phase)
            scores = cute.make_rmem_tensor(TILE_N, Float32)
            tensor_memory.load(tmem_S, thread, scores)
            cute.arch.fence_view_async_tmem_load()
            # (2) P(n) = exp2(scale S(n) - m), masked; converted to 16 bits over S(n).
            softmax.apply_softcap(scores, params.softcap_scale)
            if n_block >= full_end or n_block < full_begin:
                self.apply_mask(scores, info, row, thread, n_block)
            rescale_threshold = softmax.RESCALE_THRESHOLD if self.dtype.width == 16 else 0.0
            (row_scale,) = softmax.online_softmax(state, scores, self.score_rows, TILE_N, rescale_threshold)
            tensor_memory.store_as(tmem_S, thread, scores, self.dtype)
            # (3) Rescale O if a row of the warp has a new maximum: O += P(n + 1) V(n + 1) must be done.
            if block > 0:
                if cute.arch.vote_any_sync(row_scale != 1.0):
                    prev_stage, prev_phase = self.s_stage(block - 1, q_tile)
                    cute.arch.mbarrier_wait(storage.o_full + prev_stage, prev_phase)
                    self.rescale_o(tmem_o, row_scale, thread)
            # (4) Signal P(n): the MMA warp issues O += P(n) V(n), then the next S of this stage.
            cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            barriers.elect_arrive(storage.p_full + s_stage)
        # (5) O /= l, LSE = m + log(l), after the last O += P V.
        inv_sum, lse = softmax.finalize(state, self.score_rows, 0)
        if end > begin:
            last_stage, last_phase = self.s_stage(end - begin - 1, q_tile)
            cute.arch.mbarrier_wait(storage.o_full + last_stage, last_phase)
        self.store_lse(params, info, row, thread, [lse])
        self.store_o(params, storage, info, inv_sum * params.output_scale, q_tile, thread, end > begin)

    @cute.jit
    def store_o(
        self,
        params: Params,
        storage: SharedStorage,
        info: TileInfo,
        row_scale: Float32,
        q_tile: Int32,
        thread: Int32,
        has_keys: Boolean,
    ) -> None:
        """Epilogue: O times ``row_scale`` to shared memory, then TMA store; 0 for rows of a tile without keys."""
        c = self.c
        layout = self.smem_layout(TILE_M, c.head_dim_v, dtype=self.out_dtype)
        smem_ptr = storage.sO_ptr + q_tile * (TILE_M * (c.head_dim_v if self.separate_so else c.head_dim))
        smem_ptr_swizzled = cute.recast_ptr(smem_ptr, layout.inner, self.out_dtype)
        sO = cute.make_tensor(smem_ptr_swizzled, cute.slice_(layout.outer, (None, None, 0)))
        tensor_memory.tmem_to_smem(self.tmem_o(storage, q_tile), thread, row_scale, sO, has_keys)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync(Barrier.WARPGROUP + q_tile, WARPGROUP_SIZE)
        if thread < 32:
            self.tma_store_o(params, sO, info, info.row + q_tile * TILE_M)
            cute.arch.cp_async_bulk_wait_group(0)

    def rescale_o(self, tmem_o: cute.Pointer, row_scale: Float32, thread: Int32) -> None:
        """Multiplies a thread's row of O in tensor memory."""
        values = cute.make_rmem_tensor(CHUNK, Float32)
        for column in range(0, self.c.head_dim_v, CHUNK):
            tensor_memory.load(tmem_o + column, thread, values)
            cute.arch.fence_view_async_tmem_load()
            values.store(values.load() * row_scale)
            tensor_memory.store(tmem_o + column, thread, values)
