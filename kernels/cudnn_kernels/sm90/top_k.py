"""The blocks of keys with the largest probabilities, for every row, on Hopper.

A row of the product is a row of one head of Q. The heads that share a head of K follow each other, padded to a power of
two, so that a warp's 16 rows of the accumulator are all heads of 16, 8, 4, 2 rows of Q, or of one, or some of one's.
A warp adds up the probabilities of heads, in registers and by shuffles, and those of a block's keys, through shared
memory, where a team of warps that share a row of Q meets. The first of a team keeps the best blocks of each row of Q in
its lanes, sorted: few candidates ever beat the least of them.
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

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.attention.sequences import Sequence
from cudnn_kernels.attention.sparse import NEWEST, TopKConfiguration
from cudnn_kernels.epilogue.fragment import reduce_scatter
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.copy import fetch
from cudnn_kernels.pipeline.ring import Ring, expect, initialise
from cudnn_kernels.pipeline.wgmma import WgmmaRows
from cudnn_kernels.sm90.attention_forward import GROUP
from cudnn_kernels.sm90.warpgroup_products import ROWS, WarpgroupProducts

WARP = 32
WARP_ROWS = 16  # of an accumulator
VECTOR = 8  # elements of 16 bits that a thread loads at once


@dataclass
class Rows:
    """A CTA's rows of Q, from ``first`` of their sequence on, a head of K, and the index of tensors' last dimension."""

    sequence: Sequence
    first: Int32
    head: Int32
    batch: Any


@dataclass
class Best:
    """The best blocks so far of each of a warp's rows of Q: lane i has the i-th best score and its block, and those 32
    places behind.
    """

    scores: cute.Tensor
    blocks: cute.Tensor


class TopK(WarpgroupProducts, Kernel):
    """The kernel for one :class:`TopKConfiguration`."""

    least_padded = 1

    def __init__(self, configuration: TopKConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.tile_m, self.tile_n = c.tile
        self.padded = max(1 << (c.group - 1).bit_length(), self.least_padded)  # heads of a row of Q, and some not there
        self.queries = self.tile_m // self.padded
        self.team = -(-self.padded // WARP_ROWS)  # warps that share a row of Q
        self.warp_queries = WARP_ROWS * self.team // self.padded
        self.sum_buffers = 2 if self.team > 1 else 1  # of sums: one is read while the other is written
        self.halves = -(-c.count // WARP)  # places of a list that a lane has
        self.warps = self.tile_m // WARP_ROWS
        self.share = c.block // c.stride  # keys of a block
        self.blocks = self.tile_n // self.share  # of a step
        self.rows = WgmmaRows(slots=2)

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        q, k, scores, indices = (
            sequences.matrix(given[x], c.packed) for x in ("q", "k", "topk_scores", "topk_indices")
        )
        lse = sequences.rows(given["lse"], c.packed, by_head=False)
        offsets_q, offsets_k = given.get("cum_seqlen_q"), given.get("cum_seqlen_k")
        batches = offsets_q.shape[0] - 1 if const_expr(c.packed) else q.shape[3]
        tiles = sequences.blocks_of(q.shape[0], batches, self.queries, c.packed)
        heads = c.key_heads if const_expr(c.packed) else c.key_heads * q.shape[3]
        box = (self.tile_n, c.head)
        layout = cute.slice_(self.layout(*box), (None, None, 0))
        atom, mK = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), k, layout, box)
        self.kernel(
            atom,
            mK,
            q,
            lse,
            scores,
            indices,
            offsets_q,
            offsets_k,
            tiles,
            heads,
            given["scale_softmax"] * softmax.LOG2_E,
        ).launch(
            grid=[tiles * heads, 1, 1],
            block=[self.warps * WARP + WARP, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=c.ctas,
            preferred_smem_carveout=100 if const_expr(c.ctas > 1) else None,
        )

    @cute.kernel
    def kernel(
        self,
        atom: Any,
        mK: cute.Tensor,
        q: cute.Tensor,
        lse: cute.Tensor,
        scores: cute.Tensor,
        indices: cute.Tensor,
        offsets_q: Any,
        offsets_k: Any,
        tiles: Int32,
        all_heads: Int32,
        scale: Float32,
    ) -> None:
        """The roles of the warps. The last rows come first: they have the most candidates."""
        c, (thread, index) = self.c, here()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        buffers = self.buffers(smem, {"q": (self.tile_m, c.head, 1), "k": (self.tile_n, c.head, c.stages)})
        sQ, sK = buffers["q"][None, None, 0], buffers["k"]
        layout = cute.make_layout((self.tile_n, self.warp_queries, self.warps, self.sum_buffers))
        sums = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        ring = Ring.allocate(smem, c.stages)
        if thread == 0:
            initialise(ring, 1, self.warps)
        cute.arch.mbarrier_init_fence()
        tile, head = tiles - 1 - index // all_heads, index % all_heads
        batch, head = head // c.key_heads, head % c.key_heads
        s = Sequence(batch, q.shape[0], mK.shape[0], Int32(0), Int32(0))
        if const_expr(c.packed):
            batch, tile = sequences.find_block(offsets_q, tile, self.queries)
            s = sequences.packed(offsets_q, offsets_k, batch)
        rows = Rows(s, tile * self.queries, head, 0 if const_expr(c.packed) else s.batch)
        self.load_queries(q, sQ, rows, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        last = cutlass.min(rows.first + self.queries, s.queries) - 1
        steps = cute.ceil_div(self.candidates(s, last), self.blocks)
        steps = Int32(select_(rows.first < s.queries, steps, Int32(0)))
        if warp_index == self.warps:
            self.fetch(atom, cute.domain_offset((s.first_key, 0), mK[None, None, head, rows.batch]), sK, ring, steps)
        else:
            self.choose(lse, (scores, indices), sQ, sK, sums, ring, rows, scale, steps, thread)

    name(kernel, "cudnn_attention_top_k")

    def candidates(self, s: Sequence, query: Any) -> Int32:
        """One more than a row's last candidate: not the newest two blocks, and none without a key; 0 or less: none."""
        return cutlass.min((query + 1) // self.c.block - 2, cute.ceil_div(s.keys, self.share))

    @cute.jit
    def load_queries(self, q: cute.Tensor, sQ: cute.Tensor, rows: Rows, thread: Int32) -> None:
        """The rows of Q of all heads that share one of K; zeros where there are none."""
        c, s = self.c, rows.sequence
        columns, threads = c.head // VECTOR, self.warps * WARP
        if thread < threads:
            for i in cutlass.range_constexpr(self.tile_m * columns // threads):
                vector = thread + i * threads
                row, column = vector // columns, vector % columns
                query, member = rows.first + row // self.padded, row % self.padded
                values = cute.make_rmem_tensor(VECTOR, self.dtype)
                values.fill(0.0)
                if (query < s.queries) & (member < c.group):
                    source = q[s.first_query + query, None, rows.head * c.group + member, rows.batch]
                    cute.autovec_copy(cute.local_tile(source, (VECTOR,), (column,)), values)
                cute.autovec_copy(values, cute.local_tile(sQ[row, None], (VECTOR,), (column,)))

    @cute.jit
    def fetch(self, atom: Any, gK: cute.Tensor, sK: cute.Tensor, ring: Ring, steps: Int32) -> None:
        """One warp: fetches K. A step has whole blocks, which may be fewer keys than the tile."""
        c = self.c
        for step in cutlass.range(steps, unroll=1):
            stage, phase = step % c.stages, step // c.stages % 2
            expect(ring, stage, phase ^ 1, self.tile_n * c.head * self.dtype.width // 8)
            keys = cute.domain_offset((step * self.blocks * self.share, 0), gK)
            tile = cute.local_tile(keys, (self.tile_n, c.head), (0, 0))
            fetch(atom, tile, sK[None, None, stage], ring.full + stage)

    @cute.jit
    def choose(
        self,
        lse: cute.Tensor,
        results: Any,
        sQ: cute.Tensor,
        sK: cute.Tensor,
        sums: cute.Tensor,
        ring: Ring,
        rows: Rows,
        scale: Float32,
        steps: Int32,
        thread: Int32,
    ) -> None:
        """A warpgroup: its 64 rows of the product. ``results``: scores and blocks."""
        c, s = self.c, rows.sequence
        group, member = thread // GROUP, thread % GROUP
        warp_index, lane = cute.arch.make_warp_uniform(thread // WARP), cute.arch.lane_idx()
        leader = warp_index // self.team * self.team
        left = self.left(cute.local_tile(sQ, (ROWS, c.head), (group, 0)), member)
        right, acc = self.right(sK, member), self.accumulator(self.tile_n)
        shift = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = group * ROWS + self.rows.row(member, slot)
            query, index = rows.first + row // self.padded, row % self.padded
            shift[slot] = -Float32.inf
            if (query < s.queries) & (index < c.group):
                shift[slot] = lse[s.first_query + query, rows.head * c.group + index, rows.batch]
                if const_expr(c.whole):
                    shift[slot] = shift[slot] * -softmax.LOG2_E
        places = (self.warp_queries, self.halves)
        best = Best(cute.make_rmem_tensor(places, Float32), cute.make_rmem_tensor(places, Int32))
        best.scores.fill(-math.inf)
        best.blocks.fill(-1)
        query = rows.first + warp_index // self.team * self.warp_queries
        for step in cutlass.range(steps, unroll=1):
            stage, phase = step % c.stages, step // c.stages % 2
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            self.multiply_shared(acc, left, right, self.tile_n, c.head, stage)
            self.finish(0)
            if lane == 0:
                cute.arch.mbarrier_arrive(ring.empty + stage)
            shared = sums[None, None, None, step % self.sum_buffers]
            orders = [self.rows.order(self.tile_n, slot) for slot in range(2)]
            values = [
                [cute.math.exp2(acc[i] * scale + shift[slot], fastmath=True) for i in order]
                for slot, order in enumerate(orders)
            ]
            self.add_heads(values, shared[None, None, warp_index], member)
            self.meet(warp_index)
            if warp_index == leader:
                for slot in cutlass.range_constexpr(self.warp_queries):
                    self.compare(best, slot, shared, leader, s, query + slot, step)
            cute.arch.sync_warp()
        for slot in cutlass.range_constexpr(self.warp_queries):
            self.write(best, slot, results, rows, query + slot, warp_index == leader)

    @cute.jit
    def write(self, best: Best, slot: int, results: Any, rows: Rows, query: Int32, leads: Any) -> None:
        """The list of a row of Q."""
        c, s, lane, (scores, indices) = self.c, rows.sequence, cute.arch.lane_idx(), results
        for half in cutlass.range_constexpr(self.halves):
            listed = half * WARP + lane
            if leads & (query < s.queries) & (listed < c.count):
                scores[s.first_query + query, listed, rows.head, rows.batch] = best.scores[slot, half]
                indices[s.first_query + query, c.before + listed, rows.head, rows.batch] = best.blocks[slot, half]
        self.write_always(indices, rows, query, leads)

    @cute.jit
    def write_always(self, indices: cute.Tensor, rows: Rows, query: Int32, leads: Any) -> None:
        """The first blocks of a whole list, which all rows have."""
        c, s, lane = self.c, rows.sequence, cute.arch.lane_idx()
        if leads & (query < s.queries) & (lane < c.before):
            block = cutlass.max((query + 1) // c.block - (NEWEST - 1), 1) + lane - 1
            block = Int32(select_(block > query // c.block, Int32(-1), block))
            block = Int32(select_(lane == 0, Int32(0), block))
            indices[s.first_query + query, lane, rows.head, rows.batch] = block

    @cute.jit
    def meet(self, warp_index: Int32) -> None:
        """Waits for the team."""
        if const_expr(self.team > 1):
            cute.arch.barrier(barrier_id=1 + warp_index // self.team, number_of_threads=self.team * WARP)
        else:
            cute.arch.sync_warp()

    def add_heads(self, values: list[list[Float32]], sums: cute.Tensor, thread: Int32) -> None:
        """The probabilities of every key, of a thread's two rows, summed over heads, to shared memory: (keys, rows of Q
        of the warp).
        """
        lane = thread % WARP
        if self.padded >= WARP_ROWS:
            values = [[a + b for a, b in zip(*values, strict=True)]]
        apart = min(self.padded, WARP_ROWS // 2)  # lanes / 4 that have heads of the same row of Q
        for slot, found in enumerate(values):
            kept, start = reduce_scatter(found, lambda a, b: a + b, 4, 4 * apart)
            query = slot * (8 // apart) + lane // 4 // apart
            for i, value in enumerate(kept):
                sums[self.rows.column(thread, start + i), query] = value

    @cute.jit
    def compare(
        self, best: Best, slot: int, sums: cute.Tensor, leader: Int32, s: Sequence, query: Int32, step: Int32
    ) -> None:
        """The blocks of a step, with the best of a row of Q so far."""
        lane = cute.arch.lane_idx()
        end = self.candidates(s, query)
        for chunk in cutlass.range_constexpr(0, self.blocks, WARP):
            block = chunk + lane
            index, score = step * self.blocks + block, -Float32.inf
            if (block < self.blocks) & (index > 0) & (index < end):
                score = Float32(0.0)
                for x in cutlass.range_constexpr(self.share):
                    if index * self.share + x < s.keys:
                        for member in cutlass.range_constexpr(self.team):
                            score += sums[block * self.share + x, slot, leader + member]
            least = self.least(best, slot)
            better = cute.arch.vote_ballot_sync(score > least)
            while better != 0:
                source = cute.arch.popc((better & -better) - 1)  # the first lane, which has the lowest block
                self.insert(best, slot, cute.arch.shuffle_sync(score, source), index - lane + source)
                least = self.least(best, slot)
                better = cute.arch.vote_ballot_sync((score > least) & (lane > source))

    def least(self, best: Best, slot: int) -> Float32:
        """The last score of a list."""
        half, lane = divmod(self.c.count - 1, WARP)
        return cute.arch.shuffle_sync(best.scores[slot, half], lane)

    def insert(self, best: Best, slot: int, score: Float32, block: Int32) -> None:
        """Puts a block behind those whose scores are at least its own."""
        lane = cute.arch.lane_idx()
        for half in range(self.halves - 1, -1, -1):
            scores, blocks = best.scores[slot, half], best.blocks[slot, half]
            before, block_before = (cute.arch.shuffle_sync_up(x, 1) for x in (scores, blocks))
            is_next = before >= score
            if half:
                ends = (cute.arch.shuffle_sync(x[slot, half - 1], WARP - 1) for x in (best.scores, best.blocks))
                end, block_end = ends
                before = Float32(select_(lane == 0, end, before))
                block_before = Int32(select_(lane == 0, block_end, block_before))
                is_next = before >= score
            else:
                is_next = (lane == 0) | is_next
            stays = scores >= score
            best.scores[slot, half] = Float32(select_(stays, scores, Float32(select_(is_next, score, before))))
            best.blocks[slot, half] = Int32(select_(stays, blocks, Int32(select_(is_next, block, block_before))))
