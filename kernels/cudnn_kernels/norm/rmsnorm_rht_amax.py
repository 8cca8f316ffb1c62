"""RMSNorm, a Hadamard transform of every 16 columns, and the largest magnitude of every group of rows, in one pass.

    y[i, :] = x[i, :] * rsqrt(mean(x[i, :]^2) + eps) * w
    o[i, :] = y[i, :] with each block of 16 columns multiplied by H16 / 4 (Sylvester's matrix of +-1)
    amax[g] = max |o| over the rows of group g, before o is rounded

The kernel is bound by memory, so everything serves to keep bulk copies in flight. A CTA takes one group of rows; its
threads form teams, each with a ring of row buffers in shared memory: the copy engine fills a buffer, the team turns it
into the result in place, the copy engine takes it out. Teams meet only for the group's amax. Two or more CTAs share an
SM, so that one loads while the other works.

There are as many CTAs as groups, and the hardware hands them out. CTAs that stay on their SM and walk over the groups
are slower, 0.90 instead of 0.95 of a device copy on an H200.

Rows too long for a CTA are shared by a cluster of two. Each has half of the columns and does as above; they tell each
other their sums of squares, row by row, and the group's largest magnitude.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from cudnn_kernels.epilogue.arithmetic import maximum
from cudnn_kernels.kernel import Kernel, here
from cudnn_kernels.naming import name
from cudnn_kernels.norm.heuristics import BLOCK, WARP
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration as Configuration

HALF = BLOCK // 2  # columns of a 16-byte access
AMAX_BARRIER = 8  # first of the named barriers of teams that share a group; those below belong to single teams


@dataclass
class Told:
    """What a CTA was told by the other one of its cluster, in shared memory, and the barriers that say so."""

    values: cute.Tensor
    full: cute.Pointer


def each(operation: Callable[..., Any]) -> Any:
    """An operation on both values of pairs."""
    return staticmethod(lambda *pairs: tuple(operation(*values) for values in zip(*pairs, strict=True)))


class Pairs:
    """Arithmetic on two float32 values at once: two instructions."""

    add, subtract, multiply = each(operator.add), each(operator.sub), each(operator.mul)
    add_product = each(lambda a, b, c: c + a * b)


class PackedPairs(Pairs):
    """One instruction, on Blackwell."""

    add = staticmethod(cute.arch.add_packed_f32x2)
    subtract = staticmethod(cute.arch.sub_packed_f32x2)
    multiply = staticmethod(cute.arch.mul_packed_f32x2)
    add_product = staticmethod(cute.arch.fma_packed_f32x2)


class RmsNormRhtAmax(Kernel):
    """The kernel for one :class:`Configuration`, on Hopper."""

    pairs: type[Pairs] = Pairs

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.warps = configuration.threads // WARP
        self.columns = configuration.share
        self.blocks = self.columns // BLOCK
        self.blocks_per_thread = -(-self.blocks // configuration.threads)

    def launch(self, given: Mapping[str, Any]) -> None:
        """A CTA for each group of rows or, where groups have few rows, for several of them."""
        x, w, o, amax, eps, stream = given.values()
        groups = cute.size(amax)
        rows = cute.size(x, mode=[0]) // groups
        at_once = cutlass.max(self.c.teams // rows, 1)
        self.kernel(x, w, o, amax, eps, rows, at_once, self.c.teams // at_once).launch(
            grid=[cute.ceil_div(groups, at_once) * self.c.ctas, 1, 1],
            block=[self.c.threads * self.c.teams, 1, 1],
            cluster=[self.c.ctas, 1, 1] if self.c.ctas > 1 else None,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        w: cute.Tensor,
        o: cute.Tensor,
        amax: cute.Tensor,
        eps: Float32,
        rows: Int32,
        at_once: Int32,
        members: Int32,
    ) -> None:
        """``rows`` share one amax; a CTA takes ``at_once`` such groups, with ``members`` teams for each."""
        c = self.c
        tid, block = here()
        cta, part = block // c.ctas, block % c.ctas
        team = cute.arch.make_warp_uniform(tid // c.threads)
        thread = tid % c.threads
        slot, member = team // members, team % members

        smem = SmemAllocator()
        buffers = cute.make_layout((self.columns, c.stages, c.teams))
        ring = smem.allocate_tensor(x.element_type, buffers, byte_alignment=128)
        full = smem.allocate_array(cutlass.Int64, c.stages * c.teams) + team * c.stages
        partials = smem.allocate_tensor(Float32, cute.make_layout((self.warps, c.teams, 2)), byte_alignment=16)
        told = Told(
            smem.allocate_tensor(Float32, cute.make_layout(3), byte_alignment=16), smem.allocate_array(cutlass.Int64, 3)
        )
        if const_expr(c.ctas > 1):
            if tid == 0:
                for value in cutlass.range_constexpr(3):
                    cute.arch.mbarrier_init(told.full + value, 1)
                cute.arch.mbarrier_init_fence()
            self.meet()  # the other CTA's shared memory can be written from now on

        group = cta * at_once + slot
        if slot < at_once and group < cute.size(amax):
            first = group * rows
            sX = ring[None, None, team]
            if thread == 0:
                for stage in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init_fence()
                for stage in cutlass.range_constexpr(c.stages):
                    if member + stage * members < rows:
                        self.load(x, part, sX, full, first + member + stage * members, stage)
            self.barrier(team)  # the mbarriers are ready for all

            rW = self.weights(self.row_of(w, part, Int32(0)), thread)
            largest = Float32(0.0)
            stage, phase = Int32(0), Int32(0)
            for row in cutlass.range(member, rows, members):
                sRow = sX[None, stage]
                cute.arch.mbarrier_wait(full + stage, phase)
                total = self.sum_of_squares(sRow, partials[None, team, 0], team, thread)
                if const_expr(c.ctas > 1):
                    total += self.exchange(total, told, row % 2, row // 2 % 2, part, thread)
                scale = cute.math.rsqrt(total / c.columns + eps) * 0.25  # a quarter normalises H16
                largest = self.transform(sRow, rW, scale, largest, thread)
                cute.arch.fence_view_async_shared()
                self.barrier(team)
                if thread == 0:
                    self.store(sRow, o, part, first + row)
                    # All but the newest store have left shared memory: the buffer before this one is free.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    ahead = row + (c.stages - 1) * members
                    if row > member and ahead < rows:
                        self.load(x, part, sX, full, first + ahead, stage - 1 if stage > 0 else Int32(c.stages - 1))
                stage += 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            largest = self.largest_of_teams(largest, partials[None, None, 1], team, members, thread)
            if const_expr(c.ctas > 1):
                largest = maximum(largest, self.exchange(largest, told, Int32(2), Int32(0), part, thread))
            if thread == 0 and team % members == 0 and part == 0:
                amax[group] = largest
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until its readers are done

    name(kernel, "cudnn_rmsnorm_rht_amax")

    @cute.jit
    def barrier(self, team: Int32) -> None:
        """Waits for all threads of the team."""
        if const_expr(self.warps == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team, number_of_threads=self.c.threads)

    @cute.jit
    def meet(self) -> None:
        """Waits for all threads of both CTAs."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def exchange(
        self, mine: Float32, told: cutlass.Constexpr, slot: Int32, phase: Int32, part: Int32, thread: Int32
    ) -> Float32:
        """The other CTA's value for this one's, that of thread 0.

        Two slots that take turns suffice: a CTA tells the value after the next only when it was told the next one, and
        then all threads of the other CTA have read this one.
        """
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(told.full + slot, 4)
            cute.arch.store_async_dsmem(told.values.iterator + slot, mine.bitcast(Int32), told.full + slot, 1 - part)
        cute.arch.mbarrier_wait(told.full + slot, phase)
        return told.values[slot]

    @cute.jit
    def load(self, x: cute.Tensor, part: Int32, sX: cute.Tensor, full: cute.Pointer, row: Int32, stage: Int32) -> None:
        """Starts the copy of a row into a buffer of the ring. One thread."""
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), x.element_type)
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.columns * x.element_type.width // 8)
        cute.copy(atom, *self.bulk(self.row_of(x, part, row), sX[None, stage]), mbar_ptr=full + stage)

    @cute.jit
    def store(self, sRow: cute.Tensor, o: cute.Tensor, part: Int32, row: Int32) -> None:
        """Starts the copy of a buffer to a row of the result, as a group of its own. One thread."""
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkS2GOp(), o.element_type)
        cute.copy(atom, *self.bulk(sRow, self.row_of(o, part, row)))
        cute.arch.cp_async_bulk_commit_group()

    def row_of(self, x: cute.Tensor, part: Int32, row: Int32) -> cute.Tensor:
        """This CTA's part of a row in global memory; the row's offset does not fit into 32 bits."""
        start = cutlass.Int64(row) * self.c.columns + part * self.columns
        return cute.make_tensor(x.iterator + start, cute.make_layout(self.columns))

    def bulk(self, source: cute.Tensor, target: cute.Tensor) -> tuple:
        """Both vectors as one single bulk copy."""
        whole = cute.make_layout((self.columns, 1))
        return tuple(cute.make_tensor(t.iterator.align(16), whole) for t in (source, target))

    @cute.jit
    def halves(self, row: cute.Tensor, thread: Int32, j: cutlass.Constexpr[int]) -> tuple:
        """The two halves of a thread's j-th block, in the order in which the thread reads and writes them.

        Threads 4 to 7 of every 8 take the second half first: a quarter warp's 16-byte accesses, 32 bytes apart, then
        meet every bank once instead of every other bank twice.
        """
        block = (j * self.c.threads + thread) * BLOCK
        first = block + self.swapped(thread) * HALF
        second = block + (1 - self.swapped(thread)) * HALF
        return tuple(
            cute.make_tensor((row.iterator + cute.assume(start, HALF)).align(16), cute.make_layout(HALF))
            for start in (first, second)
        )

    def swapped(self, thread: Int32) -> Int32:
        """1 for the threads that take the second half of a block first."""
        return thread // 4 % 2

    @cute.jit
    def weights(self, w: cute.Tensor, thread: Int32) -> cute.Tensor:
        """This thread's part of w, which serves all rows; for swapped threads the half that comes first is negated."""
        rW = cute.make_rmem_tensor((HALF, 2, self.blocks_per_thread), Float32)
        sign = Float32(1 - 2 * self.swapped(thread))
        for j in cutlass.range_constexpr(self.blocks_per_thread):
            if self.mine(thread, j, self.blocks):
                first, second = self.halves(w, thread, j)
                rW[None, 0, j].store(first.load().to(Float32) * sign)
                rW[None, 1, j].store(second.load().to(Float32))
        return rW

    def mine(self, thread: Int32, j: int, pieces: int) -> bool | cutlass.Boolean:
        """Whether the thread has a j-th one of a row's pieces: known when compiling, but for a ragged last one."""
        if (j + 1) * self.c.threads <= pieces:
            return True
        return thread + j * self.c.threads < pieces

    @cute.jit
    def sum_of_squares(self, sRow: cute.Tensor, sPartial: cute.Tensor, team: Int32, thread: Int32) -> Float32:
        """Of what the CTA has of a row."""
        sums = [(Float32(0.0), Float32(0.0))] * 4  # independent chains
        for j in cutlass.range_constexpr(2 * self.blocks_per_thread):
            if self.mine(thread, j, 2 * self.blocks):
                start = cute.assume((j * self.c.threads + thread) * HALF, HALF)
                v = cute.make_tensor((sRow.iterator + start).align(16), cute.make_layout(HALF)).load().to(Float32)
                pairs = [(v[i], v[i + 4]) for i in range(4)]
                sums = [self.pairs.add_product(pair, pair, total) for pair, total in zip(pairs, sums, strict=True)]
        first, second = self.pairs.add(self.pairs.add(sums[0], sums[1]), self.pairs.add(sums[2], sums[3]))
        total = cute.arch.warp_reduction_sum(first + second)
        if const_expr(self.warps > 1):
            if thread % WARP == 0:
                sPartial[thread // WARP] = total
            self.barrier(team)
            total = sPartial.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return total

    @cute.jit
    def transform(self, sRow: cute.Tensor, rW: cute.Tensor, scale: Float32, largest: Float32, thread: Int32) -> Float32:
        """Writes H16 (x * scale * w) over the row in shared memory; gives ``largest`` or, if more, its magnitude."""
        # H16 (a, b) = (H8 a + H8 b, H8 a - H8 b). A swapped thread has -H8 b first, by its weights, then H8 a: its sum
        # is the second half of the result, its negated difference the first.
        sign = Float32(1 - 2 * self.swapped(thread))
        for j in cutlass.range_constexpr(self.blocks_per_thread):
            if self.mine(thread, j, self.blocks):
                first, second = self.halves(sRow, thread, j)
                x0, x1 = first.load().to(Float32), second.load().to(Float32)
                scaled = [self.pairs.multiply((x0[i], x1[i]), (scale, scale)) for i in range(HALF)]
                weights = [(rW[i, 0, j], rW[i, 1, j]) for i in range(HALF)]
                y = hadamard([self.pairs.multiply(a, b) for a, b in zip(scaled, weights, strict=True)], self.pairs)
                r0 = cute.make_rmem_tensor((HALF,), Float32)
                r1 = cute.make_rmem_tensor((HALF,), Float32)
                for i in cutlass.range_constexpr(HALF):
                    r0[i] = y[i][0] + y[i][1]
                    r1[i] = (y[i][0] - y[i][1]) * sign
                    largest = maximum(maximum(largest, cute.math.absf(r0[i])), cute.math.absf(r1[i]))
                first.store(r0.load().to(sRow.element_type))
                second.store(r1.load().to(sRow.element_type))
        return largest

    @cute.jit
    def largest_of_teams(
        self, largest: Float32, sLargest: cute.Tensor, team: Int32, members: Int32, thread: Int32
    ) -> Float32:
        """Reduces over the teams that share a group; thread 0 of the first one of them gets the result."""
        largest = cute.arch.warp_reduction(largest, maximum)
        if thread % WARP == 0:
            sLargest[thread // WARP, team] = largest
        if members == 1:
            self.barrier(team)
        else:
            cute.arch.barrier(barrier_id=AMAX_BARRIER + team // members, number_of_threads=members * self.c.threads)
        if thread == 0 and team % members == 0:
            for other in cutlass.range(team, team + members):
                for warp in cutlass.range_constexpr(self.warps):
                    largest = maximum(largest, sLargest[warp, other])
        return largest


class BlackwellRmsNormRhtAmax(RmsNormRhtAmax):
    """The same on Blackwell. Fewer instructions: memory is faster there, SMs are not."""

    pairs = PackedPairs


def hadamard(y: list, pairs: type[Pairs]) -> list:
    """y @ H for Sylvester's Hadamard matrix and each half of the pairs in y, by len(y) * log2(len(y)) additions.

    The last stage goes value by value: packed, it made ptxas spill.
    """
    distance = 1
    while distance < len(y):
        pairs = pairs if 2 * distance < len(y) else Pairs
        y = [
            pairs.subtract(y[i - distance], y[i]) if i & distance else pairs.add(y[i], y[i + distance])
            for i in range(len(y))
        ]
        distance *= 2
    return y
