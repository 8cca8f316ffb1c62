"""NSA selection attention on Hopper, backward.

    S = Q K^T, P = exp(scale S - LSE), dP = dO V^T, dS = P * (dP - dPsum), dPsum = rowsum(dO * O)
    dQ = scale dS K, dV = P^T dO, dK = scale dS^T Q

Three kernels, all deterministic:

(1) dQ: query-stationary, see :mod:`cudnn_kernels.sm90.sparse_query_tile`; also writes LSE * log2(e) and dPsum.
(2) dK and dV: KV-stationary. A CTA has up to 64 keys of a block and a chunk of its list of query rows: 4 rows of 16
    heads are the 64 columns of a step's S^T = K Q^T, so no MMA column is wasted. Warp 0 of warpgroup 0 gathers Q, dO
    and row values by TMA into a pipeline of STAGES; one or two MMA warpgroups (head_dim 256: half of the columns of dK
    and dV each) have P^T and dS^T as register operands. With head_dim + head_dim_v above 256 a step has 32 columns.
(3) The reduction of blocks whose lists have several chunks, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import seqlen_info
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.attention.sparse import SelectionBackwardConfiguration
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.mbarrier_pipeline import MbarrierPipeline, advance, init_mbarriers
from cudnn_kernels.pipeline.tma import cp_async_bulk, partition_tile, tma_load
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.pipeline.workspace import workspace_pointers
from cudnn_kernels.sm90.attention_forward import WGMMA_M
from cudnn_kernels.sm90.sparse_block_union import BlockLists, TileInfo
from cudnn_kernels.sm90.sparse_kv_block import KVBlockTile, SparseKVBlock
from cudnn_kernels.sm90.sparse_query_tile import MainloopState, WarpgroupContext
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

STAGES = 2  # of Q and dO
NUM_REGS_LOAD, NUM_REGS_MMA = 24, 232  # setmaxnreg of the dK/dV kernel


class SelectionBackward(SparseKVBlock):
    """The kernels for one :class:`SelectionBackwardConfiguration`."""

    q_operands, num_row_stats = ("q", "do"), 2

    def __init__(self, configuration: SelectionBackwardConfiguration) -> None:
        super().__init__(configuration)
        self.b = configuration
        self.padded = configuration.padded_group
        self.queries_per_step, self.num_dkv_warpgroups = configuration.rows_of_step, configuration.num_dkv_warpgroups
        self.step_columns = self.queries_per_step * self.padded

    def launch(self, arguments: Mapping[str, Any]) -> None:
        s, q = self.b, arguments["q"]
        num_entries, list_ends = arguments["query_indices"].shape[0], arguments["query_offsets"]
        tiles_per_block = -(-s.block // WGMMA_M)
        partials_per_thread = (s.head_dim + s.head_dim_v) // (2 * s.num_dkv_warpgroups)
        pointers = workspace_pointers(s.slots(), arguments, s.regions())
        row_stats, partials = (
            cute.make_tensor(cute.recast_ptr(pointers[x], dtype=Float32), cute.make_layout(shape))
            for x, shape in (
                ("head_values", (self.padded, 2, s.key_heads, q.shape[0] + 1)),
                (
                    "partial_sums",
                    (
                        WARPGROUP_SIZE * s.num_dkv_warpgroups,
                        partials_per_thread,
                        tiles_per_block,
                        num_entries * 2 // s.list_chunk,
                    ),
                ),
            )
        )
        cu_seqlens, scale = arguments["cum_seqlen_q"], arguments["scale_softmax"]
        tensors = (arguments["o"], arguments["do"], arguments["lse"], arguments["dq"], row_stats)
        self.launch_query_tiles(self.dq_kernel, arguments, tensors, scale)
        self.dkv_kernel(
            self.make_tma_atoms(arguments, self.padded, WGMMA_M),
            arguments["dk"],
            arguments["dv"],
            row_stats,
            partials,
            arguments["query_indices"],
            list_ends,
            cu_seqlens,
            q.shape[0],
            scale,
        ).launch(
            grid=[(num_entries // s.list_chunk + list_ends.shape[0]) * tiles_per_block, 1, 1],
            block=[(1 + s.num_dkv_warpgroups) * WARPGROUP_SIZE, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=3 - s.num_dkv_warpgroups,
            preferred_smem_carveout=100,
        )
        self.reduce_partials(partials, arguments["dk"], arguments["dv"], list_ends, cu_seqlens, scale).launch(
            grid=[(list_ends.shape[0] - 1) * tiles_per_block, 1, 1],
            block=[s.num_dkv_warpgroups * WARPGROUP_SIZE, 1, 1],
            stream=arguments["stream"],
        )

    # Kernel (1): dQ and row values.

    @cute.kernel
    def dq_kernel(self, atoms: Any, tensors: Any, block_lists: BlockLists, scale: Float32) -> None:
        """``tensors``: O, dO, LSE, dQ, and the row values that the dK/dV kernel needs."""
        self.kernel_body(atoms, tensors, block_lists, scale)

    set_kernel_name(dq_kernel, "cudnn_attention_selection_backward_dq")

    @cute.jit
    def prologue(self, tensors: Any, cta: Int32, thread: Int32) -> None:
        """Writes the row values of the padding row, which fills the last step of a list: P is 0."""
        row_stats = tensors[4]
        if cta == 0:
            if thread < self.padded:
                for head in cutlass.range_constexpr(self.s.key_heads):
                    row_stats[thread, 0, head, row_stats.shape[3] - 1] = Float32.inf
                    row_stats[thread, 1, head, row_stats.shape[3] - 1] = Float32(0.0)

    @cute.jit
    def load_row_stats(self, ctx: WarpgroupContext, tile: TileInfo) -> None:
        """LSE * log2(e) and dPsum of a warpgroup's rows, for this kernel and the next one. LSE is inf where P must be
        0.

        Eight threads per head; all loads are issued before the reductions.
        """
        (o, do, lse, _, row_stats), smem_stats, wg_idx, thread = ctx.tensors, ctx.row_stats, ctx.wg_idx, ctx.thread
        row_begins = range(0, WGMMA_M, WARPGROUP_SIZE // 8)
        num_vectors = self.s.head_dim_v // (8 * VECTOR)
        coords = []
        fragments = []
        for begin in row_begins:
            mma_row = begin + thread // 8
            query, head = wg_idx * self.s.queries_per_warpgroup + mma_row // self.padded, mma_row % self.padded
            exists = (query < tile.num_rows) & (mma_row < self.s.queries_per_warpgroup * self.padded)
            is_head = exists & (head < tile.num_heads)
            row = tile.row + Int32(select_(is_head, query, 0))
            column = tile.head_begin + Int32(select_(is_head, head, 0))
            coords.append((query, head, exists, is_head, lse[row, column] * LOG2_E))
            fragments.append(
                [[vectors.load(x[row, column, None], thread % 8 + 8 * i) for i in range(num_vectors)] for x in (o, do)]
            )
        for begin in cutlass.range_constexpr(len(row_begins)):
            mma_row, (query, head, exists, is_head, row_lse) = row_begins[begin] + thread // 8, coords[begin]
            dpsum = Float32(0.0)
            for i in cutlass.range_constexpr(num_vectors):
                o_frag, do_frag = (x[i].load().to(Float32) for x in fragments[begin])
                dpsum += (o_frag * do_frag).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            for distance in (1, 2, 4):
                dpsum += cute.arch.shuffle_sync_bfly(dpsum, distance)
            dpsum = Float32(select_(is_head, dpsum, Float32(0.0)))
            row_lse = Float32(select_(is_head & (row_lse != -Float32.inf), row_lse, Float32.inf))
            if thread % 8 == 0:
                smem_stats[mma_row, 0], smem_stats[mma_row, 1] = row_lse, dpsum
                if exists:
                    row_stats[head, 0, tile.kv_head, tile.row + query] = row_lse
                    row_stats[head, 1, tile.kv_head, tile.row + query] = dpsum
        self.sync_warpgroup(wg_idx)

    @cute.jit
    def compute_tile(
        self, ctx: WarpgroupContext, tile_idx: Int32, tile: TileInfo, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """dQ of a tile's rows, from a stage and its phase on; those after it."""
        s, smem, thread, dq = self.s, ctx.smem, ctx.thread, ctx.tensors[3]
        tSrQ, tPrdO = (
            self.operand_a(cute.local_tile(smem[x][None, None, 0], (WGMMA_M, head_dim), (ctx.wg_idx, 0)), thread)
            for x, head_dim in (("q", s.head_dim), ("do", s.head_dim_v))
        )
        tSrK, tPrV = (self.operand_b(smem[x], thread) for x in "kv")
        tQrK = self.operand_b(transposed(smem["k"]), thread, True)
        acc_S = self.accumulator(self.tile_n)
        acc_dP = self.accumulator(self.tile_n)
        acc_dQ = self.accumulator(s.head_dim)
        acc_dQ.fill(0.0)
        lse_log2, dpsum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        for slot in cutlass.range_constexpr(2):
            row = self.score_rows.row(thread, slot)
            lse_log2[slot], dpsum[slot] = ctx.row_stats[row, 0], ctx.row_stats[row, 1]
        self.sync_warpgroup(ctx.wg_idx)  # all have read them before the next tile's are written
        tQrdS = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        score_mmas = ((acc_S, tSrQ, tSrK, s.head_dim), (acc_dP, tPrdO, tPrV, s.head_dim_v))
        state = MainloopState(tile, score_mmas, tQrdS, acc_dQ, tQrK, s.head_dim, (lse_log2, dpsum))
        stage, phase = self.mainloop(ctx, state, stage, phase)
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.row_coord(tile, ctx.wg_idx, self.score_rows.row(thread, slot))
            if exists:
                self.store_row(dq[row, head, None], acc_dQ, s.head_dim, slot, ctx.scale, thread)
        return advance(ctx.storage.kv_pipeline, stage, phase)

    @cute.jit
    def softmax_step(
        self, ctx: WarpgroupContext, state: MainloopState, stage: Int32, visible: Any, is_later: cutlass.Constexpr[bool]
    ) -> None:
        """S becomes dS."""
        ((acc_S, *_), (acc_dP, *_)), (lse_log2, dpsum) = state.score_mmas, state.row_state
        spans, any_visible, all_visible = visible
        if any_visible:
            self.apply_selection_mask(acc_S, spans, all_visible, ctx.thread)
            for slot in cutlass.range_constexpr(2):
                for i in self.score_rows.order(self.tile_n, slot):
                    p = cute.math.exp2(acc_S[i] * (ctx.scale * LOG2_E) - lse_log2[slot], fastmath=True)
                    acc_S[i] = p * (acc_dP[i] - dpsum[slot])

    # Kernels (2) and (3): dK and dV.

    @cute.kernel
    def dkv_kernel(
        self,
        tma_atoms: Any,
        dk: cute.Tensor,
        dv: cute.Tensor,
        row_stats: cute.Tensor,
        partials: cute.Tensor,
        query_list: cute.Tensor,
        list_ends: cute.Tensor,
        cu_seqlens: cute.Tensor,
        num_rows: Int32,
        scale: Float32,
    ) -> None:
        """A CTA has up to 64 keys of a block and a chunk of the block's list."""
        s = self.s
        thread, cta = thread_block_idx()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        allocator = SmemAllocator()
        smem = self.allocate_smem(
            allocator,
            {
                "k": (WGMMA_M, s.head_dim, 1),
                "v": (WGMMA_M, s.head_dim_v, 1),
                "q": (WGMMA_M, s.head_dim, STAGES),
                "do": (WGMMA_M, s.head_dim_v, STAGES),
            },
        )
        layout = cute.make_layout((self.padded, 2, self.queries_per_step, STAGES))
        smem["row_stats"] = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        smem["query_positions"] = allocator.allocate_tensor(
            Int32, cute.make_layout((self.queries_per_step, STAGES)), byte_alignment=16
        )
        kv_mbar, q_pipeline = allocator.allocate_array(cutlass.Int64, 1), MbarrierPipeline.allocate(allocator, STAGES)
        if thread == 0:
            cute.arch.mbarrier_init(kv_mbar, 1)
            init_mbarriers(q_pipeline, 1, self.num_dkv_warpgroups * (WARPGROUP_SIZE // WARP_SIZE))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        tiles_per_block = -(-s.block // WGMMA_M)
        kv_tile = self.list_chunk_tile(cta // tiles_per_block, cta % tiles_per_block, list_ends, cu_seqlens)
        if kv_tile.num_keys > 0:
            if wg_idx == 0:
                cute.arch.setmaxregister_decrease(NUM_REGS_LOAD)
                if warp_index == 0:
                    self.load(tma_atoms, smem, kv_mbar, q_pipeline, row_stats, query_list, kv_tile, num_rows)
            else:
                cute.arch.setmaxregister_increase(NUM_REGS_MMA)
                cta_partials = partials[None, None, cta % tiles_per_block, kv_tile.partial_slot]
                self.compute_dkv(
                    (dk, dv, cta_partials), smem, kv_mbar, q_pipeline, kv_tile, scale, thread - WARPGROUP_SIZE
                )

    set_kernel_name(dkv_kernel, "cudnn_attention_selection_backward_dkv")

    @cute.jit
    def load(
        self,
        tma_atoms: Any,
        smem: Any,
        kv_mbar: Any,
        q_pipeline: MbarrierPipeline,
        row_stats: cute.Tensor,
        query_list: cute.Tensor,
        kv_tile: KVBlockTile,
        num_rows: Int32,
    ) -> None:
        """Load warp: K and V, then Q, dO and row values of the list's rows."""
        s, lane, query_positions = self.s, cute.arch.lane_idx(), smem["query_positions"]
        loads = self.tma_loads(tma_atoms, smem)
        kv_coord = (kv_tile.head, Int32(0), kv_tile.offset_k, kv_tile.key_begin + kv_tile.num_keys)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(kv_mbar, self.tile_bytes(WGMMA_M, s.head_dim + s.head_dim_v))
        for atom, tensor, buffer, head_dim in loads[2:]:
            source = cute.domain_offset((kv_tile.key_begin, 0), seqlen_info.tma_rows(tensor, *kv_coord))
            tile = cute.local_tile(source, (WGMMA_M, head_dim), (0, 0))
            tma_load(atom, tile, buffer[None, None, 0], kv_mbar)
        q_copies = []
        for atom, tensor, buffer, head_dim in loads[:2]:
            head_box = (self.padded, head_dim)
            source = cute.domain_offset((kv_tile.head * s.group, 0, 0), tensor)
            target = cute.local_tile(buffer, (*head_box, STAGES), (None, 0, 0))
            q_copies.append((atom, *partition_tile(atom, target, cute.local_tile(source, head_box, (0, 0, None)))))
        list_len = kv_tile.end - kv_tile.begin
        tx_bytes = self.tile_bytes(self.step_columns, s.head_dim + s.head_dim_v) + self.step_columns * 8
        lane_rows = Int32(num_rows)
        for step in cutlass.range(cute.ceil_div(list_len, self.queries_per_step), unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            if step * self.queries_per_step % WARP_SIZE == 0:
                lane_rows = Int32(num_rows)  # padding row: Q is 0, LSE inf
                if step * self.queries_per_step + lane < list_len:
                    lane_rows = query_list[kv_tile.begin + step * self.queries_per_step + lane]
            cute.arch.mbarrier_wait(q_pipeline.empty + stage, phase ^ 1)
            for query in cutlass.range_constexpr(self.queries_per_step):
                q_row = cute.arch.shuffle_sync(lane_rows, (step * self.queries_per_step + query) % WARP_SIZE)
                with cute.arch.elect_one():
                    query_positions[query, stage] = q_row - kv_tile.offset_k - kv_tile.key_begin
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(q_pipeline.full + stage, tx_bytes)
            for query in cutlass.range_constexpr(self.queries_per_step):
                q_row = cute.arch.shuffle_sync(lane_rows, (step * self.queries_per_step + query) % WARP_SIZE)
                for copy, tQsQ, tQgQ in q_copies:
                    cute.copy(copy, tQgQ[None, q_row], tQsQ[None, stage, query], tma_bar_ptr=q_pipeline.full + stage)
                with cute.arch.elect_one():
                    gmem_stats = row_stats[None, None, kv_tile.head, q_row]
                    smem_stats = smem["row_stats"][None, None, query, stage]
                    cp_async_bulk(gmem_stats.iterator, smem_stats.iterator, self.padded * 8, q_pipeline.full + stage)

    @cute.jit
    def compute_dkv(
        self,
        outs: Any,
        smem: Any,
        kv_mbar: Any,
        q_pipeline: MbarrierPipeline,
        kv_tile: KVBlockTile,
        scale: Float32,
        mma_thread: Int32,
    ) -> None:
        """An MMA warpgroup: its columns of dK and dV.

        ``outs``: dK, dV, and the memory of their partial sums.
        """
        s, m, (wg_idx, thread) = self.s, self.step_columns, (mma_thread // WARPGROUP_SIZE, mma_thread % WARPGROUP_SIZE)
        sQ, sdO = (
            cute.local_tile(smem[x], (m, width, STAGES), (0, 0, 0))
            for x, width in (("q", s.head_dim), ("do", s.head_dim_v))
        )
        tSrK, tPrV = (self.operand_a(smem[x][None, None, 0], thread) for x in "kv")
        tSrQ, tPrdO = self.operand_b(sQ, thread), self.operand_b(sdO, thread)
        width, width_v = s.head_dim // self.num_dkv_warpgroups, s.head_dim_v // self.num_dkv_warpgroups
        tKrQ, tVrdO = (
            self.operand_b(cute.local_tile(transposed(x), (wg_width, m, STAGES), (wg_idx, 0, 0)), thread, True)
            for x, wg_width in ((sQ, width), (sdO, width_v))
        )
        acc_S, acc_dP = self.accumulator(m), self.accumulator(m)
        converted = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        acc_dk, acc_dv = self.accumulator(width), self.accumulator(width_v)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        cute.arch.mbarrier_wait(kv_mbar, 0)
        for step in cutlass.range(cute.ceil_div(kv_tile.end - kv_tile.begin, self.queries_per_step), unroll=1):
            stage, phase = step % STAGES, step // STAGES % 2
            smem_stats = smem["row_stats"][None, None, None, stage]
            # (1) S^T = K Q^T and dP^T = V dO^T.
            cute.arch.mbarrier_wait(q_pipeline.full + stage, phase)
            self.mma_ss(acc_S, tSrK, tSrQ, m, s.head_dim, stage)
            self.mma_ss(acc_dP, tPrV, tPrdO, m, s.head_dim_v, stage)
            # (2) P = exp2(scale S - LSE), while dP^T is computed.
            self.wait_mma(1)
            if const_expr(s.causal):
                self.apply_causal_mask(acc_S, smem["query_positions"][None, stage], thread)
            for i, stat in self.column_stats(smem_stats, 0, thread):
                acc_S[i] = cute.math.exp2(acc_S[i] * (scale * LOG2_E) - stat, fastmath=True)
            # (3) dV += P^T dO, P^T from registers.
            converted.store(acc_S.load().to(self.dtype))
            self.mma_rs(acc_dv, converted, tVrdO, width_v, m, stage)
            # (4) dS = P * (dP - dPsum).
            self.wait_mma(1)
            for i, stat in self.column_stats(smem_stats, 1, thread):
                acc_dP[i] = acc_S[i] * (acc_dP[i] - stat)
            # (5) dK += dS^T Q, dS^T from registers; release Q and dO.
            self.wait_mma(0)
            converted.store(acc_dP.load().to(self.dtype))
            self.mma_rs(acc_dk, converted, tKrQ, width, m, stage)
            self.wait_mma(0)
            self.consumer_release(q_pipeline.empty + stage)
        (*results, partials), accs = outs, (acc_dk, acc_dv)
        if kv_tile.num_chunks == 1:
            self.store_dkv(results, accs, kv_tile, scale, mma_thread)
        else:
            for position, stat in enumerate([acc[i] for acc in accs for i in range(cute.size(acc))]):
                partials[mma_thread, position] = stat

    @cute.jit
    def store_dkv(self, outs: Any, accs: Any, kv_tile: KVBlockTile, scale: Float32, mma_thread: Int32) -> None:
        """A warpgroup's columns of dK and dV."""
        wg_idx, thread = mma_thread // WARPGROUP_SIZE, mma_thread % WARPGROUP_SIZE
        for slot in cutlass.range_constexpr(2):
            key_row = self.score_rows.row(thread, slot)
            if key_row < kv_tile.num_keys:
                for out, acc, grad_scale in zip(outs, accs, (scale, Float32(1.0)), strict=True):
                    width = out.shape[2] // self.num_dkv_warpgroups
                    gmem_row = cute.local_tile(
                        out[kv_tile.offset_k + kv_tile.key_begin + key_row, kv_tile.head, None], (width,), (wg_idx,)
                    )
                    self.store_row(gmem_row, acc, width, slot, grad_scale, thread)

    @cute.jit
    def store_row(
        self, out: cute.Tensor, acc: cute.Tensor, width: int, slot: int, grad_scale: Float32, thread: Int32
    ) -> None:
        """A thread's values of a row, scaled, and added to the old ones if ``accumulate``."""
        if const_expr(self.b.accumulate):
            order = self.score_rows.order(width, slot)
            old_pairs = [cute.make_rmem_tensor(2, self.dtype) for _ in range(0, len(order), 2)]
            for i, pair in enumerate(old_pairs):
                cute.autovec_copy(cute.local_tile(out, (2,), (self.score_rows.column(thread, 2 * i) // 2,)), pair)
            for position, i in enumerate(order):
                acc[i] = acc[i] * grad_scale + old_pairs[position // 2][position % 2].to(Float32)
            grad_scale = Float32(1.0)
        self.score_rows.store(acc, slot, out, thread, grad_scale)

    @cute.kernel
    def reduce_partials(
        self,
        partials: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        list_ends: cute.Tensor,
        cu_seqlens: cute.Tensor,
        scale: Float32,
    ) -> None:
        """dK and dV of blocks whose lists have several chunks: the sum of the partials, in order."""
        s = self.s
        thread, cta = thread_block_idx()
        tiles_per_block = -(-s.block // WGMMA_M)
        key_tile = cta % tiles_per_block
        kv_tile = self.kv_block_tile(cta // tiles_per_block, key_tile, list_ends, cu_seqlens)
        if (kv_tile.num_chunks > 1) & (kv_tile.num_keys > 0):
            accs = [
                cute.make_rmem_tensor(x // (2 * self.num_dkv_warpgroups), Float32) for x in (s.head_dim, s.head_dim_v)
            ]
            for acc in accs:
                acc.fill(0.0)
            elements = [(which, i) for which, acc in enumerate(accs) for i in range(cute.size(acc))]
            for chunk in cutlass.range(kv_tile.num_chunks, unroll=1):
                chunk_partials = partials[None, None, key_tile, kv_tile.partial_slot + chunk]
                for position, (which, i) in enumerate(elements):
                    accs[which][i] = accs[which][i] + chunk_partials[thread, position]
            self.store_dkv((dk, dv), accs, kv_tile, scale, thread)

    set_kernel_name(reduce_partials, "cudnn_attention_selection_backward_reduce")

    def column_stats(self, smem_stats: cute.Tensor, stat_idx: int, thread: Int32) -> Iterator[tuple[int, Float32]]:
        """A thread's elements, each with a row value (LSE or dPsum) of its column, a head of a query row. Pairwise, to
        save registers.
        """
        orders = [self.score_rows.order(self.step_columns, slot) for slot in range(2)]
        for i in range(self.step_columns // 8):
            head, row = i * 8 % self.padded, i * 8 // self.padded
            pair = cute.make_rmem_tensor(2, Float32)
            cute.autovec_copy(cute.local_tile(smem_stats[None, stat_idx, row], (2,), (head // 2 + thread % 4,)), pair)
            for order in orders:
                for j in range(2):
                    yield order[2 * i + j], pair[j]

    @cute.jit
    def apply_causal_mask(self, acc_S: cute.Tensor, query_positions: cute.Tensor, thread: Int32) -> None:
        """Sets scores of keys after the query row to -inf. Lists ascend: the first row tells whether the step needs a
        mask.
        """
        if query_positions[0] < WGMMA_M - 1:
            for slot in cutlass.range_constexpr(2):
                key = self.score_rows.row(thread, slot)
                for position, i in enumerate(self.score_rows.order(self.step_columns, slot)):
                    query_position = query_positions[position // 2 * 8 // self.padded]
                    acc_S[i] = Float32(select_(key <= query_position, acc_S[i], -Float32.inf))
