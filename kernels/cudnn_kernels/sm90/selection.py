"""Attention of each row to blocks of keys of its own choice, on Hopper, forward.

What limits it is K and V on their way from L2: so neighbouring rows share the blocks that several of them chose, as
:mod:`cudnn_kernels.sm90.selected_rows` says. Where a warpgroup's next block follows at once, it issues that one's
Q K^T and this one's P V, and while the latter runs it computes the softmax of the former.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.attention import softmax
from cudnn_kernels.attention.sparse import BRANCHES
from cudnn_kernels.attention.warp_products import WarpProducts
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.ring import advanced
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import ROWS
from cudnn_kernels.sm90.rows_apart import EACH, RowsApart
from cudnn_kernels.sm90.selected_rows import Choices, Part, Tile, Warpgroup


class Selection(RowsApart):
    """The kernel for one :class:`SelectionConfiguration`."""

    @property
    def apart(self) -> bool:
        """Whether rows may be taken one by one: registers are enough for 16 heads of each."""
        s = self.s
        return s.apart > 0 and s.padded == 16 and self.tile_n == ROWS

    def launch(self, given: Mapping[str, Any]) -> None:
        tensors = tuple(given[x] for x in ("o", *(x.name for x in self.s.sums)))
        scale, drawn = given["scale_softmax"] * softmax.LOG2_E, given["workspace"].iterator
        self.launch_rows(self.selection, given, tensors, scale, drawn)

    @cute.kernel
    def selection(self, atoms: Any, tensors: Any, choices: Choices, scale: Float32) -> None:
        """``tensors``: O, and the log-sum-exp or the sums of exponentials and the largest scores."""
        self.roles(atoms, tensors, choices, scale)

    name(selection, "cudnn_attention_selection")

    @cute.jit
    def attend(self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """One tile, from a step and its phase on; those behind it."""
        if const_expr(self.apart):
            if w.steps.apart[w.group] != 0:
                stage, phase = self.attend_apart(w, index, mine, stage, phase)
            else:
                stage, phase = self.attend_together(w, index, mine, stage, phase)
        else:
            stage, phase = self.attend_together(w, index, mine, stage, phase)
        return stage, phase

    @cute.jit
    def attend_together(
        self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """The same, where all rows of a warpgroup are those of its products."""
        part = self.new_part(w, mine)
        stage, phase = self.take(w, part, stage, phase)
        largest = part.row_values[0].largest
        if const_expr(largest is not None):
            for slot in cutlass.range_constexpr(2):
                largest[slot] = self.score_rows.across(largest[slot], cute.arch.fmax)
        self.write(w, part, self.tile(index, w.choices))  # found again: registers are few
        return advanced(w.steps.ring, stage, phase)

    def new_part(self, w: Warpgroup, mine: Tile, near: bool = False) -> Part:
        """What a tile is computed with, before its first step."""
        s, buffers = self.s, w.buffers
        own = self.left(cute.local_tile(buffers["q"][None, None, 0], (ROWS, s.head), (w.group, 0)), w.thread)
        keys, values = self.right(buffers["k"], w.thread), self.right(turned(buffers["v"]), w.thread, True)
        scores, acc = self.accumulator(self.tile_n), self.accumulator(s.head_v)
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        maxima, sums = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        state = softmax.State(maxima, sums, w.scale, None if s.lse else cute.make_rmem_tensor(2, Float32))
        softmax.reset(state)
        acc.fill(0.0)
        corrections = cute.make_rmem_tensor(2, Float32)  # of sums before a step: factors
        return Part(mine, ((scores, own, keys, s.head),), rounded, acc, values, s.head_v, (state, corrections), near)

    @cute.jit
    def weigh(self, w: Warpgroup, part: Part, stage: Int32, seen: Any, again: cutlass.Constexpr[bool]) -> None:
        """The exponentials of a step's scores, in place, and what sums before are to be multiplied by.

        Behind a tile's first step they are guessed, where the largest scores are not wanted, with what was subtracted
        before. Only where a warp's are too large, it computes its scores once more.
        """
        scores, (state, corrections), (spans, some, every) = part.products[0][0], part.row_values, seen
        corrections.fill(1.0)
        if some:
            self.hide_unchosen(scores, spans, every, w.thread)
            if const_expr(again and state.largest is None):
                before = [state.sums[slot] for slot in range(2)]
                fits = softmax.guess(state, scores, self.score_rows, self.tile_n)
                if cute.arch.vote_any_sync(~fits):
                    for slot in cutlass.range_constexpr(2):
                        state.sums[slot] = before[slot]
                    self.repeat(w, scores, stage)
                    same_spans, _, same_every = self.seen_keys(w, part, stage)
                    self.hide_unchosen(scores, same_spans, same_every, w.thread)
                    self.soften(state, scores, corrections)
            else:
                self.soften(state, scores, corrections)

    def repeat(self, w: Warpgroup, scores: cute.Tensor, stage: Int32) -> None:
        """A warp's scores by products of its own, in which the others of its warpgroup do not take part."""
        products, s = WarpProducts(), self.s
        products.dtype = self.dtype
        own = cute.local_tile(w.buffers["q"][None, None, 0], (ROWS, s.head), (w.group, 0))
        operands = products.left(own, w.thread), products.right(w.buffers["k"], w.thread)
        acc = cute.make_tensor(scores.iterator, products.accumulator(self.tile_n).layout)
        products.multiply_shared(acc, *operands, self.tile_n, s.head, stage)

    @cute.jit
    def soften(self, given: softmax.State, scores: cute.Tensor, corrections: cute.Tensor) -> None:
        """The same by largest scores, which threads compare only where one of a warp's is too large."""
        state = replace(given)  # what a branch leaves in it is not known behind the branch around the call
        orders = [self.score_rows.order(self.tile_n, slot) for slot in range(2)]
        own = [softmax.largest_of(scores, order) for order in orders]
        if const_expr(state.largest is not None):
            for slot in cutlass.range_constexpr(2):
                state.largest[slot] = cute.arch.fmax(state.largest[slot], own[slot])
        exceeds = [(own[slot] - state.maxima[slot]) * state.scale > softmax.SLACK for slot in range(2)]
        if cute.arch.vote_any_sync(exceeds[0] | exceeds[1]):
            for slot in cutlass.range_constexpr(2):
                largest = self.score_rows.across(own[slot], cute.arch.fmax)
                corrections[slot] = softmax.raise_row(state, slot, largest)
                state.sums[slot] = state.sums[slot] * corrections[slot]
        for slot in cutlass.range_constexpr(2):
            state.sums[slot] = softmax.powers(state, slot, scores, orders[slot], state.sums[slot])

    def round_step(self, part: Part, some: Boolean) -> None:
        """Makes what was weighed an operand, and multiplies the sums before."""
        super().round_step(part, some)
        _, corrections = part.row_values
        self.correct_where_needed(part.acc, corrections[0], corrections[1])

    @cute.jit
    def write(self, w: Warpgroup, part: Part, mine: Tile) -> None:
        """O, and what else is wanted of the heads."""
        (o, *sums), (state, _) = w.tensors, part.row_values
        for slot in cutlass.range_constexpr(2):
            total = self.score_rows.across(state.sums[slot], lambda a, b: a + b)
            factor = Float32(select_(total == 0.0, Float32(1.0), 1.0 / total))
            row, head, exists = self.head_of(mine, w.group, self.score_rows.row(w.thread, slot))
            if exists:
                self.write_sums(sums, (row, head), state, slot, total, w.thread)
                self.score_rows.store(part.acc, slot, o[row, head, None], w.thread, factor)

    @cute.jit
    def write_sums(
        self,
        tensors: Sequence[cute.Tensor],
        place: Any,
        state: softmax.State,
        slot: cutlass.Constexpr[int],
        total: Float32,
        thread: Int32,
    ) -> None:
        """One of four threads: the log of the sum of a head's exponentials, or the sum, and its largest score."""
        if thread % 4 == 0:
            largest = None if const_expr(state.largest is None) else state.largest[slot] * state.scale
            self.write_sum(tensors, place, total, state.maxima[slot] * state.scale, largest)


