"""Interleaving in benchmarks/moe_vs_sonicmoe.py, without a GPU: two fake workers that answer with times."""

from __future__ import annotations

from typing import Any

import pytest

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
