"""Which configuration of Hopper's GEMM serves a problem: pure functions, no CuTe DSL."""

from __future__ import annotations

from typing import Any

from cudnn_kernels.configuration import BITS, GemmConfiguration, GemmProblem
from cudnn_kernels.epilogue import LoadTile, QuantizeRows, StoreTile, Swiglu

MANY_COLUMNS = 8192


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The best of the configurations measured on an H200, by type, width and what the epilogue stages.

    16 bits: two warpgroups share 128 x 256. Where tiles of 192 columns waste little and the epilogue stages one tensor,
    each has 128 x 192 of its own, which is 2 to 5 per cent faster; a quantiser would not find registers then. 8 bits:
    a second set of accumulators leaves room for 192 columns. Clusters of two CTAs share B.
    """
    bits = BITS[problem.a]
    staged = [operation for operation in problem.epilogue if isinstance(operation, (StoreTile, LoadTile))]
    pairs, quantises = (any(isinstance(op, kind) for op in problem.epilogue) for kind in (Swiglu, QuantizeRows))
    choice: dict[str, Any] = {"tile": (128, 128), "part": 64}
    if problem.n > 128:
        if bits == 8:
            choice = {"tile": (128, 192), "part": 64, "promote": 1, "staged": 3 if len(staged) == 1 else 1}
        elif bits == 16 and problem.n >= MANY_COLUMNS and len(staged) == 1 and not quantises:
            choice = {"tile": (128, 192), "part": 64, "pingpong": True}
        else:
            choice = {"tile": (128, 256), "part": 128 if pairs else 64}
    if bits == 8:
        choice["promote"] = 1
    return problem.configured(cluster=(2, 1), **choice)
