"""``cudnn bench``: measures a fused API and its peers on this GPU."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

import cudnn
from cudnn import bench
from cudnn.bench import report as reports
from cudnn.bench import results, suite
from cudnn.bench.monitor import Monitor, command
from cudnn.cli import progress
from cudnn.cli.commands import check_choice, option_error
from cudnn.cli.info import driver_version
from cudnn.lazy import torch

_BAR = 4  # length of the bar of ratio 1, in characters
_LONGEST = 7
_EIGHTHS = " ▏▎▍▌▋▊▉"
ALL = "all"


@dataclass(frozen=True)
class Output:
    """The files that a run writes: ``csv``, ``plot``, and the result file ``save`` of the run ``of``."""

    csv: Path | None = None
    plot: Path | None = None
    save: Path | None = None
    of: results.Run | None = None


def main(
    name: Annotated[str, typer.Argument(help=f"The benchmark, or all: {', '.join(bench.BENCHMARKS)}.")] = "",
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp8 (e4m3), mxfp8 or nvfp4; default: bf16.")] = "",
    shapes: Annotated[str, typer.Option(metavar="MxNxK,...", help="Instead of the benchmark's own sizes.")] = "",
    all_shapes: Annotated[
        bool, typer.Option("--all", help="All shapes of the language models, not only some.")
    ] = False,
    no_ab12: Annotated[
        bool, typer.Option("--no-ab12", help="Gated APIs: also without storing the pre-activation.")
    ] = False,
    routing: Annotated[
        str, typer.Option(help="Grouped APIs: tokens of experts, uniform or by Zipf's law (zipf).")
    ] = "uniform",
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Few shapes and short bursts; all: every benchmark in at most 8 minutes."),
    ] = False,
    ranks: Annotated[
        int, typer.Option(metavar="N", help="moe: over N GPUs of this host, and on one; with --quick in 150 s.")
    ] = 0,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Replace NAME.csv in this folder, as benchmarks/results."),
    ] = None,
    commit: Annotated[
        str, typer.Option(metavar="REVISION", help="--save: the library's commit; default: that of its git clone.")
    ] = "",
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Start no problem (all: no benchmark) after this time.")
    ] = math.inf,
    only: Annotated[
        str, typer.Option(metavar="NAME,...", help=f"all: only these: {', '.join(f.key for f in suite.FAMILIES)}.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the figures to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also plot the rates to this image.")] = None,
    from_csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show and plot an earlier measurement, on any machine.")
    ] = None,
) -> None:
    """Measure a fused API against cuBLAS, torch.compile and Triton on this GPU.

    Candidates run interleaved on random data, in six rounds of 40 ms each, after their results were checked.

    Ratios: the yardstick's time divided by this one's; median of the rounds, half of their range.

    A peer that is not installed or fails is named and left out. Exit code 1 if a candidate was wrong, or failed.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        hint = "run pip install '.[bench]' in a clone, or write --csv here and plot it elsewhere with --from-csv"
        raise typer.BadParameter(f"matplotlib is missing: {hint}.", param_hint="--plot")
    if from_csv is not None:
        raise typer.Exit(_show(from_csv, plot))
    if save is not None:
        commit = commit or results.source_commit()
        if not commit:
            raise option_error("--commit", "nothing", "a revision, where the package does not run from a git clone")
    if name == ALL:
        if any((dtype, shapes, all_shapes, no_ab12, ranks, csv, plot)):
            raise option_error("NAME", ALL, "with --save, --quick, --only, --limit and --commit alone")
        raise typer.Exit(_all(save, commit, limit, quick, only))
    if name not in bench.BENCHMARKS:
        raise option_error("NAME", repr(name) if name else "nothing", ", ".join((ALL, *bench.BENCHMARKS)))
    benchmark = bench.find(name)
    dtype = dtype or benchmark.dtypes[0]
    check_choice("--dtype", dtype, benchmark.dtypes)
    if no_ab12 and benchmark.optional != "ab12":
        raise option_error("--no-ab12", name, "only with results that have ab12")
    check_choice("--routing", routing, benchmark.routings)
    try:
        chosen_shapes = benchmark.shapes(shapes) if shapes else ()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shapes") from None
    if quick:
        if shapes or all_shapes:
            raise typer.BadParameter("allowed: without --shapes and --all.", param_hint="--quick")
        chosen_shapes = benchmark.quick
    has_gpu = torch.cuda.is_available()
    this_run = results.this_run(driver_version(), commit) if save is not None and has_gpu else None
    if ranks:
        path = None if save is None else results.path_of(save, "moe_ranks")
        others = bool(shapes or all_shapes or plot)
        raise typer.Exit(_over_ranks(name, ranks, quick, Output(csv, None, path, this_run), others))
    _require_gpu()
    options = bench.Options(dtype, chosen_shapes, all_shapes, no_ab12, routing, quick)
    path = None if save is None else results.path_of(save, name, dtype if dtype != benchmark.dtypes[0] else "")
    raise typer.Exit(run(name, benchmark, options, Output(csv, plot, path, this_run), limit))


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        print("cudnn bench: there is no NVIDIA GPU here, and a benchmark on a CPU would mean nothing.")
        raise typer.Exit(1)


def _all(folder: Path | None, commit: str, limit: float, quick: bool, only: str) -> int:
    """Runs ``cudnn bench all``; returns the exit code."""
    if folder is None:
        raise option_error("--save", "nothing", "a folder, with all")
    try:
        families = suite.chosen([key.strip() for key in only.split(",") if key.strip()])
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from None
    _require_gpu()
    limit = min(limit, suite.QUICK_LIMIT) if quick else limit
    outcomes = []
    for outcome in suite.run(families, folder.resolve(), commit, quick, None if limit == math.inf else limit):
        outcomes.append(outcome)
        print(f"{outcome.family.key}: {outcome.seconds:.0f} s {outcome.problem}", flush=True)
    problems = [outcome for outcome in outcomes if outcome.problem]
    for outcome in problems:
        print(f"not complete: {outcome.family.key}: {outcome.problem}")
    return 1 if problems else 0


