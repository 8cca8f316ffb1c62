"""``cudnn emulate``: runs a fused API or a Python script in the emulator and reports what its kernels did."""

from __future__ import annotations

import json
import linecache
import re
import runpy
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import cudnn
from cudnn import demo_cases
from cudnn.cli import progress
from cudnn.lazy import torch

_BAR, _OPCODES = 12, 34  # characters of the bar of a class with all instructions, and of its opcodes
_SOURCE = re.compile(r"(\S+\.py):(\d+)")

_CLASSES = (
    ("matrix product", r"mma\b|wgmma\.mma|tcgen05\.mma"),
    (
        "synchronization",
        r"(bar|barrier|mbarrier|fence|membar|wgmma|griddepcontrol|clusterlaunchcontrol|setmaxnreg|nanosleep)\b"
        r"|tcgen05\.(commit|wait|fence)|cp\..*(commit_group|wait_)|cp\.async\.mbarrier",
    ),
    ("tensor memory", r"tcgen05"),
    ("asynchronous copy", r"cp\."),
    ("parameter", r"ld\.param"),
    ("local memory", r"(ld|st)\.local"),
    ("shared memory", r"(ld|st|atom|red)\b.*\.shared|(ld|st)matrix"),
    ("global memory", r"(ld|ldu|st|atom|red|prefetch)\b"),
    ("exchange in a warp", r"(shfl|vote|match|redux|elect|activemask)\b"),
    ("control flow", r"(bra|ret|exit|trap)\b"),
    ("comparison, selection", r"(set|setp|selp|slct)\b"),
    ("move, address", r"(mov|cvta|mapa|isspacep|getctarank|tensormap)\b"),
    ("conversion", r"cvt\b"),
    ("floating point", r".*\.(b?f16|f32|f64|tf32)"),
    ("integer, logic", r""),
)
"""Classes of instructions with a pattern for the start of the opcode; the first match counts."""


@dataclass(frozen=True)
class Options:
    """Options of ``cudnn.emulation``. The seed is also PyTorch's."""

    arch: str
    races: bool = True
    scheduler: str = "lowest-pc"
    seed: int = 0
    ignore: tuple[str, ...] = ()
    warn: tuple[str, ...] = ()
    cuda: bool = False
    timeline: tuple[int, int, int] | None = None


@dataclass
class Outcome:
    """Result of a run. ``failure`` is the message of the error that ended it early, else ``""``."""

    report: Any  # ptx_emulator.Report
    comparisons: list[demo_cases.Comparison] = field(default_factory=list)
    failure: str = ""
    seconds: float = 0.0
    exit_code: int = 0
    stopped_by_kernel: bool = False


def run_program(name: str, shape: tuple[int, ...] | None, options: Options, quiet: bool = True) -> Outcome:
    """Runs a fused API of ``demo_cases.PROGRAMS`` on random CPU tensors and compares with its reference."""
    program = demo_cases.find(name)
    torch.manual_seed(options.seed)
    problem_and_results: list[Any] = []  # the problem, then its results

    def execute() -> None:
        problem_and_results.append(program.make(shape or program.shape, "cpu"))
        problem_and_results.append(problem_and_results[0].call())

    def describe(error: Exception) -> str:
        if not isinstance(error, (ValueError, RuntimeError)):  # what check_support() raises
            raise error
        return str(error)

    outcome = _emulate(options, execute, describe, quiet)
    if not outcome.failure:
        outcome.comparisons = problem_and_results[0].compare(problem_and_results[1])
        outcome.exit_code = 0 if all(comparison.passed for comparison in outcome.comparisons) else 1
    return outcome


def run_script(script: Path, arguments: Sequence[str], options: Options, quiet: bool = True) -> Outcome:
    """Runs a Python script as ``python SCRIPT ARGUMENTS`` would, its kernels in the emulator."""
    script = script.resolve()
    saved = sys.argv, sys.path[:]

    def execute() -> None:
        sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent)
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            sys.argv, sys.path[:] = saved

    def describe(error: Exception) -> str:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != str(script):
            trace = trace.tb_next
        return "".join(traceback.format_exception(type(error), error, trace)).rstrip()

    torch.manual_seed(options.seed)
    return _emulate(options, execute, describe, quiet)


