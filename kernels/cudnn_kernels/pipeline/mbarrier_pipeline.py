"""A multistage producer/consumer pipeline in shared memory, as CUTLASS's PipelineTmaAsync: two mbarriers for each
stage.

The producer waits on a stage's ``empty`` barrier, arms ``full`` with the bytes that TMA will write and issues the
loads. Consumers wait on ``full`` and, once they have read the stage, arrive on ``empty``. The position in the pipeline
is a stage index and the parity (phase) to wait for. A consumer starts at (0, 0). A producer starts at (0, 1), so that
its first pass over the stages does not block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from cudnn_kernels.kernel import atomic_inc
from cudnn_kernels.pipeline import barriers


@dataclass
class MbarrierPipeline:
    """The mbarriers of ``stages`` stages.

    The functions of this module take the pipeline as an argument: the DSL carries an object whose method is called
    through loops, as if the call had changed it.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int

    @staticmethod
    def allocate(smem: Any, stages: int) -> MbarrierPipeline:
        """Allocates the mbarriers; :func:`init_mbarriers` initializes them."""
        full, empty = (smem.allocate_array(cutlass.Int64, stages) for _ in range(2))
        return MbarrierPipeline(full, empty, stages)


def init_mbarriers(pipeline: MbarrierPipeline, producers: int, consumers: int) -> None:
    """One thread, before the CTA or cluster synchronizes: sets the arrival counts of ``full`` and ``empty``."""
    for stage in range(pipeline.stages):
        cute.arch.mbarrier_init(pipeline.full + stage, producers)
        cute.arch.mbarrier_init(pipeline.empty + stage, consumers)


@cute.jit
def producer_acquire(
    pipeline: MbarrierPipeline, stage: Int32, phase: Int32, tx_bytes: int, is_leader: Any = True
) -> None:
    """One warp: waits until the stage is empty and arms its full barrier with ``tx_bytes`` of TMA loads. In a pair of
    CTAs, the leader arms its full barrier for the loads of both.
    """
    cute.arch.mbarrier_wait(pipeline.empty + stage, phase)
    if is_leader:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(pipeline.full + stage, tx_bytes)


def stage_and_phase(pipeline: MbarrierPipeline, count: Any) -> tuple[Any, Any]:
    """The consumer's stage and phase after ``count`` stages have passed."""
    return count % pipeline.stages, count // pipeline.stages % 2


def producer_acquire_at(pipeline: MbarrierPipeline, count: Any, tx_bytes: int) -> Any:
    """:func:`producer_acquire` for the stage number ``count`` since the start. Returns the stage index."""
    stage, phase = stage_and_phase(pipeline, count)
    producer_acquire(pipeline, stage, phase ^ 1, tx_bytes)
    return stage


def consumer_wait(pipeline: MbarrierPipeline, count: Any) -> Any:
    """Waits until the stage number ``count`` since the start is full. Returns the stage index."""
    stage, phase = stage_and_phase(pipeline, count)
    cute.arch.mbarrier_wait(pipeline.full + stage, phase)
    return stage


@cute.jit
def advance(pipeline: MbarrierPipeline, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
    """The next stage; the phase flips when the index wraps around."""
    stage += 1
    if stage == pipeline.stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase


@cute.jit
def producer_tail(pipeline: MbarrierPipeline, stage: Int32, phase: Int32) -> None:
    """The producer, before it exits: waits until the consumers have released all stages, so that none of them, in this
    CTA or another one, still arrives on an empty barrier.
    """
    for _ in cutlass.range_constexpr(pipeline.stages):
        cute.arch.mbarrier_wait(pipeline.empty + stage, phase)
        stage, phase = advance(pipeline, stage, phase)


@cute.jit
def fetch_work(
    pipeline: MbarrierPipeline,
    work_smem: cute.Tensor,
    semaphore: cute.Tensor,
    iteration: Int32,
    payload: Any,
    is_scheduler: bool,
) -> tuple[Int32, ...]:
    """All warps of a CTA: the next tile index of a dynamic persistent scheduler, and the scheduler warp's ``payload``.

    The scheduler warp increments the ``semaphore`` (tile counter) in global memory as soon as all warps have read the
    stage that it overwrites, and writes index and payload to ``work_smem``, (values, stages).
    """
    stage, phase = stage_and_phase(pipeline, iteration)
    if const_expr(is_scheduler):
        cute.arch.mbarrier_wait(pipeline.empty + stage, phase ^ 1)
        if cute.arch.lane_idx() == 0:
            work_smem[0, stage] = atomic_inc(semaphore)
            for i in cutlass.range_constexpr(len(payload)):
                work_smem[1 + i, stage] = Int32(payload[i])
            cute.arch.mbarrier_arrive(pipeline.full + stage)
    cute.arch.mbarrier_wait(pipeline.full + stage, phase)
    work = [cute.arch.make_warp_uniform(work_smem[i, stage]) for i in range(1 + len(payload))]
    cute.arch.sync_warp()
    barriers.elect_arrive(pipeline.empty + stage)
    return work
