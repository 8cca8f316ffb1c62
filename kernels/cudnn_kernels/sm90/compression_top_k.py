"""Attention to compressed keys, and the blocks of keys with the largest probabilities, in one pass, on Hopper.

For sequences whose compressed keys are one tile: a row's scores are all in registers, so its probabilities are known
once its maximum and its sum are. Q is read once, scores are computed once.

A row of a product is a row of one head of Q, as in :mod:`cudnn_kernels.sm90.top_k`, whose sums over heads these are. A
CTA has a head of K, and takes tiles of rows in turn; K and V stay in shared memory until the sequence ends. Each of its
warpgroups has 64 rows of a tile, and rows of Q of its next tile on their way. While the product with V runs, the first
of the warps that share a row of Q finds the row's blocks, the best one of those that are left at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.attention.mask import CompressedMask
from cudnn_kernels.attention.sparse import CompressionTopKConfiguration
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.copy import fetch, partition
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import GROUP
from cudnn_kernels.sm90.top_k import WARP, WARP_ROWS, Rows, TopK
from cudnn_kernels.sm90.warpgroup_products import ROWS

NEVER = -(1 << 31)  # less than the bits of any score


class CompressionTopK(TopK):
    """The kernel for one :class:`CompressionTopKConfiguration`."""

    least_padded = 8  # heads that one copy fetches
    buffers_of_rows = 2

    def __init__(self, configuration: CompressionTopKConfiguration) -> None:
        super().__init__(configuration)
        self.groups = self.tile_m // ROWS
        self.together = ROWS // self.padded  # rows of Q of a warpgroup
        self.box = min(self.padded, WARP_ROWS)
        self.blocks = -(-self.tile_n // self.share)
        self.held = -(-self.blocks // WARP)  # blocks of a lane
        self.widths = {"q": configuration.head, "k": configuration.head, "v": configuration.head_v}

    def launch(self, given: Mapping[str, Any]) -> None:
        c = self.c
        o, indices = (sequences.matrix(given[x], True) for x in ("o", "topk_indices"))
        results = o, sequences.rows(given["lse"], True, by_head=False), indices
        offsets = given["cum_seqlen_q"], given["cum_seqlen_k"]
        tiles = sequences.blocks_of(given["q"].shape[0], offsets[0].shape[0] - 1, self.queries, True)
        ctas = cutlass.max(cutlass.min(given["multiprocessors"] // c.key_heads, tiles), 1)
        self.kernel(
            self.atoms(given, self.box, self.tile_n), results, offsets, tiles, given["scale_softmax"] * softmax.LOG2_E
        ).launch(
            grid=[ctas * c.key_heads, 1, 1],
            block=[self.warps * WARP, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, atoms: Any, results: Any, offsets: Any, tiles: Int32, scale: Float32) -> None:
        """A CTA, with every so many tiles of a head of K. ``results``: O, LSE and the lists."""
        c, smem, (thread, index) = self.c, SmemAllocator(), here()
        ctas, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        shapes = {
            "q": (self.tile_m, c.head, self.buffers_of_rows),
            "k": (self.tile_n, c.head, 1),
            "v": (self.tile_n, c.head_v, 1),
            "o": (self.tile_m, c.head_v, 1),
        }
        buffers = self.buffers(smem, shapes)
        layout = cute.make_layout((self.tile_n, self.warp_queries, self.warps, self.sum_buffers))
        sums = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        full, empty = (smem.allocate_array(cutlass.Int64, self.groups * self.buffers_of_rows) for _ in range(2))
        keys_full = smem.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            for each in cutlass.range_constexpr(self.groups * self.buffers_of_rows):
                cute.arch.mbarrier_init(full + each, 1)
                cute.arch.mbarrier_init(empty + each, GROUP // WARP)
            cute.arch.mbarrier_init(keys_full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        head, first, every = index % c.key_heads, index // c.key_heads, ctas // c.key_heads
        leads = warp_index % (GROUP // WARP) == 0
        mine = (full + group * self.buffers_of_rows, empty + group * self.buffers_of_rows)
        for ahead in cutlass.range_constexpr(self.buffers_of_rows):
            if leads & (first + ahead * every < tiles):
                self.fetch_queries(
                    atoms, buffers["q"], mine, self.rows_of(offsets, first + ahead * every, head), group, Int32(ahead)
                )
        number, sequence, changes = Int32(0), Int32(-1), Int32(0)
        for tile in cutlass.range(first, tiles, every, unroll=1):
            rows = self.rows_of(offsets, tile, head)
            if rows.sequence.batch != sequence:
                cute.arch.sync_threads()  # all are done with the keys of the sequence before
                if warp_index == 0:
                    self.fetch_keys(atoms, buffers, keys_full, rows)
                cute.arch.mbarrier_wait(keys_full, changes % 2)
                sequence = rows.sequence.batch
                changes += 1
            given = (buffers, sums, mine, results, rows, scale, number, thread)
            if self.mask(rows).end(rows.first + (group + 1) * self.together - 1) <= self.tile_n // 2:
                self.attend(*given, self.tile_n // 2)
            else:
                self.attend(*given, self.tile_n)
            behind = tile + self.buffers_of_rows * every
            if leads & (behind < tiles):
                cute.arch.mbarrier_wait(mine[1] + number % self.buffers_of_rows, number // self.buffers_of_rows % 2)
                self.fetch_queries(
                    atoms, buffers["q"], mine, self.rows_of(offsets, behind, head), group, number % self.buffers_of_rows
                )
            number += 1

    name(kernel, "cudnn_attention_compression_top_k")

    @cute.jit
    def rows_of(self, offsets: Any, tile: Int32, head: Int32) -> Rows:
        """A tile's rows of Q."""
        batch, own = sequences.find_block(offsets[0], tile, self.queries)
        return Rows(sequences.packed(offsets[0], offsets[1], batch), own * self.queries, head, 0)

    def fetch_queries(
        self, atoms: Any, buffers: cute.Tensor, barriers: Any, rows: Rows, group: Int32, buffer: Int32
    ) -> None:
        """One warp: starts copies of a warpgroup's rows of Q, and of zeros where there are none."""
        c, s, full, (atom, tensor) = self.c, rows.sequence, barriers[0] + buffer, atoms["q"]
        box = (self.box, c.head)
        source = cute.local_tile(cute.domain_offset((rows.head * c.group, 0, 0), tensor), box, (None, 0, None))
        own = cute.local_tile(buffers[None, None, buffer], (ROWS, c.head), (group, 0))
        to, of = partition(atom, cute.local_tile(own, box, (None, 0)), source)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * c.head * self.dtype.width // 8)
        for row in range(0, ROWS, self.box):
            query, member = rows.first + group * self.together + row // self.padded, row % self.padded
            exists = query < s.queries if member < c.group else Boolean(False)
            some = Int32(select_(exists, Int32(member // self.box), Int32(c.heads)))  # beyond the last head: zeros
            place = s.first_query + cutlass.max(cutlass.min(query, s.queries - 1), 0)
            cute.copy(atom, of[None, some, place], to[None, row // self.box], tma_bar_ptr=full)

    def fetch_keys(self, atoms: Any, buffers: Any, full: Any, rows: Rows) -> None:
        """One warp: starts copies of K and V of a sequence, with zeros behind its end."""
        s = rows.sequence
        with cute.arch.elect_one():
            elements = self.tile_n * (self.widths["k"] + self.widths["v"])
            cute.arch.mbarrier_arrive_and_expect_tx(full, elements * self.dtype.width // 8)
        for x in ("k", "v"):
            atom, tensor = atoms[x]
            keys = sequences.copied_rows(tensor, rows.head, Int32(0), s.first_key, s.keys)
            box = cute.local_tile(keys, (self.tile_n, self.widths[x]), (0, 0))
            fetch(atom, box, buffers[x][None, None, 0], full)

    @cute.jit
    def attend(
        self,
        buffers: Any,
        sums: cute.Tensor,
        barriers: Any,
        results: Any,
        rows: Rows,
        scale: Float32,
        number: Int32,
        thread: Int32,
        width: int,
    ) -> None:
        """A warpgroup's rows of a tile, before which it had so many: of which none sees more than ``width`` keys."""
        c, (o, lse, indices) = self.c, results
        group, member = cute.arch.make_warp_uniform(thread // GROUP), thread % GROUP
        warp_index, lane = cute.arch.make_warp_uniform(thread // WARP), cute.arch.lane_idx()
        leader = warp_index // self.team * self.team
        buffer, phase = number % self.buffers_of_rows, number // self.buffers_of_rows % 2
        own = self.left(cute.local_tile(buffers["q"][None, None, buffer], (ROWS, c.head), (group, 0)), member)
        few = cute.local_tile(buffers["k"], (width, c.head, 1), (0, 0, 0))
        keys, values = self.right(few, member), self.right(turned(buffers["v"]), member, True)
        scores, acc = self.accumulator(width), self.accumulator(c.head_v)
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        cute.arch.mbarrier_wait(barriers[0] + buffer, phase)
        self.multiply_shared(scores, own, keys, width, c.head, 0)
        self.finish(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(barriers[1] + buffer)
        factors = self.soften(scores, lse, rows, scale, thread, width)
        rounded.store(scores.load().to(self.dtype))
        shared = sums[None, None, None, number % self.sum_buffers]
        weights = [factors[1, slot] for slot in range(2)]
        found = [[scores[i] * weights[slot] for i in self.rows.order(width, slot)] for slot in range(2)]
        self.add_product(acc, rounded, values, c.head_v, width, 0, adds=False)
        self.add_heads(found, shared[None, None, warp_index], member)
        self.meet(warp_index)
        if warp_index == leader:
            for slot in cutlass.range_constexpr(self.warp_queries):
                query = rows.first + warp_index // self.team * self.warp_queries + slot
                self.list_best(shared, slot, indices, leader, rows, query, width)
        self.finish(0)
        self.store(acc, factors, buffers["o"][None, None, 0], o, rows, thread)

    @cute.jit
    def soften(
        self, scores: cute.Tensor, lse: cute.Tensor, rows: Rows, scale: Float32, thread: Int32, width: int
    ) -> cute.Tensor:
        """The exponentials of scores, in place; by a thread's rows, what makes them probabilities, and the same with 0
        for rows that there are not.
        """
        s, group, member = rows.sequence, thread // GROUP, thread % GROUP
        mask = self.mask(rows)
        for slot in cutlass.range_constexpr(2):
            query, _, _ = self.row_of(rows, group, self.rows.row(member, slot))
            end = mask.end(query)
            for place, i in enumerate(self.rows.order(width, slot)):
                scores[i] = Float32(select_(self.rows.column(member, place) < end, scores[i], -Float32.inf))
        state = softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale)
        softmax.reset(state)
        softmax.update(state, scores, self.rows, width, slack=0.0, chains=4)
        factors = cute.make_rmem_tensor((2, 2), Float32)
        for slot in cutlass.range_constexpr(2):
            query, head, exists = self.row_of(rows, group, self.rows.row(member, slot))
            factor, log_sum = softmax.finish(state, self.rows, slot)
            factors[0, slot], factors[1, slot] = factor, Float32(select_(exists, factor, Float32(0.0)))
            if exists & (member % 4 == 0):
                lse[s.first_query + query, head, 0] = log_sum
        return factors

    def mask(self, rows: Rows) -> CompressedMask:
        """Which keys a row of Q sees."""
        s = rows.sequence
        ratio = cutlass.max(s.queries // cutlass.max(s.keys, 1), 1)
        return CompressedMask(s.queries, s.keys, Int32(0), None, None, ratio)

    def row_of(self, rows: Rows, group: Int32, number: Int32) -> tuple[Int32, Int32, Boolean]:
        """What a row of a warpgroup's product is: a row of Q in its sequence, a head, and whether there is one."""
        query, member = rows.first + group * self.together + number // self.padded, number % self.padded
        exists = (query < rows.sequence.queries) & (member < self.c.group)
        return query, rows.head * self.c.group + member, exists

    @cute.jit
    def list_best(
        self,
        sums: cute.Tensor,
        slot: int,
        indices: cute.Tensor,
        leader: Int32,
        rows: Rows,
        query: Int32,
        width: int,
    ) -> None:
        """One warp: the list of a row of Q, from sums of so many keys. A lane has some scores, as bits."""
        s, lane = rows.sequence, cute.arch.lane_idx()
        end = cutlass.min(self.candidates(s, query), self.blocks)  # none behind the tile's keys
        bits, chosen = cute.make_rmem_tensor(self.held, Int32), cute.make_rmem_tensor(self.halves, Int32)
        chosen.fill(-1)
        for each in cutlass.range_constexpr(self.held):
            block, found = each * WARP + lane, Int32(NEVER)
            if (block > 0) & (block < end):
                score = Float32(0.0)
                for x in cutlass.range_constexpr(self.share):
                    if block * self.share + x < cutlass.min(s.keys, width):
                        for member in cutlass.range_constexpr(self.team):
                            score += sums[block * self.share + x, slot, leader + member]
                found = score.bitcast(Int32)
            bits[each] = found
        for place in cutlass.range(cutlass.min(end - 1, self.c.count), unroll=1):
            best = bits[0]
            for each in cutlass.range_constexpr(1, self.held):
                best = cutlass.max(best, bits[each])
            best = cute.arch.warp_redux_sync(best, "max")
            lowest = Int32(self.blocks)
            for each in cutlass.range_constexpr(self.held - 1, -1, -1):
                lowest = Int32(select_(bits[each] == best, each * WARP + lane, lowest))
            lowest = cute.arch.warp_redux_sync(lowest, "min")
            for each in cutlass.range_constexpr(self.held):
                bits[each] = Int32(select_(each * WARP + lane == lowest, Int32(NEVER), bits[each]))
            for half in cutlass.range_constexpr(self.halves):
                chosen[half] = Int32(select_(half * WARP + lane == place, lowest, chosen[half]))
        for half in cutlass.range_constexpr(self.halves):
            listed = half * WARP + lane
            if (query < s.queries) & (listed < self.c.count):
                indices[s.first_query + query, self.c.before + listed, rows.head, 0] = chosen[half]
        self.write_always(indices, rows, query, query < s.queries)

    @cute.jit
    def store(
        self, acc: cute.Tensor, factors: cute.Tensor, sO: cute.Tensor, o: cute.Tensor, rows: Rows, thread: Int32
    ) -> None:
        """O of a warp's rows, by way of shared memory, so that threads next to each other write what follows.

        Before a warp writes there again, it meets for the sums of its next rows.
        """
        c, s, group, member = self.c, rows.sequence, thread // GROUP, thread % GROUP
        pair = cute.make_rmem_tensor(2, self.dtype)
        for slot in cutlass.range_constexpr(2):
            line = sO[group * ROWS + self.rows.row(member, slot), None]
            order = self.rows.order(c.head_v, slot)
            for place in cutlass.range_constexpr(0, len(order), 2):
                for i in cutlass.range_constexpr(2):
                    pair[i] = (acc[order[place + i]] * factors[0, slot]).to(self.dtype)
                cute.autovec_copy(pair, cute.local_tile(line, (2,), (self.rows.column(member, place) // 2,)))
        cute.arch.sync_warp()
        columns = c.head_v // VECTOR
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(WARP_ROWS * columns // WARP):
            vector = member % WARP + i * WARP
            row, column = member // WARP * WARP_ROWS + vector // columns, vector % columns
            query, head, exists = self.row_of(rows, group, row)
            cute.autovec_copy(cute.local_tile(sO[group * ROWS + row, None], (VECTOR,), (column,)), values)
            if exists:
                out = o[s.first_query + query, None, head, 0]
                cute.autovec_copy(values, cute.local_tile(out, (VECTOR,), (column,)))
