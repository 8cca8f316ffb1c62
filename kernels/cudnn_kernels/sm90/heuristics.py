"""Which configuration of Hopper's GEMM serves a problem: pure functions, no CuTe DSL."""

from __future__ import annotations

from cudnn_kernels.configuration import GemmConfiguration, GemmProblem
from cudnn_kernels.epilogue import Swiglu

BITS = {"bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float32": 32}
K_BYTES = 128  # of a k tile: one row of the widest swizzle


def configure(problem: GemmProblem) -> GemmConfiguration:
    """Two warpgroups share a tile of 128 x 256, clusters of two CTAs share B: the best of those measured on an H200.

    A pair of gate and other column leaves one: 128 accumulator columns at a time then fill rows of 128 bytes.
    """
    bits = BITS[problem.a]
    pairs = any(isinstance(operation, Swiglu) for operation in problem.epilogue)
    wide = problem.n > 128
    return GemmConfiguration(
        a=problem.a,
        b=problem.b,
        epilogue=problem.epilogue,
        schedule=problem.schedule,
        a_major=problem.a_major,
        b_major=problem.b_major,
        tile=(128, 256 if wide and bits == 16 else 128, K_BYTES * 8 // bits),
        cluster=(2, 1),
        promote=1 if bits == 8 else 0,
        part=128 if pairs and wide else 64,
    )
