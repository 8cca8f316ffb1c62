"""The turns of benchmarks/moe_vs_sonicmoe.py, without a GPU: two lines that answer with times."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn.bench.dense_gemm import source_module


@pytest.fixture(scope="module")
def script() -> Any:
    return source_module("benchmarks/moe_vs_sonicmoe.py")


class Line:
    """A layer of which every call takes ``time``, times the clock of the round: both are asked once in each."""

    def __init__(self, time: float, asked: list[float]) -> None:
        self.time, self.asked = time, asked

    def send(self, which: str) -> None:
        assert which == "forward"
        self.asked.append(self.time)

    def recv(self) -> float:
        return self.time * (1 + (len(self.asked) - 1) // 2)


def test_each_turn_has_both_and_its_ratio_is_free_of_the_clock(script: Any) -> None:
    asked: list[float] = []
    found = script.turns("forward", [Line(1.1, asked), Line(1.0, asked)], 0.0)
    assert len(found) == 5  # six, of which the first does not count
    assert [a / b for a, b in found] == pytest.approx([1.1] * 5)
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert all(set(pair) == {1.1, 1.0} for pair in pairs)


def test_the_interval_has_the_median_and_narrows(script: Any) -> None:
    few, many = [0.9, 1.0, 1.1] * 3, [0.9, 1.0, 1.1] * 30
    (low, high), (inner_low, inner_high) = script.interval(few), script.interval(many)
    assert low <= 1.0 <= high
    assert inner_high - inner_low <= high - low
    assert script.interval([1.0] * 5) == (1.0, 1.0)
