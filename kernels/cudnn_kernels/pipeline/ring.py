"""A ring of buffers in shared memory, with two barriers each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import count_up
from cudnn_kernels.pipeline import barriers


@dataclass
class Ring:
    """The barriers of ``stages`` buffers: ``full`` when a buffer has what was awaited, ``empty`` when all have read
    it.

    Functions of this module take a ring, for the DSL takes a method's object for changed. A role keeps its place as a
    stage and a phase. It starts with (0, 1) where it fills, so that it does not wait for
    buffers that nobody has filled yet, and with (0, 0) where it reads.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    @staticmethod
    def allocate(smem: Any, stages: int) -> Ring:
        """A ring whose barriers are not initialised."""
        full, empty = (smem.allocate_array(cutlass.Int64, stages) for _ in range(2))
        return Ring(full, empty, stages)


def initialise(ring: Ring, fillers: int, readers: int) -> None:
    """One thread, before all meet: how many arrivals fill a buffer, and how many empty it."""
    for stage in range(ring.stages):
        cute.arch.mbarrier_init(ring.full + stage, fillers)
        cute.arch.mbarrier_init(ring.empty + stage, readers)


def expect(ring: Ring, stage: Int32, phase: Int32, size: int) -> None:
    """One warp: waits for an empty buffer, which ``size`` bytes of the copy engine will fill."""
    cute.arch.mbarrier_wait(ring.empty + stage, phase)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + stage, size)


def at(ring: Ring, count: Any) -> tuple[Any, Any]:
    """The buffer of what comes after so many, and the phase of its barriers, where it is full."""
    return count % ring.stages, count // ring.stages % 2


def claim(ring: Ring, count: Any, size: int) -> Any:
    """One warp: the buffer for what comes after so many, when it is empty; ``size`` bytes will fill it."""
    stage, phase = at(ring, count)
    expect(ring, stage, phase ^ 1, size)
    return stage


def ready(ring: Ring, count: Any) -> Any:
    """The buffer of what comes after so many, when it is full."""
    stage, phase = at(ring, count)
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    return stage


@cute.jit
def advanced(ring: Ring, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The buffer after this one, and the phase of its barriers."""
    stage += 1
    if stage == ring.stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def draw(ring: Ring, drawn: cute.Tensor, count: cute.Tensor, turn: Int32, told: Any, draws: bool) -> tuple[Int32, ...]:
    """All warps of a CTA: the number of what is drawn in a turn, and what else the drawing warp ``told``.

    It ``draws`` by counting up in global memory, as soon as all have read what was drawn ``stages`` turns ago, and
    writes it to ``drawn``, (values, stages).
    """
    stage, phase = at(ring, turn)
    if const_expr(draws):
        cute.arch.mbarrier_wait(ring.empty + stage, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            drawn[0, stage] = count_up(count)
            for i in cutlass.range_constexpr(len(told)):
                drawn[1 + i, stage] = Int32(told[i])
            cute.arch.mbarrier_arrive(ring.full + stage)
    cute.arch.mbarrier_wait(ring.full + stage, phase)
    found = [cute.arch.make_warp_uniform(drawn[i, stage]) for i in range(1 + len(told))]
    cute.arch.sync_warp()
    barriers.arrive_once(ring.empty + stage)
    return found
