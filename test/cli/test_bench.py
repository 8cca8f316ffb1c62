"""``cudnn bench``: what can be tested without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cudnn import bench
from cudnn.backend import handle
from cudnn.cli import app
from cudnn.cli.bench import table

ROWS = [
    bench.Row("32 x 64", "copy", 130.0, 1.0, "4.13 TB/s"),
    bench.Row("32 x 64", "Api", 140.0, 0.93, "3.83 TB/s", ours=True),
]


def test_an_unknown_benchmark_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "nothing"])
    assert result.exit_code == 2
    assert "got 'nothing'; allowed: rmsnorm_rht_amax" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(handle.gpu_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["bench", "rmsnorm_rht_amax"])
    assert result.exit_code == 1
    assert "no NVIDIA GPU" in result.output


def test_table() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("Title", ROWS))
    lines = console.export_text().splitlines()
    (ours,) = [line for line in lines if "Api" in line]
    (copy,) = [line for line in lines if "copy" in line]
    assert "0.93" in ours
    assert "…" not in ours + copy  # 80 columns hold it
    assert copy.count("█") == 6
    assert ours.count("█") == round(6 * 0.93)
    assert "32 x 64" not in ours  # said once


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(ROWS, "Title", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
