"""Result files: one CSV file for each benchmark, from which the documentation generates its tables and plots.

A line has one metric of one candidate on one problem, and the hardware and software of the run.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path

import cudnn
from cudnn.bench import CUDNN, OURS_PACKAGE, Row
from cudnn.lazy import torch

_SHAPE = re.compile(r"\d+(x\d+)+$")


@dataclass(frozen=True)
class Run:
    """Hardware, software, commit and date of a run."""

    hardware: str
    driver: str
    cuda: str
    torch: str
    commit: str
    date: str


@dataclass(frozen=True)
class Result:
    """A line of a result file.

    ``shape`` and ``case`` are the problem: its sizes, and its mask, pass or model. ``peer`` is the candidate and
    ``peer_version`` the version of its package; ``ours`` is 1 for this library and 0 for others. ``metric`` is
    ``time``, ``rate``, ``memory``, ``bytes``, ``loss``, ``difference``, or ``ratio to NAME``: the time of NAME divided
    by the candidate's in the same rounds. ``spread`` is half the range over the rounds, in the unit of ``value``.
    """

    hardware: str
    driver: str
    cuda: str
    torch: str
    commit: str
    date: str
    family: str
    dtype: str
    shape: str
    case: str
    peer: str
    peer_version: str
    ours: int
    metric: str
    value: float
    unit: str
    spread: float


COLUMNS = tuple(field.name for field in fields(Result))


def this_run(driver: str, commit: str) -> Run:
    """The run of this process, today."""
    return Run(
        torch.cuda.get_device_name(),
        driver,
        torch.version.cuda or "",
        torch.__version__,
        commit,
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def source_commit() -> str:
    """The commit of the source tree that the package runs from, with ``+`` if its code has changed since.

    ``""`` outside of a git clone.
    """
    root = Path(cudnn.__file__).parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root.resolve():
            return ""
        changed = git("status", "--porcelain", "--", "python", "kernels")
        return git("rev-parse", "--short=8", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def path_of(folder: Path, name: str, dtype: str = "") -> Path:
    """The result file of a benchmark, and of a type of operands other than its default."""
    return folder / f"{name}_{dtype}.csv" if dtype else folder / f"{name}.csv"


def version_of(package: str) -> str:
    """The installed version of a candidate's package; ``""`` if it has no version."""
    if package == OURS_PACKAGE:
        return cudnn.__version__
    if package == CUDNN:
        return cudnn.backend_version_string()
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def problem_of(label: str) -> tuple[str, str]:
    """Shape and case of a problem's label: ``"4096x4096x4096 Qwen3, forward"`` has the case ``"Qwen3, forward"``."""
    shape, _, case = label.partition(" ")
    shape = shape.rstrip(",")
    return (shape, case) if _SHAPE.match(shape) else ("", label)


def results(run: Run, family: str, dtype: str, yardsticks: Sequence[str], rows: Sequence[Row]) -> Iterator[Result]:
    """The lines of the candidates that were timed."""
    for row in rows:
        if row.refused:
            continue
        shape, case = problem_of(row.problem)
        candidate = {"peer": row.name, "peer_version": version_of(row.package), "ours": int(row.ours)}
        problem = {"family": family, "dtype": dtype, "shape": shape, "case": case}
        for metric, value, unit, spread in metrics(row, yardsticks):
            figures = {"metric": metric, "value": significant(value), "unit": unit, "spread": significant(spread)}
            yield Result(**asdict(run), **problem, **candidate, **figures)


def metrics(row: Row, yardsticks: Sequence[str]) -> Iterator[tuple[str, float, str, float]]:
    """Metric, value, unit and spread."""
    yield "time", row.microseconds, "us", row.spread
    relative = row.spread / row.microseconds
    rate = (row.tokens / row.microseconds * 1e6, "tokens/s") if row.tokens else (row.teraflops, "TFLOP/s")
    rate = rate if row.tokens or row.flops else (row.terabytes, "TB/s")
    if rate[0]:
        yield "rate", rate[0], rate[1], rate[0] * relative
    if row.memory == row.memory:
        yield "memory", row.memory * 1e-9, "GB", 0.0
    for name, ratio in zip(yardsticks, row.ratios, strict=False):
        if ratio is not None and name != row.name:
            yield f"ratio to {name}", ratio.median, "x", (ratio.high - ratio.low) / 2


def significant(value: float) -> float:
    """The value rounded to four significant digits."""
    return float(f"{value:.4g}")


def write(path: Path, lines: Sequence[Result]) -> None:
    """Replaces a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([_text(value) for value in astuple(line)] for line in lines)


def _text(value: str | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:g}"


def read(path: Path) -> list[Result]:
    """Reads a result file.

    Raises:
        ValueError: the file has other columns.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: got columns {reader.fieldnames}; allowed: {', '.join(COLUMNS)}.")
        numbers = {"ours": int, "value": float, "spread": float}
        return [Result(**{name: numbers.get(name, str)(text) for name, text in line.items()}) for line in reader]
