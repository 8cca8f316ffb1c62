"""The configuration of Blackwell's GEMM for a problem. Pure functions, no CuTe DSL. None was ever timed."""

from __future__ import annotations

import math

from cudnn_kernels.epilogue import traits_of
from cudnn_kernels.gemm.configuration import GemmConfiguration, configured, prepared_first
from cudnn_kernels.gemm.problem import GemmProblem
from cudnn_kernels.pipeline.shared_memory import SHARED_MEMORY

EPI_TILE_N = 32  # columns of a subtile, at least
ATOM = 128  # columns of a tile are a multiple: whole atoms of SFB
CTA_ROWS = 128  # rows of a CTA's tile
SCALE_BYTES = 6144  # bytes of the scale factors of a stage, at most
OTHER_BYTES = 6144  # bytes of mbarriers and of unstaged shared memory of the epilogue, at most


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The caller's tile and cluster or, by default, pairs of CTAs with 256 x 256, with block scales 256 x 128.

    Two accumulator stages of 256 columns fill tensor memory. Scale factors leave space for one, so MMAs would wait for
    the epilogue. With 128 columns they need not, but A is read twice as often, which clusters of two pairs compensate.
    The columns of a tile are rounded up to the epilogue's multiple and, with scale factors, to whole atoms. An epilogue
    that stages 32 bits twice or more, or whose subtiles have more than 64 columns, gets 128 columns at most: more would
    spill registers. So do block-scaled varlen_k GEMMs, because a box has 128 rows of scale factors, and GEMMs with fp32
    scale factors, whose threads promote a row in registers.

    Each group of a ragged operand has rows of another length, which a single TMA descriptor cannot describe: such
    operands are first copied to bfloat16 with one leading dimension.
    """
    if problem.a.ragged or problem.b.ragged:
        return prepared_first(problem, configure)
    traits, scale = traits_of(problem.epilogue), problem.a.scale
    scaled, scales_accumulator = (
        scale is not None and not scale.scales_accumulator,
        scale is not None and scale.scales_accumulator,
    )
    m, n = problem.tile or (256, 128 if scaled else 256)
    cluster = (m // 128, 2 if scaled and not problem.tile else 1)
    step = math.lcm(ATOM if scaled else EPI_TILE_N, traits.column_multiple)
    limited = (
        traits.staged_bits == (32, 32) or traits.staged_bits_per_column > 96 or (scaled and problem.schedule.varlen_k)
    )
    limited |= scales_accumulator or not traits.accepts(2 * EPI_TILE_N)
    max_n = max(128, traits.two_pass_multiple and traits.column_multiple, step) if limited else 256
    n = min(-(-n // step) * step, max_n // step * step)
    n = max(n, 128) if problem.b.index else n  # each CTA of a pair gathers whole lines of 128 bytes
    n = 256 if problem.concat_glu and (scaled or n == 192) else n  # atoms, or equal slices, of both halves
    n = max(n, m // 2) if problem.concat_glu and problem.b.halves else n  # each CTA of a pair loads blocks of both
    # Two epilogue stages leave space for two operand stages.
    k_tile = (CTA_ROWS + n * CTA_ROWS // m) * 128 + SCALE_BYTES
    fits = 64 * 2 * CTA_ROWS * traits.staged_bits_per_column // 8 + 2 * k_tile + OTHER_BYTES <= SHARED_MEMORY
    # A thread hardly has registers for more than 64 values of a row, before or after the epilogue widens them.
    widths = [width for width in ((64, EPI_TILE_N) if fits else (EPI_TILE_N,)) if width * traits.width <= 64]
    epi_tile_n = next(width for width in (*widths, traits.column_multiple) if n % width == 0 and traits.accepts(width))
    two_stages = n // epi_tile_n > (1 if traits.width <= 1 else 4)  # two stages of wide subtiles would spill registers
    return configured(
        problem, (m, n), problem.cluster or cluster, epi_tile_n=epi_tile_n, epi_stages=2 if two_stages else 1
    )
