"""NSA top-k block selection on Hopper: the KV blocks with the largest softmax probability, for every query row.

    P = exp(scale Q K_cmp^T - LSE) of compressed keys, summed over the heads of a GQA group and the keys of a block;
    then the ``count`` blocks with the largest sums, ties to the lower block

The MMA's rows are the heads of query rows, padded to a power of 2 per query: a warp's 16 rows are all heads of 16, 8, 4
or 2 query rows or of one, or some heads of one. Warps: warps 0 to tile_m / 16 - 1 are MMA warps (4 per warpgroup), one
more warp issues the TMA loads of K into a pipeline of ``stages``. Q is loaded once, by all threads.

Per step of tile_n keys: (1) S = Q K^T, (2) P = exp2, (3) the sum over heads, in registers and by shuffles, to shared
memory, (4) the warps of a query synchronize (a named barrier per query), (5) the first of them sums the keys of each
block and inserts candidates that beat the list's last score: the sorted list is distributed over its lanes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import seqlen_info, softmax
from cudnn_kernels.attention.seqlen_info import SeqlenInfo
from cudnn_kernels.attention.sparse import NEWEST, TopKConfiguration
from cudnn_kernels.epilogue.fragment import reduce_scatter
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, init_mbarriers, producer_acquire
from cudnn_kernels.pipeline.tma import tma_load
from cudnn_kernels.pipeline.wgmma import WgmmaRows
from cudnn_kernels.sm90.wgmma_utils import WGMMA_M, WgmmaMixin
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

WARP_ROWS = 16  # MMA rows of a warp
VECTOR = 8  # 16-bit elements of a 16-byte load


@dataclass
class QueryTile:
    """A CTA's query rows, from ``row_begin`` of their sequence on, a head of K, and the batch index of tensors."""

    seqlen: SeqlenInfo
    row_begin: Int32
    head: Int32
    batch: Any


@dataclass
class TopKList:
    """The sorted top-k list of each of a warp's query rows: lane i has entry i, and i + 32."""

    scores: cute.Tensor
    blocks: cute.Tensor


