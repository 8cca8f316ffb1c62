"""Attention on Hopper, forward: O = softmax(scale Q K^T + mask) V.

A CTA takes tiles in turn: query rows of one head, 64 for each warpgroup that multiplies. One warp of another warpgroup
lets the copy engine fetch Q, and rings of blocks of K and V, those of the next tile while the last of this one are
multiplied. A warpgroup keeps its rows of O and one block of scores in registers: it issues the next block's Q K^T
and this block's P V, and while the latter runs it computes the softmax of the former. Blocks are taken from the last to
the first, so that those at the mask's edge come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import ForwardConfiguration, sequences, softmax
from cudnn_kernels.attention.forward import Forward, Problem, Work, partition, queries_of
from cudnn_kernels.attention.sequences import turned
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.wgmma import WgmmaRows, opaque
from cudnn_kernels.shared_memory import BARRIERS, SHARED_MEMORY
from cudnn_kernels.signature import bind

GROUP = 128  # threads of a warpgroup
ROWS = 64  # of a warpgroup
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # of a loading and a multiplying thread, by warpgroups
GROUP_BARRIER = 1  # and those of other warpgroups
TURN_BARRIER = 4  # likewise


@dataclass
class Rings:
    """Barriers in shared memory: those of each warpgroup's Q, and of each buffer of K and of V."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


@dataclass
class Part:
    """What a warpgroup computes with: products' operands in shared memory, and registers.

    ``words`` are P, two values each. ``place`` is how many blocks were multiplied before the tile, ``row`` its first.
    """

    q: Any
    k: Any
    v: Any
    scores: cute.Tensor
    acc: cute.Tensor
    words: cute.Tensor
    state: softmax.State
    cap: Any
    rings: Rings
    group: Int32
    thread: Int32


