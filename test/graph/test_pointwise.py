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
from support.drawing import shapes, strided
from support.fuzz.chain import OPS
from support.graphs import FLOAT, HALF, configurations, evaluate, like, planned_graph, reference_graph, run
from support.refusals import check_refused

BOOLEAN = cudnn.data_type.BOOLEAN


@pytest.mark.parametrize("name", OPS)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_values(name: str, data: st.DataObject) -> None:
    """Of operations on tensors that broadcast from the right to one of them, in any layout."""
    op, dims = OPS[name], data.draw(shapes())
    count, arguments = len(op.domains), []
    full = data.draw(st.integers(0, count - 1)) if op.method not in ("bias", "scale") else 0
    for place, (low, high) in enumerate(op.domains):
        narrow = [data.draw(st.sampled_from([1, extent])) for extent in dims][
            data.draw(st.integers(0, len(dims) - 1)) :
        ]
        arguments.append(data.draw(strided(dims if place == full else narrow, max(low, -2.0), min(high, 1.9))))
    arguments = op.suited(*arguments)
    graph = reference_graph()
    tensors = [like(graph, x) for x in arguments]
    y = op.add(graph, *tensors).set_output(True)
    if op.result == "bool" and data.draw(st.booleans()):
        y.set_data_type(BOOLEAN)
    (result,) = run(graph, dict(zip(tensors, arguments, strict=True)), y)
    expected = op.function(*(x.double() for x in arguments)).to(result.dtype)
    torch.testing.assert_close(result, expected.expand(dims), rtol=1e-5, atol=1e-5, check_stride=False)
    if count == 1:
        assert result.stride() == arguments[0].stride()


def one_node(method: str, *data: torch.Tensor, dtype: object = None, **attributes: Any) -> torch.Tensor:
    """Runs one operation on float32 data through the reference executor."""
    _, (result,) = evaluate(method, *data, first=dtype, **attributes)
    return result


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


@settings(max_examples=10, deadline=None)
@given(x=shapes().flatmap(strided), data=st.data())
def test_gen_index(x: torch.Tensor, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, x.dim() - 1))
    y = one_node("gen_index", x, axis=axis, dtype=cudnn.data_type.INT32)
    for index in range(x.shape[axis]):
        assert (y.select(axis, index) == index).all()


def test_strides_come_from_the_last_input_of_the_shape() -> None:
    graph = reference_graph()
    row, column = graph.tensor([4, 8], [8, 1]), graph.tensor([4, 8], [1, 4])
    narrow = graph.tensor([4, 1], [1, 1])
    by_last, by_shape = graph.add(row, column), graph.add(column, narrow)
    outer = graph.mul(
        narrow, graph.tensor([1, 8], [8, 1])
    )  # no input has its shape: the stride order of the first input
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
    out = graph.add(graph.mul(tensor, graph.tensor_scalar(2.5)), graph.tensor_scalar(2)).set_output(True)
    assert torch.equal(run(graph, {tensor: x}, out)[0], x * 2.5 + 2)


def test_names_and_arguments_by_position() -> None:
    graph = reference_graph()
    x = graph.tensor([4, 8], [8, 1])
    y = graph.relu(x, 0.1, 0.0, 6.0, FLOAT, "act")
    z = graph.swish_backward(y, x, FLOAT, 2.0)
    assert (y.get_name(), x.get_name(), z.get_name()) == ("act::OUT_0", "act::IN_0", "1::OUT_0")


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
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
    for dtype, operations in ((FLOAT, 2), (HALF, 3)):
        graph = planned_graph(h200)
        product = graph.matmul(*(graph.tensor([1, 64, 64], [4096, 64, 1]) for _ in range(2)))
        same = graph.identity(product).set_data_type(dtype)
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


@pytest.mark.parametrize("name", [*OPS, "gen_index", "broadcast"])
def test_cudnn_has_engines(name: str, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    logic = name.startswith("logical")
    x, y = (graph.tensor([2, 64, 128], [8192, 128, 1], BOOLEAN if logic else HALF) for _ in range(2))
    if name == "gen_index":
        out = graph.add(graph.gen_index(x, axis=1), y)
    elif name == "broadcast":
        out = graph.add(x, graph.tensor([1, 64, 1], [64, 1, 1]))
    elif name == "binary_select":
        out = graph.binary_select(x, y, graph.cmp_gt(x, y).set_data_type(BOOLEAN))
    else:
        out = OPS[name].add(graph, *(x, y)[: len(OPS[name].domains)])
        if OPS[name].result == "bool":
            out.set_data_type(BOOLEAN)
    out.set_output(True)
    assert configurations(graph) > 0


def test_cudnn_builds_a_plan(device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    x, bias = graph.tensor([2, 64, 128], [8192, 128, 1]), graph.tensor([1, 1, 128], [128, 128, 1])
    graph.gelu(graph.relu(graph.add(x, bias), upper_clip=6.0)).set_output(True)
    configurations(graph)
    graph.build_plans()
    assert graph.get_workspace_size() >= 0
