"""Fusions that users build: the reference executor against formulas, plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnn
from support.graphs import FLOAT, HALF, MODES, configurations, packed, planned_graph, reference_graph
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


def tensor(g: cudnn.pygraph, *dims: int, dtype: object = HALF) -> cudnn.tensor:
    return g.tensor(dims, packed(*dims), dtype)


def reshaped(g: cudnn.pygraph, mode: object) -> cudnn.tensor:
    made = g.reshape(g.relu(tensor(g, 4, 64, 64)), reshape_mode=mode)
    return made.set_dim([4, 128, 32]).set_stride([4096, 32, 1])


def turned(g: cudnn.pygraph, method: str) -> cudnn.tensor:
    angles = tensor(g, 128, 1, 1, 64, dtype=FLOAT)
    return getattr(g, method)(tensor(g, 2, 4, 128, 64), angles, rope_dim=48)


def of_groups(g: cudnn.pygraph) -> cudnn.tensor:
    offsets = tensor(g, 4, 1, 1, dtype=cudnn.data_type.INT32)
    return g.reduction(tensor(g, 1, 512, 128), cudnn.reduction_mode.ADD, group_offset=offsets).set_data_type(FLOAT)


def product_of_a_slice(g: cudnn.pygraph) -> cudnn.tensor:
    part = g.slice(g.relu(tensor(g, 4, 64, 64)), [slice(0, 2), slice(None), slice(0, 32)])
    return g.matmul(part, tensor(g, 2, 32, 64))


DESCRIBED: dict[str, tuple[int, Callable[[cudnn.pygraph], cudnn.tensor]]] = {  # from which version on cuDNN has it
    "a transposition": (92200, lambda g: g.transpose(g.relu(tensor(g, 4, 64, 64)), [0, 2, 1])),
    "a logical reshape": (92200, lambda g: reshaped(g, cudnn.reshape_mode.LOGICAL)),
    "a view of a result": (0, lambda g: reshaped(g, cudnn.reshape_mode.VIEW_ONLY)),
    "a slice of a result": (92200, product_of_a_slice),
    "a rotation": (92400, lambda g: turned(g, "rope")),
    "a rotation back": (92500, lambda g: turned(g, "rope_backward")),
    "a reduction of groups": (92400, of_groups),
}


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", DESCRIBED)
def test_cudnn_takes_the_description(name: str, h200: Any, libcudnn: Any) -> None:
    """The descriptors are checked when the operation graph is built. 9.28 has no engines for most of them alone."""
    since, describe_it = DESCRIBED[name]
    graph = planned_graph(h200, intermediate=HALF)
    describe_it(graph).set_output(True)
    graph.validate()
    if libcudnn.version < since:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=rf"9\.{since // 100 % 100}"):
            graph.build_operation_graph()
    else:
        graph.build_operation_graph()
        if name == "a slice of a result":
            assert configurations(graph) > 0
