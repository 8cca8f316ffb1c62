"""Element-wise operations: values against PyTorch, inference, refusals, serialisation, and plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.backend import library
from cudnn.pygraph.lowering import Lowering
from support.graphs import (
    FLOAT,
    HALF,
    check_refused,
    check_restored,
    configurations,
    evaluate,
    like,
    planned_graph,
    reference_graph,
    run,
    shapes,
    strided,
)

BOOLEAN = cudnn.data_type.BOOLEAN
UNARY: dict[str, tuple[Callable[[Any], Any], float]] = {  # formula, lowest value drawn
    "sqrt": (lambda x: x**0.5, 0.1),
    "rsqrt": (lambda x: x**-0.5, 0.1),
    "reciprocal": (lambda x: torch.reciprocal(x), 0.1),
    "erf": (torch.special.erf, -2),
    "identity": (lambda x: x, -2),
    "exp": (torch.exp, -2),
    "log": (torch.log, 0.1),
    "neg": (torch.neg, -2),
    "abs": (torch.abs, -2),
    "ceil": (torch.ceil, -2),
    "floor": (torch.floor, -2),
    "sin": (torch.sin, -2),
    "cos": (torch.cos, -2),
    "tan": (lambda x: torch.sin(x) / torch.cos(x), -1.4),
    "tanh": (lambda x: 2 * torch.sigmoid(2 * x) - 1, -2),
    "elu": (lambda x: torch.where(x > 0, x, torch.expm1(x)), -2),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), -2),
    "gelu_approx_tanh": (lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))), -2),
    "sigmoid": (lambda x: 1 / (1 + torch.exp(-x)), -2),
    "softplus": (lambda x: torch.log1p(torch.exp(x)), -2),
    "relu": (F.relu, -2),
    "swish": (F.silu, -2),
    "silu": (F.silu, -2),
}
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_square": lambda a, b: a + torch.square(b),
    "bias": torch.add,
    "scale": torch.mul,
    "max": torch.max,
    "min": torch.min,
    "mod": lambda a, b: a - b * torch.trunc(a / b),
    "pow": lambda a, b: torch.exp(b * torch.log(a)),
}
COMPARISONS = {"cmp_eq": "eq", "cmp_neq": "ne", "cmp_gt": "gt", "cmp_ge": "ge", "cmp_lt": "lt", "cmp_le": "le"}
BACKWARD: dict[str, Callable[[Any], Any]] = {
    name: UNARY[name][0] for name in ("tanh", "sigmoid", "elu", "gelu", "gelu_approx_tanh", "softplus", "relu", "swish")
}


def one_node(method: str, *data: torch.Tensor, kind: object = None, **attributes: Any) -> torch.Tensor:
    """Runs one operation on float32 data through the reference executor."""
    _, (result,) = evaluate(method, *data, first=kind, **attributes)
    return result


@pytest.mark.parametrize("method", UNARY)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_unary(method: str, data: st.DataObject) -> None:
    formula, low = UNARY[method]
    x = data.draw(shapes().flatmap(lambda dims: strided(dims, low=low, high=1.4)))
    y = one_node(method, x)
    torch.testing.assert_close(y, formula(x.double()).float(), rtol=1e-5, atol=1e-6, check_stride=False)
    assert y.stride() == x.stride()


@pytest.mark.parametrize("method", BINARY)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_binary_broadcasts_from_the_right(method: str, data: st.DataObject) -> None:
    dims = data.draw(shapes())
    narrow = [data.draw(st.sampled_from([1, extent])) for extent in dims][data.draw(st.integers(0, len(dims) - 1)) :]
    low = 0.5 if method in ("pow", "div", "mod") else -2
    a, b = data.draw(strided(dims, low=low)), data.draw(strided(narrow, low=low))
    torch.testing.assert_close(one_node(method, a, b), BINARY[method](a, b), rtol=1e-5, atol=1e-5, check_stride=False)
    if method in ("add", "mul", "max", "min"):
        torch.testing.assert_close(one_node(method, b, a), BINARY[method](a, b), check_stride=False)


@pytest.mark.parametrize("method", COMPARISONS)
def test_comparisons(method: str) -> None:
    a, b = torch.randint(-2, 3, (3, 4, 5)).float(), torch.randint(-2, 3, (1, 4, 5)).float()
    expected = getattr(torch, COMPARISONS[method])(a, b)
    assert torch.equal(one_node(method, a, b, kind=BOOLEAN), expected)
    assert torch.equal(
        one_node(method, a, b), expected.float()
    )  # the output's type is the graph's, not BOOLEAN by itself


def test_logic() -> None:
    a, b = torch.rand(4, 6) > 0.5, torch.rand(4, 6) > 0.5
    assert torch.equal(one_node("logical_and", a, b, kind=BOOLEAN), a & b)
    assert torch.equal(one_node("logical_and", a, b, kind=BOOLEAN, compute_data_type=BOOLEAN), a & b)
    assert torch.equal(one_node("logical_or", a, b, kind=BOOLEAN), a | b)
    assert torch.equal(one_node("logical_not", a, kind=BOOLEAN), ~a)


@settings(max_examples=20, deadline=None)
@given(
    x=shapes().flatmap(strided),
    slope=st.sampled_from([None, 0.0, 0.1, 1]),
    lower=st.sampled_from([None, 0, -0.5, 0.25]),
    upper=st.sampled_from([None, 1, 1.5]),
)
def test_relu_with_slope_and_clips(
    x: torch.Tensor, slope: float | None, lower: float | None, upper: float | None
) -> None:
    low, high = lower or 0.0, float("inf") if upper is None else upper
    leaf = x.clone().requires_grad_()
    # Below the lower clip a line through (lower, lower); above the upper one a constant.
    y = (F.leaky_relu(leaf - low, slope or 0.0) + low).clamp(max=high)
    options: dict[str, Any] = {"negative_slope": slope, "lower_clip": lower, "upper_clip": upper}
    torch.testing.assert_close(one_node("relu", x, **options), y.detach(), check_stride=False)
    dy = torch.randn_like(x)
    (expected,) = torch.autograd.grad(y, leaf, dy)
    torch.testing.assert_close(one_node("relu_backward", dy, x, **options), expected, check_stride=False)


def test_leaky_relu() -> None:
    x, dy = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    y = F.leaky_relu(x, 0.2)
    y.backward(dy)
    torch.testing.assert_close(one_node("leaky_relu", x.detach(), negative_slope=0.2), y.detach())
    torch.testing.assert_close(one_node("leaky_relu_backward", dy, x.detach(), negative_slope=0.2), x.grad)


@pytest.mark.parametrize("beta", [None, 1, 0.5, 2.0])
def test_swish_beta(beta: float | None) -> None:
    x, dy = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5)
    y = x * torch.sigmoid((1.0 if beta is None else beta) * x)
    y.backward(dy)
    torch.testing.assert_close(one_node("swish", x.detach(), swish_beta=beta), y.detach())
    torch.testing.assert_close(one_node("swish_backward", dy, x.detach(), swish_beta=beta), x.grad)


@pytest.mark.parametrize("method", BACKWARD)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_backward_against_autograd(method: str, data: st.DataObject) -> None:
    dims = data.draw(shapes())
    x, dy = data.draw(strided(dims)), data.draw(strided(dims))
    leaf = x.double().requires_grad_()
    BACKWARD[method](leaf).backward(dy.double())
    assert leaf.grad is not None
    result = one_node(f"{method}_backward", dy, x)
    torch.testing.assert_close(result, leaf.grad.float(), rtol=1e-5, atol=1e-5, check_stride=False)


@settings(max_examples=10, deadline=None)
@given(x=shapes().flatmap(strided), data=st.data())
def test_gen_index(x: torch.Tensor, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, x.dim() - 1))
    y = one_node("gen_index", x, axis=axis, kind=cudnn.data_type.INT32)
    for index in range(x.shape[axis]):
        assert (y.select(axis, index) == index).all()


@settings(max_examples=10, deadline=None)
@given(data=st.data(), dims=shapes())
def test_binary_select(data: st.DataObject, dims: list[int]) -> None:
    a, b = data.draw(strided(dims)), data.draw(strided([1, *dims[1:]]))
    mask = data.draw(strided(dims)) > 0
    expected = torch.where(mask, a, b.expand(dims))
    torch.testing.assert_close(one_node("binary_select", a, b, mask), expected, check_stride=False)
    torch.testing.assert_close(one_node("binary_select", a, b, mask.int()), expected, check_stride=False)


def test_virtual_tensors_round_to_their_own_type() -> None:
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    results: dict[Any, torch.Tensor] = {}
    for kind in (HALF, FLOAT):
        graph = reference_graph(intermediate=kind)
        first, second = like(graph, a), like(graph, b)
        out = graph.mul(graph.add(first, second), second).set_output(True)
        (results[kind],) = run(graph, {first: a, second: b}, out)
    assert torch.equal(results[HALF], (a + b).half().float() * b)
    assert torch.equal(results[FLOAT], (a + b) * b)


def test_strides_come_from_the_last_input_of_the_shape() -> None:
    graph = reference_graph()
    row, column = graph.tensor([4, 8], [8, 1]), graph.tensor([4, 8], [1, 4])
    narrow = graph.tensor([4, 1], [1, 1])
    by_last, by_shape = graph.add(row, column), graph.add(column, narrow)
    outer = graph.mul(narrow, graph.tensor([1, 8], [8, 1]))  # nobody has its shape: the order of the first input
    given = graph.add(row, column).set_stride([16, 2])
    graph.add(graph.add(by_last, by_shape), graph.add(outer, given)).set_output(True)
    graph.validate()
    assert (by_last.get_stride(), by_shape.get_stride(), given.get_stride()) == ([1, 4], [1, 4], [16, 2])
    assert outer.get_dim() == [4, 8]
    assert sorted(outer.get_stride()) in ([1, 4], [1, 8])


def test_python_constants_take_any_rank() -> None:
    x = torch.randn(2, 3, 4)
    graph = reference_graph()
    tensor = like(graph, x)
    out = graph.mul(tensor, graph.tensor_scalar(2.5)).set_output(True)
    assert torch.equal(run(graph, {tensor: x}, out)[0], x * 2.5)


def test_names_and_arguments_by_position() -> None:
    graph = reference_graph()
    x = graph.tensor([4, 8], [8, 1])
    y = graph.relu(x, 0.1, 0.0, 6.0, FLOAT, "act")
    z = graph.swish_backward(y, x, FLOAT, 2.0)
    assert (y.get_name(), x.get_name(), z.get_name()) == ("act::OUT_0", "act::IN_0", "1::OUT_0")


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, t: g.add(t(4, 8), t(3, 8)), ValueError, ["[4, 8]", "[3, 8]", "broadcast"]),
        (lambda g, t: g.add(t(4, 8), t(4, 8)).set_dim([8, 8]), ValueError, ["dim=[8, 8]", "dim=[4, 8]"]),
        (lambda g, t: g.add(t(4, 1), t(1, 8)), ValueError, ["no strides", "set_stride"]),
        (lambda g, t: g.gen_index(t(4, 8), axis=2), ValueError, ["axis", "0 to 1"]),
        (lambda g, t: g.relu(torch.ones(2, 2)), TypeError, ["IN_0", "cudnn.tensor"]),
        (lambda g, t: g.relu(t(4, 8), negative_slope=t(1, 1)), TypeError, ["negative_slope", "number"]),
        (lambda g, t: g.swish(t(4, 8), swish_beta="1"), TypeError, ["swish_beta", "number"]),
        (lambda g, t: g.relu(g.tensor([], [], FLOAT)), ValueError, ["IN_0", "set or inferred"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, lambda *dims: graph.tensor(dims, [*dims[1:], 1])), error, words)


@pytest.mark.deviceless_919
def test_an_identity_that_changes_nothing_is_no_operation(h200: Any) -> None:
    """cuDNN 9.19 computes NaN where its result meets its own input again; one that converts is kept."""
    for kind, operations in ((FLOAT, 2), (HALF, 3)):
        graph = planned_graph(h200)
        product = graph.matmul(*(graph.tensor([1, 64, 64], [4096, 64, 1]) for _ in range(2)))
        same = graph.identity(product).set_data_type(kind)
        graph.add(same, product).set_output(True)
        assert configurations(graph) > 0
        lowering = Lowering(graph.context, graph.nodes, library.version())
        lowering.run(graph.nodes)
        assert len(lowering.operations) == operations


@pytest.mark.deviceless_919
@pytest.mark.parametrize("swapped", [False, True])
def test_operands_of_fewer_dimensions_get_leading_ones(swapped: bool, h200: Any) -> None:
    """cuDNN takes operands of one rank only; the memory stays the caller's tensor."""
    graph = planned_graph(h200)
    a, b = graph.tensor([4, 96, 128], [96 * 128, 128, 1], uid=1), graph.tensor([96, 128], [128, 1], uid=2)
    total = graph.add(*((b, a) if swapped else (a, b)))
    graph.binary_select(b, total, graph.cmp_gt(total, b).set_data_type(BOOLEAN)).set_output(True).set_uid(3)
    assert configurations(graph) > 0
    program = graph._cudnn()
    assert program.bindings.user == [1, 2, 3]
    assert {(alias.source, alias.offset) for alias in program.bindings.aliases.values()} == {(2, 0)}
    key = (4096, 8192, 12288, 0, 7)
    pointers = dict(zip(program.uids, program.filled(key), strict=False))
    assert all(pointers[uid] == 8192 for uid in program.bindings.aliases)
    assert (pointers[1], pointers[3]) == (4096, 12288)


