"""Attention backward on Hopper: dQ, dK and dV in one kernel, FlashAttention-3 style.

    S = Q K^T, P = exp(scale S - LSE), dP = dO V^T, dS = P * (dP - dPsum), dPsum = rowsum(dO * O)
    dV = P^T dO, dK = scale dS^T Q, dQ = scale dS K

A CTA (or a cluster) owns an n_block of tile_n keys: dK and dV are accumulated in registers over all m_blocks of tile_m
query rows that see it, of all heads of Q that share its head of K. dQ is accumulated over CTAs in a float32 buffer in
global memory (dq_accum), which a postprocess kernel converts; a preprocess kernel computes dPsum and LSE * log2(e).

Warps: warpgroup 0 has 24 registers a thread: warp 0 issues TMA loads (K and V once per n_block; Q, dO and their row
values for each m_block), further warps issue bulk reduce-adds of dQ. Warpgroups 1 and 2 are MMA warpgroups with 64 keys
each: S^T = K Q^T and dP^T = V dO^T have keys as rows, so P^T and dS^T are register operands (RS wgmma) of dV and dK.
Only dS goes through shared memory, as an operand of dQ = dS K, of which each warpgroup computes half.

Pipelines: Q has 2 stages, dO 1 or 2; full mbarriers count TMA bytes, empty mbarriers have one arrival per MMA warp. K
and V have a full mbarrier. Each warpgroup's half of dQ has a full/empty pair between the MMA warpgroup and its store
warp.

Named barrier MMA_BARRIER synchronizes the two MMA warpgroups when dS (and P, in the pair kernel) are in shared memory.

``deterministic``: a semaphore per m_block orders the additions to dQ in the order in which CTAs start, so that a CTA
only waits for earlier ones: with a causal mask from the last n_block on, whose CTAs reach an m_block first, and without
from the first one on. The last section of heads has the first n_blocks first even so: these CTAs are the longest and
must not run alone at the end; they go through the m_blocks from the last one on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr, select_
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from cudnn_kernels.attention import BackwardConfiguration, seqlen_info
from cudnn_kernels.attention.backward import (
    BlockInfo,
    BwdSchedulerParams,
    SortBlocks,
    block_info,
    make_scheduler_params,
    split_block_info,
    step_coord,
)
from cudnn_kernels.attention.flash_bwd_postprocess import ConvertDQ, ReduceDKDV, store_rows
from cudnn_kernels.attention.flash_bwd_preprocess import BwdWorkspace, preprocess
from cudnn_kernels.attention.mask import Mask
from cudnn_kernels.attention.softmax import Scale, apply_softcap
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import barriers, mbarrier_pipeline
from cudnn_kernels.pipeline.cluster import Cluster, cluster_sync
from cudnn_kernels.pipeline.tma import cp_async_bulk, tma_load
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.pipeline.wgmma import MN, WarpgroupMma, WgmmaRows, opaque, register_operand
from cudnn_kernels.threads import WARPGROUP_SIZE

NUM_MMA_WARPGROUPS = 2
WGMMA_M = 64  # rows of a wgmma
NUM_REGS_LOAD, NUM_REGS_MMA = 24, 240  # setmaxnreg
MMA_BARRIER = 1  # named barrier of both MMA warpgroups
STAGES = 2  # of the Q pipeline, and of dO, LSE, dPsum and dS
SCHED_STAGES = 2
HEADS_PER_SECTION = 8
"""Heads of K whose first n_blocks start together: with a mask, so that no long CTA is last; with a semaphore, so that
few CTAs wait. Halved with CTA pairs, a quarter if these are ordered or start with the last n_blocks, except for a left
bound at head_dim 192. Several n_blocks of a head still run at the same time and find Q and dO in L2.
"""
L2_BYTES = 64 << 20  # of Q, dO and dq_accum of the heads that run at the same time if a semaphore orders dQ


@dataclass(frozen=True)
class SmemTile:
    """A tile in shared memory that TMA loads: rows and columns of a tensor.

    ``mma_columns``: the MMA takes the columns in parts of this width. ``stages``: buffers.
    """

    source: str
    rows: int
    columns: int
    mma_columns: int = 0
    stages: int = 1

    def bytes(self, dtype: Any) -> int:
        """Bytes of one stage."""
        return self.rows * self.columns * dtype.width // 8


class Backward(Kernel):
    """The common part of the kernels for a :class:`BackwardConfiguration`. ``cluster`` CTAs have adjacent n_blocks.

    A subclass has the MMAs ``mma_s``, ``mma_dq``, ``mma_dk`` and ``mma_dv``, ``extra_smem`` and ``extra_barriers``, the
    MMA warpgroups' ``mma``, the ``store_dq`` of each of ``num_store_warps`` warps, and ``warpgroup_tile``: an MMA
    warpgroup's part of dK's or dV's tile. ``stmatrix_count`` matrices per stmatrix; dK and dV are stored
    ``transposed``. ``qk_ahead``: S of the next m_block is computed at the end of an iteration. ``stages``: stages of
    dO. ``loads_row_stats``: bulk copies load LSE and dPsum.
    """

    cluster, stages, num_store_warps, stmatrix_count = 1, STAGES, NUM_MMA_WARPGROUPS, 4
    qk_ahead, loads_row_stats, transposed = True, True, False
    mma_s: WarpgroupMma
    mma_dq: WarpgroupMma
    mma_dk: WarpgroupMma
    mma_dv: WarpgroupMma

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.m, self.n = c.tile
        self.rows = WgmmaRows(slots=2)

    def heads_per_section(self, seqlen_q: Any) -> Any:
        """Heads of K in a section, with ``seqlen_q`` rows each: see ``HEADS_PER_SECTION``."""
        c = self.c
        in_order = c.deterministic or c.reverse_n_blocks
        reduced = in_order and not (c.left and c.head_dim == 192)
        max_heads = HEADS_PER_SECTION // self.cluster ** (1 + reduced) if c.right or c.compressed or in_order else 1
        if not c.deterministic:
            return max_heads
        heads_in_l2 = L2_BYTES // (2 * (c.head_dim + c.head_dim_v) + 4 * c.head_dim)
        return cutlass.min(max_heads, cutlass.max(heads_in_l2 // cutlass.max(Int32(seqlen_q), 1), 1))

    def smem_tiles(self) -> dict[str, SmemTile]:
        """The tiles that TMA loads, by name. K is also the B operand of dQ, in parts of ``dq_width`` columns."""
        c = self.c
        return {
            "q": SmemTile("q", self.m, c.head_dim, stages=STAGES),
            "do": SmemTile("do", self.m, c.head_dim_v, stages=self.stages),
            "k": SmemTile("k", self.n, c.head_dim, self.dq_width),
            "v": SmemTile("v", self.n, c.head_dim_v),
        }

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        # read before the launch: the DSL may replace them by the kernel's values
        cu_seqlens, scale, stream = arguments.get("cum_seqlen_q"), arguments["scale_softmax"], arguments["stream"]
        dq, workspace = seqlen_info.as_sdhb(arguments["dq"], c.varlen), preprocess(c, arguments)
        dq_accum, dq_semaphore = workspace.dq_accum, workspace.dq_semaphore
        self.launch_main(arguments, workspace)
        ConvertDQ(c).launch(dq_accum, dq_semaphore, dq, cu_seqlens, scale, stream)

    def launch_main(self, arguments: Mapping[str, Any], workspace: BwdWorkspace) -> None:
        """The main kernel, and the reduction of split n_blocks, on a call's arguments by name."""
        c, scale, stream = self.c, arguments["scale_softmax"], arguments["stream"]
        dk, dv = (seqlen_info.as_sdhb(arguments[name], c.varlen) for name in ("dk", "dv"))
        rows = (
            arguments["q"].shape[0] // seqlen_info.num_sequences(c, arguments) if c.varlen else arguments["q"].shape[2]
        )
        scheduler, clusters = make_scheduler_params(
            c, arguments, self.cluster * self.n, heads_per_section=self.heads_per_section(rows)
        )
        tma_atoms = [
            self.make_tma_atom(seqlen_info.ragged_tma_view(arguments[x.source], c.varlen), x)
            for x in self.smem_tiles().values()
        ]
        dkv_partial, scheduler_copy = workspace.dkv_partial, replace(scheduler)
        if const_expr(c.longest_first):
            scheduler.block_order = workspace.block_order
            SortBlocks(c).launch(replace(scheduler), stream)
        if c.dynamic_scheduler:
            clusters = cutlass.min(arguments["num_sms"], clusters)
        self.kernel(tma_atoms, dk, dv, replace(workspace), scheduler, Scale(scale, arguments.get("softcap"))).launch(
            grid=[self.cluster * clusters, 1, 1],
            block=[WARPGROUP_SIZE * (1 + NUM_MMA_WARPGROUPS), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )
        if const_expr(c.split):
            ReduceDKDV(c).launch(dkv_partial, dk, dv, scheduler_copy, scale, stream)

    @cute.kernel
    def kernel(
        self,
        tma_atoms: list,
        dk: cute.Tensor,
        dv: cute.Tensor,
        workspace: BwdWorkspace,
        scheduler: BwdSchedulerParams,
        scale: Scale,
    ) -> None:
        """Allocates shared memory and dispatches the warps to their roles."""
        thread, _, _ = cute.arch.thread_idx()
        warp_index = cute.arch.make_warp_uniform(thread // 32)
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(self.cluster > 1) else 0
        allocator = SmemAllocator()
        layouts = {
            x: self.smem_layout(smem_tile.rows, smem_tile.columns, smem_tile.stages, smem_tile.mma_columns)
            for x, smem_tile in self.smem_tiles().items()
        }
        smem = {x: self.allocate_tile(allocator, layout) for x, layout in layouts.items()} | self.extra_smem(allocator)
        mbarrier_counts = {
            f"{x}_{state}": (stages, count)
            for x, stages in (("q", STAGES), ("do", self.stages))
            for state, count in (("full", 1), ("empty", 4 * NUM_MMA_WARPGROUPS))
        }
        mbarrier_counts |= {"kv_full": (1, 1)} | (
            {"kv_empty": (1, 4 * NUM_MMA_WARPGROUPS)} if self.c.dynamic_scheduler else {}
        )
        smem |= self.allocate_barriers(allocator, mbarrier_counts | self.extra_barriers(), thread)
        if wg_idx == 0:
            cute.arch.setmaxregister_decrease(NUM_REGS_LOAD)
            if warp_index == 0:
                tma_atoms_by_name = dict(zip(self.smem_tiles(), tma_atoms, strict=True))
                self.for_each_tile(
                    scheduler, workspace, rank, lambda *x: self.load(tma_atoms_by_name, smem, workspace, rank, *x), True
                )
            if const_expr(self.num_store_warps > 0):
                if (warp_index > 0) & (warp_index <= self.num_store_warps):
                    self.for_each_tile(
                        scheduler, workspace, rank, lambda *x: self.store_dq(smem, workspace, rank, warp_index - 1, *x)
                    )
        else:
            cute.arch.setmaxregister_increase(NUM_REGS_MMA)
            self.for_each_tile(
                scheduler, workspace, rank, lambda *x: self.mma(smem, workspace, dk, dv, scale, rank, *x)
            )
        if const_expr(self.cluster > 1):  # the other CTA may write to this CTA's shared memory until here
            cluster_sync(Cluster(self.cluster, 1))

    set_kernel_name(kernel, "cudnn_attention_backward_sm90")

    def tile_info(self, scheduler: BwdSchedulerParams, tile_idx: Int32, rank: Any) -> BlockInfo:
        """The n_block of the CTA's cluster, or a split of it."""
        c = self.c
        if const_expr(c.split):
            block = split_block_info(c, scheduler, tile_idx, c.cluster_tile_n, self.m, c.reverse_n_blocks)
        else:
            block = block_info(c, scheduler, tile_idx, c.cluster_tile_n, self.m, False, c.reverse_n_blocks)
        block.row += rank * self.n
        return block

    @cute.jit
    def for_each_tile(
        self,
        scheduler: BwdSchedulerParams,
        workspace: BwdWorkspace,
        rank: Any,
        process: Any,
        is_scheduler: bool = False,
    ) -> None:
        """Calls ``process`` for each of the CTA's n_blocks with the steps and the n_blocks done before (for stages and
        phases).

        With a dynamic scheduler, the producer warp (``is_scheduler``) takes the next n_block from the atomic counter,
        while others compute the current one, and broadcasts it through the scheduler pipeline.
        """
        if const_expr(not self.c.dynamic_scheduler):
            cta, _, _ = cute.arch.block_idx()
            process(self.tile_info(scheduler, cta // self.cluster, rank), 0, 0)
        else:
            iteration = Int32(0)
            tile_idx, steps_done, tiles_done = mbarrier_pipeline.fetch_work(
                *self.sched_pipeline, workspace.tile_count_semaphore, iteration, (0, 0), is_scheduler
            )
            while tile_idx < scheduler.num_tiles:
                block = self.tile_info(scheduler, tile_idx, rank)
                process(block, steps_done, tiles_done)
                iteration += 1
                payload = (steps_done + block.num_steps, tiles_done + cutlass.min(block.num_steps, 1))
                tile_idx, steps_done, tiles_done = mbarrier_pipeline.fetch_work(
                    *self.sched_pipeline, workspace.tile_count_semaphore, iteration, payload, is_scheduler
                )

    def smem_layout(self, rows: int, columns: int, stages: int = 1, mma_columns: int = 0) -> Any:
        """The swizzled layout of a row-major tile: (rows, columns), and stages if there are several.

        The swizzle atom is as wide as fits the columns, or ``mma_columns``, a multiple of times.
        """
        swizzle = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, mma_columns or columns)
        atom = warpgroup.make_smem_layout_atom(swizzle, self.dtype)
        layout = cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
        return layout if stages > 1 else cute.slice_(layout, (None, None, 0))

    def make_tma_atom(self, tensor: cute.Tensor, smem_tile: SmemTile) -> Any:
        """The TMA atom of a tile and its coordinate tensor."""
        layout = self.smem_layout(smem_tile.rows, smem_tile.columns, mma_columns=smem_tile.mma_columns)
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, (smem_tile.rows, smem_tile.columns)
        )

    def allocate_tile(self, smem: Any, layout: Any) -> cute.Tensor:
        """Allocates a swizzled tile."""
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    @cute.jit
    def allocate_barriers(self, smem: Any, mbarrier_counts: barriers.Counts, thread: Int32) -> dict[str, Any]:
        """Allocates and initializes the mbarriers, and synchronizes the cluster."""
        mbarriers = barriers.allocate(smem, mbarrier_counts)
        if const_expr(self.c.dynamic_scheduler):
            self.sched_pipeline = (
                mbarrier_pipeline.MbarrierPipeline.allocate(smem, SCHED_STAGES),
                smem.allocate_tensor(Int32, cute.make_layout((3, SCHED_STAGES))),
            )
        if thread == 0:
            if const_expr(self.c.dynamic_scheduler):
                mbarrier_pipeline.init_mbarriers(
                    self.sched_pipeline[0], 1, 4 * NUM_MMA_WARPGROUPS + self.num_store_warps + 1
                )
            barriers.init_mbarriers(mbarriers, mbarrier_counts)
        cute.arch.mbarrier_init_fence()
        cluster_sync(Cluster(self.cluster, 1))
        return mbarriers

    def load_tile(
        self, atom: Any, rows: cute.Tensor, smem_tile: SmemTile, coord: Any, target: cute.Tensor, full: Any
    ) -> None:
        """Issues the TMA load of a tile that begins at ``coord``, (row, column)."""
        tma_load(
            atom,
            cute.local_tile(cute.domain_offset(coord, rows), (smem_tile.rows, smem_tile.columns), (0, 0)),
            target,
            full,
        )

    def kv_coords(self, block: BlockInfo, rank: Any) -> dict[str, tuple[Any, int]]:
        """Where the tiles begin that are loaded once per n_block: (row, column), by name."""
        return {"k": (block.row, 0), "v": (block.row, 0)}

    @cute.jit
    def load_kv(self, tma_atoms: Any, smem: Any, block: BlockInfo, coords: Any, tiles_done: Any) -> None:
        """Issues the loads of K and V, if there are any steps."""
        smem_tiles, full = self.smem_tiles(), smem["kv_full"]
        if block.num_steps > 0:
            if const_expr(self.c.dynamic_scheduler):
                cute.arch.mbarrier_wait(smem["kv_empty"], tiles_done % 2 ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, sum(smem_tiles[x].bytes(self.dtype) for x in coords))
            for x, coord in coords.items():
                rows = seqlen_info.tma_rows(
                    tma_atoms[x][1], block.head, block.batch, block.row_offset, block.mask.seqlen_q
                )
                self.load_tile(tma_atoms[x][0], rows, smem_tiles[x], coord, smem[x], full)

    @cute.jit
    def load(
        self,
        tma_atoms: Any,
        smem: Any,
        workspace: BwdWorkspace,
        rank: Any,
        block: BlockInfo,
        steps_done: Any,
        tiles_done: Any,
    ) -> None:
        """Producer warp: loads K and V, then Q, dO and their row values of every step."""
        smem_tiles, num_steps = self.smem_tiles(), block.num_steps
        self.load_kv(tma_atoms, smem, block, self.kv_coords(block, rank), tiles_done)
        # With qk_ahead, the last iteration computes an S that is not used: it needs a Q.
        extra_q = cutlass.min(num_steps, 1) if const_expr(self.qk_ahead) else 0
        for step in cutlass.range(num_steps + extra_q, unroll=1):
            clamped_step = cutlass.min(step, num_steps - 1)
            head, m_block = step_coord(block, clamped_step)
            padded_row = (block.first_m_block + m_block) * self.m
            for x, row_stat in (("q", "lse_log2"), ("do", "dpsum")):
                if x == "q" or step < num_steps:
                    stages = smem_tiles[x].stages
                    tx_bytes = smem_tiles[x].bytes(self.dtype) + 4 * self.m * self.loads_row_stats
                    stage, phase = (steps_done + step) % stages, (steps_done + step) // stages % 2
                    full = smem[f"{x}_full"] + stage
                    cute.arch.mbarrier_wait(smem[f"{x}_empty"] + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, tx_bytes)
                    rows = seqlen_info.tma_rows(
                        tma_atoms[x][1], head, block.batch, block.col_offset, block.mask.seqlen_k
                    )
                    target = smem[x] if const_expr(stages == 1) else smem[x][None, None, stage]
                    self.load_tile(tma_atoms[x][0], rows, smem_tiles[x], (m_block * self.m, 0), target, full)
                    if const_expr(self.loads_row_stats):
                        source = cute.domain_offset(
                            (padded_row, head, block.batch), getattr(workspace, row_stat)
                        ).iterator
                        smem_stats = smem[row_stat][None, stage].iterator
                        with cute.arch.elect_one():
                            cp_async_bulk(source, smem_stats, 4 * self.m, full)

    def mma_thread(self) -> tuple[Int32, Int32]:
        """The MMA warpgroup's index and the thread's in it: recomputed, since keeping them would cost registers."""
        thread, _, _ = cute.arch.thread_idx()
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE) - 1
        return wg_idx, thread - WARPGROUP_SIZE - wg_idx * WARPGROUP_SIZE

    def sync_mma_warpgroups(self) -> None:
        """Synchronizes both MMA warpgroups after they have written MMA operands to shared memory."""
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync(MMA_BARRIER, NUM_MMA_WARPGROUPS * WARPGROUP_SIZE)

    @cute.jit
    def apply_mask(self, acc_S: cute.Tensor, mask: Mask, row: Int32, key: Int32) -> None:
        """Sets masked scores to -inf, in tiles that have any."""
        if not mask.is_full_tile(row, WGMMA_M, key, self.mma_s.columns):
            thread, _, _ = cute.arch.thread_idx()  # recomputed: keeping it would cost a register in all steps
            mask.apply(acc_S, self.rows, thread % WARPGROUP_SIZE, row, key, self.mma_s.columns)

    def p_registers(self, acc_S: cute.Tensor) -> cute.Tensor:
        """Registers of P: those of S, unless S becomes the derivative of the softcap."""
        return cute.make_rmem_tensor(acc_S.layout, Float32) if self.c.softcap else acc_S

    def compute_p(
        self, acc_S: cute.Tensor, acc_P: cute.Tensor, scale_log2: Float32, lse_log2: Iterable[tuple[int, Float32]]
    ) -> None:
        """P = exp2(scale_log2 * S - LSE), each element with the LSE of its row; with a softcap, S becomes dP/dS before
        the softcap.
        """
        for i, row_lse in lse_log2:
            score = acc_S[i]
            acc_P[i] = cute.math.exp2(score * scale_log2 - row_lse, fastmath=True)
            if self.c.softcap:
                acc_S[i] = acc_P[i] * cute.arch.fmax(1.0 - score * score, 0.0)  # masked S is -inf

    def compute_ds(self, acc_dP: cute.Tensor, acc_P: cute.Tensor, dpsum: cute.Tensor) -> None:
        """dS = P * (dP - dPsum), in the registers of dP."""
        for i, row_dpsum in self.with_row_values(dpsum):
            acc_dP[i] = acc_P[i] * (acc_dP[i] - row_dpsum)

    def convert(self, values: cute.Tensor, factor: Any = None) -> cute.Tensor:
        """Converts an accumulator to the MMA's type."""
        converted = cute.make_rmem_tensor(values.shape, self.dtype)
        scaled = values.load() if factor is None else values.load() * factor
        converted.store(scaled.to(self.dtype))
        return converted

    def workspace_coord(self, block: BlockInfo, step: Int32) -> tuple[Any, ...]:
        """The coordinate of a step's row values: (m_block, head, batch)."""
        head, index = step_coord(block, step)
        return block.first_m_block + index, head, block.batch

    def semaphore_turn(self, mask: Mask, block: BlockInfo, m_block: Int32) -> Int32:
        """How many clusters add to an m_block of dQ before this one."""
        row, n_block_size = m_block * self.m, self.cluster * self.n
        n_block = block.row // n_block_size
        n_blocks_before = n_block - mask.begin(row) // n_block_size
        if self.c.right:
            n_blocks_before = Int32(
                select_(
                    block.direction > 0, (mask.end(row + self.m - 1) - 1) // n_block_size - n_block, n_blocks_before
                )
            )
        return n_blocks_before

    @cute.jit
    def wait_semaphore(self, semaphore: cute.Tensor, slot: Any, expected: Int32) -> None:
        """Spins until ``expected`` clusters have added to the m_block."""
        arrived, pointer = Int32(-1), cute.domain_offset((slot,), semaphore).iterator
        while arrived != expected:
            arrived = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[pointer.toint()]
            )

    def signal_semaphore(self, semaphore: cute.Tensor, slot: Any) -> None:
        """Lets the next cluster add."""
        pointer = cute.domain_offset((slot,), semaphore).iterator
        cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[pointer.toint()])

    @cute.jit
    def epilogue(
        self, smem: Any, workspace: BwdWorkspace, block: BlockInfo, results: Any, scale: Scale, rank: Any
    ) -> None:
        """Writes dK and dV; partial ones of a split n_block go to the workspace."""
        if const_expr(self.c.split):
            if block.split_block >= 0:
                self.store_partial(workspace, block, results, rank)
            else:
                self.store_dkv(smem, block, results, scale)
        else:
            self.store_dkv(smem, block, results, scale)

    def store_partial(self, workspace: BwdWorkspace, block: BlockInfo, results: Any, rank: Any) -> None:
        """Writes accumulators as they are, for :class:`ReduceDKDV`."""
        (wg_idx, thread), column = self.mma_thread(), 0
        for (acc, out), mma in zip(results.values(), (self.mma_dk, self.mma_dv), strict=True):
            coord, head = (rank * self.n, column, block.split_idx, block.split_block), cute.size(out, mode=[1])
            tile = cute.local_tile(
                cute.domain_offset(coord, workspace.dkv_partial)[None, None, 0, 0], (self.n, head), (0, 0)
            )
            target = mma.mma().get_slice(thread).partition_C(self.warpgroup_tile(tile, wg_idx))
            cute.autovec_copy(acc, target)
            column += head

    def store_dkv(self, smem: Any, block: BlockInfo, results: Any, scale: Scale) -> None:
        """Converts accumulators and writes them through shared memory."""
        wg_idx, thread = self.mma_thread()
        # Opaque: otherwise addresses are computed before the main loop, which needs the registers.
        if const_expr(self.c.dynamic_scheduler):
            thread = opaque(thread)
        barriers.sync(MMA_BARRIER, NUM_MMA_WARPGROUPS * WARPGROUP_SIZE)  # both warpgroups are done with the tiles
        scales = (scale.softmax_scale, None)
        for (x, (acc, _)), mma, scale_factor in zip(results.items(), (self.mma_dk, self.mma_dv), scales, strict=True):
            tile = self.warpgroup_tile(smem[x], wg_idx)
            mma.r2s(self.convert(acc, scale_factor), tile, thread, self.transposed, self.stmatrix_count)
        barriers.sync(MMA_BARRIER, NUM_MMA_WARPGROUPS * WARPGROUP_SIZE)
        rows = cutlass.min(Int32(self.n), block.mask.seqlen_q - block.row)
        for x, (_, out) in results.items():
            target = cute.domain_offset((block.row_offset + block.row, 0), out[None, None, block.head, block.batch])
            store_rows(smem[x], target, rows, wg_idx * WARPGROUP_SIZE + thread)
        if const_expr(self.c.dynamic_scheduler):
            barriers.sync(MMA_BARRIER, NUM_MMA_WARPGROUPS * WARPGROUP_SIZE)


