"""What attention's backward kernels have in common on all architectures: which rows a CTA has, and what they see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, select_

from cudnn_kernels.attention import BackwardConfiguration, sequences
from cudnn_kernels.attention.mask import Mask, mask_of
from cudnn_kernels.attention.sequences import Sequence


@dataclass
class Work:
    """A call's blocks of rows, of queries or keys, each for a CTA or a cluster: the first ones of ``together`` heads, a
    section, then their second ones, and so on, then those of the next heads.

    Fields that are divisors have a form by which kernels divide fast.
    """

    queries: Int32
    keys: Int32
    together: Any  # divisor
    blocks: Any  # divisor: of a head
    heads: Any  # divisor: of a sequence
    all_heads: Int32  # of all sequences
    share: Int32  # heads of Q that share one of K
    offsets_q: Any
    offsets_k: Any
    right: Int32
    left: Int32
    count: Any = 0  # blocks, and parts of blocks
    whole: Any = None  # blocks that are not split
    parts: Any = None  # divisor: of the others


@dataclass
class Block:
    """The rows of a CTA, which begin with ``row`` of a head of a sequence, and the columns that they see: so many
    ``blocks`` from ``begin`` on, or with a ``way`` of -1 down from it, of so many ``heads`` from ``first_head`` on.
    Where rows are keys, columns are queries.

    ``first_block`` is that of the sequence's queries among all in the workspace. ``mask`` says which columns rows see.
    Of these blocks of all heads the CTA has ``steps`` from the ``first`` on: a ``part`` of the ``number``-th split
    block of rows or, with a number below 0, all of a whole one.
    """

    row: Int32
    head: Int32
    first_head: Int32
    heads: Int32
    batch: Int32
    first_row: Int32
    first_column: Int32
    first_block: Int32
    begin: Int32
    blocks: Int32
    mask: Mask
    way: Any = 1
    first: Any = 0
    steps: Any = None
    part: Any = None
    number: Any = None

    def __post_init__(self) -> None:
        if self.steps is None:
            self.steps = self.blocks * self.heads


def work_of(
    c: BackwardConfiguration, given: Mapping[str, Any], size: int, of_queries: bool = False, together: int = 1
) -> tuple[Work, Any]:
    """The blocks of ``size`` rows of a call's arguments by name, and their number."""
    q, k = (sequences.matrix(given[x], c.packed) for x in ("q", "k"))
    rows, offsets = q if of_queries else k, given.get("cum_seqlen_q")
    heads, key_heads = (cute.size(x, mode=[2]) for x in (rows, k))
    blocks = sequences.blocks_of(rows.shape[0], sequences.count(c, given), size, c.packed)
    all_heads = Int32(heads * q.shape[3])
    sections = cute.ceil_div(all_heads, together)
    together = cute.ceil_div(all_heads, sections)
    divisors = (cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in (together, blocks, heads))
    work = Work(
        Int32(q.shape[0]),
        Int32(k.shape[0]),
        *divisors,
        all_heads,
        Int32(q.shape[2] // key_heads),
        offsets,
        given.get("cum_seqlen_k"),
        given["right"],
        given["left"],
    )
    count = together * blocks * sections
    if const_expr(c.split):
        work.whole = cutlass.max(Int32(count) - given["split"], Int32(0))
        work.parts = cute.FastDivmodDivisorV2(cutlass.max(given["parts"], 1))
        count = work.whole + (count - work.whole) * given["parts"]
    work.count = Int32(count)
    return work, count


@cute.jit
def part_of(c: BackwardConfiguration, work: Work, index: Int32, size: int, step: int, last_first: bool) -> Block:
    """What a CTA, or a pair, has where the last blocks of keys are split: some of the steps. Where CTAs take turns with
    a mask that makes steps fewer, it is some of the heads of Q: else parts would wait for each other.
    """
    number, part, parts, item = index - work.whole, Int32(0), Int32(1), index
    if number >= 0:
        number, part = divmod(number, work.parts)
        parts, item = work.parts.divisor, work.whole + number
    block = block_of(c, work, item, size, step, False, last_first)
    total, unit = (block.heads, block.blocks) if const_expr(c.deterministic and c.right) else (block.steps, 1)
    block.first, block.part, block.number = total * part // parts * unit, part, number
    block.steps = total * (part + 1) // parts * unit - block.first
    return block


@cute.jit
def block_of(
    c: BackwardConfiguration, work: Work, index: Int32, size: int, step: int, of_queries: bool, last_first: bool
) -> Block:
    """One of the blocks of ``size`` rows, which sees blocks of ``step`` columns; none where there is no such head.

    ``last_first``: a head's last blocks come first. Where rows are keys, it is the other way round in the last section:
    the first blocks, the longest ones, come first, and begin with their last columns.
    """
    rest, place = divmod(index, work.together)
    section, number = divmod(rest, work.blocks)
    way: Any = 1
    if const_expr(last_first and not of_queries):
        way = Int32(select_((section + 1) * work.together.divisor < work.all_heads, Int32(1), Int32(-1)))
        number = Int32(select_(way > 0, work.blocks.divisor - 1 - number, number))
    elif const_expr(last_first):
        number = work.blocks.divisor - 1 - number
    head = section * work.together.divisor + place
    exists = head < work.all_heads
    batch, head = divmod(head, work.heads)
    s, first_block = Sequence(batch, work.queries, work.keys, Int32(0), Int32(0)), Int32(0)
    if const_expr(c.packed):
        ends = work.offsets_q if const_expr(of_queries) else work.offsets_k
        batch, number = sequences.find_block(ends, number, size)
        s, first_block = (
            sequences.packed(work.offsets_q, work.offsets_k, batch),
            sequences.first_block(work.offsets_q, batch, c.tile[0]),
        )
        s.batch = Int32(0)
    mask = mask_of(c, s.queries, s.keys, work.right, work.left)
    first_row, first_column, first_head, heads = s.first_query, s.first_key, head // work.share, Int32(1)
    if const_expr(not of_queries):
        mask = mask.turned()
        first_row, first_column, first_head, heads = s.first_key, s.first_query, head * work.share, work.share
    row = number * size
    if not exists:
        row = mask.queries
    begin, _, _, end = mask.blocks(row, cutlass.min(row + size, mask.queries) - 1, step)
    if row >= mask.queries:
        end = begin
    blocks = cutlass.max(end - begin, 0)
    if const_expr(last_first and not of_queries):
        begin = Int32(select_(way > 0, begin, end - 1))
    return Block(row, head, first_head, heads, s.batch, first_row, first_column, first_block, begin, blocks, mask, way)


def place_of(block: Block, step: Int32) -> tuple[Int32, Int32]:
    """A step's head of the columns, and its block of them."""
    step = block.first + step
    return block.first_head + step // block.blocks, block.begin + block.way * (step % block.blocks)
