"""The configuration of Hopper's GEMM for a problem. Pure functions, no CuTe DSL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudnn_kernels.epilogue import EpilogueTraits, traits_of
from cudnn_kernels.gemm.configuration import GemmConfiguration, configured, prepared_first
from cudnn_kernels.gemm.problem import GemmProblem

MANY_COLUMNS = 8192
SHORT_K = 4096  # k of a grouped GEMM up to which overlapping the epilogue pays off
DEEP_K = 4096  # k from which the epilogue is too short for that; half as much for weight gradients
SHORTEST_K = 256  # k up to which wider tiles pay off, which read A less often
CACHED_BYTES = 1 << 24  # bytes of an expert's weights that fit into L2 twice
PINGPONG_BITS = 64  # staged bits per accumulator column, up to which ping-pong fits
# staged bits up to which one subtile is as wide as a quantizer's block: more would leave few operand stages
ONE_SUBTILE_BITS = 8
FEW_EXPERTS = 64  # experts, beyond which many clusters of 256 rows would be partly empty
PINGPONG_EXPERT_BITS = 80  # staged bits for grouped GEMMs that recompute the activation


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The configuration of the GEMM, with the preparation of operands that the tensor cores cannot read.

    wgmma takes 16-bit operands of both majors, 8-bit and 32-bit ones K-major only, and has no block scales.
    Block-scaled operands are dequantized to bfloat16. That is exact, since a 4-bit or 8-bit element times its scale
    factor has at most 6 significant bits; only beyond bfloat16's exponents does it become infinite or lose bits. 8-bit
    and 32-bit operands that are not K-major are transposed.

    wgmma accumulates 8-bit operands with 13 bits, 16-bit ones with 25: for ``accurate`` GEMMs, 8-bit operands are
    widened to bfloat16, which is exact. fp32 scale factors of accumulators are unaffected.
    """
    return prepared_first(problem, configure_gemm)


def needs_promotion(c: GemmConfiguration) -> bool:
    """Whether partial accumulators are promoted to float32 registers: of 8-bit operands, or scaled ones."""
    return c.a.bits == 8 or c.scales_accumulator


