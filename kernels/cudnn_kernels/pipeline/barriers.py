"""Named barriers of a CTA (the hardware has 16; 0 is ``__syncthreads``), an enumeration per kernel, and mbarriers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


class HopperGemm(IntEnum):
    """MMA warpgroup 1 uses barrier ID + 1. ``EPILOGUE`` + 2: both, in the epilogue of a shared tile."""

    PINGPONG = 1
    EPILOGUE = 3


class BlackwellGemm(IntEnum):
    """``POINTER``: the address of tensor memory is in shared memory. ``EPILOGUE``: the epilogue warps."""

    POINTER = 1
    EPILOGUE = 2


class BlackwellAttention(IntEnum):
    """``END``: all warps have read tensor memory, which can be deallocated. ``WARPGROUP`` + the warpgroup index."""

    END = 1
    WARPGROUP = 2


def sync(barrier: Int32, threads: int) -> None:
    """``barrier.sync``: waits until ``threads`` threads have arrived."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def arrive(barrier: Int32, threads: int) -> None:
    """``barrier.arrive`` on a barrier of ``threads`` threads, without waiting."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def sync_or(barrier: Int32, threads: int, value: Int32) -> Boolean:
    """``barrier.red.or``: waits for ``threads`` threads; whether any of them passed a nonzero value."""
    result = cute.arch.inline_ptx(
        "{{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; barrier.cta.red.or.pred any, {$r1}, {$r2}, mine; "
        "selp.b32 {$w0}, 1, 0, any; }}",
        write_only_types=[Int32],
        read_only_args=[value, barrier, Int32(threads)],
    )
    return cute.arch.vote_any_sync(result != 0)  # tells ptxas that the predicate is warp-uniform


Counts = Mapping[str, tuple[int, int]]
"""mbarriers by name: (number of barriers, arrival count of each)."""


def allocate(smem: Any, counts: Counts) -> dict[str, Any]:
    """Allocates mbarriers in shared memory. A pointer to the first one of each name."""
    return {name: smem.allocate_array(cutlass.Int64, count) for name, (count, _) in counts.items()}


def init_mbarriers(mbarriers: Mapping[str, Any], counts: Counts) -> None:
    """One thread, before the CTA or cluster synchronizes."""
    for name, (count, arrivals) in counts.items():
        for i in range(count):
            cute.arch.mbarrier_init(mbarriers[name] + i, arrivals)


@cute.jit
def elect_arrive(barrier: cute.Pointer, rank: Int32 | None = None) -> None:
    """One lane of the warp arrives on an mbarrier of this CTA, or of the CTA ``rank`` of the cluster."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier, rank)
