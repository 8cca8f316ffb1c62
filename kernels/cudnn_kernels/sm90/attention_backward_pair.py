"""Attention on Hopper, backward, for heads of over 128 elements: pairs of CTAs share the additions of dQ.

The additions to dQ's sums are what limits backward passes with large heads, of whose keys a CTA can have but few. So
two CTAs with neighbouring blocks of keys send each other their dS through distributed shared memory, and each adds up
one half of the head for both: half as many additions.

Each of the two multiplying warpgroups has half of the keys for Q K^T and dO V^T. For the products dV^T = dO^T P and
dK^T = Q^T dS it has half of the head, where that comes in rows of 64, which reads least of shared memory, else half of
the keys. P and dS pass through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from cudnn_kernels.attention import BackwardConfiguration
from cudnn_kernels.attention.around import Values
from cudnn_kernels.attention.backward import Block, place_of
from cudnn_kernels.attention.softmax import Scale, cap
from cudnn_kernels.pipeline.arrange import turned
from cudnn_kernels.pipeline.barriers import arrive_once
from cudnn_kernels.pipeline.wgmma import MN, Product
from cudnn_kernels.sm90.attention_backward import GROUP, GROUPS, ROWS, STAGES, Backward, Box

FIRST, REST = slice(2), slice(2, None)  # instructions of a product that a warp can issue at once, and the others


class PairedBackward(Backward):
    """The kernel of which two CTAs exchange dS.

    Rows of S and dP are queries, columns a warpgroup's half of the keys; columns of dQ are a quarter of the head; rows
    of dV^T = dO^T P and dK^T = Q^T dS are the head's elements, columns keys.
    """

    cluster, stages, matrices, copies_values, transposed = 2, 1, 2, False, True

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = self.c
        self.half_n, self.half_d = self.n // GROUPS, c.head // 2
        self.dq_width, self.assistants = self.half_d // GROUPS, int(c.deterministic)
        self.score, self.query = Product(self.dtype, self.half_n), Product(self.dtype, self.dq_width, a=MN, b=MN)
        shares = [self.share(head)[0] for head in (c.head, c.head_v)]
        self.dk, self.dv = (Product(self.dtype, keys, elements, a=MN) for elements, keys in shares)

    def boxes(self) -> dict[str, Box]:
        """With half of the head of the other CTA's K."""
        return super().boxes() | {"peer_k": Box("k", self.n, self.half_d, self.dq_width)}

    def keys_fetched(self, block: Block, rank: Any) -> dict[str, tuple[Any, int]]:
        other = (block.row + (1 - 2 * rank) * self.n, rank * self.half_d)
        return super().keys_fetched(block, rank) | {"peer_k": other}

    def more_buffers(self, smem: Any) -> dict[str, cute.Tensor]:
        """P^T and dS^T: (keys, queries), queries in rows; and how many CTAs have added to dQ before this one."""
        found = {x: self.allocate(smem, self.tile(self.n, self.m)) for x in ("p", "ds", "peer_ds")}
        return found | {"before": smem.allocate_tensor(Int32, cute.make_layout(1))}

    def more_barriers(self) -> dict[str, tuple[int, int]]:
        found = {"peer_full": (1, 1), "peer_empty": (1, 4 * GROUPS)}
        return found | ({"turn": (1, 1), "added": (1, 4 * GROUPS)} if self.c.deterministic else {})

    def share(self, head: int, group: Any = 0) -> tuple[tuple[int, int], tuple[Any, Any]]:
        """A warpgroup's part of dV^T or dK^T: so many of the head's elements and keys, and which ones."""
        if head % (GROUPS * ROWS) == 0:
            return (head // GROUPS, self.n), (group, 0)
        return (head, self.half_n), (0, group)

    def result_part(self, buffer: cute.Tensor, group: Int32) -> cute.Tensor:
        return cute.local_tile(turned(buffer), *self.share(cute.size(buffer, mode=[1]), group))

    def key_operands(self, product: Product, rows: cute.Tensor, p: cute.Tensor, group: Int32, thread: Int32) -> Any:
        """Those of a warpgroup's part of dV^T or dK^T, from dO or Q, (m, head, stage), and P or dS."""
        (elements, keys), (i, j) = self.share(cute.size(rows, mode=[1]), group)
        a = cute.local_tile(turned(rows), (elements, self.m), (i, 0, None)[: cute.rank(rows)])
        return product.left(a, thread), product.right(cute.local_tile(p, (keys, self.m), (j, 0)), thread)

    @cute.jit
    def consume(
        self,
        shared: Any,
        values: Values,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Scale,
        rank: Int32,
        block: Block,
        before: Any,
        blocks: Any,
    ) -> None:
        """A warpgroup that multiplies."""
        c, (group, thread) = self.c, self.multiplying()
        tSrQ, tSrdO = (self.score.left(shared[x], thread) for x in ("q", "do"))
        halves = (("k", c.head), ("v", c.head_v))
        sK, sV = (cute.local_tile(shared[x], (self.half_n, head), (group, 0)) for x, head in halves)
        tSrK, tSrV = (self.score.right(x, thread) for x in (sK, sV))
        tKrQ, tKrS = self.key_operands(self.dk, shared["q"], shared["ds"], group, thread)
        tVrdO, tVrP = self.key_operands(self.dv, shared["do"], shared["p"], group, thread)
        mine = (self.dq_width, self.n)
        tQrK, tQrPeerK = (
            self.query.right(cute.local_tile(turned(shared[x]), mine, (part, 0)), thread)
            for x, part in (("k", rank * GROUPS + group), ("peer_k", group))
        )
        tQrS, tQrPeerS = (self.query.left(turned(shared[x]), thread) for x in ("ds", "peer_ds"))
        scores, gradients = self.score.accumulator(), self.score.accumulator()
        acc_dk, acc_dv, acc_dq = self.dk.accumulator(), self.dv.accumulator(), self.query.accumulator()
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        log_sums, products = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        sP, sdS = (cute.local_tile(turned(shared[x]), (self.m, self.half_n), (0, group)) for x in ("p", "ds"))
        (scale_log2, factor), p = scale.powers(), self.place_for_p(scores)
        first_key = block.row + group * self.half_n
        q_full, q_empty, peer_full, peer_empty = (shared[x] for x in ("q_full", "q_empty", "peer_full", "peer_empty"))
        mask = block.mask.turned()  # of the loop's own: a branch in it rebinds the values of what it uses
        if block.steps > 0:
            cute.arch.mbarrier_wait(shared["kv_full"], 0)
            cute.arch.mbarrier_wait(q_full, 0)
            self.score.issue(scores, tSrQ[None, None, None, 0], tSrK, False)
            warpgroup.wait_group(0)
            self.load_rows(values, log_sums, products, block, 0, thread)
        for step in cutlass.range(block.steps, unroll=1):
            m_block = place_of(block, step)[1]
            stage, phase = step % STAGES, step % 2
            cute.arch.mbarrier_wait(shared["do_full"], phase)
            self.score.issue(gradients, tSrdO, tSrV, False, FIRST)
            cap(scores, factor)
            self.hide(scores, mask, m_block * self.m, first_key)
            powers = self.exponentials(scores, p, scale_log2, log_sums)
            self.score.issue(gradients, tSrdO, tSrV, True, REST, powers)
            self.score.put(self.rounded(p), sP, thread, True, self.matrices)
            self.all_multiplying()
            self.dv.issue(acc_dv, tVrdO, tVrP, True)
            warpgroup.wait_group(1)
            self.differentiate(gradients, scores, products)
            self.load_rows(values, log_sums, products, block, cutlass.min(step + 1, block.steps - 1), thread)
            cute.arch.mbarrier_wait(peer_empty, phase ^ 1)  # the other CTA has what dS was before
            self.score.put(self.rounded(gradients), sdS, thread, True, self.matrices)
            self.all_multiplying()
            if group * GROUP + thread < 32:
                self.send(shared["ds"], shared["peer_ds"], peer_full, rank)
            sums = values.dq_sums[(None, None, *self.place(block, step))]
            additions = self.additions(acc_dq, sums, rank * GROUPS + group, thread)
            self.query.issue(acc_dq, tQrS, tQrK, False)
            warpgroup.wait_group(1)
            arrive_once(shared["do_empty"])  # as early as can be: there is but one buffer
            self.dk.issue(acc_dk, tKrQ[None, None, None, stage], tKrS, True)
            cute.arch.mbarrier_wait(peer_full, phase)
            self.query.issue(acc_dq, tQrPeerS, tQrPeerK, True)
            following = (step + 1) % STAGES
            cute.arch.mbarrier_wait(q_full + following, (step + 1) // STAGES % 2)
            rows = tSrQ[None, None, None, following]
            self.score.issue(scores, rows, tSrK, False, FIRST)
            warpgroup.wait_group(1)
            arrive_once(q_empty + stage)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(peer_empty, 1 - rank)
            if const_expr(c.deterministic):
                cute.arch.mbarrier_wait(shared["turn"], phase)
                before = shared["before"][0]
                additions = [partial(work, before) for work in additions]
            self.score.issue(scores, rows, tSrK, True, REST, additions)
            if const_expr(c.deterministic):
                cute.arch.sync_warp()
                arrive_once(shared["added"])
            warpgroup.wait_group(0)  # in flight over the end of a loop, ptxas would let products wait for each other
        self.finish(shared, values, block, {"k": (acc_dk, dk), "v": (acc_dv, dv)}, scale, rank)

    def exponentials(
        self, scores: cute.Tensor, p: cute.Tensor, scale: Float32, log_sums: cute.Tensor
    ) -> Sequence[Callable[[], None]]:
        """Work: makes P of scores, four at a time."""
        found = list(self.each(log_sums))
        return [partial(self.exponentiate, scores, p, scale, found[i : i + 4]) for i in range(0, len(found), 4)]

    def additions(
        self, acc: cute.Tensor, sums: cute.Tensor, part: Int32, thread: Int32
    ) -> Sequence[Callable[..., None]]:
        """Work: adds a part of dQ to a block's sums, four values of a thread at a time, threads next to each other.

        Straight from registers: the copy engine's additions from shared memory made the kernel a tenth slower.
        """
        vectors = cute.size(acc) // 4
        places = [cute.domain_offset((thread * 4, part * vectors + i), sums).iterator for i in range(vectors)]
        return [partial(self.add, place, acc, 4 * i) for i, place in enumerate(places)]

    def add(self, place: Any, acc: cute.Tensor, first: int, before: Int32 | None = None) -> None:
        """Adds four accumulators to what is in global memory, or, where none came ``before``, stores them."""
        to, values = "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [acc[first + i] for i in range(4)]
        add = f"red.global.add.v4.f32 {to}"
        if self.c.stores_first:
            add = f"{{ .reg .pred p; setp.eq.s32 p, {{$r5}}, 0; @p st.global.v4.f32 {to} @!p {add} }}"
            values.append(before)
        cute.arch.inline_ptx(add, read_only_args=[place.toint(), *values])

    @cute.jit
    def assist(
        self, shared: Any, values: Values, rank: Int32, part: Int32, block: Block, before: Any, blocks: Any
    ) -> None:
        """One warp: says when it is the turn of this CTA's half of dQ, and, when all have added, that it is over."""
        mask = block.mask.turned()
        for step in cutlass.range(block.steps, unroll=1):
            turns = values.turns[(None, *self.place(block, step))]
            turn = self.turn(mask, block, place_of(block, step)[1])
            self.wait_for_turn(turns, rank, turn)
            with cute.arch.elect_one():
                shared["before"][0] = turn
            cute.arch.sync_warp()
            arrive_once(shared["turn"])
            cute.arch.mbarrier_wait(shared["added"], step % 2)
            with cute.arch.elect_one():  # it releases what others did before they arrived, too
                self.end_turn(turns, rank)
            cute.arch.sync_warp()

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
        self, values: Values, log_sums: cute.Tensor, products: cute.Tensor, block: Block, step: Any, thread: Int32
    ) -> None:
        """LSE and D of a thread's rows, long before they are needed."""
        m_block, head, batch = self.place(block, step)
        for slot in cutlass.range_constexpr(2):
            row = m_block * self.m + self.rows.row(thread, slot)
            log_sums[slot] = values.log_sums[row, head, batch]
            products[slot] = values.products[row, head, batch]

    def each(self, values: cute.Tensor) -> Iterator[tuple[int, Float32]]:
        """A thread's sums, each with the value of its row: of each eight columns two, in both rows."""
        for first in range(0, self.half_n // 4, 2):
            for slot in range(2):
                for i in self.rows.order(self.half_n, slot)[first : first + 2]:
                    yield i, values[slot]
