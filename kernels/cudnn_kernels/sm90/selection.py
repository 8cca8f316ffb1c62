"""Attention of each row to blocks of keys of its own choice, on Hopper, forward.

A CTA has one row: heads of Q that share a head of K and V, 16 say, are the first rows of the tensor cores' 64.
The other 48 cost nothing that is scarce: the kernel waits for K and V, which no other row of the CTA could share.
A warp reads the row's list of blocks, lets the copy engine fetch them and says how many of their keys there are; a
warpgroup multiplies, as :mod:`cudnn_kernels.sm90.attention_forward` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.attention.sparse import SelectionConfiguration
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS, AttentionForward, Rings, done_before_the_wait, partition

WARP = 32
HEADS = 16  # of Q that are loaded at a time
THREADS = GROUP + WARP


@dataclass
class Row:
    """What a CTA has: a row, some heads, their head of K, the sequence, and the length of the row's list.

    ``seen`` keys of the sequence may be seen. The list is counted in parts of blocks that are taken at a time.
    """

    row: Int32
    key_head: Int32
    first_head: Int32
    heads: Int32
    first_key: Int32
    keys: Int32
    seen: Int32
    count: Int32


class Selection(AttentionForward):
    """The kernel for one :class:`SelectionConfiguration`."""

    def __init__(self, configuration: SelectionConfiguration) -> None:
        super().__init__(configuration)  # type: ignore[arg-type]  # it has what the products need
        self.s = configuration
        self.size = min(self.s.block, self.tile_n)  # keys that one copy fetches
        self.per_block = self.s.block // self.size
        self.parts = self.tile_n // self.size
        self.shares = -(-self.s.group // ROWS)  # CTAs that share a row's heads

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        s = self.s
        given = bind(s.slots(), arguments)
        q, k, v = (given[x] for x in "qkv")
        q_layout, k_layout, v_layout = (cute.slice_(x, (None, None, 0)) for x in self.layouts(1))
        load = cpasync.CopyBulkTensorTileG2SOp()
        q_by_head = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[1, 2, 0]))
        boxes = (
            (q_by_head, q_layout, (HEADS, s.head)),
            (sequences.copied(k, True), k_layout, (self.size, s.head)),
            (sequences.turned(sequences.copied(v, True)), v_layout, (s.head_v, self.size)),
        )
        (atom_q, mQ), (atom_k, mK), (atom_v, mV) = (
            cpasync.make_tiled_tma_atom(load, x, cute.composition(layout, box), box) for x, layout, box in boxes
        )
        self.selection(
            atom_q, mQ, atom_k, mK, atom_v, mV, given["o"], given["l"], given["m"], given["block_indices"],
            given["block_counts"], given["cum_seqlen_q"], q.shape[0], given["scale_softmax"] * softmax.LOG2_E,
        ).launch(
            grid=[q.shape[0] * s.key_heads * self.shares, 1, 1], block=[THREADS, 1, 1], stream=given["stream"]
        )  # fmt: skip

    @cute.kernel
    def selection(
        self, atom_q: Any, mQ: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any, mV: cute.Tensor,
        o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, indices: cute.Tensor, counts: cute.Tensor,
        offsets: cute.Tensor, rows: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """The roles of the warps. All rows of a head come before the next head's, so that L2 holds its keys."""
        s = self.s
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in self.layouts(s.stages)
        )
        sQ = sQ[None, None, 0]
        rings = Rings(*(smem.allocate_array(cutlass.Int64, count) for count in (1, *[s.stages] * 4)))
        present = smem.allocate_tensor(Int32, cute.make_layout((self.parts, s.stages)), byte_alignment=16)
        if thread == 0:
            cute.arch.mbarrier_init(rings.q_full, 1)
            for stage in cutlass.range_constexpr(s.stages):
                cute.arch.mbarrier_init(rings.k_full + stage, 1)
                cute.arch.mbarrier_init(rings.v_full + stage, 1)
                cute.arch.mbarrier_init(rings.k_empty + stage, self.warps)
                cute.arch.mbarrier_init(rings.v_empty + stage, self.warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        mine, exists = self.row(index, rows, offsets, counts, indices.shape[2])
        if exists:
            if warp_index == self.warps:
                self.fetch(atom_q, mQ, atom_k, mK, atom_v, mV, sQ, sK, sV, rings, present, indices, mine)
            else:
                self.attend(o, sums, maxima, sQ, sK, sV, rings, present, mine, scale, thread)

    name(selection, "cudnn_attention_selection_sm90")

    @cute.jit
    def row(
        self, index: Int32, rows: Int32, offsets: cute.Tensor, counts: cute.Tensor, most: Int32
    ) -> tuple[Row, Boolean]:
        """What a CTA has, and whether its row belongs to a sequence."""
        s = self.s
        row, head, share = index % rows, index // rows // self.shares, index // rows % self.shares
        sequence = sequences.find_row(offsets, row)
        first, last = offsets[cutlass.max(sequence, 0)], offsets[sequence + 1]
        count = cutlass.max(cutlass.min(counts[row, head], most), 0) * self.per_block
        seen = last - first
        if const_expr(s.causal):
            seen = row - first + 1
        heads = cutlass.min(s.group - share * ROWS, ROWS)
        mine = Row(row, head, head * s.group + share * ROWS, heads, first, last - first, seen, count)
        return mine, (sequence >= 0) & (row < last)

    @cute.jit
    def blocks(
        self, step: Int32, held: Int32, indices: cute.Tensor, mine: Row
    ) -> tuple[Int32, cute.Tensor, cute.Tensor]:
        """Of a step's parts, which tiles of ``size`` keys they are and how many keys of them are seen.

        One warp holds 32 places of the list at a time. What is not seen, or not there, is a tile beyond all keys.
        """
        lane = cute.arch.lane_idx()
        tiles, keys = cute.make_rmem_tensor(self.parts, Int32), cute.make_rmem_tensor(self.parts, Int32)
        nowhere = cute.ceil_div(mine.keys, self.size)
        for part in cutlass.range_constexpr(self.parts):
            place = step * self.parts + part
            listed = place // self.per_block
            if listed % WARP == 0:
                held = Int32(-1)
                if (listed + lane) * self.per_block < mine.count:
                    held = indices[mine.row, mine.key_head, listed + lane]
            block = cute.arch.shuffle_sync(held, listed % WARP)
            tile = block * self.per_block + place % self.per_block
            exists = (place < mine.count) & (block >= 0) & (block <= (mine.seen - 1) // self.s.block)
            seen = cutlass.min(mine.seen - tile * self.size, self.size)
            exists = exists & (seen > 0)
            tiles[part] = Int32(select_(exists, tile, nowhere))
            keys[part] = Int32(select_(exists, seen, Int32(0)))
        return held, tiles, keys

    @cute.jit
    def copy_row(self, atom: Any, tensor: cute.Tensor, buffer: cute.Tensor, width: int, full: Any, mine: Row) -> None:
        """Starts copies of the heads of Q, or dO, and of zeros behind them, to a buffer of 64 rows."""
        box = (HEADS, width)
        source = cute.domain_offset((mine.first_head, 0), tensor[None, None, mine.row])
        to, of = partition(atom, 0, 1, cute.local_tile(buffer, box, (None, 0)), cute.local_tile(source, box, (None, 0)))
        for part in cutlass.range_constexpr(ROWS // HEADS):
            behind = Int32(self.s.heads)  # beyond the last head
            some = Int32(select_(part * HEADS < mine.heads, Int32(part), behind))
            cute.copy(atom, of[None, some], to[None, part], tma_bar_ptr=full)

    @cute.jit
    def fetch(
        self, atom_q: Any, mQ: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any, mV: cute.Tensor,
        sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, present: cute.Tensor, indices: cute.Tensor,
        mine: Row,
    ) -> None:  # fmt: skip
        """One warp: fetches Q, and K and V of the blocks. Of what is beyond the list or the sequence, zeros."""
        s = self.s
        keys_of = (mine.key_head, Int32(0), mine.first_key, mine.keys)
        gK = sequences.copied_rows(mK, *keys_of)
        gV = sequences.turned(sequences.copied_rows(sequences.turned(mV), *keys_of))
        box = (self.size, s.head)  # parts of a step's buffers, and blocks in global memory
        sK_parts = cute.local_tile(sK, (*box, s.stages), (None, 0, 0))
        tKsK, tKgK = partition(atom_k, 0, 1, sK_parts, cute.local_tile(gK, box, (None, 0)))
        box = (s.head_v, self.size)
        sV_parts = cute.local_tile(sV, (*box, s.stages), (0, None, 0))
        tVsV, tVgV = partition(atom_v, 0, 1, sV_parts, cute.local_tile(gV, box, (0, None)))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(rings.q_full, self.bytes(ROWS, s.head))
        self.copy_row(atom_q, mQ, sQ, s.head, rings.q_full, mine)
        held = Int32(-1)
        for step in cutlass.range(cute.ceil_div(mine.count, self.parts), unroll=1):
            stage, phase = step % s.stages, step // s.stages % 2
            held, blocks, keys = self.blocks(step, held, indices, mine)
            cute.arch.mbarrier_wait(rings.k_empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                for part in cutlass.range_constexpr(self.parts):
                    present[part, stage] = keys[part]
                cute.arch.mbarrier_arrive_and_expect_tx(rings.k_full + stage, self.bytes(self.tile_n, s.head))
            for part in cutlass.range_constexpr(self.parts):
                source, target = tKgK[None, blocks[part]], tKsK[None, stage, part]
                cute.copy(atom_k, source, target, tma_bar_ptr=rings.k_full + stage)
            cute.arch.mbarrier_wait(rings.v_empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(rings.v_full + stage, self.bytes(self.tile_n, s.head_v))
            for part in cutlass.range_constexpr(self.parts):
                source, target = tVgV[None, blocks[part]], tVsV[None, stage, part]
                cute.copy(atom_v, source, target, tma_bar_ptr=rings.v_full + stage)

    @cute.jit
    def attend(
        self, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, sQ: cute.Tensor, sK: cute.Tensor,
        sV: cute.Tensor, rings: Rings, present: cute.Tensor, mine: Row, scale: Float32, thread: Int32,
    ) -> None:  # fmt: skip
        """The warpgroup."""
        s = self.s
        score_mma, product_mma = self.score_mma(), self.product_mma()
        scores_part, product_part = score_mma.get_slice(thread), product_mma.get_slice(thread)
        tSrQ = score_mma.make_fragment_A(scores_part.partition_A(sQ))
        tSrK = score_mma.make_fragment_B(scores_part.partition_B(sK))
        tOrV = product_mma.make_fragment_B(product_part.partition_B(sV))
        scores = cute.make_rmem_tensor(score_mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        acc = cute.make_rmem_tensor(product_mma.partition_shape_C((ROWS, s.head_v)), Float32)
        words = cute.make_rmem_tensor(self.tile_n // 4, Int32)
        state = softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale)
        softmax.reset(state)
        acc.fill(0.0)
        cute.arch.mbarrier_wait(rings.q_full, 0)
        steps = cute.ceil_div(mine.count, self.parts)
        if steps > 0:
            cute.arch.mbarrier_wait(rings.k_full, 0)
            self.multiply_scores(scores, tSrQ, tSrK, 0)
            keys = self.present_keys(present, 0)
            warpgroup.wait_group(0)
            self.release(rings.k_empty)
            self.hide_absent(scores, keys, thread)
            softmax.update(state, scores, self.score_rows, self.tile_n, slack=0.0)
            self.round(scores, words)
            for step in cutlass.range(1, steps, unroll=1):
                stage, phase = step % s.stages, step // s.stages % 2
                value_stage, value_phase = (step - 1) % s.stages, (step - 1) // s.stages % 2
                cute.arch.mbarrier_wait(rings.k_full + stage, phase)
                self.multiply_scores(scores, tSrQ, tSrK, stage)
                keys = self.present_keys(present, stage)
                cute.arch.mbarrier_wait(rings.v_full + value_stage, value_phase)
                self.multiply_values(acc, words, tOrV, value_stage)
                warpgroup.wait_group(1)
                self.release(rings.k_empty + stage)
                self.hide_absent(scores, keys, thread)
                corrections = softmax.update(state, scores, self.score_rows, self.tile_n, slack=0.0)
                done_before_the_wait(state.sums[0] + state.sums[1])
                warpgroup.wait_group(0)
                self.release(rings.v_empty + value_stage)
                self.round(scores, words)
                self.correct_where_needed(acc, *corrections)
            self.last(acc, words, tOrV, rings, steps - 1)
        self.write(acc, state, o, sums, maxima, mine, thread)

    def present_keys(self, present: cute.Tensor, stage: Any) -> list[Int32]:
        """How many keys each block of a step has. All lanes have read them when one of them releases the buffer."""
        keys = [present[part, stage] for part in range(self.parts)]
        cute.arch.sync_warp()
        return keys

    @cute.jit
    def hide_absent(self, scores: cute.Tensor, keys: Any, thread: Int32) -> None:
        """Makes scores of keys that there are not -inf."""
        block = self.size
        fewest = keys[0]
        for part in cutlass.range_constexpr(1, self.parts):
            fewest = cutlass.min(fewest, keys[part])
        if fewest < block:
            for slot in cutlass.range_constexpr(2):
                for place, i in enumerate(self.score_rows.order(self.tile_n, slot)):
                    part = place // 2 * 8 // block  # four threads have eight columns next to each other
                    exists = self.score_rows.column(thread, place) - part * block < keys[part]
                    scores[i] = Float32(select_(exists, scores[i], -Float32.inf))

    @cute.jit
    def write(
        self, acc: cute.Tensor, state: softmax.State, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor,
        mine: Row, thread: Int32,
    ) -> None:  # fmt: skip
        """O, the sums of exponentials and the largest scores of the heads."""
        s = self.s
        for slot in cutlass.range_constexpr(2):
            total = self.score_rows.across(state.sums[slot], lambda a, b: a + b)
            factor = Float32(select_(total == 0.0, Float32(1.0), 1.0 / total))
            row = self.score_rows.row(thread, slot)
            head = mine.first_head + row
            if row < mine.heads:
                if thread % 4 == 0:
                    sums[mine.row, head] = total
                    maxima[mine.row, head] = state.maxima[slot] * state.scale * math.log(2)
                order = self.score_rows.order(s.head_v, slot)
                pair = cute.make_rmem_tensor(2, self.dtype)
                for place in cutlass.range_constexpr(0, len(order), 2):
                    for i in cutlass.range_constexpr(2):
                        pair[i] = (acc[order[place + i]] * factor).to(self.dtype)
                    column = self.score_rows.column(thread, place)
                    cute.autovec_copy(pair, cute.local_tile(o[mine.row, head, None], (2,), (column // 2,)))
