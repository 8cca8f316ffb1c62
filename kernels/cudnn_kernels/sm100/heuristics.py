"""Which configuration of Blackwell's GEMM serves a problem: pure functions, no CuTe DSL. None was ever timed."""

from __future__ import annotations

from cudnn_kernels.configuration import BITS, GemmConfiguration, GemmProblem
from cudnn_kernels.epilogue import LoadTile, StoreTile, Swiglu

PAIR = 64  # columns that gates and others fill together


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The caller's tile and cluster or, by default, pairs of CTAs with 256 x 256, with block scales 256 x 128.

    Two accumulators of 256 columns fill tensor memory: factors leave room for one, so products would wait for the
    epilogue. With 128 columns they need not, but A is read twice as often, which clusters of two pairs make up for.
    Columns of a tile are rounded up to what the epilogue takes at a time: to whole pairs where some are gates, to whole
    atoms where there are factors. An epilogue that stages 32 bits twice gets 128 at most: more would spill registers.
    """
    pairs = any(isinstance(operation, Swiglu) for operation in problem.epilogue)
    m, n = problem.tile or (256, 128 if problem.scale else 256)
    cluster = (m // 128, 2 if problem.scale and not problem.tile else 1)
    step = 128 if problem.scale else PAIR if pairs else 32
    staged = [BITS[o.dtype] for o in problem.epilogue if isinstance(o, (StoreTile, LoadTile))]
    n = min(-(-n // step) * step, 128 if staged == [32, 32] else 256)
    part = next(width for width in (64, 32) if n % width == 0)  # more of a row are more than a thread's registers hold
    return problem.configured((m, n), problem.cluster or cluster, part=part, staged=2 if n // part > 1 else 1)
