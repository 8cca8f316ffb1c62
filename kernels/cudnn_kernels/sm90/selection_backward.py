"""Attention of each row to blocks of keys of its own choice, on Hopper, backward.

    P = exp(scale Q K^T - LSE)   dP = dO V^T   dS = P (dP - D)   D = the sum of O dO over a row
    dQ = scale dS K              dV = P^T dO   dK = scale dS^T Q

Two kernels. For dQ, a CTA has neighbouring rows, as :mod:`cudnn_kernels.sm90.selected_rows` says. For dK and dV, a CTA
has a block of keys and goes through a part of the list of rows that chose it: four rows of 16 heads make a step's 64
columns of S^T, so the tensor cores multiply nothing in vain. Heads above 128 elements have steps of 32 columns, for
registers are few, and of 256 two warpgroups, with half of dK's and dV's columns each. Every sum has one order: results
do not change from call to call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import sequences
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.attention.sparse import SelectionBackwardConfiguration
from cudnn_kernels.kernel import here
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import arrange, vectors
from cudnn_kernels.pipeline.copy import copy_bytes, fetch, partition
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.pipeline.ring import Ring, advanced, initialise
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.attention_forward import GROUP, ROWS
from cudnn_kernels.sm90.chosen_rows import Chosen, ChosenRows
from cudnn_kernels.sm90.selected_rows import WARP, Choices, Part, Tile, Warpgroup

STAGES = 2  # of the rows that chose a block
FEW, MANY = 24, 232  # registers of a loading and of a multiplying thread, for dK and dV


class SelectionBackward(ChosenRows):
    """The kernels for one :class:`SelectionBackwardConfiguration`."""

    of_rows, own_values = ("q", "do"), 2

    def __init__(self, configuration: SelectionBackwardConfiguration) -> None:
        super().__init__(configuration)
        self.b = configuration
        self.padded = configuration.padded
        self.slots, self.split = configuration.rows_of_step, configuration.split
        self.columns = self.slots * self.padded

    def launch(self, given: Mapping[str, Any]) -> None:
        s, q = self.b, given["q"]
        choices, ends = given["choosing"].shape[0], given["choosing_ends"]
        per_block, sums_of_thread = -(-s.block // ROWS), (s.head + s.head_v) // (2 * s.split)
        pointers = divided(s.slots(), given, s.regions())
        values, sums = (
            cute.make_tensor(cute.recast_ptr(pointers[x], dtype=Float32), cute.make_layout(shape))
            for x, shape in (
                ("head_values", (self.padded, 2, s.key_heads, q.shape[0] + 1)),
                ("part_sums", (GROUP * s.split, sums_of_thread, per_block, choices * 2 // s.part)),
            )
        )
        offsets, scale = given["cum_seqlen_q"], given["scale_softmax"]
        tensors = (given["o"], given["do"], given["lse"], given["dq"], values)
        self.launch_rows(self.by_rows, given, tensors, scale)
        self.by_blocks(
            self.atoms(given, self.padded, ROWS),
            given["dk"],
            given["dv"],
            values,
            sums,
            given["choosing"],
            ends,
            offsets,
            q.shape[0],
            scale,
        ).launch(
            grid=[(choices // s.part + ends.shape[0]) * per_block, 1, 1],
            block=[(1 + s.split) * GROUP, 1, 1],
            stream=given["stream"],
            min_blocks_per_mp=3 - s.split,
            preferred_smem_carveout=100,
        )
        self.add_parts(sums, given["dk"], given["dv"], ends, offsets, scale).launch(
            grid=[(ends.shape[0] - 1) * per_block, 1, 1], block=[s.split * GROUP, 1, 1], stream=given["stream"]
        )

    # dQ, and what dK and dV need of every row.

    @cute.kernel
    def by_rows(self, atoms: Any, tensors: Any, choices: Choices, scale: Float32) -> None:
        """``tensors``: O, dO, LSE, dQ, and the values of rows that the other kernel needs."""
        self.roles(atoms, tensors, choices, scale)

    name(by_rows, "cudnn_attention_selection_backward_rows")

    @cute.jit
    def begin(self, tensors: Any, cta: Int32, thread: Int32) -> None:
        """Writes what stands in for rows at the end of a list."""
        values = tensors[4]
        if cta == 0:
            if thread < self.padded:
                for head in cutlass.range_constexpr(self.s.key_heads):
                    values[thread, 0, head, values.shape[3] - 1] = Float32.inf
                    values[thread, 1, head, values.shape[3] - 1] = Float32(0.0)

    @cute.jit
    def prepare(self, w: Warpgroup, mine: Tile) -> None:
        """LSE * log2(e) and D of a warpgroup's rows, for this CTA and for the other kernel. Where there is no head, or
        no key, they make P 0. Eight threads have a head, and load all of theirs before they add.
        """
        (o, do, lse, _, values), own, group, thread = w.tensors, w.own, w.group, w.thread
        firsts, columns, places, parts = range(0, ROWS, GROUP // 8), self.s.head_v // (8 * VECTOR), [], []
        for first in firsts:
            number = first + thread // 8
            query, head = group * self.s.together + number // self.padded, number % self.padded
            exists = (query < mine.rows) & (number < self.s.together * self.padded)
            found = exists & (head < mine.heads)
            row, column = mine.row + Int32(select_(found, query, 0)), mine.first_head + Int32(select_(found, head, 0))
            places.append((query, head, exists, found, lse[row, column] * LOG2_E))
            parts.append(
                [[vectors.load(x[row, column, None], thread % 8 + 8 * i) for i in range(columns)] for x in (o, do)]
            )
        for first in cutlass.range_constexpr(len(firsts)):
            number, (query, head, exists, found, log_sum) = firsts[first] + thread // 8, places[first]
            total = Float32(0.0)
            for i in cutlass.range_constexpr(columns):
                a, b = (x[i].load().to(Float32) for x in parts[first])
                total += (a * b).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for distance in (1, 2, 4):
                total += cute.arch.shuffle_sync_bfly(total, distance)
            total = Float32(select_(found, total, Float32(0.0)))
            log_sum = Float32(select_(found & (log_sum != -Float32.inf), log_sum, Float32.inf))
            if thread % 8 == 0:
                own[number, 0], own[number, 1] = log_sum, total
                if exists:
                    values[head, 0, mine.key_head, mine.row + query] = log_sum
                    values[head, 1, mine.key_head, mine.row + query] = total
        self.meet_group(group)

    @cute.jit
    def attend(self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """dQ of a tile's rows, from a step and its phase on; those behind it."""
        s, buffers, thread, dq = self.s, w.buffers, w.thread, w.tensors[3]
        own_q, own_do = (
            self.left(cute.local_tile(buffers[x][None, None, 0], (ROWS, width), (w.group, 0)), thread)
            for x, width in (("q", s.head), ("do", s.head_v))
        )
        keys, values = (self.right(buffers[x], thread) for x in "kv")
        turned = self.right(arrange.turned(buffers["k"]), thread, True)
        scores, gradients, acc = self.accumulator(self.tile_n), self.accumulator(self.tile_n), self.accumulator(s.head)
        acc.fill(0.0)
        shifts, products = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = self.score_rows.row(thread, slot)
            shifts[slot], products[slot] = w.own[row, 0], w.own[row, 1]
        self.meet_group(w.group)  # the next tile's may be written
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        pairs = ((scores, own_q, keys, s.head), (gradients, own_do, values, s.head_v))
        part = Part(mine, pairs, rounded, acc, turned, s.head, (shifts, products))
        stage, phase = self.take(w, part, stage, phase)
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.head_of(mine, w.group, self.score_rows.row(thread, slot))
            if exists:
                self.write_row(dq[row, head, None], acc, s.head, slot, w.scale, thread)
        return advanced(w.steps.ring, stage, phase)

    @cute.jit
    def weigh(self, w: Warpgroup, part: Part, stage: Int32, seen: Any, again: cutlass.Constexpr[bool]) -> None:
        """Scores become dS."""
        ((scores, *_), (gradients, *_)), (shifts, products) = part.products, part.row_values
        spans, some, every = seen
        if some:
            self.hide_unchosen(scores, spans, every, w.thread)
            for slot in cutlass.range_constexpr(2):
                for i in self.score_rows.order(self.tile_n, slot):
                    p = cute.math.exp2(scores[i] * (w.scale * LOG2_E) - shifts[slot], fastmath=True)
                    scores[i] = p * (gradients[i] - products[slot])

    # dK and dV.

    @cute.kernel
    def by_blocks(
        self,
        atoms: Any,
        dk: cute.Tensor,
        dv: cute.Tensor,
        values: cute.Tensor,
        sums: cute.Tensor,
        choosing: cute.Tensor,
        ends: cute.Tensor,
        offsets: cute.Tensor,
        rows: Int32,
        scale: Float32,
    ) -> None:
        """A CTA has up to 64 keys of a block and a part of the block's list."""
        s = self.s
        thread, index = here()
        warp_index = cute.arch.make_warp_uniform(thread // WARP)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        smem = SmemAllocator()
        buffers = self.buffers(
            smem,
            {
                "k": (ROWS, s.head, 1),
                "v": (ROWS, s.head_v, 1),
                "q": (ROWS, s.head, STAGES),
                "do": (ROWS, s.head_v, STAGES),
            },
        )
        layout = cute.make_layout((self.padded, 2, self.slots, STAGES))
        buffers["values"] = smem.allocate_tensor(Float32, layout, byte_alignment=16)
        buffers["places"] = smem.allocate_tensor(Int32, cute.make_layout((self.slots, STAGES)), byte_alignment=16)
        once, ring = smem.allocate_array(cutlass.Int64, 1), Ring.allocate(smem, STAGES)
        if thread == 0:
            cute.arch.mbarrier_init(once, 1)
            initialise(ring, 1, self.split * (GROUP // WARP))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        per_block = -(-s.block // ROWS)
        mine = self.part(index // per_block, index % per_block, ends, offsets)
        if mine.keys > 0:
            if group == 0:
                cute.arch.setmaxregister_decrease(FEW)
                if warp_index == 0:
                    self.fetch_for_block(atoms, buffers, once, ring, values, choosing, mine, rows)
            else:
                cute.arch.setmaxregister_increase(MANY)
                own_sums = sums[None, None, index % per_block, mine.slot]
                self.differentiate_block((dk, dv, own_sums), buffers, once, ring, mine, scale, thread - GROUP)

    name(by_blocks, "cudnn_attention_selection_backward_blocks")

    @cute.jit
    def fetch_for_block(
        self,
        atoms: Any,
        buffers: Any,
        once: Any,
        ring: Ring,
        values: cute.Tensor,
        choosing: cute.Tensor,
        mine: Chosen,
        rows: Int32,
    ) -> None:
        """One warp: fetches K and V, then Q, dO and what belongs to them of the rows of the list."""
        s, lane, places = self.s, cute.arch.lane_idx(), buffers["places"]
        loads = self.loads(atoms, buffers)
        keys_of = (mine.head, Int32(0), mine.first, mine.key + mine.keys)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(once, self.bytes(ROWS, s.head + s.head_v))
        for atom, tensor, buffer, width in loads[2:]:
            source = cute.domain_offset((mine.key, 0), sequences.copied_rows(tensor, *keys_of))
            tile = cute.local_tile(source, (ROWS, width), (0, 0))
            fetch(atom, tile, buffer[None, None, 0], once)
        sides = []
        for atom, tensor, buffer, width in loads[:2]:
            box = (self.padded, width)
            source = cute.domain_offset((mine.head * s.group, 0, 0), tensor)
            target = cute.local_tile(buffer, (*box, STAGES), (None, 0, 0))
            sides.append((atom, *partition(atom, target, cute.local_tile(source, box, (0, 0, None)))))
        count = mine.end - mine.begin
        size = self.bytes(self.columns, s.head + s.head_v) + self.columns * 8
        held = Int32(rows)
        for step in cutlass.range(cute.ceil_div(count, self.slots), unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            if step * self.slots % WARP == 0:
                held = Int32(rows)  # no row: zeros, and P is 0
                if step * self.slots + lane < count:
                    held = choosing[mine.begin + step * self.slots + lane]
            cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
            for slot in cutlass.range_constexpr(self.slots):
                row = cute.arch.shuffle_sync(held, (step * self.slots + slot) % WARP)
                with cute.arch.elect_one():
                    places[slot, stage] = row - mine.first - mine.key
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, size)
            for slot in cutlass.range_constexpr(self.slots):
                row = cute.arch.shuffle_sync(held, (step * self.slots + slot) % WARP)
                for copy, to, of in sides:
                    cute.copy(copy, of[None, row], to[None, stage, slot], tma_bar_ptr=ring.full + stage)
                with cute.arch.elect_one():
                    of_row, of_slot = values[None, None, mine.head, row], buffers["values"][None, None, slot, stage]
                    copy_bytes(of_row.iterator, of_slot.iterator, self.padded * 8, ring.full + stage)

    @cute.jit
    def differentiate_block(
        self, outs: Any, buffers: Any, once: Any, ring: Ring, mine: Chosen, scale: Float32, number: Int32
    ) -> None:
        """A warpgroup: its columns of dK and dV. S^T and dP^T have keys in rows, and go on from registers.

        ``outs``: dK and dV, and the memory for their sums over a part of a list.
        """
        s, m, (part, member) = self.s, self.columns, (number // GROUP, number % GROUP)
        some_q, some_do = (
            cute.local_tile(buffers[x], (m, width, STAGES), (0, 0, 0)) for x, width in (("q", s.head), ("do", s.head_v))
        )
        keys, values = (self.left(buffers[x][None, None, 0], member) for x in "kv")
        of_q, of_do = self.right(some_q, member), self.right(some_do, member)
        width, width_v = s.head // self.split, s.head_v // self.split
        turned_q, turned_do = (
            self.right(cute.local_tile(arrange.turned(x), (own, m, STAGES), (part, 0, 0)), member, True)
            for x, own in ((some_q, width), (some_do, width_v))
        )
        scores, gradients = self.accumulator(m), self.accumulator(m)
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        acc_dk, acc_dv = self.accumulator(width), self.accumulator(width_v)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        cute.arch.mbarrier_wait(once, 0)
        for step in cutlass.range(cute.ceil_div(mine.end - mine.begin, self.slots), unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            shared = buffers["values"][None, None, None, stage]
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            self.multiply_shared(scores, keys, of_q, m, s.head, stage)
            self.multiply_shared(gradients, values, of_do, m, s.head_v, stage)
            self.finish(1)
            if const_expr(s.causal):
                self.hide_later(scores, buffers["places"][None, stage], member)
            for i, value in self.by_columns(shared, 0, member):
                scores[i] = cute.math.exp2(scores[i] * (scale * LOG2_E) - value, fastmath=True)
            rounded.store(scores.load().to(self.dtype))
            self.add_product(acc_dv, rounded, turned_do, width_v, m, stage)
            self.finish(1)
            for i, value in self.by_columns(shared, 1, member):
                gradients[i] = scores[i] * (gradients[i] - value)
            self.finish(0)
            rounded.store(gradients.load().to(self.dtype))
            self.add_product(acc_dk, rounded, turned_q, width, m, stage)
            self.finish(0)
            self.release(ring.empty + stage)
        (*out, sums), accs = outs, (acc_dk, acc_dv)
        if mine.parts == 1:
            self.write_keys(out, accs, mine, scale, number)
        else:
            for place, value in enumerate([acc[i] for acc in accs for i in range(cute.size(acc))]):
                sums[number, place] = value

    @cute.jit
    def write_keys(self, outs: Any, accs: Any, mine: Chosen, scale: Float32, number: Int32) -> None:
        """A warpgroup's columns of dK and dV."""
        part, member = number // GROUP, number % GROUP
        for slot in cutlass.range_constexpr(2):
            row = self.score_rows.row(member, slot)
            if row < mine.keys:
                for out, acc, factor in zip(outs, accs, (scale, Float32(1.0)), strict=True):
                    width = out.shape[2] // self.split
                    own = cute.local_tile(out[mine.first + mine.key + row, mine.head, None], (width,), (part,))
                    self.write_row(own, acc, width, slot, factor, member)

    @cute.jit
    def write_row(
        self, out: cute.Tensor, acc: cute.Tensor, width: int, slot: int, factor: Float32, thread: Int32
    ) -> None:
        """A thread's values of a row, times a factor, maybe added to what is there."""
        if const_expr(self.b.adds):
            order = self.score_rows.order(width, slot)
            held = [cute.make_rmem_tensor(2, self.dtype) for _ in range(0, len(order), 2)]
            for i, pair in enumerate(held):
                cute.autovec_copy(cute.local_tile(out, (2,), (self.score_rows.column(thread, 2 * i) // 2,)), pair)
            for place, i in enumerate(order):
                acc[i] = acc[i] * factor + held[place // 2][place % 2].to(Float32)
            factor = Float32(1.0)
        self.score_rows.store(acc, slot, out, thread, factor)

    @cute.kernel
    def add_parts(
        self,
        sums: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        ends: cute.Tensor,
        offsets: cute.Tensor,
        scale: Float32,
    ) -> None:
        """dK and dV of blocks whose lists have several parts, in the order of the parts."""
        s = self.s
        thread, index = here()
        per_block = -(-s.block // ROWS)
        tile = index % per_block
        mine = self.chosen(index // per_block, tile, ends, offsets)
        if (mine.parts > 1) & (mine.keys > 0):
            accs = [cute.make_rmem_tensor(x // (2 * self.split), Float32) for x in (s.head, s.head_v)]
            for acc in accs:
                acc.fill(0.0)
            places = [(which, i) for which, acc in enumerate(accs) for i in range(cute.size(acc))]
            for part in cutlass.range(mine.parts, unroll=1):
                some = sums[None, None, tile, mine.slot + part]
                for place, (which, i) in enumerate(places):
                    accs[which][i] = accs[which][i] + some[thread, place]
            self.write_keys((dk, dv), accs, mine, scale, thread)

    name(add_parts, "cudnn_attention_selection_backward_parts")

    def by_columns(self, values: cute.Tensor, which: int, thread: Int32) -> Iterator[tuple[int, Float32]]:
        """The places of a thread's sums, each with one of the two values of its column, a head of a row. Columns are in
        pairs: few registers have values.
        """
        orders = [self.score_rows.order(self.columns, slot) for slot in range(2)]
        for i in range(self.columns // 8):
            head, row = i * 8 % self.padded, i * 8 // self.padded
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(cute.local_tile(values[None, which, row], (2,), (head // 2 + thread % 4,)), pair)
            for order in orders:
                for j in range(2):
                    yield order[2 * i + j], pair[j]

    @cute.jit
    def hide_later(self, scores: cute.Tensor, places: cute.Tensor, thread: Int32) -> None:
        """Makes scores of keys behind a row's own place -inf. The list rises: the first row tells if there are any."""
        if places[0] < ROWS - 1:
            for slot in cutlass.range_constexpr(2):
                key = self.score_rows.row(thread, slot)
                for place, i in enumerate(self.score_rows.order(self.columns, slot)):
                    of_row = places[place // 2 * 8 // self.padded]
                    scores[i] = Float32(select_(key <= of_row, scores[i], -Float32.inf))
