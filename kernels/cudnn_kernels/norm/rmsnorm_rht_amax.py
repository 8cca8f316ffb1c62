"""RMSNorm, a random Hadamard transform (RHT) of every 16 columns, and the amax of every group of rows, in one pass.

    y[i, :] = x[i, :] * rsqrt(mean(x[i, :]^2) + eps) * w
    o[i, :] = y[i, :] with each block of 16 columns multiplied by H16 / 4 (Sylvester's matrix of +-1)
    amax[g] = max |o| over the rows of group g, before o is rounded

The kernel is memory-bound, so the design keeps bulk copies in flight. A CTA takes one group of rows. Its threads form
teams, each with a pipeline of row buffers in shared memory: a bulk load fills a stage (full mbarrier), the team
transforms it in place, a bulk store drains it. Teams synchronize only for the group's amax. Two or more CTAs are
resident per SM, so that one loads while the other computes.

There is one CTA per group. Persistent CTAs are slower: 0.90 instead of 0.95 of the bandwidth of a device copy on an
H200.

Rows too long for a CTA are split over a cluster of two, half of the columns each. The CTAs exchange their sums of
squares row by row, and the group's amax, through distributed shared memory.
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
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.norm.heuristics import BLOCK
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration as Configuration
from cudnn_kernels.threads import WARP_SIZE

HALF = BLOCK // 2  # columns of a 16-byte access
AMAX_BARRIER = 8  # first named barrier of teams that share a group; those below belong to single teams


@dataclass
class ClusterMailbox:
    """Values from the other CTA of the cluster, in shared memory, with their full mbarriers."""

    values: cute.Tensor
    full: cute.Pointer


def elementwise(operation: Callable[..., Any]) -> Any:
    """An elementwise operation on pairs."""
    return staticmethod(lambda *pairs: tuple(operation(*values) for values in zip(*pairs, strict=True)))


class Pairs:
    """Arithmetic on pairs of float32 values: two instructions each."""

    add, sub, mul = elementwise(operator.add), elementwise(operator.sub), elementwise(operator.mul)
    fma = elementwise(lambda a, b, c: c + a * b)


class PackedPairs(Pairs):
    """Packed f32x2 instructions of Blackwell."""

    add = staticmethod(cute.arch.add_packed_f32x2)
    sub = staticmethod(cute.arch.sub_packed_f32x2)
    mul = staticmethod(cute.arch.mul_packed_f32x2)
    fma = staticmethod(cute.arch.fma_packed_f32x2)


class RmsNormRhtAmax(Kernel):
    """The kernel for one :class:`Configuration`, on Hopper."""

    pairs: type[Pairs] = Pairs

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.warps = configuration.threads // WARP_SIZE
        self.columns = configuration.cta_columns
        self.blocks = self.columns // BLOCK
        self.blocks_per_thread = -(-self.blocks // configuration.threads)

    def launch(self, arguments: Mapping[str, Any]) -> None:
        """One CTA per group of rows, or for several groups of few rows."""
        x, w, o, amax, eps, stream = arguments.values()
        groups = cute.size(amax)
        rows = cute.size(x, mode=[0]) // groups
        groups_per_cta = cutlass.max(self.c.teams // rows, 1)
        self.kernel(x, w, o, amax, eps, rows, groups_per_cta, self.c.teams // groups_per_cta).launch(
            grid=[cute.ceil_div(groups, groups_per_cta) * self.c.ctas, 1, 1],
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
        groups_per_cta: Int32,
        members: Int32,
    ) -> None:
        """``rows`` rows share one amax; a CTA takes ``groups_per_cta`` groups, with ``members`` teams each."""
        c = self.c
        tid, block = thread_block_idx()
        cta, cta_rank = block // c.ctas, block % c.ctas
        team = cute.arch.make_warp_uniform(tid // c.threads)
        thread = tid % c.threads
        slot, member = team // members, team % members

        smem = SmemAllocator()
        buffers = cute.make_layout((self.columns, c.stages, c.teams))
        pipeline = smem.allocate_tensor(x.element_type, buffers, byte_alignment=128)
        full = smem.allocate_array(cutlass.Int64, c.stages * c.teams) + team * c.stages
        partials = smem.allocate_tensor(Float32, cute.make_layout((self.warps, c.teams, 2)), byte_alignment=16)
        mailbox = ClusterMailbox(
            smem.allocate_tensor(Float32, cute.make_layout(3), byte_alignment=16), smem.allocate_array(cutlass.Int64, 3)
        )
        if const_expr(c.ctas > 1):
            if tid == 0:
                for value in cutlass.range_constexpr(3):
                    cute.arch.mbarrier_init(mailbox.full + value, 1)
                cute.arch.mbarrier_init_fence()
            self.cluster_sync()  # the other CTA's mbarriers are initialized

        group = cta * groups_per_cta + slot
        if slot < groups_per_cta and group < cute.size(amax):
            first = group * rows
            sX = pipeline[None, None, team]
            if thread == 0:
                for stage in cutlass.range_constexpr(c.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init_fence()
                for stage in cutlass.range_constexpr(c.stages):
                    if member + stage * members < rows:
                        self.load(x, cta_rank, sX, full, first + member + stage * members, stage)
            self.barrier(team)  # the mbarriers are initialized

            rW = self.weights(self.row_of(w, cta_rank, Int32(0)), thread)
            largest = Float32(0.0)
            stage, phase = Int32(0), Int32(0)
            for row in cutlass.range(member, rows, members):
                sRow = sX[None, stage]
                cute.arch.mbarrier_wait(full + stage, phase)
                total = self.sum_of_squares(sRow, partials[None, team, 0], team, thread)
                if const_expr(c.ctas > 1):
                    total += self.exchange(total, mailbox, row % 2, row // 2 % 2, cta_rank, thread)
                scale = cute.math.rsqrt(total / c.columns + eps) * 0.25  # 1/4 normalizes H16
                largest = self.transform(sRow, rW, scale, largest, thread)
                cute.arch.fence_view_async_shared()
                self.barrier(team)
                if thread == 0:
                    self.store(sRow, o, cta_rank, first + row)
                    # All but the newest store have read shared memory: the previous stage is free.
                    cute.arch.cp_async_bulk_wait_group(1, read=True)
                    ahead = row + (c.stages - 1) * members
                    if row > member and ahead < rows:
                        self.load(x, cta_rank, sX, full, first + ahead, stage - 1 if stage > 0 else Int32(c.stages - 1))
                stage += 1
                if stage == c.stages:
                    stage = Int32(0)
                    phase = phase ^ 1
            largest = self.largest_of_teams(largest, partials[None, None, 1], team, members, thread)
            if const_expr(c.ctas > 1):
                largest = maximum(largest, self.exchange(largest, mailbox, Int32(2), Int32(0), cta_rank, thread))
            if thread == 0 and team % members == 0 and cta_rank == 0:
                amax[group] = largest
            if thread == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # the stores have read shared memory

    set_kernel_name(kernel, "cudnn_rmsnorm_rht_amax")

    @cute.jit
    def barrier(self, team: Int32) -> None:
        """Synchronizes the team."""
        if const_expr(self.warps == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team, number_of_threads=self.c.threads)

    @cute.jit
    def cluster_sync(self) -> None:
        """Synchronizes both CTAs."""
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def exchange(
        self, value: Float32, mailbox: cutlass.Constexpr, slot: Int32, phase: Int32, cta_rank: Int32, thread: Int32
    ) -> Float32:
        """Sends thread 0's value to the other CTA and returns the other CTA's value.

        Two alternating slots suffice: a CTA sends a value two exchanges later only after it has received the next one,
        and then all threads of the other CTA have read this one.
        """
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(mailbox.full + slot, 4)
            cute.arch.store_async_dsmem(
                mailbox.values.iterator + slot, value.bitcast(Int32), mailbox.full + slot, 1 - cta_rank
            )
        cute.arch.mbarrier_wait(mailbox.full + slot, phase)
        return mailbox.values[slot]

    @cute.jit
    def load(
        self, x: cute.Tensor, cta_rank: Int32, sX: cute.Tensor, full: cute.Pointer, row: Int32, stage: Int32
    ) -> None:
        """One thread: issues the bulk load of a row to a stage."""
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkG2SOp(), x.element_type)
        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.columns * x.element_type.width // 8)
        cute.copy(atom, *self.bulk(self.row_of(x, cta_rank, row), sX[None, stage]), mbar_ptr=full + stage)

    @cute.jit
    def store(self, sRow: cute.Tensor, o: cute.Tensor, cta_rank: Int32, row: Int32) -> None:
        """One thread: issues the bulk store of a stage to a row of the result and commits it as a group."""
        atom = cute.make_copy_atom(cute.nvgpu.cpasync.CopyBulkS2GOp(), o.element_type)
        cute.copy(atom, *self.bulk(sRow, self.row_of(o, cta_rank, row)))
        cute.arch.cp_async_bulk_commit_group()

    def row_of(self, x: cute.Tensor, cta_rank: Int32, row: Int32) -> cute.Tensor:
        """This CTA's columns of a row in global memory; the row's offset does not fit into 32 bits."""
        start = cutlass.Int64(row) * self.c.columns + cta_rank * self.columns
        return cute.make_tensor(x.iterator + start, cute.make_layout(self.columns))

    def bulk(self, source: cute.Tensor, target: cute.Tensor) -> tuple:
        """Source and target views of a single bulk copy."""
        one_copy = cute.make_layout((self.columns, 1))
        return tuple(cute.make_tensor(t.iterator.align(16), one_copy) for t in (source, target))

    @cute.jit
    def block_halves(self, row: cute.Tensor, thread: Int32, j: cutlass.Constexpr[int]) -> tuple:
        """The two halves of a thread's j-th block, in the order in which the thread accesses them.

        Threads 4 to 7 of every 8 access the second half first: the 16-byte accesses of a quarter warp, 32 bytes apart,
        then hit every bank once instead of every other bank twice.
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
        """This thread's values of w, for all rows; for swapped threads the half that comes first is negated."""
        rW = cute.make_rmem_tensor((HALF, 2, self.blocks_per_thread), Float32)
        sign = Float32(1 - 2 * self.swapped(thread))
        for j in cutlass.range_constexpr(self.blocks_per_thread):
            if self.has_item(thread, j, self.blocks):
                first, second = self.block_halves(w, thread, j)
                rW[None, 0, j].store(first.load().to(Float32) * sign)
                rW[None, 1, j].store(second.load().to(Float32))
        return rW

    def has_item(self, thread: Int32, j: int, count: int) -> bool | cutlass.Boolean:
        """Whether the thread has a j-th of ``count`` items; a bool, except for a ragged last one."""
        if (j + 1) * self.c.threads <= count:
            return True
        return thread + j * self.c.threads < count

    @cute.jit
    def sum_of_squares(self, sRow: cute.Tensor, sPartial: cute.Tensor, team: Int32, thread: Int32) -> Float32:
        """The sum of squares of the CTA's columns of a row."""
        sums = [(Float32(0.0), Float32(0.0))] * 4  # independent chains
        for j in cutlass.range_constexpr(2 * self.blocks_per_thread):
            if self.has_item(thread, j, 2 * self.blocks):
                start = cute.assume((j * self.c.threads + thread) * HALF, HALF)
                v = cute.make_tensor((sRow.iterator + start).align(16), cute.make_layout(HALF)).load().to(Float32)
                pairs = [(v[i], v[i + 4]) for i in range(4)]
                sums = [self.pairs.fma(pair, pair, total) for pair, total in zip(pairs, sums, strict=True)]
        first, second = self.pairs.add(self.pairs.add(sums[0], sums[1]), self.pairs.add(sums[2], sums[3]))
        total = cute.arch.warp_reduction_sum(first + second)
        if const_expr(self.warps > 1):
            if thread % WARP_SIZE == 0:
                sPartial[thread // WARP_SIZE] = total
            self.barrier(team)
            total = sPartial.load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return total

    @cute.jit
    def transform(self, sRow: cute.Tensor, rW: cute.Tensor, scale: Float32, largest: Float32, thread: Int32) -> Float32:
        """Writes H16 (x * scale * w) over the row in shared memory; returns the maximum of ``largest`` and its
        magnitude.
        """
        # H16 (a, b) = (H8 a + H8 b, H8 a - H8 b). A swapped thread has -H8 b first, by its weights, then H8 a: its sum
        # is the second half of the result, its negated difference the first.
        sign = Float32(1 - 2 * self.swapped(thread))
        for j in cutlass.range_constexpr(self.blocks_per_thread):
            if self.has_item(thread, j, self.blocks):
                first, second = self.block_halves(sRow, thread, j)
                x0, x1 = first.load().to(Float32), second.load().to(Float32)
                scaled = [self.pairs.mul((x0[i], x1[i]), (scale, scale)) for i in range(HALF)]
                weights = [(rW[i, 0, j], rW[i, 1, j]) for i in range(HALF)]
                y = hadamard([self.pairs.mul(a, b) for a, b in zip(scaled, weights, strict=True)], self.pairs)
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
        if thread % WARP_SIZE == 0:
            sLargest[thread // WARP_SIZE, team] = largest
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
    """The kernel on Blackwell, with packed instructions: memory is faster there, SMs are not."""

    pairs = PackedPairs


def hadamard(y: list, pairs: type[Pairs]) -> list:
    """y @ H for Sylvester's Hadamard matrix and each half of the pairs in y, by len(y) * log2(len(y)) additions.

    The last stage goes value by value: packed, it made ptxas spill.
    """
    distance = 1
    while distance < len(y):
        pairs = pairs if 2 * distance < len(y) else Pairs
        y = [
            pairs.sub(y[i - distance], y[i]) if i & distance else pairs.add(y[i], y[i + distance])
            for i in range(len(y))
        ]
        distance *= 2
    return y
