"""The GEMM mainloop of Hopper: D[m, n, l] = epilogue(sum over k of A[m, k, l] B[n, k, l]).

A CTA has three warpgroups. One thread of the first lets the copy engine fill a ring of buffers in shared memory with
tiles of A and B; CTAs of a cluster that need the same tile fetch a share each and send it to all. The other two
warpgroups multiply with wgmma, accumulate in registers and run the epilogue. CTAs stay on their SM and take every
n-th tile of the schedule, of n clusters, so that the next tile's operands arrive during the epilogue.

Cooperative: both warpgroups share a tile, each has half of its rows. Ping-pong: each has tiles of its own; they take
turns in multiplying, so that one's epilogue is hidden behind the other's products.

e4m3 and e5m2 products are accumulated by the tensor cores with fewer bits than float32 has, so each ``k`` tile's sum
is added to float32 registers. Where operands have factors of sums, it is multiplied by them then, which further warps
of the first warpgroup bring to shared memory. The same warps start the copies of lines by number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cudnn_kernels.configuration import GemmConfiguration as Configuration
from cudnn_kernels.epilogue import MultiplyGroup, Scale, needs_of
from cudnn_kernels.epilogue.arithmetic import fma
from cudnn_kernels.epilogue.fragment import Fragment
from cudnn_kernels.epilogue.operation import Tile
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline import barriers
from cudnn_kernels.pipeline.barriers import HopperGemm as Barrier
from cudnn_kernels.pipeline.cluster import Cluster, meet, release
from cudnn_kernels.pipeline.copy import address
from cudnn_kernels.pipeline.factors import Factors
from cudnn_kernels.pipeline.gather import WARPS as GATHER_WARPS
from cudnn_kernels.pipeline.gather import Boxes, Gather, Lines, boxes_of
from cudnn_kernels.pipeline.mainloop import Mainloop
from cudnn_kernels.pipeline.operand import prepare
from cudnn_kernels.pipeline.projection import ViewedProjection
from cudnn_kernels.pipeline.ring import Ring, advanced, expect, initialise
from cudnn_kernels.pipeline.wgmma import WgmmaRows, mma_operation
from cudnn_kernels.schedule.feed import Feed
from cudnn_kernels.sm90.heuristics import promotes
from cudnn_kernels.sm90.tile_operand import TileOperand

GROUP = 128  # threads of a warpgroup
WARPS = GROUP // 32
CONSUMERS = 2  # warpgroups that multiply
REGISTERS, COPY_REGISTERS = (24, 240), (40, 232)  # of the first warpgroup and of others, where threads copy more
LOAD_WARP, FEED_WARP, MORE_WARPS = 0, 1, (2, 3)  # of the first warpgroup; the last ones copy factors, or gather
SUMS = 192  # columns of the widest sums beside 64 rows of accumulators, as registers allow


class Gemm(Mainloop):
    """The kernel for one :class:`Configuration`."""

    splits_sums, group_barrier, overhead = True, Barrier.GROUP, 896
    threads = GROUP * (1 + CONSUMERS)

    def __init__(self, configuration: Configuration) -> None:
        c = configuration
        self.tile_m, self.tile_n, self.tile_k = c.tile
        self.cluster = Cluster(*c.cluster)
        super().__init__(c, self.tile_m)
        clips = self.tiles.clips_k
        self.operands = [TileOperand(c, side, clips, alike=side) for side in range(2)]
        self.sideways = [TileOperand(c, side, clips, alike=1 - side) for side in range(2) if c.schedule.sideways]
        self.group_rows = self.tile_m if c.pingpong else self.tile_m // CONSUMERS
        self.lacks_rows = self.tiles.clips_rows and self.tiles.rows > self.group_rows  # whether a warpgroup may
        self.promotes = promotes(c)
        self.together = c.a.scale.vector // self.tile_k if c.scales_sums else 1  # k tiles whose sum is promoted
        self.summed = self.tile_n if self.tile_n <= SUMS else self.tile_n // 2  # columns that are promoted together
        if self.together > 1 and len(self.portions(0)) > 1:  # which have one set of sums in turn
            vector = c.a.scale.vector
            allowed = f"k tiles of {vector}, or 128 rows and {SUMS} columns at most, with such factors of sums"
            raise ValueError(f"tile: got {c.tile}; allowed: {allowed}")
        self.boxes = bool(c.gathers) and not self.tiles.clips_k  # whether the copy engine gathers
        self.threads_copy = bool(c.gathers) and not self.boxes
        self.registers = COPY_REGISTERS if self.sides or self.threads_copy or c.schedule.sideways else REGISTERS
        self.copied = [x for x in self.operands if not x.operand.index]  # by the copy engine
        self.epilogue = self.epilogue_of(
            rows=self.group_rows,
            groups=CONSUMERS,
            threads=GROUP,
            layout=WgmmaRows(slots=2 * (self.group_rows // 64)),
            tiled_copy=lambda atom, width: cute.make_tiled_copy_C(atom, self.tiled_mma(width)),
            fragment=self.fragment,
            early=self.computes_early(),
        )

    def launch(self, given: Mapping[str, Any]) -> None:
        super().launch(prepare(self.c, given) if self.c.prepared else given)

    def described(self, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
        copied = [*self.copied, *self.sideways]
        made = [operand.descriptor(operand.view(arguments[operand.name])) for operand in copied]
        pointers = arguments["b_ptrs"] if self.c.b.pointers else None  # a prepared operand is a tensor
        return [atom for atom, _ in made], [tensor for _, tensor in made], pointers

    def lines(self, tensor: cute.Tensor) -> Any:
        return boxes_of(tensor) if self.boxes else tensor

    def tiled_mma(self, width: int) -> cute.TiledMma:
        """One warpgroup's product with ``width`` columns."""
        a, b = self.operands
        return cute.make_tiled_mma(cute.make_mma_atom(mma_operation(a.element, b.element, width, a.major, b.major)))

    def fragment(self, dtype: Any, width: int, rows: int = 0) -> cute.Tensor:
        """Registers for ``width`` columns of a warpgroup's rows, or of so many, in the accumulator's order."""
        return cute.make_rmem_tensor(self.tiled_mma(width).partition_shape_C((rows or self.group_rows, width)), dtype)

    def computes_early(self) -> bool:
        """Whether parts of a tile are computed while others are stored: where both warpgroups share the tile, so that
        nothing else hides the stores, registers suffice, and there is a factor, see ``Scale``.
        """
        needs, scaled = needs_of(self.c.epilogue), any(isinstance(o, (Scale, MultiplyGroup)) for o in self.c.epilogue)
        return scaled and not (self.c.pingpong or self.promotes or needs.registers or needs.width > 1)

    def stage_bytes(self) -> int:
        return sum(operand.bits() for operand in self.operands) // 8

    @cute.kernel
    def kernel(
        self,
        atoms: list,
        tensors: list,
        pointers: cute.Tensor | None,
        gathered: Any,
        factors: Any,
        scheduled: Any,
        parameters: Any,
    ) -> None:
        """The roles of the warpgroups."""
        stages = self.stages()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)

        smem = SmemAllocator()
        self.buffers = [operand.allocate(smem, stages) for operand in self.operands]
        self.epilogue.enter(parameters, smem)
        ring = self.ring = Ring.allocate(smem, stages)
        gatherers = const_expr(GATHER_WARPS if self.c.gathers else 0)
        readers = 1 + max(len(self.sides), gatherers) + CONSUMERS * WARPS
        counter = scheduled[-1] if self.c.draws else None
        self.feed = Feed(self.tiles, scheduled, readers, smem, self.c.pingpong, counter, self.cluster)
        if const_expr(self.sides):
            self.factor_ring = Factors(self.sides, factors, self.feed, len(self.sides), CONSUMERS * WARPS, smem)
        if thread == 0:
            fillers = const_expr(1 + GATHER_WARPS * 32 * self.threads_copy)
            initialise(ring, fillers, self.cluster.sharers * WARPS * (1 if self.c.pingpong else CONSUMERS))
            self.ready(atoms)
        cute.arch.mbarrier_init_fence()
        meet(self.cluster)

        if const_expr(gatherers):
            self.gathers = self.gather(gathered, smem)
        if group == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == LOAD_WARP:
                self.produce(atoms, tensors, pointers)
            if const_expr(self.feed.broadcast):
                if warp == FEED_WARP:
                    self.feed.serve()
            if const_expr(len(self.sides) > gatherers):
                for side in cutlass.range_constexpr(len(self.sides)):
                    if warp == MORE_WARPS[side]:
                        self.factor_ring.serve(self.begins, self.tile_k, (side,))
            if const_expr(gatherers):
                if warp >= MORE_WARPS[0]:
                    self.gathers.serve(warp - MORE_WARPS[0], self.begins)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(group - 1, thread % GROUP)
        if const_expr(self.cluster.size > 1):
            meet(self.cluster)  # a CTA's shared memory lives until no other one writes or signals there

    name(kernel, "cudnn_gemm_sm90")

    @cute.jit
    def produce(self, atoms: list, tensors: list, pointers: cute.Tensor | None) -> None:
        """One warp: fills the ring with the operands of all tiles of this CTA that the copy engine brings."""
        ring, sharers = self.ring, [self.cluster.sharing(side) for side in range(2)]
        counted = const_expr(self.operands if self.boxes else self.copied)  # whose bytes a buffer's barrier awaits
        stage, phase = Int32(0), Int32(1)
        cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            last_a, last_b, _ = self.tiles.last(work.group)
            last, starts = (last_a, address(pointers, last_b)), self.begins(work)
            for k in cutlass.range(work.k_tiles(self.tile_k), unroll=1):
                expect(ring, stage, phase, sum(x.bits() for x in counted) // 8)
                full = ring.full + stage
                first = work.k + k * self.tile_k
                place = (starts, first, work.k_end, last)
                if const_expr(self.sideways):
                    if work.valid == 2:
                        self.fetch(self.sideways, atoms[2:], tensors[2:], place, sharers, stage, full)
                    else:
                        self.fetch(self.copied, atoms[:2], tensors[:2], place, sharers, stage, full)
                else:
                    self.fetch(self.copied, atoms, tensors, place, sharers, stage, full)
                stage, phase = advanced(ring, stage, phase)
            cursor = self.feed.next(cursor)

    def fetch(
        self,
        operands: Sequence[TileOperand],
        atoms: list,
        tensors: list,
        place: tuple[Any, ...],
        sharers: list,
        stage: Int32,
        full: Any,
    ) -> None:
        """Starts the copies of the operands' k tile at a place: first row and column, k, its end, last indices."""
        starts, first, end, last = place
        for operand, atom, tensor in zip(operands, atoms, tensors, strict=True):
            side = operand.side
            tile = operand.part(tensor, starts[side], first, end, last[side])
            operand.fetch(atom, tile, self.buffers[side], stage, full, sharers[operand.alike])

    def gather(self, gathered: Any, smem: Any) -> Gather:
        """What brings the other operands: tensors and numbers."""
        lines: list[Lines] = []
        for operand, given in zip([x for x in self.operands if x not in self.copied], gathered, strict=True):
            shape, ours = (self.c.tile[operand.side], self.tile_k), self.buffers[operand.side]
            if self.boxes:
                share = (operand.share, *self.cluster.sharing(operand.side))
                lines.append(Boxes(*given, ours, shape, operand.place, smem, self.ring, share))
            else:
                lines.append(Lines(operand.side, True, *given, ours, shape, operand.place, smem))
        factors = self.factor_ring if self.sides else None
        return Gather(tuple(lines), self.ring, self.feed, self.tile_k, None, factors)

    @cute.jit
    def consume(self, group: Int32, thread: Int32) -> None:
        """A warpgroup: multiplies, then runs the epilogue, for each of its tiles."""
        c, (sA, sB), place = self.c, self.buffers, self.cluster.place()
        mma = self.tiled_mma(self.tile_n)
        part = mma.get_slice(thread)
        share = const_expr(0) if const_expr(c.pingpong) else group
        sA_group = cute.local_tile(sA, (self.group_rows, self.tile_k), (share, 0, None))
        tCrA = mma.make_fragment_A(part.partition_A(sA_group))
        tCrB = mma.make_fragment_B(part.partition_B(sB))
        acc = self.fragment(Float32, self.tile_n)
        count, position = Int32(0), Int32(0)  # in the ring, of the next tile's operands
        if const_expr(c.pingpong):
            cursor, first = self.feed.in_turn(group)
            position = group * first.k_tiles(self.tile_k)
            if group == 1 and first.valid != 0:
                barriers.arrive(Barrier.TURN, CONSUMERS * GROUP)
        else:
            cursor = self.feed.first()
        while self.feed.more(cursor):
            work = self.feed.work(cursor)
            tile = self.tile(work, place, share, count, thread, group)
            k_tiles = work.k_tiles(self.tile_k)
            self.epilogue.begin(tile)
            if const_expr(c.pingpong):
                cursor = self.feed.next(cursor)  # the other warpgroup's
                self.take_turn(group)
            has_rows = cutlass.Boolean(True)
            if const_expr(self.lacks_rows):
                has_rows = cute.arch.make_warp_uniform(tile.row) < work.end
            self.products(mma, acc, tCrA, tCrB, position, k_tiles, share, thread, group, cursor, has_rows)
            position += k_tiles
            if const_expr(c.pingpong):
                if self.feed.more(cursor):
                    position += self.feed.work(cursor).k_tiles(self.tile_k)
            self.finish(acc, tile)
            count += 1
            cursor = self.feed.next(cursor)
        self.epilogue.drain(thread)

    @cute.jit
    def products(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        position: Int32,
        k_tiles: Int32,
        share: Any,
        thread: Int32,
        group: Int32,
        cursor: Any,
        has_rows: cutlass.Boolean,
    ) -> None:
        """The products of a tile, if the warpgroup has rows of it, and the turn of the other warpgroup."""
        if const_expr(self.promotes):
            if has_rows:
                self.promote(acc, position, k_tiles, share, thread)
            else:
                self.pass_over(position, k_tiles)
            self.give_turn(group, cursor)
        else:
            count = k_tiles
            if const_expr(self.lacks_rows):  # with a branch, ptxas had each product wait for the one before
                count = Int32(select_(has_rows, k_tiles, 0))
            self.multiply(mma, acc, tCrA, tCrB, position, count)
            if const_expr(self.lacks_rows):
                self.pass_over(position + count, k_tiles - count)
            self.give_turn(group, cursor)
            self.settle(position, count)

    @cute.jit
    def take_turn(self, group: Int32) -> None:
        """Waits until the other warpgroup has issued its products."""
        barriers.wait(Barrier.TURN + group, CONSUMERS * GROUP)

    @cute.jit
    def give_turn(self, group: Int32, cursor: Any) -> None:
        """Lets the other warpgroup multiply, if it has a tile, at the cursor: the tensor cores still have the last
        products of this one before them.
        """
        if const_expr(self.c.pingpong):
            if self.feed.more(cursor):
                barriers.arrive(Barrier.TURN + 1 - group, CONSUMERS * GROUP)

    @cute.jit
    def multiply(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        tCrA: cute.Tensor,
        tCrB: cute.Tensor,
        position: Int32,
        k_tiles: Int32,
    ) -> None:
        """Issues the products of a tile. One k tile's are in flight while the next one's are issued, and at the end."""
        ring = self.ring
        stage, phase = position % ring.stages, position // ring.stages % 2
        last = stage
        if const_expr(self.tiles.clips_k):
            if k_tiles == 0:
                acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            if const_expr(self.threads_copy):
                cute.arch.fence_proxy("async.shared", space="cta")  # copied by threads, read by the tensor cores
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, acc, tCrA[None, None, block, stage], tCrB[None, None, block, stage], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            if k > 0:
                release(self.cluster, ring.empty + last)
            last = stage
            stage, phase = advanced(ring, stage, phase)

    @cute.jit
    def settle(self, position: Int32, k_tiles: Int32) -> None:
        """Waits for the products of a tile's last k tile, and releases its operands."""
        warpgroup.wait_group(0)
        if const_expr(self.tiles.clips_k or self.lacks_rows):
            if k_tiles > 0:
                release(self.cluster, self.ring.empty + (position + k_tiles - 1) % self.ring.stages)
        else:
            release(self.cluster, self.ring.empty + (position + k_tiles - 1) % self.ring.stages)

    @cute.jit
    def pass_over(self, position: Int32, k_tiles: Int32) -> None:
        """Releases the operands of a tile of which this warpgroup has no rows: the other one multiplies faster then."""
        ring = self.ring
        stage, phase = position % ring.stages, position // ring.stages % 2
        for k in cutlass.range(k_tiles, unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage, phase)
            release(self.cluster, ring.empty + stage)
            if const_expr(self.sides):
                self.factor_ring.wait(position + k)
                self.factor_ring.release(position + k)
            stage, phase = advanced(ring, stage, phase)

    @cute.jit
    def promote(self, acc: cute.Tensor, position: Int32, k_tiles: Int32, share: Any, thread: Int32) -> None:
        """The products of a tile, in portions; every ``together`` k tiles, their sum is added to float32 registers.

        Meanwhile the other warpgroup multiplies.
        """
        ring, mma = self.ring, self.tiled_mma(self.summed)
        part = mma.get_slice(thread)
        portions = self.portions(share)
        operands = [self.portion_operands(mma, part, portion) for portion in portions]
        sums = self.fragment(Float32, self.summed, 64)
        stage, phase = position % ring.stages, position // ring.stages % 2
        begun = const_expr(self.together == 1 and not self.tiles.clips_k)  # else there may be no k tile
        if const_expr(begun):
            first = (Int32(0), k_tiles, stage, phase, True)
            self.promote_k_tile(mma, acc, sums, portions, operands, position, thread, first)
            stage, phase = advanced(ring, stage, phase)
        else:
            acc.fill(0.0)
        for k in cutlass.range(int(begun), k_tiles, unroll=1):
            now = (k, k_tiles, stage, phase, False)
            self.promote_k_tile(mma, acc, sums, portions, operands, position, thread, now)
            stage, phase = advanced(ring, stage, phase)

    def promote_k_tile(
        self,
        mma: cute.TiledMma,
        acc: cute.Tensor,
        sums: cute.Tensor,
        portions: Sequence[tuple[Any, int]],
        operands: Sequence[tuple[Any, Any]],
        position: Int32,
        thread: Int32,
        now: tuple[Any, ...],
    ) -> None:
        """The products of a k tile: its number, that of all, its buffer and phase, and whether it is the first one."""
        together, ring, (k, k_tiles, stage, phase, first) = self.together, self.ring, now
        cute.arch.mbarrier_wait(ring.full + stage, phase)
        for i, (tCrA, tCrB) in enumerate(operands):
            mma.set(warpgroup.Field.ACCUMULATE, k % together != 0)
            warpgroup.fence()
            for block in range(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, sums, tCrA[None, None, block, stage], tCrB[None, None, block, stage], sums)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if i == 0:
                factors = self.portion_factors(portions, position + k, thread)
            warpgroup.wait_group(0)
            if i == len(portions) - 1:
                release(self.cluster, ring.empty + stage)
            if together == 1:
                self.add(i, acc, sums, factors[i], first)
            else:
                self.add_at_last(i, acc, sums, factors[i], k, k_tiles)
        if self.sides:
            self.factor_ring.release(position + k)

    @cute.jit
    def add_at_last(
        self,
        i: cutlass.Constexpr[int],
        acc: cute.Tensor,
        sums: cute.Tensor,
        factors: cutlass.Constexpr[Any],
        k: Int32,
        k_tiles: Int32,
    ) -> None:
        """The same once the k tiles that are promoted together have been multiplied."""
        if k % self.together == self.together - 1 or k == k_tiles - 1:
            self.add(i, acc, sums, factors)

    def portions(self, share: Any) -> list[tuple[Any, int]]:
        """Of a warpgroup's share of a tile, in the accumulators' order: 64 rows and columns, by number in the CTA."""
        rows = self.group_rows // 64
        return [(share * rows + row, column) for row in range(rows) for column in range(self.tile_n // self.summed)]

    def portion_operands(self, mma: Any, part: Any, portion: tuple[Any, int]) -> tuple[Any, Any]:
        """A's rows and B's columns of a portion, in shared memory."""
        sizes = zip(self.buffers, (64, self.summed), portion, strict=True)
        a, b = (cute.local_tile(x, (size, self.tile_k), (place, 0, None)) for x, size, place in sizes)
        return mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b))

    def portion_factors(self, portions: Sequence[tuple[Any, int]], position: Int32, thread: Int32) -> list[Any]:
        """What the sums of each portion are multiplied by: functions of the row slot and the column in the portion.

        They are read together: products that were issued after a load would wait for it.
        """
        if not self.sides:
            return [None] * len(portions)
        ring, layout, granule = self.factor_ring, self.epilogue.plan.layout, self.sides[1].granule
        ring.wait(position)
        wide = self.tile_n // self.summed
        rows = [
            [ring.row(position, row * 64 + layout.row(thread, slot)) for slot in range(2)]
            for row, _ in portions[::wide]
        ]
        columns: dict[int, Any] = {}
        if granule > 1:
            columns = {column: ring.column(position, column) for column in range(0, self.tile_n, granule)}

        def of(i: int) -> Callable[[int, int], Float32]:
            mine, first = rows[i // wide], portions[i][1] * self.summed
            if granule == 1:  # too many to be read while the products are in flight

                def product(slot: int, place: int) -> Float32:
                    if first + place not in columns:
                        columns[first + place] = ring.column(position, first + layout.column(thread, place))
                    return mine[slot] * columns[first + place]

                return product
            products = [[row * columns[first + column] for column in range(0, self.summed, granule)] for row in mine]
            return lambda slot, place: products[slot][place // layout.run * layout.run * layout.neighbours // granule]

        return [of(i) for i in range(len(portions))]

    def add(self, i: int, acc: cute.Tensor, sums: cute.Tensor, factors: Any, first: bool = False) -> None:
        """Adds a portion's sums, times their factors, to its accumulators, which are 0 at ``first``."""
        for slot in range(2):
            for place, index in enumerate(self.epilogue.plan.layout.order(self.summed, slot)):
                target = i * (self.summed // 2) + index
                if first:
                    acc[target] = sums[index] if factors is None else sums[index] * factors(slot, place)
                elif factors is None:
                    acc[target] = acc[target] + sums[index]
                else:
                    acc[target] = fma(sums[index], factors(slot, place), acc[target])

    def finish(self, acc: cute.Tensor, tile: Tile) -> None:
        """The epilogue of a tile, part by part."""
        plan = self.epilogue.plan
        half = plan.width // 2  # values of a part, for each 64 rows
        share = half // plan.pieces
        self.epilogue.clear(tile, 0, Fragment(acc, self.tile_n, plan.layout))
        for part, act in self.epilogue.steps():
            values = self.fragment(Float32, plan.width)
            for atom in range(self.group_rows // 64):
                for which in range(plan.pieces):
                    first = plan.piece(part, which) * share + atom * (self.tile_n // 2)
                    for i in range(share):
                        values[i + which * share + atom * half] = acc[i + first]
            fragment = Fragment(values, plan.width, plan.layout)
            act(tile, part, fragment)
        self.epilogue.end(tile)


class Projection(ViewedProjection):
    """The projection of queries, around this GEMM."""

    gemm = Gemm
