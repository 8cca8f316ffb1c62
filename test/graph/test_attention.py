"""Attention: formulas against PyTorch, patterns against formulas, arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import cudnn
from cudnn.pygraph.attention import support as attention_support
from cudnn.pygraph.attention.backward import AttentionBackward
from cudnn.pygraph.attention.forward import AttentionForward
from cudnn.pygraph.attention.scores import ScoreGraph, swapped
from cudnn.pygraph.tensor import Tensor
from support.attention import (
    BACKWARD_CASES,
    CASES,
    Described,
    Problem,
    attention,
    backward_data,
    checked,
    describe,
    small,
)
from support.dense_attention import slopes
from support.graphs import FLOAT, HALF, MODES, like, reference_graph, run

DOUBLE = cudnn.data_type.DOUBLE
COMPOSITE = cudnn.attention_implementation.COMPOSITE


@pytest.fixture(autouse=True, scope="module")
def _newest() -> Iterator[None]:
    """What some version of cuDNN does not support, the reference executor runs all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_support, "loaded_version", lambda: attention_support.NEWEST)
        yield


def double_graph() -> cudnn.pygraph:
    return reference_graph(DOUBLE, DOUBLE, DOUBLE)


def without_padding(problem: Problem, name: str, x: torch.Tensor) -> torch.Tensor:
    """x with zeros in padded rows; the gradients of bias and sink have none."""
    if name in ("dBias", "dSink"):
        return x
    return torch.where(problem.valid()["kv" if name in ("dK", "dV") else "q"], x, 0.0)


# Formulas.
EMPTY: dict[str, Any] = {"lengths_q": (0, 10), "lengths_kv": (7, 0)}
SOLVED = {
    **CASES,
    "no rows, no keys": Problem(**EMPTY, bias=(1, 4, 1, 192), options={"use_causal_mask": True}),
    "no rows, no keys, ragged": Problem(**EMPTY, ragged=True, sink=True, statistics=True),
    "no keys, paged": Problem(**EMPTY, ragged=True, page=8, packed=True, sink=True, own_mask=True),
    "no keys in reach": Problem(**EMPTY, dropout=0.25, options={"diagonal_band_left_bound": 8}),
}


@pytest.mark.parametrize("name", SOLVED)
def test_reference_agrees_with_pytorch(name: str) -> None:
    """The forward pass and, where K and V are not paged, the backward pass."""
    problem = SOLVED[name]
    problem = dataclasses.replace(shrunk(problem), ragged=problem.ragged, packed=problem.packed)
    data = problem.tensors(torch.float64)
    found = describe(double_graph(), problem, data).run()
    mask = {"mask": found["RNG_DUMP"]} if problem.dropout else {}
    if not problem.page:
        found["Stats"] = found["Stats"].double()
        backward = describe(double_graph(), problem, {**data, **found}).run()
        assert not mask or torch.equal(mask["mask"], backward["RNG_DUMP"])
        found |= backward
    compare(problem, found, attention(problem, data | mask, torch.float64))


