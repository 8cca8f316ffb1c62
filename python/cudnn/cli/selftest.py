"""``cudnn selftest``: runs the fused GEMMs on a GPU or in the emulator and compares them with their references.

On a GPU they run in child processes, which are restarted after a fault or a hang.
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
from cudnn.demo_cases.gemm_variants import Variant, sample, variants
from cudnn.lazy import torch

SAMPLE_SIZE = 60  # variants that run without --full
PROCESSES = 8  # maximum number that share a GPU
TIMEOUT = 180.0  # seconds for a variant on a GPU, including compilation and process start
_SHOWN = 40  # failures that are printed; the JSON has all
_PACKAGES = ("cudnn-fused", "torch", "nvidia-cutlass-dsl", "numpy", "cuda-bindings")

AnyVariant = Variant | grouped.Variant
AGREES, FAILED = "agrees", "failed"


@dataclass(frozen=True)
class Finding:
    """The verdict on a variant; ``detail`` describes a failure."""

    group: str
    name: str
    verdict: str
    detail: str = ""


def run(arch: str, emulate: bool, full: bool, json_file: str = "") -> int:
    """Runs the variants, prints the report and optionally writes it as JSON. Returns 1 after a failure, else 0."""
    console = Console(highlight=False)
    selected = [*(variants(arch) if full else sample(arch, SAMPLE_SIZE)), *grouped.variants(full)]
    findings = list[Finding]()
    with progress.shown("fused GEMMs", len(selected)) as steps:
        for finding in _emulated(selected, arch, steps) if emulate else _on_gpu(selected):
            findings.append(finding)
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
    """Runs a variant on ``device`` and compares the results with its reference."""
    torch.manual_seed(0)
    problem = variant.make(device) if isinstance(variant, grouped.Variant) else make(variant, device)
    wrong = [comparison for comparison in problem.compare(problem.call()) if not comparison.passed]
    detail = "; ".join(
        f"{comparison.name}: error {comparison.error:.2e}, allowed {comparison.allowed:.2e}" for comparison in wrong
    )
    return Finding(variant.api, str(variant), FAILED if wrong else AGREES, detail)


def _failure(variant: AnyVariant, why: str) -> Finding:
    return Finding(variant.api, str(variant), FAILED, why)


def _emulated(variants_: Sequence[AnyVariant], arch: str, steps: progress.Steps) -> Iterator[Finding]:
    for variant in variants_:
        steps.doing = str(variant)
        try:
            with cudnn.emulation(arch, races=True):
                finding = try_variant(variant, "cpu")
        except Exception as error:  # any error is a finding
            finding = _failure(variant, f"{type(error).__name__}: {error}")
        yield finding


class _Child:
    """A process that runs variants on the GPU, one after the other, until an error may have corrupted its context."""

    def __init__(self) -> None:
        processes = multiprocessing.get_context("spawn")
        self._pipe, child_end = processes.Pipe()
        self._process = processes.Process(target=_serve, args=(child_end,), daemon=True)
        self._process.start()
        child_end.close()

    def attempt(self, variant: AnyVariant) -> tuple[Finding, bool]:
        """Runs a variant; returns its finding, and whether the process is still usable."""
        try:
            self._pipe.send(variant)
            return (
                self._pipe.recv()
                if self._pipe.poll(TIMEOUT)
                else (_failure(variant, f"no end in {TIMEOUT:g} s"), False)
            )
        except (EOFError, OSError):
            return _failure(variant, "the process ended"), False

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _on_gpu(variants_: Sequence[AnyVariant]) -> Iterator[Finding]:
    """Findings in order. Several processes share the GPU, because compilation takes most of the time."""
    local, children = threading.local(), list[_Child]()

    def attempt(variant: AnyVariant) -> Finding:
        if getattr(local, "child", None) is None:
            local.child = _Child()
            children.append(local.child)
        finding, alive = local.child.attempt(variant)
        if not alive:
            local.child.end()
            local.child = None
        return finding

    with ThreadPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as threads:
        try:
            yield from threads.map(attempt, variants_)
        finally:
            for child in children:
                child.end()


def _serve(pipe: Any) -> None:
    """Main loop of the child: for each variant sends a finding, and whether the process is still usable."""
    while True:
        variant = pipe.recv()
        try:
            finding, alive = try_variant(variant, "cuda"), True
        except Exception as error:  # any error is a finding
            finding, alive = _failure(variant, f"{type(error).__name__}: {error}"), False
        pipe.send((finding, alive))
        if not alive:
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
        counts = (verdicts.total(), *(verdicts[verdict] for verdict in (AGREES, FAILED)))
        table.add_row(group, *(str(count or "") for count in counts))
    console.print(table)
    failures = [finding for finding in findings if finding.verdict == FAILED]
    for failure in failures[:_SHOWN]:
        first = next(iter(failure.detail.splitlines()), "")
        console.print(f"{failure.group}, {failure.name}: {first}", markup=False, soft_wrap=True)
    if len(failures) > _SHOWN:
        console.print(f"and {len(failures) - _SHOWN} more")
    console.print(f"{len(failures)} of {len(findings)} failed.")
