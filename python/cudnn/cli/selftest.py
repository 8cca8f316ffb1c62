"""``cudnn selftest``: the fused GEMMs on a chip, held against their definitions.

On a GPU they run in child processes, which are replaced after a fault or a hang.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import platform
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import cudnn
from cudnn.cli import progress
from cudnn.cli.info import driver_version
from cudnn.demo_cases import grouped
from cudnn.demo_cases.dense import make
from cudnn.demo_cases.gemm_matrix import Variant, sample, variants
from cudnn.lazy import torch

USUAL = 60  # variants of the matrix that are tried without --full
PROCESSES = 8  # at most, that share a GPU
LIMIT = 180.0  # seconds for one of them on a GPU, its compilation and the start of a process included
_SHOWN = 40  # failures that are printed; the JSON has all
_PACKAGES = ("cudnn-fused", "torch", "nvidia-cutlass-dsl", "numpy", "cuda-bindings")

AnyVariant = Variant | grouped.Variant
AGREES, FAILED = "agrees", "failed"


@dataclass(frozen=True)
class Finding:
    """What became of a variant; ``detail`` says more of a failure."""

    group: str
    name: str
    verdict: str
    detail: str = ""


def run(arch: str, emulate: bool, full: bool, json_file: str = "") -> int:
    """Tries everything, prints the report and writes it as JSON where asked to. The exit code: 1 after a failure."""
    console = Console(highlight=False)
    chosen = [*(variants(arch) if full else sample(arch, USUAL)), *grouped.variants(full)]
    findings = list[Finding]()
    with progress.shown("fused GEMMs", len(chosen)) as steps:
        for found in _emulated(chosen, arch, steps) if emulate else _on_gpu(chosen):
            findings.append(found)
            steps.advance()
    about = {
        "where": f"emulated {arch}" if emulate else torch.cuda.get_device_name(),
        "arch": arch,
        "driver": driver_version(),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        **_versions(),
    }
    _show(console, about, findings)
    if json_file:
        lines = ",\n".join(json.dumps(asdict(finding)) for finding in findings)
        Path(json_file).write_text(f'{{"about": {json.dumps(about)},\n"findings": [\n{lines}\n]}}\n')
    return int(any(finding.verdict == FAILED for finding in findings))


def try_variant(variant: AnyVariant, device: str) -> Finding:
    """Runs a fused GEMM where the caller has chosen and holds it against its definition in float64."""
    torch.manual_seed(0)
    problem = variant.make(device) if isinstance(variant, grouped.Variant) else make(variant, device)
    wrong = [each for each in problem.compare(problem.call()) if not each.passed]
    detail = "; ".join(f"{each.name}: error {each.error:.2e}, allowed {each.allowed:.2e}" for each in wrong)
    return Finding(variant.api, str(variant), FAILED if wrong else AGREES, detail)


def _failure(variant: AnyVariant, why: str) -> Finding:
    return Finding(variant.api, str(variant), FAILED, why)


def _emulated(chosen: Sequence[AnyVariant], arch: str, steps: progress.Steps) -> Iterator[Finding]:
    for variant in chosen:
        steps.doing = str(variant)
        try:
            with cudnn.emulation(arch, races=True):
                found = try_variant(variant, "cpu")
        except Exception as error:  # whatever goes wrong is what the report is for
            found = _failure(variant, f"{type(error).__name__}: {error}")
        yield found


class _Child:
    """A process that tries variants on the GPU, one after the other, until one may have cost it the GPU."""

    def __init__(self) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def attempt(self, variant: AnyVariant) -> tuple[Finding, bool]:
        """What became of a variant, and whether the process goes on."""
        try:
            self._pipe.send(variant)
            return self._pipe.recv() if self._pipe.poll(LIMIT) else (_failure(variant, f"no end in {LIMIT:g} s"), False)
        except (EOFError, OSError):
            return _failure(variant, "the process ended"), False

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _on_gpu(chosen: Sequence[AnyVariant]) -> Iterator[Finding]:
    """Findings in order. Several processes share the GPU, since compilation takes the most time."""
    mine, children = threading.local(), list[_Child]()

    def attempt(variant: AnyVariant) -> Finding:
        if getattr(mine, "child", None) is None:
            mine.child = _Child()
            children.append(mine.child)
        found, sound = mine.child.attempt(variant)
        if not sound:
            mine.child.end()
            mine.child = None
        return found

    with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as threads:
        try:
            yield from threads.map(attempt, chosen)
        finally:
            for child in children:
                child.end()


def _serve(pipe: Any) -> None:
    """The child: answers each variant with a finding, and whether it goes on."""
    while True:
        variant = pipe.recv()
        try:
            found, sound = try_variant(variant, "cuda"), True
        except Exception as error:  # whatever goes wrong is what the report is for
            found, sound = _failure(variant, f"{type(error).__name__}: {error}"), False
        pipe.send((found, sound))
        if not sound:
            return


# The report.


def _versions() -> dict[str, str]:
    installed = {package.metadata["Name"]: package.version for package in importlib.metadata.distributions()}
    return {name: installed.get(name, "not installed") for name in _PACKAGES}


def _show(console: Console, about: dict[str, str], findings: Sequence[Finding]) -> None:
    for name, text in about.items():
        console.print(f"{name:20}{text}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for heading in ("tried", AGREES, FAILED):
        table.add_column(heading, justify="right")
    for group in dict.fromkeys(finding.group for finding in findings):
        verdicts = Counter(finding.verdict for finding in findings if finding.group == group)
        counts = (verdicts.total(), *(verdicts[each] for each in (AGREES, FAILED)))
        table.add_row(group, *(str(count or "") for count in counts))
    console.print(table)
    failures = [finding for finding in findings if finding.verdict == FAILED]
    for failure in failures[:_SHOWN]:
        first = next(iter(failure.detail.splitlines()), "")
        console.print(f"{failure.group}, {failure.name}: {first}", markup=False, soft_wrap=True)
    if len(failures) > _SHOWN:
        console.print(f"and {len(failures) - _SHOWN} more")
    console.print(f"{len(failures)} of {len(findings)} failed.")
