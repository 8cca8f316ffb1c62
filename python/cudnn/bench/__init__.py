"""Benchmarks: each kernel and its peers are timed in the same run, by one protocol.

A GPU under load is limited by its power: its clock falls within a second and varies from minute to minute. The
candidates of a problem are therefore interleaved: each of six rounds runs every candidate for about 40 ms after a
short warm-up. Every second round runs in reverse order, and each pair of rounds starts with another candidate. The
time is the median over the rounds. A ratio is the median of the ratios of the rounds, with minimum and maximum. A
candidate with a wrong result is not timed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cudnn.fused import registry
from cudnn.lazy import torch

BENCHMARKS = (
    *registry.packages(),
    "flash_attn",
    "gated_mlp",
    "grouped_gemm_fp8",
    "host",
    "model",
    "moe",
    "moe_decode",
    "moe_fp8",
    "nsa",
    "sdpa",
)
"""Names of the fused APIs, and of the benchmarks of other layers, of host time and of a model."""

Call = Callable[[], Mapping[str, Any]]
"""Computes once and returns the results by name."""

MISSING = "not installed"
"""Prefix of ``Row.refused`` for a peer that is not installed on this machine."""

CUDNN, OURS_PACKAGE = "cuDNN", "cudnn-fused"
"""Values of ``Candidate.package`` that are not the name of an installed distribution."""


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Without ``shapes`` the benchmark measures its own: ``all`` of them or the first few. ``routing`` is the
    distribution of tokens over experts. ``quick`` takes less time.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()
    all: bool = False
    without_optional: bool = False
    routing: str = "uniform"
    quick: bool = False


@dataclass(frozen=True)
class Benchmark:
    """Problems of one operation. Ratios are relative to the candidates whose names are in ``yardsticks``.

    ``dtypes`` begins with the default. Each of a shape's ``dimensions`` is a multiple of the number. ``quick``: shapes
    of ``--quick``, empty where a shape means nothing.
    """

    title: str
    yardsticks: tuple[str, ...]
    dtypes: tuple[str, ...]
    dimensions: dict[str, int]
    problems: Callable[[Options], list[Problem]]
    optional: str = ""  # name of a result that the API can omit
    routings: tuple[str, ...] = ("uniform",)
    quick: tuple[tuple[int, ...], ...] = ()

    def shapes(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Parses a list of shapes such as ``4096x4096x4096,8192x8192x8192``.

        Raises:
            ValueError: this benchmark does not support a shape.
        """
        shapes = []
        for shape in text.split(","):
            sizes = tuple(int(size) if size.isdecimal() else 0 for size in shape.strip().split("x"))
            multiples = self.dimensions.values()
            if len(sizes) != len(multiples) or any(
                size < 1 or size % multiple for size, multiple in zip(sizes, multiples, strict=True)
            ):
                needs = "".join(f", {name} a multiple of {n}" for name, n in self.dimensions.items() if n > 1)
                raise ValueError(f"got {shape.strip()!r}; allowed: {'x'.join(self.dimensions)}{needs}.")
            shapes.append(sizes)
        return tuple(shapes)


def find(name: str) -> Benchmark:
    """Returns the benchmark with a name in ``BENCHMARKS``; that of a fused API is built from its declaration."""
    from cudnn.bench import (
        attention,
        dense_gemm,
        flash_attn,
        gated_mlp,
        grouped,
        grouped_fp8,
        host,
        memory_bound,
        model,
        moe,
        moe_decode,
        moe_fp8,
        nsa,
    )
    from cudnn.fused.dense import DenseGemm
    from cudnn.fused.grouped import ExpertsGemm

    for module in (attention, flash_attn, gated_mlp, grouped_fp8, host, model, moe, moe_decode, moe_fp8, nsa):
        if name == module.NAME:
            return module.benchmark()
    api: Any = registry.find(name)
    benchmarks = {DenseGemm: dense_gemm.benchmark, ExpertsGemm: grouped.benchmark}
    return next((make for base, make in benchmarks.items() if issubclass(api, base)), memory_bound.benchmark)(api)


@dataclass(frozen=True)
class Candidate:
    """One implementation of a problem.

    ``prepare`` allocates and compiles. ``check`` returns what is wrong with the results of the first call, or ``""``.
    ``package`` is the distribution that a peer's version is read from.
    """

    name: str
    prepare: Callable[[], Call]
    check: Callable[[Mapping[str, Any]], str] = lambda results: ""
    ours: bool = False
    package: str = "torch"


