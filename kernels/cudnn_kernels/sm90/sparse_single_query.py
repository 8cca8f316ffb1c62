"""NSA block-sparse attention of single queries on Hopper (swap AB): S^T = K Q^T, O^T = V^T P^T.

An MMA warpgroup whose queries seldom share blocks processes them one by one: keys (and elements of V) are the 64 rows
of the wgmma, and the heads of one query its columns (N = 8 or 16). So no MMA row is wasted on queries that did not
select the block. All threads of the warpgroup share a query's softmax; P^T and O^T go through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_

from cudnn_kernels.attention import softmax
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.mbarrier_pipeline import advance
from cudnn_kernels.pipeline.scale_factor_atoms import transposed
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.wgmma import MN, WarpgroupMma
from cudnn_kernels.sm90.attention_forward import WGMMA_M
from cudnn_kernels.sm90.sparse_block_union import TileInfo, UnionStorage
from cudnn_kernels.sm90.sparse_query_tile import WARPGROUP_BARRIER, SparseQueryTile, WarpgroupContext
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

VECTORS_PER_CHUNK = WGMMA_M // VECTOR  # 16-byte vectors of 64 elements


INITIAL_SHIFT = -1e30  # scaled maximum before the first score: the first rescale sets the sums to 0


@dataclass
class QueryState:
    """A query's O^T accumulator, and of each of a thread's heads the subtracted scaled maximum, the thread's sum of
    exponentials, and its largest score, if the kernel returns that.
    """

    acc: cute.Tensor
    scaled_max: cute.Tensor
    row_sum: cute.Tensor
    true_max: Any


class SparseSingleQuery(SparseQueryTile):
    """The single-query path of a query-tile kernel, for steps of 64 keys."""

    @property
    def num_row_stats(self) -> int:
        """One value of each warp for each MMA row."""
        return WARPGROUP_SIZE // WARP_SIZE if self.single_query else 0

    def extra_smem(self) -> dict[str, tuple[int, int, int]]:
        return {"p": (self.s.padded_group * self.num_mma_warpgroups, self.tile_n, 1)} if self.single_query else {}

    @cute.jit
    def prefer_single_query(self, union: UnionStorage, union_stage: Int32, wg_idx: cutlass.Constexpr[int]) -> Any:
        """One warp: averages, over the steps of a union that the warpgroup's rows selected, how many of its rows
        selected it.
        """
        num_steps, num_rows = Int32(0), Int32(0)
        count, row_masks, lane = Int32(union.counts[union_stage]), union.masks, cute.arch.lane_idx()
        for first_position in cutlass.range(0, count, WARP_SIZE * self.boxes_per_step, unroll=1):
            step_rows = Int32(0)
            for box_idx in cutlass.range_constexpr(self.boxes_per_step):
                position = first_position + lane * self.boxes_per_step + box_idx
                if position < count:
                    step_rows = step_rows | row_masks[position, union_stage]
            step_rows = self.warpgroup_rows(step_rows, wg_idx)
            num_steps += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(step_rows != 0)))
            for q_row in cutlass.range_constexpr(self.s.queries_per_warpgroup):
                num_rows += Int32(cute.arch.popc(cute.arch.vote_ballot_sync((step_rows >> q_row) & 1 == 1)))
        return Int32(select_(num_rows * 8 < num_steps * self.s.single_query_threshold, Int32(1), Int32(0)))

    @property
    def heads_per_thread(self) -> int:
        """Heads of a query that a thread has."""
        return self.s.padded_group // 4

    def qk_mma(self, num_queries: int = 1) -> WarpgroupMma:
        """The GEMM S^T = K Q^T of some queries."""
        return WarpgroupMma(self.dtype, self.s.padded_group * num_queries)

    def pv_mma(self) -> WarpgroupMma:
        """The GEMM O^T = V^T P^T."""
        return WarpgroupMma(self.dtype, self.s.padded_group, rows=self.s.head_dim_v, a=MN)

    def slot_head(self, thread: Int32, slot: int) -> Int32:
        """The head of a thread's slot."""
        return slot // 2 * 8 + thread % 4 * 2 + slot % 2

    def slot_indices(self, values: cute.Tensor, slot: int) -> list[int]:
        """Fragment indices of one of a thread's heads, of S^T or O^T."""
        per_head = 2 * self.heads_per_thread
        return [i for i in range(cute.size(values)) if i % per_head // 4 == slot // 2 and i % 2 == slot % 2]

    def sq_rows(self, ctx: WarpgroupContext, first_query: int, count: int) -> cute.Tensor:
        """Q of some of a warpgroup's queries in shared memory, (heads, head_dim)."""
        sQ_wg = cute.local_tile(ctx.smem["q"][None, None, 0], (WGMMA_M, self.s.head_dim), (ctx.wg_idx, 0))
        return cute.local_tile(sQ_wg, (self.s.padded_group * count, self.s.head_dim), (first_query // count, 0))

    def sp_warpgroup(self, ctx: WarpgroupContext) -> cute.Tensor:
        """P of a warpgroup's query in shared memory, (heads, keys)."""
        return cute.local_tile(ctx.smem["p"][None, None, 0], (self.s.padded_group, self.tile_n), (ctx.wg_idx, 0))

    def new_query(self) -> QueryState:
        """A query before its first block."""
        scaled_max, row_sum, true_max = (cute.make_rmem_tensor(self.heads_per_thread, Float32) for _ in range(3))
        query = QueryState(self.pv_mma().accumulator(), scaled_max, row_sum, None if self.s.lse else true_max)
        query.acc.fill(0.0)
        query.scaled_max.fill(INITIAL_SHIFT)
        query.row_sum.fill(0.0)
        true_max.fill(-math.inf)
        return query

    @cute.jit
    def compute_tile_single_query(
        self, ctx: WarpgroupContext, tile_idx: Int32, tile: TileInfo, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """One tile, from a stage and its phase on; those after it. Two adjacent queries that both selected a step share
        one QK GEMM.
        """
        s, smem, thread, kv_pipeline = self.s, ctx.smem, ctx.thread, ctx.storage.kv_pipeline
        mma_pv, sP = self.pv_mma(), self.sp_warpgroup(ctx)
        tOrVt, tOrP = mma_pv.fragment_a(transposed(smem["v"]), thread), mma_pv.fragment_b(sP, thread)
        queries = [self.new_query() for _ in range(s.queries_per_warpgroup)]
        stage, phase, has_step = self.next_step(ctx, stage, phase)
        while has_step:
            step_rows = self.rows_of_step(ctx, stage)
            for first_query in cutlass.range_constexpr(0, s.queries_per_warpgroup, 2):
                two = (step_rows >> first_query) & 3
                if two == 3:
                    self.single_query_step(ctx, tile, stage, queries, first_query, 2, tOrVt, tOrP, sP)
                else:
                    for query in cutlass.range_constexpr(first_query, first_query + 2):
                        if two == 1 << (query - first_query):
                            self.single_query_step(ctx, tile, stage, queries, query, 1, tOrVt, tOrP, sP)
            self.wait_mma(0)
            self.consumer_release(kv_pipeline.empty + stage)
            stage, phase, has_step = self.next_step(ctx, *advance(kv_pipeline, stage, phase))
        self.consumer_release(kv_pipeline.empty + stage)
        self.consumer_release(ctx.storage.q_empty + ctx.wg_idx)
        # The tile is recomputed: keeping it would cost registers.
        self.epilogue_single_query(ctx, self.tile_info(tile_idx, ctx.block_lists), queries)
        return advance(kv_pipeline, stage, phase)

    @cute.jit
    def single_query_step(
        self,
        ctx: WarpgroupContext,
        tile: TileInfo,
        stage: Int32,
        queries: Sequence[QueryState],
        first_query: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int],
        tOrVt: Any,
        tOrP: Any,
        sP: cute.Tensor,
    ) -> None:
        """A step of one query, or of two. The last PV GEMM is left in flight."""
        mma = self.qk_mma(count)
        tSrK = mma.fragment_a(ctx.smem["k"], ctx.thread)
        tSrQ = mma.fragment_b(self.sq_rows(ctx, first_query, count), ctx.thread)
        acc_S = mma.accumulator()
        mma.issue(acc_S, tSrK[None, None, None, stage], tSrQ, False)
        visible_ends = [self.visible_end(ctx, tile, stage, first_query + i) for i in range(count)]
        self.wait_mma(0)
        for i in cutlass.range_constexpr(count):
            acc_S_query = cute.make_tensor(
                acc_S.iterator + 2 * self.heads_per_thread * i, self.qk_mma().accumulator().layout
            )
            self.softmax_row(ctx, queries[first_query + i], acc_S_query, visible_ends[i], sP)
            self.pv_mma().issue(queries[first_query + i].acc, tOrVt[None, None, None, stage], tOrP, True)

    def rows_of_step(self, ctx: WarpgroupContext, stage: Int32) -> Int32:
        """The warpgroup's rows that selected any box of a step, as bits."""
        row_mask = Int32(0)
        for box_idx in range(self.boxes_per_step):
            row_mask = row_mask | ctx.storage.row_masks[box_idx, stage]
        return self.warpgroup_rows(cute.arch.make_warp_uniform(row_mask), ctx.wg_idx)

    def warpgroup_rows(self, row_mask: Int32, wg_idx: Any) -> Int32:
        """The warpgroup's bits of a row mask."""
        return (row_mask >> (wg_idx * self.s.queries_per_warpgroup)) & ((1 << self.s.queries_per_warpgroup) - 1)

    def visible_end(self, ctx: WarpgroupContext, tile: TileInfo, stage: Int32, query: int) -> Int32:
        """The end of a query's visible keys among the 16 keys of a warp, which are of one box."""
        q_row = ctx.wg_idx * self.s.queries_per_warpgroup + query
        box_idx = ctx.thread // WARP_SIZE * 16 // self.kv_box if self.boxes_per_step > 1 else 0
        selected = (ctx.storage.row_masks[box_idx, stage] >> q_row) & 1
        span_end = self.num_visible(tile, q_row) - ctx.storage.n_tiles[box_idx, stage] * self.kv_box
        return box_idx * self.kv_box + Int32(select_(selected == 1, span_end, Int32(0)))

    @cute.jit
    def softmax_row(
        self, ctx: WarpgroupContext, query: QueryState, acc_S: cute.Tensor, visible_end: Int32, sP: cute.Tensor
    ) -> None:
        """P of a query's scores, speculatively with the old maximum, and again with the new one if a sum exceeds its
        bound.
        """
        thread = ctx.thread
        row_sum = query.row_sum
        true_max = query.true_max
        warp_key_begin = ctx.thread // WARP_SIZE * 16
        if visible_end < warp_key_begin + 16:
            for i in cutlass.range_constexpr(cute.size(acc_S)):
                key = warp_key_begin + thread % WARP_SIZE // 4 + i // 2 % 2 * 8
                acc_S[i] = Float32(select_(key < visible_end, acc_S[i], -Float32.inf))
        local = cute.make_rmem_tensor(self.heads_per_thread, Float32)
        exp_S = cute.make_rmem_tensor(acc_S.shape, Float32)
        if const_expr(true_max is not None):
            for slot in cutlass.range_constexpr(self.heads_per_thread):
                true_max[slot] = cute.arch.fmax(true_max[slot], self.reduce_slot(acc_S, slot, cute.arch.fmax))
        self.exp2_row(ctx, query, acc_S, exp_S, local)
        largest_local = local[0]
        for slot in cutlass.range_constexpr(1, self.heads_per_thread):
            largest_local = cute.arch.fmax(largest_local, local[slot])
        self.wait_mma(0)
        if self.any_in_warpgroup(ctx.wg_idx, largest_local > softmax.MAX_SPECULATIVE_SUM):
            for slot in cutlass.range_constexpr(self.heads_per_thread):
                local[slot] = self.reduce_slot(acc_S, slot, cute.arch.fmax)
            self.rescale_row(ctx, query, local)
            self.exp2_row(ctx, query, acc_S, exp_S, local)
        for slot in cutlass.range_constexpr(self.heads_per_thread):
            row_sum[slot] = row_sum[slot] + local[slot]
        p_converted = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        p_converted.store(exp_S.load().to(self.dtype))
        self.store_transposed(p_converted, sP, thread)
        self.sync_warpgroup(ctx.wg_idx)

    def reduce_slot(self, values: cute.Tensor, slot: int, combine: Callable[[Any, Any], Any]) -> Float32:
        """Combines a thread's values of one of its heads."""
        first, second = (values[i] for i in self.slot_indices(values, slot))
        return combine(first, second)

    def exp2_row(
        self,
        ctx: WarpgroupContext,
        query: QueryState,
        acc_S: cute.Tensor,
        exp_S: cute.Tensor,
        partial_sums: cute.Tensor,
    ) -> None:
        """Exponentials of a query's scores, and the thread's sums of them."""
        for slot in range(self.heads_per_thread):
            for i in self.slot_indices(acc_S, slot):
                exp_S[i] = cute.math.exp2(acc_S[i] * ctx.scale - query.scaled_max[slot], fastmath=True)
            partial_sums[slot] = self.reduce_slot(exp_S, slot, lambda a, b: a + b)

    def any_in_warpgroup(self, wg_idx: Int32, condition: Boolean) -> Boolean:
        """Whether ``condition`` holds for any thread of the warpgroup: barrier.red.or."""
        result = cute.arch.inline_ptx(
            "{{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; bar.red.or.pred q, {$r1}, "
            f"{WARPGROUP_SIZE}, p; selp.s32 {{$w0}}, 1, 0, q; }}}}",
            write_only_types=[Int32],
            read_only_args=[Int32(select_(condition, Int32(1), Int32(0))), WARPGROUP_BARRIER + wg_idx],
        )
        return result != 0

    @cute.jit
    def rescale_row(self, ctx: WarpgroupContext, query: QueryState, new_max: cute.Tensor) -> None:
        """Raises the maxima of a query's heads, and rescales their sums and O^T."""
        scaled_max, row_sum, acc = query.scaled_max, query.row_sum, query.acc
        self.reduce_across_warps(ctx, [new_max], cute.arch.fmax)
        for slot in cutlass.range_constexpr(self.heads_per_thread):
            old_scaled, new_scaled = scaled_max[slot], new_max[slot] * ctx.scale
            scaled_max[slot] = Float32(
                select_(new_scaled - old_scaled > softmax.RESCALE_THRESHOLD, new_scaled, old_scaled)
            )
            row_scale = cute.math.exp2(old_scaled - scaled_max[slot], fastmath=True)
            row_sum[slot] = row_sum[slot] * row_scale
            for i in self.slot_indices(acc, slot):
                acc[i] = acc[i] * row_scale

    @cute.jit
    def reduce_across_warps(
        self, ctx: WarpgroupContext, values_of_queries: Sequence[cute.Tensor], combine: cutlass.Constexpr[Callable]
    ) -> None:
        """Reduces values of the heads of some queries over a warpgroup's threads, in place."""
        smem_stats, thread = ctx.row_stats, ctx.thread
        for query in cutlass.range_constexpr(len(values_of_queries)):
            for slot in cutlass.range_constexpr(self.heads_per_thread):
                value = values_of_queries[query][slot]
                for distance in (4, 8, 16):
                    value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
                if thread % WARP_SIZE < 4:
                    smem_stats[query * self.s.padded_group + self.slot_head(thread, slot), thread // WARP_SIZE] = value
        self.sync_warpgroup(ctx.wg_idx)
        for query in cutlass.range_constexpr(len(values_of_queries)):
            for slot in cutlass.range_constexpr(self.heads_per_thread):
                mma_row = query * self.s.padded_group + self.slot_head(thread, slot)
                value = smem_stats[mma_row, 0]
                for warp_idx in cutlass.range_constexpr(1, self.num_row_stats):
                    value = combine(value, smem_stats[mma_row, warp_idx])
                values_of_queries[query][slot] = value
        self.sync_warpgroup(ctx.wg_idx)  # all have read the values

    def store_transposed(self, values: cute.Tensor, smem_tile: cute.Tensor, thread: Int32) -> None:
        """Stores a fragment of S^T, or of 64 elements of O^T, as (heads, values) to shared memory."""
        self.qk_mma().r2s(values, transposed(smem_tile), thread, True)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def epilogue_single_query(self, ctx: WarpgroupContext, tile: TileInfo, queries: Sequence[QueryState]) -> None:
        """O and row values of the heads of a warpgroup's queries."""
        self.reduce_across_warps(ctx, [query.row_sum for query in queries], lambda a, b: a + b)
        if const_expr(not self.s.lse):
            self.reduce_across_warps(ctx, [query.true_max for query in queries], cute.arch.fmax)
        chunks = []
        for query_idx in cutlass.range_constexpr(len(queries)):
            query = queries[query_idx]
            if const_expr(ctx.tensors[-1] is not None):
                self.write_query_stats(ctx, tile, query_idx, query)
            acc, row_sum = query.acc, query.row_sum
            for slot in cutlass.range_constexpr(self.heads_per_thread):
                inv_sum = Float32(select_(row_sum[slot] == 0.0, Float32(1.0), 1.0 / row_sum[slot]))
                for i in self.slot_indices(acc, slot):
                    acc[i] = acc[i] * inv_sum
            for chunk in cutlass.range_constexpr(self.s.head_dim_v // WGMMA_M):
                values = cute.make_rmem_tensor(self.qk_mma().accumulator().shape, self.out_dtype)
                for i in cutlass.range_constexpr(cute.size(values)):
                    values[i] = acc[chunk * cute.size(values) + i].to(self.out_dtype)
                chunks.append(values)
        self.store_chunks(ctx, tile, chunks)

    def chunk_vectors(self, ctx: WarpgroupContext, tile: TileInfo, chunk_idx: int) -> list[Any]:
        """Of a chunk, 64 elements of all heads of a query, the vectors that a thread writes: row, head and vector in O,
        vector in the chunk, and whether they exist.
        """
        chunks_per_query, vectors_of_chunk = self.s.head_dim_v // WGMMA_M, []
        q_row = ctx.wg_idx * self.s.queries_per_warpgroup + chunk_idx // chunks_per_query
        for begin in range(0, self.s.padded_group * VECTORS_PER_CHUNK, WARPGROUP_SIZE):
            vector = begin + ctx.thread
            head = vector // VECTORS_PER_CHUNK
            column = chunk_idx % chunks_per_query * VECTORS_PER_CHUNK + vector % VECTORS_PER_CHUNK
            exists = (q_row < tile.num_rows) & (head < tile.num_heads)
            head = tile.head_begin + Int32(select_(exists, head, Int32(0)))
            vectors_of_chunk.append((Int32(select_(exists, tile.row + q_row, tile.row)), head, column, vector, exists))
        return vectors_of_chunk

    @cute.jit
    def stage_chunk(self, ctx: WarpgroupContext, converted: cute.Tensor) -> cute.Tensor:
        """A chunk in shared memory, (heads, elements), complete for all threads."""
        sO = cute.recast_tensor(self.sp_warpgroup(ctx), self.out_dtype)
        self.sync_warpgroup(ctx.wg_idx)
        self.store_transposed(converted, sO, ctx.thread)
        self.sync_warpgroup(ctx.wg_idx)
        return sO

    @cute.jit
    def store_chunks(self, ctx: WarpgroupContext, tile: TileInfo, chunks: Sequence[cute.Tensor]) -> None:
        """O, chunk by chunk."""
        o = ctx.tensors[0]
        for chunk_idx in cutlass.range_constexpr(len(chunks)):
            sO = self.stage_chunk(ctx, chunks[chunk_idx])
            for row, head, column, vector, exists in self.chunk_vectors(ctx, tile, chunk_idx):
                values = vectors.load(sO[vector // VECTORS_PER_CHUNK, None], vector % VECTORS_PER_CHUNK)
                if exists:
                    vectors.store(values.load(), o[row, head, None], column)

    @cute.jit
    def write_query_stats(
        self, ctx: WarpgroupContext, tile: TileInfo, query_idx: cutlass.Constexpr[int], query: QueryState
    ) -> None:
        """LSE, or sums and maxima, of a query's heads."""
        q_row = ctx.wg_idx * self.s.queries_per_warpgroup + query_idx
        for slot in cutlass.range_constexpr(self.heads_per_thread):
            head = self.slot_head(ctx.thread, slot)
            if (ctx.thread < 4) & (q_row < tile.num_rows) & (head < tile.num_heads):
                true_max = None if const_expr(query.true_max is None) else query.true_max[slot] * ctx.scale
                coord, tensors = (tile.row + q_row, tile.head_begin + head), ctx.tensors[-len(self.s.sums) :]
                self.write_stats(tensors, coord, query.row_sum[slot], query.scaled_max[slot], true_max)

    def write_stats(
        self, tensors: Sequence[cute.Tensor], coord: Any, row_sum: Float32, scaled_max: Float32, true_max: Any
    ) -> None:
        """The LSE of a head; or the sum of exponentials relative to the true maximum, and that maximum. Arguments are
        base-2 logarithms, results natural ones.
        """
        if true_max is None:
            row_lse = (scaled_max + cute.math.log2(row_sum, fastmath=True)) * math.log(2)
            tensors[0][coord] = Float32(select_(row_sum == 0.0, Float32(-math.inf), row_lse))
        else:
            rescaled_sum = row_sum * cute.math.exp2(scaled_max - true_max, fastmath=True)
            tensors[0][coord] = Float32(select_(row_sum == 0.0, row_sum, rescaled_sum))
            tensors[1][coord] = true_max * math.log(2)
