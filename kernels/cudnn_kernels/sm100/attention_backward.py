"""Attention backward on Blackwell, without atomics: dQ, and dK with dV, in separate kernels of the same form.

    S = Q K^T, P = exp(scale S - LSE), dP = dO V^T, dS = P * (dP - dPsum), dPsum = rowsum(dO * O)
    dQ = scale dS K, dK = scale dS^T Q, dV = P^T dO

A CTA owns 128 rows (queries for dQ, keys for dK and dV) and loops over blocks of 64 columns (keys, or queries): S and,
if dS is needed, dP are MMAs of the rows with the block; P or dS times the block is accumulated. Results are
deterministic. The mask of the dK/dV kernel is the transposed one.

Warps: warps 0 to 3 compute (a thread per row, a lane of tensor memory), warp 4 issues all tcgen05.mma, warp 5 TMA
loads.

Tensor memory: S and dP have 2 stages, which take half of it; P and dS in 16 bits overwrite them and are A operands (TS
MMA). The other half has accumulators: dK and dV together up to head_dim 128 (seven GEMMs in two kernels), else a kernel
for each (eight GEMMs). A CTA pair would have room for both.

Pipelines: each of the two column operands has 1 or 2 stages (full: TMA bytes; empty: tcgen05.commit). Mbarriers: rows
full; by stage, S and dP full (commit), P and dS full (compute warps); accumulators done (commit).

LSE * log2(e) and dPsum are in the workspace, where each sequence has whole tiles of rows: 16-byte loads need no bounds.

No Blackwell was at hand: correct in the emulator, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import GradientsConfiguration, seqlen_info
from cudnn_kernels.attention.backward import (
    BlockInfo,
    BwdSchedulerParams,
    block_info,
    make_scheduler_params,
    step_coord,
)
from cudnn_kernels.attention.flash_bwd_preprocess import preprocess
from cudnn_kernels.attention.softmax import Scale, apply_softcap
from cudnn_kernels.configuration import SHARED_MEMORY
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import barriers, mbarrier_pipeline
from cudnn_kernels.pipeline.barriers import BlackwellAttention as Barrier
from cudnn_kernels.pipeline.tma import partition_tile, tma_load
from cudnn_kernels.shared_memory import BARRIERS
from cudnn_kernels.sm100 import tensor_memory
from cudnn_kernels.sm100.tensor_memory import CHUNK, COLUMNS, LANES, TensorMemoryRows, Umma, commit

TILE_M = LANES  # rows of a CTA
TILE_N = 64
THREADS = 256  # four compute warps, the MMA warp, the load warp, two idle warps
MMA_WARP, LOAD_WARP = 4, 5
S_STAGES = 2  # of S and of dP
MBARRIER_COUNTS = {"rows": (1, 1), "s": (S_STAGES, 1), "p": (S_STAGES, TILE_M // 32), "done": (1, 1)}
"""Mbarriers of the rows' operands, of S with dP, of P with dS, and of the accumulators: (number, arrivals)."""
ACC_COLUMNS = COLUMNS - S_STAGES * 2 * TILE_N  # columns of tensor memory for accumulators


class AttentionBackward(Kernel):
    """The kernels for one :class:`GradientsConfiguration`."""

    def __init__(self, configuration: GradientsConfiguration) -> None:
        super().__init__(configuration)
        if configuration.tile != (TILE_M, TILE_N):
            raise ValueError(f"{configuration}: tiles are ({TILE_M}, {TILE_N})")

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c, workspace = self.c, preprocess(self.c, arguments)
        # dK and dV in one kernel if their accumulators fit.
        kv_passes = [("dk", "dv")] if c.head_dim + c.head_dim_v <= ACC_COLUMNS else [("dk",), ("dv",)]
        for grads in (("dq",), *kv_passes):
            Gradients(c, grads).launch(arguments, [workspace.lse_log2, workspace.dpsum])


