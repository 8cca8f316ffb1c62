"""The attention backward kernels' common part: which rows a CTA has, which columns it loops over, and their order.

For dK and dV (and Hopper's fused kernel), rows are keys (an n_block) and columns are query rows (m_blocks) of all heads
of Q that share the head of K. For dQ on Blackwell, rows are queries and columns are keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr, select_

from cudnn_kernels.attention import BackwardConfiguration, seqlen_info
from cudnn_kernels.attention.mask import Mask, make_mask
from cudnn_kernels.attention.seqlen_info import SeqlenInfo
from cudnn_kernels.kernel import thread_block_idx
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

SORT_WARPS = 4  # per CTA of SortBlocks


@dataclass
class BwdSchedulerParams:
    """A call's blocks of rows, one for a CTA or a cluster. Heads come in sections of ``heads_per_section``: the first
    blocks of all heads of a section come first, then their second blocks, and so on, then the next section.

    Divisors are :class:`FastDivmodDivisorV2`.
    """

    seqlen_q: Int32
    seqlen_k: Int32
    heads_per_section: Any  # divisor
    blocks_per_head: Any  # divisor
    num_heads: Any  # divisor: heads of a sequence
    total_heads: Int32  # of all sequences
    qhead_per_kvhead: Int32
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    right: Int32
    left: Int32
    num_tiles: Any = 0  # CTAs (or clusters): blocks, split ones once per split
    num_unsplit: Any = None  # blocks before the split ones
    num_splits: Any = None  # divisor: splits of each split block
    block_order: Any = None  # see SortBlocks


@dataclass
class BlockInfo:
    """A CTA's block of rows, from ``row`` of a head of a sequence on, and the column blocks that these see:
    ``num_blocks`` from ``begin`` on in steps of ``direction``, of each of ``num_heads`` heads from ``head_begin`` on.

    ``first_m_block`` is that of the sequence in the workspace, whose m_blocks do not cross sequences. ``mask`` says
    which columns a row sees. The main loop has one step for each head and column block: this CTA has ``num_steps`` from
    ``first_step`` on, all of them or, of the ``split_block``-th split block (below 0: none), those of split
    ``split_idx``.
    """

    row: Int32
    head: Int32
    head_begin: Int32
    num_heads: Int32
    batch: Int32
    row_offset: Int32
    col_offset: Int32
    first_m_block: Int32
    begin: Int32
    num_blocks: Int32
    mask: Mask
    direction: Any = 1
    first_step: Any = 0
    num_steps: Any = None
    split_idx: Any = None
    split_block: Any = None

    def __post_init__(self) -> None:
        if self.num_steps is None:
            self.num_steps = self.num_blocks * self.num_heads


def make_scheduler_params(
    c: BackwardConfiguration,
    arguments: Mapping[str, Any],
    block_size: int,
    of_queries: bool = False,
    heads_per_section: int = 1,
) -> tuple[BwdSchedulerParams, Any]:
    """The blocks of ``block_size`` rows of a call's arguments, and their number."""
    q, k = (seqlen_info.as_sdhb(arguments[x], c.varlen) for x in ("q", "k"))
    rows, cu_seqlens_q = q if of_queries else k, arguments.get("cum_seqlen_q")
    heads, kv_heads = (cute.size(x, mode=[2]) for x in (rows, k))
    blocks_per_head = seqlen_info.num_blocks(
        rows.shape[0], seqlen_info.num_sequences(c, arguments), block_size, c.varlen
    )
    total_heads = Int32(heads * q.shape[3])
    sections = cute.ceil_div(total_heads, heads_per_section)
    heads_per_section = cute.ceil_div(total_heads, sections)
    divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in (heads_per_section, blocks_per_head, heads))
    scheduler = BwdSchedulerParams(
        Int32(q.shape[0]),
        Int32(k.shape[0]),
        *divisors,
        total_heads,
        Int32(q.shape[2] // kv_heads),
        cu_seqlens_q,
        arguments.get("cum_seqlen_k"),
        arguments["right"],
        arguments["left"],
    )
    num_tiles = heads_per_section * blocks_per_head * sections
    if const_expr(c.split):
        scheduler.num_unsplit = cutlass.max(Int32(num_tiles) - arguments["split"], Int32(0))
        scheduler.num_splits = cute.FastDivmodDivisorV2(cutlass.max(arguments["parts"], 1))
        num_tiles = scheduler.num_unsplit + (num_tiles - scheduler.num_unsplit) * arguments["parts"]
    scheduler.num_tiles = Int32(num_tiles)
    return scheduler, num_tiles


@cute.jit
def split_block_info(
    c: BackwardConfiguration,
    scheduler: BwdSchedulerParams,
    index: Int32,
    block_size: int,
    step_size: int,
    reversed_order: bool,
) -> BlockInfo:
    """The block of a CTA (or pair) if the last n_blocks are split: a split has some of its steps.

    With a semaphore and a causal mask, a split has whole heads of Q: otherwise splits would wait for one another.
    """
    split_block, split_idx, num_splits, block_idx = index - scheduler.num_unsplit, Int32(0), Int32(1), index
    if split_block >= 0:
        split_block, split_idx = divmod(split_block, scheduler.num_splits)
        num_splits, block_idx = scheduler.num_splits.divisor, scheduler.num_unsplit + split_block
    block = block_info(c, scheduler, block_idx, block_size, step_size, False, reversed_order)
    total_steps, unit = (
        (block.num_heads, block.num_blocks) if const_expr(c.deterministic and c.right) else (block.num_steps, 1)
    )
    block.first_step = total_steps * split_idx // num_splits * unit
    block.split_idx = split_idx
    block.split_block = split_block
    block.num_steps = total_steps * (split_idx + 1) // num_splits * unit - block.first_step
    return block


@cute.jit
def block_info(
    c: BackwardConfiguration,
    scheduler: BwdSchedulerParams,
    index: Int32,
    block_size: int,
    step_size: int,
    of_queries: bool,
    reversed_order: bool,
) -> BlockInfo:
    """The ``index``-th block of ``block_size`` rows, and its column blocks of ``step_size``; no steps for heads that do
    not exist.

    ``reversed_order``: a head's last blocks come first. If rows are keys, the last section is the other way round:
    there the first n_blocks, which see most m_blocks, come first and begin with the last m_block, so that no long CTA
    ends alone. So do all sections if blocks are sorted, and none with ``one_direction``.
    """
    block_and_section, head_in_section = divmod(index, scheduler.heads_per_section)
    section_idx, block_idx = divmod(block_and_section, scheduler.blocks_per_head)
    direction: Any = 1
    if const_expr(reversed_order and not of_queries):
        is_last = (section_idx + 1) * scheduler.heads_per_section.divisor >= scheduler.total_heads
        if const_expr(c.longest_first):
            is_last = Boolean(True)
        elif const_expr(c.one_direction):
            is_last = Boolean(False)
        direction = Int32(select_(is_last, Int32(-1), Int32(1)))
        if const_expr(not c.longest_first):
            block_idx = Int32(select_(is_last, block_idx, scheduler.blocks_per_head.divisor - 1 - block_idx))
    elif const_expr(reversed_order):
        block_idx = scheduler.blocks_per_head.divisor - 1 - block_idx
    head = section_idx * scheduler.heads_per_section.divisor + head_in_section
    exists = head < scheduler.total_heads
    batch, head = divmod(head, scheduler.num_heads)
    s, first_m_block = SeqlenInfo(batch, scheduler.seqlen_q, scheduler.seqlen_k, Int32(0), Int32(0)), Int32(0)
    if const_expr(c.varlen):
        cu_seqlens = scheduler.cu_seqlens_q if const_expr(of_queries) else scheduler.cu_seqlens_k
        if const_expr(c.longest_first):
            batch, block_idx = scheduler.block_order[0, block_idx], scheduler.block_order[1, block_idx]
        else:
            batch, block_idx = seqlen_info.find_block(cu_seqlens, block_idx, block_size)
        s = seqlen_info.varlen_seqlen_info(scheduler.cu_seqlens_q, scheduler.cu_seqlens_k, batch)
        first_m_block = seqlen_info.first_block(scheduler.cu_seqlens_q, batch, c.tile[0])
        s.batch = Int32(0)
    mask = make_mask(c, s.seqlen_q, s.seqlen_k, scheduler.right, scheduler.left)
    row_offset, col_offset, head_begin, num_heads = s.offset_q, s.offset_k, head // scheduler.qhead_per_kvhead, Int32(1)
    if const_expr(not of_queries):
        mask = mask.transposed()
        row_offset = s.offset_k
        col_offset = s.offset_q
        head_begin = head * scheduler.qhead_per_kvhead
        num_heads = scheduler.qhead_per_kvhead
    row = block_idx * block_size
    if not exists:
        row = mask.seqlen_q
    begin, _, _, end = mask.n_block_range(row, cutlass.min(row + block_size, mask.seqlen_q) - 1, step_size)
    if row >= mask.seqlen_q:
        end = begin
    num_blocks = cutlass.max(end - begin, 0)
    if const_expr(reversed_order and not of_queries):
        begin = Int32(select_(direction > 0, begin, end - 1))
    return BlockInfo(
        row,
        head,
        head_begin,
        num_heads,
        s.batch,
        row_offset,
        col_offset,
        first_m_block,
        begin,
        num_blocks,
        mask,
        direction,
    )


def step_coord(block: BlockInfo, step: Int32) -> tuple[Int32, Int32]:
    """A step's head of the columns, and its column block."""
    step = block.first_step + step
    return block.head_begin + step // block.num_blocks, block.begin + block.direction * (step % block.num_blocks)


class SortBlocks:
    """Sorts the n_blocks of a varlen batch by their query rows, descending (LPT), so that no long CTA starts last.

    ``block_order``, (2, blocks), int32: the sequence and the n_block in it, of existing blocks and then of the others.
    Blocks of a sequence stay in ascending order, in which the semaphore lets them add to dQ. One warp per block; its
    lanes count the blocks of all sequences that come before.
    """

    def __init__(self, configuration: BackwardConfiguration) -> None:
        self.c = configuration

    def launch(self, scheduler: BwdSchedulerParams, stream: Any) -> None:
        """Writes the order of a call's scheduler."""
        blocks = cute.size(scheduler.block_order, mode=[1])
        self.kernel(scheduler).launch(
            grid=[cute.ceil_div(blocks, SORT_WARPS), 1, 1], block=[WARP_SIZE * SORT_WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, scheduler: BwdSchedulerParams) -> None:
        thread, cta = thread_block_idx()
        size, cu_seqlens_k = self.c.cluster_tile_n, scheduler.cu_seqlens_k
        lane, num_sequences = cute.arch.lane_idx(), cu_seqlens_k.shape[0] - 1
        slot = cta * SORT_WARPS + cute.arch.make_warp_uniform(thread // WARP_SIZE)
        if slot < cute.size(scheduler.block_order, mode=[1]):
            sequence, block_idx = seqlen_info.find_block(cu_seqlens_k, slot, size)
            s = seqlen_info.varlen_seqlen_info(scheduler.cu_seqlens_q, cu_seqlens_k, sequence)
            exists, rows, before = (
                block_idx < cute.ceil_div(s.seqlen_k, size),
                self.rows(scheduler, s, block_idx),
                Int32(0),
            )
            for other in cutlass.range(lane, num_sequences, WARP_SIZE, unroll=1):
                o = seqlen_info.varlen_seqlen_info(scheduler.cu_seqlens_q, cu_seqlens_k, other)
                if exists:
                    if other < sequence:
                        before += self.count(scheduler, o, rows)
                    elif other > sequence:
                        before += self.count(scheduler, o, rows + 1)
                elif other > sequence:
                    before += cute.ceil_div(o.seqlen_k, size)
            position = cute.arch.warp_reduction_sum(before) + Int32(select_(exists, block_idx, slot))
            if lane == 0:
                scheduler.block_order[0, position] = sequence
                scheduler.block_order[1, position] = block_idx

    def first_row(self, scheduler: BwdSchedulerParams, s: SeqlenInfo, block_idx: Any) -> Int32:
        """The row whose diagonal is at the first key of an n_block; with a right bound it is the first to see it."""
        offset = Int32(0) if self.c.top_left else s.seqlen_k - s.seqlen_q
        return block_idx * self.c.cluster_tile_n - offset - scheduler.right

    def rows(self, scheduler: BwdSchedulerParams, s: SeqlenInfo, block_idx: Int32) -> Int32:
        """How many rows of Q an n_block has, or an upper bound that does not increase from block to block; below 0 for
        keys that no row sees.
        """
        rows = s.seqlen_q
        if const_expr(self.c.right):
            rows -= cutlass.max(self.first_row(scheduler, s, block_idx), Int32(0))
            if const_expr(self.c.left):
                rows = cutlass.min(rows, self.window(scheduler))
        return Int32(rows)

    def window(self, scheduler: BwdSchedulerParams) -> Int32:
        """The most rows that see a key of an n_block."""
        return self.c.cluster_tile_n + scheduler.left + scheduler.right

    def count(self, scheduler: BwdSchedulerParams, s: SeqlenInfo, rows: Int32) -> Int32:
        """How many n_blocks of a sequence have this many rows, or more."""
        size = self.c.cluster_tile_n
        count, possible = cute.ceil_div(s.seqlen_k, size), s.seqlen_q >= rows
        if const_expr(self.c.right):
            last_key = s.seqlen_q - rows - self.first_row(scheduler, s, 0)
            count = cutlass.min(cutlass.max(last_key + size, Int32(0)) // size, count)
            if const_expr(self.c.left):
                possible = possible & (rows <= self.window(scheduler))
        return Int32(select_(possible, count, Int32(0)))

    set_kernel_name(kernel, "cudnn_attention_backward_sort_blocks")