def run(
    target: str,
    arguments: Sequence[str],
    options: Options,
    shape: tuple[int, ...] | None = None,
    json_file: str = "",
    ptx: bool = False,
    timeline_file: str = "",
) -> int:
    """Runs a fused API or a script and prints the report; the exit code.

    The report is also written to ``json_file`` as JSON; with ``"-"`` standard output has only the JSON.
    """
    quiet = json_file == "-"
    console = Console(stderr=quiet, highlight=False)
    with redirect_stdout(sys.stderr) if quiet else nullcontext():
        if target in demo_cases.PROGRAMS:
            outcome = run_program(target, shape, options, quiet)
        else:
            outcome = run_script(Path(target), arguments, options, quiet)
    if ptx:
        _show_ptx(console, {launch.kernel for launch in outcome.report.launches})
    _show(console, outcome, options)
    if timeline_file:
        _write_timelines(Path(timeline_file), outcome.report.launches)
    if json_file:
        text = json.dumps({"target": target, **asdict(options), **_as_dict(outcome)}, indent=2)
        if json_file == "-":
            print(text)
        else:
            Path(json_file).write_text(text + "\n")
    return outcome.exit_code


def _write_timelines(file: Path, launches: Sequence[Any]) -> None:
    """One drawing, or one for each launch with its number in the name."""
    for number, launch in enumerate(launches, start=1):
        if launch.timeline is not None:
            name = file if len(launches) == 1 else file.with_stem(f"{file.stem}-{number}")
            name.write_text(launch.timeline.svg())


def instruction_class(text: str) -> str:
    """The class of an instruction; ``text`` is its opcode with modifiers."""
    return next(name for name, pattern in _CLASSES if re.match(pattern, text))


def _emulate(
    options: Options, action: Callable[[], None], describe: Callable[[Exception], str], quiet: bool
) -> Outcome:
    from ptx_emulator import EmulatorError, Fault, Report

    outcome, start = Outcome(Report()), time.perf_counter()

    def refresh(steps: progress.Steps) -> None:
        launches = outcome.report.launches
        if launches:
            steps.doing = f"launch {len(launches)}: {launches[-1].kernel:.40}"

    try:
        with (
            progress.shown("compiling", quiet=quiet, refresh=refresh),
            cudnn.emulation(**asdict(options)) as outcome.report,
        ):
            action()
    except SystemExit as request:
        outcome.exit_code = request.code if isinstance(request.code, int) else int(request.code is not None)
        outcome.failure = request.code if isinstance(request.code, str) else ""
    except EmulatorError as error:
        outcome.exit_code, outcome.failure = 1, f"{type(error).__name__}: {error}"
        outcome.stopped_by_kernel = isinstance(error, Fault)
    except Exception as error:  # the report of the launches before the error is still shown
        outcome.exit_code, outcome.failure = 1, describe(error)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _describe(finding: Any) -> str:
    """A finding, with PTX lines, blocks and threads, and the text of the Python lines that it names."""
    text = str(finding)
    sources = dict.fromkeys(_SOURCE.findall(text))
    lines = [f"  {path}:{number}\n    {linecache.getline(path, int(number)).strip()}" for path, number in sources]
    return "\n".join([text, *lines])


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    comparisons = [{**asdict(comparison), "passed": comparison.passed} for comparison in outcome.comparisons]
    return {
        "seconds": round(outcome.seconds, 3),
        "exit_code": outcome.exit_code,
        "failure": outcome.failure,
        "comparisons": comparisons,
        **outcome.report.as_dict(),
    }


def _show_ptx(console: Console, kernels: set[str]) -> None:
    """Prints the PTX modules of these kernels with the line numbers that faults refer to."""
    from ptx_emulator.runtime.hook import HOOK

    for ptx in dict.fromkeys(runtime.ptx for runtime in HOOK.runtimes if kernels & set(runtime.names)):
        for number, line in enumerate(ptx.splitlines(), start=1):
            console.print(f"{number:5} {line}", markup=False, soft_wrap=True)


