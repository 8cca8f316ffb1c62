"""Attention on fp8 tensors: the reference executor, the patterns, refusals, and plans of real cuDNN without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.pygraph.attention import support as attention_support
from cudnn.pygraph.attention.fp8 import AttentionFp8Forward
from cudnn.pygraph.known_faults import SEEN_IN
from support.attention import Problem, attention, backward_data
from support.attention_fp8 import (
    BASE,
    CASES,
    E4M3,
    E5M2,
    SCALES,
    attention_fp8,
    describe_fp8,
    meant,
    new_graph,
    tensors,
)
from support.fuzz.approx import Approx, compare
from support.graphs import HALF, configurations

NOT_SUPPORTED = cudnn.cudnnGraphNotSupportedError


@pytest.fixture
def _newest() -> Iterator[None]:
    """What some version of cuDNN does not support, the reference executor runs all the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_support, "loaded_version", lambda: attention_support.NEWEST)
        yield


def solved(problem: Problem, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, Approx]]:
    """What the reference executor finds, and the formula."""
    torch.manual_seed(0)
    data = tensors(problem, dtype)
    found = describe_fp8(new_graph(dtype, backend="reference"), problem, data).run()
    if problem.dropout:
        data["mask"] = found.pop("RNG_DUMP")
    expected = attention_fp8(problem, data, dtype)
    given = {**data, "O": found["O"], "Stats": found.get("Stats", expected["Stats"].value.float())}
    found |= describe_fp8(new_graph(dtype, backend="reference"), problem, given).run()
    return found, expected


@pytest.mark.usefixtures("_newest")
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, E4M3) for name in CASES), *((name, E5M2) for name in ("grouped heads", "dropout"))]
)
def test_reference_agrees_with_pytorch(name: str, dtype: torch.dtype) -> None:
    """Where a number lies between two of fp8, float32 and float64 may round it to different ones."""
    problem = dataclasses.replace(CASES[name], d_qk=16, d_v=32)
    found, expected = solved(problem, dtype)
    for port, result in found.items():
        keep = torch.ones_like(result, dtype=torch.bool)
        if not port.startswith("Amax"):
            keep = problem.valid()["kv" if port in ("dK", "dV") else "q"].expand(result.shape)
        value, bound = expected[port].value[keep], expected[port].bound[keep]
        wanted = Approx(value, bound + 2**-20 * value.abs())
        assert compare(result[keep], wanted) == "", port
        doubt, size = float(wanted.bound.sum()), float(value.abs().sum())
        # Rounding to fp8 moves numbers by 3e-2 on average; the largest one may be one of those in doubt.
        assert doubt <= (5e-2 if port.startswith("Amax") else 1e-2) * size, f"{port}: {doubt} of {size}"


@pytest.mark.usefixtures("_newest")
@pytest.mark.parametrize("name", ["q", "v"])
def test_nan_passes_through(name: str) -> None:
    problem = dataclasses.replace(CASES["plain"], s_q=9, s_kv=11, d_qk=16, d_v=32)
    data = tensors(problem)
    broken = data[name].float()
    broken[1, 2, 3, 4] = float("nan")
    data[name] = broken.to(E4M3)
    found = describe_fp8(new_graph(E4M3, backend="reference"), problem, data).run()
    missing = torch.zeros_like(found["O"], dtype=torch.bool)
    missing[1, 2, 3 if name == "q" else slice(None), slice(None) if name == "q" else 4] = True
    assert torch.equal(found["O"].isnan(), missing)
    assert found["Amax_O"].isnan()
    assert found["Amax_S"].isnan() == (name == "q")
    assert torch.equal(found["Stats"].isnan()[..., 0], missing.any(-1) & (name == "q"))
    given = {**data, **{port: found[port] for port in ("O", "Stats")}}
    gradients = describe_fp8(new_graph(E4M3, backend="reference"), problem, given).run()
    assert gradients["dQ"][1, 2, 3].float().isnan().all()
    assert gradients["dK"][1, 2].float().isnan().all()
    assert gradients["Amax_dP"].isnan()


@pytest.mark.parametrize("name", ["plain", "grouped heads", "sliding window", "padding, causal"])
def test_formula_is_that_of_attention(name: str) -> None:
    """With the scales taken out, the results are those of attention, as near as fp8 comes to them."""
    problem = dataclasses.replace(CASES[name], d_qk=16, d_v=32)
    torch.manual_seed(1)
    data = tensors(problem)
    exact, found = attention(problem, meant(data), torch.float64), attention_fp8(problem, data)
    valid = problem.valid()
    for port, scale in (("O", "o"), ("dQ", "dQ"), ("dK", "dK"), ("dV", "dV")):
        keep = valid["kv" if port in ("dK", "dV") else "q"]
        got, wanted = (torch.where(keep, x, 0.0) for x in (found[port].value / SCALES[f"scale_{scale}"], exact[port]))
        assert (got - wanted).norm() < 0.1 * wanted.norm(), port
        amax = found[f"Amax_{port}"].value.item()
        assert abs(amax - wanted.abs().max().item()) < 0.1 * amax, port