def compare(problem: Problem, results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """O in float64; the statistics are FLOAT, and the gradients start from them."""
    for name in results.keys() - {"RNG_DUMP"}:
        tolerance = 2e-5 if name != "O" else 1e-12
        torch.testing.assert_close(
            without_padding(problem, name, results[name]).double(),
            without_padding(problem, name, expected[name]),
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("options", [{}, {"use_causal_mask": True}])
def test_reference_leaves_blocks_out(options: dict[str, Any]) -> None:
    problem = Problem(s_q=300, s_kv=1300, d_qk=8, d_v=8, blocks=True, options=options)
    data = problem.tensors(torch.float64)
    found = describe(double_graph(), problem, data).run()
    compare(problem, found, attention(problem, data, torch.float64))


@pytest.mark.parametrize("name", ["padding", "padding, causal bottom right", "sink, padding", "ragged, causal"])
def test_reference_does_not_read_padding(name: str) -> None:
    """The rows beyond each entry's length may hold anything."""
    problem = shrunk(CASES[name])
    data = problem.tensors(torch.float64)
    forward = describe(double_graph(), problem, data).run()
    forward["Stats"] = forward["Stats"].double()
    backward = describe(double_graph(), problem, {**data, **forward}).run()
    valid = problem.valid()
    for port, x in data.items() | forward.items():
        if port != "sink":
            x.masked_fill_(~valid["kv" if port in "kv" else "q"], float("nan"))
    again = describe(double_graph(), problem, data).run()
    again |= describe(double_graph(), problem, {**data, **forward}).run()
    for port, x in (forward | backward).items():
        assert torch.equal(without_padding(problem, port, again[port].double()), without_padding(problem, port, x)), (
            port
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("q", (1, 2, 3, 4), torch.nan),
        ("k", (0, 1, 0, 3), torch.inf),
        ("v", (0, 0, 5, 1), torch.nan),
        ("scale", (), torch.nan),
    ],
)
def test_nan_passes_through_as_in_pytorch(name: str, index: tuple[int, ...], value: float, causal: bool) -> None:
    q, k, v, d_o = (torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(4))
    data = {"q": q, "k": k, "v": v, "scale": torch.tensor(0.3)}
    data[name][index] = value
    scale = float(data["scale"])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        wanted = {"O": functional.scaled_dot_product_attention(*leaves, is_causal=causal, scale=scale)}
    wanted |= dict(zip(("dQ", "dK", "dV"), torch.autograd.grad(wanted["O"], leaves, d_o), strict=True))

    graph = double_graph()
    inputs = [like(graph, x) for x in (q, k, v)]
    o, stats = graph.sdpa(*inputs, attn_scale=scale, generate_stats=True, use_causal_mask=causal)
    stats.set_output(True).set_data_type(DOUBLE)
    forward = run(graph, dict(zip(inputs, (q, k, v), strict=True)), o.set_output(True), stats)
    found = dict(zip(("O", "Stats"), forward, strict=True))
    graph = double_graph()
    given = [q, k, v, found["O"], d_o, found["Stats"]]
    inputs = [like(graph, x) for x in given]
    outs = [
        out.set_output(True).set_dim(q.shape).set_stride(q.stride())
        for out in graph.sdpa_backward(*inputs, attn_scale=scale, use_causal_mask=causal)
    ]
    found |= dict(zip(("dQ", "dK", "dV"), run(graph, dict(zip(inputs, given, strict=True)), *outs), strict=True))
    assert not torch.isfinite(wanted["O"]).all()
    for port, x in wanted.items():
        torch.testing.assert_close(found[port], x, equal_nan=True, msg=lambda text, port=port: f"{port}: {text}")


def test_dropout_keeps_the_share_asked_for() -> None:
    """The mask holds ones and zeros, and depends on the seed and on the offset."""
    problem = dataclasses.replace(CASES["dropout"], s_q=64, s_kv=64, d_qk=8, d_v=8)
    data = problem.tensors(torch.float64)
    masks: list[torch.Tensor] = []
    for change in ("", "seed", "offset"):
        described = describe(double_graph(), problem, data)
        for tensor, value in described.inputs.items():
            if tensor.get_name() == change:
                value += 1
        masks.append(described.run()["RNG_DUMP"])
    count = masks[0].numel()
    for mask in masks:
        assert set(mask.unique().tolist()) == {0.0, 1.0}
        assert abs(mask.mean().item() - 0.75) < 5 * (0.25 * 0.75 / count) ** 0.5
        assert sum(torch.equal(mask, other) for other in masks) == 1


@pytest.mark.parametrize("name", SOLVED)
def test_oracle_agrees_with_scaled_dot_product_attention(name: str) -> None:
    """PyTorch's own function, which has one mask for everything, and no convention for rows that see nothing."""
    problem = shrunk(SOLVED[name])
    options = {name: value for name, value in problem.options.items() if name != "use_alibi_mask"}
    problem = dataclasses.replace(problem, dropout=0.0, own_mask=False, sink=False, modifier="", options=options)
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
    problem = shrunk(CASES[name])
    data = problem.tensors(torch.float32)
    forward = describe(reference_graph(), problem, data)
    found = pattern(forward, version, data)
    if problem.dropout:
        data["mask"] = found["RNG_DUMP"]
    exact = attention(problem, data, torch.float64)
    if name in BACKWARD_CASES:
        given = {**data, "O": exact["O"].float(), "Stats": exact["Stats"].float().nan_to_num(neginf=0.0)}
        found |= pattern(describe(reference_graph(), problem, given), version, data)
        if problem.sink:
            found["dSink"] = -found["dSink"]  # cuDNN adds the sign of the pattern's result itself
    for port in found.keys() - {"RNG_DUMP"}:
        live = torch.where(torch.isinf(exact[port]), 0.0, exact[port])
        got = without_padding(problem, port, torch.where(torch.isinf(exact[port]), 0.0, found[port])).double()
        torch.testing.assert_close(got, without_padding(problem, port, live), atol=1e-4, rtol=1e-4, msg=port)


def shrunk(problem: Problem) -> Problem:
    """An eighth of the sequences, small heads, and dense tensors: being ragged changes nothing in the patterns."""
    return dataclasses.replace(
        problem,
        s_q=-(-problem.s_q // 8),
        s_kv=problem.s_kv // 8,
        d_qk=8,
        d_v=16,
        page=problem.page // 8,
        bias=tuple(extent if extent < 8 else extent // 8 for extent in problem.bias),
        ragged=False,
        packed=False,
        lengths_q=tuple(-(-length // 8) for length in problem.lengths_q),
        lengths_kv=tuple(length // 8 for length in problem.lengths_kv),
    )


def pattern(described: Described, version: int, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The outputs of an attention graph's node, from the operations that a version of cuDNN is given."""
    described.graph.validate()
    (node,) = described.graph.nodes
    assert isinstance(node, (AttentionForward, AttentionBackward))
    graph = ScoreGraph(node, described.graph.context, version)
    values = dict(described.inputs)
    if node.use_alibi_mask:
        heads = node.score_dim[1]
        graph.slopes = Tensor([1, heads, 1, 1], [heads, 1, 1, 1], FLOAT)
        values[graph.slopes] = slopes(heads).float().view(1, -1, 1, 1)
    views = {port: swapped(node.inputs[port]) for port in "KV" if not node.is_paged}
    values |= {view: data[port.lower()].transpose(2, 3) for port, view in views.items()}
    if isinstance(node, AttentionForward):
        key = graph.pages("K", transposed=True) if node.is_paged else views["K"]
        node.compose(graph, key, {port: x for port, x in node.outputs.items() if port in node.STATISTICS})
    else:
        sums, accumulator = (
            Tensor([*node.score_dim[:3], size], [1] * 4, FLOAT) for size in (1, node.inputs["Q"].dim[3])
        )
        node.compose(graph, views["K"], views["V"], sums, None if "dBias" in node.outputs else accumulator)
    evaluate(graph, values)
    return {port: values[tensor] for port, tensor in node.outputs.items()}


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
    for gradient, source in zip(gradients, (q, k, v), strict=True):
        assert (gradient.get_dim(), gradient.get_stride()) == (source.get_dim(), source.get_stride())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"is_inference": True}, False),
        ({"is_inference": False}, True),
        ({"generate_stats": True}, True),
        ({"generate_stats": False}, False),
        ({"is_inference": True, "generate_stats": False}, False),
    ],
)
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


@pytest.mark.parametrize("name", [name for name, problem in CASES.items() if not problem.modifier])
def test_descriptions_round_trip(name: str) -> None:
    """And what is restored computes the same."""
    problem = shrunk(CASES[name])
    described = describe(reference_graph(), problem, problem.tensors(torch.float32))
    expected = described.run()
    restored = reference_graph()
    restored.deserialize(described.graph.serialize())
    assert repr(restored) == repr(described.graph)
    results = {port: torch.full_like(x, float("nan")) for port, x in expected.items()}
    data = {tensor.get_uid(): value for tensor, value in described.inputs.items()}
    restored.execute({**data, **{described.outputs[port].get_uid(): x for port, x in results.items()}}, None)
    for port, x in results.items():
        assert torch.equal(x, expected[port]), port


def test_functions_are_not_restored() -> None:
    """Their graph is described, with their names, but does not run without them."""
    for backward in (False, True):
        problem = shrunk(CASES["softcap"])
        data = problem.tensors(torch.float32)
        if backward:
            data = backward_data(problem, data)
        graph = describe(reference_graph(), problem, data).graph
        graph.build(MODES)
        assert '"score_mod": "forward"' in repr(graph)
        restored = reference_graph()
        restored.deserialize(repr(graph))
        assert repr(restored) == repr(graph)
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="name of a Python function, 'forward'"):
            restored.validate()
        restored.deserialize(graph.serialize())
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="name of a Python function, 'forward'"):
            restored.execute({uid: torch.zeros(400_000, dtype=torch.uint8) for uid in range(100)}, None)
