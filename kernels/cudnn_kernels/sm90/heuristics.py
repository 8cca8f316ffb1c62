"""Which configuration of Hopper's GEMM serves a problem: pure functions, no CuTe DSL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudnn_kernels.configuration import GemmConfiguration, configured, prepared_first
from cudnn_kernels.epilogue import EpilogueTraits, traits_of
from cudnn_kernels.problem import GemmProblem

MANY_COLUMNS = 8192
SHORT = 4096  # k of an expert's product, where hiding the epilogue pays
DEEP = 4096  # k from which an epilogue is too short a part for that; of weights' gradients half as many
SHORTEST = 256  # k where wider tiles pay, which read A more seldom
CACHED = 1 << 24  # bytes of an expert's weights
ALONE = 64  # bits that an epilogue stages for each of the accumulator's columns, where each warpgroup has a tile
WHOLE = 8  # the same, where a quantiser's columns pass at once: with more, few buffers are left for operands
FEW = 64  # experts: of more, each with any number of rows, many clusters of 256 rows have few of an expert
ALONE_EXPERTS = 80  # the same for experts' products, whose activation is written anew


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The GEMM alone or, where the tensor cores cannot read an operand, with its preparation before it.

    wgmma multiplies 16-bit elements of both majors, 8-bit and 32-bit ones K-major only, and knows no block scales.
    Block-scaled operands are dequantised to bfloat16. That is exact, for an element of 4 or 8 bits times its factor has
    at most 6 significant bits; only beyond bfloat16's exponents does the product become infinite or lose bits. 8-bit
    and 32-bit operands that are not K-major are transposed.

    wgmma adds up products of 8 bits with 13 bits, those of 16 bits with 25: for an ``accurate`` product, operands of 8
    bits are widened to bfloat16, which is exact. Factors of sums stay what they are.
    """
    return prepared_first(problem, configure_gemm)


def needs_promotion(c: GemmConfiguration) -> bool:
    """Whether sums of a few products are added to float32 registers: of 8 bits, or times their factors."""
    return c.a.bits == 8 or c.scales_accumulator


