"""What attention's forward kernels have in common on all architectures: which rows a CTA has, and what they see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, select_
from cutlass.cute.nvgpu import cpasync

from cudnn_kernels.attention import ForwardConfiguration, sequences, softmax
from cudnn_kernels.attention.mask import Mask, mask_of
from cudnn_kernels.attention.sequences import Sequence
from cudnn_kernels.epilogue.fragment import RowLayout
from cudnn_kernels.fakes import DTYPES

L2_BYTES = 32 << 20  # of K and V, for heads that run at the same time


@dataclass
class Problem:
    """What a tile belongs to: its first row, its head, that of K and V, its batch, and where its sequence lies."""

    row: Int32
    head: Int32
    key_head: Int32
    batch: Int32
    first_query: Int32
    first_key: Int32
    mask: Mask


@dataclass
class Work:
    """The tiles of a call. They come in sections: with a causal mask, all tiles of some heads whose K and V fit into
    L2; else all tiles.

    Fields that are divisors have a form by which kernels divide fast.
    """

    tiles: Int32  # of a head
    all_heads: Int32  # of all batches
    turns: Int32  # tiles that a CTA takes, one in each turn
    queries: Int32
    keys: Int32
    section: Any  # divisor: turns of a section or, where a CTA has one tile, its tiles
    together: Any  # divisor: heads of a section
    others: Any  # divisor: heads of the last section; without a causal mask, tiles of a head
    heads: Any  # divisor: heads of Q in a sequence
    share: Any  # divisor: heads of Q that share one of K
    offsets_q: Any
    offsets_k: Any
    right: Int32
    left: Int32


class Forward:
    """A kernel for one :class:`ForwardConfiguration`. A subclass says which rows and columns of S a thread holds."""

    score_rows: RowLayout

    def __init__(self, configuration: ForwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]
        self.tile_m, self.tile_n = configuration.tile

    def work(self, given: Mapping[str, Any], ctas: Any = None) -> Work:
        """The tiles that a call's tensors have. ``ctas``: how many CTAs there are, if they take tiles in turn."""
        c = self.c
        q, k = (sequences.matrix(given[name], c.packed) for name in ("q", "k"))
        offsets = given.get("cum_seqlen_q")
        batches = offsets.shape[0] - 1 if c.packed else q.shape[3]
        tiles = Int32(sequences.blocks_of(q.shape[0], batches, self.tile_m, c.packed))
        all_heads = together = Int32(q.shape[2] if c.packed else q.shape[2] * q.shape[3])
        if const_expr(c.right):
            keys = k.shape[0] // cutlass.max(Int32(batches), 1) if c.packed else k.shape[0]  # on average
            head_bytes = Int64(cutlass.max(Int32(keys), 1)) * ((c.head + c.head_v) * self.dtype.width // 8)
            together = cutlass.max(Int32(L2_BYTES // head_bytes), 1) * (q.shape[2] // k.shape[2])
            together = cutlass.max(cutlass.min(Int32(together), all_heads), 1)
        section, turns = together * tiles, Int32(1)
        if const_expr(ctas is not None):
            section = cute.ceil_div(section, ctas)
            turns = section * cute.ceil_div(all_heads, together)
        divisors = (section, together, all_heads % together if c.right else tiles, q.shape[2], q.shape[2] // k.shape[2])
        return Work(
            tiles, all_heads, turns, Int32(q.shape[0]), Int32(k.shape[0]),
            *[cute.FastDivmodDivisorV2(cutlass.max(Int32(x), 1)) for x in divisors], offsets,
            given.get("cum_seqlen_k"), given["right"], given["left"],
        )  # fmt: skip

    def scales(self, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """What scores are multiplied by before the exponential, and before the cap, if there is one."""
        scale = given["scale_softmax"] * softmax.LOG2_E
        if not self.c.softcap:
            return scale, None
        return given["softcap"] * softmax.LOG2_E, 2 * scale / given["softcap"]

    @cute.jit
    def tile(self, work: Work, turn: Any = None) -> tuple[Int32, Int32]:
        """A CTA's tile in a turn, and its head among all heads; the tile is negative where there is none.

        With a causal mask the last rows come first, since they take longest. CTAs take tiles in rising order in one
        turn and in falling order in the next, so that none gets only long ones.
        """
        cta, _, _ = cute.arch.block_idx()
        if const_expr(turn is None):
            section, index = divmod(cta, work.section)
        else:
            ctas, _, _ = cute.arch.grid_dim()
            section, row = divmod(turn, work.section)
            index = row * ctas + Int32(select_((section + row) % 2 == 1, ctas - 1 - cta, cta))
        first = section * work.together.divisor
        tile, head = divmod(index, work.together)
        if const_expr(not self.c.right):
            head, tile = divmod(index, work.others)
            tile = Int32(select_(head < work.all_heads, tile, work.tiles))
        elif first + work.together.divisor > work.all_heads:
            tile, head = divmod(index, work.others)
        return work.tiles - 1 - tile, first + head

    @cute.jit
    def problem(self, work: Work, tile: Int32, index: Int32) -> Problem:
        """The rows of a tile; ``index`` is its head's number among all heads."""
        c = self.c
        batch, head = divmod(index, work.heads)
        s = Sequence(batch, work.queries, work.keys, Int32(0), Int32(0))
        if const_expr(c.packed):
            batch, tile = sequences.find_block(work.offsets_q, tile, self.tile_m)
            s = sequences.packed(work.offsets_q, work.offsets_k, batch)
        mask = mask_of(c, s.queries, s.keys, work.right, work.left)
        return Problem(tile * self.tile_m, head, head // work.share, s.batch, s.first_query, s.first_key, mask)

    def blocks(self, p: Problem) -> tuple[Int32, Int32, Int32, Int32]:
        """The blocks of keys that a tile's rows need."""
        return p.mask.blocks(p.row, cutlass.min(p.row + self.tile_m, p.mask.queries) - 1, self.tile_n)

    def exists(self, p: Problem) -> Boolean:
        """Whether the tile has rows: sequences may be shorter than the longest."""
        return p.row < p.mask.queries

    def bytes(self, rows: int, columns: int) -> int:
        """Of a tile in shared memory."""
        return rows * columns * self.dtype.width // 8

    def hide(self, scores: cute.Tensor, p: Problem, row: Int32, thread: Int32, n: Int32) -> None:
        """Makes scores of keys that a row does not see -inf. ``row`` is the group's first."""
        p.mask.hide(scores, self.score_rows, thread, row, n * self.tile_n, self.tile_n)


def queries_of(p: Problem, tensor: cute.Tensor) -> cute.Tensor:
    """A sequence's rows of Q or O, of the copy engine's coordinates."""
    return sequences.copied_rows(tensor, p.head, p.batch, p.first_query, p.mask.queries)


def partition(atom: Any, rank: Any, share: int, buffer: cute.Tensor, tile: cute.Tensor) -> tuple[Any, Any]:
    """A tile in shared and in global memory, as the copy engine sees them: one of ``share`` parts."""
    return cpasync.tma_partition(
        atom, rank, cute.make_layout(share), cute.group_modes(buffer, 0, 2), cute.group_modes(tile, 0, 2)
    )
