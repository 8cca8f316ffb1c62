"""Fusions that users build: the reference executor against formulas, plans of cuDNN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from support.graphs import MODES, configurations, planned_graph, reference_graph
from support.patterns import PATTERNS, assert_computes, describe, rotation_data


@pytest.mark.parametrize("name", PATTERNS)
def test_reference(name: str) -> None:
    pattern = PATTERNS[name]
    assert_computes(pattern, reference_graph(pattern.io, pattern.intermediate, pattern.compute), "cpu")


@pytest.mark.deviceless_919
@pytest.mark.usefixtures("libcudnn")
@pytest.mark.parametrize(("name", "device"), [(name, device) for name in PATTERNS for device in PATTERNS[name].devices])
def test_cudnn_builds_a_plan(name: str, device: str, request: pytest.FixtureRequest) -> None:
    pattern = PATTERNS[name]
    graph = planned_graph(request.getfixturevalue(device), pattern.io, pattern.intermediate, pattern.compute)
    describe(pattern, graph, pattern.data())
    assert configurations(graph) > 0
    if device == "h200" and not pattern.precompiled:
        graph.build_plans()
        assert graph.get_plan_name()


@pytest.mark.deviceless_919
def test_the_operation_graph_needs_no_validation(h200: Any) -> None:
    pattern = PATTERNS["silu_and_mul"]
    graph = planned_graph(h200, pattern.io)
    describe(pattern, graph, pattern.data())
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.check_support()
    assert graph.get_execution_plan_count() > 0


def test_outputs_in_the_place_of_inputs() -> None:
    pattern = PATTERNS["rotary embedding of element-wise operations"]
    data = rotation_data()
    expected = pattern.formula({name: t.double() for name, t in data.items()})
    graph = reference_graph(pattern.io)
    inputs, outputs = describe(pattern, graph, data)
    graph.build(MODES)
    pack = {inputs[name]: t for name, t in data.items()} | {
        outputs["low'"]: data["low"],
        outputs["high'"]: data["high"],
    }
    graph.execute(pack)
    for name in ("low", "high"):
        torch.testing.assert_close(data[name].double(), expected[f"{name}'"], rtol=2**-7, atol=2**-7)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", ["convolution with prologue and statistics", "weight gradient with prologue"])
def test_prologues_of_convolutions_are_for_hopper(name: str, b200: Any) -> None:
    pattern = PATTERNS[name]
    graph = planned_graph(b200, pattern.io, pattern.intermediate, pattern.compute)
    describe(pattern, graph, pattern.data())
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration"):
        configurations(graph)
