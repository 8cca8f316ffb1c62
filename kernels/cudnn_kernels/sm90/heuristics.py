"""Which configuration of Hopper's GEMM serves a problem: pure functions, no CuTe DSL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudnn_kernels.configuration import (
    K_BYTES,
    GemmConfiguration,
    OperandConfiguration,
    PreparedGemmConfiguration,
    configured,
)
from cudnn_kernels.epilogue import needs_of
from cudnn_kernels.problem import GemmProblem, Operand

MANY_COLUMNS = 8192
SHORT = 4096  # k of an expert's product, where hiding the epilogue pays
DEEP = 4096  # k from which an epilogue is too short a part for that
ALONE = 64  # bits that an epilogue stages for each of the accumulator's columns, where each warpgroup has a tile


def configure(problem: GemmProblem) -> GemmConfiguration | PreparedGemmConfiguration:
    """The GEMM alone or, where the tensor cores cannot read an operand, with its preparation before it.

    wgmma multiplies 16-bit elements of both majors, 8-bit and 32-bit ones K-major only, and knows no block scales.
    Block-scaled operands are dequantised to bfloat16. That is exact, for an element of 4 or 8 bits times its factor has
    at most 6 significant bits; only beyond bfloat16's exponents does the product become infinite or lose bits. 8-bit
    and 32-bit operands that are not K-major are transposed.

    wgmma adds up products of 8 bits with 13 bits, those of 16 bits with 25: for an ``accurate`` product, operands of 8
    bits are widened to bfloat16, which is exact. Factors of sums stay what they are.
    """
    operands = (problem.a, problem.b)
    bare = [replace(x, scale=None) if x.scale and x.scale.of_sums else x for x in operands]
    steps = [preparation(x, problem.accurate, problem.schedule.splits_k) for x in bare]
    prepared = [step.result if step else x for x, step in zip(bare, steps, strict=True)]
    a, b = (replace(x, scale=was.scale) if was.scale and was.scale.of_sums else x
            for x, was in zip(prepared, operands, strict=True))  # fmt: skip
    gemm = configure_gemm(replace(problem, a=a, b=b))
    return PreparedGemmConfiguration(gemm, *steps) if any(steps) else gemm


def preparation(operand: Operand, accurate: bool, splits_k: bool = False) -> OperandConfiguration | None:
    """What must be done to an operand first, if anything. ``splits_k`` as in a schedule."""
    if accurate and operand.scale is None and operand.bits == 8:
        return OperandConfiguration(operand, widen=True)
    if operand.scale is None and (operand.major == "k" or operand.bits == 16):
        return None
    return OperandConfiguration(operand, splits_k=splits_k and operand.scale is not None)


def columns(n: int, tile: int) -> int:
    """The columns of all tiles."""
    return -(-n // tile) * tile


def configure_gemm(problem: GemmProblem) -> GemmConfiguration:
    """The best of the configurations measured on an H200, by type, width and what the epilogue stages.

    16 bits: two warpgroups share 128 x 256. Where tiles of 192 columns waste little and the epilogue stages one tensor,
    each has 128 x 192 of its own, which is 2 to 5 per cent faster; quantisers and rotations would not find registers
    then. Where experts' products have short k, such tiles are 2 to 20 per cent faster, and so are 128 x 128 with a gate
    and two tensors, or with quantisers to 8 bits: one tile's epilogue is hidden behind the next one's products. Where
    their k is long, both share 256 x 128, and two CTAs share A, which was up to 8 per cent faster. Rows that are
    gathered arrive too slowly for two tiles. 8 bits: a second set of accumulators leaves room for 192 columns, or for
    128 where the epilogue does not take those. With factors of sums, half of 256 columns are promoted at a time: as
    many registers, whole blocks of B, and fewer idle SMs at 4096 columns; not timed yet. Where 128 columns pass through
    the epilogue together, a tile has no more, or registers would be spilled. Clusters of two CTAs share B.

    An epilogue that widens its value has registers for 128 x 128 only, of which 32 columns pass at a time: one tile for
    each warpgroup if what it stages leaves room for the operands, else one for both. The CTAs of a cluster fetch equal
    shares of B's halves, which tiles of 192 columns have not.
    """
    bits, needs, scale = problem.a.bits, needs_of(problem.epilogue), problem.a.scale
    part = 64 if needs.takes(64) else needs.columns
    choice: dict[str, Any] = {"tile": (128, 128), "part": part}
    wide = 192 if (bits == 8) != bool(scale) else 256
    many = problem.n >= MANY_COLUMNS and not problem.halves
    depth = problem.k // (problem.groups if problem.schedule.splits_k else 1)
    gathered = bool(problem.a.index or problem.b.index)
    grouped = bits == 16 and problem.schedule.searches and not gathered
    short = grouped and depth <= SHORT
    turns = 20 * columns(problem.n, 192) <= 21 * columns(problem.n, 256) if short else many
    one = len(needs.staged) == 1 and not needs.registers
    if needs.width > 1:
        alone = bits == 16 and needs.bits <= ALONE and not needs.registers and not scale
        choice |= {"part": 32, "pingpong": alone}
    elif problem.n > 128 and part == 64 and not (problem.halves and wide == 192) and (
        (bits != 8 and not scale) or wide % needs.columns == 0
    ):
        if scale:
            choice = {"tile": (128, wide), "part": part}
        elif bits == 8:
            choice = {"tile": (128, 192), "part": 64, "promote": 1, "staged": 3 if len(needs.staged) == 1 else 1}
        elif short and needs.registers and max(needs.staged, default=0) == 8 and needs.takes(32):
            choice = {"tile": (128, 128), "part": 32, "pingpong": True}
        elif short and needs.width < 1 and len(needs.staged) == 2 and not needs.registers:
            choice = {"tile": (128, 128), "part": 64, "pingpong": True}
        elif grouped and depth >= DEEP and one:
            choice = {"tile": (256, 128), "part": 64, "cluster": (1, 2)}
        elif turns and one and not gathered:
            choice = {"tile": (128, 192), "part": 64, "pingpong": True}
        else:
            choice = {"tile": (128, 256), "part": int(64 / needs.width)}
    if bits == 8 or scale:
        choice["promote"] = scale.vector * bits // (8 * K_BYTES) if scale else 1
    return configured(problem, **{"cluster": (2, 1), **choice})
