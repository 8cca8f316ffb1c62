"""``cudnn demo``: its graphs run and are judged; a wrong or failing one makes it fail."""

from __future__ import annotations

from typing import Any

import pytest

import cudnn
from cudnn.cli import demo

HANDLE = None  # on CPU tensors the graph chooses the reference executor by itself


@pytest.mark.parametrize("make", demo.CASES, ids=lambda make: make.__name__)
def test_cases_pass_on_the_reference(make: Any) -> None:
    result = demo.check(make, HANDLE, "cpu")
    assert result.passed, result
    assert result.plan == "reference"
    assert 0 < result.error <= result.tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("make", demo.CASES, ids=lambda make: make.__name__)
def test_cases_pass_on_the_gpu(make: Any) -> None:
    result = demo.check(make, cudnn.create_handle(), "cuda")
    assert result.passed, result
    assert result.plan.startswith("eng")


def _wrong(handle: Any, device: str) -> demo.Case:
    case = demo.matmul_bias_gelu(handle, device)
    case.formula = lambda a, b, d: a @ b + d  # forgets the activation
    return case


def _unbuildable(handle: Any, device: str) -> demo.Case:
    case = demo.matmul_bias_gelu(handle, device)
    case.output.set_dim([1, 2, 3])
    return case


@pytest.mark.parametrize("bad", [_wrong, _unbuildable])
def test_a_bad_graph_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Any
) -> None:
    monkeypatch.setattr(demo, "CASES", (demo.matmul_bias_gelu, bad))
    assert demo.run("cpu") == 1
    assert "1 of 2 graphs agree" in capsys.readouterr().out


def test_all_good_means_exit_code_0(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "CASES", (demo.matmul_bias_gelu,))
    assert demo.run("cpu") == 0
    assert "1 of 1 graphs agree" in capsys.readouterr().out
