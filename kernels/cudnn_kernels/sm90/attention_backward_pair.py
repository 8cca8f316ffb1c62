"""Attention on Hopper, backward, for heads of over 128 elements: pairs of CTAs share the additions of dQ.

The additions to dQ's sums are what limits backward passes with large heads, of whose keys a CTA can have but few. So
two CTAs with neighbouring blocks of keys send each other their dS through distributed shared memory, and each adds up
one half of the head for both: half as many additions.

Each of the two multiplying warpgroups has half of the keys for Q K^T and dO V^T. For the products dV^T = dO^T P and
dK^T = Q^T dS it has half of the head, where that comes in rows of 64, which reads least of shared memory, else half of
the keys. P and dS pass through shared memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cudnn_kernels.attention import BackwardConfiguration
from cudnn_kernels.attention.around import Values
from cudnn_kernels.attention.sequences import turned
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.sm90.attention_backward import GROUP, GROUPS, ROWS, STAGES, Backward, Block, Box


class PairedBackward(Backward):
    """The kernel of which two CTAs exchange dS."""

    cluster, stages, copies_values = 2, 1, False

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        self.half_n, self.half_d = self.n // GROUPS, self.c.head // 2
        self.dq_width, self.assistants = self.half_d // GROUPS, int(self.c.deterministic)

    def boxes(self) -> dict[str, Box]:
        """With half of the head of the other CTA's K."""
        return super().boxes() | {"peer_k": Box("k", self.n, self.half_d, self.dq_width)}

    def keys_fetched(self, block: Block, rank: Any) -> dict[str, tuple[Any, int]]:
        other = (block.key + (1 - 2 * rank) * self.n, rank * self.half_d)
        return super().keys_fetched(block, rank) | {"peer_k": other}

    def more_buffers(self, smem: Any) -> dict[str, cute.Tensor]:
        """P^T and dS^T: (keys, queries), queries in rows."""
        return {x: self.allocate(smem, self.tile(self.n, self.m)) for x in ("p", "ds", "peer_ds")}

    def more_barriers(self) -> dict[str, tuple[int, int]]:
        found = {"peer_full": (1, 1), "peer_empty": (1, 4 * GROUPS)}
        return found | ({"turn": (1, 1), "added": (1, 4 * GROUPS)} if self.c.deterministic else {})

    def result_part(self, buffer: cute.Tensor, group: Int32) -> tuple[cute.Tensor, bool, int]:
        head = cute.size(buffer, mode=[1])
        return cute.local_tile(turned(buffer), *self.share(head, group)), True, 2

    def score_mma(self) -> cute.TiledMma:
        """Q K^T and dO V^T: rows are queries, columns a warpgroup's half of the keys."""
        return self.mma(self.half_n, OperandMajorMode.K, OperandMajorMode.K)

    def share(self, head: int, group: Any = 0) -> tuple[tuple[int, int], tuple[Any, Any]]:
        """A warpgroup's part of dV^T or dK^T: so many of the head's elements and keys, and which ones."""
        if head % (GROUPS * ROWS) == 0:
            return (head // GROUPS, self.n), (group, 0)
        return (head, self.half_n), (0, group)

    def key_mma(self, head: int) -> cute.TiledMma:
        """dV^T = dO^T P and dK^T = Q^T dS: rows are the head's elements, columns keys."""
        return self.mma(self.share(head)[0][1], OperandMajorMode.MN, OperandMajorMode.K)

    def key_operands(
        self, mma: cute.TiledMma, rows: cute.Tensor, scores: cute.Tensor, group: Int32, thread: Int32
    ) -> Any:  # fmt: skip
        """Those of a warpgroup's part of dV^T or dK^T, from dO or Q, (m, head, stage), and P or dS."""
        head, part = cute.size(rows, mode=[1]), mma.get_slice(thread)
        (elements, keys), (i, j) = self.share(head, group)
        a = cute.local_tile(turned(rows), (elements, self.m), (i, 0, None)[: cute.rank(rows)])
        b = cute.local_tile(scores, (keys, self.m), (j, 0))
        return mma.make_fragment_A(part.partition_A(a)), mma.make_fragment_B(part.partition_B(b))

    def query_mma(self) -> cute.TiledMma:
        """dQ = dS K: columns are a quarter of the head."""
        return self.mma(self.dq_width, OperandMajorMode.MN, OperandMajorMode.MN)

    @cute.jit
    def consume(
        self, buffers: Any, barriers: Any, dk: cute.Tensor, dv: cute.Tensor, values: Values, block: Block,
        group_heads: Int32, scale: Float32, rank: Int32, group: Int32, thread256: Int32,
    ) -> None:  # fmt: skip
        c = self.c
        thread = thread256 - group * GROUP
        score_mma, query_mma = self.score_mma(), self.query_mma()
        dk_mma, dv_mma = self.key_mma(c.head), self.key_mma(c.head_v)
        score, query = score_mma.get_slice(thread), query_mma.get_slice(thread)
        tSrQ, tSrdO = (score_mma.make_fragment_A(score.partition_A(buffers[x])) for x in ("q", "do"))
        halves = (("k", c.head), ("v", c.head_v))
        sK, sV = (cute.local_tile(buffers[x], (self.half_n, head), (group, 0)) for x, head in halves)
        tSrK, tSrV = (score_mma.make_fragment_B(score.partition_B(x)) for x in (sK, sV))
        tKrQ, tKrS = self.key_operands(dk_mma, buffers["q"], buffers["ds"], group, thread)
        tVrdO, tVrP = self.key_operands(dv_mma, buffers["do"], buffers["p"], group, thread)
        mine = (self.dq_width, self.n)
        tQrK, tQrPeerK = (
            query_mma.make_fragment_B(query.partition_B(cute.local_tile(turned(buffers[x]), mine, (part, 0))))
            for x, part in (("k", rank * GROUPS + group), ("peer_k", group))
        )
        tQrS, tQrPeerS = (query_mma.make_fragment_A(query.partition_A(turned(buffers[x]))) for x in ("ds", "peer_ds"))
        scores, gradients = (
            cute.make_rmem_tensor(score_mma.partition_shape_C((self.m, self.half_n)), Float32) for _ in range(2)
        )
        acc_dk, acc_dv = (
            cute.make_rmem_tensor(mma.partition_shape_C(self.share(head)[0]), Float32)
            for mma, head in ((dk_mma, c.head), (dv_mma, c.head_v))
        )
        acc_dq = cute.make_rmem_tensor(query_mma.partition_shape_C((self.m, self.dq_width)), Float32)
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
            self.hide(scores, mask, m_block * self.m, first_key, self.half_n)
            for slot in cutlass.range_constexpr(2):
                for i in self.rows.order(self.half_n, slot):
                    scores[i] = cute.math.exp2(scores[i] * scale_log2 - row_sums[slot], fastmath=True)
            self.put(score_mma, self.rounded(scores), sP, True, 2, thread)
            cute.arch.fence_proxy("async.shared", space="cta")
            self.all_multiplying()
            self.multiply(self.key_mma(c.head_v), acc_dv, tVrdO, tVrP, True)
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
            self.multiply(self.key_mma(c.head), acc_dk, tKrQ[None, None, None, stage], tKrS, True)
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
            sums = values.dq_sums[(None, None, *self.place(block, step, steps, group_heads))]
            self.add(acc_dq, sums, rank * GROUPS + group, thread)
            warpgroup.wait_group(0)  # in flight over the end of a loop, ptxas would let products wait for each other
        if const_expr(c.deterministic):
            self.added(added)
        self.finish(((acc_dk, dk_mma, dk), (acc_dv, dv_mma, dv)), buffers, block, scale, group, thread256)

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
    def assist(
        self, buffers: Any, barriers: Any, values: Values, block: Block, group_heads: Int32, rank: Int32, part: Int32
    ) -> None:  # fmt: skip
        """One warp: says when it is the turn of this CTA's half of dQ, and then that of the step before is over."""
        steps = block.end - block.begin
        total, mask = steps * group_heads, replace(block.mask)
        for step in cutlass.range(total + cutlass.min(total, 1), unroll=1):
            used, before = cutlass.min(step, total - 1), cutlass.max(step - 1, 0)  # the last turn is its own still
            turn = self.turn(mask, block, block.begin + used % steps)
            self.wait_for_turn(values.turns[(None, *self.place(block, used, steps, group_heads))], rank, turn)
            cute.arch.sync_warp()
            cute.arch.mbarrier_wait(barriers["added"], step % 2)
            self.release(barriers["turn"])
            with cute.arch.elect_one():
                turns = values.turns[(None, *self.place(block, before, steps, group_heads))]
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
        m_block, head, batch = self.place(block, step, steps, group_heads)
        for slot in cutlass.range_constexpr(2):
            row = m_block * self.m + self.rows.row(thread, slot)
            row_sums[slot] = values.log_sums[row, head, batch]
            row_products[slot] = values.products[row, head, batch]
