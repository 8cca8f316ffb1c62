"""``cudnn bench moe --ranks N``: the expert-parallel MoE layer over the GPUs of a host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.table import Table

from cudnn.bench import ranks as bench
from cudnn.bench import results
from cudnn.lazy import torch

_QUICK = 100.0  # seconds after which --quick starts no case


def run(ranks: int, quick: bool, csv: Path | None, of: results.Run | None = None, save: Path | None = None) -> int:
    """Measures and prints the table, and replaces the result file ``save`` of the run ``of``; returns the exit code."""
    console = Console()
    if torch.cuda.device_count() < ranks:
        console.print(f"cudnn bench: got --ranks {ranks}; this machine has {torch.cuda.device_count()} NVIDIA GPUs.")
        return 1
    lines: list[bench.Line] = []
    failed = ""
    for line in bench.measure(ranks, bench.cases(quick), _QUICK if quick else float("inf")):
        if isinstance(line, str):
            failed = line
            break
        lines.append(line)
        if csv is not None:
            bench.write_csv(lines, csv)  # after each one: an interrupted run keeps its figures
        if save is not None and of is not None:
            results.write(save, list(bench.results(of, lines)))
    console.print(table(lines))
    if csv is not None and lines:
        console.print(f"written: {csv}")
    if save is not None and lines:
        console.print(f"written: {save}")
    if failed:
        console.print(f"not finished: {failed}", style="red", markup=False)
    return 1 if failed or not lines else 0


def table(lines: Sequence[bench.Line]) -> Group:
    """The table of measurements, five rows each, in 80 columns."""
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("tokens of a rank", no_wrap=True)
    for name in ("dispatch", "compute", "combine", "forward", "backward"):
        table.add_column(name, justify="right", no_wrap=True)
    model = ""
    for line in lines:
        if line.model != model:
            if model:
                table.add_section()
            table.add_row(f"[bold]{line.model}, {line.ranks} GPUs[/bold]")
            model = line.model
        times = (line.dispatch, line.compute, line.combine, line.forward, line.backward)
        table.add_row(f"{line.tokens} {line.routing}{' fp8' * line.fp8}", *(f"{value:.0f}" for value in times))
        fractions = [f"{line.fraction_of_copy(step):.2f}" for step in ("dispatch", "combine")]
        rates = [f"{line.teraflops(which):.0f} TF" for which in ("forward", "backward")]
        table.add_row("  of a copy; TFLOP/s", fractions[0], "", fractions[1], *rates, style="dim")
        sizes = [f"{size * 1e-6:.0f}" for size in (line.dispatch_bytes, line.combine_bytes)]
        table.add_row("  MB of a link", sizes[0], "", sizes[1], "", "", style="dim")
        over_nccl = (f"{value:.0f}" for value in (line.a2a_forward, line.a2a_backward))
        table.add_row("  all_to_all_single", "", "", "", *over_nccl, style="dim")
        speeds = [line.one_forward / line.forward, line.one_backward / line.backward]
        modelled = [f"{value:.0f}" for value in (line.modelled_dispatch, line.modelled_combine)]
        relative = [f"x {value:.2f}" for value in speeds]
        table.add_row("  model; of one GPU", modelled[0], "", modelled[1], *relative, style="dim")
    copies = sorted(line.copy * 1e-3 for line in lines)
    copied = f"a copy to the next GPU: {copies[0]:.0f} to {copies[-1]:.0f} GB/s; " if copies else ""
    note = f"microseconds, of the slowest rank; {copied}TFLOP/s of one GPU"
    return Group("Layer of experts over GPUs of one host, bf16 and fp8", "", table, "", note)
