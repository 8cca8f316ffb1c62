"""Split-KV attention (flash-decoding) for few query rows and many keys, on any architecture.

Such a call is bound by the bandwidth of reading K and V. A tile's rows are those of all heads of Q that share a head of
K (PackGQA), so K and V are read once for them, and ``num_splits`` CTAs split a sequence's n_blocks: each leaves its
partial O and LSE in the workspace. A second kernel combines them, in a fixed order, so results are deterministic.

Sequences may have different lengths (``seqlen_k``), and K and V may be paged: TMA loads an n_block page by page. Pages
are rows of one matrix, and a :func:`seqlen_info.ragged_view` clips the loads at the end of the sequence: rows beyond
are 0. O and LSE are NaN where a length is not one that the cache can hold, or a page that is read does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, select_

from cudnn_kernels.attention import DecodeConfiguration, seqlen_info
from cudnn_kernels.attention.flash_bwd_preprocess import workspace_tensors
from cudnn_kernels.attention.forward import Forward, K, Params, Q, TileInfo, V
from cudnn_kernels.attention.mask import PackGQAMask
from cudnn_kernels.attention.softmax import LOG2_E
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.tma import tma_load
from cudnn_kernels.pipeline.vectors import VECTOR
from cudnn_kernels.threads import WARP_SIZE, WARPGROUP_SIZE

MAX_TMA_STEPS = (1 << 31) - 1  # of a TMA mode


@dataclass
class KVCacheParams:
    """Sizes and strides of a call. Strides are in units of the ragged view's step."""

    seqlen_q: Int32
    qhead_per_kvhead: Int32
    kv_heads: Int32
    tiles_per_head: Int32  # m_blocks of a head of K
    seqlen_k_max: Int32  # keys that the cache of a sequence holds
    num_pages: Int32
    page_strides: list  # of K and of V
    row_strides: list
    seqlens_k: Any
    page_table: Any  # without one, each sequence is a page
    right: Int32  # window bounds
    left: Int32


@dataclass
class CacheTileInfo(TileInfo):
    """A PackGQA tile: rows of all heads of Q that share a head of K."""

    cache: KVCacheParams


