"""Calls of fused APIs that come again launch CUDA graphs, and what a warm call looks at, without a GPU."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch

from cudnn.backend import cuda_graph
from cudnn.fused.call import Call, Repeated, Table, lanes, say_kept
from support.gemm_families import Case, case
from support.gemms import E4M3, E8M0
from support.recorded import GraphDriver, OnGpu, Recorded

UNTIL_KEPT = 7  # three to be asked whether the GPU keeps up, three to make the graph, and one that is new


class Calls:
    """An object of a fused API, whose kernel and driver remember what they got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: str = "1", **given: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setenv("CUDNN_FUSED_CUDA_GRAPHS", setting)
        monkeypatch.setattr(Repeated, "CALLS_BEFORE_GRAPH", 3)
        say_kept.cache_clear()
        for name in ("by_stream", "kept"):
            monkeypatch.setattr(lanes, name, {})
        self.kernels, self.driver = Recorded(monkeypatch), GraphDriver(monkeypatch)
        self.problem = case("gemm_swiglu", 128, 128, 64, **given)
        self.gemm = self.problem.operation(arch="sm_90a")
        self.gemm.compile()

    def __call__(self, problem: Case | None = None, times: int = 1, **more: Any) -> tuple[int, int]:
        """How many calls reached the kernel, and how many launched a graph."""
        before = len(self.kernels.calls), len(self.driver.launched)
        for _ in range(times):
            tensors = (problem or self.problem).arguments()
            self.gemm.execute(**{name: None if x is None else OnGpu(x) for name, x in tensors.items()}, **more)
        return len(self.kernels.calls) - before[0], len(self.driver.launched) - before[1]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_calls_that_come_again_launch_a_graph(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    """Of the kernel with the same arguments, recorded on a stream of its own."""
    with caplog.at_level("INFO", "cudnn"):
        assert calls(times=UNTIL_KEPT) == (UNTIL_KEPT + 1, 0)
    assert "GemmSwiglu: calls that come again launch a CUDA graph from now on" in caplog.text
    *_, (_, last), (_, recorded) = calls.kernels.calls
    side = [x[1] for x in calls.driver.calls if x[0] == "cuStreamDestroy_v2"]
    assert [x for x, y in zip(recorded, last, strict=True) if x is not y] == side
    assert calls(times=3) == (0, 3)
    assert {stream for _, stream in calls.driver.launched} == {17}
    other = case("gemm_swiglu", 128, 128, 64)
    assert calls(other) == (1, 0)  # other addresses
    assert calls(alpha=2.0) == (1, 0)
    assert calls(current_stream=3) == (1, 0)
    assert calls() == (0, 1)


def test_other_tensors_at_the_same_addresses_are_checked(calls: Calls) -> None:
    """Memory that was freed and given out again: by its address alone a graph would write out of bounds."""
    calls(times=UNTIL_KEPT)
    smaller = calls.problem
    tensors = dict(smaller.tensors)
    smaller.tensors |= {"a": tensors["a"][:64], "ab12": tensors["ab12"][:64], "c": tensors["c"][:64]}
    assert calls() == (1, 0)
    for wrong, words in (
        (tensors["c"][:1].expand(64, -1, -1), "c tensor stride mismatch"),
        (tensors["c"][:64].view(torch.float16), "c tensor dtype mismatch"),
    ):
        smaller.tensors["c"] = wrong
        with pytest.raises(ValueError, match=words):
            calls()
    smaller.tensors |= tensors
    assert calls() == (0, 1)


def test_strides_of_a_warm_call_are_looked_at(calls: Calls) -> None:
    """The kernel takes any multiples of 16 bytes, 0 too."""
    for _ in range(2):
        good = calls.problem.tensors["c"]
        calls.problem.tensors["c"] = good[:1].expand_as(good)
        with pytest.raises(ValueError, match="c tensor stride mismatch"):
            calls()
        assert not calls.kernels.calls
        calls.problem.tensors["c"] = good
        assert calls() == (1, 0)
        calls.kernels.calls.clear()


def test_a_capture_gets_the_kernel_itself(calls: Calls) -> None:
    calls.driver.capturing = 1
    assert calls(times=3 * UNTIL_KEPT) == (3 * UNTIL_KEPT, 0)  # nor is a graph made
    calls.driver.capturing = 0
    calls(times=UNTIL_KEPT)
    assert calls() == (0, 1)
    calls.driver.capturing = 1
    assert calls(times=2) == (2, 0)


def test_a_gpu_that_is_far_behind_when_a_graph_would_be_made(calls: Calls) -> None:
    calls.driver.left = 600
    assert calls(times=3 * UNTIL_KEPT) == (3 * UNTIL_KEPT, 0)


def test_a_graph_that_the_driver_refuses_is_given_up(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    calls(times=UNTIL_KEPT)
    calls.driver.refusal = 700
    assert calls(times=UNTIL_KEPT) == (UNTIL_KEPT, 1)
    assert "GemmSwiglu: cuGraphLaunch failed, CUDA driver error 700" in caplog.text


def test_a_graph_that_cannot_be_made_is_not_tried_again(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For want of memory, say. What was begun is given back, and the call has its result all the same."""
    working = cuda_graph._driver

    def failing(name: str, *arguments: Any) -> None:
        working(name, *arguments)
        if name == "cuGraphInstantiateWithFlags":
            raise RuntimeError("cuGraphInstantiateWithFlags failed: CUDA driver error 2.")

    monkeypatch.setattr(cuda_graph, "_driver", failing)
    with caplog.at_level("INFO", "cudnn"):
        assert calls(times=3 * UNTIL_KEPT) == (3 * UNTIL_KEPT + 1, 0)  # one more is recorded
    assert "runs as before at every call, since its CUDA graph failed: cuGraphInstantiateWithFlags" in caplog.text
    names = [x[0] for x in calls.driver.calls]
    assert names.count("cuGraphCreate") == names.count("cuGraphDestroy") == 1
    assert not lanes.kept


def test_the_default_stream_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stream 0 is that of the current device, which a graph is launched on only where it is the tensors'."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    calls = Calls(monkeypatch)
    calls(times=UNTIL_KEPT, current_stream=0)
    assert calls(current_stream=0) == (0, 1)
    current[0] = 1
    assert calls(current_stream=0) == (1, 0)


def test_numbers_that_are_zero_are_not_told_apart(calls: Calls) -> None:
    """-0.0 is the same key as 0.0."""
    assert calls(times=3 * UNTIL_KEPT, alpha=0.0) == (3 * UNTIL_KEPT, 0)


def test_each_thread_has_graphs_of_its_own(calls: Calls) -> None:
    calls(times=UNTIL_KEPT)
    counts: list[Any] = []
    thread = threading.Thread(target=lambda: counts.extend([calls(times=UNTIL_KEPT), calls()]))
    thread.start()
    thread.join()
    assert counts == [(UNTIL_KEPT + 1, 0), (0, 1)]
    assert len({graph for graph, _ in calls.driver.launched}) == 1
    assert calls() == (0, 1)
    assert len({graph for graph, _ in calls.driver.launched}) == 2


def test_graphs_go_with_their_object(calls: Calls) -> None:
    calls(times=UNTIL_KEPT + 1)
    gc.collect()  # what other tests left
    calls.driver.calls.clear()
    del calls.gemm
    gc.collect()
    ((graph, _),) = calls.driver.launched
    assert ("cuGraphExecDestroy", graph) in calls.driver.calls
    assert not lanes.kept


def test_graphs_are_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of addresses, and layouts; those used last stay."""
    monkeypatch.setattr(Table, "MAX_CALLS", 2)
    monkeypatch.setattr(Table, "MAX_MISSES", 4)
    calls(times=UNTIL_KEPT)
    others = [case("gemm_swiglu", 128, 128, 64) for _ in range(2)]
    assert [calls(other, times=13)[1] for other in others] == [9, 1]  # the second makes room, which takes eight calls
    assert calls() == (1, 0)
    sizes = [case("gemm_swiglu", 128 * (i + 2), 128, 64) for i in range(Call.MAX_LAYOUTS)]
    calls(times=UNTIL_KEPT)
    assert calls() == (0, 1)
    for other in sizes:
        calls(other)
    assert calls() == (1, 0)
    assert str(calls.driver.calls).count("cuGraphExecDestroy") == 4


def test_calls_that_come_keep_their_graphs_among_those_that_do_not(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Table, "MAX_CALLS", 2)
    monkeypatch.setattr(Table, "MAX_MISSES", 4)
    calls(times=UNTIL_KEPT)
    for other in [case("gemm_swiglu", 128, 128, 64) for _ in range(20)]:
        assert calls() == (0, 1)
        assert calls(other) == (1, 0)


def test_where_no_call_comes_again_none_is_looked_up(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read and look up addresses takes time."""
    monkeypatch.setattr(Table, "MAX_CALLS", 2)
    monkeypatch.setattr(Table, "MAX_MISSES", 4)
    monkeypatch.setattr(Table, "CALLS_AT_REST", 9)
    for other in [case("gemm_swiglu", 128, 128, 64) for _ in range(6)]:
        assert calls(other) == (1, 0)
    assert calls(times=9) == (9, 0)
    assert calls(times=UNTIL_KEPT) == (UNTIL_KEPT + 1, 0)
    assert calls() == (0, 1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, True, "2", torch.ones(())])
def test_numbers_of_a_warm_call_are_looked_at(calls: Calls, wrong: Any) -> None:
    """Also where a graph is kept for the same addresses, and 1 is True."""
    calls(times=UNTIL_KEPT, alpha=1.0)
    kind = ValueError if isinstance(wrong, float) else TypeError
    with pytest.raises(kind, match="GemmSwiglu: alpha: got"):
        calls(alpha=wrong)
    assert calls(alpha=1.0) == (0, 1)
    assert calls(alpha=1) == (0, 1)


def test_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's is part of what comes again; one of PyTorch's allocator, too, wherever it lies."""
    held = torch.empty(1 << 20, dtype=torch.uint8)
    monkeypatch.setattr(Call, "_allocated", lambda self, size, stream, first: held[:size])
    calls = Calls(monkeypatch, dtype=E4M3, scale=E8M0)
    mine = [torch.empty(calls.gemm.workspace_size(), dtype=torch.uint8) for _ in range(2)]
    calls(times=UNTIL_KEPT, workspace_tensor=mine[0])
    assert calls(workspace_tensor=mine[0]) == (0, 1)
    assert calls(workspace_tensor=mine[1]) == (1, 0)
    with pytest.raises(ValueError, match="workspace_tensor: got"):
        calls(workspace_tensor=mine[0][:64])
    calls(times=UNTIL_KEPT)
    assert calls() == (0, 1)


def test_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Calls(monkeypatch, setting="0")(times=3 * UNTIL_KEPT) == (3 * UNTIL_KEPT, 0)
