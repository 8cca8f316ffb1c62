"""NSA selection attention on Hopper, forward: each query row attends to its selected KV blocks.

    O = softmax(scale Q K_sel^T) V_sel, with the LSE, or the row sums l and maxima m

The bottleneck is K and V from L2, so adjacent query rows share the blocks that several of them selected:
:mod:`cudnn_kernels.sm90.sparse_query_tile` has the warp roles, pipelines and barriers. Software pipelining: a warpgroup
issues S = Q K^T of its next step and O += P V of the current one, and computes the softmax of the former while the
latter runs.

A warpgroup whose queries share few blocks uses the single-query path (swap AB) of
:mod:`cudnn_kernels.sm90.sparse_single_query`, decided per tile by the producer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.attention import softmax
from cudnn_kernels.attention.mma_sync_utils import MmaSyncMixin
from cudnn_kernels.attention.sparse import BRANCHES
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.mbarrier_pipeline import advance
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.sm90.attention_forward import WGMMA_M
from cudnn_kernels.sm90.sparse_block_union import BlockLists, TileInfo
from cudnn_kernels.sm90.sparse_query_tile import MainloopState, WarpgroupContext
from cudnn_kernels.sm90.sparse_single_query import VECTORS_PER_CHUNK, SparseSingleQuery


class Selection(SparseSingleQuery):
    """The kernel for one :class:`SelectionConfiguration`."""

    @property
    def single_query(self) -> bool:
        """Whether warpgroups may process queries one by one: registers suffice for 16 heads per query."""
        s = self.s
        return s.single_query_threshold > 0 and s.padded_group == 16 and self.tile_n == WGMMA_M

    def launch(self, arguments: Mapping[str, Any]) -> None:
        tensors = tuple(arguments[x] for x in ("o", *(x.name for x in self.s.sums)))
        scale_log2, semaphore_memory = arguments["scale_softmax"] * softmax.LOG2_E, arguments["workspace"].iterator
        self.launch_query_tiles(self.selection, arguments, tensors, scale_log2, semaphore_memory)

    @cute.kernel
    def selection(self, tma_atoms: Any, tensors: Any, block_lists: BlockLists, scale_log2: Float32) -> None:
        """``tensors``: O, and the LSE, or the row sums and maxima."""
        self.kernel_body(tma_atoms, tensors, block_lists, scale_log2)

    set_kernel_name(selection, "cudnn_attention_selection")

    @cute.jit
    def compute_tile(
        self, ctx: WarpgroupContext, tile_idx: Int32, tile: TileInfo, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """One tile, from a stage and its phase on; those after it."""
        if const_expr(self.single_query):
            if ctx.storage.single_query[ctx.wg_idx] != 0:
                stage, phase = self.compute_tile_single_query(ctx, tile_idx, tile, stage, phase)
            else:
                stage, phase = self.compute_tile_packed(ctx, tile_idx, tile, stage, phase)
        else:
            stage, phase = self.compute_tile_packed(ctx, tile_idx, tile, stage, phase)
        return stage, phase

    @cute.jit
    def compute_tile_packed(
        self, ctx: WarpgroupContext, tile_idx: Int32, tile: TileInfo, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        """One tile whose queries share the MMA's rows."""
        state = self.new_mainloop(ctx, tile)
        stage, phase = self.mainloop(ctx, state, stage, phase)
        true_max = state.row_state[0].true_max
        if const_expr(true_max is not None):
            for slot in cutlass.range_constexpr(2):
                true_max[slot] = self.score_rows.all_reduce_row(true_max[slot], cute.arch.fmax)
        # The tile is recomputed: keeping it would cost registers.
        self.epilogue(ctx, state, self.tile_info(tile_idx, ctx.block_lists))
        return advance(ctx.storage.kv_pipeline, stage, phase)

    def new_mainloop(self, ctx: WarpgroupContext, tile: TileInfo, is_window: bool = False) -> MainloopState:
        """The main loop's state before a tile's first step."""
        s, smem = self.s, ctx.smem
        tSrQ = self.operand_a(
            cute.local_tile(smem["q"][None, None, 0], (WGMMA_M, s.head_dim), (ctx.wg_idx, 0)), ctx.thread
        )
        tSrK, tOrV = self.operand_b(smem["k"], ctx.thread), self.operand_b(transposed(smem["v"]), ctx.thread, True)
        acc_S, acc_O = self.accumulator(self.tile_n), self.accumulator(s.head_dim_v)
        tOrP = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        row_max, row_sum = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        softmax_state = softmax.OnlineSoftmax(
            row_max, row_sum, ctx.scale, None if s.lse else cute.make_rmem_tensor(2, Float32)
        )
        softmax.reset(softmax_state)
        acc_O.fill(0.0)
        row_scales = cute.make_rmem_tensor(2, Float32)  # of the row sums and O before a step
        return MainloopState(
            tile,
            ((acc_S, tSrQ, tSrK, s.head_dim),),
            tOrP,
            acc_O,
            tOrV,
            s.head_dim_v,
            (softmax_state, row_scales),
            is_window,
        )

    @cute.jit
    def softmax_step(
        self,
        ctx: WarpgroupContext,
        mainloop_state: MainloopState,
        stage: Int32,
        visible: Any,
        is_later: cutlass.Constexpr[bool],
    ) -> None:
        """P of a step, in place, and the scales of the previous row sums and O.

        After a tile's first step it is speculative (with the old maximum), unless true maxima are returned. A warp
        whose values exceed the bound recomputes its scores.
        """
        # One nested assignment: the DSL would carry a softmax_state of a plain assignment through the branches and
        # rebind the fields of the shared state.
        acc_S, (softmax_state, row_scales), (spans, any_visible, all_visible) = (
            mainloop_state.score_mmas[0][0],
            mainloop_state.row_state,
            visible,
        )
        row_scales.fill(1.0)
        if any_visible:
            self.apply_selection_mask(acc_S, spans, all_visible, ctx.thread)
            if const_expr(is_later and softmax_state.true_max is None):
                row_sum_before = [softmax_state.row_sum[slot] for slot in range(2)]
                in_range = softmax.speculative_softmax(softmax_state, acc_S, self.score_rows, self.tile_n)
                if cute.arch.vote_any_sync(~in_range):
                    for slot in cutlass.range_constexpr(2):
                        softmax_state.row_sum[slot] = row_sum_before[slot]
                    self.recompute_scores(ctx, acc_S, stage)
                    same_spans, _, same_all_visible = self.visible_spans(ctx, mainloop_state, stage)
                    self.apply_selection_mask(acc_S, same_spans, same_all_visible, ctx.thread)
                    self.exact_softmax(softmax_state, acc_S, row_scales)
            else:
                self.exact_softmax(softmax_state, acc_S, row_scales)

    def recompute_scores(self, ctx: WarpgroupContext, acc_S: cute.Tensor, stage: Int32) -> None:
        """A warp's scores by mma.sync, without the other warps of its warpgroup."""
        warp_mma, s = MmaSyncMixin(), self.s
        warp_mma.dtype = self.dtype
        sQ = cute.local_tile(ctx.smem["q"][None, None, 0], (WGMMA_M, s.head_dim), (ctx.wg_idx, 0))
        operands = warp_mma.operand_a(sQ, ctx.thread), warp_mma.operand_b(ctx.smem["k"], ctx.thread)
        acc_view = cute.make_tensor(acc_S.iterator, warp_mma.accumulator(self.tile_n).layout)
        warp_mma.mma_ss(acc_view, *operands, self.tile_n, s.head_dim, stage)

    @cute.jit
    def exact_softmax(self, shared_state: softmax.OnlineSoftmax, acc_S: cute.Tensor, row_scales: cute.Tensor) -> None:
        """The online softmax; threads exchange row maxima only if one of the warp's exceeds the rescale threshold."""
        softmax_state = replace(shared_state)  # a copy: the DSL does not carry fields that a branch rebinds
        orders = [self.score_rows.order(self.tile_n, slot) for slot in range(2)]
        local_maxes = [softmax.local_max(acc_S, order) for order in orders]
        if const_expr(softmax_state.true_max is not None):
            for slot in cutlass.range_constexpr(2):
                softmax_state.true_max[slot] = cute.arch.fmax(softmax_state.true_max[slot], local_maxes[slot])
        over_threshold = [
            (local_maxes[slot] - softmax_state.row_max[slot]) * softmax_state.scale_log2 > softmax.RESCALE_THRESHOLD
            for slot in range(2)
        ]
        if cute.arch.vote_any_sync(over_threshold[0] | over_threshold[1]):
            for slot in cutlass.range_constexpr(2):
                row_max = self.score_rows.all_reduce_row(local_maxes[slot], cute.arch.fmax)
                row_scales[slot] = softmax.update_row_max(softmax_state, slot, row_max)
                softmax_state.row_sum[slot] = softmax_state.row_sum[slot] * row_scales[slot]
        for slot in cutlass.range_constexpr(2):
            softmax_state.row_sum[slot] = softmax.exp2_and_sum(
                softmax_state, slot, acc_S, orders[slot], softmax_state.row_sum[slot]
            )

    def convert_p(self, state: MainloopState, any_visible: Boolean) -> None:
        """Converts P to an A operand, and rescales O."""
        super().convert_p(state, any_visible)
        _, row_scales = state.row_state
        self.lazy_rescale_o(state.acc, row_scales[0], row_scales[1])

    @cute.jit
    def epilogue(self, ctx: WarpgroupContext, mainloop_state: MainloopState, tile: TileInfo) -> None:
        """O, and LSE or row sums and maxima."""
        (o, *stats), (softmax_state, _) = ctx.tensors, mainloop_state.row_state
        for slot in cutlass.range_constexpr(2):
            row_sum = self.score_rows.all_reduce_row(softmax_state.row_sum[slot], lambda a, b: a + b)
            inv_sum = Float32(select_(row_sum == 0.0, Float32(1.0), 1.0 / row_sum))
            row, head, exists = self.row_coord(tile, ctx.wg_idx, self.score_rows.row(ctx.thread, slot))
            if exists:
                self.write_row_stats(stats, (row, head), softmax_state, slot, row_sum, ctx.thread)
                self.score_rows.store(mainloop_state.acc, slot, o[row, head, None], ctx.thread, inv_sum)

    @cute.jit
    def write_row_stats(
        self,
        tensors: Sequence[cute.Tensor],
        coord: Any,
        softmax_state: softmax.OnlineSoftmax,
        slot: cutlass.Constexpr[int],
        row_sum: Float32,
        thread: Int32,
    ) -> None:
        """One of a row's four threads: LSE, or row sum and maximum."""
        if thread % 4 == 0:
            true_max = (
                None
                if const_expr(softmax_state.true_max is None)
                else softmax_state.true_max[slot] * softmax_state.scale_log2
            )
            self.write_stats(tensors, coord, row_sum, softmax_state.row_max[slot] * softmax_state.scale_log2, true_max)


