"""Attention on Hopper, backward: dQ, dK and dV in one kernel.

    P = exp(scale Q K^T - LSE)   dP = dO V^T   dS = P (dP - D)   D = the sum of O dO over a row
    dV = P^T dO                  dK = scale dS^T Q               dQ = scale dS K

A CTA has a block of keys, and dK and dV of it in registers; it goes through the query blocks that see it. dQ's sum over
blocks of keys is added up in global memory, in float32, and that traffic is what limits such kernels. So two CTAs with
neighbouring blocks of keys send each other their dS through distributed shared memory, and each adds up one half of the
head for both: half as many additions.

Two warpgroups multiply: for Q K^T and dO V^T each has half of the keys, for the others, which are computed transposed,
half of the head. One warp of a third warpgroup lets the copy engine fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.around import QueryGradient, RowProducts
from cudnn_kernels.attention.mask import Mask
from cudnn_kernels.attention.sequences import Sequence, turned
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.naming import name
from cudnn_kernels.pipeline.wgmma import WgmmaRows
from cudnn_kernels.signature import START, Workspace, bind

GROUP = 128  # threads of a warpgroup
GROUPS = 2  # that multiply
PAIR = 2  # CTAs that exchange dS
M = 64  # query rows of a step
FEW, MANY = 24, 240  # registers of a loading and of a multiplying thread
ALL_BARRIER = 1  # of the multiplying warpgroups
Q_STAGES = 2


@dataclass
class Barriers:
    """In shared memory. ``peer_empty``: the other CTA's buffer for our dS is free; ``peer_full``: its dS is here."""

    kv_full: Any
    q_full: Any
    q_empty: Any
    do_full: Any
    do_empty: Any
    peer_full: Any
    peer_empty: Any


@dataclass
class Block:
    """A CTA's keys: their first one, head and batch, and where the sequence lies."""

    key: Int32
    head: Int32
    batch: Int32
    first_query: Int32
    first_key: Int32
    first_block: Int32  # of the sequence's query blocks, among all
    begin: Int32  # of the query blocks that see the pair's keys
    end: Int32
    mask: Mask


