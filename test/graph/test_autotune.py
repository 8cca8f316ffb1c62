"""``cudnn.autotune``: on the reference executor, and with plans for a device that is not there and made-up times."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cudnn
from cudnn.runtime import cache
from support.graphs import planned_graph, reference_graph

module: Any = importlib.import_module("cudnn.autotune")  # ``cudnn.autotune`` itself is the function


def accumulate(graph: cudnn.pygraph) -> tuple[cudnn.tensor, cudnn.tensor, cudnn.tensor]:
    """y = x + y, in place: y is an input (uid 2) and an output (uid 3)."""
    x = graph.tensor([4, 8], [8, 1], uid=1, name="x")
    old = graph.tensor([4, 8], [8, 1], uid=2, name="old")
    return x, old, graph.add(x, old, name="sum").set_output(True).set_uid(3)


def product(graph: cudnn.pygraph) -> None:
    a = graph.tensor([1, 128, 64], [128 * 64, 64, 1], uid=1)
    b = graph.tensor([1, 64, 128], [64 * 128, 128, 1], uid=2)
    graph.matmul(a, b, name="mm").set_output(True).set_uid(3)


# The reference executor.
@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: data.numpy()])
def test_what_lay_in_the_outputs_stays(built: bool, wrap: Any) -> None:
    graph = reference_graph()
    x, old, _ = accumulate(graph)
    if built:
        graph.build([cudnn.heur_mode.A])
    data, total = torch.randn(4, 8), torch.randn(4, 8)
    before = total.clone()
    report = cudnn.autotune(graph, {x: data, old: wrap(total), 3: wrap(total)})
    torch.testing.assert_close(total, before, atol=0, rtol=0)
    (plan,) = report.plans
    assert (plan.index, plan.tag, plan.workspace, plan.reason) == (0, "reference", 0, "")
    assert plan.microseconds is not None
    assert plan.microseconds > 0
    assert (report.chosen, report.from_cache) == ("reference", False)
    graph.execute({1: data, 2: total, 3: total})
    torch.testing.assert_close(total, before + data)


def test_a_graph_of_the_wrapper() -> None:
    x, w = torch.randn(1, 4, 8), torch.randn(1, 8, 5)
    with cudnn.Graph() as graph:
        graph.matmul(x, w, name="mm")
    for tensors in ([x, w], {"mm::0": x, "mm::1": w}):
        assert cudnn.autotune(graph, tensors).chosen == "reference"
    torch.testing.assert_close(graph(x, w), x @ w)


def test_the_mode_that_tunes_by_itself() -> None:
    x, w = torch.randn(1, 4, 8), torch.randn(1, 8, 5)
    with cudnn.Graph(heuristics=[cudnn.heur_mode.CUDNN_FIND]) as graph:
        graph.matmul(x, w, name="mm")
    for _ in range(2):
        torch.testing.assert_close(graph(x, w), x @ w)


def test_when_a_first_call_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with tensors, outside of a capture; without a workspace only among plans that need none."""
    x, w = torch.randn(1, 4, 8), torch.randn(1, 8, 5)
    graphs: list[cudnn.Graph] = []
    for allocate in (True, False):
        with cudnn.Graph(heuristics=[cudnn.heur_mode.CUDNN_FIND], workspace_alloc=allocate) as graph:
            graph.matmul(x, w, name="mm")
        graphs.append(graph)
    capturing, asked = True, []
    monkeypatch.setattr(cudnn.pygraph, "_runs_on_reference", lambda self: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(cudnn.Graph, "_autotune", lambda self, tensors, space, handle: asked.append((tensors, space)))
    graphs[0](x, w)
    capturing = False
    with pytest.raises(TypeError, match="got an address"):  # not tuned, and refused by the reference executor
        graphs[0]({"mm::0": x.data_ptr(), "mm::1": w, "mm::C": torch.empty(1, 4, 5)})
    assert asked == []
    for _ in range(2):
        graphs[0](x, w)
    ((tensors, space),) = asked
    assert tensors[0] is x
    assert space is None
    asked.clear()
    graphs[1](x, w)
    assert asked[0][1].nbytes == 0
    asked.clear()
    graphs[1]._untuned = True
    given = torch.empty(64, dtype=torch.uint8)
    graphs[1](x, w, workspace=given)
    assert asked[0][1] is given


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tensors": [1, 2]}, TypeError, "autotune: tensors: got list; allowed: a dict"),
        ({"iterations": 0}, ValueError, "autotune: iterations: got 0; allowed: 1 or more"),
        ({"workspace": 4096}, TypeError, "autotune: workspace: got an address; allowed: a tensor"),
        ({"tensors": {1: np.zeros(32)}}, ValueError, r"tensor 'old' \(uid 2\): got no data"),
        ({"tensors": {3: 4096}}, TypeError, r"output 'sum::OUT_0' \(uid 3\): got an address; allowed: a tensor"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], message: str) -> None:
    graph = reference_graph()
    accumulate(graph)
    with pytest.raises(error, match=message):
        cudnn.autotune(graph, **{"tensors": {}, **change})


