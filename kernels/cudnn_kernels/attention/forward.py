"""The attention forward kernels' common part: scheduling of tiles, TMA loads of Q, K and V, TMA store of O, LSE.

A work tile is tile_m query rows of one head. :mod:`cudnn_kernels.sm90.attention_forward` and
:mod:`cudnn_kernels.sm100.attention_forward` have the main loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr, select_
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.attention import DESCALES, ForwardConfiguration, seqlen_info, softmax
from cudnn_kernels.attention.mask import Mask, make_mask
from cudnn_kernels.attention.seqlen_info import SeqlenInfo
from cudnn_kernels.epilogue.fragment import RowLayout
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel, thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.pipeline.tma import partition_tile, tma_load
from cudnn_kernels.threads import WARP_SIZE

Q, K, V, O = range(4)  # noqa: E741
L2_BYTES = 64 << 20
"""Bytes of K and V of the heads that run at the same time, so that they stay in L2; halved with a left bound."""
SORT_WARPS = 4  # per CTA of sort_tiles


@dataclass
class TileInfo:
    """A work tile: its first row, its head, that of K and V, its sequence's batch index, offsets and mask."""

    row: Int32
    head: Int32
    kv_head: Int32
    batch: Int32
    offset_q: Int32
    offset_k: Int32
    mask: Mask


@dataclass
class SchedulerParams:
    """The work tiles of a call, in L2-aware order.

    Heads come in sections: with a causal mask or a dynamic scheduler, a section is all tiles of the heads whose K and V
    fill ``L2_BYTES``; else all heads are one section. Divisors are :class:`FastDivmodDivisorV2`.
    """

    tiles_per_head: Int32
    total_heads: Int32  # of all sequences
    num_waves: Int32  # tiles of a persistent CTA
    seqlen_q: Int32
    seqlen_k: Int32
    section_size: Any  # divisor: waves of a section (persistent), else its tiles
    heads_per_section: Any  # divisor: heads of a section
    last_section_divisor: Any  # divisor: heads of the last section; without sections, tiles of a head
    num_heads: Any  # divisor: heads of Q in a sequence
    qhead_per_kvhead: Any  # divisor
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    right: Int32
    left: Int32
    tile_order: Any  # of the dynamic scheduler: see Forward.sort_tiles


@dataclass
class Params:
    """The kernel's parameters. ``tensors`` are Q, K, V and O; ``tma_atoms`` are None where threads load or store.

    ``scale_log2`` is the scale of the exponent of exp2, ``softcap_scale`` that of scores before the softcap, if there
    is one.
    """

    tma_atoms: list
    tensors: list
    lse: Any
    sink: Any
    scheduler: Any
    scale_log2: Float32
    softcap_scale: Any
    output_scale: Float32
    descales: Any  # of Q, K and V: (batch, kv_head), or None


