"""NSA block-sparse attention on Hopper, KV-stationary: CTAs own a KV block and loop over the query rows that selected
it.

The transposed (CSR) lists come from :mod:`cudnn_kernels.attention.csr_transpose`: ``query_list`` has the rows,
``list_ends`` (lists + 1, 3) where each list begins, how many chunks precede it, and how many chunks of lists with
several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, select_

from cudnn_kernels.attention import seqlen_info
from cudnn_kernels.sm90.attention_forward import WGMMA_M
from cudnn_kernels.sm90.sparse_query_tile import SparseQueryTile


@dataclass
class KVBlockTile:
    """A CTA's work: up to 64 keys of a block, from ``key_begin`` of the sequence on, a head, and the chunk ``begin`` to
    ``end`` of the list of rows that selected the block. Lists with several ``num_chunks`` have a ``partial_slot`` of
    partial sums per chunk.
    """

    head: Int32
    key_begin: Int32
    offset_k: Int32
    num_keys: Int32
    begin: Int32
    end: Int32
    num_chunks: Int32
    partial_slot: Int32


class SparseKVBlock(SparseQueryTile):
    """The common part of the kernels whose CTAs own a KV block and a chunk of its list of query rows."""

    @cute.jit
    def list_chunk_tile(
        self, chunk: Int32, key_tile: Int32, list_ends: cute.Tensor, cu_seqlens: cute.Tensor
    ) -> KVBlockTile:
        """The ``chunk``-th chunk of all lists, by binary search. Warp-collective."""
        num_lists = list_ends.shape[0] - 1
        low, high = Int32(0), Int32(num_lists)  # binary search: the last list that begins at this chunk or before
        while low + 1 < high:
            middle = (low + high) // 2
            at_or_before = list_ends[middle, 1] <= chunk
            low, high = Int32(select_(at_or_before, middle, low)), Int32(select_(at_or_before, high, middle))
        kv_tile = self.kv_block_tile(low, key_tile, list_ends, cu_seqlens)
        chunk_in_list = chunk - list_ends[low, 1]
        begin = kv_tile.begin + chunk_in_list * self.s.list_chunk
        num_keys = Int32(select_(chunk < list_ends[num_lists, 1], kv_tile.num_keys, Int32(0)))
        end = cutlass.min(begin + self.s.list_chunk, kv_tile.end)
        return replace(
            kv_tile, num_keys=num_keys, begin=begin, end=end, partial_slot=kv_tile.partial_slot + chunk_in_list
        )

    @cute.jit
    def kv_block_tile(
        self, list_idx: Int32, key_tile: Int32, list_ends: cute.Tensor, cu_seqlens: cute.Tensor
    ) -> KVBlockTile:
        """The ``list_idx``-th list, and the keys of its block that a key tile has."""
        s = self.s
        blocks_per_head = (list_ends.shape[0] - 1) // s.key_heads
        seq_idx, block_in_seq = seqlen_info.find_block(cu_seqlens, list_idx % blocks_per_head, s.block)
        offset_k = Int32(cu_seqlens[seq_idx])
        key_begin = block_in_seq * s.block + key_tile * WGMMA_M
        num_keys = cutlass.min(cu_seqlens[seq_idx + 1] - offset_k - key_begin, min(s.block, WGMMA_M))
        num_chunks = list_ends[list_idx + 1, 1] - list_ends[list_idx, 1]
        return KVBlockTile(
            list_idx // blocks_per_head,
            key_begin,
            offset_k,
            num_keys,
            list_ends[list_idx, 0],
            list_ends[list_idx + 1, 0],
            num_chunks,
            list_ends[list_idx, 2],
        )