class GatedSelection(Selection):
    """The kernel for one :class:`GatedSelectionConfiguration`.

    A tile's newest keys come before those of its lists. O of the other branches is read where O is written.
    """

    def launch(self, given: Mapping[str, Any]) -> None:
        tensors = tuple(given.get(x) for x in ("o", "compressed", "near", "gates", "near_lse", "selected", "lse"))
        scale, drawn = given["scale_softmax"] * softmax.LOG2_E, given["workspace"].iterator
        self.launch_rows(self.gated_selection, given, tensors, scale, drawn, given["window"])

    @cute.kernel
    def gated_selection(self, atoms: Any, tensors: Any, choices: Choices, scale: Float32) -> None:
        """``tensors``: O, those of the other branches, gates; the window's log-sum-exp, selection's O and log-sum-exp,
        or None.
        """
        self.roles(atoms, tensors, choices, scale)

    name(gated_selection, "cudnn_attention_gated_selection")

    @cute.jit
    def attend(self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        part = self.new_part(w, mine, near=True)
        stage, phase = self.take(w, part, stage, phase)
        self.write_near(w, part, self.tile(index, w.choices))
        return Selection.attend(self, w, index, mine, *advanced(w.steps.ring, stage, phase))

    @cute.jit
    def write_near(self, w: Warpgroup, part: Part, mine: Tile) -> None:
        """O of attention to the newest keys, by the threads that :meth:`write` lets read it, and its log-sum-exp."""
        _, _, near, _, near_lse, *_ = w.tensors
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.head_of(mine, w.group, self.score_rows.row(w.thread, slot))
            factor, log_sum = softmax.finish(part.row_values[0], self.score_rows, slot)
            values = self.neighbours(part.acc, slot, factor)
            if exists:
                for i, column in enumerate(self.columns(w.thread)):
                    vectors.store(values[None, i].load(), near[row, head, None], column)
                if const_expr(self.s.keeps):
                    place = mine.place + row - mine.row
                    if (w.thread % 4 == 0) & (place < near_lse.shape[2]):
                        near_lse[mine.sequence, head, place] = log_sum

    @cute.jit
    def write(self, w: Warpgroup, part: Part, mine: Tile) -> None:
        """The sum of the branches, from values that are rounded as each branch's O is.

        All that is read is on its way before anything is written, since loads do not pass stores.
        """
        (o, _, _, _, _, selected, lse), (state, _) = w.tensors, part.row_values
        columns, read = self.columns(w.thread), []
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.head_of(mine, w.group, self.score_rows.row(w.thread, slot))
            row, head = Int32(select_(exists, row, mine.row)), Int32(select_(exists, head, mine.first_head))
            read.append((row, head, exists, *self.read_branches(w, row, head, exists, columns)))
        for slot in cutlass.range_constexpr(2):
            row, head, exists, compressed, near, factors = read[slot]
            total = self.score_rows.across(state.sums[slot], lambda a, b: a + b)
            own = self.neighbours(part.acc, slot, Float32(select_(total == 0.0, Float32(1.0), 1.0 / total)))
            if exists:
                for i in cutlass.range_constexpr(len(columns)):
                    parts = [x.load().to(Float32) for x in (compressed[i], own[None, i], near[i])]
                    weighted = parts[0] * factors[0] + parts[1] * factors[1] + parts[2] * factors[2]
                    vectors.store(weighted, o[row, head, None], columns[i])
                    if const_expr(self.s.keeps):
                        vectors.store(own[None, i].load(), selected[row, head, None], columns[i])
                if const_expr(self.s.keeps):
                    self.write_sums([lse], (row, head), state, slot, total, w.thread)

    @cute.jit
    def write_parts(self, w: Warpgroup, mine: Tile, rounded: Sequence[cute.Tensor]) -> None:
        """The sum of the branches, in the same way, part by part. What is read for a row is on its way before the row
        before is written.
        """
        o, _, _, _, _, selected, *_ = w.tensors
        parts = self.s.head_v // ROWS
        rows = [
            [x for number in range(first, first + parts) for x in self.vectors_of_part(w, mine, number)]
            for first in range(0, len(rounded), parts)
        ]
        coming = self.read_places(w, rows[0])
        for i in cutlass.range_constexpr(len(rows)):
            found, read, each = rows[i], coming, len(rows[i]) // parts
            if const_expr(i + 1 < len(rows)):
                coming = self.read_places(w, rows[i + 1])
            for j in cutlass.range_constexpr(len(found)):
                row, head, column, place, exists = found[j]
                (first,), (last,), factors = read[j]
                if const_expr(j % each == 0):
                    tile = self.passed(w, rounded[i * parts + j // each])
                own = vectors.load(tile[place // EACH, None], place % EACH)
                if exists:
                    values = [x.load().to(Float32) for x in (first, own, last)]
                    weighted = values[0] * factors[0] + values[1] * factors[1] + values[2] * factors[2]
                    vectors.store(weighted, o[row, head, None], column)
                    if const_expr(self.s.keeps):
                        vectors.store(own.load(), selected[row, head, None], column)

    def read_places(self, w: Warpgroup, places: Sequence[Any]) -> list[Any]:
        """The other branches' vectors at some places, and the gates."""
        return [self.read_branches(w, row, head, exists, [column]) for row, head, column, _, exists in places]

    def read_branches(
        self, w: Warpgroup, row: Int32, head: Int32, exists: Boolean, columns: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Vectors of the other branches, and the gates, of a head of a row.

        Where a thread's row does not exist, the given one is another thread's, which may be writing its window's O.
        """
        _, compressed, near, gates, *_ = w.tensors
        lines = [x[row, head, None] for x in (compressed, near)]
        address = Int64(select_(exists, *(x.iterator.toint() for x in reversed(lines))))
        start = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=VECTOR * self.dtype.width // 8)
        lines[1] = cute.make_tensor(start, cute.make_layout(self.s.head_v))
        found = [[vectors.load(line, column) for column in columns] for line in lines]
        return *found, [gates[row, head, i].to(Float32) for i in range(len(BRANCHES))]
