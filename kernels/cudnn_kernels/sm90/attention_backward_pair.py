"""Attention on Hopper, backward, for heads of 256 elements: pairs of CTAs share the additions of dQ.

The additions to dQ's sums are what limits backward passes with large heads, of whose keys a CTA can have but few. So
two CTAs with neighbouring blocks of keys send each other their dS through distributed shared memory, and each adds up
one half of the head for both: half as many additions.

Each of the two multiplying warpgroups has half of the keys for Q K^T and dO V^T. For the products dV^T = dO^T P and
dK^T = Q^T dS it has half of the head: so P and dS pass through shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.sequences import turned
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.naming import name
from cudnn_kernels.sm90.attention_backward import FEW, GROUP, GROUPS, MANY, STAGES, Backward, Block, Values


class PairedBackward(Backward):
    """The kernel of which two CTAs exchange dS."""

    cluster = 2

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        self.half_n = self.n // GROUPS
        self.half_d = self.widths["peer_k"] = self.c.head // 2

    def atoms(self, copied: dict[str, cute.Tensor]) -> Any:
        """Those of Q, dO, K, V, and of half of the head of the other CTA's K."""
        c = self.c
        return (
            *(self.loaded(copied[x], self.m, c.head) for x in ("q", "do")),
            *(self.loaded(copied[x], self.n, c.head) for x in ("k", "v")),
            self.loaded(copied["k"], self.n, self.half_d),
        )  # fmt: skip

    def score_layout(self) -> Any:
        """P^T or dS^T: (keys, queries), queries in rows."""
        layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (self.m, self.n, self.m), self.dtype, 1)
        return cute.slice_(layout, (None, None, 0))

    def score_mma(self) -> cute.TiledMma:
        """Q K^T and dO V^T: rows are queries, columns a warpgroup's half of the keys."""
        return self.mma(self.half_n, OperandMajorMode.K, OperandMajorMode.K)

    def key_mma(self) -> cute.TiledMma:
        """dV^T = dO^T P and dK^T = Q^T dS: rows are the head's elements, columns keys."""
        return self.mma(self.n, OperandMajorMode.MN, OperandMajorMode.K)

    def query_mma(self) -> cute.TiledMma:
        """dQ = dS K: columns are a quarter of the head."""
        return self.mma(self.half_d // GROUPS, OperandMajorMode.MN, OperandMajorMode.MN)

    @cute.kernel
    def kernel(
        self, atoms: Any, dk: cute.Tensor, dv: cute.Tensor, values: Any, offsets: Any, queries: Int32,
        group_heads: Int32, scale: Float32, right: Int32, left: Int32,
    ) -> None:  # fmt: skip
        """The roles of the warpgroups."""
        c = self.c
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        group = cute.arch.make_warp_uniform(thread // GROUP)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        smem = SmemAllocator()
        rows, columns, scores = self.tile(self.m, c.head), self.tile(self.n, c.head), self.score_layout()
        layouts = {
            "q": self.tile(self.m, c.head, STAGES), "do": rows, "k": columns, "v": columns,
            "peer_k": self.tile(self.n, self.half_d), "p": scores, "ds": scores, "peer_ds": scores,
        }  # fmt: skip
        buffers = {x: self.allocate(smem, layout) for x, layout in layouts.items()}
        counts = {
            "kv_full": (1, 1), "q_full": (STAGES, 1), "q_empty": (STAGES, 4 * GROUPS), "do_full": (1, 1),
            "do_empty": (1, 4 * GROUPS), "peer_full": (1, 1), "peer_empty": (1, 4 * GROUPS),
        }  # fmt: skip
        if const_expr(c.deterministic):
            counts |= {"turn": (1, 1), "added": (1, 4 * GROUPS)}
        barriers = self.barriers(smem, counts, thread)
        block, values = self.block(offsets, queries, dk, right, left, rank), Values(*values)
        if group == 0:
            cute.arch.setmaxregister_decrease(FEW)
            if warp_index == 0:
                names = ("q", "do", "k", "v", "peer_k")
                self.produce(dict(zip(names, atoms, strict=True)), buffers, barriers, block, group_heads, rank)
            if const_expr(c.deterministic):
                if warp_index == 1:
                    self.take_turns(barriers, values, block, group_heads, rank)
        else:
            cute.arch.setmaxregister_increase(MANY)
            self.consume(buffers, barriers, dk, dv, values, block, group_heads, scale, rank, group - 1, thread - GROUP)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    name(kernel, "cudnn_attention_backward_sm90")

    @cute.jit
    def produce(
        self, atoms: Any, buffers: Any, barriers: Any, block: Block, group_heads: Int32, rank: Int32
    ) -> None:  # fmt: skip
        """One warp: fetches K and V, then Q and dO of every step."""
        c = self.c
        steps = block.end - block.begin
        other = (block.key + (1 - 2 * rank) * self.n, rank * self.half_d)
        mine = (block.key, 0)
        self.fetch_keys(atoms, buffers, barriers["kv_full"], block, {"k": mine, "v": mine, "peer_k": other})
        total = steps * group_heads
        for step in cutlass.range(total + cutlass.min(total, 1), unroll=1):  # the last Q is multiplied for nothing
            used = cutlass.min(step, total - 1)
            head, place = block.head * group_heads + used // steps, ((block.begin + used % steps) * self.m, 0)
            queries = (head, block.batch, block.first_query, block.mask.queries)
            stage, shape = step % STAGES, (self.m, c.head)
            full = barriers["q_full"] + stage
            cute.arch.mbarrier_wait(barriers["q_empty"] + stage, step // STAGES % 2 ^ 1)
            self.expect(full, self.m * c.head)
            rows = sequences.copied_rows(atoms["q"][1], *queries)
            self.fetch(atoms["q"][0], rows, buffers["q"][None, None, stage], place, shape, full)
            if step < total:
                cute.arch.mbarrier_wait(barriers["do_empty"], step % 2 ^ 1)
                self.expect(barriers["do_full"], self.m * c.head)
                more = sequences.copied_rows(atoms["do"][1], *queries)
                self.fetch(atoms["do"][0], more, buffers["do"], place, shape, barriers["do_full"])

    @cute.jit
    def consume(
        self, buffers: Any, barriers: Any, dk: cute.Tensor, dv: cute.Tensor, values: Values, block: Block,
        group_heads: Int32, scale: Float32, rank: Int32, group: Int32, thread256: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup: the products of all steps, then dK and dV."""
        c = self.c
        thread = thread256 - group * GROUP
        score_mma, key_mma, query_mma = self.score_mma(), self.key_mma(), self.query_mma()
        score, key, query = (x.get_slice(thread) for x in (score_mma, key_mma, query_mma))
        tSrQ, tSrdO = (score_mma.make_fragment_A(score.partition_A(buffers[x])) for x in ("q", "do"))
        tSrK, tSrV = (
            score_mma.make_fragment_B(score.partition_B(cute.local_tile(buffers[x], (self.half_n, c.head), (group, 0))))
            for x in ("k", "v")
        )
        half = (c.head // GROUPS, self.m)
        tVrdO = key_mma.make_fragment_A(key.partition_A(cute.local_tile(turned(buffers["do"]), half, (group, 0))))
        tKrQ = key_mma.make_fragment_A(key.partition_A(cute.local_tile(turned(buffers["q"]), half, (group, 0, None))))
        tVrP, tKrS = (key_mma.make_fragment_B(key.partition_B(buffers[x])) for x in ("p", "ds"))
        mine = (self.half_d // GROUPS, self.n)
        tQrK, tQrPeerK = (
            query_mma.make_fragment_B(query.partition_B(cute.local_tile(turned(buffers[x]), mine, (part, 0))))
            for x, part in (("k", rank * GROUPS + group), ("peer_k", group))
        )
        tQrS, tQrPeerS = (query_mma.make_fragment_A(query.partition_A(turned(buffers[x]))) for x in ("ds", "peer_ds"))
        scores, gradients = (
            cute.make_rmem_tensor(score_mma.partition_shape_C((self.m, self.half_n)), Float32) for _ in range(2)
        )
        acc_dk, acc_dv = (
            cute.make_rmem_tensor(key_mma.partition_shape_C((c.head // GROUPS, self.n)), Float32) for _ in range(2)
        )
        acc_dq = cute.make_rmem_tensor(query_mma.partition_shape_C((self.m, self.half_d // GROUPS)), Float32)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        row_sums, row_products = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        sP, sdS = (cute.local_tile(turned(buffers[x]), (self.m, self.half_n), (0, group)) for x in ("p", "ds"))
        steps = block.end - block.begin
        total = steps * group_heads
        scale_log2, first_key = scale * LOG2_E, block.key + group * self.half_n
        q_full, q_empty, peer_full, peer_empty = (barriers[x] for x in ("q_full", "q_empty", "peer_full", "peer_empty"))
        added = barriers["added"] if const_expr(c.deterministic) else None
        own, peer = buffers["ds"], buffers["peer_ds"]
        mask = replace(block.mask)  # of the loop's own: a branch in it rebinds the values of what it uses
        if total > 0:
            cute.arch.mbarrier_wait(barriers["kv_full"], 0)
            cute.arch.mbarrier_wait(q_full, 0)
            self.multiply(self.score_mma(), scores, tSrQ[None, None, None, 0], tSrK, False)
            warpgroup.wait_group(0)
            self.load_rows(values, row_sums, row_products, block, 0, steps, group_heads, thread)
        for step in cutlass.range(total, unroll=1):
            m_block = block.begin + step % steps
            stage, phase = step % STAGES, step % 2
            cute.arch.mbarrier_wait(barriers["do_full"], phase)
            self.multiply(self.score_mma(), gradients, tSrdO, tSrV, False)
            self.hide(scores, mask, m_block * self.m, first_key, self.half_n, thread)
            for slot in cutlass.range_constexpr(2):
                for i in self.rows.order(self.half_n, slot):
                    scores[i] = cute.math.exp2(scores[i] * scale_log2 - row_sums[slot], fastmath=True)
            self.put(score_mma, self.rounded(scores), sP, True, 2, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            self.multiply(self.key_mma(), acc_dv, tVrdO, tVrP, True)
            warpgroup.wait_group(1)
            for slot in cutlass.range_constexpr(2):
                for i in self.rows.order(self.half_n, slot):
                    gradients[i] = scores[i] * (gradients[i] - row_products[slot])
            ahead = cutlass.min(step + 1, total - 1)
            self.load_rows(values, row_sums, row_products, block, ahead, steps, group_heads, thread)
            cute.arch.mbarrier_wait(peer_empty, phase ^ 1)  # the other CTA has what dS was before
            self.put(score_mma, self.rounded(gradients), sdS, True, 2, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            if thread256 < 32:
                self.send(own, peer, peer_full, rank)
            self.multiply(self.query_mma(), acc_dq, tQrS, tQrK, False)
            self.multiply(self.key_mma(), acc_dk, tKrQ[None, None, None, stage], tKrS, True)
            warpgroup.wait_group(1)
            self.release(barriers["do_empty"])
            cute.arch.mbarrier_wait(peer_full, phase)
            self.multiply(self.query_mma(), acc_dq, tQrPeerS, tQrPeerK, True)
            following = (step + 1) % STAGES
            cute.arch.mbarrier_wait(q_full + following, (step + 1) // STAGES % 2)
            self.multiply(self.score_mma(), scores, tSrQ[None, None, None, following], tSrK, False)
            warpgroup.wait_group(1)
            self.release(q_empty + stage)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(peer_empty, 1 - rank)
            if const_expr(c.deterministic):
                self.added(added)  # in the step before: the fence has little left to wait for
                cute.arch.mbarrier_wait(barriers["turn"], phase)
            self.add(acc_dq, self.sums(values, block, step, steps, group_heads), rank * GROUPS + group, thread)
            warpgroup.wait_group(0)  # in flight over the end of a loop, ptxas would let products wait for each other
        if const_expr(c.deterministic):
            self.added(added)
        for acc, buffer, out, factor in ((acc_dk, buffers["k"], dk, scale), (acc_dv, buffers["v"], dv, None)):
            mine = cute.local_tile(turned(buffer), (c.head // GROUPS, self.n), (group, 0))
            self.all_multiplying()  # both have used the buffer
            self.put(key_mma, self.rounded(acc, factor), mine, True, 2, thread)
            self.all_multiplying()
            self.write(buffer, out, block, c.head, thread256)

    def add(self, acc: cute.Tensor, sums: cute.Tensor, part: Int32, thread: Int32) -> None:
        """Adds a part of dQ to a block's sums: four values of a thread at a time, threads next to each other.

        Straight from registers: the copy engine's additions from shared memory made the kernel a tenth slower.
        """
        vectors = cute.size(acc) // 4
        for i in range(vectors):
            place = cute.domain_offset((thread * 4, part * vectors + i), sums).iterator
            cute.arch.inline_ptx(
                "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                read_only_args=[place.toint(), *(acc[4 * i + j] for j in range(4))],
            )

    @cute.jit
    def take_turns(self, barriers: Any, values: Values, block: Block, group_heads: Int32, rank: Int32) -> None:
        """One warp: says when it is the turn of this CTA's half of dQ, and then that of the step before is over."""
        steps = block.end - block.begin
        total, mask = steps * group_heads, replace(block.mask)
        for step in cutlass.range(total + cutlass.min(total, 1), unroll=1):
            used, before = cutlass.min(step, total - 1), cutlass.max(step - 1, 0)  # the last turn is its own still
            turn = self.turn(mask, block, block.begin + used % steps)
            self.wait_for_turn(self.turns(values, block, used, steps, group_heads), rank, turn)
            cute.arch.sync_warp()
            cute.arch.mbarrier_wait(barriers["added"], step % 2)
            self.release(barriers["turn"])
            with cute.arch.elect_one():
                turns = self.turns(values, block, before, steps, group_heads)
                self.end_turn(turns, rank, cutlass.min(step, 1))
            cute.arch.sync_warp()

    @cute.jit
    def added(self, done: Any) -> None:
        """All that a warp has added so far is in memory."""
        cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_warp()
        self.release(done)

    @cute.jit
    def send(self, sdS: cute.Tensor, sPeerS: cute.Tensor, peer_full: Any, rank: Int32) -> None:
        """One warp: copies dS to the other CTA."""
        size = self.n * self.m * self.dtype.width // 8
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(peer_full, size)
            other = 1 - rank
            target = cute.arch.map_dsmem_ptr(sPeerS.iterator, other).toint()
            full = cute.arch.map_dsmem_ptr(peer_full, other).toint()
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[target, sdS.iterator.toint(), Int32(size), full],
            )

    @cute.jit
    def load_rows(
        self, values: Values, row_sums: cute.Tensor, row_products: cute.Tensor, block: Block, step: Any, steps: Int32,
        group_heads: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """LSE and D of a thread's rows, long before they are needed."""
        batch = 0 if const_expr(self.c.packed) else block.batch
        head, m_block = block.head * group_heads + step // steps, block.first_block + block.begin + step % steps
        for slot in cutlass.range_constexpr(2):
            row = m_block * self.m + self.rows.row(thread, slot)
            row_sums[slot] = values.log_sums[row, head, batch]
            row_products[slot] = values.products[row, head, batch]