def padded_columns(n: int, tile: int) -> int:
    """n, padded to whole tiles."""
    return -(-n // tile) * tile


def two_tiles_fit(n: int, tile: int) -> bool:
    """Whether padding n to pairs of tiles wastes at most 5 per cent."""
    return 20 * padded_columns(n, 2 * tile) <= 21 * padded_columns(n, tile)


def swizzle_size(problem: GemmProblem) -> int:
    """The swizzle size if two CTAs share A: small if L2 holds B twice."""
    return 2 if problem.n * problem.k * problem.b.bits <= 8 * CACHED_BYTES else problem.schedule.swizzle_size


def for_experts(problem: GemmProblem, traits: EpilogueTraits) -> dict[str, Any]:
    """The choice for 16-bit grouped GEMMs whose epilogue stages one tensor, or two with a gate.

    For long k and without a gate, both warpgroups share 256 x 128, up to 8 per cent faster than 128 x 256. For short k,
    ping-pong: the epilogue of one warpgroup overlaps with the MMAs of the other. Two CTAs share A rather than B then,
    so that a cluster has 128 rows instead of 256, which wastes less of a group's tail: 128 x 128 is 3 to 8 per cent
    faster than 128 x 192 with a shared B, except for a gate with one tensor, and weight gradients. Gathered operands
    arrive too slowly for ping-pong; two CTAs multicast rows that TMA gathers, 30 per cent faster. Lines gathered along
    k are copied by threads of each CTA; two CTAs share the other operand, which makes both passes of a layer 1 per cent
    faster.
    """
    varlen_k, one_staged = problem.schedule.varlen_k, len(traits.staged_bits) == 1
    depth = problem.k // (problem.groups if varlen_k else 1)
    if varlen_k and problem.b.index:
        shares = not problem.a.index and two_tiles_fit(problem.n, 128)
        return {"tile": (256, 128), "epi_tile_n": 64, "cluster": (1, 2) if shares else (1, 1)}
    if varlen_k and problem.a.index:
        return {"tile": (128, 256), "epi_tile_n": 64, "cluster": (2, 1)}
    if problem.a.index:
        shared = (
            {"cluster": (1, 2), "swizzle_size": swizzle_size(problem)}
            if two_tiles_fit(problem.n, 256)
            else {"cluster": (1, 1)}
        )
        return {"tile": (128, 256), "epi_tile_n": 64, **shared}
    if one_staged and traits.width == 1 and depth >= (DEEP_K // 2 if varlen_k else DEEP_K):
        return {"tile": (256, 128), "epi_tile_n": 64, "cluster": (1, 2)}
    if depth > SHORT_K or not (one_staged or (traits.width < 1 and len(traits.staged_bits) == 2)):
        return {}
    pingpong_choice: dict[str, Any] = {"tile": (128, 128), "epi_tile_n": 64, "pingpong": True}
    if one_staged and (varlen_k or traits.width < 1):
        fits = 20 * padded_columns(problem.n, 192) <= 21 * padded_columns(problem.n, 256)
        return {**pingpong_choice, "tile": (128, 192)} if fits and not problem.concat_glu else {}
    if one_staged and depth <= SHORTEST_K and two_tiles_fit(problem.n, 192):
        return {**pingpong_choice, "tile": (128, 192), "cluster": (1, 2)}
    return (
        {**pingpong_choice, "cluster": (1, 2), "swizzle_size": swizzle_size(problem)}
        if two_tiles_fit(problem.n, 128)
        else pingpong_choice
    )


def configure_gemm(problem: GemmProblem) -> GemmConfiguration:
    """The fastest of the configurations measured on an H200, by dtype, width and the tensors that the epilogue stages.

    16 bits: two warpgroups share 128 x 256. If tiles of 192 columns waste little and the epilogue stages one tensor,
    ping-pong with 128 x 192, which is 2 to 5 per cent faster; quantizers and rotations would lack registers then.
    Rotations use ping-pong with 128 x 128, 3 to 10 per cent faster than a shared tile, since the loads of the angles
    overlap. Grouped GEMMs differ, see :func:`for_experts`; with quantizers to 8 bits and short k, ping-pong with 128 x
    128. 8 bits: the partial accumulators leave registers for 192 columns, or for 128 if the epilogue does not support
    192. With fp32 scale factors, half of 256 columns are promoted at a time: the same number of registers, whole blocks
    of B, and fewer idle SMs at 4096 columns; two stages for results of up to 16 bits are 1 to 8 per cent faster than
    one. Weight gradients of them have a factor for each column: in 256 x 128, a warpgroup reads each factor once for
    both halves of its rows, 3 per cent faster with bfloat16 results. If subtiles have 128 columns, a tile has no more,
    or registers would be spilled; if the subtile width does not divide 128, the largest multiple up to 256. Clusters of
    two CTAs share B or, in the tail row of a group with an odd number of rows of tiles, A (``split_tail_n``): 1.11
    times as fast with rows distributed by Zipf's law.

    An epilogue that widens its value has registers for 128 x 128 only, in subtiles of 32 columns: ping-pong if the
    staged tensors leave room for the operands, else one shared tile. For grouped GEMMs, the CTAs of a cluster share A
    then, so that less of a group's tail is wasted. So do GEMMs of many experts with fp32 scale factors, 4 per cent
    faster. The CTAs of a cluster load equal slices of concatenated halves of B, which tiles of 192 columns do not
    allow. A quantizer of 128 columns behind a gate uses tiles of 256 columns, in one subtile for grouped GEMMs if few
    bits are staged: the gate is computed once then.

    Gathered rows use the dynamic scheduler: with a static schedule some clusters fall behind, and the rows and weights
    of more experts are in use than fit into L2. So do rows with fp32 scale factors, except for the shortest k.
    """
    bits, traits, scale = problem.a.bits, traits_of(problem.epilogue), problem.a.scale
    epi_tile_n = 64 if traits.accepts(64) else traits.column_multiple
    choice: dict[str, Any] = {"tile": (128, max(128 // epi_tile_n, 1) * epi_tile_n), "epi_tile_n": epi_tile_n}
    tile_n = 192 if (bits == 8) != bool(scale) else 256
    gathered, one_staged = bool(problem.a.index or problem.b.index), len(traits.staged_bits) == 1
    grouped = bits == 16 and problem.schedule.searches
    rotates = bits == 16 and traits.extra_registers and traits.staged_bits == (16,) and traits.width == 1
    if traits.two_pass_multiple:
        one_subtile = problem.schedule.searches and traits.staged_bits_per_column <= ONE_SUBTILE_BITS
        choice = {
            "tile": (128, traits.column_multiple),
            "epi_tile_n": traits.column_multiple if one_subtile else int(64 / traits.width),
        }
    elif traits.width > 1:
        max_bits = PINGPONG_EXPERT_BITS if grouped else PINGPONG_BITS
        pingpong = bits == 16 and traits.staged_bits_per_column <= max_bits and not traits.extra_registers
        choice |= {"epi_tile_n": 32 if traits.accepts(32) else traits.column_multiple, "pingpong": pingpong}
        if grouped and pingpong:
            choice |= (
                {"cluster": (1, 2), "swizzle_size": swizzle_size(problem)}
                if two_tiles_fit(problem.n, 128)
                else {"cluster": (1, 1)}
            )
    elif bits != 8 and not scale and 128 % epi_tile_n and problem.n > 128:
        choice = {"tile": (128, 256 // epi_tile_n * epi_tile_n), "epi_tile_n": epi_tile_n}
    elif rotates and not scale and problem.n > 128:
        choice |= {"pingpong": True}
    elif (
        problem.n > 128
        and epi_tile_n == 64
        and not (problem.concat_glu and tile_n == 192)
        and ((bits != 8 and not scale) or tile_n % traits.column_multiple == 0)
    ):
        quantizes = traits.extra_registers and max(traits.staged_bits, default=0) == 8 and traits.accepts(32)
        if scale and problem.schedule.varlen_k:  # 128 bytes of a row are staged
            tile = (256, 128) if problem.m and two_tiles_fit(problem.m, 256) else (128, tile_n)
            choice = {"tile": tile, "epi_tile_n": 1024 // traits.staged_bits_per_column}
        elif scale:
            choice = {
                "tile": (128, tile_n),
                "epi_tile_n": epi_tile_n,
                "epi_stages": 2 if traits.staged_bits_per_column <= 16 else 1,
            }
        elif bits == 8:
            choice = {"tile": (128, 192), "epi_tile_n": 64, "epi_stages": 3 if one_staged else 1}
        elif grouped and not gathered and quantizes and problem.k <= SHORT_K:
            choice = {"tile": (128, 128), "epi_tile_n": 32, "pingpong": True}
        elif grouped and not traits.extra_registers and (special := for_experts(problem, traits)):
            choice = special
        elif (
            problem.n >= MANY_COLUMNS
            and one_staged
            and not traits.extra_registers
            and not problem.concat_glu
            and not gathered
        ):
            choice = {"tile": (128, 192), "epi_tile_n": 64, "pingpong": True}
        else:
            choice = {"tile": (128, 256), "epi_tile_n": int(64 / traits.width)}
    by_row = problem.schedule.searches and not problem.schedule.varlen_k
    many_experts = problem.groups > FEW_EXPERTS or gathered
    if scale and many_experts and by_row and two_tiles_fit(problem.n, choice["tile"][1]):
        choice |= {"cluster": (1, 2)}
    dynamic_scheduler = by_row and bool(problem.a.index or (scale and problem.k > SHORTEST_K))
    choice = {"cluster": (2, 1), "dynamic_scheduler": dynamic_scheduler, **choice}
    changes: dict[str, Any] = {"swizzle_size": choice.pop("swizzle_size")} if "swizzle_size" in choice else {}
    schedule = problem.schedule
    if schedule.row_alignment % (2 * choice["tile"][0]) and choice["cluster"] == (2, 1) and not gathered:
        changes["split_tail_n"] = True
    return configured(replace(problem, schedule=replace(schedule, **changes)), **choice)
