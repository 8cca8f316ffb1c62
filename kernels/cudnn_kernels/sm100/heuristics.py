"""Which configuration of Blackwell's GEMM serves a problem: pure functions, no CuTe DSL. None was ever timed."""

from __future__ import annotations

from cudnn_kernels.configuration import GemmConfiguration, GemmProblem
from cudnn_kernels.epilogue import LoadTile, StoreTile, Swiglu

BITS = {"bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float32": 32, "float4_e2m1fn_x2": 4}
K_BYTES = 128  # of a k tile: one row of the widest swizzle
PAIR = 64  # columns that gates and others fill together


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The caller's tile and cluster or, by default, pairs of CTAs with 256 x 256, with block scales 256 x 128.

    Two accumulators of 256 columns fill tensor memory: factors leave room for one, so products would wait for the
    epilogue. With 128 columns they need not, but A is read twice as often, which clusters of two pairs make up for.
    Columns of a tile are rounded up to what the epilogue takes at a time: to whole pairs where some are gates, to whole
    atoms where there are factors.
    """
    pairs = any(isinstance(operation, Swiglu) for operation in problem.epilogue)
    m, n = problem.tile or (256, 128 if problem.scale else 256)
    cluster = (m // 128, 2 if problem.scale and not problem.tile else 1)
    step = 128 if problem.scale else PAIR if pairs else 32
    n = -(-n // step) * step
    staged = [BITS[o.dtype] for o in problem.epilogue if isinstance(o, (StoreTile, LoadTile))]
    # More than 64 columns of a row are more than a thread's registers hold. Of twice 32 bits, 64 leave no room for two
    # k tiles of 256 columns.
    widest = 32 if staged == [32, 32] else 64
    part = next(width for width in (64, 32) if n % width == 0 and width <= widest)
    return GemmConfiguration(
        problem.a,
        problem.b,
        problem.epilogue,
        problem.schedule,
        problem.a_major,
        problem.b_major,
        problem.scale,
        problem.vector,
        tile=(m, n, K_BYTES * 8 // BITS[problem.a]),
        cluster=problem.cluster or cluster,
        part=part,
        staged=2 if n // part > 1 else 1,
    )