class Gradients:
    """The kernel of some gradients ``grads``: dS or, for dv, P of all column blocks times a column operand.

    ``row_operands`` are the A operands of S and, if dS is needed, of dP; ``col_operands`` the B operands. The first
    column operand is the factor of dS, the second that of P.
    """

    score_rows = TensorMemoryRows()

    def __init__(self, configuration: GradientsConfiguration, grads: tuple[str, ...]) -> None:
        c = self.c = configuration
        self.dtype, self.grads, self.is_dq = DTYPES[c.dtype], grads, "dq" in grads
        query_operands, kv_operands = ("q", "do"), ("k", "v")
        row_operands, self.col_operands = (query_operands, kv_operands) if self.is_dq else (kv_operands, query_operands)
        self.row_operands = row_operands[:1] if grads == ("dv",) else row_operands
        widths = {"q": c.head_dim, "k": c.head_dim, "v": c.head_dim_v, "do": c.head_dim_v}
        self.rhs_idx = [int(x == "dv") for x in grads]
        self.acc_widths = [widths[self.col_operands[i]] for i in self.rhs_idx]
        elem_bytes = self.dtype.width // 8
        first_bytes, second_bytes = (widths[x] * TILE_N for x in self.col_operands)
        free_bytes = (
            SHARED_MEMORY
            - BARRIERS
            - (sum(widths[x] for x in self.row_operands) * TILE_M + 2 * first_bytes) * elem_bytes
        )
        self.stages = 2, min(2, free_bytes // (second_bytes * elem_bytes))
        """Buffers of the columns' operands; of the second one, for long heads, there is room for one only."""
        self.smem_tiles = {x: (TILE_M, widths[x], 1) for x in self.row_operands}
        self.smem_tiles |= {
            x: (TILE_N, widths[x], stages) for x, stages in zip(self.col_operands, self.stages, strict=True)
        }
        """Of every operand's buffer the rows, the elements of a head, and how many tiles it has."""

    def launch(self, arguments: Mapping[str, Any], row_stats: list) -> None:
        """Launches the kernel on a call's arguments by name, with LSE * log2(e) and dPsum."""
        c = self.c
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tma_tiles = [(load, x, rows, width) for x, (rows, width, _) in self.smem_tiles.items()]
        tma_tiles += [(store, x, TILE_M, width) for x, width in zip(self.grads, self.acc_widths, strict=True)]
        tma_atoms = []
        for op, x, rows, width in tma_tiles:
            layout = cute.slice_(self.smem_layout(rows, width, 1), (None, None, 0))
            tma_atoms.append(
                cpasync.make_tiled_tma_atom(
                    op, seqlen_info.ragged_tma_view(arguments[x], c.varlen), layout, (rows, width)
                )
            )
        scheduler, ctas = make_scheduler_params(c, arguments, TILE_M, self.is_dq)
        self.kernel(
            tma_atoms, row_stats, scheduler, Scale(arguments["scale_softmax"], arguments.get("softcap"))
        ).launch(grid=[ctas, 1, 1], block=[THREADS, 1, 1], stream=arguments["stream"], min_blocks_per_mp=1)

    def smem_layout(self, rows: int, width: int, stages: int) -> Any:
        """(rows, elements, stage) of operands in shared memory, for every MMA that uses them."""
        return sm100.make_smem_layout(OperandMajorMode.K, (rows, width), self.dtype, stages)

    @cute.kernel
    def kernel(self, tma_atoms: list, row_stats: list, scheduler: BwdSchedulerParams, scale: Scale) -> None:
        """Dispatches the warps to their roles."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        allocator = SmemAllocator()
        layouts = {x: self.smem_layout(*smem_tile) for x, smem_tile in self.smem_tiles.items()}
        smem = {
            x: allocator.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for x, layout in layouts.items()
        }
        mbarriers = barriers.allocate(allocator, MBARRIER_COUNTS)
        pipelines = [mbarrier_pipeline.MbarrierPipeline.allocate(allocator, stages) for stages in self.stages]
        holder = tensor_memory.allocate(allocator, warp)
        if thread == 0:
            for i in cutlass.range_constexpr(2):
                mbarrier_pipeline.init_mbarriers(pipelines[i], 1, 1)
            barriers.init_mbarriers(mbarriers, MBARRIER_COUNTS)
            for i in cutlass.range_constexpr(len(tma_atoms)):
                cpasync.prefetch_descriptor(tma_atoms[i][0])
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tmem_ptr = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        tma_atoms_by_name = dict(zip((*self.smem_tiles, *self.grads), tma_atoms, strict=True))
        index, _, _ = cute.arch.block_idx()  # with a causal mask, rows that see most come first (LPT)
        block = block_info(self.c, scheduler, index, TILE_M, TILE_N, self.is_dq, self.is_dq)
        if warp == LOAD_WARP:
            self.load(tma_atoms_by_name, smem, mbarriers, pipelines, block)
        elif warp == MMA_WARP:
            self.mma(tmem_ptr, smem, mbarriers, pipelines, block.num_steps)
        elif warp < MMA_WARP:
            if block.row < block.mask.seqlen_q:
                self.compute_p_ds(tmem_ptr, mbarriers, block, row_stats, scale, thread)
                self.store_grads(tmem_ptr, smem, block, tma_atoms_by_name, scale.softmax_scale, thread)
            tensor_memory.free(tmem_ptr, warp, TILE_M)

    set_kernel_name(kernel, "cudnn_attention_backward_sm100")

    @cute.jit
    def load(self, tma_atoms: dict, smem: dict, mbarriers: dict, pipelines: list, block: BlockInfo) -> None:
        """Load warp: the row operands, then the column operands, block by block."""
        if block.num_steps > 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    mbarriers["rows"], sum(self.tile_bytes(x) for x in self.row_operands)
                )
            for x in self.row_operands:
                rows = seqlen_info.tma_rows(
                    tma_atoms[x][1], block.head, block.batch, block.row_offset, block.mask.seqlen_q
                )
                tile = cute.local_tile(cute.domain_offset((block.row, 0), rows), self.smem_tiles[x][:2], (0, 0))
                tma_load(tma_atoms[x][0], tile, smem[x][None, None, 0], mbarriers["rows"])
        for step in cutlass.range(block.num_steps, unroll=1):
            head, col_block = step_coord(block, step)
            for i, x in enumerate(self.col_operands):
                rows = seqlen_info.tma_rows(tma_atoms[x][1], head, block.batch, block.col_offset, block.mask.seqlen_k)
                tile = cute.local_tile(rows, self.smem_tiles[x][:2], (col_block, 0))
                stage = mbarrier_pipeline.producer_acquire_at(pipelines[i], step, self.tile_bytes(x))
                tma_load(tma_atoms[x][0], tile, smem[x][None, None, stage], pipelines[i].full + stage)

    def tile_bytes(self, x: str) -> int:
        """Bytes of an operand's tile."""
        rows, width, _ = self.smem_tiles[x]
        return rows * width * self.dtype.width // 8

    @cute.jit
    def mma(self, tmem_ptr: cute.Pointer, smem: dict, mbarriers: dict, pipelines: list, num_steps: Int32) -> None:
        """MMA warp: issues all tcgen05.mma."""
        if num_steps > 0:
            cute.arch.mbarrier_wait(mbarriers["rows"], 0)
        for step in cutlass.range_constexpr(S_STAGES):
            if step < num_steps:
                self.mma_s_dp(tmem_ptr, smem, mbarriers, pipelines, Int32(step))
        for step in cutlass.range(num_steps, unroll=1):
            cute.arch.mbarrier_wait(mbarriers["p"] + step % S_STAGES, step // S_STAGES % 2)
            self.mma_grads(tmem_ptr, smem, pipelines, step)
            if step + S_STAGES < num_steps:
                self.mma_s_dp(tmem_ptr, smem, mbarriers, pipelines, step + S_STAGES)
        if num_steps > 0:
            commit(mbarriers["done"])

    def mma_s_dp(self, tmem_ptr: cute.Pointer, smem: dict, mbarriers: dict, pipelines: list, step: Int32) -> None:
        """Issues S and dP of a step."""
        s_stage = step % S_STAGES
        for i, (row, column) in enumerate(zip(self.row_operands, self.col_operands, strict=False)):
            mma = Umma(self.dtype, TILE_N, self.smem_tiles[row][1])
            stage = mbarrier_pipeline.consumer_wait(pipelines[i], step)
            tmem_S = tmem_ptr + (s_stage * 2 + i) * TILE_N
            mma.issue(tmem_S, mma.fragment_a(smem[row]), smem[column], stage, False)
            if i not in self.rhs_idx:
                commit(pipelines[i].empty + stage)
        commit(mbarriers["s"] + s_stage)

    def mma_grads(self, tmem_ptr: cute.Pointer, smem: dict, pipelines: list, step: Int32) -> None:
        """Issues the accumulation of a step."""
        for acc_idx, (i, width) in enumerate(zip(self.rhs_idx, self.acc_widths, strict=True)):
            mma = Umma(self.dtype, width, TILE_N, a_in_tmem=True)
            tmem_P = mma.tmem_fragment_a(tmem_ptr + (step % S_STAGES * 2 + 1 - i) * TILE_N)
            stage, right = mbarrier_pipeline.consumer_wait(pipelines[i], step), smem[self.col_operands[i]]
            mma.issue(self.tmem_acc(tmem_ptr, acc_idx), tmem_P, right, stage, step > 0)
            commit(pipelines[i].empty + stage)

    def tmem_acc(self, tmem_ptr: cute.Pointer, acc_idx: int) -> cute.Pointer:
        """An accumulator in tensor memory, after the stages of S and dP."""
        return tmem_ptr + (S_STAGES * 2 * TILE_N + sum(self.acc_widths[:acc_idx]))

    @cute.jit
    def compute_p_ds(
        self, tmem_ptr: cute.Pointer, mbarriers: dict, info: BlockInfo, row_stats: list, scale: Scale, thread: Int32
    ) -> None:
        """Compute warps: P and dS of all steps."""
        scale_log2, softcap_scale = scale.log2_scales()
        row_lse, row_dpsum = Float32(0.0), Float32(0.0)
        if const_expr(self.is_dq):
            row_lse, row_dpsum = (
                x[info.first_m_block * TILE_M + info.row + thread, info.head, info.batch] for x in row_stats
            )
        for step in cutlass.range(info.num_steps, unroll=1):
            head, col_block = step_coord(info, step)
            s_stage = step % S_STAGES
            tmem_S = tmem_ptr + s_stage * 2 * TILE_N
            # (1) Wait for S and dP of the block.
            cute.arch.mbarrier_wait(mbarriers["s"] + s_stage, step // S_STAGES % 2)
            is_full = info.mask.is_full_tile(info.row, TILE_M, col_block * TILE_N, TILE_N)
            for chunk in cutlass.range_constexpr(TILE_N // CHUNK):
                column = col_block * TILE_N + chunk * CHUNK
                S, dP = (cute.make_rmem_tensor(CHUNK, Float32) for _ in range(2))
                tensor_memory.load(tmem_S + chunk * CHUNK, thread, S)
                if const_expr(len(self.row_operands) == 2):
                    tensor_memory.load(tmem_S + TILE_N + chunk * CHUNK, thread, dP)
                cute.arch.fence_view_async_tmem_load()
                # (2) P = exp2(scale S - LSE), dS = P * (dP - dPsum), masked.
                apply_softcap(S, softcap_scale)
                if not is_full:
                    info.mask.apply(S, self.score_rows, thread, info.row, column, CHUNK)
                for i in cutlass.range_constexpr(0, CHUNK, 4):
                    dpsum, lse_log2 = (cute.make_rmem_tensor(4, Float32) for _ in range(2))
                    dpsum.fill(row_dpsum)
                    lse_log2.fill(row_lse)
                    if const_expr(not self.is_dq):
                        self.load_row_stats(row_stats[0], lse_log2, head, info, column + i)
                        self.load_row_stats(row_stats[1], dpsum, head, info, column + i)
                    for j in cutlass.range_constexpr(4):
                        score = S[i + j]
                        S[i + j] = cute.math.exp2(score * scale_log2 - lse_log2[j], fastmath=True)
                        if const_expr(len(self.row_operands) == 2):
                            dP[i + j] = S[i + j] * (dP[i + j] - dpsum[j])
                            if const_expr(self.c.softcap):
                                dP[i + j] = dP[i + j] * cute.arch.fmax(1.0 - score * score, 0.0)
                for x in cutlass.range_constexpr(len(self.grads)):
                    is_ds = const_expr(1 - self.rhs_idx[x])
                    tmem_dst = tmem_S + (is_ds * TILE_N + chunk * CHUNK // 2)
                    tensor_memory.store_as(tmem_dst, thread, (S, dP)[is_ds], self.dtype)
            # (3) Signal P and dS: the MMA warp accumulates the gradients.
            cute.arch.fence_view_async_tmem_store()
            cute.arch.sync_warp()
            barriers.elect_arrive(mbarriers["p"] + s_stage)
        if info.num_steps > 0:
            cute.arch.mbarrier_wait(mbarriers["done"], 0)

    def load_row_stats(
        self, source: cute.Tensor, target: cute.Tensor, head: Int32, info: BlockInfo, row: Int32
    ) -> None:
        """Four adjacent row values, 16 bytes."""
        stats = source[None, head, info.batch]
        cute.autovec_copy(cute.local_tile(stats, (4,), ((info.first_m_block * TILE_M + row) // 4,)), target)

    @cute.jit
    def store_grads(
        self, tmem_ptr: cute.Pointer, smem: dict, info: BlockInfo, tma_atoms: dict, scale: Float32, thread: Int32
    ) -> None:
        """Epilogue: converts the accumulators to the row operands' shared memory, then TMA stores."""
        outs = []
        for i, (x, width) in enumerate(zip(self.row_operands, self.acc_widths, strict=False)):
            layout = cute.slice_(self.smem_layout(TILE_M, width, 1), (None, None, 0))
            outs.append(cute.make_tensor(smem[x].iterator, layout.outer))
            grad_scale = scale if const_expr(self.rhs_idx[i] == 0) else Float32(1.0)
            tensor_memory.tmem_to_smem(self.tmem_acc(tmem_ptr, i), thread, grad_scale, outs[i], info.num_steps > 0)
        cute.arch.fence_proxy("async.shared", space="cta")
        barriers.sync(Barrier.WARPGROUP, TILE_M)
        if thread < 32:
            for out, x, width in zip(outs, self.grads, self.acc_widths, strict=True):
                atom, tensor = tma_atoms[x]
                rows = seqlen_info.tma_rows(tensor, info.head, info.batch, info.row_offset, info.mask.seqlen_q)
                tile = cute.local_tile(cute.domain_offset((info.row, 0), rows), (TILE_M, width), (0, 0))
                source, target = partition_tile(atom, out, tile)
                cute.copy(atom, source, target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0)