class AttentionBackward(Backward):
    """The kernel in which an MMA warpgroup has 64 keys: the rows of S^T, dP^T, dV = P^T dO and dK = dS^T Q.

    If tile_m is no multiple of 64, dQ is computed transposed (swap AB), and S of the next m_block before an iteration
    ends.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        super().__init__(configuration)
        c = self.c
        self.qk_ahead = c.dq_swap_ab
        if self.qk_ahead and c.dynamic_scheduler:
            raise ValueError(f"{c}: with a dynamic scheduler, tile_m must be a multiple of 64")
        self.mma_s = WarpgroupMma(self.dtype, self.m)
        self.mma_dp = replace(self.mma_s, registers=c.v_in_registers)
        self.mma_dk, self.mma_dv = (
            WarpgroupMma(self.dtype, head, b=MN, registers=True) for head in (c.head_dim, c.head_dim_v)
        )
        if c.dq_swap_ab:  # dQ^T = K^T dS^T, of half of the head
            self.dq_width, self.mma_dq = WGMMA_M, WarpgroupMma(self.dtype, self.m, a=MN)
        else:  # dQ = dS K: of 64 queries half of the head, or of 128 all of it
            self.dq_width = c.head_dim * self.m // (NUM_MMA_WARPGROUPS * WGMMA_M)
            self.mma_dq = WarpgroupMma(self.dtype, self.dq_width, b=MN)

    def extra_smem(self, allocator: Any) -> dict[str, cute.Tensor]:
        """dS, and float32 values: dQ on its way to global memory, and the row values of a stage.

        With a dynamic scheduler, dK and dV leave from the buffers of dS and dQ, while K and V of the next n_block are
        loaded.
        """
        per_row = cute.make_layout((self.m, STAGES))
        layouts = {
            "dq": cute.make_layout((512, self.m * self.c.head_dim // 512)),
            "lse_log2": per_row,
            "dpsum": per_row,
        }
        buffers = {x: allocator.allocate_tensor(Float32, layout, byte_alignment=1024) for x, layout in layouts.items()}
        buffers["ds"] = self.allocate_tile(allocator, self.smem_layout(self.m, self.n, STAGES))
        for x, alias_of, head in (
            (("dk", "ds", self.c.head_dim), ("dv", "dq", self.c.head_dim_v)) if self.c.dynamic_scheduler else ()
        ):
            layout = self.smem_layout(self.n, head)
            pointer = cute.recast_ptr(buffers[alias_of].iterator, layout.inner, dtype=self.dtype)
            buffers[x] = cute.make_tensor(pointer, layout.outer)
        return buffers

    def extra_barriers(self) -> dict[str, tuple[int, int]]:
        return {"dq_full": (NUM_MMA_WARPGROUPS, 4), "dq_empty": (NUM_MMA_WARPGROUPS, 1)}

    def warpgroup_tile(self, buffer: cute.Tensor, wg_idx: Int32) -> cute.Tensor:
        return cute.local_tile(buffer, (WGMMA_M, cute.size(buffer, mode=[1])), (wg_idx, 0))

    @cute.jit
    def mma(
        self,
        smem: Any,
        workspace: BwdWorkspace,
        dk: cute.Tensor,
        dv: cute.Tensor,
        scale: Scale,
        rank: Any,
        block: BlockInfo,
        steps_done: Any,
        tiles_done: Any,
    ) -> None:
        """An MMA warpgroup: its 64 keys of each n_block."""
        wg_idx, thread = self.mma_thread()
        sK_wg, sV_wg = (self.warpgroup_tile(smem[x], wg_idx) for x in ("k", "v"))
        tSrK, tSrV = self.mma_s.fragment_a(sK_wg, thread), self.mma_dp.fragment_a(sV_wg, thread)
        tSrQ, tSrdO = (self.mma_s.fragment_b(smem[x], thread) for x in ("q", "do"))
        tKrQ = self.mma_dk.fragment_b(transposed(smem["q"]), thread)
        tVrdO = self.mma_dv.fragment_b(transposed(smem["do"]), thread)
        m_slab, d_half = (wg_idx, 0) if const_expr(self.m == NUM_MMA_WARPGROUPS * WGMMA_M) else (0, wg_idx)
        sK = cute.local_tile(transposed(smem["k"]), (self.dq_width, self.n), (d_half, 0))
        if const_expr(self.c.dq_swap_ab):
            tQrdS, tQrK = self.mma_dq.fragment_b(smem["ds"], thread), self.mma_dq.fragment_a(sK, thread)
        else:
            sdS_wg = cute.local_tile(smem["ds"], (WGMMA_M, self.n), (m_slab, 0, None))
            tQrdS, tQrK = self.mma_dq.fragment_a(sdS_wg, thread), self.mma_dq.fragment_b(sK, thread)
        acc_S, acc_dP = self.mma_s.accumulator(), self.mma_s.accumulator()
        acc_dk, acc_dv, acc_dq = self.mma_dk.accumulator(), self.mma_dv.accumulator(), self.mma_dq.accumulator()
        if const_expr(self.qk_ahead):  # aliases S: otherwise ptxas spills
            acc_dq = cute.make_tensor(acc_S.iterator, acc_dq.layout)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        mask, n_row = replace(block.mask), block.row + wg_idx * WGMMA_M
        (scale_log2, softcap_scale), acc_P = scale.log2_scales(), self.p_registers(acc_S)
        q_full, q_empty, do_full, do_empty, dq_full, dq_empty = (
            smem[f"{x}_{state}"] for x in ("q", "do", "dq") for state in ("full", "empty")
        )
        if block.num_steps > 0:
            cute.arch.mbarrier_wait(smem["kv_full"], tiles_done % 2)
            self.mma_dp.load_a(tSrV, sV_wg, thread)
            if const_expr(self.qk_ahead):
                cute.arch.mbarrier_wait(q_full, 0)
                self.mma_s.issue(acc_S, tSrK, tSrQ[None, None, None, 0], False)
                warpgroup.wait_group(0)
        m_block, m_end = step_coord(block, 0)[1], block.begin + block.direction * block.num_blocks
        for count in cutlass.range(steps_done, steps_done + block.num_steps, unroll=1):
            stage, phase = count % STAGES, count // STAGES % 2
            # (1) S^T = K Q^T (with qk_ahead: in the previous iteration).
            if const_expr(not self.qk_ahead):
                cute.arch.mbarrier_wait(q_full + stage, phase)
                self.mma_s.issue(acc_S, tSrK, tSrQ[None, None, None, stage], False)
            # (2) dP^T = V dO^T.
            cute.arch.mbarrier_wait(do_full + stage, phase)
            self.mma_dp.issue(acc_dP, tSrV, tSrdO[None, None, None, stage], False)
            if const_expr(not self.qk_ahead):
                warpgroup.wait_group(1)
            # (3) P = exp2(scale S - LSE), while dP^T is computed.
            apply_softcap(acc_S, softcap_scale)
            self.apply_mask(acc_S, mask, n_row, m_block * self.m)
            m_block += block.direction
            if m_block == m_end:
                m_block = block.begin
            lse_log2 = self.load_row_stats(smem["lse_log2"][None, stage], thread)
            self.compute_p(acc_S, acc_P, scale_log2, self.with_row_values(lse_log2))
            tVrP = register_operand(self.mma_dv.mma(), self.convert(acc_P), (WGMMA_M, self.m))
            # (4) dS = P * (dP - dPsum).
            warpgroup.wait_group(0)
            self.compute_ds(acc_dP, acc_S, self.load_row_stats(smem["dpsum"][None, stage], thread))
            dS = self.convert(acc_dP)
            tKrdS = register_operand(self.mma_dk.mma(), dS, (WGMMA_M, self.m))
            sdS = cute.local_tile(transposed(smem["ds"])[None, None, stage], (WGMMA_M, self.m), (wg_idx, 0))
            # (5) dV += P^T dO, P^T from registers; dS goes to shared memory for dQ.
            self.mma_dv.issue(acc_dv, tVrP, tVrdO[None, None, None, stage], True)
            self.mma_s.r2s(dS, sdS, thread, True)
            self.sync_mma_warpgroups()
            # (6) dQ = dS K, of this n_block alone.
            tQr = (tQrdS[None, None, None, stage], tQrK)
            self.mma_dq.issue(acc_dq, *(tQr[::-1] if const_expr(self.c.dq_swap_ab) else tQr), False)
            # (7) dK += dS^T Q, dS^T from registers.
            self.mma_dk.issue(acc_dk, tKrdS, tKrQ[None, None, None, stage], True)
            # (8) dV and dQ are done: release dO; the store warp adds dQ to dq_accum.
            warpgroup.wait_group(1)
            barriers.elect_arrive(do_empty + stage)
            cute.arch.mbarrier_wait(dq_empty + wg_idx, count % 2 ^ 1)
            self.stage_dq(acc_dq, smem["dq"], dq_full + wg_idx, wg_idx, thread)
            # (9) dK is done: release Q. With qk_ahead, S^T of the next m_block first.
            if const_expr(self.qk_ahead):
                next_count = count + 1
                cute.arch.mbarrier_wait(q_full + next_count % STAGES, next_count // STAGES % 2)
                self.mma_s.issue(acc_S, tSrK, tSrQ[None, None, None, next_count % STAGES], False)
                warpgroup.wait_group(1)
                barriers.elect_arrive(q_empty + stage)
                warpgroup.wait_group(0)  # ptxas serializes wgmmas that are in flight across iterations
            else:
                warpgroup.wait_group(0)
                barriers.elect_arrive(q_empty + stage)
        dkv_buffers = ("dk", "dv") if const_expr(self.c.dynamic_scheduler) else ("k", "v")
        if const_expr(self.c.dynamic_scheduler):
            if block.num_steps > 0:
                barriers.elect_arrive(smem["kv_empty"])
                for wg in cutlass.range_constexpr(NUM_MMA_WARPGROUPS):  # dQ's buffer, which dV reuses, is free
                    cute.arch.mbarrier_wait(dq_empty + wg, (steps_done + block.num_steps - 1) % 2)
        results = dict(zip(dkv_buffers, ((acc_dk, dk), (acc_dv, dv)), strict=True))
        self.epilogue(smem, workspace, block, results, scale, rank)

    @cute.jit
    def stage_dq(self, acc: cute.Tensor, sdQ: cute.Tensor, full: Any, wg_idx: Int32, thread: Int32) -> None:
        """Writes the warpgroup's dQ fragment to shared memory: four values of each thread after those of the previous
        thread.
        """
        chunks = cute.size(acc) // 4
        for i in cutlass.range_constexpr(chunks):
            four = cute.make_rmem_tensor(4, Float32)
            for j in cutlass.range_constexpr(4):
                four[j] = acc[4 * i + j]
            cute.autovec_copy(four, cute.local_tile(sdQ[None, wg_idx * chunks + i], (4,), (thread,)))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        barriers.elect_arrive(full)

    @cute.jit
    def store_dq(
        self,
        smem: Any,
        workspace: BwdWorkspace,
        rank: Any,
        wg_idx: Int32,
        block: BlockInfo,
        steps_done: Any,
        tiles_done: Any,
    ) -> None:
        """Store warp of one MMA warpgroup: bulk reduce-adds its part of dQ to dq_accum, step by step."""
        c, chunks = self.c, self.m * self.c.head_dim // 512 // NUM_MMA_WARPGROUPS
        smem_ptr = cute.domain_offset((0, wg_idx * chunks), smem["dq"]).iterator.toint()
        full = smem["dq_full"] + wg_idx
        empty = smem["dq_empty"] + wg_idx
        num_bytes = 4 * 512 * chunks
        mask = block.mask.transposed()  # a copy for the loop: a branch in it rebinds the fields
        for step in cutlass.range(block.num_steps, unroll=1):
            coord = self.workspace_coord(block, step)
            gmem_ptr = cute.domain_offset(
                (0, wg_idx * chunks), workspace.dq_accum[(None, None, *coord)]
            ).iterator.toint()
            cute.arch.mbarrier_wait(full, (steps_done + step) % 2)
            n_blocks_before = Int32(0)
            if const_expr(c.deterministic):
                n_blocks_before = self.semaphore_turn(mask, block, step_coord(block, step)[1])
                self.wait_semaphore(workspace.dq_semaphore[(None, *coord)], wg_idx, n_blocks_before)
                cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
            with cute.arch.elect_one():
                if const_expr(c.first_cta_stores_dq):
                    if n_blocks_before == 0:
                        self.bulk_store(gmem_ptr, smem_ptr, num_bytes, False)
                    else:
                        self.bulk_store(gmem_ptr, smem_ptr, num_bytes, True)
                else:
                    self.bulk_store(gmem_ptr, smem_ptr, num_bytes, c.shared_dq_accum != "store")
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.mbarrier_arrive(empty)
                if const_expr(c.deterministic):
                    cute.arch.cp_async_bulk_wait_group(0, read=False)
                    cute.arch.inline_ptx("fence.proxy.async.global;", read_only_args=[])
                    self.signal_semaphore(workspace.dq_semaphore[(None, *coord)], wg_idx)
            cute.arch.sync_warp()

    def bulk_store(self, target: Any, source: Any, size: int, accumulate: bool) -> None:
        """One thread issues a bulk store or reduce-add from shared to global memory."""
        reduce, add = ("reduce.", ".add.f32") if accumulate else ("", "")
        cute.arch.inline_ptx(
            f"cp.{reduce}async.bulk.global.shared::cta.bulk_group{add} [{{$r0}}], [{{$r1}}], {{$r2}};",
            read_only_args=[target, source, Int32(size)],
        )

    def load_row_stats(self, smem_values: cute.Tensor, thread: Int32) -> cute.Tensor:
        """The values of a thread's query rows, which are columns of S^T, from shared memory."""
        fragment = cute.make_rmem_tensor(self.m // 4, Float32)
        for i in range(self.m // 8):
            source = cute.local_tile(smem_values, (2,), (4 * i + thread % 4,))
            cute.autovec_copy(source, cute.local_tile(fragment, (2,), (i,)))
        return fragment

    def with_row_values(self, values: cute.Tensor) -> Iterator[tuple[int, Float32]]:
        """A thread's elements, each with the value of its query row, which is a column."""
        for slot in range(2):
            for position, i in enumerate(self.rows.order(self.m, slot)):
                yield i, values[position]