class Forward(Kernel):
    """A kernel for one :class:`ForwardConfiguration`.

    A subclass has the warp-specialized ``body`` of its ``threads``, the layout of shared memory (``smem_layout``), the
    accumulator rows of a thread (``score_rows``), the ``rows`` of Q and O of one TMA copy, and whether CTAs are
    ``persistent``. ``tma_boxes``: (rows, columns) of the TMA boxes of Q, K, V and O.
    """

    score_rows: RowLayout
    threads: int
    rows: int
    persistent: bool = False

    def __init__(self, configuration: ForwardConfiguration) -> None:
        super().__init__(configuration)
        c = configuration
        self.dtype = DTYPES[c.dtype]
        self.out_dtype = DTYPES[next(slot.dtype for slot in c.slots() if slot.name == "o")]
        self.tile_m, self.tile_n = c.tile
        self.tma_boxes = [
            (self.rows, c.head_dim),
            (self.tile_n, c.head_dim),
            (self.tile_n, c.head_dim_v),
            (self.rows, c.head_dim_v),
        ]

    @property
    def l2_swizzle(self) -> bool:
        """Whether heads come in L2-sized sections: LPT order needs tiles of several heads side by side."""
        return self.c.right or self.c.dynamic_scheduler

    def smem_layout(self, rows: int, columns: int, stages: int = 1, dtype: Any = None) -> Any:
        """The swizzled layout of a row-major operand in shared memory: (rows, columns, stages)."""
        raise NotImplementedError

    def launch(self, arguments: Mapping[str, Any]) -> None:
        c = self.c
        scheduler = self.make_scheduler_params(arguments)
        ctas = scheduler.tiles_per_head * scheduler.total_heads
        if c.dynamic_scheduler:
            batches = scheduler.cu_seqlens_q.shape[0] - 1
            self.sort_tiles(scheduler.cu_seqlens_q, scheduler.cu_seqlens_k, scheduler.tile_order).launch(
                grid=[cute.ceil_div(batches, SORT_WARPS), 1, 1],
                block=[WARP_SIZE * SORT_WARPS, 1, 1],
                stream=arguments["stream"],
            )
        if self.persistent or c.dynamic_scheduler:
            ctas = cutlass.min(arguments["num_sms"], ctas)
        lse = seqlen_info.lse_view(arguments["lse"], c.varlen, c.lse == "by head") if c.lse else None
        copies = [
            self.make_tma_atom(which, seqlen_info.ragged_tma_view(arguments["qkvo"[which]], c.varlen))
            for which in (Q, K, V, O)
        ]
        self.kernel(self.make_params(arguments, copies, lse, arguments.get("sink"), scheduler)).launch(
            grid=[ctas, 1, 1], block=[self.threads, 1, 1], stream=arguments["stream"], min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, params: Params) -> None:
        """O and LSE."""
        self.body(params)

    set_kernel_name(kernel, "cudnn_attention_forward")

    def body(self, params: Params) -> None:
        """The warp-specialized roles of the threads."""
        raise NotImplementedError

    def make_tma_atom(self, operand: int, tensor: cute.Tensor) -> tuple[Any, cute.Tensor]:
        """The TMA copy atom of an operand's box, and its coordinate tensor."""
        op = cpasync.CopyBulkTensorTileS2GOp() if operand == O else cpasync.CopyBulkTensorTileG2SOp()
        tma_box = self.tma_boxes[operand]
        smem_layout = self.smem_layout(
            self.tile_n if operand in (K, V) else self.rows, tma_box[1], dtype=tensor.element_type
        )
        return cpasync.make_tiled_tma_atom(
            op, tensor, cute.composition(cute.slice_(smem_layout, (None, None, 0)), tma_box), tma_box
        )

    def make_params(self, arguments: Mapping[str, Any], copies: list, lse: Any, sink: Any, scheduler: Any) -> Params:
        """The kernel's parameters; ``copies`` are pairs of a TMA atom and a coordinate tensor."""
        scale_log2, softcap_scale = softmax.Scale(arguments["scale_softmax"], arguments.get("softcap")).log2_scales()
        atoms, tensors = (list(x) for x in zip(*copies, strict=True))
        descales = [arguments[x] for x in DESCALES] if DESCALES[0] in arguments else None
        return Params(
            atoms, tensors, lse, sink, scheduler, scale_log2, softcap_scale, arguments["scale_output"], descales
        )

    def make_scheduler_params(self, arguments: Mapping[str, Any]) -> Any:
        """The work tiles of a call's tensors, and their order."""
        c = self.c
        q, k = (seqlen_info.as_sdhb(arguments[name], c.varlen) for name in ("q", "k"))
        cu_seqlens_q = arguments.get("cum_seqlen_q")
        batches = seqlen_info.num_sequences(c, arguments)
        tiles = Int32(seqlen_info.num_blocks(q.shape[0], batches, self.tile_m, c.varlen))
        total_heads = heads_per_section = Int32(q.shape[2] if c.varlen else q.shape[2] * q.shape[3])
        if const_expr(self.l2_swizzle):
            mean_seqlen_k = k.shape[0] // cutlass.max(Int32(batches), 1) if c.varlen else k.shape[0]
            keys_in_l2 = L2_BYTES // (1 + c.left) // ((c.head_dim + c.head_dim_v) * self.dtype.width // 8)
            qhead_per_kvhead = q.shape[2] // k.shape[2]
            kv_heads = cutlass.max(Int32(total_heads // qhead_per_kvhead), 1)
            heads_per_section = cutlass.min(
                cutlass.max(keys_in_l2 // cutlass.max(Int32(mean_seqlen_k), 1), 1), kv_heads
            )
            if const_expr(self.persistent):
                heads_per_section = minimize_waves(
                    heads_per_section, kv_heads, qhead_per_kvhead * tiles, arguments["num_sms"]
                )
            heads_per_section = heads_per_section * qhead_per_kvhead
        section_size, num_waves = heads_per_section * tiles, Int32(1)
        if const_expr(self.persistent):
            section_size = cute.ceil_div(section_size, arguments["num_sms"])
            num_waves = section_size * cute.ceil_div(total_heads, heads_per_section)
        tile_order = None
        if const_expr(c.dynamic_scheduler):
            entries = cute.recast_ptr(arguments["workspace"].iterator.align(16), dtype=Int32)
            tile_order = cute.make_tensor(entries, cute.make_layout((2, tiles + 1)))
        last_section_divisor = total_heads % heads_per_section if self.l2_swizzle else tiles
        divisors = (section_size, heads_per_section, last_section_divisor, q.shape[2], q.shape[2] // k.shape[2])
        return SchedulerParams(
            tiles,
            total_heads,
            num_waves,
            Int32(q.shape[0]),
            Int32(k.shape[0]),
            *[cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in divisors],
            cu_seqlens_q,
            arguments.get("cum_seqlen_k"),
            arguments["right"],
            arguments["left"],
            tile_order,
        )

    @cute.kernel
    def sort_tiles(self, cu_seqlens_q: cute.Tensor, cu_seqlens_k: cute.Tensor, tile_order: cute.Tensor) -> None:
        """Sorts the work tiles of a varlen batch by their keys, ascending. The counter takes them from the last on:
        longest first (LPT), so that no long tile starts last.

        ``tile_order``, (2, tiles + 1), int32: column 0 is (tile counter = 0, number of tiles per head); then of each
        tile its sequence and the number of that sequence's first tile. One warp per sequence; its lanes compare it with
        all others.
        """
        thread, cta = thread_block_idx()
        lane, num_sequences = cute.arch.lane_idx(), cu_seqlens_q.shape[0] - 1
        seq_idx = cta * SORT_WARPS + cute.arch.make_warp_uniform(thread // WARP_SIZE)
        tiles_before, total_tiles = Int32(0), Int32(0)
        if seq_idx < num_sequences:
            s = seqlen_info.varlen_seqlen_info(cu_seqlens_q, cu_seqlens_k, seq_idx)
            for other_idx in cutlass.range(lane, num_sequences, WARP_SIZE, unroll=4):
                o = seqlen_info.varlen_seqlen_info(cu_seqlens_q, cu_seqlens_k, other_idx)
                tiles = cute.ceil_div(o.seqlen_q, self.tile_m)
                total_tiles += tiles
                if (o.seqlen_k < s.seqlen_k) | ((o.seqlen_k == s.seqlen_k) & (other_idx < seq_idx)):
                    tiles_before += tiles
            tiles_before = cute.arch.warp_reduction_sum(tiles_before)
            total_tiles = cute.arch.warp_reduction_sum(total_tiles)
            for tile in cutlass.range(lane, cute.ceil_div(s.seqlen_q, self.tile_m), WARP_SIZE, unroll=1):
                tile_order[0, 1 + tiles_before + tile] = seq_idx
                tile_order[1, 1 + tiles_before + tile] = tiles_before
        if (seq_idx == 0) & (lane == 0):
            tile_order[0, 0] = Int32(0)
            tile_order[1, 0] = total_tiles

    set_kernel_name(sort_tiles, "cudnn_attention_sort_tiles")

    @cute.jit
    def tile_coord(self, scheduler: SchedulerParams, tile_idx: Any = None) -> tuple[Int32, Int32]:
        """The m_block and the head (among all) of a persistent CTA's tile in a wave, or of a tile index from the
        dynamic scheduler; the m_block is negative for tiles beyond the last head.

        With a causal mask, the last m_blocks come first, since they see most keys (LPT). Persistent CTAs take tiles in
        ascending order in one wave and in descending order in the next, which balances the load.
        """
        cta, _, _ = cute.arch.block_idx()
        tiles_per_head = (
            scheduler.tile_order[1, 0] if const_expr(self.c.dynamic_scheduler) else scheduler.tiles_per_head
        )
        if const_expr(self.c.dynamic_scheduler):
            section_idx = Int32(Uint32(tile_idx) // Uint32(tiles_per_head * scheduler.heads_per_section.divisor))
            index = tile_idx - section_idx * tiles_per_head * scheduler.heads_per_section.divisor
        else:
            section_idx, index = divmod(tile_idx if const_expr(self.persistent) else cta, scheduler.section_size)
        if const_expr(self.persistent):
            ctas, _, _ = cute.arch.grid_dim()
            index = index * ctas + Int32(select_((section_idx + index) % 2 == 1, ctas - 1 - cta, cta))
        first_head = section_idx * scheduler.heads_per_section.divisor
        tile, head = divmod(index, scheduler.heads_per_section)
        if const_expr(not self.l2_swizzle):
            head, tile = divmod(index, scheduler.last_section_divisor)
            tile = Int32(select_(head < scheduler.total_heads, tile, tiles_per_head))
        elif first_head + scheduler.heads_per_section.divisor > scheduler.total_heads:
            tile, head = divmod(index, scheduler.last_section_divisor)
        return tiles_per_head - 1 - tile, first_head + head

    @cute.jit
    def tile_info(self, scheduler: SchedulerParams, m_block: Int32, head_idx: Int32) -> TileInfo:
        """The tile's sequence, offsets and mask; ``head_idx`` counts the heads of all sequences."""
        c = self.c
        batch, head = divmod(head_idx, scheduler.num_heads)
        s = SeqlenInfo(batch, scheduler.seqlen_q, scheduler.seqlen_k, Int32(0), Int32(0))
        if const_expr(c.varlen):
            if const_expr(c.dynamic_scheduler):
                batch, m_block = scheduler.tile_order[0, 1 + m_block], m_block - scheduler.tile_order[1, 1 + m_block]
            else:
                batch, m_block = seqlen_info.find_block(scheduler.cu_seqlens_q, m_block, self.tile_m)
            s = seqlen_info.varlen_seqlen_info(scheduler.cu_seqlens_q, scheduler.cu_seqlens_k, batch)
        mask = make_mask(c, s.seqlen_q, s.seqlen_k, scheduler.right, scheduler.left)
        return TileInfo(
            m_block * self.tile_m, head, head // scheduler.qhead_per_kvhead, s.batch, s.offset_q, s.offset_k, mask
        )

    def n_block_range(self, info: TileInfo) -> tuple[Int32, Int32, Int32, Int32]:
        """The n_blocks that a tile's rows see: begin, full begin, full end, end."""
        return info.mask.n_block_range(
            info.row, cutlass.min(info.row + self.tile_m, info.mask.seqlen_q) - 1, self.tile_n
        )

    def has_rows(self, info: TileInfo) -> Boolean:
        """Whether the tile has rows: the grid of a varlen batch has room for more."""
        return info.row < info.mask.seqlen_q

    def tile_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a tile of Q's type in shared memory."""
        return rows * columns * self.dtype.width // 8

    def apply_mask(self, scores: cute.Tensor, info: TileInfo, row: Int32, thread: Int32, n: Int32) -> None:
        """Sets the masked scores of an n_block to -inf. ``row`` is the warpgroup's first."""
        info.mask.apply(scores, self.score_rows, thread, row, n * self.tile_n, self.tile_n)

    def make_softmax(self, params: Params) -> softmax.OnlineSoftmax:
        """A thread's softmax state."""
        maxima, sums = (cute.make_rmem_tensor(self.score_rows.slots, Float32) for _ in range(2))
        scale, fp8_max_offset = params.scale_log2, None
        if self.dtype.width == 8:
            scale = cute.arch.fmax(scale, softmax.MIN_FP8_SCALE)
            fp8_max_offset = softmax.FP8_MAX_OFFSET / scale
        return softmax.OnlineSoftmax(maxima, sums, scale, fp8_max_offset=fp8_max_offset)

    def reset_softmax(self, state: softmax.OnlineSoftmax, params: Params, info: TileInfo, thread: Int32) -> None:
        """Initializes the softmax state before a tile's first n_block."""
        if params.sink is None:
            softmax.reset(state)
        else:
            softmax.reset_to_sink(state, params.sink[info.head], self.score_rows, thread)

    def prefetch_descriptors(self, params: Params) -> None:
        """One thread: prefetches the TMA descriptors."""
        for atom in params.tma_atoms:
            if atom is not None:
                cpasync.prefetch_descriptor(atom)

    def load_q(self, params: Params, sQ: cute.Tensor, full: Any, info: TileInfo, box: int) -> None:
        """One warp issues the TMA load of one box of Q's rows: sQ is (rows, head_dim, box)."""
        gQ = cute.domain_offset((info.row, 0), sequence_rows(info, params.tensors[Q]))
        tQsQ, tQgQ = partition_tile(params.tma_atoms[Q], sQ, cute.local_tile(gQ, self.tma_boxes[Q], (None, 0)))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + box, self.tile_bytes(*self.tma_boxes[Q]))
        cute.copy(params.tma_atoms[Q], tQgQ[None, box], tQsQ[None, box], tma_bar_ptr=full + box)

    def load_kv(
        self,
        params: Params,
        smem_tile: cute.Tensor,
        full: Any,
        info: TileInfo,
        operand: int,
        n_block: Int32,
        head_chunk: int = 0,
    ) -> None:
        """One warp issues the TMA load of a block of K or V, or of a ``head_chunk`` of its columns."""
        tma_tensor = seqlen_info.tma_rows(
            params.tensors[operand], info.kv_head, info.batch, info.offset_k, info.mask.seqlen_k
        )
        tma_load(
            params.tma_atoms[operand],
            cute.local_tile(tma_tensor, self.tma_boxes[operand], (n_block, head_chunk)),
            smem_tile,
            full,
        )

    def tma_store_o(self, params: Params, sO: cute.Tensor, info: TileInfo, row: Int32) -> None:
        """Issues the TMA store of O's rows from ``row`` on."""
        gO = cute.domain_offset((row, 0), sequence_rows(info, params.tensors[O]))
        tOsO, tOgO = partition_tile(params.tma_atoms[O], sO, cute.local_tile(gO, self.tma_boxes[O], (0, 0)))
        cute.copy(params.tma_atoms[O], tOsO, tOgO)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_lse(self, params: Params, info: TileInfo, row: Int32, thread: Int32, lse: Any) -> None:
        """Writes the LSE of a thread's rows. ``row`` is the warpgroup's first."""
        for slot in cutlass.range_constexpr(self.score_rows.slots if self.c.lse else 0):
            row_idx = row + self.score_rows.row(thread, slot)
            if thread % self.score_rows.lanes_per_row == 0:
                if row_idx < info.mask.seqlen_q:
                    params.lse[self.lse_coord(info, row_idx)] = lse[slot]

    def lse_coord(self, info: TileInfo, row: Int32) -> tuple[Any, ...]:
        """The coordinate of a row's LSE."""
        return info.offset_q + row, info.head, 0 if self.c.varlen else info.batch


@cute.jit
def minimize_waves(max_heads: Int32, heads: Int32, tiles: Int32, num_ctas: Int32) -> Int32:
    """Heads of K in a section, at most ``max_heads``, such that persistent CTAs take the fewest waves.

    Each section starts a new wave, and its last wave may be partial: idle CTAs are the cost. ``tiles`` are those of a
    head.
    """
    best, fewest_waves = Int32(max_heads), Int32((1 << 31) - 1)
    min_sections = cute.ceil_div(heads, max_heads)
    for sections in cutlass.range(min_sections, 2 * min_sections + 1, unroll=1):
        heads_per_section = cute.ceil_div(heads, sections)
        waves = cute.ceil_div(heads_per_section * tiles, num_ctas) * cute.ceil_div(heads, heads_per_section)
        if waves < fewest_waves:
            best, fewest_waves = heads_per_section, waves
    return best


def sequence_rows(info: TileInfo, tensor: cute.Tensor) -> cute.Tensor:
    """A sequence's rows of Q or O, TMA coordinates."""
    return seqlen_info.tma_rows(tensor, info.head, info.batch, info.offset_q, info.mask.seqlen_q)
