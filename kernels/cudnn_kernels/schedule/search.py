"""Finds the expert that has a row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

WARP = 32


@cute.jit
def count_up_to(offsets: cute.Tensor, row: Int32) -> Int32:
    """How many offsets are at most ``row``. All lanes of a warp take part, 32 offsets at a time."""
    lane, size, found = cute.arch.lane_idx(), offsets.shape[0], Int32(0)
    for first in cutlass.range(0, size, WARP, unroll=1):
        ended = Boolean(False)
        if first + lane < size:
            ended = offsets[first + lane] <= row
        found += cute.arch.popc(cute.arch.vote_ballot_sync(ended))
    return found
