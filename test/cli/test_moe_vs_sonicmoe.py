"""Interleaving in benchmarks/moe_vs_sonicmoe.py, without a GPU: two fake workers that answer with times."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import cudnn
from cudnn.bench import results
from cudnn.bench.dense_gemm import source_module


@pytest.fixture(scope="module")
def script() -> Any:
    return source_module("benchmarks/moe_vs_sonicmoe.py")


class Worker:
    """A worker whose calls take ``time``, scaled by a clock that slows down with each round."""

    def __init__(self, time: float, requests: list[float]) -> None:
        self.time, self.requests = time, requests

    def send(self, which: str) -> None:
        assert which == "forward"
        self.requests.append(self.time)

    def recv(self) -> float:
        return self.time * (1 + (len(self.requests) - 1) // 2)


def test_each_slice_runs_both_and_its_ratio_is_independent_of_the_clock(script: Any) -> None:
    requests: list[float] = []
    times = script.interleave("forward", [Worker(1.1, requests), Worker(1.0, requests)], 0.0)
    assert len(times) == 5  # six, of which the first does not count
    assert [a / b for a, b in times] == pytest.approx([1.1] * 5)
    pairs = list(zip(requests[::2], requests[1::2], strict=True))
    assert all(set(pair) == {1.1, 1.0} for pair in pairs)


def test_the_interval_has_the_median_and_narrows(script: Any) -> None:
    few, many = [0.9, 1.0, 1.1] * 3, [0.9, 1.0, 1.1] * 30
    (low, high), (inner_low, inner_high) = script.interval(few), script.interval(many)
    assert low <= 1.0 <= high
    assert inner_high - inner_low <= high - low
    assert script.interval([1.0] * 5) == (1.0, 1.0)


def test_the_result_file_has_both_layers(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Fake")
    layers = [script.Layer("0.1.2", 1.1, 3.0), script.Layer(cudnn.__version__, 1.1, 2.0)]
    slices = [(1.1, 1.0), (2.2, 2.0), (1.1, 1.0), (1.1, 1.0)]
    rows = script.rows_of("8,4,2,16,2,zipf", "both", slices, layers)
    script.write(tmp_path / "moe_sonicmoe.csv", "abc", rows, layers)
    lines = {(line.peer, line.metric): line for line in results.read(tmp_path / "moe_sonicmoe.csv")}
    assert {(line.shape, line.case, line.commit) for line in lines.values()} == {("8x4x2x16x2", "Zipf both", "abc")}
    assert lines["SonicMoE", "time"].value == 1100
    assert lines["SonicMoE", "time"].peer_version == "0.1.2"
    assert (lines["SonicMoE", "memory"].value, lines["MoE", "memory"].value) == (3.0, 2.0)
    assert lines["MoE", "ratio to SonicMoE"].value == pytest.approx(1.1)
    assert ("SonicMoE", "ratio to SonicMoE") not in lines


def test_a_folder_without_sonicmoe_is_refused(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe_vs_sonicmoe.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert "holds no folder `sonicmoe`" in capsys.readouterr().err
