"""Products of a single row with the blocks that it chose, on Hopper.

    S^T = K Q^T      O^T = V^T P^T

Keys, and elements of V, are the 64 rows of a warpgroup's product, and the heads of one row its columns. So nothing is
multiplied for rows that did not choose a block, which pays where few of a warpgroup's rows share one. All threads of a
warpgroup share the softmax of a row. P^T goes through shared memory, and so does O.
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
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.ring import advanced
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.wgmma import MN, Product
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS
from cudnn_kernels.sm90.selected_rows import FIRST_BARRIER, WARP, Lists, SelectedRows, Tile, Warpgroup

EACH = ROWS // VECTOR  # vectors of 64 elements


NONE = -1e30  # is subtracted from a row's scores before the first one: a raised one makes 0 of all before


@dataclass
class Row:
    """A row of Q: its sums of O^T, and of each of a thread's heads what is subtracted from scores times their scale,
    the sum of the thread's exponentials, and its largest score, where it is wanted.
    """

    acc: cute.Tensor
    shifts: cute.Tensor
    sums: cute.Tensor
    largest: Any


class RowsApart(SelectedRows):
    """What a warpgroup computes of a tile whose rows it takes one by one, for steps of 64 keys."""

    @property
    def own_values(self) -> int:
        """Of each head of a warpgroup's rows: one of each warp."""
        return GROUP // WARP if self.apart else 0

    def further(self) -> dict[str, tuple[int, int, int]]:
        return {"p": (self.s.padded * self.groups, self.tile_n, 1)} if self.apart else {}

    @cute.jit
    def share_little(self, lists: Lists, buffer: Int32, group: cutlass.Constexpr[int]) -> Any:
        """Counts, with a warp, the warpgroup's rows that chose a step, for all steps that any of them chose."""
        steps, rows = Int32(0), Int32(0)
        count, masks, lane = Int32(lists.counts[buffer]), lists.masks, cute.arch.lane_idx()
        for first in cutlass.range(0, count, WARP * self.parts, unroll=1):
            chosen = Int32(0)
            for part in cutlass.range_constexpr(self.parts):
                place = first + lane * self.parts + part
                if place < count:
                    chosen = chosen | masks[place, buffer]
            chosen = self.of_warpgroup(chosen, group)
            steps += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(chosen != 0)))
            for row in cutlass.range_constexpr(self.s.together):
                rows += Int32(cute.arch.popc(cute.arch.vote_ballot_sync((chosen >> row) & 1 == 1)))
        return Int32(select_(rows * 8 < steps * self.s.apart, Int32(1), Int32(0)))

    @property
    def slots(self) -> int:
        """A thread's heads."""
        return self.s.padded // 4

    def of_keys(self, rows: int = 1) -> Product:
        """The product S^T = K Q^T of some rows."""
        return Product(self.dtype, self.s.padded * rows)

    def of_elements(self) -> Product:
        """The product O^T = V^T P^T."""
        return Product(self.dtype, self.s.padded, rows=self.s.head_v, a=MN)

    def head_of_slot(self, thread: Int32, slot: int) -> Int32:
        """Which of a row's heads is a thread's."""
        return slot // 2 * 8 + thread % 4 * 2 + slot % 2

    def places(self, values: cute.Tensor, slot: int) -> list[int]:
        """A thread's values of one of its heads, of S^T or O^T."""
        each = 2 * self.slots
        return [i for i in range(cute.size(values)) if i % each // 4 == slot // 2 and i % 2 == slot % 2]

    def heads_of_rows(self, w: Warpgroup, first: int, count: int) -> cute.Tensor:
        """Where Q of some of a warpgroup's rows is in shared memory, (heads, elements)."""
        own = cute.local_tile(w.buffers["q"][None, None, 0], (ROWS, self.s.head), (w.group, 0))
        return cute.local_tile(own, (self.s.padded * count, self.s.head), (first // count, 0))

    def weights_of_row(self, w: Warpgroup) -> cute.Tensor:
        """Where P of a warpgroup's row is in shared memory, (heads, keys)."""
        return cute.local_tile(w.buffers["p"][None, None, 0], (self.s.padded, self.tile_n), (w.group, 0))

    def new_row(self) -> Row:
        """A row before its first block."""
        shifts, sums, largest = (cute.make_rmem_tensor(self.slots, Float32) for _ in range(3))
        row = Row(self.of_elements().accumulator(), shifts, sums, None if self.s.lse else largest)
        row.acc.fill(0.0)
        row.shifts.fill(NONE)
        row.sums.fill(0.0)
        largest.fill(-math.inf)
        return row

    @cute.jit
    def attend_apart(self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """One tile, from a step and its phase on; those behind it. Two rows that follow each other, and both chose a
        step, have one product with K.
        """
        s, buffers, thread, ring = self.s, w.buffers, w.thread, w.steps.ring
        of_elements, p = self.of_elements(), self.weights_of_row(w)
        elements, weights = of_elements.left(turned(buffers["v"]), thread), of_elements.right(p, thread)
        rows = [self.new_row() for _ in range(s.together)]
        stage, phase, found = self.find(w, stage, phase)
        while found:
            chosen = self.chosen(w, stage)
            for first in cutlass.range_constexpr(0, s.together, 2):
                two = (chosen >> first) & 3
                if two == 3:
                    self.take_rows(w, mine, stage, rows, first, 2, elements, weights, p)
                else:
                    for number in cutlass.range_constexpr(first, first + 2):
                        if two == 1 << (number - first):
                            self.take_rows(w, mine, stage, rows, number, 1, elements, weights, p)
            self.finish(0)
            self.release(ring.empty + stage)
            stage, phase, found = self.find(w, *advanced(ring, stage, phase))
        self.release(ring.empty + stage)
        self.release(w.steps.rows_empty + w.group)
        self.write_apart(w, self.tile(index, w.choices), rows)  # found again: registers are few
        return advanced(ring, stage, phase)

    @cute.jit
    def take_rows(
        self,
        w: Warpgroup,
        mine: Tile,
        stage: Int32,
        rows: Sequence[Row],
        first: cutlass.Constexpr[int],
        count: cutlass.Constexpr[int],
        elements: Any,
        weights: Any,
        p: cute.Tensor,
    ) -> None:
        """A step of one row, or of two. The last product with V is issued, and not waited for."""
        product = self.of_keys(count)
        keys = product.left(w.buffers["k"], w.thread)
        queries = product.right(self.heads_of_rows(w, first, count), w.thread)
        scores = product.accumulator()
        product.issue(scores, keys[None, None, None, stage], queries, False)
        ends = [self.end_of_warp(w, mine, stage, first + i) for i in range(count)]
        self.finish(0)
        for i in cutlass.range_constexpr(count):
            own = cute.make_tensor(scores.iterator + 2 * self.slots * i, self.of_keys().accumulator().layout)
            self.weigh_row(w, rows[first + i], own, ends[i], p)
            self.of_elements().issue(rows[first + i].acc, elements[None, None, None, stage], weights, True)

    def chosen(self, w: Warpgroup, stage: Int32) -> Int32:
        """The warpgroup's rows that chose any part of a step, as bits."""
        mask = Int32(0)
        for part in range(self.parts):
            mask = mask | w.steps.masks[part, stage]
        return self.of_warpgroup(cute.arch.make_warp_uniform(mask), w.group)

    def of_warpgroup(self, rows: Int32, group: Any) -> Int32:
        """The warpgroup's rows, of some as bits."""
        return (rows >> (group * self.s.together)) & ((1 << self.s.together) - 1)

    def end_of_warp(self, w: Warpgroup, mine: Tile, stage: Int32, row: int) -> Int32:
        """Where the keys end that a row chose and sees, of the step's keys that a warp has: these are of one part."""
        number = w.group * self.s.together + row
        part = w.thread // WARP * 16 // self.size if self.parts > 1 else 0
        chose = (w.steps.masks[part, stage] >> number) & 1
        end = self.seen(mine, number) - w.steps.tiles[part, stage] * self.size
        return part * self.size + Int32(select_(chose == 1, end, Int32(0)))

    @cute.jit
    def weigh_row(self, w: Warpgroup, row: Row, scores: cute.Tensor, end: Int32, p: cute.Tensor) -> None:
        """Makes P of a row's scores, once products are done, with what was subtracted before, and again with more if
        it is too large.
        """
        thread, sums, largest, first = w.thread, row.sums, row.largest, w.thread // WARP * 16
        if end < first + 16:
            for i in cutlass.range_constexpr(cute.size(scores)):
                key = first + thread % WARP // 4 + i // 2 % 2 * 8
                scores[i] = Float32(select_(key < end, scores[i], -Float32.inf))
        own, powers = cute.make_rmem_tensor(self.slots, Float32), cute.make_rmem_tensor(scores.shape, Float32)
        if const_expr(largest is not None):
            for slot in cutlass.range_constexpr(self.slots):
                largest[slot] = cute.arch.fmax(largest[slot], self.of_slot(scores, slot, cute.arch.fmax))
        self.raise_to_powers(w, row, scores, powers, own)
        excess = own[0]
        for slot in cutlass.range_constexpr(1, self.slots):
            excess = cute.arch.fmax(excess, own[slot])
        self.finish(0)
        if self.any_of_group(w.group, excess > softmax.LARGEST_SUM):
            for slot in cutlass.range_constexpr(self.slots):
                own[slot] = self.of_slot(scores, slot, cute.arch.fmax)
            self.raise_row(w, row, own)
            self.raise_to_powers(w, row, scores, powers, own)
        for slot in cutlass.range_constexpr(self.slots):
            sums[slot] = sums[slot] + own[slot]
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        rounded.store(powers.load().to(self.dtype))
        self.store_turned(rounded, p, thread)
        self.meet_group(w.group)

    def of_slot(self, values: cute.Tensor, slot: int, combine: Callable[[Any, Any], Any]) -> Float32:
        """What a thread has of one of its heads, combined."""
        one, other = (values[i] for i in self.places(values, slot))
        return combine(one, other)

    def raise_to_powers(
        self, w: Warpgroup, row: Row, scores: cute.Tensor, powers: cute.Tensor, sums: cute.Tensor
    ) -> None:
        """Exponentials of a row's scores, and the sums of a thread's."""
        for slot in range(self.slots):
            for i in self.places(scores, slot):
                powers[i] = cute.math.exp2(scores[i] * w.scale - row.shifts[slot], fastmath=True)
            sums[slot] = self.of_slot(powers, slot, lambda a, b: a + b)

    def any_of_group(self, group: Int32, some: Boolean) -> Boolean:
        """Whether something holds for any thread of a warpgroup, which meets."""
        found = cute.arch.inline_ptx(
            "{{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; bar.red.or.pred q, {$r1}, "
            f"{GROUP}, p; selp.s32 {{$w0}}, 1, 0, q; }}}}",
            write_only_types=[Int32],
            read_only_args=[Int32(select_(some, Int32(1), Int32(0))), FIRST_BARRIER + group],
        )
        return found != 0

    @cute.jit
    def raise_row(self, w: Warpgroup, row: Row, most: cute.Tensor) -> None:
        """Raises what is subtracted of a row's heads, and multiplies their sums by what that makes of them."""
        shifts, sums, acc = row.shifts, row.sums, row.acc
        self.exchange(w, [most], cute.arch.fmax)
        for slot in cutlass.range_constexpr(self.slots):
            before, larger = shifts[slot], most[slot] * w.scale
            shifts[slot] = Float32(select_(larger - before > softmax.SLACK, larger, before))
            factor = cute.math.exp2(before - shifts[slot], fastmath=True)
            sums[slot] = sums[slot] * factor
            for i in self.places(acc, slot):
                acc[i] = acc[i] * factor

    @cute.jit
    def exchange(self, w: Warpgroup, rows: Sequence[cute.Tensor], combine: cutlass.Constexpr[Callable]) -> None:
        """Combines values of the heads of some rows over a warpgroup's threads, in place."""
        own, thread = w.own, w.thread
        for number in cutlass.range_constexpr(len(rows)):
            for slot in cutlass.range_constexpr(self.slots):
                value = rows[number][slot]
                for distance in (4, 8, 16):
                    value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
                if thread % WARP < 4:
                    own[number * self.s.padded + self.head_of_slot(thread, slot), thread // WARP] = value
        self.meet_group(w.group)
        for number in cutlass.range_constexpr(len(rows)):
            for slot in cutlass.range_constexpr(self.slots):
                place = number * self.s.padded + self.head_of_slot(thread, slot)
                value = own[place, 0]
                for other in cutlass.range_constexpr(1, self.own_values):
                    value = combine(value, own[place, other])
                rows[number][slot] = value
        self.meet_group(w.group)  # the next ones may be written

    def store_turned(self, values: cute.Tensor, tile: cute.Tensor, thread: Int32) -> None:
        """Stores rounded values of S^T, or of 64 elements of O^T, as (heads, values) in shared memory."""
        self.of_keys().put(values, turned(tile), thread, True)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def write_apart(self, w: Warpgroup, mine: Tile, rows: Sequence[Row]) -> None:
        """O of the heads of a warpgroup's rows, and what else is wanted of them."""
        self.exchange(w, [row.sums for row in rows], lambda a, b: a + b)
        if const_expr(not self.s.lse):
            self.exchange(w, [row.largest for row in rows], cute.arch.fmax)
        rounded = []
        for number in cutlass.range_constexpr(len(rows)):
            row = rows[number]
            if const_expr(w.tensors[-1] is not None):
                self.write_sums_of_row(w, mine, number, row)
            acc, sums = row.acc, row.sums
            for slot in cutlass.range_constexpr(self.slots):
                factor = Float32(select_(sums[slot] == 0.0, Float32(1.0), 1.0 / sums[slot]))
                for i in self.places(acc, slot):
                    acc[i] = acc[i] * factor
            for part in cutlass.range_constexpr(self.s.head_v // ROWS):
                values = cute.make_rmem_tensor(self.of_keys().accumulator().shape, self.result)
                for i in cutlass.range_constexpr(cute.size(values)):
                    values[i] = acc[part * cute.size(values) + i].to(self.result)
                rounded.append(values)
        self.write_parts(w, mine, rounded)

    def vectors_of_part(self, w: Warpgroup, mine: Tile, number: int) -> list[Any]:
        """Of a part, 64 elements of all heads of a row, the vectors that a thread writes: their row, head and number
        in O, their place in the part, and whether they exist.
        """
        parts, found = self.s.head_v // ROWS, []
        row = w.group * self.s.together + number // parts
        for first in range(0, self.s.padded * EACH, GROUP):
            place = first + w.thread
            head, column = place // EACH, number % parts * EACH + place % EACH
            exists = (row < mine.rows) & (head < mine.heads)
            head = mine.first_head + Int32(select_(exists, head, Int32(0)))
            found.append((Int32(select_(exists, mine.row + row, mine.row)), head, column, place, exists))
        return found

    @cute.jit
    def passed(self, w: Warpgroup, rounded: cute.Tensor) -> cute.Tensor:
        """A part in shared memory, (heads, elements), once all threads' values are there."""
        tile = cute.recast_tensor(self.weights_of_row(w), self.result)
        self.meet_group(w.group)
        self.store_turned(rounded, tile, w.thread)
        self.meet_group(w.group)
        return tile

    @cute.jit
    def write_parts(self, w: Warpgroup, mine: Tile, rounded: Sequence[cute.Tensor]) -> None:
        """O, part by part."""
        o = w.tensors[0]
        for number in cutlass.range_constexpr(len(rounded)):
            tile = self.passed(w, rounded[number])
            for row, head, column, place, exists in self.vectors_of_part(w, mine, number):
                values = vectors.load(tile[place // EACH, None], place % EACH)
                if exists:
                    vectors.store(values.load(), o[row, head, None], column)

    @cute.jit
    def write_sums_of_row(self, w: Warpgroup, mine: Tile, number: cutlass.Constexpr[int], row: Row) -> None:
        """What is wanted of the exponentials of a row's heads."""
        own = w.group * self.s.together + number
        for slot in cutlass.range_constexpr(self.slots):
            head = self.head_of_slot(w.thread, slot)
            if (w.thread < 4) & (own < mine.rows) & (head < mine.heads):
                largest = None if const_expr(row.largest is None) else row.largest[slot] * w.scale
                place, tensors = (mine.row + own, mine.first_head + head), w.tensors[-len(self.s.sums) :]
                self.write_sum(tensors, place, row.sums[slot], row.shifts[slot], largest)

    def write_sum(
        self, tensors: Sequence[cute.Tensor], place: Any, total: Float32, subtracted: Float32, largest: Any
    ) -> None:
        """The log of a head's sum of exponentials, or the sum, as if its largest score had been subtracted, and that
        one, from the sum with another number subtracted. All but results are logarithms to base 2.
        """
        if largest is None:
            log_sum = (subtracted + cute.math.log2(total, fastmath=True)) * math.log(2)
            tensors[0][place] = Float32(select_(total == 0.0, Float32(-math.inf), log_sum))
        else:
            exact = total * cute.math.exp2(subtracted - largest, fastmath=True)
            tensors[0][place] = Float32(select_(total == 0.0, total, exact))
            tensors[1][place] = largest * math.log(2)
