"""``graph.explain()`` of plans that a GPU runs, restored ones too, and of a graph that its cuDNN refuses."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import cudnn
from cudnn.cli import app
from support.graphs import FLOAT, HALF, MODES

pytestmark = pytest.mark.gpu


def described() -> tuple[cudnn.pygraph, cudnn.tensor]:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT)
    a = graph.tensor(dim=[1, 64, 128], stride=[64 * 128, 128, 1], name="a")
    b = graph.tensor(dim=[1, 128, 96], stride=[128 * 96, 96, 1], name="b")
    return graph, graph.gelu(graph.matmul(a, b, name="mm"), name="act")


def test_the_plan_and_its_kernels() -> None:
    graph, out = described()
    out.set_output(True)
    graph.build(MODES)
    plan = graph.explain().plan
    assert plan is not None
    assert (plan.tag, plan.workspace) == (graph.get_plan_name(), graph.get_workspace_size())
    restored = cudnn.pygraph()
    restored.deserialize(graph.serialize())
    again = restored.explain()
    assert again.state == "built"
    assert again.plan is not None
    assert (again.plan.kernels, again.plan.workspace) == (plan.kernels, plan.workspace)


def test_a_refused_graph_is_narrowed() -> None:
    graph, out = described()
    w = graph.tensor(dim=[1, 96, 32], stride=[96 * 32, 32, 1], name="w")
    graph.matmul(out, w, name="again").set_output(True)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"graph\.explain"):
        graph.build(MODES)
    explained = graph.explain()
    assert explained.state == "refused"
    assert explained.reasons[0].message
    assert explained.reasons[0].cures
    assert any(node.refused for node in explained.nodes)


def test_examples() -> None:
    result = CliRunner().invoke(app, ["explain", "--example", "attention"])
    assert result.exit_code == 0, result.output
    assert "plan eng" in result.output