class AttentionForward(Forward):
    """The kernel for one :class:`ForwardConfiguration`."""

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.groups = self.tile_m // ROWS
        self.warps = 4 * self.groups
        self.score_rows = WgmmaRows(slots=2)
        self.seldom = c.head_v > 128  # whether O is multiplied anew only where that is needed

    @property
    def stays(self) -> bool:
        """Whether a CTA takes several tiles. Those of packed sequences differ too much in what they cost."""
        return not self.c.packed

    @property
    def apart(self) -> bool:
        """Whether O has room of its own in shared memory."""
        c = self.c
        operands = self.bytes(self.tile_m, c.head) + c.stages * self.bytes(self.tile_n, c.head + c.head_v)
        return operands + self.bytes(self.tile_m, c.head_v) <= SHARED_MEMORY - BARRIERS

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        ctas = given["multiprocessors"] if const_expr(self.stays) else None
        work, (scale, factor) = self.work(given, ctas), self.scales(given)
        all_tiles = work.tiles * work.all_heads
        ctas = all_tiles if const_expr(ctas is None) else cutlass.min(ctas, all_tiles)
        lse = sequences.rows(given["lse"], c.packed, c.lse == "by head") if const_expr(c.lse) else None
        _, k_layout, v_layout = self.layouts(1)
        load, one = cpasync.CopyBulkTensorTileG2SOp(), (None, None, 0)
        rows_q, rows_k, rows_v, rows_o = (sequences.copied(given[name], c.packed) for name in ("q", "k", "v", "o"))
        atoms, tensors = [], []
        for op, rows, layout, box in (
            (load, rows_q, self.rows_layout(c.head), (ROWS, c.head)),
            (load, rows_k, cute.slice_(k_layout, one), (self.tile_n, c.head)),
            (load, turned(rows_v), cute.slice_(v_layout, one), (c.head_v, self.tile_n)),
            (cpasync.CopyBulkTensorTileS2GOp(), rows_o, self.rows_layout(c.head_v), (ROWS, c.head_v)),
        ):
            atom, tensor = cpasync.make_tiled_tma_atom(op, rows, layout, box)
            atoms.append(atom)
            tensors.append(tensor)
        self.kernel(atoms, tensors, lse, given.get("sink"), work, scale, factor, given["scale_output"]).launch(
            grid=[ctas, 1, 1], block=[GROUP * (1 + self.groups), 1, 1], stream=given["stream"], min_blocks_per_mp=1
        )

    def layouts(self, stages: int) -> tuple[Any, Any, Any]:
        """Q, and the rings of K and V, in shared memory."""
        c = self.c
        scores, products = (self.tile_m, self.tile_n, c.head), (self.tile_m, c.head_v, self.tile_n)
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, scores, self.dtype, 1),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, scores, self.dtype, stages),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, products, self.dtype, stages),
        )

    def rows_layout(self, width: int, rows: int = ROWS) -> Any:
        """A warpgroup's rows of Q or O in shared memory, or all of a tile's."""
        shape = (self.tile_m, self.tile_n, width)
        whole = cute.slice_(sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, 1), (None, None, 0))
        return whole if rows == self.tile_m else cute.composition(whole, (rows, width))

    def score_mma(self) -> cute.TiledMma:
        """Q K^T of a warpgroup."""
        shape, k = (ROWS, self.tile_n, 16), OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, warpgroup.OperandSource.SMEM, k, k)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def product_mma(self) -> cute.TiledMma:
        """P V of a warpgroup, P from registers."""
        shape, majors = (ROWS, self.c.head_v, 16), (OperandMajorMode.K, OperandMajorMode.MN)
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, warpgroup.OperandSource.RMEM, *majors)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    @cute.kernel
    def kernel(
        self, atoms: list, tensors: list, lse: Any, sink: Any, work: Work, scale: Float32, cap_factor: Any,
        scale_output: Float32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        if thread == 0:
            for i in cutlass.range_constexpr(len(atoms)):
                cpasync.prefetch_descriptor(atoms[i])
        smem = SmemAllocator()
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in self.layouts(c.stages)
        )
        sQ, out = sQ[None, None, 0], self.rows_layout(c.head_v, self.tile_m)
        if const_expr(self.apart):
            sO = smem.allocate_tensor(self.dtype, out.outer, byte_alignment=1024, swizzle=out.inner)
        else:  # a warpgroup overwrites its own rows of Q
            sO = cute.make_tensor(sQ.iterator, out.outer)
        rings = self.rings(smem, 1)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            if warp_index == 0:
                self.produce(atoms, tensors, sQ, sK, sV, rings, work)
        else:
            cute.arch.setmaxregister_increase(many)
            part = self.prepare(sQ, sK, sV, rings, scale, cap_factor, group - 1, thread - GROUP * group)
            self.consume(part, atoms[3], tensors[3], lse, sink, sO, work, scale_output)

    name(kernel, "cudnn_attention_forward_sm90")

    @cute.jit
    def rings(self, smem: SmemAllocator, q_arrivals: int) -> Rings:
        """Allocates and initialises the barriers. All threads take part."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        made = Rings(*(smem.allocate_array(cutlass.Int64, x) for x in (*[self.groups] * 2, *[c.stages] * 4)))
        if thread == 0:
            for group in cutlass.range_constexpr(self.groups):
                cute.arch.mbarrier_init(made.q_full + group, q_arrivals)
                cute.arch.mbarrier_init(made.q_empty + group, 4)
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(made.k_full + stage, 1)
                cute.arch.mbarrier_init(made.v_full + stage, 1)
                cute.arch.mbarrier_init(made.k_empty + stage, self.warps)
                cute.arch.mbarrier_init(made.v_empty + stage, self.warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        return made

    @cute.jit
    def produce(
        self, atoms: list, tensors: list, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, work: Work
    ) -> None:  # fmt: skip
        """One warp: fetches Q, K and V."""
        place, phase = Int32(0), Int32(0)
        for turn in cutlass.range(work.turns, unroll=1):
            tile, head = self.tile(work, turn if const_expr(self.stays) else None)
            if tile >= 0:
                p = self.problem(work, tile, head)
                if self.exists(p):
                    place += self.fetch_tile(atoms, tensors, sQ, sK, sV, rings, p, place, phase)
                    phase ^= 1

    @cute.jit
    def fetch_tile(
        self, atoms: list, tensors: list, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, p: Problem,
        place: Int32, phase: Int32,
    ) -> Int32:  # fmt: skip
        """Starts the copies of a tile; the number of its blocks."""
        c = self.c
        begin, _, _, end = self.blocks(p)
        gQ = cute.domain_offset((p.row, 0), queries_of(p, tensors[0]))
        key_rows = (p.key_head, p.batch, p.first_key, p.mask.keys)
        gK = sequences.copied_rows(tensors[1], *key_rows)
        gV = turned(sequences.copied_rows(turned(tensors[2]), *key_rows))
        tQsQ, tQgQ = partition(
            atoms[0], 0, 1, cute.local_tile(sQ, (ROWS, c.head), (None, 0)),
            cute.local_tile(gQ, (ROWS, c.head), (None, 0)),
        )  # fmt: skip
        tKsK, tKgK = partition(atoms[1], 0, 1, sK, cute.local_tile(gK, (self.tile_n, c.head), (None, 0)))
        tVsV, tVgV = partition(atoms[2], 0, 1, sV, cute.local_tile(gV, (c.head_v, self.tile_n), (0, None)))
        for step in cutlass.range(end - begin + 1, unroll=1):
            if step < end - begin:
                stage = self.expect(rings.k_full, rings.k_empty, place + step, c.head)
                cute.copy(atoms[1], tKgK[None, end - 1 - step], tKsK[None, stage], tma_bar_ptr=rings.k_full + stage)
            if step == 0:
                for group in cutlass.range_constexpr(self.groups):
                    full = rings.q_full + group
                    cute.arch.mbarrier_wait(rings.q_empty + group, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes(ROWS, c.head))
                    cute.copy(atoms[0], tQgQ[None, group], tQsQ[None, group], tma_bar_ptr=full)
            else:
                stage = self.expect(rings.v_full, rings.v_empty, place + step - 1, c.head_v)
                cute.copy(atoms[2], tVgV[None, end - step], tVsV[None, stage], tma_bar_ptr=rings.v_full + stage)
        return end - begin

    @cute.jit
    def expect(self, full: Any, empty: Any, place: Int32, width: int) -> Int32:
        """Waits until a buffer of K or V is free, and tells its barrier what will come; the buffer."""
        stage, phase = self.at(place)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.bytes(self.tile_n, width))
        return stage

    def at(self, place: Any) -> tuple[Any, Any]:
        """The buffer, and its barriers' phase, of a block before which so many were taken."""
        return place % self.c.stages, place // self.c.stages % 2

    def prepare(
        self, sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, scale: Float32, cap_factor: Any,
        group: Int32, thread: Int32,
    ) -> Part:  # fmt: skip
        """What a warpgroup computes with."""
        c = self.c
        score_mma, product_mma = self.score_mma(), self.product_mma()
        scores_part, product_part = score_mma.get_slice(thread), product_mma.get_slice(thread)
        sQ_group = cute.local_tile(sQ, (ROWS, c.head), (group, 0))
        tSrQ = score_mma.make_fragment_A(scores_part.partition_A(sQ_group))
        tSrK = score_mma.make_fragment_B(scores_part.partition_B(sK))
        tOrV = product_mma.make_fragment_B(product_part.partition_B(sV))
        return Part(
            tSrQ, tSrK, tOrV,
            cute.make_rmem_tensor(score_mma.partition_shape_C((ROWS, self.tile_n)), Float32),
            cute.make_rmem_tensor(product_mma.partition_shape_C((ROWS, c.head_v)), Float32),
            cute.make_rmem_tensor(self.tile_n // 4, Int32),
            softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale),
            softmax.Cap(cap_factor) if c.softcap else None, rings, group, thread,
        )  # fmt: skip

    @cute.jit
    def consume(
        self, part: Part, atom_o: Any, mO: cute.Tensor, lse: Any, sink: Any, sO: cute.Tensor, work: Work,
        scale_output: Float32,
    ) -> None:  # fmt: skip
        """A warpgroup: its rows of the CTA's tiles."""
        place, phase = Int32(0), Int32(0)
        self.take_turns(part.group, True)
        for turn in cutlass.range(work.turns, unroll=1):
            tile, head = self.tile(work, turn if const_expr(self.stays) else None)
            if tile >= 0:
                p = self.problem(work, tile, head)
                if self.exists(p):
                    log_sums = self.attend(part, p, sink, scale_output, place, phase)
                    self.store(part, log_sums, atom_o, mO, lse, sO, p)
                    begin, _, _, end = self.blocks(p)
                    place += end - begin
                    phase ^= 1
        self.take_turns(part.group, False)
        if const_expr(self.apart):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def take_turns(self, group: Int32, begins: bool) -> None:
        """The first warpgroup has the first turn, and takes the one that is left in the end."""
        if const_expr(self.groups > 1):
            if const_expr(begins):
                if group == self.groups - 1:
                    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER, number_of_threads=2 * GROUP)
            elif group == 0:
                cute.arch.barrier(barrier_id=TURN_BARRIER, number_of_threads=2 * GROUP)

    @cute.jit
    def attend(
        self, part: Part, p: Problem, sink: Any, scale_output: Float32, place: Int32, phase: Int32
    ) -> cute.Tensor:  # fmt: skip
        """O of a warpgroup's rows; the log-sum-exp of a thread's."""
        c, rings, state = self.c, part.rings, part.state
        if const_expr(sink is not None):
            softmax.reset_to_sink(state, sink[p.head], self.score_rows, part.thread)
        else:
            softmax.reset(state)
        part.acc.fill(0.0)
        begin, whole_begin, whole_end, end = self.blocks(p)
        last = place + end - 1  # minus a block is how many were taken before it
        cute.arch.mbarrier_wait(rings.q_full + part.group, phase)
        if end > begin:
            self.first(part, p, end - 1, place)
            start = cutlass.max(begin, cutlass.min(end - 1, whole_end))
            for n in cutlass.range(end - 2, start - 1, -1, unroll=1):
                self.step(part, p, n, last - n, True)
            middle = cutlass.max(begin, cutlass.min(start, whole_begin)) if const_expr(c.left) else begin
            for n in cutlass.range(start - 1, middle - 1, -1, unroll=1):
                self.step(part, p, n, last - n, False)
            if const_expr(c.left):
                for n in cutlass.range(middle - 1, begin - 1, -1, unroll=1):
                    self.step(part, p, n, last - n, True)
        if const_expr(self.apart):
            self.release(rings.q_empty + part.group)
        if end > begin:
            self.last(part, last - begin)
        ends = [softmax.finish(state, self.score_rows, slot) for slot in range(2)]
        self.correct(part.acc, [factor * scale_output for factor, _ in ends])
        log_sums = cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            log_sums[slot] = ends[slot][1]
        return log_sums

    def multiply_scores(self, part: Part, stage: Int32) -> None:
        """Issues Q K^T of a block."""
        mma = self.score_mma()
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for block in range(self.c.head // 16):
            cute.gemm(mma, part.scores, part.q[None, None, block], part.k[None, None, block, stage], part.scores)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def multiply_values(self, part: Part, stage: Int32) -> None:
        """Issues P V of a block."""
        mma = self.product_mma()
        fixed = cute.make_rmem_tensor(self.tile_n // 4, Int32)
        for i in range(self.tile_n // 4):  # opaque: else the compiler packs halves after the fence
            fixed[i] = opaque(part.words[i])
        shape = cute.make_layout(mma.partition_shape_A((ROWS, self.tile_n)))
        tOrP = cute.make_tensor(cute.recast_ptr(fixed.iterator, dtype=self.dtype), shape)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in range(self.tile_n // 16):
            cute.gemm(mma, part.acc, tOrP[None, None, block], part.v[None, None, block, stage], part.acc)
        warpgroup.commit_group()

    def first(self, part: Part, p: Problem, n: Int32, place: Int32) -> None:
        """The scores of the first block."""
        stage, phase = self.at(place)
        cute.arch.mbarrier_wait(part.rings.k_full + stage, phase)
        self.multiply_scores(part, stage)
        warpgroup.wait_group(0)
        self.release(part.rings.k_empty + stage)
        self.soften(part, p, n, True)
        self.round(part)

    def soften(self, part: Part, p: Problem, n: Int32, masked: bool) -> Any:
        """The exponentials of a block, and what O is to be multiplied by."""
        if const_expr(part.cap is not None):
            part.cap.apply(part.scores)
        if const_expr(masked):
            self.hide(part.scores, p, p.row + part.group * ROWS, part.thread, n)
        slack, chains = (softmax.SLACK, 2) if self.seldom else (0.0, 4)
        return softmax.update(part.state, part.scores, self.score_rows, self.tile_n, slack, chains)

    def step(self, part: Part, p: Problem, n: Int32, place: Int32, masked: bool) -> None:
        """Block n's scores, while the products of block n + 1 run.

        Warpgroups take turns in issuing products, so that one computes a softmax while another's products run.
        """
        rings, (stage, phase), (value_stage, value_phase) = part.rings, self.at(place), self.at(place - 1)
        cute.arch.mbarrier_wait(rings.k_full + stage, phase)
        if const_expr(self.groups > 1):
            cute.arch.barrier(barrier_id=TURN_BARRIER + part.group, number_of_threads=2 * GROUP)
        self.multiply_scores(part, stage)
        cute.arch.mbarrier_wait(rings.v_full + value_stage, value_phase)
        self.multiply_values(part, value_stage)
        if const_expr(self.groups > 1):
            after = select_(part.group == self.groups - 1, Int32(0), part.group + 1)
            cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + after, number_of_threads=2 * GROUP)
        warpgroup.wait_group(1)
        self.release(rings.k_empty + stage)
        corrections = self.soften(part, p, n, masked)
        warpgroup.wait_group(0)
        self.release(rings.v_empty + value_stage)
        self.round(part)
        if const_expr(self.seldom):
            self.correct_where_needed(part.acc, *corrections)
        else:
            self.correct(part.acc, corrections)

    def last(self, part: Part, place: Int32) -> None:
        """The products of the last block."""
        stage, phase = self.at(place)
        cute.arch.mbarrier_wait(part.rings.v_full + stage, phase)
        self.multiply_values(part, stage)
        warpgroup.wait_group(0)
        self.release(part.rings.v_empty + stage)

    def round(self, part: Part) -> None:
        """P as the tensor cores take it: an accumulator's registers are an operand's, in the same order."""
        rounded = cute.make_rmem_tensor(part.scores.shape, self.dtype)
        rounded.store(part.scores.load().to(self.dtype))
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(self.tile_n // 4):
            part.words[i] = pairs[i]

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
    def release(self, empty: Any) -> None:
        """A warp is done with a buffer."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def store(
        self, part: Part, log_sums: cute.Tensor, atom_o: Any, mO: cute.Tensor, lse: Any, sO: cute.Tensor, p: Problem
    ) -> None:  # fmt: skip
        """O and LSE of a warpgroup's rows."""
        c, group, thread = self.c, part.group, part.thread
        batch = 0 if const_expr(c.packed) else p.batch
        row = p.row + group * ROWS
        for slot in cutlass.range_constexpr(2 if c.lse else 0):
            mine = row + self.score_rows.row(thread, slot)
            if thread % 4 == 0:
                if mine < p.mask.queries:
                    lse[p.first_query + mine, p.head, batch] = log_sums[slot]
        rounded = cute.make_rmem_tensor(part.acc.shape, self.dtype)
        rounded.store(part.acc.load().to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.product_mma()).get_slice(thread)
        sO_group = cute.local_tile(sO, (ROWS, c.head_v), (group, 0))
        if const_expr(self.apart):  # the tile before was read
            cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(sO_group))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP)
        if thread < 32:
            gO = cute.local_tile(cute.domain_offset((row, 0), queries_of(p, mO)), (ROWS, c.head_v), (0, 0))
            tOsO, tOgO = partition(atom_o, 0, 1, sO_group, gO)
            cute.copy(atom_o, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            if const_expr(not self.apart):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        if const_expr(not self.apart):
            self.release(part.rings.q_empty + group)
