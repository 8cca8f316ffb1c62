"""The GEMM mainloop of Blackwell: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

A CTA has six warps. One lets the copy engine fill a ring of buffers in shared memory with tiles of A and B, one issues
tcgen05.mma, whose accumulator is in tensor memory, and four take the accumulator out and run the epilogue. There is
room for two accumulators, so that the next tile's products run during the epilogue. With a tile of 256 rows, two CTAs
work on it as a pair: each has half of the rows, and half of B, in its shared memory, the first one issues for both.

Where operands have factors of sums, each k tile has an accumulator of its own: the four warps take it out, multiply it
by the factors, which one more warp brings to shared memory, and add it up in registers. The row of sums goes back to
tensor memory, where the epilogue takes its parts as those of any accumulator: beside a row it would lack registers.

Operands whose rows have numbers are brought by two more warps, those of a pair's CTAs each for its own shared memory.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.pipeline import (
    Agent,
    CooperativeGroup,
    NamedBarrier,
    PipelineTmaUmma,
    PipelineUmmaAsync,
)

from cudnn_kernels.configuration import GemmConfiguration as Configuration
from cudnn_kernels.epilogue import BLOCK
from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.fragment import Fragment
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.barriers import BlackwellGemm as Barrier
from cudnn_kernels.pipeline.barriers import arrive_once
from cudnn_kernels.pipeline.copy import address
from cudnn_kernels.pipeline.factors import Factors
from cudnn_kernels.pipeline.gather import WARPS as GATHER_WARPS
from cudnn_kernels.pipeline.gather import Gather, Lines
from cudnn_kernels.pipeline.mainloop import Mainloop
from cudnn_kernels.pipeline.operand import prepare
from cudnn_kernels.pipeline.projection import ViewedProjection
from cudnn_kernels.pipeline.ring import Ring
from cudnn_kernels.schedule.feed import Feed
from cudnn_kernels.sm100.operands import ROWS, Place, TileOperand, tile_operands
from cudnn_kernels.sm100.tensor_memory import COLUMNS, TensorMemoryRows

MMA_WARP, LOAD_WARP, FEED_WARP = 4, 5, 6
SUMS = 3  # accumulators, where each k tile has one; one more is for what they add up to
CHUNK = 32  # columns of sums that are added up at a time


class Gemm(Mainloop):
    """The kernel for one :class:`Configuration`."""

    splits_sums, group_barrier, overhead = False, Barrier.GROUP, 2048

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration, ROWS)
        c = configuration
        if c.schedule.sideways:
            raise ValueError(f"{c.schedule}: got sideways; allowed: clusters whose tiles lie as they do, on Blackwell")
        self.pair = c.tile[0] // ROWS  # CTAs that share a tile
        self.group = tcgen05.CtaGroup.TWO if self.pair == 2 else tcgen05.CtaGroup.ONE
        most = SUMS if self.sides else 2
        self.accumulators = min(most, (COLUMNS - self.factor_columns()) // c.tile[1])
        self.apart = c.block if c.halves and c.block > BLOCK else 0  # columns from one half's to the other's
        self.factor_warp = FEED_WARP + c.schedule.searches
        self.gather_warp = self.factor_warp + bool(self.sides)
        self.threads = 32 * (self.gather_warp + (GATHER_WARPS if c.gathers else 0))
        self.epilogue = self.epilogue_of(
            rows=ROWS,
            groups=1,
            threads=ROWS,
            layout=TensorMemoryRows(),
            tiled_copy=lambda atom, width: cute.make_tiled_copy_tv(
                atom, cute.make_layout((ROWS, 1)), cute.make_layout((1, width))
            ),
            fragment=lambda dtype, width: cute.make_rmem_tensor(((1, width), 1, 1), dtype),
        )

    def launch(self, given: Mapping[str, Any]) -> None:
        super().launch(prepare(self.c, given) if self.c.prepared else given)

    def described(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        c, views = self.c, dict(arguments)
        mma, whole = self.tiled_mma(), self.tiled_mma(tcgen05.CtaGroup.ONE)
        operands = tile_operands(c, mma, whole, self.tiles.clips_k)
        for operand in operands:
            views[operand.name] = operand.viewed(views)
        copied = [operand for operand in operands if operand.name not in c.gathers]
        made = [operand.descriptor(views[operand.name]) for operand in copied]
        pointers = [arguments.get(f"{operand.name}_ptrs") for operand in copied]
        return mma, whole, [atom for atom, _ in made], [tensor for _, tensor in made], pointers

    def tiled_mma(self, group: Any = None) -> cute.TiledMma:
        """The product of a tile with one instruction's depth of k; of a CTA's part, by a group of one."""
        c = self.c
        a, b = DTYPES[c.a.dtype], DTYPES[c.b.dtype]
        majors = [OperandMajorMode.K if x.major == "k" else OperandMajorMode.MN for x in (c.a, c.b)]
        rows = c.tile[0] if group is None else ROWS
        group = group or self.group
        if c.tensor_core_scale:
            scale, vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
            return sm100.make_blockscaled_trivial_tiled_mma(a, b, *majors, scale, vector, group, (rows, c.tile[1]))
        return sm100.make_trivial_tiled_mma(a, b, *majors, Float32, group, (rows, c.tile[1]))

    def stage_bytes(self, without: Sequence[str] = ()) -> int:
        """Bytes of the operands' tiles in one CTA, but for those ``without``."""
        return sum(x.bits() for x in tile_operands(self.c, None, None) if x.name not in without) // 8

    def factor_columns(self) -> int:
        """Columns of tensor memory for a k tile's factors: 128 rows of four bytes each fill four."""
        c, scale = self.c, self.c.tensor_core_scale
        return (1 + -(-c.tile[1] // ROWS)) * c.tile[2] // scale.vector if scale else 0

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        whole: cute.TiledMma,
        atoms: list,
        tensors: list,
        pointers: list,
        gathered: Any,
        factors: Any,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """The roles of the warps."""
        stages = const_expr(self.stages())
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        every = tile_operands(self.c, mma, whole, self.tiles.clips_k)
        cluster = every[0].cluster()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        place = cluster.get_flat_coord(rank)

        smem = SmemAllocator()
        shared = [operand.allocate(smem, stages) for operand in every]
        self.epilogue.enter(parameters, smem)
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
        acc_barriers = smem.allocate_array(cutlass.Int64, 2 * self.accumulators)
        free_barrier = smem.allocate_array(cutlass.Int64, 1)
        holder = smem.allocate_array(Int32, 1)
        readers = 1 + ROWS // 32 + (place[0] == 0)  # warps of this CTA that load, finish and, first of a pair, multiply
        gatherers = const_expr(GATHER_WARPS if self.c.gathers else 0)
        self.feed = Feed(self.tiles, scheduled, readers + bool(self.sides) + gatherers, smem)
        if const_expr(self.sides):
            self.factor_ring = Factors(self.sides, factors, self.feed, 1, ROWS // 32, smem)
        if thread == 0:
            self.ready(atoms)
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
            producer_group=CooperativeGroup(Agent.Thread, 1 + gatherers * self.pair),
            consumer_group=CooperativeGroup(Agent.Thread, sharers),
            tx_count=self.stage_bytes(self.c.gathers) * self.pair,
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

        if const_expr(self.feed.broadcast):
            if warp == FEED_WARP:
                self.feed.serve()
        if const_expr(self.sides):
            if warp == self.factor_warp:
                self.factor_ring.serve(self.begins, self.c.tile[2], (0, 1))
        if const_expr(gatherers):
            self.gathers = self.gather(gathered, every, shared, Ring(barriers, barriers + stages, stages), rank, smem)
            if warp >= self.gather_warp:
                self.gathers.serve(warp - self.gather_warp, self.own)
        copied = [(x, buffers) for x, buffers in zip(every, shared, strict=True) if x.name not in self.c.gathers]
        kinds, buffers = [x for x, _ in copied], [buffers for _, buffers in copied]
        if warp == LOAD_WARP:
            self.load(kinds, atoms, tensors, pointers, buffers, operands.make_producer(), rank)
        if warp <= MMA_WARP:
            memory.allocate(COLUMNS)
            memory.wait_for_alloc()
            pointer = memory.retrieve_ptr(Float32)
            shape = mma.partition_shape_C(self.c.tile[:2])
            count = self.accumulators + bool(self.sides)
            acc = cute.make_tensor(pointer, mma.make_fragment_C(cute.append(shape, count)).layout)
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

    def own(self, work: Any) -> tuple[Int32, Int32]:
        """The first row and column of what this CTA of a pair has in its shared memory."""
        bm, _, _ = cute.arch.block_idx()
        row, column = self.begins(work)
        return row, column + bm % self.pair * (self.c.tile[1] // self.pair)

    def gather(
        self,
        gathered: Any,
        operands: Sequence[TileOperand],
        rings: Sequence[Any],
        ring: Ring,
        rank: Int32,
        smem: Any,
    ) -> Gather:
        """What brings operands whose lines have numbers; it tells the pair's first CTA, which multiplies."""
        c, leader = self.c, rank - rank % self.pair
        mine = {"a": (ROWS, c.tile[2]), "b": (c.tile[1] // self.pair, c.tile[2])}
        chosen = [(x, shared) for x, shared in zip(operands, rings, strict=True) if x.name in c.gathers]
        lines = [
            Lines(x.side, self.tiles.clips_k, *given, shared, mine[x.name], x.place, smem)
            for (x, shared), given in zip(chosen, gathered, strict=True)
        ]
        return Gather(tuple(lines), ring, self.feed, c.tile[2], lambda barrier: arrive_once(barrier, leader))

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
    def multiply(self, mma: cute.TiledMma, acc: cute.Tensor, shared: list, ring: Any, accumulators: Any) -> None:
        """One warp, of a pair's first CTA: the products of all tiles, one accumulator after the other."""
        c = self.c
        tCrA, tCrB = mma.make_fragment_A(shared[0]), mma.make_fragment_B(shared[1])
        factors, copies = self.factors(mma, acc, shared)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            k_tiles = work.k_tiles(c.tile[2])
            turns, depth = (k_tiles, 1) if const_expr(self.sides) else (1, k_tiles)  # accumulators, k tiles of each
            for _ in cutlass.range(turns, unroll=1):
                free = accumulators.acquire_and_advance()
                target = acc[None, None, None, free.index]
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(depth, unroll=1):
                    full = ring.wait_and_advance()
                    for i in cutlass.range_constexpr(len(copies)):
                        copy, source, place = copies[i]
                        cute.copy(copy, source[None, None, None, None, full.index], place)
                    for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                        if const_expr(c.tensor_core_scale is not None):
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
        if c.tensor_core_scale is None:
            return [], []
        element, vector = DTYPES[c.tensor_core_scale.dtype], c.tensor_core_scale.vector
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
        c, plan, place = self.c, self.epilogue.plan, cute.arch.block_idx()
        copy, source = self.pieces(acc, tcgen05.Ld32x32bOp, self.taken(), thread)
        if const_expr(self.sides):
            sum_copy, sum_source = self.pieces(acc, tcgen05.Ld32x32bOp, CHUNK, thread)
            sum_back, sum_target = self.pieces(acc, tcgen05.St32x32bOp, CHUNK, thread)
        count, position = Int32(0), Int32(0)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            tile = self.tile(work, place, 0, count, thread, 0)
            self.epilogue.begin(tile)
            if const_expr(self.sides):
                sums = plan.fragment(Float32, c.tile[1])
                sums.fill(0.0)
                for k in cutlass.range(work.k_tiles(c.tile[2]), unroll=1):
                    self.factor_ring.wait(position + k)
                    factors = self.sum_factors(position + k, thread)
                    ready = accumulators.wait_and_advance()
                    for chunk in cutlass.range_constexpr(c.tile[1] // CHUNK):
                        taken = plan.fragment(Float32, CHUNK)
                        self.take(sum_copy, sum_source, [chunk], ready.index, taken)
                        if const_expr(chunk == c.tile[1] // CHUNK - 1):
                            ready.release()
                        for i in cutlass.range_constexpr(CHUNK):
                            column = const_expr(chunk * CHUNK + i)
                            sums[column] = fma(taken[i], factors(column), sums[column])
                    self.factor_ring.release(position + k)
                position += work.k_tiles(c.tile[2])
                for chunk in cutlass.range_constexpr(c.tile[1] // CHUNK):
                    first = cute.make_tensor(sums.iterator + chunk * CHUNK, cute.make_layout(((CHUNK, 1), 1)))
                    cute.copy(sum_back, first, sum_target[None, None, ((0, chunk), 0, 0, self.accumulators)])
                cute.arch.fence_view_async_tmem_store()
            else:
                full = accumulators.wait_and_advance()
            steps = self.epilogue.steps()
            for step in cutlass.range_constexpr(len(steps)):
                part, act = steps[step]
                values = plan.fragment(Float32, plan.width)
                if const_expr(self.sides):
                    self.take(copy, source, self.places(part), self.accumulators, values)
                elif const_expr(self.tiles.clips_k):
                    values.fill(0.0)  # without products, nobody wrote to the accumulator
                    if work.k < work.k_end:
                        self.take(copy, source, self.places(part), full.index, values)
                else:
                    self.take(copy, source, self.places(part), full.index, values)
                if const_expr(step == len(steps) - 1 and not self.sides):
                    full.release()
                fragment = Fragment(values, plan.width, plan.layout)
                self.epilogue.clear(tile, plan.piece(part) * plan.width // plan.pieces, fragment)
                act(tile, part, fragment)
            self.epilogue.end(tile)
            count += 1
            cursor = self.feed.next(cursor)
        self.epilogue.drain(thread)

    def pieces(self, acc: cute.Tensor, operation: Any, width: int, thread: Int32) -> tuple[Any, cute.Tensor]:
        """The copy of so many columns of a thread's row from or to tensor memory, and all accumulators so."""
        atom = cute.make_copy_atom(operation(tcgen05.Repetition(width)), Float32)
        pieces = cute.zipped_divide(acc, ((ROWS, width),))  # ((rows, columns), (piece, 1, 1, accumulator))
        copy = tcgen05.make_tmem_copy(atom, pieces[None, (0, 0, 0, 0)])
        mine = copy.get_slice(thread)
        return copy, mine.partition_S(pieces) if operation is tcgen05.Ld32x32bOp else mine.partition_D(pieces)

    def taken(self) -> int:
        """Columns that are taken from tensor memory at once: a power of two."""
        width = self.epilogue.plan.width // self.epilogue.plan.pieces
        return BLOCK if self.apart else width & -width

    def places(self, part: int) -> list[int]:
        """The pieces of a part, by number in the accumulator: blocks of its halves, where these are the tile's."""
        plan = self.epilogue.plan
        if not self.apart:
            each = plan.width // plan.pieces // self.taken()
            return [plan.piece(part, which) * each + i for which in range(plan.pieces) for i in range(each)]
        pairs = plan.width // (2 * BLOCK)
        return [x for i in range(part * pairs, (part + 1) * pairs) for x in (i, i + self.apart // BLOCK)]

    def take(self, copy: Any, source: cute.Tensor, places: list[int], accumulator: Any, values: cute.Tensor) -> None:
        """Pieces of an accumulator, from tensor memory."""
        count = cute.size(values) // len(places)
        for i, place in enumerate(places):
            flat = cute.make_tensor(values.iterator + i * count, cute.make_layout(((count, 1), 1)))
            cute.copy(copy, source[None, None, ((0, place), 0, 0, accumulator)], flat)
        cute.arch.fence_view_async_tmem_load()

    def sum_factors(self, position: Int32, thread: Int32) -> Any:
        """What a row's sums of a k tile are multiplied by: a function of the column."""
        granule = self.sides[1].granule
        row = self.factor_ring.row(position, thread)
        if granule == 1:  # too many to be kept
            return lambda column: row * self.factor_ring.column(position, column)
        products = [row * self.factor_ring.column(position, start) for start in range(0, self.c.tile[1], granule)]
        return lambda column: products[column // granule]


class Projection(ViewedProjection):
    """The projection of queries, around this GEMM."""

    gemm = Gemm
