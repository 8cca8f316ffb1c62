"""CUDA graphs that fused APIs keep for calls that come again, on the GPU: they compute what a call computes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from cudnn.fused.call import Repeated, lanes
from gpu.common import captured
from support.gemm_families import Case, case
from support.gemms import E4M3, E8M0
from support.threads import together

KINDS: dict[str, dict[str, Any]] = {"gemm_swiglu": {}, "gemm_amax": {"dtype": E4M3, "scale": E8M0, "vector": 32}}


@pytest.fixture(params=KINDS)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """An object, and what makes problems for it."""
    monkeypatch.setattr(Repeated, "CALLS_BEFORE_GRAPH", 2)
    monkeypatch.setenv("CUDNN_FUSED_CUDA_GRAPHS", "1")

    def problem() -> Case:
        return case(request.param, 256, 256, 256, **KINDS[request.param], device="cuda")

    return compiled(problem()), problem


def compiled(first: Case) -> Any:
    gemm = first.operation()
    gemm.compile()
    return gemm


def launch(gemm: Any, problem: Case, times: int = 1, **more: Any) -> torch.Tensor:
    """The result of the last of so many calls, the GPU waited for after each."""
    result = problem.tensors[problem.family.result]
    for _ in range(times):
        result.zero_()
        gemm.execute(**problem.arguments(), **more)
        torch.cuda.current_stream().synchronize()
    return result.clone()


def test_other_values_and_addresses(made: tuple[Any, Any]) -> None:
    """New numbers at the same addresses, other addresses in turns, and memory that was freed and given out again."""
    gemm, problem = made
    one, other = problem(), problem()
    want = [launch(gemm, x) for x in (one, other)]
    before = len(lanes.kept)
    for x in (one, other):
        launch(gemm, x, 16)
    assert len(lanes.kept) == before + 2
    for _ in range(8):
        assert all(torch.equal(launch(gemm, x), y) for x, y in zip((one, other), want, strict=True))
    one.tensors["a"].copy_(other.tensors["a"])
    for name in ("sfa", "sfb", "b"):
        if one.tensors.get(name) is not None:
            one.tensors[name].copy_(other.tensors[name])
    assert torch.equal(launch(gemm, one), want[1])
    for _ in range(24):
        fresh = problem()
        for name, tensor in fresh.tensors.items():
            if tensor is not None and not fresh.family.cls.spec(name).written:
                tensor.copy_(other.tensors[name])
        assert torch.equal(launch(gemm, fresh), want[1])
        del fresh


def test_streams_threads_and_captures(made: tuple[Any, Any]) -> None:
    gemm, problem = made
    one = problem()
    want = launch(gemm, one, 16)

    def work(number: int) -> None:
        mine = problem()
        expected = launch(gemm, mine)
        with torch.cuda.stream(torch.cuda.Stream(priority=-(number % 2))):
            for _ in range(50):
                assert torch.equal(launch(gemm, mine), expected)

    together(work, 4)
    graph, result = captured(lambda: gemm.execute(**one.arguments())), one.tensors[one.family.result]
    result.zero_()
    graph.replay()
    assert torch.equal(result, want)


def test_one_that_is_running_goes_with_its_object(made: tuple[Any, Any]) -> None:
    _, problem = made
    gemm, one = compiled(problem()), problem()
    want, result = launch(gemm, one, 16), one.tensors[one.family.result]
    result.zero_()
    gc.collect()  # what other tests left
    torch.cuda._sleep(50_000_000)
    gemm.execute(**one.arguments())
    before = len(lanes.kept)
    del gemm
    gc.collect()
    assert len(lanes.kept) == before - 1
    assert torch.equal(result, want)