def columns(n: int, tile: int) -> int:
    """The columns of all tiles."""
    return -(-n // tile) * tile


def beside(n: int, tile: int) -> bool:
    """Whether two tiles side by side waste few of n columns."""
    return 20 * columns(n, 2 * tile) <= 21 * columns(n, tile)


def swizzle_size(problem: GemmProblem) -> int:
    """Rows of tiles that are taken together where two CTAs share A: few, where the L2 cache has room for B twice."""
    return 2 if problem.n * problem.k * problem.b.bits <= 8 * CACHED else problem.schedule.swizzle_size


def for_experts(problem: GemmProblem, traits: EpilogueTraits) -> dict[str, Any]:
    """What is special about experts' products of 16 bits, with an epilogue of one tensor, or of two and a gate.

    Where k is long and nothing is gated, both warpgroups share 256 x 128, up to 8 per cent faster than 128 x 256. Where
    it is short, each has a tile: one tile's epilogue is hidden behind the other's products. Two CTAs share A rather
    than B then, so that a cluster has 128 rows, not 256, of which an expert's last ones may be few: 128 x 128 is 3 to 8
    per cent faster than 128 x 192 with a shared B, but for a gate and one tensor, and weights' gradients. Lines by
    number arrive too slowly for two tiles; two CTAs share rows that the copy engine gathers, 30 per cent faster. Those
    of k are copied by threads, each CTA's by its own; two CTAs share the other operand, with which both passes of a
    layer took 1 per cent less.
    """
    splits, one = problem.schedule.varlen_k, len(traits.staged_bits) == 1
    depth = problem.k // (problem.groups if splits else 1)
    if splits and problem.b.index:
        shares = not problem.a.index and beside(problem.n, 128)
        return {"tile": (256, 128), "epi_tile_n": 64, "cluster": (1, 2) if shares else (1, 1)}
    if splits and problem.a.index:
        return {"tile": (128, 256), "epi_tile_n": 64, "cluster": (2, 1)}
    if problem.a.index:
        shared = (
            {"cluster": (1, 2), "swizzle_size": swizzle_size(problem)}
            if beside(problem.n, 256)
            else {"cluster": (1, 1)}
        )
        return {"tile": (128, 256), "epi_tile_n": 64, **shared}
    if one and traits.width == 1 and depth >= (DEEP // 2 if splits else DEEP):
        return {"tile": (256, 128), "epi_tile_n": 64, "cluster": (1, 2)}
    if depth > SHORT or not (one or (traits.width < 1 and len(traits.staged_bits) == 2)):
        return {}
    alone: dict[str, Any] = {"tile": (128, 128), "epi_tile_n": 64, "pingpong": True}
    if one and (splits or traits.width < 1):
        fits = 20 * columns(problem.n, 192) <= 21 * columns(problem.n, 256)
        return {**alone, "tile": (128, 192)} if fits and not problem.concat_glu else {}
    if one and depth <= SHORTEST and beside(problem.n, 192):
        return {**alone, "tile": (128, 192), "cluster": (1, 2)}
    return {**alone, "cluster": (1, 2), "swizzle_size": swizzle_size(problem)} if beside(problem.n, 128) else alone


def configure_gemm(problem: GemmProblem) -> GemmConfiguration:
    """The best of the configurations measured on an H200, by type, width and what the epilogue stages.

    16 bits: two warpgroups share 128 x 256. Where tiles of 192 columns waste little and the epilogue stages one tensor,
    each has 128 x 192 of its own, which is 2 to 5 per cent faster; quantisers and rotations would not find registers
    then. Rotations have 128 x 128, 3 to 10 per cent faster than a shared tile, since reading the angles is hidden.
    Experts' products differ, see :func:`for_experts`; with quantisers to 8 bits and short k, each warpgroup has 128 x
    128. 8 bits: a second set of accumulators leaves room for 192 columns, or for 128 where the epilogue does not take
    those. With factors of sums, half of 256 columns are promoted at a time: as many registers, whole blocks of B, and
    fewer idle SMs at 4096 columns; two buffers for results of up to 16 bits are 1 to 8 per cent faster than one. Where
    128 columns pass through the epilogue together, a tile has no more, or registers would be spilled; where it is no
    divisor of 128 that pass, as many as 256 hold. Clusters of two CTAs share B or, in the last row of an expert whose
    rows of tiles are odd in number, A: 1.11 times as fast with rows by Zipf's law.

    An epilogue that widens its value has registers for 128 x 128 only, of which 32 columns pass at a time: one tile for
    each warpgroup if what it stages leaves room for the operands, else one for both. For experts, the CTAs of a cluster
    share A then, so that fewer of an expert's last rows are wasted. So do those of many experts' products with factors
    of sums, 4 per cent faster. The CTAs of a cluster fetch equal shares of B's halves, which tiles of 192 columns have
    not. A quantiser of 128 columns behind a gate takes 256, experts' at once if few bits are staged: the gate is
    computed once then.

    Rows by number are drawn: where each cluster takes every n-th tile, some fall behind, and the rows and weights of
    more experts are in use than the L2 cache keeps. So are rows with factors of sums, but not those of the shortest k.
    """
    bits, traits, scale = problem.a.bits, traits_of(problem.epilogue), problem.a.scale
    epi_tile_n = 64 if traits.accepts(64) else traits.columns
    choice: dict[str, Any] = {"tile": (128, max(128 // epi_tile_n, 1) * epi_tile_n), "epi_tile_n": epi_tile_n}
    wide = 192 if (bits == 8) != bool(scale) else 256
    gathered, one = bool(problem.a.index or problem.b.index), len(traits.staged_bits) == 1
    grouped = bits == 16 and problem.schedule.searches
    rotates = bits == 16 and traits.registers and traits.staged_bits == (16,) and traits.width == 1
    if traits.two_pass_multiple:
        whole = problem.schedule.searches and traits.bits <= WHOLE
        choice = {"tile": (128, traits.columns), "epi_tile_n": traits.columns if whole else int(64 / traits.width)}
    elif traits.width > 1:
        most = ALONE_EXPERTS if grouped else ALONE
        alone = bits == 16 and traits.bits <= most and not traits.registers and not scale
        choice |= {"epi_tile_n": 32, "pingpong": alone}
        if grouped and alone:
            choice |= (
                {"cluster": (1, 2), "swizzle_size": swizzle_size(problem)}
                if beside(problem.n, 128)
                else {"cluster": (1, 1)}
            )
    elif bits != 8 and not scale and 128 % epi_tile_n and problem.n > 128:
        choice = {"tile": (128, 256 // epi_tile_n * epi_tile_n), "epi_tile_n": epi_tile_n}
    elif rotates and not scale and problem.n > 128:
        choice |= {"pingpong": True}
    elif (
        problem.n > 128
        and epi_tile_n == 64
        and not (problem.concat_glu and wide == 192)
        and ((bits != 8 and not scale) or wide % traits.columns == 0)
    ):
        quantizes = traits.registers and max(traits.staged_bits, default=0) == 8 and traits.accepts(32)
        if scale:
            choice = {"tile": (128, wide), "epi_tile_n": epi_tile_n, "epi_stages": 2 if traits.bits <= 16 else 1}
        elif bits == 8:
            choice = {"tile": (128, 192), "epi_tile_n": 64, "epi_stages": 3 if one else 1}
        elif grouped and not gathered and quantizes and problem.k <= SHORT:
            choice = {"tile": (128, 128), "epi_tile_n": 32, "pingpong": True}
        elif grouped and not traits.registers and (special := for_experts(problem, traits)):
            choice = special
        elif problem.n >= MANY_COLUMNS and one and not traits.registers and not problem.concat_glu and not gathered:
            choice = {"tile": (128, 192), "epi_tile_n": 64, "pingpong": True}
        else:
            choice = {"tile": (128, 256), "epi_tile_n": int(64 / traits.width)}
    many = problem.groups > FEW or gathered
    if scale and many and problem.schedule.searches and beside(problem.n, choice["tile"][1]):
        choice |= {"cluster": (1, 2)}
    by_row = problem.schedule.searches and not problem.schedule.varlen_k
    dynamic_scheduler = by_row and bool(problem.a.index or (scale and problem.k > SHORTEST))
    choice = {"cluster": (2, 1), "dynamic_scheduler": dynamic_scheduler, **choice}
    changes: dict[str, Any] = {"swizzle_size": choice.pop("swizzle_size")} if "swizzle_size" in choice else {}
    schedule = problem.schedule
    if schedule.row_alignment % (2 * choice["tile"][0]) and choice["cluster"] == (2, 1) and not gathered:
        changes["split_tail_n"] = True
    return configured(replace(problem, schedule=replace(schedule, **changes)), **choice)
