"""Configuration and heuristics of the RMSNorm + RHT + amax kernel. Pure functions, no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cudnn_kernels.configuration import SHARED_MEMORY
from cudnn_kernels.signature import Scalar, Slot, Stream, Tensor, vector
from cudnn_kernels.threads import WARP_SIZE

BLOCK = 16  # columns that the Hadamard transform mixes
TEAMS = 4
MOST_AT_ONCE = 128 * 1024  # bytes of two row buffers for each team

# Beyond, a thread could not hold its weights; from 57 K on, two rows fill shared memory.
COLUMNS_OF_ONE_CTA = 40 * 1024
MAXIMUM_COLUMNS = 64 * 1024  # two CTAs with half a row each

_THREADS = {2048: 128, 4096: 256, 7168: 128, 8192: 512, 16384: 1024, 32768: 512}
USUAL_COLUMNS = tuple(_THREADS)


@dataclass(frozen=True)
class RmsNormRhtAmaxConfiguration:
    """What a kernel is compiled for.

    ``threads`` share a row, ``teams`` of that many threads share a CTA, and each team has ``stages`` row
    buffers in shared memory, at least two. With two ``ctas``, each has a team with half of the columns. ``dtype`` is
    that of x, w and o.
    """

    dtype: str
    columns: int
    threads: int
    teams: int
    stages: int
    ctas: int = 1

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel: any number of rows, contiguous, on 16-byte addresses."""
        shape, strides = ("rows", self.columns), (self.columns, 1)
        return (
            Tensor("x", self.dtype, shape, strides),
            Tensor("w", self.dtype, (self.columns,), (1,)),
            Tensor("o", self.dtype, shape, strides),
            vector("amax", "float32", "groups"),
            Scalar("eps", "float32"),
            Stream(),
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory: row buffers, one mbarrier for each, the warps' partial results, alignment."""
        return self.teams * (self.stages * (2 * self.cta_columns + 8) + 8 * self.threads // WARP_SIZE) + 256

    @property
    def cta_columns(self) -> int:
        """Columns of a row per CTA."""
        return self.columns // self.ctas


def best_num_threads(n: int) -> int | None:
    """Threads per row of ``n`` columns, each with a multiple of 8 columns; None if no number suits."""
    if n in _THREADS:
        return _THREADS[n]
    return next((t for t in (1024, 512, 256, 128, 64) if n % t == 0 and n // t >= 8 and n // t % 8 == 0), None)


def pick_rows_per_cta(m: int) -> int:
    """Rows that share one amax: the most of 8, 4 and 2 that divides ``m`` and leaves work for 148 SMs; else 2.

    1 where ``m`` is odd.
    """
    return next((rows for rows in (8, 4, 2) if m % rows == 0 and m // rows >= 148), 1 + (m + 1) % 2)


def configure_rmsnorm_rht_amax(dtype: str, columns: int, threads: int | None = None) -> RmsNormRhtAmaxConfiguration:
    """64 columns per thread, by default, and four teams of two stages each, if they fit.

    Measured on an H200: with the usual 8 rows to an amax, a CTA then starts the copies of its whole group at once,
    which is best. Where rows are too long for that, a third buffer keeps copies in flight while the team works. The
    longest rows are shared by two CTAs, and so are the threads that the caller asks for.
    """
    ctas = 1 if columns <= COLUMNS_OF_ONE_CTA else 2
    cta_columns = columns // ctas
    if threads is None:
        threads = min(512, max(WARP_SIZE, 1 << (cta_columns // 64 - 1).bit_length()))
    else:
        threads = -(-threads // (ctas * WARP_SIZE)) * WARP_SIZE
    teams = max(1, min(TEAMS, 1024 // threads)) if ctas == 1 else 1
    while teams > 1 and teams * 2 * 2 * columns > MOST_AT_ONCE:
        teams //= 2
    two = RmsNormRhtAmaxConfiguration(dtype, columns, threads, teams, stages=2, ctas=ctas)
    three = replace(two, stages=3)
    return three if teams < TEAMS and three.shared_memory <= SHARED_MEMORY else two
