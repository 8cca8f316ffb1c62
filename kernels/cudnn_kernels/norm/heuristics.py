"""Which configuration of a kernel serves a problem: pure functions, no CuTe DSL."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 16  # columns that the Hadamard transform mixes
WARP = 32
SHARED_MEMORY = 227 * 1024  # bytes a CTA may use, on SM90 and SM100 alike
THREADS = 512  # of a CTA: one CTA per SM, whose threads then hold up to 128 registers each
MAXIMUM_STAGES = 8

MAXIMUM_COLUMNS = 40 * 1024  # beyond, a thread could not hold its weights; from 57 K on, two rows fill shared memory

_THREADS = {2048: 128, 4096: 256, 7168: 128, 8192: 512, 16384: 1024, 32768: 512}
USUAL_COLUMNS = tuple(_THREADS)


@dataclass(frozen=True)
class RmsNormRhtAmaxConfiguration:
    """What a kernel is compiled for.

    ``threads`` share a row, ``teams`` of so many threads share a CTA, and each team has ``stages`` row buffers in
    shared memory. ``dtype`` is that of x, w and o.
    """

    dtype: str
    columns: int
    threads: int
    teams: int
    stages: int
    conflict_free: bool = True
    evict_first: bool = False

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory: row buffers, one mbarrier for each, the warps' partial results, alignment."""
        return self.teams * (self.stages * (2 * self.columns + 8) + 12 * self.threads // WARP) + 256


def best_num_threads(n: int) -> int | None:
    """Threads that share a row of ``n`` columns, None where no number suits: 8 columns, or a multiple, for each."""
    if n in _THREADS:
        return _THREADS[n]
    return next((t for t in (1024, 512, 256, 128, 64) if n % t == 0 and n // t >= 8 and n // t % 8 == 0), None)


def pick_rows_per_cta(m: int) -> int:
    """Rows that share one amax: the most of 8, 4 and 2 that divides ``m`` and leaves work for 148 SMs; else 2."""
    return next((rows for rows in (8, 4, 2) if m % rows == 0 and m // rows >= 148), 2)


def team_threads(columns: int) -> int:
    """Threads that share a row where the caller does not say: 32 to 64 columns for each, 32 to 512 threads.

    Measured on an H200: fewer columns leave a row's fixed costs, reductions and barriers, unhidden.
    """
    return min(512, max(WARP, 1 << (columns // 32).bit_length() - 1))


def configure_rmsnorm_rht_amax(dtype: str, columns: int, threads: int | None = None) -> RmsNormRhtAmaxConfiguration:
    """Fills the SM: as many teams as a CTA has room for, as many row buffers as shared memory holds."""
    threads = threads or team_threads(columns)
    teams = max(1, THREADS // threads)
    while True:
        for stages in range(MAXIMUM_STAGES, 2, -1):
            configuration = RmsNormRhtAmaxConfiguration(dtype, columns, threads, teams, stages)
            if configuration.shared_memory <= SHARED_MEMORY:
                return configuration
        if teams == 1:
            return RmsNormRhtAmaxConfiguration(dtype, columns, threads, 1, 2)
        teams //= 2
