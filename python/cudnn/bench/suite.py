"""All benchmarks in one command: each runs in a separate process with a time limit and writes its result file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

GRACE = 45.0  # seconds after its limit at which a process is killed: the problem that it began may still end
QUICK_LIMIT = 480.0  # seconds of ``--quick``
LEAST = 15.0  # seconds: no benchmark starts with less


@dataclass(frozen=True)
class Family:
    """A benchmark and a type of operands. With ``--quick`` it starts no problem after ``seconds``."""

    name: str
    seconds: float
    dtype: str = ""

    @property
    def key(self) -> str:
        """The name of its result file, without the suffix."""
        return f"{self.name}_{self.dtype}" if self.dtype else self.name


FAMILIES = (
    Family("model", 50),
    Family("moe", 90),
    Family("sdpa", 40),
    Family("flash_attn", 55),
    Family("gemm_swiglu", 45),
    Family("grouped_gemm", 40),
    Family("host", 60),
    Family("moe_decode", 40),
    Family("nsa", 60),
    Family("moe_fp8", 75),
    Family("gated_mlp", 40),
    Family("grouped_gemm_fp8", 60),
    Family("gemm_swiglu", 25, "fp8_128"),
    Family("rmsnorm_rht_amax", 15),
    Family("gemm_swiglu", 20, "fp8"),
    Family("grouped_gemm_glu", 25),
    Family("grouped_gemm_wgrad", 25),
    Family("grouped_gemm_dglu", 30),
    Family("gemm_geglu", 20),
    Family("gemm_dswiglu", 20),
    Family("gemm_rope", 20),
    Family("gemm_srelu", 20),
    Family("gemm_dsrelu", 20),
    Family("gemm_amax", 20),
)
"""In order of priority: with a limit, the last ones do not run."""


@dataclass(frozen=True)
class Outcome:
    """How a benchmark ended: ``problem`` is ``""`` if it measured everything."""

    family: Family
    seconds: float
    problem: str


def chosen(keys: Sequence[str]) -> list[Family]:
    """The families with these keys; all of them without keys.

    Raises:
        ValueError: a key is unknown.
    """
    unknown = set(keys) - {family.key for family in FAMILIES}
    if unknown:
        allowed = ", ".join(family.key for family in FAMILIES)
        raise ValueError(f"got {', '.join(sorted(unknown))}; allowed: {allowed}.")
    return [family for family in FAMILIES if not keys or family.key in keys]


def command(family: Family, folder: Path, commit: str, quick: bool, limit: float | None) -> list[str]:
    """The command of one benchmark."""
    arguments = [sys.executable, "-m", "cudnn", "bench", family.name, "--save", str(folder), "--commit", commit]
    arguments += ["--dtype", family.dtype] * bool(family.dtype) + ["--quick"] * quick
    return arguments + ([] if limit is None else ["--limit", f"{limit:.0f}"])


def run(
    families: Sequence[Family], folder: Path, commit: str, quick: bool, limit: float | None = None
) -> Iterator[Outcome]:
    """Runs the benchmarks one after the other. None starts after ``limit`` seconds."""
    start = time.monotonic()
    for family in families:
        left = float("inf") if limit is None else limit - (time.monotonic() - start)
        if left < LEAST:
            yield Outcome(family, 0.0, f"not started: --limit {limit:.0f} is used up")
            continue
        seconds = min(family.seconds if quick else float("inf"), left)
        has_limit = seconds < float("inf")
        began = time.monotonic()
        arguments = command(family, folder, commit, quick, seconds if has_limit else None)
        problem = _end(arguments, min(seconds + GRACE, left + LEAST) if has_limit else None)
        yield Outcome(family, time.monotonic() - began, problem)


def _end(arguments: Sequence[str], timeout: float | None) -> str:
    """Runs a process and returns what went wrong, or ``""``. SIGTERM, as of ``timeout`` or a scheduler, ends both."""
    process: subprocess.Popen[bytes] | None = None
    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if process is not None:  # else Popen would lose its child
            raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        process = subprocess.Popen(arguments, start_new_session=True)  # its compilers end with it
        if received:
            raise SystemExit(128 + received[0])
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return "killed: it did not end in time"
    finally:
        signal.signal(signal.SIGTERM, before)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"exit code {code}: see above" if code else ""