class SplitKV(Forward):
    """The common part of the kernels for a :class:`DecodeConfiguration`, a mixin of a forward kernel.

    Threads load Q and store the partial O of the CTA's split.
    """

    c: DecodeConfiguration

    def __init__(self, configuration: DecodeConfiguration) -> None:
        super().__init__(configuration)
        # Keys of a TMA box.
        rows_per_copy = self.rows_per_copy = min(configuration.page_size or self.tile_n, self.tile_n)
        if self.tile_n % rows_per_copy or configuration.page_size % rows_per_copy or rows_per_copy % 8:
            raise ValueError(
                f"{configuration}: page_size must divide tile_n or be a multiple of it; both are multiples of 8"
            )
        for operand in (K, V):
            self.tma_boxes[operand] = (rows_per_copy, self.tma_boxes[operand][1])

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        q, o = (seqlen_info.as_sdhb(arguments[x], False) for x in ("q", "o"))
        num_splits, batches, kv_heads = arguments["splits"], q.shape[3], arguments["k"].shape[1]
        copies, page_strides, row_strides = [], [], []
        for operand in (K, V):
            kv_pool = seqlen_info.as_sdhb(arguments["qkv"[operand]], False)
            page, row = (seqlen_info.aligned_stride(kv_pool.stride[i], self.dtype.width) for i in (3, 0))
            stride_unit = common_stride(page, row)
            page_strides.append(Int32(page // stride_unit))
            row_strides.append(Int32(row // stride_unit))
            copies.append(self.make_tma_atom(operand, seqlen_info.ragged_view(kv_pool, MAX_TMA_STEPS, stride_unit)))
        sizes = {"splits": Int64(num_splits), "b": Int64(batches), "hq": Int64(q.shape[2]), "sq": Int64(q.shape[0])}
        shape = (q.shape[0], q.shape[2], batches, num_splits)
        partials = workspace_tensors(c, arguments, {"o_partial": (c.head_dim_v, *shape), "lse_partial": shape}, sizes)
        o_partial, lse_partial = partials["o_partial"], partials["lse_partial"]
        qhead_per_kvhead = q.shape[2] // kv_heads
        tiles_per_head = cute.ceil_div(q.shape[0] * qhead_per_kvhead, self.tile_m)
        cache = KVCacheParams(
            q.shape[0],
            qhead_per_kvhead,
            kv_heads,
            tiles_per_head,
            arguments["k"].shape[2] * (arguments["page_table"].shape[1] if c.page_size else 1),
            arguments["k"].shape[0],
            page_strides,
            row_strides,
            arguments.get("seqlen_k"),
            arguments.get("page_table"),
            arguments["right"],
            arguments["left"],
        )
        copies = [(None, q), *copies, (None, o_partial)]
        self.kernel(self.make_params(arguments, copies, lse_partial, None, cache)).launch(
            grid=[tiles_per_head * kv_heads * batches, num_splits, 1],
            block=[self.threads, 1, 1],
            stream=arguments["stream"],
            min_blocks_per_mp=1,
        )
        blocks = cute.ceil_div(q.shape[0] * q.shape[2] * batches, WARPGROUP_SIZE // WARP_SIZE)
        self.combine(
            o_partial, lse_partial, o, seqlen_info.lse_view(arguments["lse"], False), arguments.get("sink")
        ).launch(grid=[blocks, 1, 1], block=[WARPGROUP_SIZE, 1, 1], stream=arguments["stream"])

    @cute.kernel
    def kernel(self, params: Params) -> None:
        """Partial O and LSE of a split."""
        self.body(params)

    set_kernel_name(kernel, "cudnn_attention_decode")

    @cute.jit
    def tile_coord(self, scheduler: KVCacheParams, tile_idx: Any = None) -> tuple[Int32, Int32]:
        """A CTA's m_block, and its head of K among those of all sequences."""
        cta, _, _ = cute.arch.block_idx()
        return cta % scheduler.tiles_per_head, cta // scheduler.tiles_per_head

    @cute.jit
    def tile_info(self, scheduler: KVCacheParams, m_block: Int32, kv_head_idx: Int32) -> CacheTileInfo:
        """The rows of a tile; ``kv_head_idx`` counts the heads of K of all sequences."""
        c = self.c
        kv_head, batch = kv_head_idx % scheduler.kv_heads, kv_head_idx // scheduler.kv_heads
        seqlen_k, qhead_per_kvhead = Int32(scheduler.seqlen_k_max), scheduler.qhead_per_kvhead
        if const_expr(scheduler.seqlens_k is not None):
            seqlen_k = Int32(scheduler.seqlens_k[batch])
            seqlen_k = Int32(select_(self.is_seqlen(scheduler, seqlen_k), seqlen_k, Int32(0)))
        mask = PackGQAMask(
            scheduler.seqlen_q * qhead_per_kvhead,
            seqlen_k,
            Int32(0) if const_expr(c.top_left) else seqlen_k - scheduler.seqlen_q,
            scheduler.right if const_expr(c.right) else None,
            scheduler.left if const_expr(c.left) else None,
            qhead_per_kvhead,
        )
        return CacheTileInfo(
            m_block * self.tile_m, kv_head * qhead_per_kvhead, kv_head, batch, Int32(0), Int32(0), mask, scheduler
        )

    def is_seqlen(self, cache: KVCacheParams, seqlen_k: Int32) -> Boolean:
        """Whether a sequence's cache can have this length."""
        return (seqlen_k >= 0) & (seqlen_k <= cache.seqlen_k_max)

    def is_page(self, cache: KVCacheParams, page: Int32) -> Boolean:
        """Whether there is such a page."""
        return (page >= 0) & (page < cache.num_pages)

    @cute.jit
    def store_lse(self, params: Params, info: CacheTileInfo, row: Int32, thread: Int32, lse: Any) -> None:
        """LSE becomes NaN, and with it O, if the length or a page of the split is wrong."""
        cache, nan = info.cache, Float32(0.0)
        if const_expr(cache.seqlens_k is not None):
            if not self.is_seqlen(cache, Int32(cache.seqlens_k[info.batch])):
                nan = Float32(Float32.nan)
        if const_expr(cache.page_table is not None):
            begin, _, _, end = self.n_block_range(info)
            first = begin * self.tile_n // self.c.page_size
            last = cute.ceil_div(cutlass.min(end * self.tile_n, info.mask.seqlen_k), self.c.page_size)
            for i in cutlass.range(first + cute.arch.lane_idx(), last, WARP_SIZE, unroll=1):
                if not self.is_page(cache, Int32(cache.page_table[info.batch, i])):
                    nan = Float32(Float32.nan)
            nan = cute.arch.warp_reduction_sum(nan)
        lse_or_nan = [lse[slot] + nan for slot in range(self.score_rows.slots)]
        Forward.store_lse(self, params, info, row, thread, lse_or_nan)

    def n_block_range(self, info: TileInfo) -> tuple[Int32, Int32, Int32, Int32]:
        """The split's share of the n_blocks that the tile's rows see."""
        _, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        begin, full_begin, full_end, end = super().n_block_range(info)
        blocks_per_split = cute.ceil_div(end - begin, splits)
        begin = cutlass.min(begin + split * blocks_per_split, end)
        end = cutlass.min(begin + blocks_per_split, end)
        return begin, cutlass.max(full_begin, begin), cutlass.min(full_end, end), end

    def lse_coord(self, info: CacheTileInfo, row: Int32) -> tuple[Any, ...]:
        """The coordinate of a row's partial LSE and O."""
        _, split, _ = cute.arch.block_idx()
        return row // info.mask.qhead_per_kvhead, info.head + row % info.mask.qhead_per_kvhead, info.batch, split

    @cute.jit
    def load_q_rows(self, params: Params, sQ: cute.Tensor, info: CacheTileInfo, row_begin: Any, thread: Int32) -> None:
        """128 threads load rows of Q from ``row_begin`` of the tile on; rows that do not exist are 0."""
        count, columns = cute.size(sQ, mode=[0]), self.c.head_dim // VECTOR
        vector = cute.make_rmem_tensor(VECTOR, self.dtype)
        for i in cutlass.range_constexpr(count * columns // WARPGROUP_SIZE):
            row, column = (i * WARPGROUP_SIZE + thread) // columns, (i * WARPGROUP_SIZE + thread) % columns
            row_idx = info.row + row_begin + row
            vector.fill(0.0)
            if row_idx < info.mask.seqlen_q:
                query, head, batch, _ = self.lse_coord(info, row_idx)
                source = params.tensors[Q][query, None, head, batch]
                cute.autovec_copy(cute.local_tile(source, (VECTOR,), (column,)), vector)
            cute.autovec_copy(vector, cute.local_tile(sQ, (1, VECTOR), (row, column)))
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def load_kv(
        self,
        params: Params,
        smem_tile: cute.Tensor,
        full: Any,
        info: CacheTileInfo,
        operand: int,
        n_block: Int32,
        head_chunk: int = 0,
    ) -> None:
        """Issues the TMA loads of a block of K or V, page by page, or of a ``head_chunk`` of its columns."""
        tma_box = self.tma_boxes[operand]
        rows_per_copy = self.rows_per_copy
        page_size = self.c.page_size
        page_table = info.cache.page_table
        count, smem_boxes = self.tile_n // rows_per_copy, cute.local_tile(smem_tile, tma_box, (None, 0))
        page_idx = info.batch
        # A lane looks up the page of a box.
        if const_expr(page_table is not None):
            key = n_block * self.tile_n + cute.arch.lane_idx() * rows_per_copy
            page_idx = Int32(0)
            if (cute.arch.lane_idx() < count) & (key < info.mask.seqlen_k):
                page_idx = Int32(page_table[info.batch, key // page_size])
                page_idx = Int32(select_(self.is_page(info.cache, page_idx), page_idx, Int32(0)))
        for box_idx in cutlass.range_constexpr(count):
            key, page = n_block * self.tile_n + box_idx * rows_per_copy, page_idx
            if const_expr(page_table is not None):
                page = cute.arch.shuffle_sync(page_idx, box_idx)
            length = cutlass.max(cutlass.min(info.mask.seqlen_k - key, rows_per_copy), 0)
            row_end = (key % page_size if const_expr(page_size > 0) else key) + length
            end = page * info.cache.page_strides[operand - K] + row_end * info.cache.row_strides[operand - K]
            tma_tensor = seqlen_info.ragged_rows(params.tensors[operand], info.kv_head, end, length)
            tma_load(
                params.tma_atoms[operand],
                cute.local_tile(tma_tensor, tma_box, (0, head_chunk)),
                smem_boxes[None, None, box_idx],
                full,
            )

    @cute.kernel
    def combine(
        self, o_partial: cute.Tensor, lse_partial: cute.Tensor, o: cute.Tensor, lse: cute.Tensor, sink: Any
    ) -> None:
        """One warp per row: the mean of the splits' O, weighted by exp(LSE)."""
        thread, block = thread_block_idx()
        lane, index = thread % WARP_SIZE, block * (WARPGROUP_SIZE // WARP_SIZE) + thread // WARP_SIZE
        queries, heads, batches, splits = lse_partial.shape
        query, head, batch = index % queries, index // queries % heads, index // queries // heads
        if batch < batches:
            width = self.c.head_dim_v // WARP_SIZE
            lse_max, weight_sum = Float32(-Float32.inf), Float32(0.0)
            if const_expr(sink is not None):
                lse_max = Float32(sink[head])
            for split in cutlass.range(splits, unroll=1):
                lse_max = cute.arch.fmax(lse_max, lse_partial[query, head, batch, split])
            max_log2 = Float32(select_(lse_max == -Float32.inf, Float32(0.0), lse_max * LOG2_E))
            if const_expr(sink is not None):
                weight_sum = cute.math.exp2(sink[head] * LOG2_E - max_log2, fastmath=True)
            o_acc, o_split = cute.make_rmem_tensor(width, Float32), cute.make_rmem_tensor(width, Float32)
            o_acc.fill(0.0)
            for split in cutlass.range(splits, unroll=1):
                weight = cute.math.exp2(lse_partial[query, head, batch, split] * LOG2_E - max_log2, fastmath=True)
                cute.autovec_copy(
                    cute.local_tile(o_partial[None, query, head, batch, split], (width,), (lane,)), o_split
                )
                weight_sum += weight
                for i in cutlass.range_constexpr(width):
                    o_acc[i] = o_acc[i] + weight * o_split[i]
            inv_sum = Float32(select_(weight_sum == 0.0, Float32(0.0), 1.0 / weight_sum))
            o_16bit = cute.make_rmem_tensor(width, self.dtype)
            for i in cutlass.range_constexpr(width):
                o_16bit[i] = (o_acc[i] * inv_sum).to(self.dtype)
            cute.autovec_copy(o_16bit, cute.local_tile(o[query, None, head, batch], (width,), (lane,)))
            if lane == 0:
                row_lse = (max_log2 + cute.math.log2(weight_sum, fastmath=True)) / LOG2_E
                lse[query, head, batch] = Float32(select_(weight_sum == 0.0, -Float32.inf, row_lse))

    set_kernel_name(combine, "cudnn_attention_combine")


@cute.jit
def common_stride(by_page: Int64, by_row: Int64) -> Int64:
    """The greatest common divisor of the strides of pages and of rows, in elements: mostly the row stride.

    TMA coordinates count this unit. With units of 16 bytes, a pool of more than 32 GiB would exceed 2^31.
    """
    step = cutlass.max(Int64(by_row), Int64(VECTOR))
    rest = Int64(by_page) % step
    while rest > 0:
        step, rest = rest, step % rest
    return cute.assume(step, divby=VECTOR)