class GatedSelection(Selection):
    """The kernel for one :class:`GatedSelectionConfiguration`.

    The sliding window's n_tiles come before those of the lists. The epilogue reads the compression branch's O and adds
    the gated branches.
    """

    def launch(self, arguments: Mapping[str, Any]) -> None:
        tensors = tuple(
            arguments.get(x) for x in ("o", "compressed", "windowed", "gates", "windowed_lse", "selected", "lse")
        )
        scale_log2, semaphore_memory = arguments["scale_softmax"] * softmax.LOG2_E, arguments["workspace"].iterator
        self.launch_query_tiles(
            self.gated_selection, arguments, tensors, scale_log2, semaphore_memory, arguments["window"]
        )

    @cute.kernel
    def gated_selection(self, tma_atoms: Any, tensors: Any, block_lists: BlockLists, scale_log2: Float32) -> None:
        """``tensors``: O, compressed O, window O, gates; the window's LSE, selection's O and LSE, or None."""
        self.kernel_body(tma_atoms, tensors, block_lists, scale_log2)

    set_kernel_name(gated_selection, "cudnn_attention_gated_selection")

    @cute.jit
    def compute_tile(
        self, ctx: WarpgroupContext, tile_idx: Int32, tile: TileInfo, stage: Int32, phase: Int32
    ) -> tuple[Int32, Int32]:
        state = self.new_mainloop(ctx, tile, is_window=True)
        stage, phase = self.mainloop(ctx, state, stage, phase)
        self.epilogue_window(ctx, state, self.tile_info(tile_idx, ctx.block_lists))
        return Selection.compute_tile(self, ctx, tile_idx, tile, *advance(ctx.storage.kv_pipeline, stage, phase))

    @cute.jit
    def epilogue_window(self, ctx: WarpgroupContext, state: MainloopState, tile: TileInfo) -> None:
        """The window branch's O and LSE, by the threads that :meth:`epilogue` lets read it."""
        _, _, window_o, _, window_lse, *_ = ctx.tensors
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.row_coord(tile, ctx.wg_idx, self.score_rows.row(ctx.thread, slot))
            inv_sum, row_lse = softmax.finalize(state.row_state[0], self.score_rows, slot)
            values = self.transpose_quad(state.acc, slot, inv_sum)
            if exists:
                for i, column in enumerate(self.vector_columns(ctx.thread)):
                    vectors.store(values[None, i].load(), window_o[row, head, None], column)
                if const_expr(self.s.save_for_backward):
                    seq_row = tile.seq_row + row - tile.row
                    if (ctx.thread % 4 == 0) & (seq_row < window_lse.shape[2]):
                        window_lse[tile.sequence, head, seq_row] = row_lse

    @cute.jit
    def epilogue(self, ctx: WarpgroupContext, mainloop_state: MainloopState, tile: TileInfo) -> None:
        """The gated sum of the branches, each rounded to O's type first.

        All loads are issued before the first store, since loads do not pass stores.
        """
        (o, _, _, _, _, selected_out, lse), (softmax_state, _) = ctx.tensors, mainloop_state.row_state
        columns, loaded = self.vector_columns(ctx.thread), []
        for slot in cutlass.range_constexpr(2):
            row, head, exists = self.row_coord(tile, ctx.wg_idx, self.score_rows.row(ctx.thread, slot))
            row, head = Int32(select_(exists, row, tile.row)), Int32(select_(exists, head, tile.head_begin))
            loaded.append((row, head, exists, *self.load_branches(ctx, row, head, exists, columns)))
        for slot in cutlass.range_constexpr(2):
            row, head, exists, compressed_o, window_o, gate_values = loaded[slot]
            row_sum = self.score_rows.all_reduce_row(softmax_state.row_sum[slot], lambda a, b: a + b)
            selected_o = self.transpose_quad(
                mainloop_state.acc, slot, Float32(select_(row_sum == 0.0, Float32(1.0), 1.0 / row_sum))
            )
            if exists:
                for i in cutlass.range_constexpr(len(columns)):
                    branches = [x.load().to(Float32) for x in (compressed_o[i], selected_o[None, i], window_o[i])]
                    gated_sum = (
                        branches[0] * gate_values[0] + branches[1] * gate_values[1] + branches[2] * gate_values[2]
                    )
                    vectors.store(gated_sum, o[row, head, None], columns[i])
                    if const_expr(self.s.save_for_backward):
                        vectors.store(selected_o[None, i].load(), selected_out[row, head, None], columns[i])
                if const_expr(self.s.save_for_backward):
                    self.write_row_stats([lse], (row, head), softmax_state, slot, row_sum, ctx.thread)

    @cute.jit
    def store_chunks(self, ctx: WarpgroupContext, tile: TileInfo, chunks: Sequence[cute.Tensor]) -> None:
        """The gated sum of the single-query path, chunk by chunk. A query's loads are issued before the previous
        query's stores.
        """
        o, _, _, _, _, selected_out, *_ = ctx.tensors
        chunks_per_query = self.s.head_dim_v // WGMMA_M
        vectors_of_query = [
            [
                x
                for chunk_idx in range(compressed_o, compressed_o + chunks_per_query)
                for x in self.chunk_vectors(ctx, tile, chunk_idx)
            ]
            for compressed_o in range(0, len(chunks), chunks_per_query)
        ]
        prefetched = self.load_chunk_branches(ctx, vectors_of_query[0])
        for i in cutlass.range_constexpr(len(vectors_of_query)):
            query_vectors = vectors_of_query[i]
            loaded = prefetched
            vectors_per_chunk = len(vectors_of_query[i]) // chunks_per_query
            if const_expr(i + 1 < len(vectors_of_query)):
                prefetched = self.load_chunk_branches(ctx, vectors_of_query[i + 1])
            for j in cutlass.range_constexpr(len(query_vectors)):
                row, head, column, vector, exists = query_vectors[j]
                (compressed_o,), (window_o,), gate_values = loaded[j]
                if const_expr(j % vectors_per_chunk == 0):
                    sO = self.stage_chunk(ctx, chunks[i * chunks_per_query + j // vectors_per_chunk])
                selected_o = vectors.load(sO[vector // VECTORS_PER_CHUNK, None], vector % VECTORS_PER_CHUNK)
                if exists:
                    branches = [x.load().to(Float32) for x in (compressed_o, selected_o, window_o)]
                    gated_sum = (
                        branches[0] * gate_values[0] + branches[1] * gate_values[1] + branches[2] * gate_values[2]
                    )
                    vectors.store(gated_sum, o[row, head, None], column)
                    if const_expr(self.s.save_for_backward):
                        vectors.store(selected_o.load(), selected_out[row, head, None], column)

    def load_chunk_branches(self, ctx: WarpgroupContext, coords: Sequence[Any]) -> list[Any]:
        """The other branches' vectors at some coordinates, and the gates."""
        return [self.load_branches(ctx, row, head, exists, [column]) for row, head, column, _, exists in coords]

    def load_branches(
        self, ctx: WarpgroupContext, row: Int32, head: Int32, exists: Boolean, columns: Sequence[Any]
    ) -> tuple[Any, Any, Any]:
        """Vectors of the other branches of a head of a row, and the gates.

        For a row that does not exist, the address is another branch's: the window's O at this coordinate is being
        written by another thread.
        """
        _, compressed_o, window_o, gates, *_ = ctx.tensors
        branch_rows = [x[row, head, None] for x in (compressed_o, window_o)]
        address = Int64(select_(exists, *(x.iterator.toint() for x in reversed(branch_rows))))
        start = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=VECTOR * self.dtype.width // 8)
        branch_rows[1] = cute.make_tensor(start, cute.make_layout(self.s.head_dim_v))
        vectors_of_branches = [[vectors.load(line, column) for column in columns] for line in branch_rows]
        return *vectors_of_branches, [gates[row, head, i].to(Float32) for i in range(len(BRANCHES))]
