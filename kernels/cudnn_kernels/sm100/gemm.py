"""The GEMM mainloop of Blackwell: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

A CTA has six warps. One lets the copy engine fill a ring of buffers in shared memory with tiles of A and B, one issues
tcgen05.mma, whose accumulator is in tensor memory, and four take the accumulator out and run the epilogue. There is
room for two accumulators, so that the next tile's products run during the epilogue. With a tile of 256 rows, two CTAs
work on it as a pair: each has half of the rows, and half of B, in its shared memory, the first one issues for both.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    NamedBarrier,
    PipelineTmaUmma,
    PipelineUmmaAsync,
)

from cudnn_kernels.configuration import GemmConfiguration as Configuration
from cudnn_kernels.epilogue.fragment import Fragment, RowLayout
from cudnn_kernels.epilogue.operation import Epilogue, Plan, Tile
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import BlackwellGemm as Barrier
from cudnn_kernels.pipeline.copy import address
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.schedule.feed import Feed
from cudnn_kernels.schedule.tiles import tiles_of
from cudnn_kernels.shared_memory import ring_stages
from cudnn_kernels.signature import bind
from cudnn_kernels.sm100.operands import ROWS, Place, tile_operands

MMA_WARP, LOAD_WARP, FEED_WARP = 4, 5, 6
TENSOR_MEMORY = 512  # columns


@dataclass(frozen=True)
class TensorMemoryRows(RowLayout):
    """A thread has a whole row: lane for lane of tensor memory.

    One chain of additions would last longer than all else, and what waits for it would fill the registers; of four, the
    compiler starts more at once than registers hold.
    """

    slots: int = 1
    neighbours: int = 1
    run: int = 32
    matrices: bool = False
    chains: int = 2
    few: int = 4

    def order(self, width: int, slot: int) -> Sequence[int]:
        return range(width)

    def row(self, thread: Int32, slot: int) -> Int32:
        return thread

    def inside(self, thread: Int32, slot: int, rows: Int32, columns: Int32) -> Callable[[int], Any]:
        end = Int32(select_(thread < rows, columns, Int32(0)))  # so that one comparison and one choice do for a value
        return lambda position: self.column(thread, position) < end


class Gemm:
    """The kernel for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        c = self.c = configuration
        self.pair = c.tile[0] // ROWS  # CTAs that share a tile
        self.group = tcgen05.CtaGroup.TWO if self.pair == 2 else tcgen05.CtaGroup.ONE
        self.accumulators = min(2, (TENSOR_MEMORY - self.factor_columns()) // c.tile[1])
        self.tiles = tiles_of(c.schedule, ROWS * c.cluster[0], c.tile[1] * c.cluster[1])
        self.broadcast = c.dynamic or c.schedule.searches
        self.warps = FEED_WARP + 1 if self.broadcast else FEED_WARP
        self.epilogue = Epilogue(c.epilogue, self.plan())

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        slots = self.c.slots()
        named = bind(slots, arguments)
        self.launch({**named, **divided(slots, named, self.c.regions)})

    def launch(self, arguments: Mapping[str, Any]) -> None:
        """Launches the kernel on arguments by name, and on pointers to the workspace's regions."""
        c = self.c
        cm, cn = c.cluster
        mma, whole = self.tiled_mma(), self.tiled_mma(tcgen05.CtaGroup.ONE)
        views = dict(arguments)
        operands = tile_operands(c, mma, whole, self.tiles.clips_k)
        for operand in operands:
            views[operand.name] = operand.view(arguments.get(operand.name), views)
        scheduled = self.tiles.prepare(views["a"], views["b"], arguments)
        arguments = {**arguments, "m": views["a"].shape[0], "n": views["b"].shape[0]}
        parameters = self.epilogue.prepare(arguments)
        clusters = self.tiles.limit(scheduled)
        if const_expr(not c.dynamic):
            clusters = cutlass.min(clusters, arguments["multiprocessors"] // (cm * cn))
        made = [operand.descriptor(views[operand.name]) for operand in operands]
        atoms, tensors = [atom for atom, _ in made], [tensor for _, tensor in made]
        pointers = [arguments.get(f"{operand.name}_ptrs") for operand in operands]
        self.kernel(mma, whole, atoms, tensors, pointers, scheduled, parameters).launch(
            grid=[cm, cn, clusters],
            block=[32 * self.warps, 1, 1],
            cluster=[cm, cn, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )
        self.epilogue.follow(arguments)

    def tiled_mma(self, group: Any = None) -> cute.TiledMma:
        """The product of a tile with one instruction's depth of k; of a CTA's part, by a group of one."""
        c = self.c
        a, b = DTYPES[c.a.dtype], DTYPES[c.b.dtype]
        majors = [OperandMajorMode.K if x.major == "k" else OperandMajorMode.MN for x in (c.a, c.b)]
        rows = c.tile[0] if group is None else ROWS
        group = group or self.group
        if c.a.scale is not None:
            scale = DTYPES[c.a.scale.dtype]
            return sm100.make_blockscaled_trivial_tiled_mma(
                a, b, *majors, scale, c.a.scale.vector, group, (rows, c.tile[1])
            )
        return sm100.make_trivial_tiled_mma(a, b, *majors, Float32, group, (rows, c.tile[1]))

    def stage_bytes(self) -> int:
        """Bytes of the operands' tiles in one CTA."""
        return sum(operand.bits() for operand in tile_operands(self.c, None, None)) // 8

    def factor_columns(self) -> int:
        """Columns of tensor memory for a k tile's factors: 128 rows of four bytes each fill four."""
        c = self.c
        return (1 + -(-c.tile[1] // ROWS)) * c.tile[2] // c.a.scale.vector if c.a.scale else 0

    def stages(self) -> int:
        """Buffers that fit beside the epilogue's."""
        return ring_stages(self.epilogue.bytes(), self.stage_bytes())

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
            clips_rows=self.tiles.clips_rows,
            offsets=self.tiles.row_offsets,
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        whole: cute.TiledMma,
        atoms: list,
        tensors: list,
        pointers: list,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """The roles of the warps."""
        stages = const_expr(self.stages())
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        copied = tile_operands(self.c, mma, whole, self.tiles.clips_k)
        cluster = copied[0].cluster()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)

        smem = SmemAllocator()
        shared = [operand.allocate(smem, stages) for operand in copied]
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
        acc_barriers = smem.allocate_array(cutlass.Int64, 2 * self.accumulators)
        free_barrier = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(Int32, 1)
        self.epilogue.enter(parameters, smem)
        readers = 1 + ROWS // 32 + (place[0] == 0)  # warps of this CTA that load, finish and, first of a pair, multiply
        self.feed = Feed(self.tiles, scheduled, readers, smem, self.c.dynamic, cluster)
        if thread == 0:
            self.feed.ready()
            self.epilogue.ready()
            for i in cutlass.range_constexpr(len(atoms)):
                cpasync.prefetch_descriptor(atoms[i])
        one = CooperativeGroup(Agent.Thread)
        sharers = self.c.cluster[0] // self.pair + self.c.cluster[1] - 1
        memory = TmemAllocator(
            holder,
            barrier_for_retrieve=NamedBarrier(barrier_id=int(Barrier.POINTER), num_threads=32 * (MMA_WARP + 1)),
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

        if const_expr(self.broadcast):
            if warp == FEED_WARP:
                self.feed.serve()
        if warp == LOAD_WARP:
            self.load(copied, atoms, tensors, pointers, shared, operands.make_producer(), rank)
        if warp <= MMA_WARP:
            memory.allocate(TENSOR_MEMORY)
            memory.wait_for_alloc()
            pointer = memory.retrieve_ptr(Float32)
            shape = mma.partition_shape_C(self.c.tile[:2])
            acc = cute.make_tensor(pointer, mma.make_fragment_C(cute.append(shape, self.accumulators)).layout)
            if warp == MMA_WARP:
                if place[0] == 0:
                    self.multiply(mma, acc, shared, operands.make_consumer(), accumulated.make_producer())
            else:
                self.finish(acc, accumulated.make_consumer(), thread)
                memory.relinquish_alloc_permit()
                memory.free(pointer)  # the epilogue's barriers come after all have read the last part
        if const_expr(self.c.cluster[0] * self.c.cluster[1] > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    name(kernel, "cudnn_gemm_sm100")

    @cute.jit
    def load(
        self,
        operands: cutlass.Constexpr[list],
        atoms: list,
        tensors: list,
        pointers: list,
        shared: list,
        ring: Any,
        rank: Int32,
    ) -> None:
        """One warp: fills the ring with the operands of all tiles."""
        c = self.c
        several = const_expr(c.cluster[0] * c.cluster[1] > 1)
        bm, bn, _ = cute.arch.block_idx()
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            columns = (work.column * c.cluster[1] + bn) * c.tile[1]
            start, mine = (work.row + bm // self.pair * c.tile[0], columns), (work.row + bm * ROWS, columns)
            last = self.tiles.last(work.group)
            last = [address(x, last[operand.side]) for x, operand in zip(pointers, operands, strict=True)]
            for k in cutlass.range(work.k_tiles(c.tile[2]), unroll=1):
                free = ring.acquire_and_advance()
                place = Place(work, start, mine, self.feed.extent(), work.k + k * c.tile[2])
                for i in cutlass.range_constexpr(len(atoms)):
                    tile = operands[i].tile(tensors[i], place, last[i])
                    target, source, mask = operands[i].partition(atoms[i], tile, shared[i], rank)
                    cute.copy(
                        atoms[i],
                        source,
                        target[None, free.index],
                        tma_bar_ptr=free.barrier,
                        mcast_mask=mask if several else None,
                    )
            cursor = self.feed.next(cursor)
        ring.tail()

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        shared: list,
        ring: Any,
        accumulators: Any,
    ) -> None:
        """One warp, of a pair's first CTA: the products of all tiles, one accumulator after the other."""
        c = self.c
        tCrA, tCrB = mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1])
        factors, copies = self.factors(mma, acc, shared)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            free = accumulators.acquire_and_advance()
            target = acc[None, None, None, free.index]
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for _ in cutlass.range(work.k_tiles(c.tile[2]), unroll=1):
                full = ring.wait_and_advance()
                for i in cutlass.range_constexpr(len(copies)):
                    copy, source, place = copies[i]
                    cute.copy(copy, source[None, None, None, None, full.index], place)
                for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    if const_expr(c.a.scale is not None):
                        mma.set(tcgen05.Field.SFA, factors[0][None, None, block].iterator)
                        mma.set(tcgen05.Field.SFB, factors[1][None, None, block].iterator)
                    which = (None, None, block, full.index)
                    cute.gemm(mma, target, tCrA[which], tCrB[which], target)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                full.release()
            free.commit()
            cursor = self.feed.next(cursor)
        accumulators.tail()

    def factors(self, mma: cute.TiledMma, acc: cute.Tensor, shared: list) -> tuple[list[cute.Tensor], list[Any]]:
        """The factors' place in tensor memory, behind the accumulators, and the copies that bring them there."""
        c = self.c
        if c.a.scale is None:
            return [], []
        element, vector = DTYPES[c.a.scale.dtype], c.a.scale.vector
        places, copies = [], []
        pointer = acc.iterator + self.accumulators * c.tile[1]
        makers = (blockscaled.make_tmem_layout_sfa, blockscaled.make_tmem_layout_sfb)
        for make, source in zip(makers, shared[2:], strict=True):
            one = cute.slice_(source.layout, (None, None, None, 0))
            place = cute.make_tensor(cute.recast_ptr(pointer, dtype=element), make(mma, c.tile, vector, one))
            pointer = pointer + tcgen05.find_tmem_tensor_col_offset(place)
            compact = cute.filter_zeros(place)
            copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.group), element), compact)
            mine = copy.get_slice(0)
            descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(cute.filter_zeros(source)))
            places.append(place)
            copies.append((copy, descriptors, mine.partition_D(compact)))
        return places, copies

    @cute.jit
    def finish(self, acc: cute.Tensor, accumulators: Any, thread: Int32) -> None:
        """Four warps: the epilogue of all tiles, part by part."""
        c, plan = self.c, self.epilogue.plan
        bm, bn, _ = cute.arch.block_idx()
        width = const_expr(plan.width // plan.pieces)
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), Float32)
        pieces = cute.zipped_divide(acc, ((ROWS, width),))  # ((rows, columns), (piece, 1, 1, accumulator))
        copy = tcgen05.make_tmem_copy(atom, pieces[None, (0, 0, 0, 0)])
        source = copy.get_slice(thread).partition_S(pieces)
        count = Int32(0)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            tile = Tile(
                row=work.row + bm * ROWS,
                start=work.start,
                end=work.end,
                column=work.column * c.cluster[1] + bn,
                n=self.feed.extent().n,
                batch=self.tiles.last(work.group)[2],
                expert=work.group,
                count=count,
                thread=thread,
                group=Int32(0),
                barrier=lambda: barriers.wait(Barrier.GROUP, ROWS),
            )
            self.epilogue.begin(tile)
            full = accumulators.wait_and_advance()
            for part in cutlass.range_constexpr(plan.parts):
                values = plan.fragment(Float32, plan.width)
                if const_expr(self.tiles.clips_k):
                    values.fill(0.0)  # without products, nobody wrote to the accumulator
                    if work.k < work.k_end:
                        self.take(copy, source, part, full.index, values)
                else:
                    self.take(copy, source, part, full.index, values)
                if const_expr(part == plan.parts - 1):
                    full.release()
                fragment = Fragment(values, plan.width, plan.layout)
                self.epilogue.clear(tile, plan.piece(part) * width, fragment)
                self.epilogue.run(tile, part, fragment)
            self.epilogue.end(tile)
            count += 1
            cursor = self.feed.next(cursor)
        self.epilogue.drain(thread)

    def take(self, copy: Any, source: cute.Tensor, part: int, accumulator: Int32, values: cute.Tensor) -> None:
        """A part of the accumulator, from tensor memory."""
        plan = self.epilogue.plan
        count = cute.size(values) // plan.pieces
        for which in range(plan.pieces):
            flat = cute.make_tensor(values.iterator + which * count, cute.make_layout(((count, 1), 1)))
            cute.copy(copy, source[None, None, ((0, plan.piece(part, which)), 0, 0, accumulator)], flat)
        cute.arch.fence_view_async_tmem_load()