class AttentionBackward:
    """The kernel for one :class:`BackwardConfiguration`."""

    def __init__(self, configuration: BackwardConfiguration) -> None:
        c = self.c = configuration
        self.dtype = DTYPES[c.dtype]
        self.n = c.keys
        self.half_n = self.n // GROUPS
        self.half_d = c.head // 2
        self.rows = WgmmaRows(slots=2)

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        c = self.c
        given = bind(c.slots(), arguments)
        q, k, o, do, dq, dk, dv = (
            sequences.matrix(given[name], c.packed) for name in ("q", "k", "o", "do", "dq", "dk", "dv")
        )
        copied = [sequences.copied(given[name], c.packed) for name in ("q", "k", "v", "do")]
        lse = sequences.rows(given["lse"], c.packed)
        offsets_q, offsets_k = given.get("cum_seqlen_q"), given.get("cum_seqlen_k")
        batches = offsets_q.shape[0] - 1 if const_expr(c.packed) else q.shape[3]
        scale, right, left, stream = (given[name] for name in ("scale_softmax", "right", "left", "stream"))
        blocks = sequences.blocks_of(q.shape[0], batches, M, c.packed)
        per_batch, lse_shape = (blocks, q.shape[2], q.shape[3]), (blocks * M, q.shape[2], q.shape[3])
        sizes = {"sq": Int64(q.shape[0]), "hq": Int64(q.shape[2]), "b": Int64(batches)}
        products, log_sums, dq_sums = (
            self.region(given["workspace"], name, shape, sizes)
            for name, shape in (
                ("row_products", lse_shape), ("log_sums", lse_shape), ("dq_sums", (512, M * c.head // 512, *per_batch))
            )
        )  # fmt: skip
        RowProducts(c).launch(o, do, lse, products, log_sums, dq_sums, stream)
        self.launch(
            q, k, *copied, dk, dv, log_sums, products, dq_sums, offsets_q, offsets_k, scale, right, left, stream
        )
        QueryGradient(c).launch(dq_sums, dq, offsets_q, scale, stream)

    def region(self, workspace: cute.Tensor, name: str, shape: tuple[Any, ...], sizes: dict[str, Any]) -> cute.Tensor:
        """A region of the workspace as float32 values."""
        (slot,) = (slot for slot in self.c.slots() if isinstance(slot, Workspace))
        start = cute.assume(Int64(slot.places(sizes)[0][name]), START)
        first = cute.recast_ptr((workspace.iterator + start).align(16), dtype=Float32)
        return cute.make_tensor(first, cute.make_layout(shape))

    def launch(
        self, q: cute.Tensor, k: cute.Tensor, copied_q: cute.Tensor, copied_k: cute.Tensor, copied_v: cute.Tensor,
        copied_do: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, log_sums: cute.Tensor, products: cute.Tensor,
        dq_sums: cute.Tensor, offsets_q: Any, offsets_k: Any, scale: Float32, right: Int32, left: Int32, stream: Any,
    ) -> None:  # fmt: skip
        """Q (s_q, d, h_q, b); K, dK, dV (s_k, d, h_k, b); LSE * log2(e) and D (s_q, h_q, b).

        ``copied_...``: as the copy engine takes them.
        ``dq_sums``: float32, (128 * 4, M * d / 512, query blocks, h_q, b), zeros before.
        """
        c = self.c
        batches = 1 if const_expr(c.packed) else q.shape[3]
        layout_q, layout_k, layout_peer = self.input_layouts()
        load = cpasync.CopyBulkTensorTileG2SOp()
        atom_q, mQ = cpasync.make_tiled_tma_atom(load, copied_q, layout_q, (M, c.head))
        atom_do, mdO = cpasync.make_tiled_tma_atom(load, copied_do, layout_q, (M, c.head))
        atom_k, mK = cpasync.make_tiled_tma_atom(load, copied_k, layout_k, (self.n, c.head))
        atom_v, mV = cpasync.make_tiled_tma_atom(load, copied_v, layout_k, (self.n, c.head))
        atom_p, mP = cpasync.make_tiled_tma_atom(load, copied_k, layout_peer, (self.n, self.half_d))
        several = offsets_k.shape[0] - 1 if const_expr(c.packed) else 1
        pairs = sequences.blocks_of(k.shape[0], several, PAIR * self.n, c.packed)
        self.kernel(
            atom_q, mQ, atom_do, mdO, atom_k, mK, atom_v, mV, atom_p, mP, dk, dv, log_sums, products, dq_sums,
            offsets_q, offsets_k, q.shape[0], k.shape[0], q.shape[2] // k.shape[2], scale, right, left,
        ).launch(
            grid=[PAIR * pairs, k.shape[2], batches], block=[GROUP * (1 + GROUPS), 1, 1], cluster=[PAIR, 1, 1],
            stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip

    def input_layouts(self) -> tuple[Any, Any, Any]:
        """Q or dO, K or V, the other CTA's K, of half of the head: all with the head's elements in rows."""
        c, one = self.c, (None, None, 0)
        make_a, make_b, major = sm90.make_smem_layout_a, sm90.make_smem_layout_b, LayoutEnum.ROW_MAJOR
        return (
            cute.slice_(make_a(major, (M, self.n, c.head), self.dtype, 1), one),
            cute.slice_(make_b(major, (M, self.n, c.head), self.dtype, 1), one),
            cute.slice_(make_b(major, (M, self.n, self.half_d), self.dtype, 1), one),
        )

    def score_layout(self) -> Any:
        """P^T or dS^T: (keys, queries), queries in rows."""
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (M, self.n, M), self.dtype, 1)
        return cute.slice_(layout, (None, None, 0))

    def mma(self, n: int, a: OperandMajorMode, b: OperandMajorMode) -> cute.TiledMma:
        """The product of 64 rows and ``n`` columns, from shared memory."""
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, n, 16), warpgroup.OperandSource.SMEM, a, b)
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    def score_mma(self) -> cute.TiledMma:
        """Q K^T and dO V^T: rows are queries, columns a warpgroup's half of the keys."""
        return self.mma(self.half_n, OperandMajorMode.K, OperandMajorMode.K)

    def key_mma(self) -> cute.TiledMma:
        """dV^T = dO^T P and dK^T = Q^T dS: rows are the head's elements, columns keys."""
        return self.mma(self.n, OperandMajorMode.MN, OperandMajorMode.K)

    def query_mma(self) -> cute.TiledMma:
        """dQ^T = K^T dS^T: rows are the head's elements, columns queries."""
        return self.mma(M, OperandMajorMode.MN, OperandMajorMode.MN)

    @cute.kernel
    def kernel(
        self, atom_q: Any, mQ: cute.Tensor, atom_do: Any, mdO: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any,
        mV: cute.Tensor, atom_p: Any, mP: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, log_sums: cute.Tensor,
        products: cute.Tensor, dq_sums: cute.Tensor, offsets_q: Any, offsets_k: Any, queries: Int32, keys: Int32,
        group_heads: Int32, scale: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = SmemAllocator()
        layout_q, layout_k, layout_peer = self.input_layouts()
        sQ = self.allocate(smem, self.staged(layout_q, Q_STAGES))
        sdO, sK, sV = (self.allocate(smem, x) for x in (layout_q, layout_k, layout_k))
        sPeerK, sP, sdS, sPeerS = (self.allocate(smem, x) for x in (layout_peer, *[self.score_layout()] * 3))
        counts = (1, Q_STAGES, Q_STAGES, 1, 1, 1, 1)
        barriers = Barriers(*(smem.allocate_array(cutlass.Int64, count) for count in counts))
        if thread == 0:
            for one in (barriers.kv_full, barriers.do_full, barriers.peer_full):
                cute.arch.mbarrier_init(one, 1)
            cute.arch.mbarrier_init(barriers.do_empty, 4 * GROUPS)
            cute.arch.mbarrier_init(barriers.peer_empty, 4 * GROUPS)
            for stage in cutlass.range_constexpr(Q_STAGES):
                cute.arch.mbarrier_init(barriers.q_full + stage, 1)
                cute.arch.mbarrier_init(barriers.q_empty + stage, 4 * GROUPS)
            for atom in (atom_q, atom_do, atom_k, atom_v, atom_p):
                cpasync.prefetch_descriptor(atom)
        cute.arch.mbarrier_init_fence()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        block = self.block(offsets_q, offsets_k, queries, keys, right, left, rank)
        if group == 0:
            cute.arch.setmaxregister_decrease(FEW)
            if warp_index == 0:
                self.produce(
                    atom_q, mQ, atom_do, mdO, atom_k, mK, atom_v, mV, atom_p, mP, sQ, sdO, sK, sV, sPeerK, barriers,
                    block, group_heads, rank,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(MANY)
            self.consume(
                sQ, sdO, sK, sV, sPeerK, sP, sdS, sPeerS, barriers, dk, dv, log_sums, products, dq_sums, block,
                group_heads, scale, rank, group - 1, thread - GROUP,
            )  # fmt: skip
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    name(kernel, "cudnn_attention_backward_sm90")

    def allocate(self, smem: Any, layout: Any) -> cute.Tensor:
        """A swizzled buffer."""
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def staged(self, layout: Any, stages: int) -> Any:
        """The layout of Q's ring."""
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (M, self.n, self.c.head), self.dtype, stages)

    @cute.jit
    def block(
        self, offsets_q: Any, offsets_k: Any, queries: Int32, keys: Int32, right: Int32, left: Int32, rank: Int32
    ) -> Block:
        """What this CTA's keys are. Both CTAs of a pair take the same query blocks."""
        c = self.c
        index, head, batch = cute.arch.block_idx()
        s, first_block = Sequence(batch, queries, keys, Int32(0), Int32(0)), Int32(0)
        if const_expr(c.packed):
            batch, pair = sequences.find_block(offsets_k, index // PAIR, PAIR * self.n)
            index = pair * PAIR + rank
            s = sequences.packed(offsets_q, offsets_k, batch)
            first_block = sequences.first_block(offsets_q, batch, M)
        queries, keys = s.queries, s.keys
        mask = Mask(
            queries, keys, keys - queries,
            right if const_expr(c.right) else None, left if const_expr(c.left) else None,
        )  # fmt: skip
        key = index * self.n
        first, last = (index - rank) * self.n, (index - rank + PAIR) * self.n - 1
        begin, end = Int32(0), queries
        if const_expr(c.right):
            begin = cutlass.max(begin, first - mask.offset - right)
        if const_expr(c.left):
            end = cutlass.min(end, last - mask.offset + left + 1)
        begin, end = begin // M, cute.ceil_div(cutlass.max(end, Int32(0)), M)
        if first >= keys:
            end = begin
        return Block(key, head, s.batch, s.first_query, s.first_key, first_block, begin, cutlass.max(begin, end), mask)

    @cute.jit
    def produce(
        self, atom_q: Any, mQ: cute.Tensor, atom_do: Any, mdO: cute.Tensor, atom_k: Any, mK: cute.Tensor, atom_v: Any,
        mV: cute.Tensor, atom_p: Any, mP: cute.Tensor, sQ: cute.Tensor, sdO: cute.Tensor, sK: cute.Tensor,
        sV: cute.Tensor, sPeerK: cute.Tensor, barriers: Barriers, block: Block, group_heads: Int32, rank: Int32,
    ) -> None:  # fmt: skip
        """One warp: fetches K and V, then Q and dO of every step."""
        c = self.c
        steps = block.end - block.begin
        if steps > 0:
            keys = (block.head, block.batch, block.first_key, block.mask.keys)
            size = self.n * c.head * self.dtype.width // 8
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers.kv_full, 2 * size + size // 2)
            other = block.key + (1 - 2 * rank) * self.n
            full, shape = barriers.kv_full, (self.n, c.head)
            self.fetch(atom_k, sequences.copied_rows(mK, *keys), sK, (block.key, 0), shape, full)
            self.fetch(atom_v, sequences.copied_rows(mV, *keys), sV, (block.key, 0), shape, full)
            peer_rows, shape = sequences.copied_rows(mP, *keys), (self.n, self.half_d)
            self.fetch(atom_p, peer_rows, sPeerK, (other, rank * self.half_d), shape, full)
        size = M * c.head * self.dtype.width // 8
        total = steps * group_heads
        for step in cutlass.range(total + cutlass.min(total, 1), unroll=1):  # the last Q is multiplied for nothing
            used = cutlass.min(step, total - 1)
            head = block.head * group_heads + used // steps
            queries = (head, block.batch, block.first_query, block.mask.queries)
            place = ((block.begin + used % steps) * M, 0)
            stage, phase = step % Q_STAGES, step // Q_STAGES % 2
            cute.arch.mbarrier_wait(barriers.q_empty + stage, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers.q_full + stage, size)
            target, full = sQ[None, None, stage], barriers.q_full + stage
            self.fetch(atom_q, sequences.copied_rows(mQ, *queries), target, place, (M, c.head), full)
            if step < total:
                cute.arch.mbarrier_wait(barriers.do_empty, step % 2 ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers.do_full, size)
                rows = sequences.copied_rows(mdO, *queries)
                self.fetch(atom_do, rows, sdO, place, (M, c.head), barriers.do_full)

    def fetch(self, atom: Any, source: cute.Tensor, target: cute.Tensor, place: Any, shape: Any, full: Any) -> None:
        """Starts a copy of a tile that begins at ``place``."""
        tile = cute.local_tile(cute.domain_offset(place, source), shape, (0, 0))
        to, of = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(tile, 0, 2)
        )
        cute.copy(atom, of, to, tma_bar_ptr=full)

    @cute.jit
    def consume(
        self, sQ: cute.Tensor, sdO: cute.Tensor, sK: cute.Tensor, sV: cute.Tensor, sPeerK: cute.Tensor,
        sP: cute.Tensor, sdS: cute.Tensor, sPeerS: cute.Tensor, barriers: Barriers, dk: cute.Tensor, dv: cute.Tensor,
        log_sums: cute.Tensor, products: cute.Tensor, dq_sums: cute.Tensor, block: Block, group_heads: Int32,
        scale: Float32, rank: Int32, group: Int32, thread256: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup: the products of all steps, then dK and dV."""
        c = self.c
        thread = thread256 - group * GROUP
        score_mma, key_mma, query_mma = self.score_mma(), self.key_mma(), self.query_mma()
        score, key, query = (x.get_slice(thread) for x in (score_mma, key_mma, query_mma))
        tSrQ = score_mma.make_fragment_A(score.partition_A(sQ))
        tSrdO = score_mma.make_fragment_A(score.partition_A(sdO))
        tSrK, tSrV = (
            score_mma.make_fragment_B(score.partition_B(cute.local_tile(x, (self.half_n, c.head), (group, 0))))
            for x in (sK, sV)
        )
        half = (c.head // GROUPS, M)
        tVrdO = key_mma.make_fragment_A(key.partition_A(cute.local_tile(turned(sdO), half, (group, 0))))
        tKrQ = key_mma.make_fragment_A(key.partition_A(cute.local_tile(turned(sQ), half, (group, 0, None))))
        tVrP, tKrS = (key_mma.make_fragment_B(key.partition_B(x)) for x in (sP, sdS))
        mine = (self.half_d // GROUPS, self.n)
        sMyK = cute.local_tile(turned(sK), mine, (rank * GROUPS + group, 0))
        tQrK = query_mma.make_fragment_A(query.partition_A(sMyK))
        tQrPeerK = query_mma.make_fragment_A(query.partition_A(cute.local_tile(turned(sPeerK), mine, (group, 0))))
        tQrS, tQrPeerS = (query_mma.make_fragment_B(query.partition_B(turned(x))) for x in (sdS, sPeerS))

        scores, gradients = (
            cute.make_rmem_tensor(score_mma.partition_shape_C((M, self.half_n)), Float32) for _ in range(2)
        )
        acc_dk, acc_dv = (
            cute.make_rmem_tensor(key_mma.partition_shape_C((c.head // GROUPS, self.n)), Float32) for _ in range(2)
        )
        acc_dq = cute.make_rmem_tensor(query_mma.partition_shape_C((self.half_d // GROUPS, M)), Float32)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        row_sums, row_products = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 2), self.dtype)
        copy = cute.make_tiled_copy_C(atom, score_mma).get_slice(thread)
        tPsP, tPsS = (copy.partition_D(cute.local_tile(turned(x), (M, self.half_n), (0, group))) for x in (sP, sdS))
        steps = block.end - block.begin
        total = steps * group_heads
        batch = 0 if const_expr(c.packed) else block.batch
        scale_log2 = scale * LOG2_E
        if total > 0:
            cute.arch.mbarrier_wait(barriers.kv_full, 0)
            cute.arch.mbarrier_wait(barriers.q_full, 0)
            self.multiply(self.score_mma(), scores, tSrQ, tSrK, 0, False)
            warpgroup.wait_group(0)
            self.load_rows(log_sums, products, row_sums, row_products, block, 0, steps, group_heads, batch, thread)
        for step in cutlass.range(total, unroll=1):
            head = block.head * group_heads + step // steps
            m_block = block.begin + step % steps
            stage, phase = step % Q_STAGES, step % 2
            cute.arch.mbarrier_wait(barriers.do_full, phase)
            self.multiply(self.score_mma(), gradients, tSrdO, tSrV, None, False)
            self.exponentiate(scores, row_sums, scale_log2, block, m_block, group, thread)
            self.put(copy, atom, scores, tPsP)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            self.multiply(self.key_mma(), acc_dv, tVrdO, tVrP, None, True)
            warpgroup.wait_group(1)
            for slot in cutlass.range_constexpr(2):
                for i in self.rows.order(self.half_n, slot):
                    gradients[i] = scores[i] * (gradients[i] - row_products[slot])
            ahead = cutlass.min(step + 1, total - 1)
            self.load_rows(log_sums, products, row_sums, row_products, block, ahead, steps, group_heads, batch, thread)
            cute.arch.mbarrier_wait(barriers.peer_empty, phase ^ 1)  # the other CTA has what dS was before
            self.put(copy, atom, gradients, tPsS)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            if thread256 < 32:
                self.send(sdS, sPeerS, barriers, rank)
            self.multiply(self.key_mma(), acc_dk, tKrQ, tKrS, stage, True)
            warpgroup.wait_group(1)
            self.release(barriers.do_empty)
            self.multiply(self.query_mma(), acc_dq, tQrK, tQrS, None, False)
            cute.arch.mbarrier_wait(barriers.peer_full, phase)
            self.multiply(self.query_mma(), acc_dq, tQrPeerK, tQrPeerS, None, True)
            following = (step + 1) % Q_STAGES
            cute.arch.mbarrier_wait(barriers.q_full + following, (step + 1) // Q_STAGES % 2)
            self.multiply(self.score_mma(), scores, tSrQ, tSrK, following, False)  # the last time, for nothing
            warpgroup.wait_group(1)
            self.release(barriers.q_empty + stage)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(barriers.peer_empty, 1 - rank)
            self.add(acc_dq, dq_sums, block.first_block + m_block, head, batch, rank, group, thread)
            warpgroup.wait_group(0)  # in flight over the end of a loop, ptxas would let products wait for each other
        self.store(acc_dk, sK, dk, block, batch, scale, group, thread, thread256)
        self.store(acc_dv, sV, dv, block, batch, Float32(1.0), group, thread, thread256)

    def multiply(self, mma: Any, acc: cute.Tensor, a: Any, b: Any, stage: Any, accumulate: bool) -> None:
        """Issues a product, as a group of its own."""
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        for k in range(cute.size(a, mode=[2])):
            left = a[None, None, k] if stage is None else a[None, None, k, stage]
            cute.gemm(mma, acc, left, b[None, None, k], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def exponentiate(
        self, scores: cute.Tensor, row_sums: cute.Tensor, scale: Float32, block: Block, m_block: Int32, group: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """Turns scores into P; 0 where the mask hides a key, or where there is no query or key."""
        first = block.key + group * self.half_n
        for slot in range(2):
            row = m_block * M + self.rows.row(thread, slot)
            begin, end = block.mask.begin(row) - first, block.mask.end(row) - first
            for place, i in enumerate(self.rows.order(self.half_n, slot)):
                column = self.rows.column(thread, place)
                seen = column < end
                if const_expr(self.c.left):
                    seen = seen & (column >= begin)
                value = cute.math.exp2(scores[i] * scale - row_sums[slot], fastmath=True)
                scores[i] = Float32(cutlass.select_(seen, value, Float32(0.0)))

    def put(self, copy: Any, atom: Any, values: cute.Tensor, target: cute.Tensor) -> None:
        """Rounds values and writes them transposed."""
        rounded = cute.make_rmem_tensor(values.shape, self.dtype)
        rounded.store(values.load().to(self.dtype))
        cute.copy(atom, copy.retile(rounded), target)

    def all_multiplying(self) -> None:
        """Waits for both multiplying warpgroups."""
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=GROUPS * GROUP)

    @cute.jit
    def send(self, sdS: cute.Tensor, sPeerS: cute.Tensor, barriers: Barriers, rank: Int32) -> None:
        """One warp: copies dS to the other CTA."""
        size = self.n * M * self.dtype.width // 8
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers.peer_full, size)
            other = 1 - rank
            target = cute.arch.map_dsmem_ptr(sPeerS.iterator, other).toint()
            full = cute.arch.map_dsmem_ptr(barriers.peer_full, other).toint()
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[target, sdS.iterator.toint(), Int32(size), full],
            )

    @cute.jit
    def release(self, empty: Any) -> None:
        """A warp is done with a buffer."""
        if cute.arch.lane_idx() == 0:
            cute.arch.mbarrier_arrive(empty)

    @cute.jit
    def load_rows(
        self, log_sums: cute.Tensor, products: cute.Tensor, row_sums: cute.Tensor, row_products: cute.Tensor,
        block: Block, step: Any, steps: Int32, group_heads: Int32, batch: Any, thread: Int32,
    ) -> None:  # fmt: skip
        """LSE and D of a thread's rows, long before they are needed; of rows that do not exist, what makes P 0."""
        head = block.head * group_heads + step // steps
        for slot in cutlass.range_constexpr(2):
            row = (block.begin + step % steps) * M + self.rows.row(thread, slot)
            place = block.first_query + cutlass.min(row, block.mask.queries - 1)
            exists = row < block.mask.queries
            row_sums[slot] = Float32(cutlass.select_(exists, log_sums[place, head, batch], Float32.inf))
            row_products[slot] = products[place, head, batch]

    def add(
        self, acc: cute.Tensor, sums: cute.Tensor, m_block: Int32, head: Int32, batch: Any, rank: Int32, group: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """Adds a warpgroup's part of dQ to the sums: four values of a thread at a time, threads next to each other.

        Straight from registers: the copy engine's additions from shared memory made the kernel a tenth slower.
        """
        vectors = cute.size(acc) // 4
        first = (rank * GROUPS + group) * vectors
        for i in range(vectors):
            place = cute.domain_offset((thread * 4, first + i, m_block, head, batch), sums).iterator
            cute.arch.inline_ptx(
                "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place.toint(), *(acc[4 * i + j] for j in range(4))],
            )

    @cute.jit
    def store(
        self, acc: cute.Tensor, buffer: cute.Tensor, out: cute.Tensor, block: Block, batch: Any, factor: Float32,
        group: Int32, thread: Int32, thread256: Int32,
    ) -> None:  # fmt: skip
        """Writes dK or dV, through the buffer that had K or V."""
        c = self.c
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        rounded.store((acc.load() * factor).to(self.dtype))
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 2), self.dtype)
        copy = cute.make_tiled_copy_C(atom, self.key_mma()).get_slice(thread)
        mine = cute.local_tile(turned(buffer), (c.head // GROUPS, self.n), (group, 0))
        self.all_multiplying()  # both have used the buffer
        cute.copy(atom, copy.retile(rounded), copy.partition_D(mine))
        self.all_multiplying()
        width = 128 // self.dtype.width
        columns = c.head // width
        target = cute.domain_offset((block.first_key + block.key, 0), out[None, None, block.head, batch])
        for i in cutlass.range_constexpr(self.n * columns // (GROUPS * GROUP)):
            index = thread256 + i * GROUPS * GROUP
            row, column = index // columns, index % columns
            if block.key + row < block.mask.keys:
                source = cute.local_tile(buffer, (1, width), (row, column))
                cute.autovec_copy(source, cute.local_tile(target, (1, width), (row, column)))
