"""``cudnn bench moe --ranks``: what can be tested without GPUs."""

from __future__ import annotations

import dataclasses
import math
import queue
import time
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from rich.console import Console
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from cudnn.bench import ranks, results
from cudnn.cli.ranks import table
from cudnn.moe import exchange
from support.cli import invoke
from support.ranks import run_processes
from support.selection import brief

LINE = ranks.Line(
    "Qwen3-30B-A3B",
    "uniform",
    False,
    8192,
    2,
    100.0,
    1200.0,
    125.0,
    1500.0,
    3000.0,
    1200.0,
    2700.0,
    33e6,
    33e6,
    366e3,
    99.0,
    120.0,
    ranks.Case("Qwen3-30B-A3B", 8192, "uniform").flops,
    2000.0,
    4000.0,
)


def test_the_busiest_link_decides() -> None:
    sent = [[9e9, 366e6, 0.0], [366e6, 9e9, 366e6], [0.0, 366e6, 9e9]]  # what stays does not count
    assert ranks.busiest(sent) == 732e6
    assert ranks.seconds(sent) == pytest.approx(2e-3 + 16e-6)
    assert ranks.seconds(sent, moved=12e9) == pytest.approx(3e-3 + 16e-6)


def test_cases() -> None:
    assert len(ranks.cases(quick=False)) == len(set(ranks.cases(quick=False))) == 32
    assert ranks.cases(quick=True) == ranks.cases(quick=False)[:3]
    assert {case.routing for case in ranks.cases(quick=True)} == {"uniform", "zipf"}
    assert [case.recipe for case in ranks.cases(quick=True)] == ["", "", "blockwise"]


def test_table_and_csv(tmp_path: Path) -> None:
    console = Console(width=80, record=True)
    console.print(table([LINE, dataclasses.replace(LINE, routing="zipf", fp8=True, dispatch_bytes=17e6)]))
    text = console.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("8192 uniform  ", "8192 zipf fp8  ", "17", "0.90", "412 TF", "x 0.80", "x 0.90", "366 to 366 GB/s"):
        assert words in text
    ranks.write_csv([LINE], tmp_path / "ranks.csv")
    names, values = (line.split(",") for line in (tmp_path / "ranks.csv").read_text().splitlines())
    assert dict(zip(names, values, strict=True))["combine"] == "125.0"


class OnCPU(TorchFunctionMode):
    """What is wanted on a GPU is made here."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        return func(*args, **(given | {"device": "cpu"} if given.get("device") == "cuda" else given))


class Event:
    """Stands for that of CUDA."""

    def __init__(self, **_: bool) -> None:
        self.time = 0.0

    def record(self) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1000 * (end.time - self.time)


@pytest.mark.parametrize("count", brief([2, 4, 8], 0))
def test_a_run_of_processes_on_the_cpu(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but GPUs, on small layers."""
    for name in ("_sleep", "synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    # What the benchmark needs of symmetric memory, by the names that this has.
    memory = create_autospec(exchange.Shared, instance=True)
    memory.buffer.side_effect = lambda _: torch.zeros(1000)
    monkeypatch.setattr(exchange.AllToAll, "tokens", memory, raising=False)
    barrier = exchange.SymmetricMemory.barrier.__name__
    monkeypatch.setattr(exchange.AllToAll, barrier, lambda _: dist.barrier(), raising=False)
    monkeypatch.setattr(ranks, "MODELS", dict.fromkeys(ranks.NAMES, (16, 4, 128, 128)))
    cases = [ranks.Case(ranks.NAMES[1], 16, *each) for each in (("uniform",), ("zipf",), ("uniform", True))]

    def rank(number: int) -> None:
        found: Any = queue.SimpleQueue()
        dist.init_process_group = lambda *_, **__: None  # in this process, where it is done
        with OnCPU():
            ranks._rank(number, count, 0, cases, math.inf, found)
        if number == 0:
            lines = [found.get() for _ in cases]
            ranks.write_csv(lines, tmp_path / "ranks.csv")
            for line in lines:
                assert (line.ranks, line.flops) == (count, 6 * 16 * 128 * 128 * 4)
                assert line.combine_bytes >= line.tokens * 128 * 2  # a token has four experts
                assert line.dispatch_bytes == line.combine_bytes * (144 / 256 if line.fp8 else 1)
                assert min(line.fraction_of_copy("combine"), line.teraflops("backward"), line.modelled_dispatch) > 0
        assert found.get() is None

    run_processes(count, tmp_path, rank)
    assert len((tmp_path / "ranks.csv").read_text().splitlines()) == 1 + len(cases)


def test_result_file(tmp_path: Path) -> None:
    run = results.Run("NVIDIA Fake", "580.1", "13.0", "2.11.0", "abc", "2026-11-29")
    narrow = dataclasses.replace(LINE, fp8=True, backward=2500.0, dispatch_bytes=17e6)
    results.write(tmp_path / "moe_ranks.csv", list(ranks.results(run, [LINE, narrow])))
    lines = {(line.case, line.peer, line.metric): line for line in results.read(tmp_path / "moe_ranks.csv")}
    assert {line.shape for line in lines.values()} == {"8192x2048x768x128x8x2"}
    case = "Qwen3-30B-A3B uniform backward"
    assert lines[case, "MoE, 2 GPUs", "time"].value == 3000
    assert lines[case, "MoE, 1 GPU", "time"].value == 2700
    assert lines[case, "all_to_all_single, 2 GPUs", "time"].value == 4000
    assert lines[case, "MoE, 1 GPU", "rate"].value == pytest.approx(LINE.teraflops("one_backward"), rel=1e-3)
    assert lines[case, "MoE fp8, 2 GPUs", "time"].value == 2500
    case = "Qwen3-30B-A3B uniform dispatch"
    assert lines[case, "MoE, exchange", "rate"].value == 330  # 33 MB in 100 us
    assert [lines[case, f"MoE{name}, exchange", "bytes"].value for name in ("", " fp8")] == [33, 17]


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs")
def test_too_few_gpus() -> None:
    result = invoke("bench", "moe", "--ranks", "2")
    assert result.exit_code == 1
    assert "got --ranks 2; this machine has" in result.output