class TopK(WgmmaMixin, Kernel):
    """The kernel for one :class:`TopKConfiguration`."""

    min_padded_group = 1

    def __init__(self, configuration: TopKConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.tile_m, self.tile_n = c.tile
        # Heads of a query row, padded to a power of 2.
        self.padded_group = max(1 << (c.group - 1).bit_length(), self.min_padded_group)
        self.rows_per_tile = self.tile_m // self.padded_group
        self.warps_per_query = -(-self.padded_group // WARP_ROWS)  # warps that share a query row
        self.queries_per_warp = WARP_ROWS * self.warps_per_query // self.padded_group
        self.sum_stages = 2 if self.warps_per_query > 1 else 1  # of the sums: one is read while the other is written
        self.entries_per_lane = -(-c.count // WARP_SIZE)  # list entries of a lane
        self.num_mma_warps = self.tile_m // WARP_ROWS
        self.keys_per_block = c.block // c.stride  # compressed keys of a block
        self.blocks_per_step = self.tile_n // self.keys_per_block
        self.acc_rows = WgmmaRows(slots=2)

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        q, k, scores, indices = (
            seqlen_info.as_sdhb(arguments[x], c.varlen) for x in ("q", "k", "topk_scores", "topk_indices")
        )
        lse = seqlen_info.lse_view(arguments["lse"], c.varlen, by_head=False)
        cu_seqlens_q, cu_seqlens_k = arguments.get("cum_seqlen_q"), arguments.get("cum_seqlen_k")
        batches = cu_seqlens_q.shape[0] - 1 if const_expr(c.varlen) else q.shape[3]
        tiles = seqlen_info.num_blocks(q.shape[0], batches, self.rows_per_tile, c.varlen)
        total_heads = c.key_heads if const_expr(c.varlen) else c.key_heads * q.shape[3]
        k_box = (self.tile_n, c.head_dim)
        layout = cute.slice_(self.smem_layout(*k_box), (None, None, 0))
        atom, mK = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), k, layout, k_box)
        self.kernel(
            atom,
            mK,
            q,
            lse,
            scores,
            indices,
            cu_seqlens_q,
            cu_seqlens_k,
            tiles,
            total_heads,
            arguments["scale_softmax"] * softmax.LOG2_E,
        ).launch(
            grid=[tiles * total_heads, 1, 1],
            block=[self.num_mma_warps * WARP_SIZE + WARP_SIZE, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=c.ctas,
            preferred_smem_carveout=100 if const_expr(c.ctas > 1) else None,
        )

    @cute.kernel
    def kernel(
        self,
        tma_atom: Any,
        mK: cute.Tensor,
        q: cute.Tensor,
        lse: cute.Tensor,
        scores: cute.Tensor,
        indices: cute.Tensor,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        tiles: Int32,
        total_heads: Int32,
        scale_log2: Float32,
    ) -> None:
        """Dispatches the warps to their roles. The last rows come first (LPT): they have the most candidates."""
        c, (thread, cta) = self.c, thread_block_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        allocator = SmemAllocator()
        smem = self.allocate_smem(
            allocator, {"q": (self.tile_m, c.head_dim, 1), "k": (self.tile_n, c.head_dim, c.stages)}
        )
        sQ, sK = smem["q"][None, None, 0], smem["k"]
        layout = cute.make_layout((self.tile_n, self.queries_per_warp, self.num_mma_warps, self.sum_stages))
        sums = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        k_pipeline = MbarrierPipeline.allocate(allocator, c.stages)
        if thread == 0:
            init_mbarriers(k_pipeline, 1, self.num_mma_warps)
        cute.arch.mbarrier_init_fence()
        tile, head = tiles - 1 - cta // total_heads, cta % total_heads
        batch, head = head // c.key_heads, head % c.key_heads
        seqlen = SeqlenInfo(batch, q.shape[0], mK.shape[0], Int32(0), Int32(0))
        if const_expr(c.varlen):
            batch, tile = seqlen_info.find_block(cu_seqlens_q, tile, self.rows_per_tile)
            seqlen = seqlen_info.varlen_seqlen_info(cu_seqlens_q, cu_seqlens_k, batch)
        q_tile = QueryTile(seqlen, tile * self.rows_per_tile, head, 0 if const_expr(c.varlen) else seqlen.batch)
        self.load_q_rows(q, sQ, q_tile, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        last_row = cutlass.min(q_tile.row_begin + self.rows_per_tile, seqlen.seqlen_q) - 1
        num_steps = cute.ceil_div(self.num_candidates(seqlen, last_row), self.blocks_per_step)
        num_steps = Int32(select_(q_tile.row_begin < seqlen.seqlen_q, num_steps, Int32(0)))
        if warp_index == self.num_mma_warps:
            self.load_k(
                tma_atom,
                cute.domain_offset((seqlen.offset_k, 0), mK[None, None, head, q_tile.batch]),
                sK,
                k_pipeline,
                num_steps,
            )
        else:
            self.score_and_select(
                lse, (scores, indices), sQ, sK, sums, k_pipeline, q_tile, scale_log2, num_steps, thread
            )

    set_kernel_name(kernel, "cudnn_attention_top_k")

    def num_candidates(self, seqlen: SeqlenInfo, q_row: Any) -> Int32:
        """One past a row's last candidate block: the newest two blocks are always selected. 0 or less: none."""
        return cutlass.min((q_row + 1) // self.c.block - 2, cute.ceil_div(seqlen.seqlen_k, self.keys_per_block))

    @cute.jit
    def load_q_rows(self, q: cute.Tensor, sQ: cute.Tensor, q_tile: QueryTile, thread: Int32) -> None:
        """Loads the query rows of all heads of the GQA group; rows that do not exist are 0."""
        c, seqlen = self.c, q_tile.seqlen
        columns, threads = c.head_dim // VECTOR, self.num_mma_warps * WARP_SIZE
        if thread < threads:
            for i in cutlass.range_constexpr(self.tile_m * columns // threads):
                vector = thread + i * threads
                row, column = vector // columns, vector % columns
                query, head_in_group = q_tile.row_begin + row // self.padded_group, row % self.padded_group
                values = cute.make_rmem_tensor(VECTOR, self.dtype)
                values.fill(0.0)
                if (query < seqlen.seqlen_q) & (head_in_group < c.group):
                    source = q[seqlen.offset_q + query, None, q_tile.head * c.group + head_in_group, q_tile.batch]
                    cute.autovec_copy(cute.local_tile(source, (VECTOR,), (column,)), values)
                cute.autovec_copy(values, cute.local_tile(sQ[row, None], (VECTOR,), (column,)))

    @cute.jit
    def load_k(
        self, tma_atom: Any, gK: cute.Tensor, sK: cute.Tensor, k_pipeline: MbarrierPipeline, num_steps: Int32
    ) -> None:
        """Load warp: K. A step has whole blocks, which may be fewer keys than the tile."""
        c = self.c
        for step in cutlass.range(num_steps, unroll=1):
            stage, phase = step % c.stages, step // c.stages % 2
            producer_acquire(k_pipeline, stage, phase ^ 1, self.tile_n * c.head_dim * self.dtype.width // 8)
            gK_step = cute.domain_offset((step * self.blocks_per_step * self.keys_per_block, 0), gK)
            tile = cute.local_tile(gK_step, (self.tile_n, c.head_dim), (0, 0))
            tma_load(tma_atom, tile, sK[None, None, stage], k_pipeline.full + stage)

    @cute.jit
    def score_and_select(
        self,
        lse: cute.Tensor,
        results: Any,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sums: cute.Tensor,
        k_pipeline: MbarrierPipeline,
        q_tile: QueryTile,
        scale_log2: Float32,
        num_steps: Int32,
        thread: Int32,
    ) -> None:
        """An MMA warpgroup: its 64 rows of the GEMM. ``results``: scores and blocks."""
        c, seqlen = self.c, q_tile.seqlen
        wg_idx, wg_thread = thread // WARPGROUP_SIZE, thread % WARPGROUP_SIZE
        warp_index, lane = cute.arch.make_warp_uniform(thread // WARP_SIZE), cute.arch.lane_idx()
        leader = warp_index // self.warps_per_query * self.warps_per_query
        tSrQ = self.operand_a(cute.local_tile(sQ, (WGMMA_M, c.head_dim), (wg_idx, 0)), wg_thread)
        tSrK, acc_S = self.operand_b(sK, wg_thread), self.accumulator(self.tile_n)
        neg_lse_log2 = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = wg_idx * WGMMA_M + self.acc_rows.row(wg_thread, slot)
            query, head_in_group = q_tile.row_begin + row // self.padded_group, row % self.padded_group
            neg_lse_log2[slot] = -Float32.inf
            if (query < seqlen.seqlen_q) & (head_in_group < c.group):
                neg_lse_log2[slot] = lse[seqlen.offset_q + query, q_tile.head * c.group + head_in_group, q_tile.batch]
                if const_expr(c.full_list):
                    neg_lse_log2[slot] = neg_lse_log2[slot] * -softmax.LOG2_E
        list_shape = (self.queries_per_warp, self.entries_per_lane)
        top_k = TopKList(cute.make_rmem_tensor(list_shape, Float32), cute.make_rmem_tensor(list_shape, Int32))
        top_k.scores.fill(-math.inf)
        top_k.blocks.fill(-1)
        query = q_tile.row_begin + warp_index // self.warps_per_query * self.queries_per_warp
        for step in cutlass.range(num_steps, unroll=1):
            stage, phase = step % c.stages, step // c.stages % 2
            # (1) S = Q K^T.
            cute.arch.mbarrier_wait(k_pipeline.full + stage, phase)
            self.mma_ss(acc_S, tSrQ, tSrK, self.tile_n, c.head_dim, stage)
            self.wait_mma(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(k_pipeline.empty + stage)
            # (2) P = exp2(scale S - LSE), (3) summed over heads, (4) complete for all warps of the query row.
            smem_sums = sums[None, None, None, step % self.sum_stages]
            orders = [self.acc_rows.order(self.tile_n, slot) for slot in range(2)]
            probs = [
                [cute.math.exp2(acc_S[i] * scale_log2 + neg_lse_log2[slot], fastmath=True) for i in order]
                for slot, order in enumerate(orders)
            ]
            self.reduce_heads(probs, smem_sums[None, None, warp_index], wg_thread)
            self.sync_query_warps(warp_index)
            # (5) Blocks of this step into the top-k list.
            if warp_index == leader:
                for slot in cutlass.range_constexpr(self.queries_per_warp):
                    self.update_top_k(top_k, slot, smem_sums, leader, seqlen, query + slot, step)
            cute.arch.sync_warp()
        for slot in cutlass.range_constexpr(self.queries_per_warp):
            self.store_list(top_k, slot, results, q_tile, query + slot, warp_index == leader)

    @cute.jit
    def store_list(
        self, top_k: TopKList, slot: int, results: Any, q_tile: QueryTile, query: Int32, is_leader: Any
    ) -> None:
        """Writes the list of a query row."""
        c, seqlen, lane, (scores, indices) = self.c, q_tile.seqlen, cute.arch.lane_idx(), results
        for list_half in cutlass.range_constexpr(self.entries_per_lane):
            entry = list_half * WARP_SIZE + lane
            if is_leader & (query < seqlen.seqlen_q) & (entry < c.count):
                scores[seqlen.offset_q + query, entry, q_tile.head, q_tile.batch] = top_k.scores[slot, list_half]
                indices[seqlen.offset_q + query, c.num_fixed + entry, q_tile.head, q_tile.batch] = top_k.blocks[
                    slot, list_half
                ]
        self.store_fixed_blocks(indices, q_tile, query, is_leader)

    @cute.jit
    def store_fixed_blocks(self, indices: cute.Tensor, q_tile: QueryTile, query: Int32, is_leader: Any) -> None:
        """Writes the first entries of a full list: block 0 and the newest blocks."""
        c, seqlen, lane = self.c, q_tile.seqlen, cute.arch.lane_idx()
        if is_leader & (query < seqlen.seqlen_q) & (lane < c.num_fixed):
            block = cutlass.max((query + 1) // c.block - (NEWEST - 1), 1) + lane - 1
            block = Int32(select_(block > query // c.block, Int32(-1), block))
            block = Int32(select_(lane == 0, Int32(0), block))
            indices[seqlen.offset_q + query, lane, q_tile.head, q_tile.batch] = block

    @cute.jit
    def sync_query_warps(self, warp_index: Int32) -> None:
        """Synchronizes the warps that share a query row."""
        if const_expr(self.warps_per_query > 1):
            cute.arch.barrier(
                barrier_id=1 + warp_index // self.warps_per_query, number_of_threads=self.warps_per_query * WARP_SIZE
            )
        else:
            cute.arch.sync_warp()

    def reduce_heads(self, probs: list[list[Float32]], sums: cute.Tensor, thread: Int32) -> None:
        """Sums a thread's probabilities over heads, to shared memory: (keys, query rows of the warp)."""
        lane = thread % WARP_SIZE
        if self.padded_group >= WARP_ROWS:
            probs = [[a + b for a, b in zip(*probs, strict=True)]]
        lanes_per_query = min(self.padded_group, WARP_ROWS // 2)  # quads of lanes that have heads of the same query row
        for slot, row_probs in enumerate(probs):
            reduced, start = reduce_scatter(row_probs, lambda a, b: a + b, 4, 4 * lanes_per_query)
            query = slot * (8 // lanes_per_query) + lane // 4 // lanes_per_query
            for i, value in enumerate(reduced):
                sums[self.acc_rows.column(thread, start + i), query] = value

    @cute.jit
    def update_top_k(
        self,
        top_k: TopKList,
        slot: int,
        sums: cute.Tensor,
        leader: Int32,
        seqlen: SeqlenInfo,
        query: Int32,
        step: Int32,
    ) -> None:
        """Inserts the blocks of a step into a query row's list."""
        lane = cute.arch.lane_idx()
        num_candidates = self.num_candidates(seqlen, query)
        for chunk in cutlass.range_constexpr(0, self.blocks_per_step, WARP_SIZE):
            block = chunk + lane
            block_idx, score = step * self.blocks_per_step + block, -Float32.inf
            if (block < self.blocks_per_step) & (block_idx > 0) & (block_idx < num_candidates):
                score = Float32(0.0)
                for x in cutlass.range_constexpr(self.keys_per_block):
                    if block_idx * self.keys_per_block + x < seqlen.seqlen_k:
                        for warp in cutlass.range_constexpr(self.warps_per_query):
                            score += sums[block * self.keys_per_block + x, slot, leader + warp]
            threshold = self.threshold(top_k, slot)
            better = cute.arch.vote_ballot_sync(score > threshold)
            while better != 0:
                source = cute.arch.popc((better & -better) - 1)  # the first lane, which has the lowest block
                self.insert(top_k, slot, cute.arch.shuffle_sync(score, source), block_idx - lane + source)
                threshold = self.threshold(top_k, slot)
                better = cute.arch.vote_ballot_sync((score > threshold) & (lane > source))

    def threshold(self, top_k: TopKList, slot: int) -> Float32:
        """The last score of a list."""
        list_half, lane = divmod(self.c.count - 1, WARP_SIZE)
        return cute.arch.shuffle_sync(top_k.scores[slot, list_half], lane)

    def insert(self, top_k: TopKList, slot: int, score: Float32, block: Int32) -> None:
        """Inserts a block after those with at least its score."""
        lane = cute.arch.lane_idx()
        for list_half in range(self.entries_per_lane - 1, -1, -1):
            scores, blocks = top_k.scores[slot, list_half], top_k.blocks[slot, list_half]
            before, block_before = (cute.arch.shuffle_sync_up(x, 1) for x in (scores, blocks))
            takes_new = before >= score
            if list_half:
                last_of_previous = (
                    cute.arch.shuffle_sync(x[slot, list_half - 1], WARP_SIZE - 1) for x in (top_k.scores, top_k.blocks)
                )
                last_score, last_block = last_of_previous
                before = Float32(select_(lane == 0, last_score, before))
                block_before = Int32(select_(lane == 0, last_block, block_before))
                takes_new = before >= score
            else:
                takes_new = (lane == 0) | takes_new
            keeps_entry = scores >= score
            top_k.scores[slot, list_half] = Float32(
                select_(keeps_entry, scores, Float32(select_(takes_new, score, before)))
            )
            top_k.blocks[slot, list_half] = Int32(
                select_(keeps_entry, blocks, Int32(select_(takes_new, block, block_before)))
            )
