"""Grouped GEMMs of experts: values against a loop over tokens, shape inference, refusals, plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.backend import library
from cudnn.pygraph.known_faults import SEEN_IN
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, evaluate, planned_graph, reference_graph, run
from support.refusals import check_refused

MODE = cudnn.moe_grouped_matmul_mode
INT8, INT32, E4M3 = cudnn.data_type.INT8, cudnn.data_type.INT32, cudnn.data_type.FP8_E4M3


class Routing:
    """Tokens that choose ``top_k`` experts each, and rows sorted by expert, as a mixture of experts makes them."""

    def __init__(self, tokens: int, experts: int, top_k: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        pairs = sorted((int(chosen[token, k]), token, k) for token in range(tokens) for k in range(top_k))
        self.experts = [expert for expert, _, _ in pairs]  # of each row
        self.tokens = [token for _, token, _ in pairs]
        self.ks = [k for _, _, k in pairs]
        self.first = [sum(expert < e for expert in self.experts) for e in range(experts)]

    @staticmethod
    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).view(1, -1, 1)


def weights(experts: int, k: int, n: int) -> torch.Tensor:
    """``[experts, K, N]`` with K fastest."""
    return torch.randn(experts, n, k).transpose(1, 2)


@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(1, 7),
    experts=st.integers(1, 5),
    data=st.data(),
    seed=st.integers(0, 2**31),
    mode=st.sampled_from(list(MODE)),
)
def test_forward(tokens: int, experts: int, data: st.DataObject, seed: int, mode: Any) -> None:
    top_k = data.draw(st.integers(1, experts))
    routing = Routing(tokens, experts, top_k, seed)
    rows = tokens * top_k
    x, w = torch.randn(1, tokens if mode is MODE.GATHER else rows, 6), weights(experts, 6, 4)
    expected = torch.zeros(1, rows, 4)
    for row, expert in enumerate(routing.experts):
        source = routing.tokens[row] if mode is MODE.GATHER else row
        target = routing.tokens[row] * top_k + routing.ks[row] if mode is MODE.SCATTER else row
        for column in range(4):
            expected[0, target, column] = (x[0, source] * w[expert, :, column]).sum()

    values = {"token": x, "weight": w, "first_token_offset": routing.column(routing.first).view(-1, 1, 1)}
    options: dict[str, Any] = {"mode": mode}
    if mode is not MODE.NONE:
        values["token_index"] = routing.column(routing.tokens)
    if mode is MODE.SCATTER:
        values["token_ks"], options["top_k"] = routing.column(routing.ks), top_k
    _, (result,) = evaluate("moe_grouped_matmul", **values, **options)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    assert result.stride() == (rows * 4, 4, 1)


@settings(max_examples=15, deadline=None)
@given(tokens=st.integers(1, 9), experts=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_backward_is_the_gradient(tokens: int, experts: int, seed: int) -> None:
    routing = Routing(tokens, experts, 1, seed)
    x, dy, w = torch.randn(1, tokens, 6), torch.randn(1, tokens, 4), weights(experts, 6, 4).requires_grad_()
    rows = [x[0, row] @ w[expert] for row, expert in enumerate(routing.experts)]
    (expected,) = torch.autograd.grad(torch.stack(rows), w, dy[0])
    _, (result,) = evaluate("moe_grouped_matmul_bwd", dy, x, routing.column(routing.first).view(-1, 1, 1))
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5, check_stride=False)
    assert result.stride() == (24, 1, 6)


def test_the_wrapper_takes_arrays() -> None:
    routing = Routing(6, 3, 1, 0)
    x, w, first = torch.randn(1, 6, 8), weights(3, 8, 4), routing.column(routing.first).view(-1, 1, 1)
    with cudnn.Graph() as graph:
        graph.moe_grouped_matmul(x, w, first).set_output(True)
    rows = [x[0, row] @ w[expert] for row, expert in enumerate(routing.experts)]
    torch.testing.assert_close(graph(x, w, first)[0], torch.stack(rows))


def test_offsets_that_do_not_rise_are_refused() -> None:
    for first, words in (([0, 5, 3], "rising values from 0 to 4"), ([0, 1, -1], "rising")):
        graph = reference_graph()
        tensors = [graph.tensor(dims, [1, 1, 1], dtype) for dims, dtype in (([1, 4, 1], FLOAT), ([3, 1, 1], FLOAT))]
        offsets = graph.tensor([3, 1, 1], [1, 1, 1], INT32)
        y = graph.moe_grouped_matmul(*tensors, offsets).set_output(True)
        data = {
            tensors[0]: torch.ones(1, 4, 1),
            tensors[1]: torch.ones(3, 1, 1),
            offsets: torch.tensor(first, dtype=torch.int32).view(3, 1, 1),
        }
        with pytest.raises(ValueError, match=words):
            run(graph, data, y)


def test_a_batch_of_offsets_is_for_the_gpu() -> None:
    graph = reference_graph()
    x, w, first = graph.tensor([1, 4, 1], [4, 1, 1]), graph.tensor([2, 1, 1], [1, 1, 1]), offsets(graph, 4)
    y = graph.moe_grouped_matmul(x, w, first).set_output(True)
    data = {x: torch.ones(1, 4, 1), w: torch.ones(2, 1, 1), first: torch.zeros(4, 1, 1, dtype=torch.int32)}
    with pytest.raises(NotImplementedError, match="4 offsets for 2 experts"):
        run(graph, data, y)


def offsets(graph: cudnn.pygraph, experts: int = 4) -> cudnn.tensor:
    return graph.tensor([experts, 1, 1], [1, 1, 1], INT32)


def rows(graph: cudnn.pygraph, count: int, width: int, dtype: object = FLOAT) -> cudnn.tensor:
    return graph.tensor([1, count, width], [count * width, width, 1], dtype)


def experts(graph: cudnn.pygraph, k: int, n: int, dtype: object = FLOAT) -> cudnn.tensor:
    return graph.tensor([4, k, n], [k * n, 1, k], dtype)


def indices(graph: cudnn.pygraph, count: int) -> cudnn.tensor:
    return rows(graph, count, 1, INT32)


def forward(graph: cudnn.pygraph, dtype: object = HALF, **options: Any) -> cudnn.tensor:
    token, weight = rows(graph, options.pop("rows", 512), 256, dtype), experts(graph, 256, 128, dtype)
    return graph.moe_grouped_matmul(token, weight, offsets(graph), **options).set_output(True)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda g: forward(g, FLOAT, mode=MODE.GATHER), ["token_index: got nothing", "mode GATHER"]),
        (lambda g: forward(g, FLOAT, top_k=2, token_index=indices(g, 512)), ["token_index: got a value", "mode NONE"]),
        (
            lambda g: forward(g, FLOAT, mode=MODE.SCATTER, token_index=indices(g, 512), token_ks=indices(g, 512)),
            ["top_k: got nothing"],
        ),
        (lambda g: forward(g, FLOAT, mode=1), ["mode: got 1", "SCATTER"]),
        (
            lambda g: forward(
                g, FLOAT, mode=MODE.SCATTER, token_index=indices(g, 9), token_ks=indices(g, 512), top_k=2
            ),
            ["input TOKEN_INDEX", "dim=[1, 512, 1]"],
        ),
        (lambda g: g.moe_grouped_matmul(rows(g, 8, 6), experts(g, 5, 4), offsets(g)), ["WEIGHT", "[experts, 6, N]"]),
        (lambda g: g.moe_grouped_matmul(rows(g, 8, 5), experts(g, 5, 4), offsets(g, 3)), ["one offset for each"]),
        (lambda g: g.moe_grouped_matmul(rows(g, 8, 5), experts(g, 5, 4), rows(g, 4, 1)), ["dim=[experts, 1, 1]"]),
        (lambda g: g.moe_grouped_matmul(experts(g, 8, 5), experts(g, 5, 4), offsets(g)), ["dim=[1, tokens, hidden]"]),
        (
            lambda g: g.moe_grouped_matmul(rows(g, 8, 5), experts(g, 5, 4), g.tensor([4, 1, 1], [1, 1, 1], HALF)),
            ["HALF", "INT32"],
        ),
        (
            lambda g: g.moe_grouped_matmul(rows(g, 8, 5), experts(g, 5, 4), offsets(g)).set_dim([1, 8, 5]),
            ["output OUTPUT", "dim=[1, 8, 4]"],
        ),
        (lambda g: g.moe_grouped_matmul(rows(g, 8, 5), g.tensor([5, 4], [4, 1]), offsets(g)), ["rank"]),
        (lambda g: g.moe_grouped_matmul_bwd(rows(g, 7, 4), rows(g, 8, 5), offsets(g)), ["DOUTPUT", "dim=[1, 8, N]"]),
        (
            lambda g: g.moe_grouped_matmul_bwd(rows(g, 8, 4), rows(g, 8, 5), offsets(g)).set_dim([4, 4, 5]),
            ["DWEIGHT", "dim=[4, 5, 4]"],
        ),
    ],
)
def test_refusals(build: Callable[..., Any], words: list[str]) -> None:
    check_refused(build, ValueError, ["moe_grouped_matmul", *words])


@pytest.mark.deviceless_919
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT])
def test_cudnn_builds_a_plan(dtype: object, device_properties: Any) -> None:
    graph = planned_graph(device_properties, io=dtype)
    forward(graph, dtype)
    assert configurations(graph) > 0
    graph.build_plans()
    assert graph.get_plan_name()


@pytest.mark.deviceless_919
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT, E4M3])
def test_cudnn_gathers(dtype: object, device_properties: Any) -> None:
    graph = planned_graph(device_properties, io=dtype)
    y = forward(graph, dtype, rows=256, mode=MODE.GATHER, token_index=indices(graph, 512))
    y.set_data_type(HALF if dtype is E4M3 else dtype)
    if library.version() <= SEEN_IN:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="mode: got GATHER"):
            graph.validate()
        return
    assert configurations(graph) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize(("dtype", "compute", "out"), [(E4M3, FLOAT, HALF), (INT8, INT32, INT32)], ids=["fp8", "int8"])
def test_cudnn_takes_eight_bits(dtype: object, compute: object, out: object, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    forward(graph, dtype, compute_data_type=compute).set_data_type(out)
    assert configurations(graph) > 0


@pytest.mark.deviceless_919
def test_cudnn_scatters_in_newer_versions(device_properties: Any, libcudnn: Any) -> None:
    graph = planned_graph(device_properties)
    forward(graph, mode=MODE.SCATTER, token_index=indices(graph, 512), token_ks=indices(graph, 512), top_k=2)
    if libcudnn.version <= 91900:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="MOE_GROUPED_MATMUL_MODE_NONE"):
            configurations(graph)
    else:
        assert configurations(graph) > 0


@pytest.mark.deviceless_919
def test_cudnn_says_what_the_gradient_needs(device_properties: Any, libcudnn: Any) -> None:
    """It runs over a cuBLASLt of CUDA 13; cuDNN for CUDA 12 has none."""
    graph = planned_graph(device_properties)
    doutput, token = rows(graph, 512, 128, HALF), rows(graph, 512, 256, HALF)
    graph.moe_grouped_matmul_bwd(doutput, token, offsets(graph)).set_output(True)
    said = ""
    try:
        configurations(graph)
    except cudnn.cudnnGraphNotSupportedError as error:
        said = str(error)
    if libcudnn.version < 92200:
        assert "needs cuDNN 9.22" in said
    else:
        assert not said or "cuda toolkit < 13.1" in said
