"""Benchmarks: each kernel beside its peers in the same run, by one protocol.

A GPU under load is limited by its power: its clock falls within a second, and differs from minute to minute. So the
candidates of a problem take turns: in each of six rounds every one runs for some 40 ms after a short warm-up; every
second round goes backwards, every third one begins with another. The time is the median of the rounds, a ratio the
median of the rounds' own ratios, with the least and the greatest. Whatever gives a wrong result is not timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from cudnn.fused import registry
from cudnn.lazy import torch

BENCHMARKS = (*registry.packages(), "moe", "nsa", "sdpa")
"""Names of the fused APIs, of a whole layer of experts, of native sparse attention, and of attention."""

Call = Callable[[], Mapping[str, Any]]
"""Computes once and gives its results, by name."""

MISSING = "not installed"
"""How the reason begins why a peer was not run that this machine does not have."""


@dataclass(frozen=True)
class Options:
    """What the user asked for. Without ``shapes``: the benchmark's own, ``all`` of them or the first few. ``routing``:
    how tokens are spread over experts, where there are such. ``sonicmoe``: the folder of SonicMoE, a peer. ``quick``:
    in less time.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...] = ()
    all: bool = False
    without_optional: bool = False
    routing: str = "uniform"
    sonicmoe: Path | None = None
    quick: bool = False


@dataclass(frozen=True)
class Benchmark:
    """Problems of one kind. The others are compared with the candidates whose names are in ``yardsticks``.

    ``dtypes`` begins with the default. A shape has ``dimensions``, each a multiple of the number. ``quick``: the shapes
    that are measured when there is little time. ``outside``: a peer that is a program of its own.
    """

    title: str
    yardsticks: tuple[str, ...]
    dtypes: tuple[str, ...]
    dimensions: dict[str, int]
    problems: Callable[[Options], list[Problem]]
    optional: str = ""  # a result that may be left out
    routings: tuple[str, ...] = ("uniform",)
    quick: tuple[tuple[int, ...], ...] = ()
    outside: str = ""

    def shapes(self, text: str) -> tuple[tuple[int, ...], ...]:
        """Those of a list such as ``4096x4096x4096,8192x8192x8192``.

        Raises:
            ValueError: one that this benchmark cannot have.
        """
        shapes = []
        for part in text.split(","):
            sizes = tuple(int(size) if size.isdecimal() else 0 for size in part.strip().split("x"))
            multiples = self.dimensions.values()
            if len(sizes) != len(multiples) or any(
                size < 1 or size % multiple for size, multiple in zip(sizes, multiples, strict=True)
            ):
                needs = "".join(f", {name} a multiple of {n}" for name, n in self.dimensions.items() if n > 1)
                raise ValueError(f"got {part.strip()!r}; allowed: {'x'.join(self.dimensions)}{needs}.")
            shapes.append(sizes)
        return tuple(shapes)


def find(name: str) -> Benchmark:
    """The benchmark of a name in ``BENCHMARKS``, from the API's declaration."""
    from cudnn.bench import attention, declared, grouped, moe, nsa, whole
    from cudnn.fused.dense import DenseGemm
    from cudnn.fused.grouped import ExpertsGemm

    for module in (moe, nsa, attention):
        if name == module.NAME:
            return module.benchmark()
    api: Any = registry.find(name)
    kinds = {DenseGemm: declared.benchmark, ExpertsGemm: grouped.benchmark}
    return next((made for kind, made in kinds.items() if issubclass(api, kind)), whole.benchmark)(api)


@dataclass(frozen=True)
class Candidate:
    """One way to compute a problem.

    ``prepare`` allocates and compiles. ``check`` says what is wrong with the results of the first call, or nothing. A
    program of its own says by ``outside`` what it has measured: seconds, and bytes at its peak.
    """

    name: str
    prepare: Callable[[], Call] | None = None
    check: Callable[[Mapping[str, Any]], str] = lambda results: ""
    ours: bool = False
    outside: Callable[[], tuple[float, float]] | None = None


def returning(run: Callable[[], Any], results: Mapping[str, Any]) -> Call:
    """A call that writes results, and gives them."""
    return lambda: (run(), results)[1]


def off_by_norm(expected: Mapping[str, Any], results: Mapping[str, Any], slack: float) -> str:
    """What is wrong with results: which is off by more than a share of its norm."""
    for name, want in expected.items():
        found, want = results[name].detach().float(), want.detach().float()
        error = float((found - want).norm() / want.norm().clamp(min=1e-9))
        if not error <= slack:
            return f"wrong result: {name} is off by {error:.2e} of its norm, at most {slack} is right"
    return ""


class Reading(NamedTuple):
    """The state of the GPU: SM clock, power, temperature."""

    megahertz: float
    watts: float
    celsius: float


class Ratio(NamedTuple):
    """A yardstick's time divided by this time, more is better: median, least and greatest of the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """A measurement; ``ratios`` in the order of the benchmark's yardsticks, None where a problem has no such one.

    ``flops`` and ``bytes`` are what the problem needs at least. ``memory``: bytes allocated at the peak, beside the
    operands. A ``refused`` candidate was not timed, and this is why.
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
        """In words, where the problem has one."""
        if self.flops:
            return f"{self.teraflops:.0f} TF"
        return f"{self.terabytes:.2f} TB/s" if self.bytes else ""