# Plans of cuDNN.
class Bench(module._Bench):
    """Answers with figures instead of measuring."""

    def __init__(self, graph: cudnn.pygraph, figures: dict[int, float | Exception], workspace: Any = None) -> None:
        self._graph, self._tensors, self._workspace, self._handle = graph, {}, workspace, None
        self._device, self._figures, self._asked = "cpu", figures, -1

    def _plan(self, index: int, tag: str) -> Any:
        self._asked = index
        return super()._plan(index, tag)

    def _time(self, call: Any) -> float:
        answer = self._figures[self._asked]
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def planned(h200: Any) -> cudnn.pygraph:
    """Every configuration twice, as two heuristic modes may propose it; all but the first two are barred."""
    graph = planned_graph(h200)
    product(graph)
    graph.validate()
    graph.build_operation_graph()
    for _ in range(2):
        graph.create_execution_plans([cudnn.heur_mode.A])
    graph.deselect_engines(names(graph)[2:])
    return graph


def names(graph: cudnn.pygraph) -> list[str]:
    return list(dict.fromkeys(graph.get_plan_name_at_index(i) for i in range(graph.get_execution_plan_count())))


def test_the_fastest_plan_is_chosen(planned: cudnn.pygraph) -> None:
    plans = tuple(Bench(planned, {0: 7.5, 1: 2.25}).plans())
    assert [plan.tag for plan in plans] == names(planned)
    assert [plan.microseconds for plan in plans] == [7.5, 2.25] + [None] * (len(plans) - 2)
    assert all("excluded by name" in plan.reason and plan.workspace is None for plan in plans[2:])
    report = module._best(planned, plans)
    assert planned.get_plan_name() == report.chosen == plans[1].tag
    heading, first, second, *rest = str(report).splitlines()
    assert heading.split() == ["plan", "us", "workspace"]
    assert first.split() == [plans[1].tag, "2.25", str(plans[1].workspace), "<-", "chosen"]
    assert second.split() == [plans[0].tag, "7.50", str(plans[0].workspace)]
    assert len(rest) == len(plans) - 2


def test_plans_that_cannot_run_say_why(planned: cudnn.pygraph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "get_workspace_size_plan_at_index", lambda index: 1000 * index)
    refused = RuntimeError("executing failed")
    plans = tuple(Bench(planned, {0: refused}, torch.empty(999, dtype=torch.uint8)).plans())
    assert [plan.reason for plan in plans[:2]] == ["executing failed", "the workspace has 999 bytes"]
    assert plans[1].workspace == 1000
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"no plan runs: eng.*: executing failed; eng.*has 999"):
        module._best(planned, plans)


def test_the_choice_of_an_earlier_run(planned: cudnn.pygraph, caplog: pytest.LogCaptureFixture) -> None:
    choice = module._Choice(planned, "a GPU")
    assert choice.read() is None
    second = names(planned)[1]
    choice.write(second)
    again = module._Choice(planned, "a GPU").read()
    assert again == second
    assert module._build_cached(planned, again, None)
    assert planned.get_plan_name() == second
    assert module._Choice(planned, "another GPU").read() is None
    assert not module._build_cached(planned, "eng999", None)
    size = planned.get_workspace_size()
    assert module._build_cached(planned, second, torch.empty(size, dtype=torch.uint8))
    planned.deselect_engines([second])
    with caplog.at_level(logging.INFO, "cudnn"):
        assert not module._build_cached(planned, second, None)
    assert "of an earlier run cannot be used" in caplog.text


def test_another_shape_is_another_choice(h200: Any) -> None:
    one, other = planned_graph(h200), planned_graph(h200)
    product(one)
    product(other)
    other.nodes[0].inputs["A"].set_dim([1, 64, 64])
    assert module._Choice(one, "a GPU")._path != module._Choice(other, "a GPU")._path


@pytest.fixture
def choice(h200: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The saved choice for a matmul, in a separate folder."""
    monkeypatch.setenv("CUDNN_KERNEL_CACHE", str(tmp_path / "kernels"))
    graph = planned_graph(h200)
    product(graph)
    return module._Choice(graph, "a GPU")


@pytest.mark.parametrize("content", [b"", b"[]", b'{"plan": "eng1"}'])
def test_a_damaged_choice_is_measured_again(
    content: bytes, choice: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choice.write("eng1")
    (path,) = (tmp_path / "kernels" / "plans").iterdir()
    assert json.loads(path.read_text())["plan"] == "eng1"
    path.write_bytes(content)
    assert choice.read() is None
    assert "cannot be read and will be rewritten" in caplog.text


def test_the_command_that_clears_the_cache_clears_choices(choice: Any, tmp_path: Path) -> None:
    choice.write("eng1")
    assert choice.read() == "eng1"
    assert (tmp_path / "kernels").stat().st_mode & 0o777 == 0o700  # kernels are not kept where others may write
    assert cache.clear() == 0
    assert choice.read() is None


def test_where_no_folder_can_be_written_to_no_choice_is_kept(h200: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "folder", lambda: None)
    graph = planned_graph(h200)
    product(graph)
    choice = module._Choice(graph, "a GPU")
    choice.write("eng1")
    assert choice.read() is None


def test_a_folder_that_cannot_be_written_to(choice: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").touch()
    choice.write("eng1")
    assert "the choice could not be saved" in caplog.text


def test_a_report_from_disk_prints_one_line() -> None:
    assert str(cudnn.TuningReport((), "eng9_k2=1", from_cache=True)) == "eng9_k2=1, measured by an earlier run"
