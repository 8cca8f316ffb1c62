"""What attention's forward kernels have in common on all architectures: which rows a CTA has, and what they see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr
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
class Sizes:
    """Of a call. A head has so many ``tiles``, all batches ``all_heads``, of which some run ``together``."""

    tiles: Int32
    all_heads: Int32
    heads: Int32
    key_heads: Int32
    queries: Int32
    keys: Int32
    together: Int32


class Forward:
    """A kernel for one :class:`ForwardConfiguration`. A subclass says which rows and columns of S a thread holds."""

    score_rows: RowLayout

    def __init__(self, configuration: ForwardConfiguration) -> None:
        self.c = configuration
        self.dtype = DTYPES[configuration.dtype]
        self.tile_m, self.tile_n = configuration.tile

    def sizes(self, given: Mapping[str, Any]) -> Sizes:
        """What a call's tensors say. Heads that run together have K and V that fit into L2."""
        c = self.c
        q, k = (sequences.matrix(given[name], c.packed) for name in ("q", "k"))
        batches = given["cum_seqlen_q"].shape[0] - 1 if c.packed else q.shape[3]
        tiles = sequences.blocks_of(q.shape[0], batches, self.tile_m * c.cluster, c.packed)
        heads = q.shape[2] if c.packed else q.shape[2] * q.shape[3]
        head_bytes = k.shape[0] * ((c.head + c.head_v) * self.dtype.width // 8)
        together = cutlass.max(L2_BYTES // cutlass.max(head_bytes, 1), 1) * (q.shape[2] // k.shape[2])
        return Sizes(
            tiles, heads, q.shape[2], k.shape[2], q.shape[0], k.shape[0], Int32(together if c.right else 1)
        )  # fmt: skip

    def scales(self, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """What scores are multiplied by before the exponential, and before the cap, if there is one."""
        scale = given["scale_softmax"] * softmax.LOG2_E
        if not self.c.softcap:
            return scale, None
        return given["softcap"] * softmax.LOG2_E, 2 * scale / given["softcap"]

    @cute.jit
    def problem(self, sizes: Sizes, offsets_q: Any, offsets_k: Any, right: Int32, left: Int32) -> Problem:
        """What this CTA's rows are. The last rows of some heads come first: with a causal mask they take longest."""
        c = self.c
        rank, index, _ = cute.arch.block_idx()
        tiles, together = sizes.tiles, sizes.together
        first = index // (tiles * together) * together
        width, rest = cutlass.min(together, sizes.all_heads - first), index - first * tiles
        tile, index = tiles - 1 - rest // width, first + rest % width
        head = index % sizes.heads
        s = Sequence(index // sizes.heads, sizes.queries, sizes.keys, Int32(0), Int32(0))
        if const_expr(c.packed):
            batch, tile = sequences.find_block(offsets_q, tile, self.tile_m * c.cluster)
            s = sequences.packed(offsets_q, offsets_k, batch)
        mask = mask_of(c, s.queries, s.keys, right, left)
        row = (tile * c.cluster + rank) * self.tile_m
        key_head = head // (sizes.heads // sizes.key_heads)
        return Problem(row, head, key_head, s.batch, s.first_query, s.first_key, mask)

    def blocks(self, p: Problem, rank: Any) -> tuple[Int32, Int32, Int32, Int32]:
        """The blocks of keys that the rows of all CTAs of the cluster need."""
        first = p.row - rank * self.tile_m
        last = cutlass.min(first + self.tile_m * self.c.cluster, p.mask.queries) - 1
        return p.mask.blocks(first, last, self.tile_n)

    def exists(self, p: Problem, rank: Any) -> Boolean:
        """Whether the tile has rows in the CTA's cluster: sequences may be shorter than the longest."""
        return p.row - rank * self.tile_m < p.mask.queries

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