def _show(console: Console, outcome: Outcome, options: Options) -> None:
    kernels: dict[tuple[Any, ...], list[Any]] = {}
    for launch in outcome.report.launches:
        kernels.setdefault((launch.kernel, launch.grid, launch.block, launch.cluster), []).append(launch)
    for launches in kernels.values():
        _show_kernel(console, launches)
    if not kernels and not outcome.failure:
        console.print("No kernel ran in the emulator: it takes fused APIs and CuTe DSL kernels on CPU tensors.")
    if outcome.failure and not outcome.stopped_by_kernel:  # whose findings stand below the kernel
        console.print(outcome.failure, style="red", markup=False, soft_wrap=True)
    console.print(_verdicts(outcome, options))
    console.print(f"{options.arch}, scheduler {options.scheduler}: {outcome.seconds:.1f} s with compilation, on a CPU.")


def _show_kernel(console: Console, launches: list[Any]) -> None:
    """Prints the sum over launches of one kernel with one grid."""
    first, times = launches[0], f", {len(launches)} launches" if len(launches) > 1 else ""
    console.print(first.kernel, style="bold", no_wrap=True, overflow="ellipsis", markup=False)
    grid, block, cluster = ("x".join(map(str, dims)) for dims in (first.grid, first.block, first.cluster))
    seconds = sum(launch.seconds for launch in launches)
    console.print(f"grid {grid}, block {block}, cluster {cluster}, {first.shared_bytes} bytes of shared memory{times}")
    instructions, memory, waits, operations = (
        sum((getattr(launch, name) for launch in launches), Counter[str]())
        for name in ("instructions", "bytes", "waits", "operations")
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("warp instructions", no_wrap=True)
    table.add_column(f"{instructions.total():,}", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("most often", overflow="ellipsis", no_wrap=True, max_width=_OPCODES, style="dim")
    classes: dict[str, Counter[str]] = {}
    for text, number in instructions.items():
        classes.setdefault(instruction_class(text), Counter())[text] += number
    for name, texts in sorted(classes.items(), key=lambda item: -item[1].total()):
        bar = "█" * round(_BAR * texts.total() / instructions.total())
        table.add_row(name, f"{texts.total():,}", bar, ", ".join(text for text, _ in texts.most_common(3)))
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("memory")
    table.add_column("", justify="right")
    for space, number in memory.most_common():
        table.add_row(space, f"{number:,} bytes")
    for operation, number in operations.most_common():
        table.add_row(operation, f"{number:,}")
    for wait, number in waits.most_common():
        table.add_row(f"waits at {wait}", f"{number:,}")
    if any(launch.conflicts for launch in launches):
        table.add_row("bank conflicts", f"{sum(launch.bank_conflicts for launch in launches):,} extra passes")
    table.add_row("emulated in", f"{seconds:.3f} s")
    console.print(table)
    for text in dict.fromkeys(_describe(finding) for launch in launches for finding in launch.findings):
        console.print(text, style="red" if text.startswith("error") else "", markup=False, soft_wrap=True)


def _verdicts(outcome: Outcome, options: Options) -> Table:
    table = Table.grid(padding=(0, 2))
    errors, warnings = len(outcome.report.errors), sum(len(each.warnings) for each in outcome.report.launches)
    if errors or warnings:
        table.add_row("findings", f"{errors} errors, {warnings} warnings")
    if outcome.failure:
        table.add_row("the run", "[bold red]failed[/]")
    elif errors:
        table.add_row("the run", "[bold red]had a fault[/], which the script handled")
    elif outcome.report.launches:
        table.add_row("data races", "[green]none found[/]" if options.races else "not looked for (--no-races)")
    if options.ignore:
        table.add_row("ignored findings", ", ".join(options.ignore))
    if options.warn:
        table.add_row("as warnings", ", ".join(options.warn))
    for comparison in outcome.comparisons:
        verdict = "[green]agrees with its reference[/]" if comparison.passed else "[bold red]wrong[/]"
        table.add_row(comparison.name, f"{verdict}: error {comparison.error:.1e}, allowed {comparison.allowed:.1e}")
    table.add_row("exit code", f"{outcome.exit_code}")
    return table
