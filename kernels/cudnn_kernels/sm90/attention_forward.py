"""Attention on Hopper, forward: O = softmax(scale Q K^T + mask) V.

A CTA takes tiles in turn: query rows of one head, 64 for each warpgroup that multiplies. One warp of another warpgroup
lets the copy engine fetch Q, and rings of blocks of K and V, those of the next tile while the last of this one are
multiplied. A warpgroup keeps its rows of O and one block of scores in registers: it issues the next block's Q K^T
and this block's P V, and while the latter runs it computes the softmax of the former. Blocks are taken from the last to
the first, so that those at the mask's edge come first. Of a block without a mask no maxima are sought: what is
subtracted stays as it is, unless a sum of exponentials says that it was too small. Then the scores are multiplied once
more, with maxima. Of 8 bits, V is transposed in shared memory by two more warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import ForwardConfiguration, softmax
from cudnn_kernels.attention.forward import Call, Forward, K, Problem, V
from cudnn_kernels.pipeline import barriers, ring
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.wgmma import WgmmaRows, opaque
from cudnn_kernels.shared_memory import BARRIERS, SHARED_MEMORY
from cudnn_kernels.sm90.turned_bytes import turn_bytes
from cudnn_kernels.sm90.warpgroup_products import ROWS, WarpgroupProducts

GROUP = 128  # threads of a warpgroup
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # of a loading and a multiplying thread, by warpgroups
TURNING = {2: (40, 232), 3: (32, 160)}  # likewise where warps transpose V
TURNERS = 2  # such warps
GROUP_BARRIER = 1  # and those of other warpgroups
TURN_BARRIER = 4  # likewise
DRAWN = 2  # numbers of tiles on their way


@dataclass
class Room:
    """Shared memory: rows of Q and O by warpgroup, the rings of K and V, and barriers, those of Q by warpgroup too.

    ``values`` are V as products take it, (elements, keys, stages): another view of it, or transposed if it has 8 bits.
    """

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    o: cute.Tensor
    values: cute.Tensor
    q_full: Any
    q_empty: Any
    k_ring: ring.Ring
    v_ring: ring.Ring
    values_ring: ring.Ring


@dataclass
class Part:
    """What a warpgroup computes with: products' operands in shared memory, and registers.

    ``words`` are P, two or four values each: those of fewer bits that outlive a loop's step would be moved about.
    """

    q: Any
    k: Any
    v: Any
    scores: cute.Tensor
    acc: cute.Tensor
    words: cute.Tensor
    state: softmax.State
    cap_factor: Any
    group: Int32
    thread: Int32


class AttentionForward(WarpgroupProducts, Forward):
    """The kernel for one :class:`ForwardConfiguration`."""

    rows, score_rows = ROWS, WgmmaRows(slots=2)
    query_arrivals = 1  # at a barrier of Q, before the copy engine's bytes
    release = staticmethod(barriers.arrive_once)  # a warp is done with a buffer

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        self.groups = self.tile_m // ROWS
        self.warps, self.threads = 4 * self.groups, GROUP * (1 + self.groups)
        self.seldom = configuration.head_v > 192  # whether O is multiplied anew only where that is needed
        self.turners = TURNERS if self.dtype.width == 8 else 0  # warps that transpose V

    @property
    def turns(self) -> bool:
        """Whether warpgroups take turns in issuing products: not where that was timed slower."""
        c = self.c
        freely = (c.head, c.head_v) == (128, 128) and self.dtype.width == 16 and not (c.right or c.left)
        return self.groups > 1 and not (c.own or freely)

    @property
    def guesses(self) -> bool:
        """Whether blocks without a mask are taken without maxima. P of 8 bits has no room for larger values, and three
        warpgroups have no registers for this beside a cap.
        """
        crowded = self.groups > 2 and self.c.softcap
        return not (self.turners or self.c.compressed or crowded)

    @property
    def stays(self) -> bool:
        """Whether a CTA takes a tile in each turn. Those of packed sequences differ too much in what they cost."""
        return not self.c.packed

    @property
    def apart(self) -> bool:
        """Whether O has room of its own in shared memory; else a warpgroup overwrites its own rows of Q."""
        c = self.c
        operands = self.bytes(self.tile_m, c.head) + c.stages * self.bytes(self.tile_n, c.head + c.head_v)
        if self.turners:
            operands += c.stages * self.bytes(self.tile_n, c.head_v)
        return operands + self.tile_m * c.head_v * self.result.width // 8 <= SHARED_MEMORY - BARRIERS

    @cute.jit
    def body(self, call: Call) -> None:
        """The roles of the warpgroups."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        if thread == 0:
            self.prefetch(call)
        room = self.room()
        few, many = (TURNING if self.turners else REGISTERS)[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            if warp_index == 0:  # it fetches Q, K and V
                self.each_tile(call, lambda *tile: self.fetch_tile(call, room, *tile), True)
            if const_expr(self.turners > 0):
                if warp_index >= 4 - self.turners:
                    self.each_tile(call, lambda *tile: self.turn_tile(room, *tile))
        else:
            cute.arch.setmaxregister_increase(many)
            self.consume(call, room, group - 1, thread - GROUP * group)

    @cute.jit
    def room(self) -> Room:
        """Allocates shared memory and initialises the barriers. All threads take part."""
        c, smem = self.c, SmemAllocator()
        thread, _, _ = cute.arch.thread_idx()
        shapes = {
            "q": (self.tile_m, c.head, 1),
            "k": (self.tile_n, c.head, c.stages),
            "v": (self.tile_n, c.head_v, c.stages),
        }
        made = self.buffers(smem, shapes | ({"values": (c.head_v, self.tile_n, c.stages)} if self.turners else {}))
        if const_expr(self.apart):
            made |= self.buffers(smem, {"o": (self.tile_m, c.head_v, 1)}, self.result)
        else:
            made["o"] = cute.make_tensor(made["q"].iterator, self.layout(self.tile_m, c.head_v).outer)
        sQ, sO = (
            cute.local_tile(made[x][None, None, 0], (ROWS, width), (None, 0))
            for x, width in (("q", c.head), ("o", c.head_v))
        )
        full, empty = (smem.allocate_array(cutlass.Int64, self.groups) for _ in range(2))
        rings = [ring.Ring.allocate(smem, c.stages) for _ in range(3 if self.turners else 2)]
        if const_expr(c.queue):  # not in the room, whose fields a loop would take for changed
            self.queue = ring.Ring.allocate(smem, DRAWN), smem.allocate_tensor(Int32, cute.make_layout((1, DRAWN)))
        if thread == 0:
            for group in cutlass.range_constexpr(self.groups):
                cute.arch.mbarrier_init(full + group, self.query_arrivals)
                cute.arch.mbarrier_init(empty + group, 4)
            for each in cutlass.range_constexpr(len(rings)):
                turns = each > 0 and self.turners
                fillers, readers = turns if each == 2 else 1, turns if each == 1 and turns else self.warps
                ring.initialise(rings[each], fillers, readers)
            if const_expr(c.queue):
                ring.initialise(self.queue[0], 1, self.warps + self.turners + 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        values = made["values"] if self.turners else turned(made["v"])
        return Room(sQ, made["k"], made["v"], sO, values, full, empty, rings[0], rings[1], rings[-1])

    @cute.jit
    def each_tile(self, call: Call, visit: Any, draws: bool = False) -> None:
        """Does something for every tile of the CTA, told what it is, how many blocks came before, and Q's phase.

        Where CTAs draw tiles, the warp that fetches ``draws``, while others still compute the tile before, and tells
        them.
        """
        work, place, phase = call.work, Int32(0), Int32(0)
        if const_expr(self.c.queue):
            turn, number, total = Int32(0), Int32(0), work.order[1, 0] * work.all_heads
            while number < total:
                (number,) = ring.draw(*self.queue, work.order, turn, (), draws)
                if number < total:
                    place, phase = self.visit_tile(call, visit, number, place, phase)
                turn += 1
        else:
            for turn in cutlass.range(work.turns, unroll=1):
                place, phase = self.visit_tile(call, visit, turn, place, phase)

    @cute.jit
    def visit_tile(self, call: Call, visit: Any, turn: Int32, place: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """One of them, if there is such a tile; the next one's place and phase."""
        tile, head = self.tile(call.work, turn)
        if tile >= 0:
            p = self.problem(call.work, tile, head)
            if self.exists(p):
                visit(p, place, phase)
                begin, _, _, end = self.blocks(p)
                place += end - begin
                phase ^= 1
        return place, phase

    @cute.jit
    def fetch_tile(self, call: Call, room: Room, p: Problem, place: Int32, phase: Int32) -> None:
        """Starts the copies of a tile."""
        begin, _, _, end = self.blocks(p)
        for step in cutlass.range(end - begin + 1, unroll=1):
            if step < end - begin:
                self.fetch_block(call, room.k, room.k_ring, p, K, place + step, end - 1 - step)
            if step == 0:
                self.fetch_queries(call, room, p, phase)
            else:
                self.fetch_block(call, room.v, room.v_ring, p, V, place + step - 1, end - step)

    def fetch_queries(self, call: Call, room: Room, p: Problem, phase: Int32) -> None:
        """Starts the copies of the warpgroups' rows of Q."""
        for group in range(self.groups):
            cute.arch.mbarrier_wait(room.q_empty + group, phase ^ 1)
            self.fetch_rows(call, room.q, room.q_full, p, group)

    def fetch_block(
        self, call: Call, buffers: cute.Tensor, of: ring.Ring, p: Problem, which: int, place: Int32, n: Int32
    ) -> None:
        """Waits for a buffer, and starts the copy of a block of K or V."""
        stage, phase = self.at(place)
        ring.expect(of, stage, phase ^ 1, self.bytes(self.tile_n, self.boxes[which][1]))
        self.fetch_keys(call, buffers[None, None, stage], of.full + stage, p, which, n)

    @cute.jit
    def turn_tile(self, room: Room, p: Problem, place: Int32, phase: Int32) -> None:
        """A warp's part of V of a tile's blocks, transposed."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32) - (4 - self.turners)
        begin, _, _, end = self.blocks(p)
        for step in cutlass.range(end - begin, unroll=1):
            stage, phase = self.at(place + step)
            cute.arch.mbarrier_wait(room.v_ring.full + stage, phase)
            cute.arch.mbarrier_wait(room.values_ring.empty + stage, phase ^ 1)
            turn_bytes(room.v[None, None, stage], room.values[None, None, stage], warp_index, self.turners)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            self.release(room.values_ring.full + stage)
            self.release(room.v_ring.empty + stage)

    def own_blocks(self, p: Problem, group: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """The blocks of keys that a warpgroup's rows need, of those of the tile."""
        if not self.c.own:
            return self.blocks(p)
        row = p.row + group * ROWS
        return p.mask.blocks(row, cutlass.min(row + ROWS, p.mask.queries) - 1, self.tile_n)

    def at(self, place: Any) -> tuple[Any, Any]:
        """The buffer, and its barriers' phase, of a block before which so many were taken."""
        place = Uint32(place) if self.c.holds else place
        return Int32(place % self.c.stages), Int32(place // self.c.stages % 2)

    def blocks(self, p: Problem) -> tuple[Int32, Int32, Int32, Int32]:
        begin, whole_begin, whole_end, end = super().blocks(p)
        if self.c.holds:  # opaque: else parts of them are computed again in every step
            return opaque(begin), opaque(whole_begin), opaque(whole_end), opaque(end)
        return begin, whole_begin, whole_end, end

    @cute.jit
    def consume(self, call: Call, room: Room, group: Int32, thread: Int32) -> None:
        """A warpgroup: its rows of the CTA's tiles."""
        c = self.c
        tSrQ = self.left(room.q[None, None, group], thread)
        tSrK = self.right(room.k, thread)
        tOrV = self.right(room.values, thread, not self.turners)
        scores, acc = self.accumulator(self.tile_n), self.accumulator(c.head_v)
        words = cute.make_rmem_tensor(self.tile_n * self.dtype.width // 64, Int32)
        part = Part(tSrQ, tSrK, tOrV, scores, acc, words, self.state(call), call.cap_factor, group, thread)
        self.take_turns(group, True)
        self.each_tile(call, lambda *tile: self.take(call, room, part, *tile))
        self.take_turns(group, False)
        if const_expr(self.apart):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def take(self, call: Call, room: Room, part: Part, p: Problem, place: Int32, phase: Int32) -> None:
        """A warpgroup's rows of a tile."""
        self.pass_over(room, part, p, place, True)
        log_sums = self.attend(call, room, part, p, place, phase)
        self.store_log_sums(call, p, p.row + part.group * ROWS, part.thread, log_sums)
        self.store(call, room, part, p)
        self.pass_over(room, part, p, place, False)

    @cute.jit
    def pass_over(self, room: Room, part: Part, p: Problem, place: Int32, before: bool) -> None:
        """Gives back the tile's blocks before those that the warpgroup's rows need, or behind them."""
        if const_expr(self.c.own):
            begin, _, _, end = self.blocks(p)
            own_begin, _, _, own_end = self.own_blocks(p, part.group)
            first, stop = (end, own_end) if const_expr(before) else (own_begin, begin)
            for n in cutlass.range(first - 1, stop - 1, -1, unroll=1):
                stage, phase = self.at(place + end - 1 - n)
                for of in (room.k_ring, room.v_ring):
                    cute.arch.mbarrier_wait(of.full + stage, phase)
                    self.release(of.empty + stage)

    @cute.jit
    def take_turns(self, group: Int32, begins: bool) -> None:
        """The first warpgroup has the first turn, and takes the one that is left in the end."""
        if const_expr(self.turns):
            if const_expr(begins):
                if group == self.groups - 1:
                    barriers.arrive(TURN_BARRIER, 2 * GROUP)
            elif group == 0:
                barriers.wait(TURN_BARRIER, 2 * GROUP)

    @cute.jit
    def attend(self, call: Call, room: Room, part: Part, p: Problem, place: Int32, phase: Int32) -> cute.Tensor:
        """O of a warpgroup's rows; the log-sum-exp of a thread's."""
        part, scale_output = self.descaled(call, part, p)
        self.reset(part.state, call, p, part.thread)
        part.acc.fill(0.0)
        last = place + self.blocks(p)[3] - 1  # minus a block is how many were taken before it
        begin, whole_begin, whole_end, end = self.own_blocks(p, part.group)
        cute.arch.mbarrier_wait(room.q_full + part.group, phase)
        if end > begin:
            self.first(room, part, p, end - 1, last - end + 1)
            start = end - 1
            if const_expr(self.c.right):  # else no row sees less of these blocks than others do
                start = cutlass.max(begin, cutlass.min(start, whole_end))
                for n in cutlass.range(end - 2, start - 1, -1, unroll=1):
                    self.step(room, part, p, n, last - n, True)
            middle = cutlass.max(begin, cutlass.min(start, whole_begin)) if const_expr(self.c.left) else begin
            for n in cutlass.range(start - 1, middle - 1, -1, unroll=1):
                self.step(room, part, p, n, last - n, False)
            if const_expr(self.c.left):
                for n in cutlass.range(middle - 1, begin - 1, -1, unroll=1):
                    self.step(room, part, p, n, last - n, True)
        if const_expr(self.apart):
            self.release(room.q_empty + part.group)
        if end > begin:
            self.last(room, part, last - begin)
        ends = [softmax.finish(part.state, self.score_rows, slot) for slot in range(2)]
        self.correct(part.acc, [factor * scale_output for factor, _ in ends])
        log_sums = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            log_sums[slot] = ends[slot][1]
        return log_sums

    def descaled(self, call: Call, part: Part, p: Problem) -> tuple[Part, Float32]:
        """What a tile's rows are computed with, and O's scale, where Q, K and V have descales."""
        if call.descales is None:
            return part, call.scale_output
        q, k, v = (x[p.batch, p.key_head] for x in call.descales)
        scale, state = call.scale, part.state
        if part.cap_factor is None:
            scale = cute.arch.fmax(scale * q * k, softmax.LEAST_SCALE)
        else:
            part = replace(part, cap_factor=part.cap_factor * q * k)
        return replace(part, state=replace(state, scale=scale, lift=softmax.LIFT / scale)), call.scale_output * v

    def multiply_keys(self, part: Part, stage: Int32) -> None:
        """Issues Q K^T of a block."""
        self.multiply_shared(part.scores, part.q, part.k, self.tile_n, self.c.head, stage)

    def multiply_values(self, part: Part, stage: Int32) -> None:
        """Issues P V of a block."""
        rounded = cute.recast_tensor(part.words, self.dtype)
        self.add_product(part.acc, rounded, part.v, self.c.head_v, self.tile_n, stage)

    def first(self, room: Room, part: Part, p: Problem, n: Int32, place: Int32) -> None:
        """The scores of the first block."""
        stage, phase = self.at(place)
        cute.arch.mbarrier_wait(room.k_ring.full + stage, phase)
        self.multiply_keys(part, stage)
        warpgroup.wait_group(0)
        self.release(room.k_ring.empty + stage)
        self.soften(part, p, n, True)
        self.round(part)

    def soften(self, part: Part, p: Problem, n: Int32, masked: bool) -> Any:
        """The exponentials of a block, and what O is to be multiplied by."""
        softmax.cap(part.scores, part.cap_factor)
        if masked:
            self.hide(part.scores, p, p.row + part.group * ROWS, part.thread, n)
        slack, chains = (softmax.SLACK, 2) if self.seldom and not self.turners else (0.0, 4)
        return softmax.update(part.state, part.scores, self.score_rows, self.tile_n, slack, chains)

    def step(self, room: Room, part: Part, p: Problem, n: Int32, place: Int32, masked: bool) -> None:
        """Block n's scores, while the products of block n + 1 run.

        Warpgroups take turns in issuing products, so that one computes a softmax while another's products run.
        """
        (stage, phase), (value_stage, value_phase) = self.at(place), self.at(place - 1)
        cute.arch.mbarrier_wait(room.k_ring.full + stage, phase)
        if const_expr(self.turns):
            barriers.wait(TURN_BARRIER + part.group, 2 * GROUP)
        self.multiply_keys(part, stage)
        cute.arch.mbarrier_wait(room.values_ring.full + value_stage, value_phase)
        self.multiply_values(part, value_stage)
        if const_expr(self.turns):
            after = select_(part.group == self.groups - 1, Int32(0), part.group + 1)
            barriers.arrive(TURN_BARRIER + after, 2 * GROUP)
        warpgroup.wait_group(1)
        guessed = const_expr(self.guesses and not masked)
        if const_expr(not guessed):
            self.release(room.k_ring.empty + stage)
            corrections = self.soften(part, p, n, masked)
        else:
            before = [part.state.sums[slot] for slot in range(2)]
            softmax.cap(part.scores, part.cap_factor)
            fits = softmax.guess(part.state, part.scores, self.score_rows, self.tile_n)
            self.round(part)
        warpgroup.wait_group(0)
        self.release(room.values_ring.empty + value_stage)
        if const_expr(guessed):
            self.unless(fits, part.group, lambda: self.repeat(part, p, n, stage, before))
            self.release(room.k_ring.empty + stage)
            return
        self.round(part)
        if const_expr(self.seldom):
            self.correct_where_needed(part.acc, *corrections)
        else:
            self.correct(part.acc, corrections)

    @cute.jit
    def unless(self, fits: Boolean, group: Int32, do: Any) -> None:
        """Does something if a thread of the warpgroup has what does not fit."""
        if barriers.any_of(GROUP_BARRIER + group, GROUP, Int32(select_(fits, Int32(0), Int32(1)))):
            do()

    def repeat(self, part: Part, p: Problem, n: Int32, stage: Int32, sums: Sequence[Float32]) -> None:
        """Block n once more, with maxima; ``sums`` are those before it."""
        self.multiply_keys(part, stage)
        warpgroup.wait_group(0)
        for slot in range(2):
            part.state.sums[slot] = sums[slot]
        corrections = self.soften(part, p, n, False)
        self.round(part)
        self.correct(part.acc, corrections)

    def last(self, room: Room, part: Part, place: Int32) -> None:
        """The products of the last block."""
        stage, phase = self.at(place)
        cute.arch.mbarrier_wait(room.values_ring.full + stage, phase)
        self.multiply_values(part, stage)
        warpgroup.wait_group(0)
        self.release(room.values_ring.empty + stage)

    def round(self, part: Part) -> None:
        """P as the tensor cores take it: an accumulator's registers are an operand's, in the same order.

        Those of 8 bits are if a word has two pairs of a row, and V's keys are in the order that follows from that.
        """
        values = part.scores
        if const_expr(self.turners > 0):
            values = cute.make_rmem_tensor(part.scores.shape, Float32)
            for i in range(cute.size(values)):
                values[i] = part.scores[i // 8 * 8 + i % 2 + i // 2 % 2 * 4 + i // 4 % 2 * 2]
        rounded = cute.make_rmem_tensor(part.scores.shape, self.dtype)
        rounded.store(values.load().to(self.dtype))
        words = cute.recast_tensor(rounded, Int32)
        for i in range(cute.size(words)):
            part.words[i] = words[i]

    def correct(self, acc: cute.Tensor, factors: Any) -> None:
        """Multiplies the rows of O."""
        for slot in range(2):
            for i in self.score_rows.order(self.c.head_v, slot):
                acc[i] = acc[i] * factors[slot]

    @cute.jit
    def correct_where_needed(self, acc: cute.Tensor, upper: Float32, lower: Float32) -> None:
        """Multiplies the rows of O, unless all of a warp's factors are 1."""
        if cute.arch.vote_any_sync((upper != 1.0) | (lower != 1.0)):
            self.correct(acc, [upper, lower])

    @cute.jit
    def store(self, call: Call, room: Room, part: Part, p: Problem) -> None:
        """O of a warpgroup's rows."""
        group, thread = part.group, part.thread
        rounded = cute.make_rmem_tensor(part.acc.shape, self.result)
        rounded.store(part.acc.load().to(self.result))
        sO = room.o[None, None, group]
        if const_expr(self.apart):  # the tile before was read
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            barriers.wait(GROUP_BARRIER + group, GROUP)
        self.product(self.c.head_v).put(rounded, sO, thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.wait(GROUP_BARRIER + group, GROUP)
        if thread < 32:
            self.store_rows(call, sO, p, p.row + group * ROWS)
            if const_expr(not self.apart):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(not self.apart):
            self.release(room.q_empty + group)
