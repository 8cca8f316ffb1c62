"""NSA compression attention fused with top-k block selection on Hopper: O, LSE and block lists in one pass.

For sequences whose compressed keys fit one tile: all scores of a row are in registers, so probabilities are known once
row max and sum are. Q is loaded once, S computed once. MMA rows and head reduction are those of
:mod:`cudnn_kernels.sm90.top_k`.

Persistent CTAs, each with a head of K: K and V stay in shared memory while the sequence does not change. All warpgroups
are MMA warpgroups of 64 rows; the first warp of each issues the TMA loads of its next Q (two stages, full/empty
mbarriers per warpgroup). Per tile: (1) S = Q K^T, (2) softmax, (3) issue O = P V, (4) while it runs, sum P over heads
and select the top-k blocks, (5) store O through shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, select_
from cutlass.memory import SmemAllocator

from cudnn_kernels.attention import seqlen_info, softmax
from cudnn_kernels.attention.mask import CompressedMask
from cudnn_kernels.attention.sparse import CompressionTopKConfiguration
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.scale_factor_atoms import transposed
from cudnn_kernels.pipeline.tma import partition_tile, tma_load
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.sm90.top_k import WARP_ROWS, QueryTile, TopK
from cudnn_kernels.sm90.wgmma_utils import WGMMA_M
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

EXCLUDED = -(1 << 31)  # less than the bits of any score: probabilities are not negative


class CompressionTopK(TopK):
    """The kernel for one :class:`CompressionTopKConfiguration`."""

    min_padded_group = 8  # heads of a TMA box
    q_stages = 2

    def __init__(self, configuration: CompressionTopKConfiguration) -> None:
        super().__init__(configuration)
        self.num_mma_warpgroups = self.tile_m // WGMMA_M
        self.queries_per_warpgroup = WGMMA_M // self.padded_group  # query rows of a warpgroup
        self.head_box = min(self.padded_group, WARP_ROWS)
        self.blocks_per_step = -(-self.tile_n // self.keys_per_block)
        self.blocks_per_lane = -(-self.blocks_per_step // WARP_SIZE)  # blocks whose scores a lane has
        self.head_dims = {"q": configuration.head_dim, "k": configuration.head_dim, "v": configuration.head_dim_v}

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        o, indices = (seqlen_info.as_sdhb(arguments[x], True) for x in ("o", "topk_indices"))
        results = o, seqlen_info.lse_view(arguments["lse"], True, by_head=False), indices
        cu_seqlens = arguments["cum_seqlen_q"], arguments["cum_seqlen_k"]
        tiles = seqlen_info.num_blocks(arguments["q"].shape[0], cu_seqlens[0].shape[0] - 1, self.rows_per_tile, True)
        ctas_per_head = cutlass.max(cutlass.min(arguments["num_sms"] // c.key_heads, tiles), 1)
        self.kernel(
            self.make_tma_atoms(arguments, self.head_box, self.tile_n),
            results,
            cu_seqlens,
            tiles,
            arguments["scale_softmax"] * softmax.LOG2_E,
        ).launch(
            grid=[ctas_per_head * c.key_heads, 1, 1],
            block=[self.num_mma_warps * WARP_SIZE, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, tma_atoms: Any, results: Any, cu_seqlens: Any, tiles: Int32, scale_log2: Float32) -> None:
        """A persistent CTA: tiles of one head of K, with a stride. ``results``: O, LSE and the lists."""
        c, allocator, (thread, cta) = self.c, SmemAllocator(), thread_block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(thread // WARP_SIZE)
        wg_idx = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE)
        shapes = {
            "q": (self.tile_m, c.head_dim, self.q_stages),
            "k": (self.tile_n, c.head_dim, 1),
            "v": (self.tile_n, c.head_dim_v, 1),
            "o": (self.tile_m, c.head_dim_v, 1),
        }
        smem = self.allocate_smem(allocator, shapes)
        layout = cute.make_layout((self.tile_n, self.queries_per_warp, self.num_mma_warps, self.sum_stages))
        sums = allocator.allocate_tensor(Float32, layout, byte_alignment=16)
        q_full, q_empty = (
            allocator.allocate_array(cutlass.Int64, self.num_mma_warpgroups * self.q_stages) for _ in range(2)
        )
        kv_full = allocator.allocate_array(cutlass.Int64, 1)
        if thread == 0:
            for i in cutlass.range_constexpr(self.num_mma_warpgroups * self.q_stages):
                cute.arch.mbarrier_init(q_full + i, 1)
                cute.arch.mbarrier_init(q_empty + i, WARPGROUP_SIZE // WARP_SIZE)
            cute.arch.mbarrier_init(kv_full, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        head, first_tile, tile_stride = cta % c.key_heads, cta // c.key_heads, num_ctas // c.key_heads
        is_leader = warp_index % (WARPGROUP_SIZE // WARP_SIZE) == 0
        q_mbarriers = (q_full + wg_idx * self.q_stages, q_empty + wg_idx * self.q_stages)
        for i in cutlass.range_constexpr(self.q_stages):
            if is_leader & (first_tile + i * tile_stride < tiles):
                self.load_q(
                    tma_atoms,
                    smem["q"],
                    q_mbarriers,
                    self.query_tile(cu_seqlens, first_tile + i * tile_stride, head),
                    wg_idx,
                    Int32(i),
                )
        tiles_done, loaded_seq, kv_loads = Int32(0), Int32(-1), Int32(0)
        for tile in cutlass.range(first_tile, tiles, tile_stride, unroll=1):
            q_tile = self.query_tile(cu_seqlens, tile, head)
            if q_tile.seqlen.batch != loaded_seq:
                cute.arch.sync_threads()  # all warps are done with the previous sequence's K and V
                if warp_index == 0:
                    self.load_kv(tma_atoms, smem, kv_full, q_tile)
                cute.arch.mbarrier_wait(kv_full, kv_loads % 2)
                loaded_seq = q_tile.seqlen.batch
                kv_loads += 1
            compute_args = (smem, sums, q_mbarriers, results, q_tile, scale_log2, tiles_done, thread)
            if (
                self.mask(q_tile).end(q_tile.row_begin + (wg_idx + 1) * self.queries_per_warpgroup - 1)
                <= self.tile_n // 2
            ):
                self.compute_tile(*compute_args, self.tile_n // 2)
            else:
                self.compute_tile(*compute_args, self.tile_n)
            next_tile = tile + self.q_stages * tile_stride
            if is_leader & (next_tile < tiles):
                cute.arch.mbarrier_wait(q_mbarriers[1] + tiles_done % self.q_stages, tiles_done // self.q_stages % 2)
                self.load_q(
                    tma_atoms,
                    smem["q"],
                    q_mbarriers,
                    self.query_tile(cu_seqlens, next_tile, head),
                    wg_idx,
                    tiles_done % self.q_stages,
                )
            tiles_done += 1

    set_kernel_name(kernel, "cudnn_attention_compression_top_k")

    @cute.jit
    def query_tile(self, cu_seqlens: Any, tile: Int32, head: Int32) -> QueryTile:
        """The query rows of a tile."""
        batch, tile_in_seq = seqlen_info.find_block(cu_seqlens[0], tile, self.rows_per_tile)
        return QueryTile(
            seqlen_info.varlen_seqlen_info(cu_seqlens[0], cu_seqlens[1], batch),
            tile_in_seq * self.rows_per_tile,
            head,
            0,
        )

    def load_q(
        self, tma_atoms: Any, sQ: cute.Tensor, q_mbarriers: Any, q_tile: QueryTile, wg_idx: Int32, stage: Int32
    ) -> None:
        """One warp issues the TMA loads of a warpgroup's query rows; rows that do not exist are 0."""
        c, seqlen, q_full, (atom, tensor) = self.c, q_tile.seqlen, q_mbarriers[0] + stage, tma_atoms["q"]
        q_box = (self.head_box, c.head_dim)
        source = cute.local_tile(cute.domain_offset((q_tile.head * c.group, 0, 0), tensor), q_box, (None, 0, None))
        sQ_wg = cute.local_tile(sQ[None, None, stage], (WGMMA_M, c.head_dim), (wg_idx, 0))
        tQsQ, tQgQ = partition_tile(atom, cute.local_tile(sQ_wg, q_box, (None, 0)), source)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(q_full, WGMMA_M * c.head_dim * self.dtype.width // 8)
        for row in range(0, WGMMA_M, self.head_box):
            query = q_tile.row_begin + wg_idx * self.queries_per_warpgroup + row // self.padded_group
            head_in_group = row % self.padded_group
            exists = query < seqlen.seqlen_q if head_in_group < c.group else Boolean(False)
            # A head out of range: TMA fills zeros.
            head_box_idx = Int32(select_(exists, Int32(head_in_group // self.head_box), Int32(c.heads)))
            q_row = seqlen.offset_q + cutlass.max(cutlass.min(query, seqlen.seqlen_q - 1), 0)
            cute.copy(atom, tQgQ[None, head_box_idx, q_row], tQsQ[None, row // self.head_box], tma_bar_ptr=q_full)

    def load_kv(self, tma_atoms: Any, smem: Any, kv_full: Any, q_tile: QueryTile) -> None:
        """One warp issues the TMA loads of K and V of a sequence; rows beyond its end are 0."""
        seqlen = q_tile.seqlen
        with cute.arch.elect_one():
            elements = self.tile_n * (self.head_dims["k"] + self.head_dims["v"])
            cute.arch.mbarrier_arrive_and_expect_tx(kv_full, elements * self.dtype.width // 8)
        for x in ("k", "v"):
            atom, tensor = tma_atoms[x]
            keys = seqlen_info.tma_rows(tensor, q_tile.head, Int32(0), seqlen.offset_k, seqlen.seqlen_k)
            kv_tile = cute.local_tile(keys, (self.tile_n, self.head_dims[x]), (0, 0))
            tma_load(atom, kv_tile, smem[x][None, None, 0], kv_full)

    @cute.jit
    def compute_tile(
        self,
        smem: Any,
        sums: cute.Tensor,
        q_mbarriers: Any,
        results: Any,
        q_tile: QueryTile,
        scale_log2: Float32,
        tiles_done: Int32,
        thread: Int32,
        num_keys: int,
    ) -> None:
        """A warpgroup's rows of a tile, none of which sees more than ``num_keys`` keys. ``tiles_done``: its tiles
        before.
        """
        c, (o, lse, indices) = self.c, results
        wg_idx, wg_thread = cute.arch.make_warp_uniform(thread // WARPGROUP_SIZE), thread % WARPGROUP_SIZE
        warp_index, lane = cute.arch.make_warp_uniform(thread // WARP_SIZE), cute.arch.lane_idx()
        leader = warp_index // self.warps_per_query * self.warps_per_query
        stage, phase = tiles_done % self.q_stages, tiles_done // self.q_stages % 2
        tSrQ = self.operand_a(
            cute.local_tile(smem["q"][None, None, stage], (WGMMA_M, c.head_dim), (wg_idx, 0)), wg_thread
        )
        sK = cute.local_tile(smem["k"], (num_keys, c.head_dim, 1), (0, 0, 0))
        tSrK, tOrV = self.operand_b(sK, wg_thread), self.operand_b(transposed(smem["v"]), wg_thread, True)
        acc_S, acc_O = self.accumulator(num_keys), self.accumulator(c.head_dim_v)
        tOrP = cute.make_rmem_tensor(acc_S.shape, self.dtype)
        # (1) S = Q K^T; release Q.
        cute.arch.mbarrier_wait(q_mbarriers[0] + stage, phase)
        self.mma_ss(acc_S, tSrQ, tSrK, num_keys, c.head_dim, 0)
        self.wait_mma(0)
        if lane == 0:
            cute.arch.mbarrier_arrive(q_mbarriers[1] + stage)
        # (2) Softmax.
        inv_sums = self.softmax(acc_S, lse, q_tile, scale_log2, thread, num_keys)
        tOrP.store(acc_S.load().to(self.dtype))
        smem_sums = sums[None, None, None, tiles_done % self.sum_stages]
        masked_inv_sums = [inv_sums[1, slot] for slot in range(2)]
        probs = [[acc_S[i] * masked_inv_sums[slot] for i in self.acc_rows.order(num_keys, slot)] for slot in range(2)]
        # (3) Issue O = P V.
        self.mma_rs(acc_O, tOrP, tOrV, c.head_dim_v, num_keys, 0, accumulate=False)
        # (4) While it runs: P summed over heads, top-k block selection.
        self.reduce_heads(probs, smem_sums[None, None, warp_index], wg_thread)
        self.sync_query_warps(warp_index)
        if warp_index == leader:
            for slot in cutlass.range_constexpr(self.queries_per_warp):
                query = q_tile.row_begin + warp_index // self.warps_per_query * self.queries_per_warp + slot
                self.select_top_k(smem_sums, slot, indices, leader, q_tile, query, num_keys)
        # (5) O.
        self.wait_mma(0)
        self.store_o(acc_O, inv_sums, smem["o"][None, None, 0], o, q_tile, thread)

    @cute.jit
    def softmax(
        self, acc_S: cute.Tensor, lse: cute.Tensor, q_tile: QueryTile, scale_log2: Float32, thread: Int32, num_keys: int
    ) -> cute.Tensor:
        """Softmax of S in place, LSE; each row's 1 / row_sum, and the same with 0 for rows that do not exist."""
        seqlen, wg_idx, wg_thread = q_tile.seqlen, thread // WARPGROUP_SIZE, thread % WARPGROUP_SIZE
        mask = self.mask(q_tile)
        for slot in cutlass.range_constexpr(2):
            query, _, _ = self.row_coord(q_tile, wg_idx, self.acc_rows.row(wg_thread, slot))
            end = mask.end(query)
            for position, i in enumerate(self.acc_rows.order(num_keys, slot)):
                acc_S[i] = Float32(select_(self.acc_rows.column(wg_thread, position) < end, acc_S[i], -Float32.inf))
        softmax_state = softmax.OnlineSoftmax(
            cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32), scale_log2
        )
        softmax.reset(softmax_state)
        softmax.online_softmax(softmax_state, acc_S, self.acc_rows, num_keys, rescale_threshold=0.0, chains=4)
        inv_sums = cute.make_rmem_tensor((2, 2), Float32)
        for slot in cutlass.range_constexpr(2):
            query, head, exists = self.row_coord(q_tile, wg_idx, self.acc_rows.row(wg_thread, slot))
            inv_sum, row_lse = softmax.finalize(softmax_state, self.acc_rows, slot)
            inv_sums[0, slot], inv_sums[1, slot] = inv_sum, Float32(select_(exists, inv_sum, Float32(0.0)))
            if exists & (wg_thread % 4 == 0):
                lse[seqlen.offset_q + query, head, 0] = row_lse
        return inv_sums

    def mask(self, q_tile: QueryTile) -> CompressedMask:
        """The mask of compressed keys."""
        seqlen = q_tile.seqlen
        ratio = cutlass.max(seqlen.seqlen_q // cutlass.max(seqlen.seqlen_k, 1), 1)
        return CompressedMask(seqlen.seqlen_q, seqlen.seqlen_k, Int32(0), None, None, ratio)

    def row_coord(self, q_tile: QueryTile, wg_idx: Int32, mma_row: Int32) -> tuple[Int32, Int32, Boolean]:
        """The query row and the head of an MMA row, and whether they exist."""
        query = q_tile.row_begin + wg_idx * self.queries_per_warpgroup + mma_row // self.padded_group
        head_in_group = mma_row % self.padded_group
        exists = (query < q_tile.seqlen.seqlen_q) & (head_in_group < self.c.group)
        return query, q_tile.head * self.c.group + head_in_group, exists

    @cute.jit
    def select_top_k(
        self,
        sums: cute.Tensor,
        slot: int,
        indices: cute.Tensor,
        leader: Int32,
        q_tile: QueryTile,
        query: Int32,
        num_keys: int,
    ) -> None:
        """One warp: the list of a query row, from the probability sums of ``num_keys`` keys. A lane has some blocks'
        scores as bits.
        """
        seqlen, lane = q_tile.seqlen, cute.arch.lane_idx()
        # No blocks beyond the tile's keys.
        num_candidates = cutlass.min(self.num_candidates(seqlen, query), self.blocks_per_step)
        score_bits = cute.make_rmem_tensor(self.blocks_per_lane, Int32)
        selected = cute.make_rmem_tensor(self.entries_per_lane, Int32)
        selected.fill(-1)
        for i in cutlass.range_constexpr(self.blocks_per_lane):
            block, bits = i * WARP_SIZE + lane, Int32(EXCLUDED)
            if (block > 0) & (block < num_candidates):
                score = Float32(0.0)
                for x in cutlass.range_constexpr(self.keys_per_block):
                    if block * self.keys_per_block + x < cutlass.min(seqlen.seqlen_k, num_keys):
                        for warp in cutlass.range_constexpr(self.warps_per_query):
                            score += sums[block * self.keys_per_block + x, slot, leader + warp]
                bits = score.bitcast(Int32)
            score_bits[i] = bits
        for rank in cutlass.range(cutlass.min(num_candidates - 1, self.c.count), unroll=1):
            best = score_bits[0]
            for i in cutlass.range_constexpr(1, self.blocks_per_lane):
                best = cutlass.max(best, score_bits[i])
            best = cute.arch.warp_redux_sync(best, "max")
            lowest = Int32(self.blocks_per_step)
            for i in cutlass.range_constexpr(self.blocks_per_lane - 1, -1, -1):
                lowest = Int32(select_(score_bits[i] == best, i * WARP_SIZE + lane, lowest))
            lowest = cute.arch.warp_redux_sync(lowest, "min")
            for i in cutlass.range_constexpr(self.blocks_per_lane):
                score_bits[i] = Int32(select_(i * WARP_SIZE + lane == lowest, Int32(EXCLUDED), score_bits[i]))
            for list_half in cutlass.range_constexpr(self.entries_per_lane):
                selected[list_half] = Int32(select_(list_half * WARP_SIZE + lane == rank, lowest, selected[list_half]))
        for list_half in cutlass.range_constexpr(self.entries_per_lane):
            entry = list_half * WARP_SIZE + lane
            if (query < seqlen.seqlen_q) & (entry < self.c.count):
                indices[seqlen.offset_q + query, self.c.num_fixed + entry, q_tile.head, 0] = selected[list_half]
        self.store_fixed_blocks(indices, q_tile, query, query < seqlen.seqlen_q)

    @cute.jit
    def store_o(
        self,
        acc_O: cute.Tensor,
        inv_sums: cute.Tensor,
        sO: cute.Tensor,
        o: cute.Tensor,
        q_tile: QueryTile,
        thread: Int32,
    ) -> None:
        """O of a warp's rows, through shared memory, for coalesced stores.

        Before a warp writes to shared memory again, it synchronizes for the sums of its next rows.
        """
        c, seqlen, wg_idx, wg_thread = self.c, q_tile.seqlen, thread // WARPGROUP_SIZE, thread % WARPGROUP_SIZE
        pair = cute.make_rmem_tensor(2, self.dtype)
        for slot in cutlass.range_constexpr(2):
            sO_row = sO[wg_idx * WGMMA_M + self.acc_rows.row(wg_thread, slot), None]
            order = self.acc_rows.order(c.head_dim_v, slot)
            for position in cutlass.range_constexpr(0, len(order), 2):
                for i in cutlass.range_constexpr(2):
                    pair[i] = (acc_O[order[position + i]] * inv_sums[0, slot]).to(self.dtype)
                cute.autovec_copy(
                    pair, cute.local_tile(sO_row, (2,), (self.acc_rows.column(wg_thread, position) // 2,))
                )
        cute.arch.sync_warp()
        columns = c.head_dim_v // VECTOR
        values = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(WARP_ROWS * columns // WARP_SIZE):
            vector = wg_thread % WARP_SIZE + i * WARP_SIZE
            row, column = wg_thread // WARP_SIZE * WARP_ROWS + vector // columns, vector % columns
            query, head, exists = self.row_coord(q_tile, wg_idx, row)
            cute.autovec_copy(cute.local_tile(sO[wg_idx * WGMMA_M + row, None], (VECTOR,), (column,)), values)
            if exists:
                out = o[seqlen.offset_q + query, None, head, 0]
                cute.autovec_copy(values, cute.local_tile(out, (VECTOR,), (column,)))