@pytest.mark.parametrize("written", [False, True])
def test_a_result_of_fewer_dimensions_is_refused(written: bool, h200: Any) -> None:
    graph = planned_graph(h200)
    a, b = graph.tensor([4, 96, 128], [96 * 128, 128, 1]), graph.tensor([96, 128], [128, 1])
    row = graph.exp(b, name="row").set_output(written)
    graph.add(a, row, name="sum").set_output(True)
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"sum.*input IN_1 .*dim=\[96, 128\].*leading"):
        graph.build_operation_graph()


def test_attributes_survive_serialisation() -> None:
    x = torch.randn(4, 8)
    graph = reference_graph()
    tensor = like(graph, x).set_uid(1)
    clipped = graph.relu(tensor, negative_slope=0.5, lower_clip=-0.25, upper_clip=1.0)
    out = graph.add(graph.swish(clipped, swish_beta=3.0), graph.gen_index(tensor, axis=1))
    out.set_output(True).set_uid(2)
    (expected,) = run(graph, {tensor: x}, out)
    check_restored(graph, {1: x}, {2: expected})


@pytest.mark.parametrize("method", [*UNARY, *BINARY, *COMPARISONS, *(f"{name}_backward" for name in BACKWARD)])
def test_cudnn_has_engines(method: str, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    operands = 1 if method in UNARY else 2
    out = getattr(graph, method)(*[graph.tensor([2, 64, 128], [8192, 128, 1]) for _ in range(operands)])
    out.set_output(True)
    if method in COMPARISONS:
        out.set_data_type(BOOLEAN)
    assert configurations(graph) > 0


def test_cudnn_has_engines_for_the_rest(device_properties: Any) -> None:
    def tensor(graph: cudnn.pygraph, kind: object = HALF) -> cudnn.tensor:
        return graph.tensor([2, 64, 128], [8192, 128, 1], kind)

    for build in (
        # Logic wants BOOLEAN as its compute type.
        lambda g: g.logical_and(tensor(g, BOOLEAN), tensor(g, BOOLEAN), BOOLEAN).set_data_type(BOOLEAN),
        lambda g: g.logical_or(tensor(g, BOOLEAN), tensor(g, BOOLEAN), BOOLEAN).set_data_type(BOOLEAN),
        lambda g: g.logical_not(tensor(g, BOOLEAN), BOOLEAN).set_data_type(BOOLEAN),
        lambda g: g.binary_select(tensor(g), tensor(g), g.cmp_gt(tensor(g), tensor(g)).set_data_type(BOOLEAN)),
        lambda g: g.add(g.gen_index(tensor(g), axis=1), tensor(g)),
        lambda g: g.relu(tensor(g), negative_slope=0.1, lower_clip=-0.5, upper_clip=6),
        lambda g: g.leaky_relu(tensor(g), 0.1),
        lambda g: g.swish_backward(tensor(g), tensor(g), swish_beta=0.5),
        lambda g: g.add(tensor(g), g.tensor([1, 64, 1], [64, 1, 1], HALF)),
    ):
        graph = planned_graph(device_properties)
        build(graph).set_output(True)
        assert configurations(graph) > 0


def test_cudnn_builds_a_plan(device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    x, bias = graph.tensor([2, 64, 128], [8192, 128, 1]), graph.tensor([1, 1, 128], [128, 128, 1])
    graph.gelu(graph.relu(graph.add(x, bias), upper_clip=6.0)).set_output(True)
    configurations(graph)
    graph.build_plans()
    assert graph.get_workspace_size() >= 0
