"""Attention: formulas against PyTorch, patterns against formulas, refusals, and plans of real cuDNN without a GPU."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import cudnn
from cudnn.backend import library
from cudnn.backend.enums import DescriptorType
from cudnn.backend.handle import device_capability
from cudnn.pygraph import attention_support
from cudnn.pygraph.attention_forward import AttentionForward
from cudnn.pygraph.attention_scores import ScoreGraph, swapped
from cudnn.pygraph.lowering import Bindings, Lowering
from cudnn.pygraph.tensor import Tensor
from support.attention import CASES, Problem, attention, describe, described_backward_data
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, planned_graph, reference_graph

DOUBLE, INT32 = cudnn.data_type.DOUBLE, cudnn.data_type.INT32
AUTO, COMPOSITE, UNIFIED = (cudnn.attention_implementation[name] for name in ("AUTO", "COMPOSITE", "UNIFIED"))
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


def double_graph() -> cudnn.pygraph:
    return reference_graph(DOUBLE, DOUBLE, DOUBLE)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any combination of features that the checks let through."""
    heads, groups = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3]))
    problem = Problem(
        b=draw(st.integers(1, 2)), h_q=heads * groups, h_k=heads, h_v=draw(st.sampled_from([1, heads])),
        s_q=draw(st.integers(1, 12)), s_kv=draw(st.integers(2, 12)), d_qk=8, d_v=draw(st.sampled_from([8, 16])),
        scale=draw(st.sampled_from([None, 0.3])),
    )  # fmt: skip
    padding = draw(st.booleans())
    if padding:
        lengths = st.lists(st.integers(1, 12), min_size=problem.b, max_size=problem.b)
        problem.lengths_q = tuple(min(length, problem.s_q) for length in draw(lengths))
        problem.lengths_kv = tuple(min(length, problem.s_kv) for length in draw(lengths))
    options: dict[str, Any] = {}
    if padding or problem.s_q <= problem.s_kv:
        if draw(st.booleans()):
            options["diagonal_band_left_bound"] = draw(st.integers(1, 6))
        options |= draw(st.sampled_from([{}, {"use_causal_mask_bottom_right": True}]))
    if not options.get("use_causal_mask_bottom_right"):
        options |= draw(st.sampled_from([{}, {"use_causal_mask": True}, {"diagonal_band_right_bound": 2}]))
        problem.bias = draw(
            st.sampled_from([(), (1, 1, problem.s_q, problem.s_kv), (problem.b, problem.h_q, 1, problem.s_kv)])
        )
    problem.options = options
    return problem


def kept(problem: Problem, name: str, x: torch.Tensor) -> torch.Tensor:
    """Without the rows that padding leaves out; the gradient of the bias has none."""
    if name == "dBias":
        return x
    return torch.where(problem.valid()["kv" if name in ("dK", "dV") else "q"], x, 0.0)


