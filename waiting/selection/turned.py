"""S^T = K Q^T and O^T = V^T P^T: a row's heads are the columns of a product, so no row is multiplied in vain."""
from __future__ import annotations
from variants import *
from variants import Tickets
from cutlass.memory import SmemAllocator
from cutlass.cute.nvgpu import warp, warpgroup
from cudnn_kernels.pipeline.wgmma import MN, K, Product

WARPS = GROUP // WARP


class Turned:
    @cute.jit
    def roles(self, atoms: Any, tensors: Any, choices: Choices, scale: Float32) -> None:
        s, smem = self.s, SmemAllocator()
        thread, index = sr.here()
        group = cute.arch.make_warp_uniform(thread // GROUP)
        shapes = {x: (self.tile_m, width, 1) for x, width in self.widths.items()}
        shapes |= {x: (self.tile_n, self.widths[x], s.stages) for x in ("k", "v")}
        buffers = self.buffers(smem, shapes)
        buffers |= self.buffers(smem, {"p": (s.padded * self.groups, self.tile_n, 1)})
        exchanged = smem.allocate_tensor(Float32, cute.make_layout((s.padded, WARPS, self.groups)), byte_alignment=16)
        lists, steps = self.lists(smem), self.steps(smem, choices)
        self.initialise(steps, thread)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            self.produce(atoms, buffers, choices, lists, steps, thread)
        else:
            cute.arch.setmaxregister_increase(many)
            mine = exchanged[None, None, group - 1]
            self.consume(Warpgroup(tensors, buffers, mine, choices, steps, scale, group - 1, thread - GROUP * group))

    def of_scores(self) -> Product:
        return Product(self.dtype, self.s.padded)

    def of_values(self) -> Product:
        return Product(self.dtype, self.s.padded, rows=self.s.head_v, a=MN)

    def slots(self) -> int:
        """A thread's heads."""
        return self.s.padded // 4

    def meet(self, group: Int32) -> None:
        cute.arch.barrier(barrier_id=sr.FIRST_BARRIER + group, number_of_threads=GROUP)

    def any_of_group(self, group: Int32, word: Int32) -> Int32:
        return cute.arch.inline_ptx(
            "{{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; bar.red.or.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }}",
            write_only_types=[Int32], read_only_args=[word, sr.FIRST_BARRIER + group],
        )

    def head_slot(self, i: int) -> int:
        """Of an accumulator's value, which of the thread's heads it is of."""
        return i // 4 * 2 + i % 2

    def head_number(self, thread: Int32, slot: int) -> Int32:
        return slot // 2 * 8 + thread % 4 * 2 + slot % 2

    @cute.jit
    def attend(self, w: Warpgroup, index: Int32, mine: Tile, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        s, buffers, ring = self.s, w.buffers, w.steps.ring
        scores, values = self.of_scores(), self.of_values()
        keys = scores.left(buffers["k"], w.thread)
        turned = values.left(sequences.turned(buffers["v"]), w.thread)
        queries = [
            scores.right(cute.local_tile(buffers["q"][None, None, 0], (s.padded, s.head), (w.group * s.together + r, 0)), w.thread)
            for r in range(s.together)
        ]
        own = cute.local_tile(buffers["p"][None, None, 0], (s.padded, self.tile_n), (w.group, 0))
        weights = values.right(own, w.thread)
        accs = [values.accumulator() for _ in range(s.together)]
        states = [[cute.make_rmem_tensor(self.slots(), Float32) for _ in range(3)] for _ in range(s.together)]
        for r in cutlass.range_constexpr(s.together):
            accs[r].fill(0.0)
            states[r][0].fill(-math.inf)
            states[r][1].fill(0.0)
            states[r][2].fill(-math.inf)
        found_scores = scores.accumulator()
        stage, phase, found = self.find(w, stage, phase)
        while found:
            mask = cute.arch.make_warp_uniform(w.steps.masks[0, stage] >> (w.group * s.together))
            for r in cutlass.range_constexpr(s.together):
                if (mask >> r) & 1 == 1:
                    scores.issue(found_scores, keys[None, None, None, stage], queries[r], False)
                    end = self.seen(mine, w.group * s.together + r) - w.steps.tiles[0, stage] * self.size
                    self.finish(0)
                    self.weigh_row(w, found_scores, states[r], accs[r], end, own)
                    values.issue(accs[r], turned[None, None, None, stage], weights, True)
            self.finish(0)
            self.release(ring.empty + stage)
            stage, phase, found = self.find(w, *advanced(ring, stage, phase))
        self.release(ring.empty + stage)
        self.release(w.steps.rows_empty + w.group)
        there = self.tile(index, w.choices)
        for r in cutlass.range_constexpr(s.together):
            self.write_turned(w, there, r, states[r], accs[r])
        return advanced(ring, stage, phase)

    @cute.jit
    def weigh_row(self, w: Warpgroup, scores: cute.Tensor, state: Any, acc: cute.Tensor, end: Int32, own: cute.Tensor) -> None:
        maxima, sums, largest = state
        thread, count = w.thread, cute.size(scores)
        if end < self.tile_n:
            for i in cutlass.range_constexpr(count):
                key = thread // WARP * 16 + thread % WARP // 4 + i // 2 % 2 * 8
                scores[i] = Float32(select_(key < end, scores[i], -Float32.inf))
        exceeds = Boolean(False)
        for slot in cutlass.range_constexpr(self.slots()):
            i = slot // 2 * 4 + slot % 2
            own_largest = cute.arch.fmax(scores[i], scores[i + 2])
            largest[slot] = cute.arch.fmax(largest[slot], own_largest)
            exceeds = exceeds | ((own_largest - maxima[slot]) * w.scale > SLACK)
        if self.any_of_group(w.group, Int32(select_(exceeds, Int32(1), Int32(0)))) != 0:
            self.raise_rows(w, scores, state, acc)
        for slot in cutlass.range_constexpr(self.slots()):
            shift = Float32(select_(maxima[slot] == -math.inf, Float32(0.0), maxima[slot] * w.scale))
            i = slot // 2 * 4 + slot % 2
            for j in cutlass.range_constexpr(2):
                scores[i + 2 * j] = cute.math.exp2(scores[i + 2 * j] * w.scale - shift, fastmath=True)
            sums[slot] = sums[slot] + (scores[i] + scores[i + 2])
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        rounded.store(scores.load().to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.of_scores().mma()).get_slice(thread)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(sequences.turned(own)))
        cute.arch.fence_proxy("async.shared", space="cta")
        self.meet(w.group)

    def across_rows(self, value: Float32, combine: Any) -> Float32:
        for distance in (4, 8, 16):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, distance))
        return value

    @cute.jit
    def exchanged(self, w: Warpgroup, values: cute.Tensor, adds: cutlass.Constexpr[bool]) -> None:
        """Values of the thread's heads become the sums, or the largest, of the warpgroup's."""
        combine = (lambda a, b: a + b) if adds else cute.arch.fmax
        own, thread = w.own, w.thread
        for slot in cutlass.range_constexpr(self.slots()):
            values[slot] = self.across_rows(values[slot], combine)
            if thread % WARP < 4:
                own[self.head_number(thread, slot), thread // WARP] = values[slot]
        self.meet(w.group)
        for slot in cutlass.range_constexpr(self.slots()):
            head = self.head_number(thread, slot)
            found = own[head, 0]
            for i in cutlass.range_constexpr(1, WARPS):
                found = combine(found, own[head, i])
            values[slot] = found
        self.meet(w.group)

    @cute.jit
    def raise_rows(self, w: Warpgroup, scores: cute.Tensor, state: Any, acc: cute.Tensor) -> None:
        maxima, sums, _ = state
        most = cute.make_rmem_tensor(self.slots(), Float32)
        for slot in cutlass.range_constexpr(self.slots()):
            i = slot // 2 * 4 + slot % 2
            most[slot] = cute.arch.fmax(scores[i], scores[i + 2])
        self.exchanged(w, most, False)
        for slot in cutlass.range_constexpr(self.slots()):
            before = maxima[slot]
            larger = cute.arch.fmax(before, most[slot])
            larger = Float32(select_((larger - before) * w.scale > SLACK, larger, before))
            maxima[slot] = larger
            shift = Float32(select_(larger == -math.inf, Float32(0.0), larger * w.scale))
            factor = cute.math.exp2(before * w.scale - shift, fastmath=True)
            sums[slot] = sums[slot] * factor
            for i in cutlass.range_constexpr(cute.size(acc)):
                if const_expr(self.head_slot(i % (self.s.padded // 2)) == slot):
                    acc[i] = acc[i] * factor

    @cute.jit
    def write_turned(self, w: Warpgroup, mine: Tile, r: cutlass.Constexpr[int], state: Any, acc: cute.Tensor) -> None:
        (o, total_sums, total_maxima), (maxima, sums, largest) = w.tensors, state
        thread, per_tile = w.thread, self.s.padded // 2
        self.exchanged(w, sums, True)
        self.exchanged(w, largest, False)
        row = w.group * self.s.together + r
        for slot in cutlass.range_constexpr(self.slots()):
            head = self.head_number(thread, slot)
            if (row < mine.rows) & (head < mine.heads):
                factor = Float32(select_(sums[slot] == 0.0, Float32(1.0), 1.0 / sums[slot]))
                line = o[mine.row + row, mine.first_head + head, None]
                for i in cutlass.range_constexpr(cute.size(acc)):
                    if const_expr(self.head_slot(i % per_tile) == slot):
                        column = i // per_tile * 64 + thread // WARP * 16 + thread % WARP // 4 + i // 2 % 2 * 8
                        line[column] = (acc[i] * factor).to(self.dtype)
                if thread < 4:
                    top = largest[slot] * w.scale
                    exact = sums[slot] * cute.math.exp2(maxima[slot] * w.scale - top, fastmath=True)
                    total_sums[mine.row + row, mine.first_head + head] = Float32(select_(sums[slot] == 0.0, sums[slot], exact))
                    total_maxima[mine.row + row, mine.first_head + head] = top * math.log(2)


class TurnedTickets(Turned, Tickets): pass
