"""Attention of each row to blocks of keys of its own choice, on Hopper, forward.

What limits it is K and V on their way from L2: so neighbouring rows share the blocks that several of them chose, as
:mod:`cudnn_kernels.sm90.selected_rows` says. Where a warpgroup's next block follows at once, it issues that one's
Q K^T and this one's P V, and while the latter runs it computes the softmax of the former.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS
from cudnn_kernels.sm90.selected_rows import SelectedRows, Steps, Tile

REGISTERS = {1: (56, 256), 2: (56, 224), 3: (32, 160)}  # of a loading and a multiplying thread, by warpgroups


class Selection(SelectedRows):
    """The kernel for one :class:`SelectionConfiguration`."""

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        s = self.s
        given = bind(s.slots(), arguments)
        rows, offsets = given["q"].shape[0], given["cum_seqlen_q"]
        tiles = self.tiles(rows, offsets)
        self.selection(
            self.atoms(given, {"q": s.head, "k": s.head, "v": s.head_v}), given["o"], given["l"], given["m"],
            given["block_indices"], given["block_counts"], offsets, tiles, given["scale_softmax"] * softmax.LOG2_E,
        ).launch(
            grid=[cutlass.min(tiles * s.key_heads, given["multiprocessors"]), 1, 1],
            block=[GROUP * (1 + self.groups), 1, 1], stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def selection(
        self, atoms: Any, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, indices: cute.Tensor,
        counts: cute.Tensor, offsets: cute.Tensor, tiles: Int32, scale: Float32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        s = self.s
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // GROUP)
        smem = SmemAllocator()
        buffers = self.buffers(smem, {"q": (self.tile_m, s.head, 1), "k": (self.tile_n, s.head, s.stages),
                                      "v": (self.tile_n, s.head_v, s.stages)})  # fmt: skip
        lists, steps = self.lists(smem), self.steps(smem)
        self.initialise(steps, thread)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            self.produce(atoms, ("q", "k", "v"), buffers, indices, counts, offsets, tiles, lists, steps, thread)
        else:
            cute.arch.setmaxregister_increase(many)
            self.consume(o, sums, maxima, buffers, offsets, tiles, steps, scale, group - 1, thread - GROUP * group)

    name(selection, "cudnn_attention_selection")

    @cute.jit
    def consume(
        self, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, buffers: Any, offsets: cute.Tensor, tiles: Int32,
        steps: Steps, scale: Float32, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup, with all tiles of the CTA."""
        first, _, _ = cute.arch.block_idx()
        every, _, _ = cute.arch.grid_dim()
        stage, phase, turn = Int32(0), Int32(0), Int32(0)
        for index in cutlass.range(first, tiles * self.s.key_heads, every, unroll=1):
            mine = self.tile(index, tiles, offsets)
            if mine.rows > 0:
                cute.arch.mbarrier_wait(steps.rows_full + group, turn % 2)
                turn += 1
                place = (index, tiles, offsets)
                stage, phase = self.attend(
                    o, sums, maxima, buffers, steps, mine, place, scale, stage, phase, group, thread
                )  # fmt: skip

    @cute.jit
    def attend(
        self, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, buffers: Any, steps: Steps, mine: Tile,
        place: Any, scale: Float32, stage: Int32, phase: Int32, group: Int32, thread: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """One tile, from a step and its phase on; those behind it."""
        s = self.s
        own = self.left(cute.local_tile(buffers["q"][None, None, 0], (ROWS, s.head), (group, 0)), thread)
        keys, values = self.right(buffers["k"], thread), self.right(sequences.turned(buffers["v"]), thread, True)
        scores, acc = self.accumulator(self.tile_n), self.accumulator(s.head_v)
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        state = softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale)
        softmax.reset(state)
        acc.fill(0.0)
        corrections = cute.make_rmem_tensor(2, Float32)
        stage, phase, found = self.find(steps, stage, phase, group)
        while found:
            self.multiply_shared(scores, own, keys, self.tile_n, s.head, stage)
            self.finish(0)
            self.weigh(scores, corrections, state, steps, stage, mine, group, thread)
            rounded.store(scores.load().to(self.dtype))
            self.correct_where_needed(acc, corrections[0], corrections[1])
            before = stage
            stage, phase = self.after(stage, phase)
            again = self.follows(steps, before, group)
            while again:
                cute.arch.mbarrier_wait(steps.full + stage, phase)
                self.multiply_shared(scores, own, keys, self.tile_n, s.head, stage)
                self.add_product(acc, rounded, values, s.head_v, self.tile_n, before)
                self.finish(1)
                self.weigh(scores, corrections, state, steps, stage, mine, group, thread)
                self.finish(0)
                self.release(steps.empty + before)
                rounded.store(scores.load().to(self.dtype))
                self.correct_where_needed(acc, corrections[0], corrections[1])
                before = stage
                stage, phase = self.after(stage, phase)
                again = self.follows(steps, before, group)
            self.add_product(acc, rounded, values, s.head_v, self.tile_n, before)
            self.finish(0)
            self.release(steps.empty + before)
            stage, phase, found = self.find(steps, stage, phase, group)
        self.release(steps.empty + stage)
        self.release(steps.rows_empty + group)
        self.write(acc, state, o, sums, maxima, self.tile(*place), group, thread)  # found again: registers are few
        return self.after(stage, phase)

    @cute.jit
    def weigh(
        self, scores: cute.Tensor, corrections: cute.Tensor, state: softmax.State, steps: Steps, stage: Int32,
        mine: Tile, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """The exponentials of a step's scores, in place, and what sums before are to be multiplied by."""
        corrections.fill(1.0)
        if self.hide_unchosen(scores, steps, stage, mine, group, thread):
            factors = softmax.update(state, scores, self.score_rows, self.tile_n, slack=0.0)
            for slot in cutlass.range_constexpr(2):
                corrections[slot] = factors[slot]
        else:
            scores.fill(0.0)

    @cute.jit
    def write(
        self, acc: cute.Tensor, state: softmax.State, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor,
        mine: Tile, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """O, the sums of exponentials and the largest scores of the heads."""
        s = self.s
        for slot in cutlass.range_constexpr(2):
            total = self.score_rows.across(state.sums[slot], lambda a, b: a + b)
            factor = Float32(select_(total == 0.0, Float32(1.0), 1.0 / total))
            row, head, exists = self.head_of(mine, group, self.score_rows.row(thread, slot))
            if exists:
                if thread % 4 == 0:
                    sums[row, head] = total
                    maxima[row, head] = state.maxima[slot] * state.scale * math.log(2)
                self.write_pairs(o[row, head, None], acc, s.head_v, slot, factor, thread)