@dataclass(frozen=True)
class Clock:
    """How a call is timed: ``seconds(call, calls)`` of a burst; ``burst`` and ``warm``, before it, in seconds."""

    seconds: Callable[[Callable[[], Any], int], float]
    rounds: int
    burst: float
    warm: float
    summary: Callable[[Sequence[float]], float]

    def calls(self, each: float, wanted: float) -> int:
        """Calls that take about the wanted time."""
        return max(1, round(wanted / each))


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
    """Seconds that the host takes to hand a burst over to an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


GPU = Clock(gpu_seconds, rounds=6, burst=40e-3, warm=10e-3, summary=statistics.median)
QUICK = replace(GPU, rounds=4, burst=20e-3)
HOST = Clock(host_seconds, rounds=40, burst=1e-3, warm=0.2e-3, summary=min)
"""The least of 40 bursts of some 200 calls."""


@dataclass(frozen=True)
class Problem:
    """``candidates`` allocates the operands, so that one problem's memory is free before the next one's is taken.

    ``memory``: whether the peak of memory is measured.
    """

    label: str
    candidates: Callable[[], list[Candidate]]
    flops: float = 0.0
    bytes: float = 0.0
    clock: Clock = GPU
    memory: bool = False


def order(count: int, turn: int) -> list[int]:
    """Who runs when in a round: each pair of rounds goes there and back, from another one's turn on.

    In a pair all are as early on average, which takes a steady drift out.
    """
    places = [(turn // 2 + i) % count for i in range(count)]
    return places[::-1] if turn % 2 else places


class TimingError(Exception):
    """A call failed while it was timed: its index. The cause is what it raised."""


def compare(
    calls: Sequence[Callable[[], Any]], clock: Clock, step: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Seconds of one call, for each call and each round; ``step`` is called after each round.

    Raises:
        TimingError: a call failed.
    """

    def seconds(i: int, count: int) -> float:
        try:
            return clock.seconds(calls[i], count)
        except Exception as error:  # whatever a peer may raise
            raise TimingError(i) from error

    estimates = [min(seconds(i, 3) for _ in range(2)) / 3 for i in range(len(calls))]
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(clock.rounds):
        for i in order(len(calls), turn):
            seconds(i, clock.calls(estimates[i], clock.warm))
            burst = clock.calls(estimates[i], clock.burst)
            times[i].append(seconds(i, burst) / burst)
        step()
    return times


def ratio(yardstick: Sequence[float], times: Sequence[float]) -> Ratio:
    """From the times of both in the same rounds."""
    ratios = [theirs / mine for theirs, mine in zip(yardstick, times, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


def measure(
    problem: Problem,
    yardsticks: Sequence[str],
    read: Callable[[], Reading | None] = lambda: None,
    progress: Callable[[float], None] = lambda done: None,
) -> list[Row]:
    """Checks and times the candidates of a problem. One that fails is named with what it raised; others are measured.

    ``read`` gives the GPU's state since it was last called, ``progress`` hears which part of the work is done.
    """
    blank = Row(problem.label, "", flops=problem.flops, bytes=problem.bytes)
    try:
        candidates = problem.candidates()
    except Exception as error:  # such as too little memory: the other problems are still measured
        return [replace(blank, name="operands", refused=_said(error))]
    rows: list[Row] = []
    calls: dict[int, Call] = {}
    times: dict[int, list[float]] = {}
    rounds = problem.clock.rounds
    for i, candidate in enumerate(candidates):
        refused, memory = "", float("nan")
        try:
            if candidate.prepare is not None:
                before = torch.cuda.memory_allocated()
                call = candidate.prepare()
                refused = candidate.check(call())
                if not refused:
                    calls[i] = call
                    memory = _peak(call) - before if problem.memory else memory
            elif candidate.outside is not None:
                seconds, memory = candidate.outside()
                times[i] = [seconds] * rounds
        except Exception as error:  # whatever a peer may raise: the others are still measured
            refused = _said(error)
            calls.pop(i, None)
        rows.append(replace(blank, name=candidate.name, ours=candidate.ours, refused=refused, memory=memory))
        progress((i + 1) / len(candidates) / 2)
    read()
    found: list[list[float]] | None = None
    while found is None:
        turns = (0.5 + turn / rounds / 2 for turn in range(1, rounds + 1))
        try:
            found = compare(list(calls.values()), problem.clock, lambda left=turns: progress(next(left)))
        except TimingError as error:
            failed = list(calls)[error.args[0]]
            rows[failed] = replace(rows[failed], refused=_said(error.__cause__))
            del calls[failed]
    reading = read()
    times |= dict(zip(calls, found, strict=True))
    names = {candidates[i].name: mine for i, mine in times.items()}
    for i, mine in times.items():
        ratios = tuple(ratio(names[name], mine) if name in names else None for name in yardsticks)
        typical = problem.clock.summary(mine) * 1e6
        rows[i] = replace(rows[i], microseconds=typical, ratios=ratios, reading=reading if i in calls else None)
    return rows


def _said(error: BaseException | None) -> str:
    """What was raised, in words."""
    kind = MISSING if isinstance(error, ModuleNotFoundError) else type(error).__name__
    return f"{kind}: {str(error).strip()}"


def _peak(call: Call) -> float:
    """Bytes allocated at the peak of a call."""
    if not torch.cuda.is_available():
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    call()
    return float(torch.cuda.max_memory_allocated())