# Formulas.
@settings(max_examples=60, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_reference_agrees_with_pytorch(problem: Problem, seed: int) -> None:
    torch.manual_seed(seed)
    data = problem.tensors(torch.float64)
    forward = describe(double_graph(), problem, data).run()
    forward["Stats"] = forward["Stats"].double()
    found = forward | describe(double_graph(), problem, {**data, **forward}).run()
    expected = attention(problem, data, torch.float64)
    for name, value in expected.items():
        tolerance = 2e-5 if name != "O" else 1e-12  # the statistics are FLOAT, and the gradients start from them
        torch.testing.assert_close(
            kept(problem, name, found[name]).double(), kept(problem, name, value), atol=tolerance, rtol=tolerance
        )


@settings(max_examples=30, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_oracle_agrees_with_scaled_dot_product_attention(problem: Problem, seed: int) -> None:
    """PyTorch's own function, which has one mask for everything, and no convention for rows that see nothing."""
    torch.manual_seed(seed)
    data = problem.tensors(torch.float64)
    visible = problem.visible()
    alive = visible.any(-1, keepdim=True)
    mask = torch.zeros(problem.b, problem.h_q, problem.s_q, problem.s_kv, dtype=torch.float64)
    mask = mask.masked_fill(~visible & alive, float("-inf")) + data.get("bias", torch.zeros(()))
    leaves = [data[name].clone().requires_grad_() for name in "qkv"]
    k, v = (x.repeat_interleave(problem.h_q // x.shape[1], 1) for x in leaves[1:])
    scale = 1.0 if problem.scale is None else problem.scale
    o = torch.where(alive, functional.scaled_dot_product_attention(leaves[0], k, v, mask, scale=scale), 0.0)
    gradients = torch.autograd.grad(o, leaves, torch.where(problem.valid()["q"], data["dO"], 0.0))
    expected = attention(problem, data, torch.float64)
    for name, value in zip(("O", "dQ", "dK", "dV"), (o, *gradients), strict=True):
        torch.testing.assert_close(expected[name], value, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("version", [91900, 92800])
@pytest.mark.parametrize("name", CASES)
def test_patterns_compute_the_formula(name: str, version: int) -> None:
    """The smaller operations that cuDNN is given, run one by one: what they mean does not depend on cuDNN's version."""
    shrink = {"s_q": CASES[name].s_q // 8, "s_kv": CASES[name].s_kv // 8}
    problem = dataclasses.replace(
        CASES[name], **shrink, d_qk=8, d_v=16,
        bias=tuple(extent if extent < 8 else extent // 8 for extent in CASES[name].bias),
        lengths_q=tuple(length // 8 for length in CASES[name].lengths_q),
        lengths_kv=tuple(length // 8 for length in CASES[name].lengths_kv),
    )  # fmt: skip
    data = problem.tensors(torch.float32)
    exact = attention(problem, data, torch.float64)
    forward = describe(reference_graph(), problem, data)
    forward.graph.validate()
    (node,) = forward.graph.nodes
    graph = ScoreGraph(node, forward.graph.context, version)
    key = swapped(node.inputs["K"])
    node.compose(graph, key, {"Stats": node.outputs["Stats"]})
    values = dict(forward.inputs)
    values[key] = data["k"].transpose(2, 3)
    evaluate(graph, values)
    found = {port: values[tensor] for port, tensor in node.outputs.items()}

    given = {**data, "O": exact["O"].float(), "Stats": exact["Stats"].float().nan_to_num(neginf=0.0)}
    backward = describe(reference_graph(), problem, given)
    backward.graph.validate()
    (node,) = backward.graph.nodes
    graph = ScoreGraph(node, backward.graph.context, version)
    key, value = swapped(node.inputs["K"]), swapped(node.inputs["V"])
    sums, accumulator = (Tensor([*node.score_dim[:3], size], [1] * 4, FLOAT) for size in (1, problem.d_qk))
    node.compose(graph, key, value, sums, None if "dBias" in node.outputs else accumulator)
    values = dict(backward.inputs)
    values |= {key: data["k"].transpose(2, 3), value: data["v"].transpose(2, 3)}
    evaluate(graph, values)
    found |= {port: values[tensor] for port, tensor in node.outputs.items()}
    for port, result in found.items():
        live = torch.where(torch.isinf(exact[port]), 0.0, exact[port])
        got = kept(problem, port, torch.where(torch.isinf(exact[port]), 0.0, result)).double()
        torch.testing.assert_close(got, kept(problem, port, live), atol=1e-4, rtol=1e-4)


def evaluate(graph: ScoreGraph, values: dict[Tensor, torch.Tensor]) -> None:
    for node in graph.nodes:
        node.prepare(graph.context)
        arguments = {
            port: torch.full(tensor.dim, tensor.value) if tensor.value is not None else values[tensor]
            for port, tensor in node.inputs.items()
        }
        results = node.evaluate(arguments)
        for port, tensor in node.outputs.items():
            assert list(results[port].shape) == tensor.dim, node.where
            values[tensor] = results[port]


# Inference and arguments.
def small(graph: cudnn.pygraph, s_q: int = 64, s_kv: int = 64, d: int = 64, kind: Any = HALF) -> list[cudnn.tensor]:
    """q, k, v with batch and sequence before heads in memory."""
    shapes = [[2, 4, s_q, d], [2, 2, s_kv, d], [2, 2, s_kv, d]]
    return [graph.tensor(dim, [dim[1] * dim[2] * d, d, dim[1] * d, 1], kind) for dim in shapes]


def checked(graph: cudnn.pygraph | None = None, **options: Any) -> list[Any]:
    """Validates a small forward graph."""
    shape = {name: options.pop(name) for name in ("s_q", "s_kv", "d", "kind") if name in options}
    graph = graph or reference_graph(HALF)
    results = graph.sdpa(*small(graph, **shape), name="attention", **options)
    for result in results:
        if result is not None:
            result.set_output(True)
    graph.validate()
    return results


def test_outputs_by_default() -> None:
    o, stats = checked(generate_stats=True)
    assert (o.get_name(), o.get_dim(), o.get_stride()) == ("attention::O", [2, 4, 64, 64], [16384, 64, 256, 1])
    assert (stats.get_name(), stats.get_dim(), stats.get_stride()) == (
        "attention::Stats",
        [2, 4, 64, 1],
        [256, 64, 1, 1],
    )
    assert (o.get_data_type(), stats.get_data_type()) == (HALF, FLOAT)


def test_gradients_by_default() -> None:
    graph = reference_graph(HALF)
    q, k, v = small(graph)
    o, stats = graph.tensor_like(q), graph.tensor([2, 4, 64, 1], [256, 64, 1, 1], FLOAT)
    gradients = graph.sdpa_backward(q, k, v, o, graph.tensor_like(q), stats, name="attention")
    for gradient in gradients:
        gradient.set_output(True)
    graph.validate()
    assert [gradient.get_name() for gradient in gradients] == ["attention::dQ", "attention::dK", "attention::dV"]
    for gradient, like in zip(gradients, (q, k, v), strict=True):
        assert (gradient.get_dim(), gradient.get_stride()) == (like.get_dim(), like.get_stride())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False), ({"is_inference": True}, False), ({"is_inference": False}, True), ({"generate_stats": True}, True),
        ({"generate_stats": False}, False), ({"is_inference": True, "generate_stats": False}, False),
    ],
)  # fmt: skip
def test_statistics_when_asked_for(options: dict[str, bool], expected: bool) -> None:
    assert (checked(**options)[1] is not None) is expected


def test_other_spellings() -> None:
    graph = reference_graph(HALF)
    q, k, v = small(graph)
    bias = graph.tensor([1, 1, 64, 64], [4096, 4096, 64, 1])
    graph.scaled_dot_product_flash_attention(
        q, k, v, attn_bias=bias, dropout=0.0, dropout_seed=1, dropout_offset=0, sliding_window_length=3, attn_scale=1
    )
    (node,) = graph.nodes
    assert isinstance(node, AttentionForward)
    assert (node.inputs["Bias"], node.left_bound, node.attn_scale) == (bias, 3, 1.0)


def test_description_round_trip() -> None:
    graph = reference_graph(HALF)
    checked(graph, use_causal_mask_bottom_right=True, sliding_window_length=9, attn_scale=0.5, implementation=COMPOSITE)
    restored = reference_graph()
    restored.deserialize(repr(graph))
    assert repr(restored) == repr(graph)
    assert '"right_bound": 0' in repr(graph)


# Refusals.
LENGTHS = {"use_padding_mask": True}
CONTRADICTIONS = {
    "both causal masks": (
        {"use_causal_mask": True, "use_causal_mask_bottom_right": True}, RuntimeError, "bottom_right"
    ),
    "causal and right bound": (
        {"use_causal_mask": True, "diagonal_band_right_bound": 3}, RuntimeError, "right bound of 0"
    ),
    "window twice": (
        {"sliding_window_length": 3, "diagonal_band_left_bound": 3}, RuntimeError, "sliding_window_length"
    ),
    "statistics and inference": ({"is_inference": True, "generate_stats": True}, RuntimeError, "is_inference"),
    "statistics no bool": ({"generate_stats": 1}, RuntimeError, "generate_stats"),
    "scale of text": ({"attn_scale": "0.1"}, TypeError, "attn_scale"),
    "bound no int": ({"diagonal_band_right_bound": 1.5}, TypeError, "diagonal_band_right_bound"),
    "lengths missing": (LENGTHS, ValueError, "seq_len_q and seq_len_kv"),
    "negative right bound": ({"diagonal_band_right_bound": -1}, RuntimeError, "diagonal_band_right_bound: got -1"),
    "window over more rows than columns": ({"s_q": 128, "sliding_window_length": 9}, NOT_SUPPORTED, "left_bound"),
    "bottom right over more rows than columns": (
        {"s_q": 128, "use_causal_mask_bottom_right": True}, NOT_SUPPORTED, "s_q=128"
    ),
    "head size": ({"d": 20}, NOT_SUPPORTED, "head size: got d_qk=20"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_refuses(name: str) -> None:
    options, error, text = CONTRADICTIONS[name]
    with pytest.raises(error, match=text):
        checked(**options)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: t["q"].set_dim([2, 64, 64]).set_stride([4096, 64, 1]), ValueError, "input Q .* rank 3"),
        (lambda t: t["k"].set_dim([3, 2, 64, 64]), ValueError, r"Q, K and V: got dim=\[2, 4, 64, 64\]"),
        (lambda t: t["k"].set_dim([2, 2, 64, 32]), ValueError, "Q, K and V"),
        (lambda t: t["v"].set_dim([2, 2, 32, 64]), ValueError, "Q, K and V"),
        (lambda t: t["k"].set_dim([2, 3, 64, 64]), NOT_SUPPORTED, "heads: got 4 of Q, 3 of K"),
        (lambda t: t["q"].set_stride([16384, 4096, 1, 64]), NOT_SUPPORTED, "Q .* last stride of 1"),
        (lambda t: t["o"].set_dim([2, 4, 64, 32]), ValueError, r"O .*allowed: dim=\[2, 4, 64, 64\]"),
        (lambda t: t["bias"].set_dim([1, 3, 64, 64]), ValueError, "Bias .* broadcasts"),
        (lambda t: t["bias"].set_data_type(cudnn.data_type.BOOLEAN), NOT_SUPPORTED, "bias: got BOOLEAN"),
        (lambda t: t["seq_len_q"].set_dim([1, 1, 1, 1]), ValueError, "Seq_len_q"),
        (lambda t: t["seq_len_kv"].set_data_type(FLOAT), ValueError, "Seq_len_kv .* INT32"),
        (lambda t: t["stats"].set_dim([2, 4, 64, 2]), ValueError, "Stats"),
    ],
)
def test_refuses_tensors(change: Any, error: type[Exception], text: str) -> None:
    graph = reference_graph(HALF)
    tensors = dict(zip("qkv", small(graph), strict=True))
    tensors["bias"] = graph.tensor([1, 1, 64, 64], [4096, 4096, 64, 1])
    tensors |= {name: graph.tensor([2, 1, 1, 1], [1] * 4, INT32) for name in ("seq_len_q", "seq_len_kv")}
    o, stats = graph.sdpa(**tensors, use_padding_mask=True, generate_stats=True)
    change({**tensors, "o": o.set_output(True), "stats": stats.set_output(True)})
    with pytest.raises(error, match=text):
        graph.validate()


def test_lengths_need_the_padding_mask() -> None:
    graph = reference_graph(HALF)
    lengths = [graph.tensor([2, 1, 1, 1], [1] * 4, INT32) for _ in range(2)]
    with pytest.raises(ValueError, match="use_padding_mask=True"):
        checked(graph, seq_len_q=lengths[0], seq_len_kv=lengths[1])


def test_bias_not_with_bottom_right() -> None:
    graph = reference_graph(HALF)
    with pytest.raises(NOT_SUPPORTED, match="with bias"):
        checked(graph, bias=graph.tensor([1, 1, 64, 64], [4096, 4096, 64, 1]), use_causal_mask_bottom_right=True)


def test_needs_an_intermediate_type() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, compute_data_type=FLOAT, backend="reference")
    with pytest.raises(ValueError, match="intermediate_data_type"):
        checked(graph)


def test_refuses_old_devices() -> None:
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=75
    )
    with pytest.raises(NOT_SUPPORTED, match="compute capability 75"):
        checked(graph)


def backward(graph: cudnn.pygraph, d: int = 64, d_v: int | None = None, s: int = 64, **options: Any) -> None:
    problem = Problem(d_qk=d, d_v=d_v or d, s_q=s, s_kv=s, options=options)
    data = described_backward_data(problem, problem.tensors(torch.float16, "meta"))
    describe(graph, problem, data).graph.validate()


@pytest.mark.parametrize(
    ("sm", "sizes", "refused"),
    [
        (90, {"d": 256}, False), (90, {"d": 264}, True), (90, {"d": 36}, True), (100, {"d": 136}, True),
        (100, {"d": 192, "d_v": 128}, False), (100, {"d": 192}, True), (80, {"d": 128}, False), (80, {"d": 136}, True),
        (None, {"d": 264}, False),
    ],
)  # fmt: skip
def test_head_sizes_of_the_backward_pass(sm: int | None, sizes: dict[str, int], refused: bool) -> None:
    graph = cudnn.pygraph(
        io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, backend="reference", sm_version=sm
    )
    if refused:
        with pytest.raises(NOT_SUPPORTED, match=f"head size on compute capability {sm}"):
            backward(graph, **sizes)
    else:
        backward(graph, **sizes)


def test_backward_pass_refuses_an_empty_window_and_a_single_score() -> None:
    with pytest.raises(RuntimeError, match="diagonal_band_left_bound: got 0"):
        backward(reference_graph(HALF), diagonal_band_left_bound=0)
    with pytest.raises(NOT_SUPPORTED, match="s_q=1, s_kv=1"):
        backward(reference_graph(HALF), s=1)


@pytest.mark.parametrize(("version", "options", "text"), [
    (91000, {}, "9.10.0 or 9.10.1"), (91001, {}, "9.10.0 or 9.10.1"),
    (91400, {"sliding_window_length": 9, "s_kv": 2048}, "9.14.0"),
    (91300, {"implementation": UNIFIED}, r"the operation itself needs cuDNN 9.13.1, this is 9.13.0"),
    (92000, {"implementation": UNIFIED, "use_causal_mask": True}, "causal or sliding-window mask needs cuDNN 9.21.0"),
])  # fmt: skip
def test_refuses_versions(version: int, options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_support, "loaded_version", lambda: version)
    with pytest.raises(NOT_SUPPORTED, match=text):
        checked(**options)


def test_unified_computes_in_float_only() -> None:
    with pytest.raises(NOT_SUPPORTED, match=r"UNIFIED, but .*FLOAT only"):
        checked(reference_graph(HALF, compute=HALF), implementation=UNIFIED)


# Plans of real cuDNN.
def build(graph: cudnn.pygraph, problem: Problem, is_backward: bool = False, **options: Any) -> cudnn.pygraph:
    data = problem.tensors(torch.float16, "meta")
    if is_backward:
        data = described_backward_data(problem, data)
    graph = describe(graph, problem, data, **options).graph
    assert configurations(graph) > 0
    return graph


@pytest.mark.deviceless_919
@pytest.mark.parametrize("stats", [True, False])
@pytest.mark.parametrize("implementation", [AUTO, COMPOSITE])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_has_engines_forward(name: str, implementation: Any, stats: bool, device_properties: Any) -> None:
    build(planned_graph(device_properties), CASES[name], implementation=implementation, stats=stats)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", [name for name, problem in CASES.items() if problem.h_k == problem.h_v])
def test_cudnn_has_engines_backward(name: str, device_properties: Any) -> None:
    build(planned_graph(device_properties), CASES[name], is_backward=True)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", ["plain", "causal", "padding, sliding window bottom right"])
@pytest.mark.parametrize("which", ["AUTO", "COMPOSITE", "backward"])
def test_cudnn_builds_a_plan(name: str, which: str, device_properties: Any) -> None:
    options = (
        {"is_backward": True} if which == "backward" else {"implementation": cudnn.attention_implementation[which]}
    )
    graph = build(planned_graph(device_properties), CASES[name], **options)
    here = device_capability(0)
    if here is not None and graph.context.sm_version != 10 * here[0] + here[1]:
        pytest.skip("a real driver loads no kernels for another device")
    graph.build_plans()
    assert graph.get_workspace_size() >= 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize("kind", [HALF, BFLOAT16])
def test_scale_tensor_and_virtual_statistics(kind: Any, h200: Any) -> None:
    graph = planned_graph(h200, kind)
    q, k, v = small(graph, kind=kind)
    o, _ = graph.sdpa(
        q, k, v, attn_scale=graph.tensor([1] * 4, [1] * 4, FLOAT), generate_stats=True, use_causal_mask=True
    )
    o.set_output(True)
    assert configurations(graph) > 0


def chosen(graph: cudnn.pygraph, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """The implementation that the log names."""
    with caplog.at_level(logging.INFO, "cudnn"):
        checked(graph, **options)
        graph.build_operation_graph()
    lines = [record.getMessage() for record in caplog.records if "implementation" in record.getMessage()]
    return lines[-1].partition("attention (sdpa): ")[2]


def test_auto_is_unified_where_cudnn_is_new_enough(h200: Any, caplog: pytest.LogCaptureFixture) -> None:
    line = chosen(planned_graph(h200), caplog, use_causal_mask=True)
    if library.version() >= 92100:
        assert line.startswith("UNIFIED")
    else:
        assert line.startswith("COMPOSITE implementation: a causal or sliding-window mask needs cuDNN 9.21.0")


def test_auto_is_composite_where_asked_or_not_computing_in_float(h200: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(planned_graph(h200), caplog, implementation=COMPOSITE) == "COMPOSITE implementation: asked for"
    assert "FLOAT only, not in HALF" in chosen(planned_graph(h200, compute=HALF), caplog)


@pytest.mark.parametrize("implementation", [UNIFIED, COMPOSITE])
def test_compute_type_of_the_node_alone(implementation: Any, h200: Any) -> None:
    graph = planned_graph(h200, compute=cudnn.data_type.NOT_SET)
    checked(graph, compute_data_type=FLOAT, attn_scale=0.5, implementation=implementation)
    assert configurations(graph) > 0


def test_auto_falls_back_to_composite_where_no_engine_is_left(h200: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Mode FALLBACK never has an engine for the one operation; for the pattern it has one up to cuDNN 9.20."""
    graph = planned_graph(h200)
    assert chosen(graph, caplog).startswith("UNIFIED")
    with caplog.at_level(logging.INFO, "cudnn"):
        if library.version() < 92100:
            graph.create_execution_plans([cudnn.heur_mode.FALLBACK])
            assert graph.get_execution_plan_count() > 0
        else:
            with pytest.raises(NOT_SUPPORTED, match="no engine configuration"):
                graph.create_execution_plans([cudnn.heur_mode.FALLBACK])
    assert "COMPOSITE implementation: cuDNN has no engine for the UNIFIED one" in caplog.text


def test_user_tensors_stay_as_they_are(h200: Any) -> None:
    graph = planned_graph(h200)
    q, k, _ = small(graph)
    graph.sdpa(q, k, k, implementation=COMPOSITE)[0].set_output(True)
    assert configurations(graph) > 0
    assert (k.get_dim(), k.get_stride()) == ([2, 2, 64, 64], [8192, 64, 128, 1])


def lowered(graph: cudnn.pygraph, version: int) -> Lowering:
    lowering = Lowering(graph.context, graph.nodes, version)
    lowering.run(graph.nodes)
    return lowering


def test_backward_pass_masks_incomplete_tiles_up_to_9_15_0(h200: Any) -> None:
    """The engines of those versions read past the last key; lengths in the workspace mask it."""
    words: dict[int, list[Any]] = {}
    for version in (91500, 91501):
        graph = planned_graph(h200)
        backward(graph, s=200)
        words[version] = [item.initial for item in lowered(graph, version).bindings.scratch if item.initial]
    assert words == {91500: [[200, 200], [200, 200]], 91501: []}


def test_old_cudnn_gets_no_new_operations(h200: Any) -> None:
    graph = planned_graph(h200)
    checked(graph, use_causal_mask=True, generate_stats=True)
    kinds = {made.kind for made in lowered(graph, 91900).operations}
    assert kinds == {
        DescriptorType.OPERATION_MATMUL, DescriptorType.OPERATION_POINTWISE, DescriptorType.OPERATION_REDUCTION
    }  # fmt: skip


def test_scratch_is_aligned_and_precedes_the_plan(h200: Any) -> None:
    graph = planned_graph(h200)
    backward(graph, s=131)
    bindings = lowered(graph, library.version()).bindings
    assert [item.offset % 256 for item in bindings.scratch] == [0, 0]
    sizes = [4 * 2 * 4 * 131 * size for size in (64, 1)]
    assert bindings.workspace_size == sum(-(-size // 256) * 256 for size in sizes)


def test_statistics_in_bfloat16_are_written_to_the_workspace_first(h200: Any) -> None:
    graph = planned_graph(h200)
    o, stats = graph.sdpa(*small(graph), generate_stats=True, use_causal_mask=True)
    o.set_output(True)
    stats.set_output(True).set_data_type(BFLOAT16)
    configurations(graph)
    bindings = lowered(graph, library.version()).bindings
    assert bindings.narrowed == {stats.get_uid(): (0, 2 * 4 * 64)}
    assert stats.get_uid() in bindings.user
    assert stats.get_uid() in bindings.hidden
    assert bindings.workspace_size == 4 * 2 * 4 * 64
    assert Bindings.from_json(json.loads(json.dumps(bindings.to_json()))) == bindings


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda q, k, o, stats: k.set_data_type(BFLOAT16), "data type of K: got BFLOAT16 beside HALF"),
        (lambda q, k, o, stats: o.set_data_type(FLOAT), "data type of O: got FLOAT beside HALF"),
        (lambda q, k, o, stats: q.set_data_type(FLOAT), "data type of Q: got FLOAT"),
        (lambda q, k, o, stats: stats.set_data_type(HALF), "data type of Stats: got HALF"),
    ],
)
def test_refuses_types_that_cudnn_would_mistake(change: Any, text: str, h200: Any) -> None:
    graph = planned_graph(h200)
    q, k, v = small(graph)
    o, stats = graph.sdpa(q, k, v, generate_stats=True)
    change(q, k, o.set_output(True), stats.set_output(True))
    graph.validate()
    with pytest.raises(NOT_SUPPORTED, match=text):
        graph.build_operation_graph()


@pytest.mark.parametrize("implementation", [UNIFIED, COMPOSITE])
def test_one_tensor_in_three_roles_has_three_uids(implementation: cudnn.attention_implementation, h200: Any) -> None:
    graph = planned_graph(h200)
    q = graph.tensor([2, 4, 64, 64], [4 * 64 * 64, 64 * 64, 64, 1])
    o, _ = graph.sdpa(q, q, q, is_inference=True, implementation=implementation)
    o.set_output(True)
    graph.build([cudnn.heur_mode.A])
    bindings = graph._program.bindings
    assert [alias.source for alias in bindings.aliases.values()] == [q.uid] * len(bindings.aliases)
    assert len(bindings.aliases) == 2  # of K and V; a uid that the plan does not know would be refused at execution
    assert sorted({*bindings.user, *bindings.aliases}) == sorted([*bindings.user, *bindings.aliases])
    assert set(bindings.user) == {q.uid, o.uid}  # the caller still hands over one tensor
