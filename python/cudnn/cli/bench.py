"""``cudnn bench``: a fused API measured beside its peers on this GPU."""

from __future__ import annotations

import importlib
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from cudnn import bench
from cudnn.lazy import torch

_BAR = 6  # characters of a bar of length 1


def run(name: str, image: Path | None) -> int:
    """Prints the table while it grows; the exit code."""
    console = Console()
    if not torch.cuda.is_available():
        console.print("cudnn bench: no NVIDIA GPU here; a benchmark on a CPU would say nothing.")
        return 1
    module = importlib.import_module(f"cudnn.bench.{name}")
    console.print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    rows: list[bench.Row] = []
    with console.status("measuring"):
        for row in module.rows():
            rows.append(row)
            console.log(f"{row.problem}: {row.name} {row.microseconds:.1f} us")
    console.print(table(module.TITLE, rows))
    if image is not None:
        bench.plot([row for row in rows if not row.problem.startswith("host")], module.TITLE, image)
        console.print(f"plot: {image}")
    return 0


def table(title: str, rows: list[bench.Row]) -> Table:
    """The measurements with bars of their ratios."""
    table = Table(title=title, box=box.SIMPLE, pad_edge=False, padding=(0, 0))  # 80 columns hold it
    for heading, side in (("problem", "left"), ("", "left"), ("us", "right"), ("", "right"), ("ratio", "right")):
        table.add_column(heading, justify=side, no_wrap=True)  # pyright: ignore[reportArgumentType]
    table.add_column("", no_wrap=True)
    before = ""
    for row in rows:
        bar = "█" * max(1, round(_BAR * min(row.ratio, 2)))
        style = "bold green" if row.ours else ""
        shown = "" if row.problem == before else row.problem
        table.add_row(shown, row.name, f"{row.microseconds:.1f}", row.note, f"{row.ratio:.2f}", bar, style=style)
        before = row.problem
    return table
