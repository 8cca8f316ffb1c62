"""NSA selection attention on Hopper, forward, with KV blocks in the outer loop (KV-stationary).

For few heads of Q per head of K: then the adjacent query rows of a 64-row MMA mostly select different blocks. Here a
CTA (one warpgroup) owns a KV block, and the query rows that selected it (transposed lists) are the rows of its MMAs:

    (1) S = Q K^T, P = exp2(scale S - m), O_partial = P V, per list entry, with row maxima and sums, to global memory
    (2) a combine kernel: for each query row, the online-softmax reduction of its entries

Each CTA loads K and V once by TMA (one mbarrier); Q rows are gathered by all threads through registers, one tile ahead.
CTAS_PER_SM CTAs hide latency instead of warp specialization.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import seqlen_info, softmax
from cudnn_kernels.attention.sparse import SelectionKVOuterConfiguration
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline import vectors
from cudnn_kernels.pipeline.tma import tma_load
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.pipeline.views import transposed
from cudnn_kernels.sm90.attention_forward import WGMMA_M
from cudnn_kernels.sm90.sparse_kv_block import KVBlockTile, SparseKVBlock
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

CTAS_PER_SM = 3
WARPS = WARPGROUP_SIZE // WARP_SIZE
LOADS_IN_FLIGHT = 4  # of a lane


class SelectionKVOuter(SparseKVBlock):
    """The kernels for one :class:`SelectionKVOuterConfiguration`."""

    q_operands = ()

    def __init__(self, configuration: SelectionKVOuterConfiguration) -> None:
        super().__init__(configuration)
        self.rows_per_query = 1 << (configuration.group - 1).bit_length()  # MMA rows of a query row
        self.queries_per_tile = WGMMA_M // self.rows_per_query  # query rows of an MMA

    def launch(self, arguments: Mapping[str, Any]) -> None:
        s, list_ends, cu_seqlens = self.s, arguments["query_offsets"], arguments["cum_seqlen_q"]
        scale_log2 = arguments["scale_softmax"] * softmax.LOG2_E
        first_head = arguments["first_head"]
        stream = arguments["stream"]
        o_partial = arguments["o_partial"], arguments["partial_stats"]
        lists_per_head = (list_ends.shape[0] - 1) // s.key_heads
        num_ctas = o_partial[0].shape[0] // s.list_chunk + arguments["some_heads"] * lists_per_head
        self.kv_outer_kernel(
            self.make_tma_atoms(arguments, WGMMA_M, WGMMA_M),
            arguments["q"],
            o_partial,
            arguments["query_indices"],
            list_ends,
            cu_seqlens,
            (first_head, first_head + arguments["some_heads"]),
            scale_log2,
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[WARPGROUP_SIZE, 1, 1],
            stream=stream,
            min_blocks_per_mp=CTAS_PER_SM,
            preferred_smem_carveout=100,
        )
        num_rows = arguments["q"].shape[0]
        self.combine_kernel(
            o_partial,
            arguments["entry_positions"],
            list_ends,
            cu_seqlens,
            first_head,
            (arguments["o"], arguments["l"], arguments["m"]),
        ).launch(
            grid=[cute.ceil_div(num_rows, WARPS), arguments["some_heads"] * s.group, 1],
            block=[WARPGROUP_SIZE, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kv_outer_kernel(
        self,
        tma_atoms: Any,
        q: cute.Tensor,
        o_partial: Any,
        query_list: cute.Tensor,
        list_ends: cute.Tensor,
        cu_seqlens: cute.Tensor,
        heads: tuple[Int32, Int32],
        scale_log2: Float32,
    ) -> None:
        """A CTA has a block and a chunk of its list, of heads of K from ``heads[0]`` to before ``heads[1]``."""
        s, (thread, cta), allocator = self.s, thread_block_idx(), SmemAllocator()
        shapes = {"k": (WGMMA_M, s.head_dim, 1), "v": (WGMMA_M, s.head_dim_v, 1), "q": (WGMMA_M, s.head_dim, 1)}
        smem = self.allocate_smem(allocator, shapes)
        kv_mbar = allocator.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(kv_mbar, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        first_list = heads[0] * ((list_ends.shape[0] - 1) // s.key_heads)
        first_entry = Int32(list_ends[first_list, 0])
        kv_tile = self.list_chunk_tile(list_ends[first_list, 1] + cta, 0, list_ends, cu_seqlens)
        if (kv_tile.num_keys > 0) & (kv_tile.head < heads[1]) & (kv_tile.begin < kv_tile.end):
            if thread < WARP_SIZE:
                self.load_kv_block(tma_atoms, smem, kv_mbar, kv_tile)
            self.compute_block(q, smem, kv_mbar, o_partial, query_list, kv_tile, first_entry, scale_log2, thread)

    set_kernel_name(kv_outer_kernel, "cudnn_attention_selection_kv_outer")

    def load_kv_block(self, tma_atoms: Any, smem: Any, kv_mbar: Any, kv_tile: KVBlockTile) -> None:
        """One warp loads K and V of the block; rows beyond the sequence are 0."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                kv_mbar, self.tile_bytes(WGMMA_M, self.s.head_dim + self.s.head_dim_v)
            )
        for tma_atom, tensor, buffer, head_dim in self.tma_loads(tma_atoms, smem):
            tma_tensor = seqlen_info.tma_rows(
                tensor, kv_tile.head, Int32(0), kv_tile.offset_k, kv_tile.key_begin + kv_tile.num_keys
            )
            tile = cute.local_tile(cute.domain_offset((kv_tile.key_begin, 0), tma_tensor), (WGMMA_M, head_dim), (0, 0))
            tma_load(tma_atom, tile, buffer[None, None, 0], kv_mbar)

    @cute.jit
    def compute_block(
        self,
        q: cute.Tensor,
        smem: Any,
        kv_mbar: Any,
        o_partial: Any,
        query_list: cute.Tensor,
        kv_tile: KVBlockTile,
        first_entry: Int32,
        scale_log2: Float32,
        thread: Int32,
    ) -> None:
        """All rows of a chunk. ``first_entry``: list entries before the first list of the call."""
        s, (o_entries, entry_stats), sQ = self.s, o_partial, smem["q"][None, None, 0]
        tSrQ, tSrK = self.operand_a(sQ, thread), self.operand_b(smem["k"], thread)
        tOrV = self.operand_b(transposed(smem["v"]), thread, True)
        acc_S, acc_O = self.accumulator(WGMMA_M), self.accumulator(s.head_dim_v)
        tOrP = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        q_regs = [cute.make_rmem_tensor(VECTOR, self.dtype) for _ in self.thread_vectors(thread)]
        num_tiles = cute.ceil_div(kv_tile.end - kv_tile.begin, self.queries_per_tile)
        self.gather_q(q, query_list, kv_tile, kv_tile.begin, q_regs, thread)
        cute.arch.mbarrier_wait(kv_mbar, 0)
        for q_tile in cutlass.range(num_tiles, unroll=1):
            # (1) Q from registers to shared memory.
            entry = kv_tile.begin + q_tile * self.queries_per_tile
            for vector, (row, column) in zip(q_regs, self.thread_vectors(thread), strict=True):
                cute.autovec_copy(vector, cute.local_tile(sQ[row, None], (VECTOR,), (column,)))
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_threads()
            # (2) S = Q K^T, while the next Q is gathered.
            self.mma_ss(acc_S, tSrQ, tSrK, WGMMA_M, s.head_dim, 0)
            if q_tile + 1 < num_tiles:
                self.gather_q(q, query_list, kv_tile, entry + self.queries_per_tile, q_regs, thread)
            visible_ends = [self.visible_end(query_list, kv_tile, entry, thread, slot) for slot in range(2)]
            self.wait_mma(0)
            # (3) P = exp2(scale S - m), masked.
            softmax_state = softmax.OnlineSoftmax(*(cute.make_rmem_tensor(2, Float32) for _ in range(2)), scale_log2)
            softmax.reset(softmax_state)
            for slot in cutlass.range_constexpr(2):
                for position, i in enumerate(self.score_rows.order(WGMMA_M, slot)):
                    visible = self.score_rows.column(thread, position) < visible_ends[slot]
                    acc_S[i] = Float32(select_(visible, acc_S[i], -Float32.inf))
            softmax.online_softmax(softmax_state, acc_S, self.score_rows, WGMMA_M, rescale_threshold=0.0)
            # (4) O = P V.
            tOrP.store(acc_S.load().to(self.dtype))
            self.mma_rs(acc_O, tOrP, tOrV, s.head_dim_v, WGMMA_M, 0, accumulate=False)
            totals = [
                self.score_rows.all_reduce_row(softmax_state.row_sum[slot], lambda a, b: a + b) for slot in range(2)
            ]
            self.wait_mma(0)
            cute.arch.sync_threads()  # all have read Q
            # (5) O / l, m and l of each list entry.
            for slot in cutlass.range_constexpr(2):
                row = self.score_rows.row(thread, slot)
                entry_idx, head = entry + row // self.rows_per_query, row % self.rows_per_query
                inv_sum = Float32(select_(totals[slot] == 0.0, Float32(0.0), 1.0 / totals[slot]))
                converted = self.transpose_quad(acc_O, slot, inv_sum)
                if (entry_idx < kv_tile.end) & (head < s.group):
                    for i, column in enumerate(self.vector_columns(thread)):
                        vectors.store(converted[None, i].load(), o_entries[entry_idx - first_entry, head, None], column)
                    if thread % 4 == 0:
                        entry_stats[entry_idx - first_entry, head, 0] = softmax_state.row_max[slot] * scale_log2
                        entry_stats[entry_idx - first_entry, head, 1] = totals[slot]

    def thread_vectors(self, thread: Int32) -> list[tuple[Int32, Int32]]:
        """A thread's (row, vector) coordinates in a tile of Q."""
        columns = self.s.head_dim // VECTOR
        return [
            (i * (WARPGROUP_SIZE // columns) + thread // columns, thread % columns)
            for i in range(WGMMA_M * columns // WARPGROUP_SIZE)
        ]

    @cute.jit
    def gather_q(
        self, q: cute.Tensor, query_list: cute.Tensor, kv_tile: KVBlockTile, entry: Int32, q_regs: Any, thread: Int32
    ) -> None:
        """Gathers a thread's vectors of the next tile of Q; rows and heads beyond the end are clamped."""
        for vector, (mma_row, column) in zip(q_regs, self.thread_vectors(thread), strict=True):
            q_row = query_list[cutlass.min(entry + mma_row // self.rows_per_query, kv_tile.end - 1)]
            head = kv_tile.head * self.s.group + cutlass.min(mma_row % self.rows_per_query, self.s.group - 1)
            cute.autovec_copy(cute.local_tile(q[q_row, head, None], (VECTOR,), (column,)), vector)

    def visible_end(
        self, query_list: cute.Tensor, kv_tile: KVBlockTile, entry: Int32, thread: Int32, slot: int
    ) -> Int32:
        """The end of the keys that a thread's row sees."""
        if not self.s.causal:
            return kv_tile.num_keys
        query_idx = self.score_rows.row(thread, slot) // self.rows_per_query
        q_row = query_list[cutlass.min(entry + query_idx, kv_tile.end - 1)]
        return cutlass.min(q_row + 1 - kv_tile.offset_k - kv_tile.key_begin, kv_tile.num_keys)

    @cute.kernel
    def combine_kernel(
        self,
        o_partial: Any,
        entry_positions: cute.Tensor,
        list_ends: cute.Tensor,
        cu_seqlens: cute.Tensor,
        first_head: Int32,
        results: Any,
    ) -> None:
        """One warp per head of a row. Half-warps alternate between entries, 16 bytes of O per lane."""
        s, (o_entries, entry_stats), (o, row_sums, row_maxes) = self.s, o_partial, results
        thread, _, _ = cute.arch.thread_idx()
        block, head_idx, _ = cute.arch.block_idx()
        lane, row = thread % WARP_SIZE, block * WARPS + cute.arch.make_warp_uniform(thread // WARP_SIZE)
        kv_head, head_in_group = first_head + head_idx // s.group, head_idx % s.group
        first_list = first_head * ((list_ends.shape[0] - 1) // s.key_heads)
        first_entry, list_len = Int32(list_ends[first_list, 0]), entry_positions.shape[2]
        if row < cu_seqlens[cu_seqlens.shape[0] - 1]:
            acc = cute.make_rmem_tensor(VECTOR, Float32)
            acc.fill(0.0)
            row_max, row_sum = Float32(-math.inf), Float32(0.0)
            for first_lane_entry in cutlass.range(0, list_len, WARP_SIZE, unroll=1):
                position, entry_max, entry_sum = Int32(-1), Float32(-math.inf), Float32(0.0)
                if first_lane_entry + lane < list_len:
                    position = entry_positions[row, kv_head, first_lane_entry + lane]
                    if position >= 0:
                        position -= first_entry
                        entry_max = entry_stats[position, head_in_group, 0]
                        entry_sum = entry_stats[position, head_in_group, 1]
                new_max = entry_max
                for distance in (1, 2, 4, 8, 16):
                    new_max = cute.arch.fmax(new_max, cute.arch.shuffle_sync_bfly(new_max, distance))
                new_max = cute.arch.fmax(new_max, row_max)
                max_log2 = Float32(select_(new_max == -math.inf, Float32(0.0), new_max))
                rescale = cute.math.exp2(row_max - max_log2, fastmath=True)
                weight = entry_sum * cute.math.exp2(entry_max - max_log2, fastmath=True)
                row_max = new_max
                row_sum = row_sum * rescale + weight
                for i in cutlass.range_constexpr(VECTOR):
                    acc[i] = acc[i] * rescale
                for begin in cutlass.range(
                    0, cutlass.min(list_len - first_lane_entry, WARP_SIZE), 2 * LOADS_IN_FLIGHT, unroll=1
                ):
                    loaded = []
                    for pair in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                        lane_src = begin + 2 * pair + lane // 16
                        src_position = cute.arch.shuffle_sync(position, lane_src)
                        src_weight = cute.arch.shuffle_sync(weight, lane_src)
                        o_row = o_entries[cutlass.max(src_position, 0), head_in_group, None]
                        loaded.append((vectors.load(o_row, lane % 16 % (s.head_dim_v // VECTOR)), src_weight))
                    for values, src_weight in loaded:
                        if src_weight > 0.0:  # weight 0: the entry is uninitialized
                            for i in cutlass.range_constexpr(VECTOR):
                                acc[i] = acc[i] + values[i].to(Float32) * src_weight
            for distance in (1, 2, 4, 8, 16):
                row_sum += cute.arch.shuffle_sync_bfly(row_sum, distance)
            src_weight = Float32(select_(row_sum == 0.0, Float32(0.0), 1.0 / row_sum))
            for i in cutlass.range_constexpr(VECTOR):
                acc[i] = (acc[i] + cute.arch.shuffle_sync_bfly(acc[i], 16)) * src_weight
            head = kv_head * s.group + head_in_group
            if lane < s.head_dim_v // VECTOR:
                vectors.store(acc.load(), o[row, head, None], lane)
            if lane == 0:
                row_sums[row, head] = row_sum
                row_maxes[row, head] = row_max * math.log(2)

    set_kernel_name(combine_kernel, "cudnn_attention_selection_kv_outer_combine")
