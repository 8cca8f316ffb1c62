"""The GEMM mainloop of Blackwell: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

A CTA has six warps. One lets the copy engine fill a ring of buffers in shared memory with tiles of A and B, one issues
tcgen05.mma, whose accumulator is in tensor memory, and four take the accumulator out and run the epilogue. There is
room for two accumulators, so that the next tile's products run during the epilogue. With a tile of 256 rows, two CTAs
work on it as a pair: each has half of the rows, and half of B, in its shared memory, the first one issues for both.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    NamedBarrier,
    PipelineTmaUmma,
    PipelineUmmaAsync,
)
from cutlass.runtime import make_fake_stream

from cudnn_kernels.configuration import GemmConfiguration as Configuration
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout
from cudnn_kernels.epilogue.operation import Epilogue, Plan, Sizes, Tile
from cudnn_kernels.types import DTYPES, fake

ROWS = 128  # of a CTA's tile: lanes of tensor memory, and threads of the epilogue
MMA_WARP, LOAD_WARP, WARPS = 4, 5, 6
SHARED_MEMORY = 227 * 1024
TENSOR_MEMORY = 512  # columns
POINTER_BARRIER, GROUP_BARRIER = 1, 2  # named barriers


@dataclass(frozen=True)
class TensorMemoryRows(RowLayout):
    """A thread has a whole row: lane for lane of tensor memory."""

    slots: int = 1
    neighbours: int = 1
    run: int = 32
    matrices: bool = False

    def order(self, width: int, slot: int) -> Sequence[int]:
        return range(width)

    def row(self, thread: Int32, slot: int) -> Int32:
        return thread


class Gemm:
    """The kernel for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        c = self.c = configuration
        self.a_type, self.b_type = DTYPES[c.a], DTYPES[c.b]
        self.pair = c.tile[0] // ROWS  # CTAs that share a tile
        self.group = tcgen05.CtaGroup.TWO if self.pair == 2 else tcgen05.CtaGroup.ONE
        self.accumulators = min(2, TENSOR_MEMORY // c.tile[1])
        self.epilogue = Epilogue(c.epilogue, self.plan())

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, *rest: Any) -> None:
        """``rest``: the schedule's arguments, the epilogue's, the number of multiprocessors to use, the stream."""
        c = self.c
        *arguments, multiprocessors, stream = rest
        cm, cn = c.cluster
        rows = ROWS * cm
        tiles = (cute.ceil_div(a.shape[0], rows), cute.ceil_div(b.shape[0], c.tile[1] * cn))
        scheduled = c.schedule.parameters(*tiles, a.shape[2], rows, *arguments[: c.schedule.count])
        parameters = self.epilogue.prepare(arguments[c.schedule.count :])
        clusters = cutlass.min(c.schedule.limit(scheduled), multiprocessors // (cm * cn))
        mma = self.tiled_mma()
        cluster = self.cluster(mma)
        layout_a, layout_b = (cute.slice_(x, (None, None, None, 0)) for x in self.operand_layouts(mma, 1))
        op_a = sm100.cluster_shape_to_tma_atom_A((cm, cn), mma.thr_id)
        op_b = sm100.cluster_shape_to_tma_atom_B((cm, cn), mma.thr_id)
        self.kernel(
            mma,
            *cute.nvgpu.make_tiled_tma_atom_A(op_a, a, layout_a, c.tile, mma, cluster.shape),
            *cute.nvgpu.make_tiled_tma_atom_B(op_b, b, layout_b, c.tile, mma, cluster.shape),
            scheduled,
            parameters,
        ).launch(
            grid=[cm, cn, clusters],
            block=[32 * WARPS, 1, 1],
            cluster=[cm, cn, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def tiled_mma(self) -> cute.TiledMma:
        """The product of a tile with one instruction's depth of k."""
        majors = [OperandMajorMode.K if m == "k" else OperandMajorMode.MN for m in (self.c.a_major, self.c.b_major)]
        return sm100.make_trivial_tiled_mma(
            self.a_type, self.b_type, *majors, Float32, self.group, self.c.tile[:2]
        )

    def cluster(self, mma: cute.TiledMma) -> cute.Layout:
        """The CTAs of a cluster, by pair, row, column."""
        return cute.tiled_divide(cute.make_layout((*self.c.cluster, 1)), (mma.thr_id.shape,))

    def operand_layouts(self, mma: cute.TiledMma, stages: int) -> tuple[Any, Any]:
        """A's and B's rings in shared memory."""
        return (
            sm100.make_smem_layout_a(mma, self.c.tile, self.a_type, stages),
            sm100.make_smem_layout_b(mma, self.c.tile, self.b_type, stages),
        )

    def stage_bytes(self) -> int:
        """Bytes of a tile of A and a tile of B, in one CTA."""
        m, n, k = self.c.tile
        return (m * self.a_type.width + n * self.b_type.width) // self.pair * k // 8

    def stages(self) -> int:
        """Buffers that fit beside the epilogue's."""
        return min(8, (SHARED_MEMORY - self.epilogue.bytes() - 2048) // self.stage_bytes())

    def plan(self) -> Plan:
        """What the epilogue must know."""

        def tiled_copy(atom: Any, width: int) -> cute.TiledCopy:
            return cute.make_tiled_copy_tv(atom, cute.make_layout((ROWS, 1)), cute.make_layout((1, width)))

        return Plan(
            rows=ROWS,
            width=self.c.part,
            tile_columns=self.c.tile[1],
            groups=1,
            threads=ROWS,
            stages=self.c.staged,
            layout=TensorMemoryRows(),
            tiled_copy=tiled_copy,
            fragment=lambda dtype, width: cute.make_rmem_tensor(((1, width), 1, 1), dtype),
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        mA: cute.Tensor,
        atom_b: cute.CopyAtom,
        mB: cute.Tensor,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """The roles of the warps."""
        stages = const_expr(self.stages())
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        cluster = self.cluster(mma)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)

        smem = SmemAllocator()
        layout_a, layout_b = self.operand_layouts(mma, stages)
        sA = smem.allocate_tensor(self.a_type, layout_a.outer, byte_alignment=1024, swizzle=layout_a.inner)
        sB = smem.allocate_tensor(self.b_type, layout_b.outer, byte_alignment=1024, swizzle=layout_b.inner)
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
        acc_barriers = smem.allocate_array(cutlass.Int64, 2 * self.accumulators)
        free_barrier = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(Int32, 1)
        self.epilogue.enter(parameters, smem)
        if thread == 0:
            self.epilogue.ready()
            cpasync.prefetch_descriptor(atom_a)
            cpasync.prefetch_descriptor(atom_b)
        one = CooperativeGroup(Agent.Thread)
        sharers = self.c.cluster[0] // self.pair + self.c.cluster[1] - 1
        memory = TmemAllocator(
            holder,
            barrier_for_retrieve=NamedBarrier(barrier_id=POINTER_BARRIER, num_threads=32 * (MMA_WARP + 1)),
            is_two_cta=self.pair == 2,
            two_cta_tmem_dealloc_mbar_ptr=free_barrier,
        )
        operands = PipelineTmaUmma.create(
            num_stages=stages,
            producer_group=one,
            consumer_group=CooperativeGroup(Agent.Thread, sharers),
            tx_count=self.stage_bytes() * self.pair,
            barrier_storage=barriers,
            cta_layout_vmnk=cluster,
            defer_sync=True,
        )
        accumulated = PipelineUmmaAsync.create(
            num_stages=self.accumulators,
            producer_group=one,
            consumer_group=CooperativeGroup(Agent.Thread, ROWS * self.pair),
            barrier_storage=acc_barriers,
            cta_layout_vmnk=cluster,
        )

        if warp == LOAD_WARP:
            self.load(mma, atom_a, mA, atom_b, mB, sA, sB, operands.make_producer(), scheduled, cluster, place)
        if warp <= MMA_WARP:
            memory.allocate(TENSOR_MEMORY)
            memory.wait_for_alloc()
            pointer = memory.retrieve_ptr(Float32)
            shape = mma.partition_shape_C(self.c.tile[:2])
            acc = cute.make_tensor(pointer, mma.make_fragment_C(cute.append(shape, self.accumulators)).layout)
            k_tiles = cute.ceil_div(cute.size(mA, mode=[1]), self.c.tile[2])
            if warp == MMA_WARP:
                if place[0] == 0:
                    self.multiply(
                        mma, acc, sA, sB, operands.make_consumer(), accumulated.make_producer(), scheduled, k_tiles
                    )
            else:
                self.finish(acc, accumulated.make_consumer(), scheduled, place, thread)
                memory.relinquish_alloc_permit()
                cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=ROWS)
                memory.free(pointer)
        if const_expr(self.c.cluster[0] * self.c.cluster[1] > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def tiles(self, scheduled: Any) -> tuple[Int32, Int32, Int32]:
        """First, end and step of this cluster's tiles in the schedule."""
        _, _, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()
        return cluster, self.c.schedule.total(scheduled), clusters

    @cute.jit
    def load(
        self,
        mma: cute.TiledMma,
        atom_a: cute.CopyAtom,
        mA: cute.Tensor,
        atom_b: cute.CopyAtom,
        mB: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ring: Any,
        scheduled: Any,
        cluster: cute.Layout,
        place: Any,
    ) -> None:
        """One warp: fills the ring with the operands of all tiles."""
        c = self.c
        m, n, k = c.tile
        part = mma.get_slice(place[0])
        tCgA = part.partition_A(cute.local_tile(mA, (m, k), (None, None, None)))
        tCgB = part.partition_B(cute.local_tile(mB, (n, k), (None, None, None)))
        tAsA, tAgA = cpasync.tma_partition(
            atom_a,
            place[2],
            cute.make_layout(c.cluster[1]),
            cute.group_modes(sA, 0, 3),
            cute.group_modes(tCgA, 0, 3),
        )
        tBsB, tBgB = cpasync.tma_partition(
            atom_b,
            place[1],
            cute.make_layout(c.cluster[0] // self.pair),
            cute.group_modes(sB, 0, 3),
            cute.group_modes(tCgB, 0, 3),
        )
        mask_a = cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=2)
        mask_b = cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=1)
        shared = const_expr(c.cluster[0] * c.cluster[1] > 1)
        k_tiles = cute.size(tAgA, mode=[2])
        first, end, step = self.tiles(scheduled)
        for index in cutlass.range(first, end, step):
            work = c.schedule.find(scheduled, index)
            tA = tAgA[None, work.m * (c.cluster[0] // self.pair) + place[1], None, work.a]
            tB = tBgB[None, work.n * c.cluster[1] + place[2], None, work.b]
            for i in cutlass.range(k_tiles, unroll=1):
                free = ring.acquire_and_advance()
                cute.copy(
                    atom_a, tA[None, i], tAsA[None, free.index], tma_bar_ptr=free.barrier,
                    mcast_mask=mask_a if shared else None,
                )  # fmt: skip
                cute.copy(
                    atom_b, tB[None, i], tBsB[None, free.index], tma_bar_ptr=free.barrier,
                    mcast_mask=mask_b if shared else None,
                )  # fmt: skip
        ring.tail()

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        sA: cute.Tensor,
        sB: cute.Tensor,
        ring: Any,
        accumulators: Any,
        scheduled: Any,
        k_tiles: Int32,
    ) -> None:
        """One warp, of a pair's first CTA: the products of all tiles, one accumulator after the other."""
        tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        first, end, step = self.tiles(scheduled)
        for _ in cutlass.range(first, end, step):
            free = accumulators.acquire_and_advance()
            target = acc[None, None, None, free.index]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(k_tiles, unroll=1):
                full = ring.wait_and_advance()
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    which = (None, None, block, full.index)
                    cute.gemm(mma, target, tCrA[which], tCrB[which], target)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                full.release()
            free.commit()
        accumulators.tail()

    @cute.jit
    def finish(self, acc: cute.Tensor, accumulators: Any, scheduled: Any, place: Any, thread: Int32) -> None:
        """Four warps: the epilogue of all tiles, part by part."""
        c, plan = self.c, self.epilogue.plan
        cm, cn = c.cluster
        bm, bn, _ = cute.arch.block_idx()
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(plan.width)), Float32)
        parts = cute.zipped_divide(acc, ((ROWS, plan.width),))  # ((rows, columns), (part, 1, 1, accumulator))
        copy = tcgen05.make_tmem_copy(atom, parts[None, (0, 0, 0, 0)])
        source = copy.get_slice(thread).partition_S(parts)
        count = Int32(0)
        first, end, step = self.tiles(scheduled)
        for index in cutlass.range(first, end, step):
            work = c.schedule.find(scheduled, index)
            tile = Tile(
                row=work.m * cm + bm,
                column=work.n * cn + bn,
                batch=work.d,
                expert=work.expert,
                count=count,
                thread=thread,
                group=Int32(0),
                barrier=lambda: cute.arch.barrier(barrier_id=GROUP_BARRIER, number_of_threads=ROWS),
            )
            self.epilogue.begin(tile)
            full = accumulators.wait_and_advance()
            for part in cutlass.range_constexpr(plan.parts):
                values = plan.fragment(Float32, plan.width)
                self.take(copy, source, part, full.index, values)
                if const_expr(part == plan.parts - 1):
                    full.release()
                self.epilogue.run(tile, part, Fragment(values, plan.width, plan.layout))
            self.epilogue.end(tile)
            count += 1
        self.epilogue.drain(thread)

    def take(self, copy: Any, source: cute.Tensor, part: int, accumulator: Int32, values: cute.Tensor) -> None:
        """A part of the accumulator, from tensor memory."""
        flat = cute.make_tensor(values.iterator, cute.make_layout(((cute.size(values), 1), 1)))
        cute.copy(copy, source[None, None, ((0, part), 0, 0, accumulator)], flat)
        cute.arch.fence_view_async_tmem_load()


def arguments(configuration: Configuration) -> tuple[Any, ...]:
    """Stand-ins for the arguments of :class:`Gemm`: sizes and strides are known when it is called."""
    c = configuration
    m, n, k, batch = (cute.sym_int() for _ in range(4))
    experts = batch if c.schedule.count == 0 else cute.sym_int()
    return (
        fake(c.a, (m, k, batch), 1 if c.a_major == "k" else 0),
        fake(c.b, (n, k, experts), 1 if c.b_major == "k" else 0),
        *c.schedule.arguments(),
        *Gemm(c).epilogue.arguments(Sizes(m, n, batch)),
        Int32(0),
        make_fake_stream(),
    )
