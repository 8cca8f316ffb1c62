"""Attention on Hopper, forward: O = softmax(scale Q K^T + mask) V.

A CTA has query rows of one head: 64 for each warpgroup that multiplies. One warp of another warpgroup lets the copy
engine fetch Q, and rings of blocks of K and V. A warpgroup keeps its rows of O and one block of scores in registers: it
issues the next block's Q K^T and this block's P V, and while the latter runs it computes the softmax of the former.
Blocks are taken from the last to the first, so that those at the mask's edge come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import ForwardConfiguration, sequences, softmax
from cudnn_kernels.attention.forward import Forward, Problem, Sizes, partition, queries_of
from cudnn_kernels.attention.sequences import turned
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.wgmma import WgmmaRows, opaque
from cudnn_kernels.signature import bind

GROUP = 128  # threads of a warpgroup
ROWS = 64  # of a warpgroup
REGISTERS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}  # of a loading and a multiplying thread, by warpgroups
GROUP_BARRIER = 1


@dataclass
class Rings:
    """Barriers in shared memory: those of Q, and of each buffer of K and of V."""

    q_full: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class AttentionForward(Forward):
    """The kernel for one :class:`ForwardConfiguration`."""

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        self.groups = self.tile_m // ROWS
        self.warps = 4 * self.groups
        self.score_rows = WgmmaRows(slots=2)
        self.seldom = configuration.head_v > 128  # whether O is multiplied anew only where that is needed

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        sizes, (scale, factor) = self.sizes(given), self.scales(given)
        lse = sequences.rows(given["lse"], c.packed, c.lse == "by head") if const_expr(c.lse) else None
        q_layout, k_layout, v_layout = self.layouts(1)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = load if const_expr(c.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
        one = (None, None, 0)
        rows_q, rows_k, rows_v, rows_o = (sequences.copied(given[name], c.packed) for name in ("q", "k", "v", "o"))
        atom_q, mQ = cpasync.make_tiled_tma_atom(load, rows_q, cute.slice_(q_layout, one), (self.tile_m, c.head))
        atom_k, mK = cpasync.make_tiled_tma_atom(
            share, rows_k, cute.slice_(k_layout, one), (self.tile_n, c.head), num_multicast=c.cluster
        )
        atom_v, mV = cpasync.make_tiled_tma_atom(
            share, turned(rows_v), cute.slice_(v_layout, one), (c.head_v, self.tile_n), num_multicast=c.cluster
        )
        atom_o, mO = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), rows_o, self.output_tile(), (ROWS, c.head_v)
        )
        self.kernel(
            atom_q, mQ, atom_k, mK, atom_v, mV, atom_o, mO, lse, given.get("cum_seqlen_q"), given.get("cum_seqlen_k"),
            given.get("sink"), sizes, scale, factor, given["scale_output"], given["right"], given["left"],
        ).launch(
            grid=[c.cluster, sizes.tiles * sizes.all_heads, 1], block=[GROUP * (1 + self.groups), 1, 1],
            cluster=[c.cluster, 1, 1], stream=given["stream"], min_blocks_per_mp=1,
        )  # fmt: skip

    def layouts(self, stages: int) -> tuple[Any, Any, Any]:
        """Q, and the rings of K and V, in shared memory."""
        c = self.c
        scores, products = (self.tile_m, self.tile_n, c.head), (self.tile_m, c.head_v, self.tile_n)
        return (
            sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, scores, self.dtype, 1),
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, scores, self.dtype, stages),
            sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, products, self.dtype, stages),
        )

    def output_layout(self) -> Any:
        """O in shared memory, where Q was: a warpgroup overwrites its own rows only."""
        shape = (self.tile_m, self.tile_n, self.c.head_v)
        return cute.slice_(sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, self.dtype, 1), (None, None, 0))

    def output_tile(self) -> Any:
        """The layout of a warpgroup's rows of O."""
        return cute.composition(self.output_layout(), (ROWS, self.c.head_v))

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
        self, atom_q: Any, mQ: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any, mV: cute.Tensor,
        atom_o: Any, mO: cute.Tensor, lse: Any, offsets_q: Any, offsets_k: Any, sink: Any, sizes: Sizes, scale: Float32,
        cap_factor: Any, scale_output: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        smem = SmemAllocator()
        q_layout, k_layout, v_layout = self.layouts(c.stages)
        sQ, sK, sV = (
            smem.allocate_tensor(self.dtype, x.outer, byte_alignment=1024, swizzle=x.inner)
            for x in (q_layout, k_layout, v_layout)
        )
        sQ = sQ[None, None, 0]
        out = self.output_layout()
        sO = cute.make_tensor(sQ.iterator, out.outer)
        rings = Rings(*(smem.allocate_array(cutlass.Int64, count) for count in (1, *[c.stages] * 4)))
        if thread == 0:
            cute.arch.mbarrier_init(rings.q_full, 1)
            for stage in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(rings.k_full + stage, 1)
                cute.arch.mbarrier_init(rings.v_full + stage, 1)
                cute.arch.mbarrier_init(rings.k_empty + stage, self.warps * c.cluster)
                cute.arch.mbarrier_init(rings.v_empty + stage, self.warps * c.cluster)
            for atom in (atom_q, atom_k, atom_v, atom_o):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        self.meet()
        rank, _, _ = cute.arch.block_idx()
        problem = self.problem(sizes, offsets_q, offsets_k, right, left)
        few, many = REGISTERS[self.groups]
        if group == 0:
            cute.arch.setmaxregister_decrease(few)
            if warp_index == 0:
                self.produce(atom_q, mQ, atom_k, mK, atom_v, mV, sQ, sK, sV, rings, problem, rank)
        else:
            cute.arch.setmaxregister_increase(many)
            self.consume(
                atom_o, mO, lse, sink, sQ, sK, sV, sO, rings, problem, scale, cap_factor, scale_output, rank, group - 1,
                thread - GROUP * group,
            )  # fmt: skip
        if const_expr(c.cluster > 1):
            self.meet()

    name(kernel, "cudnn_attention_forward_sm90")

    @cute.jit
    def meet(self) -> None:
        """Waits for all threads of the cluster."""
        if const_expr(self.c.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def produce(
        self, atom_q: Any, mQ: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any, mV: cute.Tensor,
        sQ: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, rings: Rings, p: Problem, rank: Int32,
    ) -> None:  # fmt: skip
        """One warp: fetches Q, K and V."""
        c = self.c
        everyone = cutlass.Int16((1 << c.cluster) - 1) if const_expr(c.cluster > 1) else None
        begin, _, _, end = self.blocks(p, rank)
        if self.exists(p, rank):
            gQ = cute.domain_offset((p.row, 0), queries_of(p, mQ))
            key_rows = (p.key_head, p.batch, p.first_key, p.mask.keys)
            gK = sequences.copied_rows(mK, *key_rows)
            gV = turned(sequences.copied_rows(turned(mV), *key_rows))
            tQsQ, tQgQ = partition(atom_q, 0, 1, sQ, cute.local_tile(gQ, (self.tile_m, c.head), (0, 0)))
            tKsK, tKgK = partition(atom_k, rank, c.cluster, sK, cute.local_tile(gK, (self.tile_n, c.head), (None, 0)))
            tVsV, tVgV = partition(atom_v, rank, c.cluster, sV, cute.local_tile(gV, (c.head_v, self.tile_n), (0, None)))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(rings.q_full, self.bytes(self.tile_m, c.head))
            cute.copy(atom_q, tQgQ, tQsQ, tma_bar_ptr=rings.q_full)
            for step in cutlass.range(end - begin + 1, unroll=1):
                if step < end - begin:
                    stage, phase = step % c.stages, step // c.stages % 2
                    cute.arch.mbarrier_wait(rings.k_empty + stage, phase ^ 1)
                    full = rings.k_full + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes(self.tile_n, c.head))
                    source, target = tKgK[None, end - 1 - step], tKsK[None, stage]
                    cute.copy(atom_k, source, target, tma_bar_ptr=full, mcast_mask=everyone)
                if step > 0:
                    stage, phase = (step - 1) % c.stages, (step - 1) // c.stages % 2
                    cute.arch.mbarrier_wait(rings.v_empty + stage, phase ^ 1)
                    full = rings.v_full + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.bytes(self.tile_n, c.head_v))
                    source, target = tVgV[None, end - step], tVsV[None, stage]
                    cute.copy(atom_v, source, target, tma_bar_ptr=full, mcast_mask=everyone)

    @cute.jit
    def consume(
        self, atom_o: Any, mO: cute.Tensor, lse: Any, sink: Any, sQ: cute.Tensor, sK: cute.Tensor,
        sV: cute.Tensor, sO: cute.Tensor, rings: Rings, p: Problem, scale: Float32, cap_factor: Any,
        scale_output: Float32, rank: Int32, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup: its rows."""
        c = self.c
        score_mma, product_mma = self.score_mma(), self.product_mma()
        scores_part, product_part = score_mma.get_slice(thread), product_mma.get_slice(thread)
        sQ_group = cute.local_tile(sQ, (ROWS, c.head), (group, 0))
        tSrQ = score_mma.make_fragment_A(scores_part.partition_A(sQ_group))
        tSrK = score_mma.make_fragment_B(scores_part.partition_B(sK))
        tOrV = product_mma.make_fragment_B(product_part.partition_B(sV))
        scores = cute.make_rmem_tensor(score_mma.partition_shape_C((ROWS, self.tile_n)), Float32)
        acc = cute.make_rmem_tensor(product_mma.partition_shape_C((ROWS, c.head_v)), Float32)
        words = cute.make_rmem_tensor(self.tile_n // 4, Int32)  # P, two values a word
        state = softmax.State(cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale)
        cap = softmax.Cap(cap_factor) if const_expr(c.softcap) else None
        if const_expr(sink is not None):
            softmax.reset_to_sink(state, sink[p.head], self.score_rows, thread)
        else:
            softmax.reset(state)
        acc.fill(0.0)
        begin, whole_begin, whole_end, end = self.blocks(p, rank)
        row = p.row + group * ROWS
        if self.exists(p, rank):
            cute.arch.mbarrier_wait(rings.q_full, 0)
            if end > begin:
                self.first(scores, tSrQ, tSrK, words, rings, state, cap, p, row, thread, end)
                start = cutlass.max(begin, cutlass.min(end - 1, whole_end))
                for n in cutlass.range(end - 2, start - 1, -1, unroll=1):
                    self.step(scores, acc, tSrQ, tSrK, words, tOrV, rings, state, cap, p, row, thread, n, end, True)
                middle = cutlass.max(begin, cutlass.min(start, whole_begin)) if const_expr(c.left) else begin
                for n in cutlass.range(start - 1, middle - 1, -1, unroll=1):
                    self.step(scores, acc, tSrQ, tSrK, words, tOrV, rings, state, cap, p, row, thread, n, end, False)
                if const_expr(c.left):
                    for n in cutlass.range(middle - 1, begin - 1, -1, unroll=1):
                        self.step(scores, acc, tSrQ, tSrK, words, tOrV, rings, state, cap, p, row, thread, n, end, True)
                self.last(acc, words, tOrV, rings, end - 1 - begin)
            ends = [softmax.finish(state, self.score_rows, slot) for slot in range(2)]
            self.correct(acc, [factor * scale_output for factor, _ in ends])
            log_sums = cute.make_rmem_tensor(2, Float32)
            for slot in cutlass.range_constexpr(2):
                log_sums[slot] = ends[slot][1]
            self.store(product_mma, acc, log_sums, atom_o, mO, lse, sO, p, group, thread)

    def multiply_scores(self, scores: cute.Tensor, tSrQ: Any, tSrK: Any, stage: Int32) -> None:
        """Issues Q K^T of a block."""
        mma = self.score_mma()
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for block in range(self.c.head // 16):
            cute.gemm(mma, scores, tSrQ[None, None, block], tSrK[None, None, block, stage], scores)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def multiply_values(self, acc: cute.Tensor, words: cute.Tensor, tOrV: Any, stage: Int32) -> None:
        """Issues P V of a block."""
        mma = self.product_mma()
        fixed = cute.make_rmem_tensor(self.tile_n // 4, Int32)
        for i in range(self.tile_n // 4):  # opaque: else the compiler packs halves after the fence
            fixed[i] = opaque(words[i])
        shape = cute.make_layout(mma.partition_shape_A((ROWS, self.tile_n)))
        tOrP = cute.make_tensor(cute.recast_ptr(fixed.iterator, dtype=self.dtype), shape)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, True)
        for block in range(self.tile_n // 16):
            cute.gemm(mma, acc, tOrP[None, None, block], tOrV[None, None, block, stage], acc)
        warpgroup.commit_group()

    def first(
        self, scores: cute.Tensor, tSrQ: Any, tSrK: Any, words: cute.Tensor, rings: Rings,
        state: softmax.State, cap: Any, p: Problem, row: Int32, thread: Int32, end: Int32,
    ) -> None:  # fmt: skip
        """The scores of the first block."""
        stage = 0
        cute.arch.mbarrier_wait(rings.k_full, 0)
        self.multiply_scores(scores, tSrQ, tSrK, stage)
        warpgroup.wait_group(0)
        self.release(rings.k_empty + stage)
        if const_expr(cap is not None):
            cap.apply(scores)
        self.hide(scores, p, row, thread, end - 1)
        self.update(state, scores)
        self.round(scores, words)

    def update(self, state: softmax.State, scores: cute.Tensor) -> Any:
        """The exponentials of a block, and what O is to be multiplied by."""
        slack, chains = (softmax.SLACK, 2) if self.seldom else (0.0, 4)
        return softmax.update(state, scores, self.score_rows, self.tile_n, slack, chains)

    def step(
        self, scores: cute.Tensor, acc: cute.Tensor, tSrQ: Any, tSrK: Any, words: cute.Tensor,
        tOrV: Any, rings: Rings, state: softmax.State, cap: Any, p: Problem, row: Int32, thread: Int32, n: Int32,
        end: Int32, masked: bool,
    ) -> None:  # fmt: skip
        """Block n's scores, while the products of block n + 1 run."""
        count = end - 1 - n  # of blocks before
        stage, phase = count % self.c.stages, count // self.c.stages % 2
        value_stage, value_phase = (count - 1) % self.c.stages, (count - 1) // self.c.stages % 2
        cute.arch.mbarrier_wait(rings.k_full + stage, phase)
        self.multiply_scores(scores, tSrQ, tSrK, stage)
        cute.arch.mbarrier_wait(rings.v_full + value_stage, value_phase)
        self.multiply_values(acc, words, tOrV, value_stage)
        warpgroup.wait_group(1)
        self.release(rings.k_empty + stage)
        if const_expr(cap is not None):
            cap.apply(scores)
        if const_expr(masked):
            self.hide(scores, p, row, thread, n)
        corrections = self.update(state, scores)
        if const_expr(self.seldom):
            done_before_the_wait(state.sums[0] + state.sums[1])
        warpgroup.wait_group(0)
        self.release(rings.v_empty + value_stage)
        self.round(scores, words)
        if const_expr(self.seldom):
            self.correct_where_needed(acc, *corrections)
        else:
            self.correct(acc, corrections)

    def last(self, acc: cute.Tensor, words: cute.Tensor, tOrV: Any, rings: Rings, count: Int32) -> None:
        """The products of the last block."""
        stage, phase = count % self.c.stages, count // self.c.stages % 2
        cute.arch.mbarrier_wait(rings.v_full + stage, phase)
        self.multiply_values(acc, words, tOrV, stage)
        warpgroup.wait_group(0)
        self.release(rings.v_empty + stage)

    def round(self, scores: cute.Tensor, words: cute.Tensor) -> None:
        """P as the tensor cores take it: an accumulator's registers are an operand's, in the same order."""
        rounded = cute.make_rmem_tensor(scores.shape, self.dtype)
        rounded.store(scores.load().to(self.dtype))
        pairs = cute.recast_tensor(rounded, Int32)
        for i in range(self.tile_n // 4):
            words[i] = pairs[i]

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
        lane = cute.arch.lane_idx()
        if const_expr(self.c.cluster == 1):
            if lane == 0:
                cute.arch.mbarrier_arrive(empty)
        elif lane < self.c.cluster:
            cute.arch.mbarrier_arrive(empty, lane)

    @cute.jit
    def store(
        self, mma: Any, acc: cute.Tensor, log_sums: cute.Tensor, atom_o: Any, mO: cute.Tensor,
        lse: Any, sO: cute.Tensor, p: Problem, group: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """O and LSE of a warpgroup's rows."""
        c = self.c
        batch = 0 if const_expr(c.packed) else p.batch
        row = p.row + group * ROWS
        for slot in cutlass.range_constexpr(2 if c.lse else 0):
            mine = row + self.score_rows.row(thread, slot)
            if thread % 4 == 0:
                if mine < p.mask.queries:
                    lse[p.first_query + mine, p.head, batch] = log_sums[slot]
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store(acc.load().to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        sO_group = cute.local_tile(sO, (ROWS, c.head_v), (group, 0))
        cute.copy(atom, copy.retile(rounded), copy.partition_D(sO_group))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=GROUP_BARRIER + group, number_of_threads=GROUP)
        if thread < 32:
            gO = cute.local_tile(cute.domain_offset((row, 0), queries_of(p, mO)), (ROWS, c.head_v), (0, 0))
            tOsO, tOgO = partition(atom_o, 0, 1, sO_group, gO)
            cute.copy(atom_o, tOsO, tOgO)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)


def done_before_the_wait(value: Float32) -> None:
    """Keeps ptxas from computing a value, 0 or more, after a wait for products that should run meanwhile."""
    cute.arch.inline_ptx(
        "{.reg .pred negative; setp.lt.f32 negative, {$r0}, 0f00000000; @negative trap;}", read_only_args=[value]
    )