def returning(run: Callable[[], Any], results: Mapping[str, Any]) -> Call:
    """A call that runs a function, which writes ``results``, and returns them."""
    return lambda: (run(), results)[1]


def off_by_norm(expected: Mapping[str, Any], results: Mapping[str, Any], tolerance: float) -> str:
    """Checks results: returns a message for the first whose relative L2 error exceeds ``tolerance``, else ``""``."""
    for name, expected_value in expected.items():
        result, expected_value = results[name].detach().float(), expected_value.detach().float()
        error = float((result - expected_value).norm() / expected_value.norm().clamp(min=1e-9))
        if not error <= tolerance:
            return f"wrong result: {name} is off by {error:.2e} of its norm, at most {tolerance} is right"
    return ""


class Reading(NamedTuple):
    """The state of the GPU: SM clock, power, temperature."""

    megahertz: float
    watts: float
    celsius: float


class Ratio(NamedTuple):
    """A yardstick's time divided by this candidate's, higher is better: median, minimum and maximum of the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A measurement. ``ratios`` follow the order of the benchmark's yardsticks; None if the problem lacks a yardstick.

    ``spread`` is the uncertainty of ``microseconds``. ``flops`` and ``bytes`` are the minimum that the problem needs,
    ``tokens`` what a model reads. ``memory`` is the peak of allocated bytes, without the operands. ``refused`` is the
    reason why a candidate was not timed. ``package`` is that of the candidate.
    """

    problem: str
    name: str
    microseconds: float = float("nan")
    ratios: tuple[Ratio | None, ...] = ()
    flops: float = 0.0
    bytes: float = 0.0
    ours: bool = False
    reading: Reading | None = None
    refused: str = ""
    memory: float = float("nan")
    spread: float = float("nan")
    tokens: float = 0.0
    package: str = "torch"

    @property
    def teraflops(self) -> float:
        """TFLOP/s."""
        return self.flops / self.microseconds * 1e-6

    @property
    def terabytes(self) -> float:
        """TB/s."""
        return self.bytes / self.microseconds * 1e-6

    @property
    def rate(self) -> str:
        """The rate as text; ``""`` for a problem without operations, bytes and tokens."""
        if self.tokens:
            return f"{self.tokens / self.microseconds * 1e3:.0f} k tok/s"
        if self.flops:
            return f"{self.teraflops:.0f} TF"
        return f"{self.terabytes:.2f} TB/s" if self.bytes else ""


@dataclass(frozen=True)
class Clock:
    """How a call is timed.

    ``seconds(call, calls)`` times a burst of calls. ``burst`` is the length of a burst and ``warm`` that of the warm-up
    before it, in seconds. ``summary`` reduces the times of the rounds to one, ``spread`` to its uncertainty.
    """

    seconds: Callable[[Callable[[], Any], int], float]
    rounds: int
    burst: float
    warm: float
    summary: Callable[[Sequence[float]], float]
    spread: Callable[[Sequence[float]], float] = lambda times: (max(times) - min(times)) / 2

    def calls(self, seconds_per_call: float, target_seconds: float) -> int:
        """The number of calls that take about ``target_seconds``."""
        return max(1, round(target_seconds / seconds_per_call))


def gpu_seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds that the GPU takes for a burst."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def host_seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds that the host takes to submit a burst to an idle GPU: the median call's, times the number of calls.

    The first call after a synchronization, those that other processes interrupt, and Python's garbage collections
    take several times as long.
    """
    torch.cuda.synchronize()
    times = [time.perf_counter()]
    for _ in range(calls):
        call()
        times.append(time.perf_counter())
    torch.cuda.synchronize()
    return calls * statistics.median(end - start for start, end in itertools.pairwise(times))


GPU = Clock(gpu_seconds, rounds=6, burst=40e-3, warm=10e-3, summary=statistics.median)
QUICK = replace(GPU, rounds=4, burst=20e-3)
HOST = Clock(
    host_seconds,
    rounds=40,
    burst=4e-3,
    warm=0.4e-3,
    summary=min,
    spread=lambda times: statistics.median(times) - min(times),
)
"""The minimum over 40 bursts, in each of which the median call counts; the spread is the median burst less the minimum.