def test_arguments_that_are_called_otherwise_than_those_of_sdpa() -> None:
    graph = new_graph(backend="reference")
    one = graph.tensor([1, 1, 1, 1], [1] * 4)
    q, k, v = (graph.tensor([2, 4, 64, 64], [16384, 4096, 64, 1]) for _ in "qkv")
    given: dict[str, Any] = {"sliding_window": 9, "right_bound": 3, "fn": lambda g, scores: scores, "sink_token": one}
    graph.sdpa_fp8(q, k, v, *[one] * 6, **given)
    (node,) = graph.nodes
    assert isinstance(node, AttentionFp8Forward)
    assert (node.left_bound, node.right_bound, node.score_mod) == (9, 3, given["fn"])
    assert node.inputs["Sink"] is one


# Refusals.
def described(problem: Problem, backward: bool, sm: int | None, dtype: torch.dtype = E4M3, **options: Any) -> None:
    data = tensors(problem, dtype, "meta")
    graph = new_graph(dtype, backend="reference", sm_version=sm)
    describe_fp8(graph, problem, backward_data(problem, data) if backward else data, **options).graph.validate()


def sized(d_qk: int, d_v: int, **more: Any) -> Problem:
    return Problem(**{**BASE, "d_qk": d_qk, "d_v": d_v, **more})


def in_half(outputs: dict[str, cudnn.tensor]) -> None:
    for name in outputs.keys() & {"O", "dK"}:
        outputs[name].set_data_type(HALF)


LENGTHS: dict[str, Any] = {"lengths_q": (1, 2), "lengths_kv": (3, 4)}
BOTTOM_RIGHT = {"use_causal_mask_bottom_right": True}
REFUSED = {
    "a broken cuDNN": (91000, 90, Problem(**BASE), {}, "9.10.0, where they are broken"),
    "an old device": (92800, 89, Problem(**BASE), {}, "compute capability 89; allowed: 90"),
    "bottom right on Hopper": (92800, 90, Problem(**BASE, options=BOTTOM_RIGHT), {}, "bottom-right causal mask"),
    "fp16 out on Hopper": (92800, 90, Problem(**BASE), {"change": in_half}, "HALF with cuDNN 9.28.0 on compute"),
    "fp16 out before 9.13": (91200, 100, Problem(**BASE), {"change": in_half}, "HALF with cuDNN 9.12.0"),
    "a sink on Hopper": (92800, 90, Problem(**BASE, sink=True), {}, "sink_token: got fp8 tensors"),
}
FORWARD_REFUSED = {
    **REFUSED,
    "heads on Hopper": (92800, 90, sized(272, 128), {}, "d_qk=272, .*multiples of 16, up to 256"),
    "odd heads on Hopper": (92800, 90, sized(128, 72), {}, "d_v=72"),
    "heads on Blackwell": (92800, 100, sized(144, 128), {}, "d_qk=144, d_v=128; allowed: multiples of 16, up to 128"),
    "192 on an old Blackwell": (91800, 100, sized(192, 128), {}, "192 and 128 from cuDNN 9.19"),
}
BACKWARD_REFUSED = {
    **REFUSED,
    "heads on Hopper": (92800, 90, sized(64, 64), {}, "d_qk=64, d_v=64; allowed: 128"),
    "heads on Blackwell": (92800, 100, sized(128, 144), {}, "d_v=144"),
    "bottom right, odd": (92800, 100, Problem(**BASE, s_q=100, options=BOTTOM_RIGHT), {}, "multiples of 64"),
    "bottom right, more rows": (
        92800,
        100,
        Problem(**BASE, s_q=256, lengths_q=(1, 2), lengths_kv=(3, 4), options=BOTTOM_RIGHT),
        {},
        "s_q=256 >",
    ),
    "deterministic before 9.19": (91800, 100, Problem(**BASE), {"use_deterministic_algorithm": True}, "9.19 or newer"),
    "deterministic with dropout": (
        92800,
        100,
        Problem(**BASE, dropout=0.5),
        {"use_deterministic_algorithm": True},
        "and no dropout",
    ),
}
CASES_REFUSED = [(False, name, *case) for name, case in FORWARD_REFUSED.items()]
CASES_REFUSED += [(True, name, *case) for name, case in BACKWARD_REFUSED.items()]


@pytest.mark.parametrize(("backward", "name", "version", "sm", "problem", "options", "text"), CASES_REFUSED)
def test_refuses(
    backward: bool,
    name: str,
    version: int,
    sm: int,
    problem: Problem,
    options: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_support, "loaded_version", lambda: version)
    with pytest.raises(NOT_SUPPORTED, match=text):
        described(problem, backward, sm, **options)