def _over_ranks(name: str, ranks: int, quick: bool, output: Output, has_other_options: bool) -> int:
    """Runs ``cudnn bench moe --ranks``; returns the exit code."""
    from cudnn.cli import ranks as ranks_command

    if name != "moe" or has_other_options or not 2 <= ranks <= 16:
        raise option_error("--ranks", ranks, "2 to 16, with moe, --quick, --save and --csv alone")
    return ranks_command.run(ranks, quick, output.csv, output.of, output.save)


def run(name: str, benchmark: bench.Benchmark, options: bench.Options, output: Output, limit: float = math.inf) -> int:
    """Measures and prints the table; returns the exit code."""
    console = Console()
    software = f"cudnn-fused {cudnn.__version__}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}"
    device = torch.cuda.get_device_name()
    report = reports.Report(benchmark.title, options.dtype, device, software, benchmark.yardsticks)
    problems = benchmark.problems(options)
    deadline = time.monotonic() + limit
    torch.manual_seed(0)
    left = 0
    with Monitor(command()) as monitor, progress.shown("", len(problems)) as steps:
        for index, problem in enumerate(problems):
            if time.monotonic() > deadline:
                left = len(problems) - index
                break
            steps.doing = problem.label

            def advance(done: float, before: int = index) -> None:
                steps.done = before + done

            report.rows += bench.measure(problem, benchmark.yardsticks, monitor.read, advance)
            _write(name, report, output)  # after each problem: an interrupted run keeps its figures
    console.print(table(report))
    if left:
        console.print(f"not run: the last {left} of {len(problems)} problems, by --limit", style="red")
    if output.plot is not None:
        reports.plot(report, output.plot)
    for path in (output.csv, output.plot, output.save):
        if path is not None:
            console.print(f"written: {path}")
    missing = [row for row in report.rows if row.refused.startswith(bench.MISSING) and not row.ours]
    return 1 if any(row.refused and row not in missing for row in report.rows) else 0


def _write(name: str, report: reports.Report, output: Output) -> None:
    if output.csv is not None:
        reports.write_csv(report, output.csv)
    if output.save is not None and output.of is not None:
        lines = results.results(output.of, name, report.dtype, report.yardsticks, report.rows)
        results.write(output.save, list(lines))


def _show(path: Path, plot: Path | None) -> int:
    try:
        report = reports.read_csv(path)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--from-csv") from None
    console = Console()
    console.print(table(report))
    if plot is not None:
        reports.plot(report, plot)
        console.print(f"written: {plot}")
    return 0


def table(report: reports.Report) -> Group:
    """The table of measurements in 80 columns, with bars of the ratios to the first yardstick."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("")  # long problems take two lines; figures stay whole
    table.add_column("us", justify="right", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    for name in report.yardsticks:
        table.add_column(f"/ {_short(name, report.yardsticks)}", justify="right", no_wrap=True)
    memory = any(row.memory == row.memory for row in report.rows)
    table.add_column("GB" if memory else "", justify="right" if memory else "left", no_wrap=True)
    previous = ""
    for row in report.rows:
        if row.problem != previous:
            if previous:
                table.add_section()
            table.add_row(Text(row.problem, style="bold"))
            previous = row.problem
        style = "green" if row.ours else ""
        if row.refused:
            table.add_row(f"  {row.name}", "not run", style="red")
            continue
        ratios = [_ratio(ratio_) for ratio_ in row.ratios]
        if memory:
            last = f"{row.memory * 1e-9:.2f}" if row.memory == row.memory else ""
        else:
            last = _bar(row.ratios[0].median) if row.ratios and row.ratios[0] else ""
        table.add_row(f"  {row.name}", f"{row.microseconds:.1f}", row.rate, *ratios, last, style=style)
    heading = Text(f"{report.title}, {report.dtype}", style="bold")
    not_run = [row for row in report.rows if row.refused]
    notes = [Text(f"not run: {row.problem}, {row.name}: {row.refused}", style="red") for row in not_run]
    return Group(heading, f"{report.device}; {report.software}", "", table, "", _state(report.rows), *notes)


def _short(name: str, names: Sequence[str]) -> str:
    """A yardstick's name as a heading: without the prefix that it shares with the first; a long name on two lines."""
    short = name.removeprefix(names[0]).strip() if name != names[0] else name
    return short.replace("FlashAttention", "Flash\nAttention")


def _ratio(ratio: bench.Ratio | None) -> str:
    return f"{ratio.median:.3f} ±{(ratio.high - ratio.low) / 2:.3f}".replace("±0.", "±.") if ratio else ""


def _bar(length: float) -> str:
    eighths = round(8 * min(_BAR * length, _LONGEST))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _state(rows: Sequence[bench.Row]) -> str:
    """The line with the GPU's clock, power and temperature during timing."""
    readings = [row.reading for row in rows if row.reading is not None and row.flops]
    readings = readings or [row.reading for row in rows if row.reading is not None]
    if not readings:
        return "clocks and power: unknown (nvidia-smi does not report them)"
    clocks, powers, temperatures = zip(*readings, strict=True)
    return (
        f"while timing: SM clock {min(clocks):.0f} to {max(clocks):.0f} MHz, "
        f"{min(powers):.0f} to {max(powers):.0f} W, at most {max(temperatures):.0f} °C"
    )
