"""Graphs that cuDNN computes wrongly are refused, or kept from the engines that go wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.pygraph import known_faults
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, packed, planned_graph, reference_graph

CUBLASLT = cudnn.behavior_note.CUBLASLT_DEPENDENCY
NEWER = known_faults.SEEN_IN + 100


def tensor(graph: cudnn.pygraph, *dims: int) -> cudnn.tensor:
    return graph.tensor(dims, packed(*dims))


Build = Callable[[cudnn.pygraph], cudnn.tensor]


def described(build: Build) -> list[Any]:
    """The validated nodes of a graph."""
    graph = reference_graph(HALF)
    build(graph).set_output(True)
    graph.validate()
    return graph.nodes


def added(*dims: int, to: tuple[int, ...] = (4, 96, 128)) -> Build:
    return lambda graph: graph.relu(graph.add(tensor(graph, *to), tensor(graph, *dims), name="sum"))


def concatenated(graph: cudnn.pygraph) -> cudnn.tensor:
    image, weight, kept = tensor(graph, 4, 64, 16, 16), tensor(graph, 64, 64, 1, 1), tensor(graph, 4, 64, 16, 16)
    return graph.concatenate([kept, graph.conv_fprop(image, weight, [0, 0]).set_data_type(HALF)], 1, name="cat")


def gathered(graph: cudnn.pygraph) -> cudnn.tensor:
    first, index = (graph.tensor(dims, [1, 1, 1], cudnn.data_type.INT32) for dims in ([4, 1, 1], [1, 64, 1]))
    mode = cudnn.moe_grouped_matmul_mode.GATHER
    weight = graph.tensor([4, 32, 16], [512, 1, 32])
    return graph.moe_grouped_matmul(tensor(graph, 1, 64, 32), weight, first, index, mode=mode, name="experts")


def negative_scales(graph: cudnn.pygraph) -> cudnn.tensor:
    scaled = graph.block_scale_dequantize(tensor(graph, 1, 64, 64), tensor(graph, 1, 64, 2), [1, 32], True, name="d")
    return graph.matmul(scaled, tensor(graph, 1, 64, 32))


def rotary(graph: cudnn.pygraph) -> cudnn.tensor:
    x1, x2 = (graph.tensor([256, 4096, 16], [4096 * 32, 32, 1]) for _ in range(2))
    cos, sin = tensor(graph, 1, 4096, 16), tensor(graph, 1, 4096, 16)
    graph.sub(graph.mul(x1, cos), graph.mul(x2, sin)).set_output(True).set_stride(x1.get_stride())
    return graph.add(graph.mul(x2, cos), graph.mul(x1, sin)).set_stride(x1.get_stride())


def biased(graph: cudnn.pygraph) -> cudnn.tensor:
    return graph.bias(graph.matmul(tensor(graph, 4, 96, 64), tensor(graph, 4, 64, 128)), tensor(graph, 1, 1, 128))


SPREAD = [(1, 1, 128), (1, 96, 1), (4, 1, 1), (96, 1), (128,)]
NOT_SPREAD = [(4, 96, 128), (4, 96, 1), (1, 96, 128), (96, 128), (1, 1, 1), (1,)]
REFUSED: dict[str, tuple[Build, str]] = {
    **{f"a sum with {dims}": (added(*dims), r"sum \(add\): input IN_1 .* spread over") for dims in SPREAD},
    "joined to a convolution": (concatenated, r"cat .*a convolution in the same graph"),
    "gathered tokens": (gathered, r"experts .*mode: got GATHER with cuDNN 9\.19"),
    "negative block scales": (negative_scales, r"d .*is_negative_scale: got True with cuDNN"),
}
TAKEN: dict[str, Build] = {
    **{f"a sum with {dims}": added(*dims) for dims in NOT_SPREAD},
    "a batch of one": added(1, 1, 128, to=(1, 96, 128)),
    "rotary embeddings": rotary,
    "a bias after a product": biased,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_up_to_the_version_that_was_seen(name: str) -> None:
    build, message = REFUSED[name]
    nodes = described(build)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=message):
        known_faults.refuse(nodes, known_faults.SEEN_IN)
    known_faults.refuse(nodes, NEWER)


@pytest.mark.parametrize("name", TAKEN)
def test_what_came_out_right_is_not(name: str) -> None:
    known_faults.refuse(described(TAKEN[name]), known_faults.SEEN_IN)


@pytest.mark.parametrize("connected", [False, True])
def test_a_convolution_with_a_matmul_is_refused_at_every_version(connected: bool) -> None:
    graph = reference_graph(HALF)
    made = graph.conv_fprop(tensor(graph, 2, 8, 9, 9), tensor(graph, 8, 8, 3, 3), [1, 1]).set_output(True)
    graph.matmul(made if connected else tensor(graph, 2, 8, 9, 9), tensor(graph, 2, 8, 9, 4), name="mm").set_output(
        True
    )
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"mm \(matmul\): a convolution in the same graph"):
        known_faults.refuse(graph.nodes, NEWER)


@pytest.mark.deviceless_919
def test_int8_convolutions_keep_off_engines_for_floating_point(h200: Any) -> None:
    graph = planned_graph(h200, *[cudnn.data_type.INT32] * 3)
    x, w = (nhwc(graph, *dims, dtype=cudnn.data_type.INT8) for dims in ([2, 64, 8, 8], [64, 64, 3, 3]))
    graph.conv_fprop(x, w, [1, 1], [1, 1], [1, 1]).set_output(True)
    names = [graph.get_plan_name_at_index(i) for i in range(configurations(graph))]
    if library.version() > known_faults.SEEN_IN:
        return
    denied = [index for index, name in enumerate(names) if name.split("_")[0] in ("eng0", "eng28")]
    assert 0 < len(denied) < len(names)
    for index in denied:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="computes such graphs wrongly"):
            graph.build_plan_at_index(index)


def linear(graph: cudnn.pygraph, **relu: Any) -> None:
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
    assert not [*known_faults.faulty_engines(graph.nodes, library.version())]


# Convolutions.
def response(graph: cudnn.pygraph, kernels: int) -> cudnn.tensor:
    image, weight = nhwc(graph, 1, 32, 19, 22), nhwc(graph, kernels, 32, 1, 4)
    return graph.conv_fprop(image, weight, padding=[0, 3], stride=[1, 2], dilation=[1, 1])


def data_gradient(graph: cudnn.pygraph, stride: int, fused: int) -> cudnn.tensor:
    loss, weight = nhwc(graph, 2, 16, 8, 8), nhwc(graph, 16, 64, 3, 3)
    made = graph.conv_dgrad(loss, weight, padding=[1, 1], stride=[stride] * 2, dilation=[1, 1])
    dims = [2, 64, 7 * stride + 1, 7 * stride + 1]
    made.set_dim(dims).set_stride(nhwc(graph, *dims).get_stride())
    for _ in range(fused):
        made = graph.tanh(made)
    return made


def filter_gradient(graph: cudnn.pygraph, *padding: tuple[int, int]) -> cudnn.tensor:
    pre, post = zip(*padding, strict=True)
    extents = [64 + a + b - 2 for a, b in padding]
    image, loss = nhwc(graph, 3, 16, *[64] * len(pre)), nhwc(graph, 3, 80, *extents)
    ones = [1] * len(pre)
    return graph.conv_wgrad(image, loss, pre_padding=pre, post_padding=post, stride=ones, dilation=ones)


def nhwc(graph: cudnn.pygraph, *dims: int, dtype: Any = None) -> cudnn.tensor:
    """Channels last."""
    strides = torch.empty(dims[0], *dims[2:], dims[1], device="meta").movedim(-1, 1).stride()
    return graph.tensor(dims, strides, dtype)


# Graph, types, engine.
WRONG: dict[str, tuple[Build, object, str]] = {
    "strided data gradient, four operations": (lambda graph: data_gradient(graph, 2, 4), HALF, "eng1"),
    "28 channels out": (lambda graph: graph.relu(response(graph, 28)), BFLOAT16, "eng7_k24=27"),
    "filter gradient, one dimension": (lambda graph: filter_gradient(graph, (3, 3)), FLOAT, "eng20"),
    "filter gradient, unequal padding": (lambda graph: filter_gradient(graph, (1, 1), (1, 0)), FLOAT, "eng20"),
}


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", WRONG)
def test_convolutions_keep_off_engines_that_go_wrong(name: str, h200: Any) -> None:
    build, io, engine = WRONG[name]
    graph = planned_graph(h200, io)
    build(graph).set_output(True)
    graph.validate()
    assert [*known_faults.faulty_engines(graph.nodes, known_faults.SEEN_IN)] == [known_faults.Engines(name=engine)]
    assert not [*known_faults.faulty_engines(graph.nodes, NEWER)]
    names = [graph.get_plan_name_at_index(i) for i in range(configurations(graph))]
    denied = [index for index, name in enumerate(names) if f"{name}_".startswith(f"{engine}_")]
    if library.version() > known_faults.SEEN_IN:
        return
    assert denied
    for index in denied:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"{engine}.* computes such graphs wrongly"):
            graph.build_plan_at_index(index)
    graph.build_plans()  # another engine is left
    assert graph.get_plan_name() not in [names[index] for index in denied]


RIGHT: dict[str, Build] = {
    "strided data gradient, three operations": lambda graph: data_gradient(graph, 2, 3),
    "data gradient, four operations": lambda graph: data_gradient(graph, 1, 4),
    "32 channels out": lambda graph: graph.relu(response(graph, 32)),
    "filter gradient, two dimensions": lambda graph: filter_gradient(graph, (1, 1), (0, 0)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_convolutions_that_came_out_right_keep_all_engines(name: str) -> None:
    assert not [*known_faults.faulty_engines(described(RIGHT[name]), known_faults.SEEN_IN)]


def test_an_engine_is_not_mistaken_for_another() -> None:
    class Config:
        def __init__(self, tag: str) -> None:
            self.tag = tag

    engine = known_faults.Engines(name="eng1")
    denied = [
        tag for tag in ("eng1", "eng1_k24=8", "eng10", "eng10_k2=1") if engine.denial_reason(cast("Any", Config(tag)))
    ]
    assert denied == ["eng1", "eng1_k24=8"]


def test_the_log_names_the_engines(caplog: pytest.LogCaptureFixture, h200: Any) -> None:
    graph = planned_graph(h200)
    linear(graph, negative_slope=0.1)
    graph.validate()
    with caplog.at_level(logging.INFO, "cudnn"):
        graph.build_operation_graph()
    assert "engines with the note CUBLASLT_DEPENDENCY left out: they compute it wrongly" in caplog.text
    assert str(known_faults.Engines(name="eng20")) == "engines eng20"
