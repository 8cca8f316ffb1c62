"""Graphs that cuDNN computes wrongly are refused, or kept from the engines that go wrong."""

from __future__ import annotations

from typing import Any

import pytest

import cudnn
from cudnn.pygraph import known_faults
from support.graphs import HALF, configurations, planned_graph, reference_graph

CUBLASLT = cudnn.behavior_note.CUBLASLT_DEPENDENCY
NEWER = known_faults.SEEN_IN + 100


def tensor(graph: cudnn.pygraph, *dims: int) -> cudnn.tensor:
    strides = [1]
    for extent in reversed(dims[1:]):
        strides.insert(0, strides[0] * extent)
    return graph.tensor(dims, strides)


@pytest.mark.parametrize("dims", [(1, 1, 128), (1, 96, 1), (4, 1, 1), (1, 96, 128), (96, 128)])
def test_operands_spread_over_the_batch_are_refused(dims: tuple[int, ...]) -> None:
    graph = reference_graph(HALF)
    graph.relu(graph.add(tensor(graph, 4, 96, 128), tensor(graph, *dims), name="sum")).set_output(True)
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"sum \(add\): input IN_1 .* spread over"):
        known_faults.refuse(graph.nodes, known_faults.SEEN_IN)
    known_faults.refuse(graph.nodes, NEWER)


@pytest.mark.parametrize("dims", [(4, 96, 128), (4, 96, 1), (1, 1, 1), (1,)])
def test_operands_that_come_out_right_are_not(dims: tuple[int, ...]) -> None:
    graph = reference_graph(HALF)
    graph.add(tensor(graph, 4, 96, 128), tensor(graph, *dims)).set_output(True)
    graph.validate()
    known_faults.refuse(graph.nodes, known_faults.SEEN_IN)


def test_a_bias_after_a_matmul_and_a_batch_of_one_are_not() -> None:
    graph = reference_graph(HALF)
    c = graph.matmul(tensor(graph, 4, 96, 64), tensor(graph, 4, 64, 128))
    graph.bias(c, tensor(graph, 1, 1, 128)).set_output(True)
    graph.validate()
    known_faults.refuse(graph.nodes, known_faults.SEEN_IN)
    graph = reference_graph(HALF)
    graph.add(tensor(graph, 1, 96, 128), tensor(graph, 1, 1, 128)).set_output(True)
    graph.validate()
    known_faults.refuse(graph.nodes, known_faults.SEEN_IN)


@pytest.mark.parametrize("connected", [False, True])
def test_a_convolution_beside_a_matmul_is_refused_at_every_version(connected: bool) -> None:
    graph = reference_graph(HALF)
    made = graph.conv_fprop(tensor(graph, 2, 8, 9, 9), tensor(graph, 8, 8, 3, 3), [1, 1]).set_output(True)
    graph.matmul(made if connected else tensor(graph, 2, 8, 9, 9), tensor(graph, 2, 8, 9, 4), name="mm").set_output(
        True
    )
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"mm \(matmul\): a convolution in the same graph"):
        known_faults.refuse(graph.nodes, NEWER)


def test_concatenation_with_a_convolution_is_refused() -> None:
    graph = reference_graph(HALF, HALF)
    image, weight, kept = tensor(graph, 4, 64, 16, 16), tensor(graph, 64, 64, 1, 1), tensor(graph, 4, 64, 16, 16)
    graph.concatenate([kept, graph.conv_fprop(image, weight, [0, 0])], 1, name="cat").set_output(True)
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"cat .*a convolution in the same graph"):
        known_faults.refuse(graph.nodes, known_faults.SEEN_IN)
    known_faults.refuse(graph.nodes, NEWER)


def linear(graph: cudnn.pygraph, **relu: float) -> None:
    c = graph.matmul(tensor(graph, 1, 256, 240), tensor(graph, 1, 240, 192))
    graph.relu(c, **relu).set_output(True)


@pytest.mark.parametrize("options", [{"negative_slope": 0.1}, {"lower_clip": -1.0}, {"upper_clip": 6.0}])
def test_a_relu_with_options_keeps_off_cublaslt(options: dict[str, float], h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph, **options)
    configurations(graph)
    notes = [graph.get_behavior_notes_for_plan_at_index(i) for i in range(graph.get_execution_plan_count())]
    for index, found in enumerate(notes):
        if CUBLASLT in found:
            with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="has the note CUBLASLT_DEPENDENCY"):
                graph.build_plan_at_index(index)
    graph.build_plans()
    assert CUBLASLT not in graph.get_behavior_notes()


def test_a_plain_relu_may_use_it(h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph)
    assert known_faults.faulty_engines(graph.nodes) is None
