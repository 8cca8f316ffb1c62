"""Attention on real cuDNN without a GPU: engines, plans, the implementation chosen, what a plan is bound to."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.backend.enums import DescriptorType
from cudnn.backend.handle import device_capability
from cudnn.pygraph.attention.scores import ScoreGraph
from cudnn.pygraph.lowering import Bindings, Lowering
from support.attention import BACKWARD_CASES, CASES, Problem, backward_data, checked, checked_backward, describe, small
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, planned_graph
from support.pages import ROOT, Page

AUTO, COMPOSITE, UNIFIED = (cudnn.attention_implementation[name] for name in ("AUTO", "COMPOSITE", "UNIFIED"))
NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


def build(graph: cudnn.pygraph, problem: Problem, is_backward: bool = False, **options: Any) -> cudnn.pygraph:
    data = problem.tensors(torch.float16, "meta")
    if is_backward:
        data = backward_data(problem, data)
    graph = describe(graph, problem, data, **options).graph
    assert configurations(graph) > 0
    return graph


@pytest.mark.deviceless_919
@pytest.mark.parametrize(("implementation", "stats"), [(AUTO, True), (AUTO, False), (COMPOSITE, True)])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_has_engines_forward(name: str, implementation: Any, stats: bool, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    if CASES[name].statistics and stats and library.version() < 92100:
        with pytest.raises(NOT_SUPPORTED, match="score_max and score_sum_exp"):
            build(graph, CASES[name], implementation=implementation, stats=stats)
    else:
        build(graph, CASES[name], implementation=implementation, stats=stats)


@pytest.mark.deviceless_919
@pytest.mark.usefixtures("libcudnn")
@pytest.mark.parametrize(("device", "deterministic"), [("h200", False), ("h200", True), ("b200", False)])
@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_cudnn_has_engines_backward(
    name: str, device: str, deterministic: bool, request: pytest.FixtureRequest
) -> None:
    problem, graph = CASES[name], planned_graph(request.getfixturevalue(device))
    reason = "ignores the inverse of its scale" if problem.own_mask and library.version() <= 91900 else ""
    if device == "b200" and problem.dropout and problem.bias:
        reason = "no engine configuration"
    with pytest.raises(NOT_SUPPORTED, match=reason) if reason else contextlib.nullcontext():
        build(graph, problem, is_backward=True, use_deterministic_algorithm=deterministic)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", ["ragged", "ragged, causal"])
def test_bounds_on_all_tokens_shrink_the_workspace(name: str, h200: Any) -> None:
    sizes: list[int] = []
    for tokens in ({}, {"max_total_seq_len_q": 256, "max_total_seq_len_kv": 256}):
        graph = build(planned_graph(h200), CASES[name], is_backward=True, **tokens)
        sizes.append(lowered(graph, library.version()).bindings.workspace_size)
    heads, length, size = 4, 192, 64
    assert sizes == [2 * heads * length * (size + 1) * 4, 256 * heads * (size + 1) * 4]


@pytest.mark.parametrize(
    ("version", "sm", "size", "bounded"),
    [
        (92800, 90, 64, True),
        (92800, 90, 72, False),
        (91800, 86, 64, True),
        (91801, 86, 64, False),
        (91801, 120, 64, False),
    ],
)
def test_bounds_on_all_tokens_where_engines_know_them(
    version: int, sm: int, size: int, bounded: bool, h200: Any
) -> None:
    problem = dataclasses.replace(CASES["ragged"], d_qk=size, d_v=size)
    data = backward_data(problem, problem.tensors(torch.float16, "meta"))
    graph = describe(planned_graph(h200), problem, data, max_total_seq_len_q=256).graph
    graph.validate()
    lowering = Lowering(dataclasses.replace(graph.context, sm_version=sm), graph.nodes, version)
    lowering.run(graph.nodes)
    assert (lowering.bindings.workspace_size < 2 * 4 * 192 * size * 4) is bounded


@pytest.mark.deviceless_919
@pytest.mark.parametrize("page", [0, 128])
def test_block_mask_on_blackwell_only(page: int, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    lengths = ((300, 200), (1300, 40)) if page else ((), ())
    problem = Problem(s_q=300, s_kv=1300, blocks=True, page=page, lengths_q=lengths[0], lengths_kv=lengths[1])
    if graph.context.sm_version == 90:
        with pytest.raises(NOT_SUPPORTED, match="Block mask is only supported on Blackwell"):
            build(graph, problem)
    else:
        build(graph, problem)


@pytest.mark.deviceless_919
@pytest.mark.usefixtures("libcudnn")
@pytest.mark.parametrize(
    ("device", "name", "which"),
    [
        ("h200", "plain", "AUTO"),
        ("h200", "causal", "AUTO"),
        ("h200", "causal", "backward"),
        ("h200", "ragged, causal", "COMPOSITE"),
        ("h200", "paged, packed tables", "AUTO"),
        ("h200", "dropout, padding, bias", "backward"),
        ("h200", "softcap", "AUTO"),
        ("h200", "softcap", "backward"),
        ("h200", "sink, padding", "backward"),
        ("h200", "padding, sliding window bottom right", "backward"),
        ("b200", "causal", "AUTO"),
        ("b200", "plain", "COMPOSITE"),
        ("b200", "causal", "backward"),
    ],
)
def test_cudnn_builds_a_plan(device: str, name: str, which: str, request: pytest.FixtureRequest) -> None:
    graph = planned_graph(request.getfixturevalue(device))
    if which == "backward":
        plan(build(graph, CASES[name], is_backward=True))
    else:
        plan(build(graph, CASES[name], implementation=cudnn.attention_implementation[which]))


def plan(graph: cudnn.pygraph) -> None:
    here = device_capability(0)
    if here is not None and graph.context.sm_version != 10 * here[0] + here[1]:
        pytest.skip("a real driver loads no kernels for another device")
    graph.build_plans()
    assert graph.get_workspace_size() >= 0
    assert graph.get_plan_name() in json.loads(bytes(graph.serialize()))["tag"]


@pytest.mark.deviceless_919
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16])
def test_scale_tensor_and_virtual_statistics(dtype: Any, h200: Any) -> None:
    graph = planned_graph(h200, dtype)
    q, k, v = small(graph, kind=dtype)
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


@pytest.mark.deviceless_919
def test_auto_is_unified_where_cudnn_is_new_enough(h200: Any, caplog: pytest.LogCaptureFixture) -> None:
    line = chosen(planned_graph(h200), caplog, use_causal_mask=True)
    if library.version() >= 92100:
        assert line.startswith("UNIFIED")
    else:  # as docs/attention.md shows it
        shown = Page.read(ROOT / "docs" / "attention.md")
        (expected,) = [block.text.strip() for block in shown.blocks if block.is_output]
        assert f"attention (sdpa): {line}".replace(library.version_string(), "9.19.0") == expected


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


def test_unfused_multiplication_and_addition(h200: Any, caplog: pytest.LogCaptureFixture) -> None:
    line = chosen(planned_graph(h200), caplog, unfuse_fma=True, implementation=COMPOSITE)
    assert line == "COMPOSITE implementation: asked for; unfuse_fma has no effect on it"
    graph = planned_graph(h200)
    assert chosen(graph, caplog, unfuse_fma=True).startswith("UNIFIED")
    assert configurations(graph) > 0


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
        checked_backward(graph, s=200)
        words[version] = [item.initial for item in lowered(graph, version).bindings.scratch if item.initial]
    assert words == {91500: [[200, 200], [200, 200]], 91501: []}


def test_old_cudnn_gets_no_new_operations(h200: Any) -> None:
    graph = planned_graph(h200)
    checked(graph, use_causal_mask=True, generate_stats=True)
    types = {operation.kind for operation in lowered(graph, 91900).operations}
    assert types == {
        DescriptorType.OPERATION_MATMUL,
        DescriptorType.OPERATION_POINTWISE,
        DescriptorType.OPERATION_REDUCTION,
    }


def test_scratch_is_aligned_and_precedes_the_plan(h200: Any) -> None:
    graph = planned_graph(h200)
    checked_backward(graph, s=131)
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
        (lambda q, k, o, stats: k.set_data_type(BFLOAT16), "data type of K: got BFLOAT16 with HALF"),
        (lambda q, k, o, stats: o.set_data_type(FLOAT), "data type of O: got FLOAT with HALF"),
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
    assert set(bindings.user) == {q.uid, o.uid}  # the caller still passes one tensor


@pytest.mark.deviceless_919
def test_a_score_modifier_makes_its_own_constants(h200: Any) -> None:
    """On the graph that it is handed, which has the methods of ``pygraph`` that make tensors."""
    graph = planned_graph(h200)
    q, k, v = (graph.tensor([2, 4, 64, 64], [16384, 4096, 64, 1]) for _ in range(3))

    whole, dtype = cudnn.data_type.INT32, cudnn.data_type.BOOLEAN

    def modifier(inner: Any, scores: cudnn.tensor) -> cudnn.tensor:
        row = inner.gen_index(scores, 2, compute_data_type=whole).set_data_type(whole)
        keep = inner.cmp_ge(row, inner.tensor_scalar(5), compute_data_type=dtype).set_data_type(dtype)
        return inner.binary_select(inner.mul(scores, inner.tensor_scalar(2.0)), inner.tensor_scalar(-1e9), keep)

    results: list[Any] = graph.sdpa(q, k, v, is_inference=True, score_mod=modifier)
    results[0].set_output(True)
    assert configurations(graph) > 0


@pytest.mark.parametrize(
    ("s_q", "s_kv", "bounded"),
    [(64, 64, True), (128, 192, True), (128, 704, True), (1, 128, True), (128, 128, False), (64, 100, False)],
)
def test_backward_pass_bounds_weights_outside_the_scores(
    s_q: int, s_kv: int, bounded: bool, h200: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to cuDNN 9.19 they overflow where a half tile of keys, or one row, leaves a tile unmasked."""
    bounds: list[float] = []
    at_most = ScoreGraph.at_most

    def counted(graph: ScoreGraph, scores: cudnn.tensor, bound: float) -> cudnn.tensor:
        bounds.append(bound)
        return at_most(graph, scores, bound)

    monkeypatch.setattr(ScoreGraph, "at_most", counted)
    build(planned_graph(h200), dataclasses.replace(CASES["plain"], s_q=s_q, s_kv=s_kv), is_backward=True)
    assert bounds == [0.0] * bounded