A burst has about 700 calls of ``torch.add``, fewer than what a stream queues, and 5 or more of what takes 0.8 ms.
"""


@dataclass(frozen=True)
class Problem:
    """One problem size. ``candidates`` allocates the operands, so that memory is freed between problems.

    ``memory``: whether peak memory is measured.
    """

    label: str
    candidates: Callable[[], list[Candidate]]
    flops: float = 0.0
    bytes: float = 0.0
    clock: Clock = GPU
    memory: bool = False
    tokens: float = 0.0


def order(count: int, round_index: int) -> list[int]:
    """The order of ``count`` candidates in a round.

    Rounds come in pairs: the second runs in reverse order, and each pair starts with another candidate. All candidates
    have the same mean position in a pair, which cancels a steady drift of the clock.
    """
    candidate_indices = [(round_index // 2 + i) % count for i in range(count)]
    return candidate_indices[::-1] if round_index % 2 else candidate_indices


class TimingError(Exception):
    """A call failed while it was timed. The argument is its index, the cause is the exception that it raised."""


def compare(
    calls: Sequence[Callable[[], Any]], clock: Clock, step: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Seconds of one call, for each call and each round. Calls ``step`` after each round.

    Raises:
        TimingError: a call failed.
    """

    def seconds(index: int, count: int) -> float:
        try:
            return clock.seconds(calls[index], count)
        except Exception as error:  # a peer can raise anything
            raise TimingError(index) from error

    estimates = [min(seconds(index, 3) for _ in range(2)) / 3 for index in range(len(calls))]
    times: list[list[float]] = [[] for _ in calls]
    for round_index in range(clock.rounds):
        for index in order(len(calls), round_index):
            seconds(index, clock.calls(estimates[index], clock.warm))
            burst = clock.calls(estimates[index], clock.burst)
            times[index].append(seconds(index, burst) / burst)
        step()
    return times


def ratio(yardstick: Sequence[float], times: Sequence[float]) -> Ratio:
    """The ratio of two candidates' times in the same rounds."""
    ratios = [theirs / own_times for theirs, own_times in zip(yardstick, times, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def measure(
    problem: Problem,
    yardsticks: Sequence[str],
    read: Callable[[], Reading | None] = lambda: None,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Row]:
    """Checks and times the candidates of a problem. The row of a candidate that fails has the error; the rest is timed.

    ``read`` returns the GPU's state since its last call. ``progress`` receives the completed fraction of the work.
    """
    blank = Row(problem.label, "", flops=problem.flops, bytes=problem.bytes, tokens=problem.tokens)
    try:
        candidates = problem.candidates()
    except Exception as error:  # for example out of memory: the other problems are still measured
        return [replace(blank, name="operands", refused=describe_error(error))]
    rows: list[Row] = []
    calls: dict[int, Call] = {}
    times: dict[int, list[float]] = {}
    rounds = problem.clock.rounds
    for i, candidate in enumerate(candidates):
        refused, memory = "", float("nan")
        try:
            before = torch.cuda.memory_allocated()
            call = candidate.prepare()
            refused = candidate.check(call())
            if not refused:
                calls[i] = call
                memory = _peak(call) - before if problem.memory else memory
        except Exception as error:  # a peer can raise anything: the other candidates are still measured
            refused = describe_error(error)
            calls.pop(i, None)
        package = OURS_PACKAGE if candidate.ours else candidate.package
        rows.append(
            replace(blank, name=candidate.name, ours=candidate.ours, refused=refused, memory=memory, package=package)
        )
        progress((i + 1) / len(candidates) / 2)
    read()
    measured: list[list[float]] | None = None
    while measured is None:
        fractions = (0.5 + completed / rounds / 2 for completed in range(1, rounds + 1))
        try:
            measured = compare(list(calls.values()), problem.clock, lambda left=fractions: progress(next(left)))
        except TimingError as error:
            failed = list(calls)[error.args[0]]
            rows[failed] = replace(rows[failed], refused=describe_error(error.__cause__))
            del calls[failed]
    reading = read()
    times |= dict(zip(calls, measured, strict=True))
    times_of = {candidates[i].name: own_times for i, own_times in times.items()}
    for i, own_times in times.items():
        ratios = tuple(ratio(times_of[name], own_times) if name in times_of else None for name in yardsticks)
        typical, spread = (reduced(own_times) * 1e6 for reduced in (problem.clock.summary, problem.clock.spread))
        sampled = reading if i in calls else None
        rows[i] = replace(rows[i], microseconds=typical, spread=spread, ratios=ratios, reading=sampled)
    return rows


def describe_error(error: BaseException | None) -> str:
    """An exception as a text for ``Row.refused``."""
    reason = MISSING if isinstance(error, ModuleNotFoundError) else type(error).__name__
    return f"{reason}: {str(error).strip()}"


def _peak(call: Call) -> float:
    """Peak of allocated bytes during a call."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    call()
    return float(torch.cuda.max_memory_allocated())
