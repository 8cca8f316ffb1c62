"""Which configuration of Blackwell's GEMM serves a problem: pure functions, no CuTe DSL. None was ever timed."""

from __future__ import annotations

import math

from cudnn_kernels.configuration import SHARED_MEMORY, GemmConfiguration, configured, prepared_first
from cudnn_kernels.epilogue import traits_of
from cudnn_kernels.problem import GemmProblem

EPI_TILE_N = 32  # columns that pass through the epilogue together, at least
ATOM = 128  # columns of a tile come in whole atoms of B's factors
ROWS = 128  # of a CTA
FACTORS = 6144  # bytes beside a k tile, at most
BESIDE = 6144  # bytes of barriers and of what an epilogue shares but does not stage, at most


def configure(problem: GemmProblem) -> GemmConfiguration:
    """The caller's tile and cluster or, by default, pairs of CTAs with 256 x 256, with block scales 256 x 128.

    Two accumulators of 256 columns fill tensor memory: factors leave room for one, so products would wait for the
    epilogue. With 128 columns they need not, but A is read twice as often, which clusters of two pairs make up for.
    Columns of a tile are rounded up to what the epilogue takes at a time and, where there are factors, to whole atoms.
    An epilogue that stages 32 bits twice, or more, gets 128 at most, as one through which more than 64 pass together:
    more would spill registers. So do block-scaled experts that have parts of k, for one copy brings factors of 128
    rows, and operands with factors of sums, of which a thread adds up a row in registers.

    Each expert's part of a ragged operand has rows of its own length, which no one descriptor of the copy engine knows:
    such operands become bfloat16 first, with the same distance between all rows.
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
    step = math.lcm(ATOM if scaled else EPI_TILE_N, traits.columns)
    narrow = traits.staged_bits == (32, 32) or traits.bits > 96 or (scaled and problem.schedule.varlen_k)
    narrow |= scales_accumulator or not traits.accepts(2 * EPI_TILE_N)
    most = max(128, traits.two_pass_multiple and traits.columns, step) if narrow else 256
    n = min(-(-n // step) * step, most // step * step)
    n = max(n, 128) if problem.b.index else n  # of which each CTA of a pair gathers whole lines of 128 bytes
    n = 256 if problem.concat_glu and (scaled or n == 192) else n  # atoms of both halves; or equal shares of them
    # Two buffers of what is staged leave room for two k tiles.
    k_tile = (ROWS + n * ROWS // m) * 128 + FACTORS
    fits = 64 * 2 * ROWS * traits.bits // 8 + 2 * k_tile + BESIDE <= SHARED_MEMORY
    # Of more than 64 values, before or after the epilogue widens them, a thread's registers hardly hold a row.
    widths = [width for width in ((64, EPI_TILE_N) if fits else (EPI_TILE_N,)) if width * traits.width <= 64]
    epi_tile_n = next(width for width in (*widths, traits.columns) if n % width == 0 and traits.accepts(width))
    several = n // epi_tile_n > (
        1 if traits.width <= 1 else 4
    )  # of four wide parts, two buffers each cost spilled registers
    return configured(
        problem, (m, n), problem.cluster or cluster, epi_tile_n=epi_tile_n, epi_stages=2 if several else 1
    )
