"""Attention backward on Hopper for head_dim above 128: CTA pairs exchange dS, which halves the atomics of dQ.

With large heads, a CTA's n_block is small, and the float32 additions to dq_accum limit the kernel. So the two CTAs of a
cluster, with adjacent n_blocks, send each other dS through distributed shared memory (cp.async.bulk to
shared::cluster), and each computes half of the head of dQ for both n_blocks: dQ[:, half] = dS K[:, half] + dS_peer
K_peer[:, half].

Each of the two MMA warpgroups has half of the keys of S = Q K^T and dP = dO V^T (queries are rows). P and dS go through
shared memory. dV^T = dO^T P and dK^T = Q^T dS: a warpgroup has half of the head (in multiples of 64 rows), which reads
least of shared memory, else half of the keys.

Mbarriers besides those of :mod:`cudnn_kernels.sm90.attention_backward`: ``peer_full`` (bytes of the peer's dS),
``peer_empty`` (the peer's MMA warps have read it), and if deterministic ``turn`` and ``added`` between the MMA
warpgroups and the semaphore warp.
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
from cudnn_kernels.attention.backward import BlockInfo, step_coord
from cudnn_kernels.attention.flash_bwd_preprocess import BwdWorkspace
from cudnn_kernels.attention.softmax import Scale, apply_softcap
from cudnn_kernels.pipeline.barriers import elect_arrive
from cudnn_kernels.pipeline.scale_factor_atoms import transposed
from cudnn_kernels.pipeline.wgmma import MN, WarpgroupMma
from cudnn_kernels.sm90.attention_backward import NUM_MMA_WARPGROUPS, STAGES, WGMMA_M, Backward, SmemTile
from cudnn_kernels.threads import WARPGROUP_SIZE

# k-blocks that a warp issues without a stall, and the remaining ones.
FIRST_KBLOCKS, REMAINING_KBLOCKS = (
    slice(2),
    slice(2, None),
)


class PairedBackward(Backward):
    """The kernel in which two CTAs exchange dS.

    Rows of S and dP are queries, columns a warpgroup's half of the keys; columns of dQ are a quarter of the head; rows
    of dV^T = dO^T P and dK^T = Q^T dS are elements of the head, columns keys.
    """

    cluster, stages, stmatrix_count, loads_row_stats, transposed = 2, 1, 2, False, True

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = self.c
        self.half_n, self.half_d = self.n // NUM_MMA_WARPGROUPS, c.head_dim // 2
        self.dq_width, self.num_store_warps = self.half_d // NUM_MMA_WARPGROUPS, int(c.deterministic)
        self.mma_s = WarpgroupMma(self.dtype, self.half_n)
        self.mma_dq = WarpgroupMma(self.dtype, self.dq_width, a=MN, b=MN)
        tiles = [self.dkv_tile(head)[0] for head in (c.head_dim, c.head_dim_v)]
        self.mma_dk, self.mma_dv = (WarpgroupMma(self.dtype, keys, elements, a=MN) for elements, keys in tiles)

    def smem_tiles(self) -> dict[str, SmemTile]:
        """Also half of the head of the peer CTA's K."""
        return super().smem_tiles() | {"peer_k": SmemTile("k", self.n, self.half_d, self.dq_width)}

    def kv_coords(self, block: BlockInfo, rank: Any) -> dict[str, tuple[Any, int]]:
        peer_coord = (block.row + (1 - 2 * rank) * self.n, rank * self.half_d)
        return super().kv_coords(block, rank) | {"peer_k": peer_coord}

    def extra_smem(self, allocator: Any) -> dict[str, cute.Tensor]:
        """P^T and dS^T: (keys, queries), queries contiguous; and how many CTAs have added to dQ before this one."""
        buffers = {x: self.allocate_tile(allocator, self.smem_layout(self.n, self.m)) for x in ("p", "ds", "peer_ds")}
        return buffers | {"n_blocks_before": allocator.allocate_tensor(Int32, cute.make_layout(1))}

    def extra_barriers(self) -> dict[str, tuple[int, int]]:
        counts = {"peer_full": (1, 1), "peer_empty": (1, 4 * NUM_MMA_WARPGROUPS)}
        return counts | ({"turn": (1, 1), "added": (1, 4 * NUM_MMA_WARPGROUPS)} if self.c.deterministic else {})

    def dkv_tile(self, head_dim: int, wg_idx: Any = 0) -> tuple[tuple[int, int], tuple[Any, Any]]:
        """A warpgroup's tile of dV^T or dK^T: (elements of the head, keys), and its coordinate."""
        if head_dim % (NUM_MMA_WARPGROUPS * WGMMA_M) == 0:
            return (head_dim // NUM_MMA_WARPGROUPS, self.n), (wg_idx, 0)
        return (head_dim, self.half_n), (0, wg_idx)

    def warpgroup_tile(self, buffer: cute.Tensor, wg_idx: Int32) -> cute.Tensor:
        return cute.local_tile(transposed(buffer), *self.dkv_tile(cute.size(buffer, mode=[1]), wg_idx))

    def dkv_operands(self, mma: WarpgroupMma, rows: cute.Tensor, sP: cute.Tensor, wg_idx: Int32, thread: Int32) -> Any:
        """The operands of a warpgroup's tile of dV^T or dK^T: dO or Q, (m, head_dim, stage), and P or dS."""
        (elements, keys), (i, j) = self.dkv_tile(cute.size(rows, mode=[1]), wg_idx)
        a = cute.local_tile(transposed(rows), (elements, self.m), (i, 0, None)[: cute.rank(rows)])
        return mma.fragment_a(a, thread), mma.fragment_b(cute.local_tile(sP, (keys, self.m), (j, 0)), thread)

    @cute.jit
    def mma(
        self,
        smem: Any,
        workspace: BwdWorkspace,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Scale,
        rank: Int32,
        block: BlockInfo,
        steps_done: Any,
        tiles_done: Any,
    ) -> None:
        """An MMA warpgroup."""
        c, (wg_idx, thread) = self.c, self.mma_thread()
        tSrQ, tSrdO = (self.mma_s.fragment_a(smem[x], thread) for x in ("q", "do"))
        head_dims = (("k", c.head_dim), ("v", c.head_dim_v))
        sK, sV = (cute.local_tile(smem[x], (self.half_n, head), (wg_idx, 0)) for x, head in head_dims)
        tSrK, tSrV = (self.mma_s.fragment_b(x, thread) for x in (sK, sV))
        tKrQ, tKrdS = self.dkv_operands(self.mma_dk, smem["q"], smem["ds"], wg_idx, thread)
        tVrdO, tVrP = self.dkv_operands(self.mma_dv, smem["do"], smem["p"], wg_idx, thread)
        dq_tile = (self.dq_width, self.n)
        tQrK, tQrPeerK = (
            self.mma_dq.fragment_b(cute.local_tile(transposed(smem[x]), dq_tile, (slice_idx, 0)), thread)
            for x, slice_idx in (("k", rank * NUM_MMA_WARPGROUPS + wg_idx), ("peer_k", wg_idx))
        )
        tQrdS, tQrPeerdS = (self.mma_dq.fragment_a(transposed(smem[x]), thread) for x in ("ds", "peer_ds"))
        acc_S, acc_dP = self.mma_s.accumulator(), self.mma_s.accumulator()
        acc_dk, acc_dv, acc_dq = self.mma_dk.accumulator(), self.mma_dv.accumulator(), self.mma_dq.accumulator()
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        lse_log2, dpsum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        sP, sdS = (cute.local_tile(transposed(smem[x]), (self.m, self.half_n), (0, wg_idx)) for x in ("p", "ds"))
        (scale_log2, softcap_scale), acc_P = scale.log2_scales(), self.p_registers(acc_S)
        first_key = block.row + wg_idx * self.half_n
        q_full, q_empty, peer_full, peer_empty = (smem[x] for x in ("q_full", "q_empty", "peer_full", "peer_empty"))
        mask = block.mask.transposed()  # a copy for the loop: a branch in it rebinds the fields
        if block.num_steps > 0:
            cute.arch.mbarrier_wait(smem["kv_full"], 0)
            cute.arch.mbarrier_wait(q_full, 0)
            self.mma_s.issue(acc_S, tSrQ[None, None, None, 0], tSrK, False)
            warpgroup.wait_group(0)
            self.load_row_stats_gmem(workspace, lse_log2, dpsum, block, 0, thread)
        for step in cutlass.range(block.num_steps, unroll=1):
            m_block = step_coord(block, step)[1]
            stage, phase = step % STAGES, step % 2
            # (1) dP = dO V^T, interleaved with P = exp2(scale S - LSE): S is from the previous iteration.
            cute.arch.mbarrier_wait(smem["do_full"], phase)
            self.mma_s.issue(acc_dP, tSrdO, tSrV, False, FIRST_KBLOCKS)
            apply_softcap(acc_S, softcap_scale)
            self.apply_mask(acc_S, mask, m_block * self.m, first_key)
            p_work = self.p_work(acc_S, acc_P, scale_log2, lse_log2)
            self.mma_s.issue(acc_dP, tSrdO, tSrV, True, REMAINING_KBLOCKS, p_work)
            # (2) P to shared memory; dV^T += dO^T P.
            self.mma_s.r2s(self.convert(acc_P), sP, thread, True, self.stmatrix_count)
            self.sync_mma_warpgroups()
            self.mma_dv.issue(acc_dv, tVrdO, tVrP, True)
            warpgroup.wait_group(1)
            # (3) dS = P * (dP - dPsum), to shared memory, and to the peer CTA's.
            self.compute_ds(acc_dP, acc_S, dpsum)
            self.load_row_stats_gmem(
                workspace, lse_log2, dpsum, block, cutlass.min(step + 1, block.num_steps - 1), thread
            )
            cute.arch.mbarrier_wait(peer_empty, phase ^ 1)  # the peer CTA has read the previous dS
            self.mma_s.r2s(self.convert(acc_dP), sdS, thread, True, self.stmatrix_count)
            self.sync_mma_warpgroups()
            if wg_idx * WARPGROUP_SIZE + thread < 32:
                self.send_ds(smem["ds"], smem["peer_ds"], peer_full, rank)
            dq_accum = workspace.dq_accum[(None, None, *self.workspace_coord(block, step))]
            dq_atomics = self.dq_atomics(acc_dq, dq_accum, rank * NUM_MMA_WARPGROUPS + wg_idx, thread)
            # (4) dQ = dS K, of half of the head.
            self.mma_dq.issue(acc_dq, tQrdS, tQrK, False)
            warpgroup.wait_group(1)
            elect_arrive(smem["do_empty"])  # as early as possible: dO has one stage
            # (5) dK^T += Q^T dS.
            self.mma_dk.issue(acc_dk, tKrQ[None, None, None, stage], tKrdS, True)
            # (6) dQ += dS_peer K_peer.
            cute.arch.mbarrier_wait(peer_full, phase)
            self.mma_dq.issue(acc_dq, tQrPeerdS, tQrPeerK, True)
            # (7) S of the next m_block, interleaved with the atomic adds of dQ to dq_accum.
            next_stage = (step + 1) % STAGES
            cute.arch.mbarrier_wait(q_full + next_stage, (step + 1) // STAGES % 2)
            next_Q = tSrQ[None, None, None, next_stage]
            self.mma_s.issue(acc_S, next_Q, tSrK, False, FIRST_KBLOCKS)
            warpgroup.wait_group(1)
            elect_arrive(q_empty + stage)
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(peer_empty, 1 - rank)
            if const_expr(c.deterministic):
                cute.arch.mbarrier_wait(smem["turn"], phase)
                n_blocks_before = smem["n_blocks_before"][0]
                dq_atomics = [partial(atomic, n_blocks_before) for atomic in dq_atomics]
            self.mma_s.issue(acc_S, next_Q, tSrK, True, REMAINING_KBLOCKS, dq_atomics)
            if const_expr(c.deterministic):
                cute.arch.sync_warp()
                elect_arrive(smem["added"])
            warpgroup.wait_group(0)  # ptxas serializes wgmmas that are in flight across iterations
        self.epilogue(smem, workspace, block, {"k": (acc_dk, dk), "v": (acc_dv, dv)}, scale, rank)

    def p_work(
        self, acc_S: cute.Tensor, acc_P: cute.Tensor, scale_log2: Float32, lse_log2: cute.Tensor
    ) -> Sequence[Callable[[], None]]:
        """Work items to interleave with a GEMM's instructions: P of four elements of S each."""
        elements = list(self.with_row_values(lse_log2))
        return [
            partial(self.compute_p, acc_S, acc_P, scale_log2, elements[i : i + 4]) for i in range(0, len(elements), 4)
        ]

    def dq_atomics(
        self, acc_dQ: cute.Tensor, dq_accum: cute.Tensor, slice_idx: Int32, thread: Int32
    ) -> Sequence[Callable[..., None]]:
        """Work items: red.global.add of a slice of dQ, four values a thread, coalesced.

        Straight from registers: bulk reduce-adds from shared memory made the kernel 10 percent slower.
        """
        vectors = cute.size(acc_dQ) // 4
        pointers = [
            cute.domain_offset((thread * 4, slice_idx * vectors + i), dq_accum).iterator for i in range(vectors)
        ]
        return [partial(self.atomic_add, pointer, acc_dQ, 4 * i) for i, pointer in enumerate(pointers)]

    def atomic_add(self, pointer: Any, acc_dQ: cute.Tensor, first: int, n_blocks_before: Int32 | None = None) -> None:
        """Adds four accumulators to global memory, or stores them if no n_block came before."""
        operands, values = "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", [acc_dQ[first + i] for i in range(4)]
        instruction = f"red.global.add.v4.f32 {operands}"
        if self.c.first_cta_stores_dq:
            instruction = (
                f"{{ .reg .pred p; setp.eq.s32 p, {{$r5}}, 0; @p st.global.v4.f32 {operands} @!p {instruction} }}"
            )
            values.append(n_blocks_before)
        cute.arch.inline_ptx(instruction, read_only_args=[pointer.toint(), *values])

    @cute.jit
    def store_dq(
        self,
        smem: Any,
        workspace: BwdWorkspace,
        rank: Int32,
        store_warp: Int32,
        block: BlockInfo,
        steps_done: Any,
        tiles_done: Any,
    ) -> None:
        """Semaphore warp (deterministic): waits for this CTA's turn at half of dQ, and signals when all its warps have
        added.
        """
        mask = block.mask.transposed()
        for step in cutlass.range(block.num_steps, unroll=1):
            semaphore = workspace.dq_semaphore[(None, *self.workspace_coord(block, step))]
            n_blocks_before = self.semaphore_turn(mask, block, step_coord(block, step)[1])
            self.wait_semaphore(semaphore, rank, n_blocks_before)
            with cute.arch.elect_one():
                smem["n_blocks_before"][0] = n_blocks_before
            cute.arch.sync_warp()
            elect_arrive(smem["turn"])
            cute.arch.mbarrier_wait(smem["added"], step % 2)
            with cute.arch.elect_one():  # release is cumulative: it covers the additions of the warps that arrived
                self.signal_semaphore(semaphore, rank)
            cute.arch.sync_warp()

    @cute.jit
    def send_ds(self, sdS: cute.Tensor, sPeerS: cute.Tensor, peer_full: Any, rank: Int32) -> None:
        """One warp copies dS to the peer CTA's shared memory."""
        size = self.n * self.m * self.dtype.width // 8
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(peer_full, size)
            peer = 1 - rank
            target = cute.arch.map_dsmem_ptr(sPeerS.iterator, peer).toint()
            peer_full_ptr = cute.arch.map_dsmem_ptr(peer_full, peer).toint()
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[target, sdS.iterator.toint(), Int32(size), peer_full_ptr],
            )

    @cute.jit
    def load_row_stats_gmem(
        self,
        workspace: BwdWorkspace,
        lse_log2: cute.Tensor,
        dpsum: cute.Tensor,
        block: BlockInfo,
        step: Any,
        thread: Int32,
    ) -> None:
        """LSE and dPsum of a thread's rows, an iteration before their use."""
        m_block, head, batch = self.workspace_coord(block, step)
        for slot in cutlass.range_constexpr(2):
            row = m_block * self.m + self.rows.row(thread, slot)
            lse_log2[slot] = workspace.lse_log2[row, head, batch]
            dpsum[slot] = workspace.dpsum[row, head, batch]

    def with_row_values(self, values: cute.Tensor) -> Iterator[tuple[int, Float32]]:
        """A thread's elements, each with the value of its row: two of each eight columns, in both rows."""
        for first in range(0, self.half_n // 4, 2):
            for slot in range(2):
                for i in self.rows.order(self.half_n, slot)[first : first + 2]:
                    yield i, values[slot]
