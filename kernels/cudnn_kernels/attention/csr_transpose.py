"""Transposes the selected block lists: for each block, the query rows that selected it, in ascending order (CSR).

A counting sort, in two passes of one kernel. A warp has some rows' lists of one head of K, row by row, a lane per list
entry. Pass 1 counts how often each warp meets each block. The exclusive sums of these counts, block by block and warp
by warp, are where each warp's rows of a block begin; pass 2 writes the rows there. match.any ranks lanes with the same
block, so the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.threads import WARP_SIZE

WARPS = 4  # per CTA
ALL = 0xFFFFFFFF


class CsrTranspose(Kernel):
    """The kernel for one :class:`CsrTransposeConfiguration`."""

    def launch(self, arguments: Mapping[str, Any]) -> None:
        indices = arguments["block_indices"]
        warps = cute.ceil_div(indices.shape[0], self.c.rows)
        self.kernel(
            indices,
            arguments["block_counts"],
            arguments["cum_seqlen"],
            arguments["positions"],
            arguments.get("query_indices"),
            arguments.get("entry_positions"),
        ).launch(
            grid=[cute.ceil_div(warps, WARPS), indices.shape[1], 1],
            block=[WARP_SIZE * WARPS, 1, 1],
            stream=arguments["stream"],
        )

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        cu_seqlens: cute.Tensor,
        positions: cute.Tensor,
        query_list: Any,
        entry_positions: Any,
    ) -> None:
        """``positions``: of every block and warp, a count, or the position where its rows begin."""
        thread, _, _ = cute.arch.thread_idx()
        cta, head, _ = cute.arch.block_idx()
        lane, warp_idx = thread % WARP_SIZE, cta * WARPS + cute.arch.make_warp_uniform(thread // WARP_SIZE)
        c, list_len, num_sequences = self.c, indices.shape[2], cu_seqlens.shape[0] - 1
        blocks_per_head = indices.shape[0] // c.block + num_sequences
        first_row = warp_idx * c.rows
        seq_idx = Int32(-1)
        for i in cutlass.range(0, num_sequences, WARP_SIZE, unroll=1):
            started = cutlass.Boolean(False)
            if i + lane < num_sequences:
                started = cu_seqlens[i + lane] <= first_row
            seq_idx += cute.arch.popc(cute.arch.vote_ballot_sync(started))
        seq_idx = cutlass.max(seq_idx, 0)
        for row in cutlass.range(first_row, cutlass.min(first_row + c.rows, indices.shape[0]), unroll=1):
            while (seq_idx + 1 < num_sequences) & (cu_seqlens[seq_idx + 1] <= row):
                seq_idx += 1
            begin, end = cu_seqlens[seq_idx], cu_seqlens[seq_idx + 1]
            visible_keys = end - begin
            if const_expr(c.causal):
                visible_keys = row - begin + 1
            valid_len = cutlass.min(counts[row, head], list_len)
            if (row < begin) | (row >= end):
                valid_len = Int32(0)
            for entry in cutlass.range(0, valid_len, WARP_SIZE, unroll=1):
                block = Int32(-1)
                if entry + lane < valid_len:
                    block = indices[row, head, entry + lane]
                    if block * c.block >= visible_keys or block > visible_keys:
                        block = Int32(-1)
                same_block = Int32(cute.arch.match_sync(ALL, block))
                rank = cute.arch.popc(same_block & Int32(cute.arch.lanemask_lt()))
                position = Int32(0)
                if block >= 0:
                    block_idx = head * blocks_per_head + begin // c.block + seq_idx + block
                    position = positions[block_idx, warp_idx]
                    if const_expr(query_list is not None):
                        query_list[position + rank] = row
                    if const_expr(entry_positions is not None):
                        entry_positions[row, head, entry + lane] = position + rank
                cute.arch.sync_warp()
                if (block >= 0) & (rank == 0):
                    block_idx = head * blocks_per_head + begin // c.block + seq_idx + block
                    positions[block_idx, warp_idx] = position + cute.arch.popc(same_block)
                cute.arch.sync_warp()

    set_kernel_name(kernel, "cudnn_nsa_csr_transpose")
