"""Attention of each row to blocks of keys of its own choice, on Hopper, forward.

What limits it is K and V on their way from L2: so neighbouring rows share the blocks that several of them chose, as
:mod:`cudnn_kernels.sm90.selected_rows` says. A warpgroup takes one block after the other: others keep the tensor cores
busy meanwhile.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences, softmax
from cudnn_kernels.naming import name
from cudnn_kernels.signature import bind
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS
from cudnn_kernels.sm90.selected_rows import SelectedRows, Steps, Tile

REGISTERS = {1: (56, 256), 2: (56, 224), 3: (56, 152)}  # of a loading and a multiplying thread, by warpgroups


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
                cute.arch.mbarrier_wait(steps.rows_full, turn % 2)
                turn += 1
                stage, phase = self.attend(
                    o, sums, maxima, buffers, steps, mine, scale, stage, phase, group, thread
                )  # fmt: skip

    @cute.jit
    def attend(
        self, o: cute.Tensor, sums: cute.Tensor, maxima: cute.Tensor, buffers: Any, steps: Steps, mine: Tile,
        scale: Float32, stage: Int32, phase: Int32, group: Int32, thread: Int32,
    ) -> tuple[Int32, Int32]:  # fmt: skip
        """One tile, from a step and its phase on; those behind it."""
        s = self.s
        tSrQ, tSrK, tOrV = self.operands(buffers, group, thread)
        scores = cute.make_rmem_tensor(self.score_mma().partition_shape_C((ROWS, self.tile_n)), Float32)
        acc = cute.make_rmem_tensor(self.product_mma().partition_shape_C((ROWS, s.head_v)), Float32)
        words = cute.make_rmem_tensor(self.tile_n // 4, Int32)
        state = softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale)
        softmax.reset(state)
        acc.fill(0.0)
        tile = self.arrived(steps, stage, phase)
        while tile >= 0:
            if self.wanted(steps, stage, group):
                self.multiply_scores(scores, tSrQ, tSrK, stage)
                self.finish()
                if self.hide_unchosen(scores, steps, stage, mine, group, thread):
                    corrections = softmax.update(state, scores, self.score_rows, self.tile_n, slack=0.0)
                    self.round(scores, words)
                    self.correct_where_needed(acc, *corrections)
                else:
                    words.fill(0)
                self.multiply_values(acc, words, tOrV, stage)
                self.finish()
            stage, phase = self.next(steps, stage, phase)
            tile = self.arrived(steps, stage, phase)
        stage, phase = self.next(steps, stage, phase)
        self.release(steps.rows_empty)
        self.write(acc, state, o, sums, maxima, mine, group, thread)
        return stage, phase

    def operands(self, buffers: Any, group: Int32, thread: Int32) -> Any:
        """A warpgroup's rows of Q, K and V as products take them."""
        score_mma, product_mma = self.score_mma(), self.product_mma()
        score, product = score_mma.get_slice(thread), product_mma.get_slice(thread)
        own = cute.local_tile(buffers["q"][None, None, 0], (ROWS, self.s.head), (group, 0))
        return (
            score_mma.make_fragment_A(score.partition_A(own)),
            score_mma.make_fragment_B(score.partition_B(buffers["k"])),
            product_mma.make_fragment_B(product.partition_B(sequences.turned(buffers["v"]))),
        )

    def finish(self) -> None:
        """Waits for a product."""
        warpgroup.wait_group(0)

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
