"""Attention of each row to blocks of keys of its own choice, on Hopper, forward, with blocks of keys outermost.

For few heads of Q that share one of K: neighbouring rows are the rows of a product then that would mostly have chosen
other blocks. Here a CTA has a block, and the rows that chose it are the 64 rows of its products, so that nothing is
multiplied in vain. It leaves what a row has of the block in memory, in the order of the lists of rows. A second kernel
adds up what each row has of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.attention.sparse import SelectionByBlocksConfiguration
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import arrange, vectors
from cudnn_kernels.pipeline.copy import fetch
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS
from cudnn_kernels.sm90.chosen_rows import Chosen, ChosenRows
from cudnn_kernels.sm90.selected_rows import WARP

CTAS = 3  # that share a multiprocessor
WARPS = GROUP // WARP
LOADS = 4  # of a lane that are on their way


class SelectionByBlocks(ChosenRows):
    """The kernels for one :class:`SelectionByBlocksConfiguration`."""

    of_rows = ()

    def __init__(self, configuration: SelectionByBlocksConfiguration) -> None:
        super().__init__(configuration)
        self.share = 1 << (configuration.group - 1).bit_length()  # rows of a product that a row of Q takes
        self.slots = ROWS // self.share  # rows of Q in a product

    def launch(self, given: Mapping[str, Any]) -> None:
        s, ends, offsets = self.s, given["choosing_ends"], given["cum_seqlen_q"]
        scale, first, stream = given["scale_softmax"] * softmax.LOG2_E, given["first_head"], given["stream"]
        of_chosen = given["of_chosen"], given["chosen_values"]
        blocks = (ends.shape[0] - 1) // s.key_heads
        parts = of_chosen[0].shape[0] // s.part + given["some_heads"] * blocks
        self.by_blocks(
            self.atoms(given, ROWS, ROWS),
            given["q"],
            of_chosen,
            given["choosing"],
            ends,
            offsets,
            (first, first + given["some_heads"]),
            scale,
        ).launch(
            grid=[parts, 1, 1], block=[GROUP, 1, 1], stream=stream, min_blocks_per_mp=CTAS, preferred_smem_carveout=100
        )
        rows = given["q"].shape[0]
        self.add_blocks(
            of_chosen, given["chosen_places"], ends, offsets, first, (given["o"], given["l"], given["m"])
        ).launch(
            grid=[cute.ceil_div(rows, WARPS), given["some_heads"] * s.group, 1], block=[GROUP, 1, 1], stream=stream
        )

    @cute.kernel
    def by_blocks(
        self,
        atoms: Any,
        q: cute.Tensor,
        of_chosen: Any,
        choosing: cute.Tensor,
        ends: cute.Tensor,
        offsets: cute.Tensor,
        heads: tuple[Int32, Int32],
        scale: Float32,
    ) -> None:
        """A CTA has a block and a part of its list, of those of heads of K from one up to another."""
        s, (thread, index), smem = self.s, here(), SmemAllocator()
        shapes = {"k": (ROWS, s.head, 1), "v": (ROWS, s.head_v, 1), "q": (ROWS, s.head, 1)}
        buffers = self.buffers(smem, shapes)
        once = smem.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(once, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        number = heads[0] * ((ends.shape[0] - 1) // s.key_heads)  # of the first list
        before, mine = Int32(ends[number, 0]), self.part(ends[number, 1] + index, 0, ends, offsets)
        if (mine.keys > 0) & (mine.head < heads[1]) & (mine.begin < mine.end):
            if thread < WARP:
                self.fetch_block(atoms, buffers, once, mine)
            self.attend_block(q, buffers, once, of_chosen, choosing, mine, before, scale, thread)

    name(by_blocks, "cudnn_attention_selection_by_blocks")

    def fetch_block(self, atoms: Any, buffers: Any, once: Any, mine: Chosen) -> None:
        """One warp: fetches K and V of the block, and zeros behind its sequence."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(once, self.bytes(ROWS, self.s.head + self.s.head_v))
        for atom, tensor, buffer, width in self.loads(atoms, buffers):
            keys = sequences.copied_rows(tensor, mine.head, Int32(0), mine.first, mine.key + mine.keys)
            tile = cute.local_tile(cute.domain_offset((mine.key, 0), keys), (ROWS, width), (0, 0))
            fetch(atom, tile, buffer[None, None, 0], once)

    @cute.jit
    def attend_block(
        self,
        q: cute.Tensor,
        buffers: Any,
        once: Any,
        of_chosen: Any,
        choosing: cute.Tensor,
        mine: Chosen,
        before: Int32,
        scale: Float32,
        thread: Int32,
    ) -> None:
        """All rows of a part of a list. ``before``: entries of lists before the first one of the call."""
        s, (outs, sums), tile = self.s, of_chosen, buffers["q"][None, None, 0]
        own, keys = self.left(tile, thread), self.right(buffers["k"], thread)
        values = self.right(arrange.turned(buffers["v"]), thread, True)
        scores, acc = self.accumulator(ROWS), self.accumulator(s.head_v)
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        held = [cute.make_rmem_tensor(VECTOR, self.dtype) for _ in self.vectors_of_thread(thread)]
        steps = cute.ceil_div(mine.end - mine.begin, self.slots)
        self.load_rows(q, choosing, mine, mine.begin, held, thread)
        cute.arch.mbarrier_wait(once, 0)
        for step in cutlass.range(steps, unroll=1):
            entry = mine.begin + step * self.slots
            for vector, (row, column) in zip(held, self.vectors_of_thread(thread), strict=True):
                cute.autovec_copy(vector, cute.local_tile(tile[row, None], (VECTOR,), (column,)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            self.multiply_shared(scores, own, keys, ROWS, s.head, 0)
            if step + 1 < steps:
                self.load_rows(q, choosing, mine, entry + self.slots, held, thread)
            ends = [self.end_of_row(choosing, mine, entry, thread, slot) for slot in range(2)]
            self.finish(0)
            state = softmax.State(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)), scale)
            softmax.reset(state)
            for slot in cutlass.range_constexpr(2):
                for place, i in enumerate(self.score_rows.order(ROWS, slot)):
                    seen = self.score_rows.column(thread, place) < ends[slot]
                    scores[i] = Float32(select_(seen, scores[i], -Float32.inf))
            softmax.update(state, scores, self.score_rows, ROWS, slack=0.0)
            rounded.store(scores.load().to(self.dtype))
            self.add_product(acc, rounded, values, s.head_v, ROWS, 0, adds=False)
            totals = [self.score_rows.across(state.sums[slot], lambda a, b: a + b) for slot in range(2)]
            self.finish(0)
            cute.arch.sync_threads()  # all have read Q
            for slot in cutlass.range_constexpr(2):
                row = self.score_rows.row(thread, slot)
                place, head = entry + row // self.share, row % self.share
                factor = Float32(select_(totals[slot] == 0.0, Float32(0.0), 1.0 / totals[slot]))
                found = self.neighbours(acc, slot, factor)
                if (place < mine.end) & (head < s.group):
                    for i, column in enumerate(self.columns(thread)):
                        vectors.store(found[None, i].load(), outs[place - before, head, None], column)
                    if thread % 4 == 0:
                        sums[place - before, head, 0] = state.maxima[slot] * scale
                        sums[place - before, head, 1] = totals[slot]

    def vectors_of_thread(self, thread: Int32) -> list[tuple[Int32, Int32]]:
        """The rows of Q's tile and their vectors that a thread has."""
        columns = self.s.head // VECTOR
        return [(i * (GROUP // columns) + thread // columns, thread % columns) for i in range(ROWS * columns // GROUP)]

    @cute.jit
    def load_rows(
        self, q: cute.Tensor, choosing: cute.Tensor, mine: Chosen, entry: Int32, held: Any, thread: Int32
    ) -> None:
        """A thread's part of a tile of Q, of the rows from an entry of the list on; of others what there is."""
        for vector, (number, column) in zip(held, self.vectors_of_thread(thread), strict=True):
            row = choosing[cutlass.min(entry + number // self.share, mine.end - 1)]
            head = mine.head * self.s.group + cutlass.min(number % self.share, self.s.group - 1)
            cute.autovec_copy(cute.local_tile(q[row, head, None], (VECTOR,), (column,)), vector)

    def end_of_row(self, choosing: cute.Tensor, mine: Chosen, entry: Int32, thread: Int32, slot: int) -> Int32:
        """Where the keys end that a thread's row sees."""
        if not self.s.causal:
            return mine.keys
        number = self.score_rows.row(thread, slot) // self.share
        row = choosing[cutlass.min(entry + number, mine.end - 1)]
        return cutlass.min(row + 1 - mine.first - mine.key, mine.keys)

    @cute.kernel
    def add_blocks(
        self,
        of_chosen: Any,
        places: cute.Tensor,
        ends: cute.Tensor,
        offsets: cute.Tensor,
        first_head: Int32,
        results: Any,
    ) -> None:
        """A warp has a head of a row. Half of it has every other block, 16 bytes of O to a lane."""
        s, (outs, sums), (o, total_sums, maxima) = self.s, of_chosen, results
        thread, _, _ = cute.arch.thread_idx()
        index, number, _ = cute.arch.block_idx()
        lane, row = thread % WARP, index * WARPS + cute.arch.make_warp_uniform(thread // WARP)
        key_head, member = first_head + number // s.group, number % s.group
        lists = first_head * ((ends.shape[0] - 1) // s.key_heads)
        before, most = Int32(ends[lists, 0]), places.shape[2]
        if row < offsets[offsets.shape[0] - 1]:
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            acc.fill(0.0)
            largest, total = Float32(-math.inf), Float32(0.0)
            for first in cutlass.range(0, most, WARP, unroll=1):
                place, top, sum_of_place = Int32(-1), Float32(-math.inf), Float32(0.0)
                if first + lane < most:
                    place = places[row, key_head, first + lane]
                    if place >= 0:
                        place -= before
                        top, sum_of_place = sums[place, member, 0], sums[place, member, 1]
                peak = top
                for distance in (1, 2, 4, 8, 16):
                    peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, distance))
                peak = cute.arch.fmax(peak, largest)
                shift = Float32(select_(peak == -math.inf, Float32(0.0), peak))
                correction = cute.math.exp2(largest - shift, fastmath=True)
                weight = sum_of_place * cute.math.exp2(top - shift, fastmath=True)
                largest = peak
                total = total * correction + weight
                for i in cutlass.range_constexpr(VECTOR):
                    acc[i] = acc[i] * correction
                for begin in cutlass.range(0, cutlass.min(most - first, WARP), 2 * LOADS, unroll=1):
                    found = []
                    for pair in cutlass.range_constexpr(LOADS):
                        own = begin + 2 * pair + lane // 16
                        at, factor = cute.arch.shuffle_sync(place, own), cute.arch.shuffle_sync(weight, own)
                        line = outs[cutlass.max(at, 0), member, None]
                        found.append((vectors.load(line, lane % 16 % (s.head_v // VECTOR)), factor))
                    for values, factor in found:
                        if factor > 0.0:  # of other places, what memory had before
                            for i in cutlass.range_constexpr(VECTOR):
                                acc[i] = acc[i] + values[i].to(Float32) * factor
            for distance in (1, 2, 4, 8, 16):
                total += cute.arch.shuffle_sync_bfly(total, distance)
            factor = Float32(select_(total == 0.0, Float32(0.0), 1.0 / total))
            for i in cutlass.range_constexpr(VECTOR):
                acc[i] = (acc[i] + cute.arch.shuffle_sync_bfly(acc[i], 16)) * factor
            head = key_head * s.group + member
            if lane < s.head_v // VECTOR:
                vectors.store(acc.load(), o[row, head, None], lane)
            if lane == 0:
                total_sums[row, head] = total
                maxima[row, head] = largest * math.log(2)

    name(add_blocks, "cudnn_attention_selection_add_blocks")
