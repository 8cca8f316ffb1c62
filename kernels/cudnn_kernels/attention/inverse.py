"""The lists of blocks that rows chose, turned around: for each block the rows that chose it, in ascending order.

A counting sort in two passes of one kernel. A warp has some rows' lists of a head of K, row after row, a lane each
place of a list. In the first pass it counts how often it meets each block. These counts, added up block by block and
warp by warp, say where each warp's rows of a block begin; in the second pass it puts them there. Lanes that hold the
same block are counted in their order. So the result is the same from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import Kernel
from cudnn_kernels.naming import name

WARP = 32
WARPS = 4  # of a CTA
ALL = 0xFFFFFFFF


class Inverse(Kernel):
    """The kernel for one ``InverseConfiguration``."""

    def launch(self, given: Mapping[str, Any]) -> None:
        indices = given["block_indices"]
        warps = cute.ceil_div(indices.shape[0], self.c.rows)
        self.kernel(
            indices,
            given["block_counts"],
            given["cum_seqlen"],
            given["places"],
            given.get("choosing"),
            given.get("chosen_places"),
        ).launch(
            grid=[cute.ceil_div(warps, WARPS), indices.shape[1], 1],
            block=[WARP * WARPS, 1, 1],
            stream=given["stream"],
        )

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        offsets: cute.Tensor,
        places: cute.Tensor,
        choosing: Any,
        chosen_places: Any,
    ) -> None:
        """``places``: of every block and warp a count, or where its rows begin."""
        thread, _, _ = cute.arch.thread_idx()
        cta, head, _ = cute.arch.block_idx()
        lane, mine = thread % WARP, cta * WARPS + cute.arch.make_warp_uniform(thread // WARP)
        c, most, sequences = self.c, indices.shape[2], offsets.shape[0] - 1
        numbers = indices.shape[0] // c.block + sequences
        first = mine * c.rows
        sequence = Int32(-1)
        for i in cutlass.range(0, sequences, WARP, unroll=1):
            begun = cutlass.Boolean(False)
            if i + lane < sequences:
                begun = offsets[i + lane] <= first
            sequence += cute.arch.popc(cute.arch.vote_ballot_sync(begun))
        sequence = cutlass.max(sequence, 0)
        for row in cutlass.range(first, cutlass.min(first + c.rows, indices.shape[0]), unroll=1):
            while (sequence + 1 < sequences) & (offsets[sequence + 1] <= row):
                sequence += 1
            begin, end = offsets[sequence], offsets[sequence + 1]
            seen = end - begin
            if const_expr(c.causal):
                seen = row - begin + 1
            listed = cutlass.min(counts[row, head], most)
            if (row < begin) | (row >= end):
                listed = Int32(0)
            for place in cutlass.range(0, listed, WARP, unroll=1):
                block = Int32(-1)
                if place + lane < listed:
                    block = indices[row, head, place + lane]
                    if block * c.block >= seen or block > seen:
                        block = Int32(-1)
                same = Int32(cute.arch.match_sync(ALL, block))
                before = cute.arch.popc(same & Int32(cute.arch.lanemask_lt()))
                at = Int32(0)
                if block >= 0:
                    number = head * numbers + begin // c.block + sequence + block
                    at = places[number, mine]
                    if const_expr(choosing is not None):
                        choosing[at + before] = row
                    if const_expr(chosen_places is not None):
                        chosen_places[row, head, place + lane] = at + before
                cute.arch.sync_warp()
                if (block >= 0) & (before == 0):
                    number = head * numbers + begin // c.block + sequence + block
                    places[number, mine] = at + cute.arch.popc(same)
                cute.arch.sync_warp()

    name(kernel, "cudnn_nsa_choosing_rows")
