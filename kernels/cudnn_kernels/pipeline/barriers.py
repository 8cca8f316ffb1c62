"""Named barriers of a CTA, of which the hardware has 16; 0 is that of all threads. One enumeration for each kernel.

And barriers in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


class HopperGemm(IntEnum):
    """Of the two warpgroups that multiply, the second one's number is one more."""

    TURN = 1
    GROUP = 3


class BlackwellGemm(IntEnum):
    """``POINTER``: where tensor memory was allocated; ``GROUP``: the warps of the epilogue."""

    POINTER = 1
    GROUP = 2


class BlackwellAttention(IntEnum):
    """``END``: all have read what they need of tensor memory. A warpgroup's number is added to ``GROUP``."""

    END = 1
    GROUP = 2


def wait(barrier: Int32, threads: int) -> None:
    """Waits until so many threads have come to a barrier."""
    cute.arch.barrier(barrier_id=barrier, number_of_threads=threads)


def arrive(barrier: Int32, threads: int) -> None:
    """Counts as having come to a barrier that so many threads pass, without waiting."""
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=threads)


def any_of(barrier: Int32, threads: int, value: Int32) -> Boolean:
    """Waits until so many threads have come to a barrier: whether any of them has a value other than 0."""
    found = cute.arch.inline_ptx(
        "{{ .reg .pred mine, any; setp.ne.s32 mine, {$r0}, 0; barrier.cta.red.or.pred any, {$r1}, {$r2}, mine; "
        "selp.b32 {$w0}, 1, 0, any; }}",
        write_only_types=[Int32],
        read_only_args=[value, barrier, Int32(threads)],
    )
    return cute.arch.vote_any_sync(found != 0)  # so that ptxas knows it to be uniform


Counts = Mapping[str, tuple[int, int]]
"""Barriers in shared memory by name: as many as the first number, each for so many arrivals as the second."""


def allocate(smem: Any, counts: Counts) -> dict[str, Any]:
    """The first one of each name."""
    return {name: smem.allocate_array(cutlass.Int64, count) for name, (count, _) in counts.items()}


def initialise(made: Mapping[str, Any], counts: Counts) -> None:
    """One thread, before all meet."""
    for name, (count, arrivals) in counts.items():
        for i in range(count):
            cute.arch.mbarrier_init(made[name] + i, arrivals)


@cute.jit
def arrive_once(barrier: cute.Pointer, rank: Int32 | None = None) -> None:
    """A warp arrives at a barrier in shared memory, of its CTA or of another one of the cluster."""
    if cute.arch.lane_idx() == 0:
        cute.arch.mbarrier_arrive(barrier, rank)
