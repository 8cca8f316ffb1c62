"""The union of the block lists that adjacent query rows selected (NSA), built in shared memory by three warps.

Per 32 list entries of each row: (1) a lane per entry loads a block index, (2) every entry is compared with those of all
rows, which gives the mask of rows that selected the block, (3) first occurrences are ranked and written in order. The
named barrier UNION_BARRIER separates these phases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, select_

from cudnn_kernels.threads import WARP_SIZE

ENTRIES = 32  # of a row's list in one union, one per lane
DUPLICATE = 1 << 26  # added to a block index once per earlier occurrence in the row's list
NUM_UNION_WARPS = 3  # warps 1 to 3 of the producer warpgroup
UNION_BARRIER = 2  # named barrier of the union warps


@dataclass
class BlockLists:
    """A call's block lists: indices, counts (or None), cumulative sequence lengths, and tiles of a head of K.

    ``tile_count_semaphore``: the dynamic scheduler's counter, or None. ``window``: if not None, a tile's list is
    preceded by the n_tiles of a sliding window of that many keys, with a separate end marker.
    """

    indices: cute.Tensor
    counts: Any
    cu_seqlens: cute.Tensor
    tiles_per_head: Int32
    tile_count_semaphore: Any
    window: Any


@dataclass
class TileInfo:
    """A work tile: ``num_rows`` query rows from ``row`` on, at ``seq_row`` of sequence ``sequence``; its heads of Q,
    its head of K.
    """

    row: Int32
    num_rows: Int32
    sequence: Int32
    seq_row: Int32
    kv_head: Int32
    head_begin: Int32
    num_heads: Int32
    offset_k: Int32
    seqlen_k: Int32


@dataclass
class UnionStorage:
    """Shared memory of the union: 32 list entries of each row, and two unions, one being built and one being loaded.

    ``entries`` are block indices. ``first_flags``: bits of the entries that are the first occurrence of their block;
    ``row_masks``: the rows that have this block. A union has a count, its blocks, and their row masks.
    """

    entries: cute.Tensor
    row_masks: cute.Tensor
    first_flags: cute.Tensor
    counts: cute.Tensor
    blocks: cute.Tensor
    masks: cute.Tensor


class BlockUnion:
    """A mixin of :class:`SparseQueryTile`: ``rows_per_tile`` query rows, of ``num_mma_warpgroups`` warpgroups."""

    s: Any
    rows_per_tile: int
    num_mma_warpgroups: int

    def num_visible(self, tile: TileInfo, row: Any) -> Int32:
        """How many keys of the sequence a row of the tile may see."""
        return tile.seq_row + row + 1 if const_expr(self.s.causal) else tile.seqlen_k

    def allocate_union(self, smem: Any) -> UnionStorage:
        """Shared memory of the union."""
        per_row, per_union = (ENTRIES, self.rows_per_tile), (ENTRIES * self.rows_per_tile, 2)
        shapes = (per_row, per_row, self.rows_per_tile, 2, per_union, per_union)
        return UnionStorage(*(smem.allocate_tensor(Int32, cute.make_layout(x), byte_alignment=16) for x in shapes))

    @cute.jit
    def build_union(
        self,
        first_entry: Int32,
        block_lists: BlockLists,
        union: UnionStorage,
        union_idx: Int32,
        tile: TileInfo,
        thread: Int32,
    ) -> None:
        """Union warps: union ``union_idx``, of 32 entries of each row's list from ``first_entry`` on.

        A lane has an entry; a warp has every third row. A block that a row lists again is a different element of the
        union.
        """
        indices, counts = block_lists.indices, block_lists.counts
        lane, warp_index, list_len = cute.arch.lane_idx(), thread // WARP_SIZE, indices.shape[2]
        entries, row_masks, first_flags = union.entries, union.row_masks, union.first_flags
        for q_row in cutlass.range(warp_index, tile.num_rows, NUM_UNION_WARPS, unroll=1):
            entry, valid_len = Int32(-1), list_len
            if const_expr(counts is not None):
                valid_len = cutlass.min(counts[tile.row + q_row, tile.kv_head], list_len)
            if first_entry + lane < valid_len:
                block = indices[tile.row + q_row, tile.kv_head, first_entry + lane]
                if (block >= 0) & (block <= (self.num_visible(tile, q_row) - 1) // self.s.block):
                    entry = block
            duplicates_before = cute.arch.popc(cute.arch.match_sync(0xFFFFFFFF, entry) & cute.arch.lanemask_lt())
            if entry >= 0:
                entry += Int32(duplicates_before) * DUPLICATE
            entries[lane, q_row] = entry
        self.sync_union_warps()
        vectors = cute.ceil_div(cutlass.min(list_len - first_entry, ENTRIES), 4)
        for q_row in cutlass.range(warp_index, tile.num_rows, NUM_UNION_WARPS, unroll=1):
            entry, row_mask, four = entries[lane, q_row], Int32(0), cute.make_rmem_tensor(4, Int32)
            for other_row in cutlass.range(tile.num_rows, unroll=1):
                match = Int32(0)
                for vector in cutlass.range(vectors, unroll=4):
                    cute.autovec_copy(cute.local_tile(entries[None, other_row], (4,), (vector,)), four)
                    for j in cutlass.range_constexpr(4):
                        match = Int32(select_(four[j] == entry, Int32(1), match))
                row_mask = row_mask | (match << other_row)
            is_first = (entry >= 0) & ((row_mask & ((1 << q_row) - 1)) == 0)
            row_masks[lane, q_row] = Int32(select_(is_first, row_mask, Int32(0)))
            ballot = cute.arch.vote_ballot_sync(is_first)
            if lane == 0:
                first_flags[q_row] = Int32(ballot)
        self.sync_union_warps()
        self.write_union(union, union_idx % 2, tile, lane, warp_index)

    @cute.jit
    def write_union(
        self, union: UnionStorage, union_stage: Int32, tile: TileInfo, lane: Int32, warp_index: Int32
    ) -> None:
        """Orders the union: first the rows' first entries, then their second ones, and so on. Rows of all MMA
        warpgroups alternate, so that each warpgroup always has work.
        """
        entries, row_masks, first_flags, counts = union.entries, union.row_masks, union.first_flags, union.counts
        union_blocks = union.blocks
        union_masks = union.masks
        lanes_below = Int32(cute.arch.lanemask_lt())
        count = Int32(0)
        for q_row in cutlass.range(warp_index, tile.num_rows, NUM_UNION_WARPS, unroll=1):
            position = Int32(0)
            for other_row in cutlass.range(tile.num_rows, unroll=1):
                flags = first_flags[other_row]
                ranks_before = self.interleave_rank(other_row) < self.interleave_rank(q_row)
                position += Int32(cute.arch.popc(flags & lanes_below)) + Int32(
                    select_(ranks_before, (flags >> lane) & 1, Int32(0))
                )
            row_mask = row_masks[lane, q_row]
            if row_mask != 0:
                union_blocks[position, union_stage] = entries[lane, q_row] % DUPLICATE
                union_masks[position, union_stage] = row_mask
        for q_row in cutlass.range(tile.num_rows, unroll=1):
            count += Int32(cute.arch.popc(first_flags[q_row]))
        if (warp_index == 0) & (lane == 0):
            counts[union_stage] = count

    def interleave_rank(self, q_row: Any) -> Any:
        """A row's rank in the union's order, in which rows of all MMA warpgroups alternate."""
        return q_row % self.s.queries_per_warpgroup * self.num_mma_warpgroups + q_row // self.s.queries_per_warpgroup

    def sync_union_warps(self) -> None:
        """Synchronizes the union warps."""
        cute.arch.barrier(barrier_id=UNION_BARRIER, number_of_threads=NUM_UNION_WARPS * WARP_SIZE)