@pytest.mark.parametrize(
    ("backward", "problem", "text"),
    [
        (False, sized(64, 128), "head size: got d_qk=64, d_v=128 .* reads outside V"),
        (False, Problem(**BASE, dropout=0.1), "dropout: got fp8 tensors .* memory out of bounds"),
        (False, Problem(**BASE, statistics=True), r"score_max: got fp8 tensors .* log2\(e\)"),
        (True, Problem(**BASE, s_q=100), "s_q: got 100 .* last rows of dQ zero"),
    ],
)
def test_refuses_what_is_computed_wrongly(
    backward: bool, problem: Problem, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_support, "loaded_version", lambda: 91900)
    with pytest.raises(NOT_SUPPORTED, match=text):
        described(problem, backward, 90)
    monkeypatch.setattr(attention_support, "loaded_version", lambda: 91901)
    described(problem, backward, 90)


def test_warns_of_an_amax_that_is_too_large(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for version, count in ((91901, 0), (91900, 1)):
        monkeypatch.setattr(attention_support, "loaded_version", lambda version=version: version)
        described(Problem(**BASE, s_q=256, **LENGTHS), False, 90)
        assert len(caplog.records) == count
    assert "padding mask: got s_q=256 > s_kv=192 without another mask in fp8" in caplog.text


@pytest.mark.parametrize(("sm", "sizes"), [(90, (256, 256)), (100, (128, 128)), (100, (192, 128)), (None, (272, 40))])
def test_head_sizes_of_the_forward_pass(sm: int | None, sizes: tuple[int, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(attention_support, "loaded_version", lambda: 92800)
    described(sized(*sizes), False, sm)


def test_no_bias_with_fp8() -> None:
    graph = new_graph(backend="reference")
    bias = graph.tensor([1, 1, 192, 192], [192 * 192, 192 * 192, 192, 1], HALF)
    with pytest.raises(NOT_SUPPORTED, match="bias: got given; allowed: none with fp8"):
        describe_fp8(graph, Problem(**BASE), tensors(Problem(**BASE), E4M3, "meta"), bias=bias).graph.validate()


@pytest.mark.parametrize(("sm", "text"), [(90, "90; allowed: 10.0 or newer"), (120, "120; allowed: 9.0 or 10.0")])
def test_ragged_tensors_only_where_cudnn_has_them(sm: int, text: str) -> None:
    problem = Problem(**BASE, lengths_q=(77, 192), lengths_kv=(128, 33))
    graph = new_graph(backend="reference", sm_version=sm)
    data = tensors(problem, E4M3, "meta")
    made = describe_fp8(graph, problem, backward_data(problem, data) if sm == 90 else data)
    (node,) = graph.nodes
    node.inputs["Q"].set_ragged_offset(graph.tensor([3, 1, 1, 1], [1] * 4, cudnn.data_type.INT32))
    with pytest.raises(NOT_SUPPORTED, match=f"ragged tensors: got compute capability {text}"):
        made.graph.validate()


def test_refuses_other_types(h200: Any) -> None:
    problem = Problem(**BASE)
    graph = new_graph(device_property=h200)
    data = tensors(problem, E4M3, "meta") | {"k": torch.empty(2, 4, 192, 128, dtype=torch.float16, device="meta")}
    describe_fp8(graph, problem, data)
    graph.validate()
    with pytest.raises(NOT_SUPPORTED, match="data type of K: got HALF; allowed: FP8_E4M3 or FP8_E5M2"):
        graph.build_operation_graph()


# Plans of real cuDNN.
@pytest.mark.deviceless_919
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_has_engines_forward(name: str, dtype: torch.dtype, h200: Any) -> None:
    problem = CASES[name]
    described = describe_fp8(new_graph(dtype, device_property=h200), problem, tensors(problem, dtype, "meta"))
    wrong = "score_max" if problem.statistics else "dropout" if problem.dropout else ""
    if wrong and library.version() <= SEEN_IN:
        with pytest.raises(NOT_SUPPORTED, match=f"{wrong}: got fp8 tensors"):
            described.graph.validate()
    else:
        assert configurations(described.graph) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dropout", "statistics")])
def test_cudnn_has_engines_backward(name: str, h200: Any) -> None:
    problem = CASES[name]
    data = backward_data(problem, tensors(problem, E4M3, "meta"))
    graph = describe_fp8(new_graph(device_property=h200), problem, data).graph
    if problem.s_q % 16 and library.version() <= SEEN_IN:
        with pytest.raises(NOT_SUPPORTED, match="which leaves the last rows of dQ zero"):
            graph.validate()
    else:
        assert configurations(graph) > 0


@pytest.mark.deviceless_919
def test_one_query_row_has_no_engine_on_hopper(h200: Any) -> None:
    problem = Problem(**BASE, s_q=1)
    described = describe_fp8(new_graph(device_property=h200), problem, tensors(problem, E4M3, "meta"))
    with pytest.raises(NOT_SUPPORTED, match="no engine configuration"):
        configurations(described.graph)


@pytest.mark.deviceless_919
@pytest.mark.parametrize("backward", [False, True])
def test_cudnn_builds_a_plan(backward: bool, h200: Any) -> None:
    problem = CASES["padding, causal"]
    data = tensors(problem, E4M3, "meta")
    graph = describe_fp8(new_graph(device_property=h200), problem, backward_data(problem, data) if backward else data)
    configurations(graph.graph)
    graph.graph.build_plans()
    assert graph.graph.get_workspace_size() >= 0
