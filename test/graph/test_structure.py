"""Reshape, transpose, slice, concatenate: values, views of memory, types, refusals, and what cuDNN is told."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from support.drawing import shapes, strided
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, evaluate, like, planned_graph, reference_graph, run
from support.refusals import check_refused

LOGICAL, VIEW_ONLY = cudnn.reshape_mode.LOGICAL, cudnn.reshape_mode.VIEW_ONLY
INT64 = cudnn.data_type.INT64


@settings(max_examples=20, deadline=None)
@given(data=st.data(), x=shapes().flatmap(strided))
def test_logical_reshape_keeps_row_major_order(data: st.DataObject, x: torch.Tensor) -> None:
    first = data.draw(st.sampled_from([n for n in range(1, x.numel() + 1) if x.numel() % n == 0]))
    dims = [first, x.numel() // first]
    graph = reference_graph()
    tensor = like(graph, x)
    y = graph.reshape(tensor, reshape_mode=LOGICAL).set_output(True).set_dim(dims)
    (result,) = run(graph, {tensor: x}, y)
    assert result.flatten().tolist() == x.flatten().tolist()
    assert result.stride() == (dims[1], 1)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), dims=shapes(rank=3))
def test_view_reads_the_memory_of_its_input(data: st.DataObject, dims: list[int]) -> None:
    memory = torch.randn(prod(dims))
    order = data.draw(st.permutations(range(3)))
    strides = [0] * 3
    step = 1
    for axis in order:
        strides[axis], step = step, step * dims[axis]
    x = memory.as_strided(dims, strides)
    graph = reference_graph()
    tensor = like(graph, x)
    flat = graph.reshape(tensor, "flat").set_dim([1, prod(dims)]).set_stride([prod(dims), 1]).set_output(True)
    # The same view of a virtual tensor: as if it were stored with its strides.
    virtual = graph.reshape(graph.neg(tensor)).set_dim([prod(dims), 1]).set_stride([1, 1]).set_output(True)
    results = run(graph, {tensor: x}, flat, virtual)
    assert torch.equal(results[0][0], memory)
    assert torch.equal(results[1][:, 0], -memory)


def test_reshape_defaults() -> None:
    graph = cudnn.pygraph(compute_data_type=FLOAT, backend="reference")
    x = graph.tensor([4, 64], [64, 1], HALF)
    y = graph.reshape(x, name="r").set_dim([4, 8, 8]).set_output(True)
    graph.validate()
    assert (y.get_name(), y.get_stride(), y.get_data_type()) == ("r::Y", [64, 1, 8], HALF)


def test_values_that_float32_cannot_hold_pass_unchanged() -> None:
    x = torch.tensor([[2**53 + 1, -(2**62) - 3], [16777217, 0]])
    graph = reference_graph(io=INT64, intermediate=INT64)
    tensor = like(graph, x)
    transposed = graph.transpose(tensor, [1, 0]).set_output(True)
    joined = graph.concatenate([tensor, graph.slice(tensor, [slice(1, 2)])], 0).set_output(True)
    flat = graph.reshape(tensor).set_dim([4, 1]).set_stride([1, 1]).set_output(True)
    results = run(graph, {tensor: x}, transposed, joined, flat)
    for result, expected in zip(results, (x.T, torch.cat([x, x[1:]]), x.view(4, 1)), strict=True):
        assert torch.equal(result, expected)


@settings(max_examples=15, deadline=None)
@given(data=st.data(), x=shapes().flatmap(strided))
def test_transpose(data: st.DataObject, x: torch.Tensor) -> None:
    order = data.draw(st.permutations(range(x.dim())))
    _, (result,) = evaluate("transpose", x, order, name="t")
    assert torch.equal(result, x.permute(order))
    assert result.stride() == x.permute(order).stride()


@st.composite
def slices(draw: st.DrawFn, dims: list[int]) -> list[slice]:
    chosen: list[slice] = []
    for extent in dims[: draw(st.integers(1, len(dims)))]:
        start = draw(st.integers(0, extent - 1))
        stop = draw(st.integers(start + 1, extent))
        step = draw(st.sampled_from([None, 1, 2]))
        chosen.append(
            draw(
                st.sampled_from([slice(start, stop, step), slice(start - extent, stop, step), slice(None, stop, step)])
            )
        )
    return chosen


@settings(max_examples=30, deadline=None)
@given(data=st.data(), x=shapes().flatmap(strided))
def test_slice(data: st.DataObject, x: torch.Tensor) -> None:
    chosen = data.draw(slices(list(x.shape)))
    graph = reference_graph()
    tensor = like(graph, x)
    part = graph.slice(tensor, chosen)
    again = graph.slice(part, [slice(0, 1)])
    of_virtual = graph.slice(graph.neg(tensor), chosen)
    outputs = [graph.identity(t).set_output(True) for t in (part, again, of_virtual)]
    results = run(graph, {tensor: x}, *outputs)  # the slices themselves are not passed
    expected = x[tuple(chosen)]
    for result, value in zip(results, (expected, expected[:1], -expected), strict=True):
        assert torch.equal(result, value)
    assert part.get_stride() == list(x.as_strided(x.shape, x.stride())[tuple(chosen)].stride())


@settings(max_examples=15, deadline=None)
@given(data=st.data(), x=shapes().flatmap(strided))
def test_concatenate(data: st.DataObject, x: torch.Tensor) -> None:
    axis = data.draw(st.integers(0, x.dim() - 1))
    parts = [x]
    for _ in range(data.draw(st.integers(0, 2))):
        dims = list(x.shape)
        dims[axis] = data.draw(st.integers(1, 4))
        parts.append(data.draw(strided(dims)))
    _, (result,) = evaluate("concatenate", parts, axis)
    assert torch.equal(result, torch.cat(parts, axis))


def test_concatenate_takes_the_stride_order_of_the_first() -> None:
    graph = reference_graph()
    a, b = graph.tensor([2, 8, 4, 4], [128, 1, 32, 8]), graph.tensor([2, 4, 4, 4], [64, 16, 4, 1])
    y = graph.concatenate(inputs=[a, b], axis=1, in_place_index=None, name="join").set_output(True)
    graph.validate()
    assert (y.get_name(), y.get_dim(), y.get_stride()) == ("join::Y", [2, 12, 4, 4], [192, 1, 48, 12])


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, x: g.reshape(x), ValueError, ["no dim", "set_dim"]),
        (lambda g, x: g.reshape(x).set_dim([5, 5]), ValueError, ["dim=[5, 5]", "24"]),
        (lambda g, x: g.reshape(x).set_dim([4, 6]).set_stride([8, 1]), ValueError, ["inside the input's memory"]),
        (lambda g, x: g.reshape(x, "", LOGICAL).set_dim([6, 4]).set_data_type(HALF), RuntimeError, ["HALF", "FLOAT"]),
        (lambda g, x: g.transpose(x, []), ValueError, ["permutation", "nothing"]),
        (lambda g, x: g.transpose(x, [0, 0]), RuntimeError, ["[0, 0]", "each dimension once"]),
        (lambda g, x: g.transpose(x, [1, 0]).set_data_type(HALF), RuntimeError, ["HALF", "FLOAT"]),
        (lambda g, x: g.transpose(x, [1, 0]).set_dim([4, 6]), ValueError, ["dim=[6, 4]"]),
        (lambda g, x: g.identity(g.slice(x, [slice(0, 2)]).set_data_type(HALF)), RuntimeError, ["HALF", "FLOAT"]),
        (lambda g, x: g.identity(g.slice(x, [slice(3, 3)])), ValueError, ["empty"]),
        (lambda g, x: g.identity(g.slice(x, [slice(None, None, -1)])), ValueError, ["positive steps"]),
        (lambda g, x: g.identity(g.slice(x, [slice(0, 1)] * 3)), ValueError, ["at most 2"]),
        (lambda g, x: g.identity(g.slice(x, [0])), TypeError, ["slice objects"]),
        (lambda g, x: g.slice(x, [slice(0, 2)]), ValueError, ["set_output(True)", "identity"]),
        (lambda g, x: g.concatenate([], 0), ValueError, ["none"]),
        (lambda g, x: g.concatenate([x], 2), ValueError, ["axis", "0 to 1"]),
        (lambda g, x: g.concatenate([x, g.tensor([4, 5], [5, 1])], 0), ValueError, ["dim=[4, 5]", "dimension 0"]),
        (lambda g, x: g.concatenate([x, g.tensor([4, 6], [6, 1], HALF)], 0), ValueError, ["FLOAT, HALF"]),
        (lambda g, x: g.concatenate([x, x], 0, in_place_index=2), ValueError, ["in_place_index", "0 to 1"]),
        (lambda g, x: g.concatenate([x, x], 0).set_dim([8, 5]), ValueError, ["dim=[8, 6]"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, graph.tensor([4, 6], [6, 1])), error, words)


def test_a_virtual_slice_takes_the_intermediate_type_and_is_refused() -> None:
    graph = reference_graph(io=HALF, intermediate=FLOAT)
    graph.identity(graph.slice(graph.tensor([4, 6], [6, 1]), [slice(0, 2)])).set_output(True)
    with pytest.raises(RuntimeError, match=r"set_data_type\(cudnn.data_type.HALF\)"):
        graph.validate()
    graph = cudnn.pygraph(compute_data_type=FLOAT, backend="reference")  # without a default it takes the input's
    part = graph.slice(graph.tensor([4, 6], [6, 1], HALF), [slice(0, 2)])
    graph.identity(part).set_output(True).set_data_type(HALF)
    graph.validate()
    assert part.get_data_type() is HALF


def matrix(graph: cudnn.pygraph) -> cudnn.tensor:
    return graph.tensor([4, 64, 64], [4096, 64, 1])


@pytest.mark.deviceless_919
def test_cudnn_sees_slices_of_inputs_as_memory(device_properties: Any) -> None:
    graph = planned_graph(device_properties, intermediate=HALF)
    a, b = matrix(graph), matrix(graph)
    first = graph.slice(graph.slice(a, [slice(1, 3)]), [slice(None), slice(None), slice(32, 64)])
    second = graph.slice(b, [slice(0, 2), slice(1, 33)])
    c = graph.matmul(first, second).set_output(True)
    assert configurations(graph) > 0
    graph.build_plans()
    bindings = graph._cudnn().bindings
    assert sorted(bindings.user) == sorted(tensor.get_uid() for tensor in (a, b, c))
    assert sorted(bindings.hidden) == sorted([a.get_uid(), b.get_uid()])
    assert bindings.aliases[first.get_uid()] == (a.get_uid(), 2 * (4096 + 32), None)
    assert bindings.aliases[second.get_uid()] == (b.get_uid(), 2 * 64, None)
    assert (first.get_is_virtual(), second.get_alignment()) == (True, 16)


@pytest.mark.deviceless_919
def test_cudnn_sees_transposed_and_reshaped_inputs_as_memory(device_properties: Any) -> None:
    graph = planned_graph(device_properties, intermediate=HALF)
    a, b, c = matrix(graph), matrix(graph), graph.tensor([16, 16, 64], [1024, 64, 1])
    turned = graph.transpose(a, [0, 2, 1])
    flat = graph.reshape(b).set_dim([1, 256, 64]).set_stride([16384, 64, 1])
    whole = graph.reshape(c, reshape_mode=LOGICAL).set_dim([4, 64, 64]).set_stride([4096, 64, 1])
    half = graph.slice(flat, [slice(None), slice(64, 128)])
    y = graph.add(graph.matmul(turned, whole), half).set_output(True)
    assert configurations(graph) > 0
    graph.build_plans()
    bindings = graph._cudnn().bindings
    uids = [tensor.get_uid() for tensor in (a, b, c)]
    assert sorted(bindings.user) == sorted([*uids, y.get_uid()])
    assert [bindings.aliases[t.get_uid()][:2] for t in (turned, half, whole)] == [
        (uids[0], 0),
        (uids[1], 2 * 4096),
        (uids[2], 0),
    ]
    assert all(tensor.get_is_virtual() for tensor in (turned, flat, whole, half))
    restored = cudnn.pygraph()
    restored.deserialize(repr(graph))
    assert repr(restored) == repr(graph)


@pytest.mark.deviceless_919
@pytest.mark.parametrize(("dtype", "is_shared"), [(FLOAT, True), (HALF, True), (cudnn.data_type.BFLOAT16, False)])
def test_a_reshape_shares_memory_unless_it_converts(dtype: Any, is_shared: bool, h200: Any) -> None:
    graph = planned_graph(h200)
    flat = graph.reshape(matrix(graph)).set_dim([1, 256, 64]).set_stride([16384, 64, 1]).set_data_type(dtype)
    graph.matmul(flat, graph.tensor([1, 64, 64], [4096, 64, 1])).set_output(True)
    if is_shared:
        assert configurations(graph) > 0
        assert flat.get_data_type() is dtype
    else:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration"):
            configurations(graph)


def test_alignment_follows_the_offset(h200: Any) -> None:
    graph = planned_graph(h200, intermediate=HALF)
    parts = [
        graph.slice(matrix(graph), [slice(None), slice(None), slice(start, 34 + start)]) for start in (0, 1, 2, 4, 8)
    ]
    for part in parts:
        graph.identity(part).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    assert [part.get_alignment() for part in parts] == [16, 2, 4, 8, 16]


def test_cudnn_concatenates_after_a_convolution(device_properties: Any) -> None:
    for in_place in (None, 0):
        graph = planned_graph(device_properties, intermediate=HALF)
        x, old = (graph.tensor([4, 64, 16, 16], [16384, 1, 1024, 64]) for _ in range(2))
        y = graph.conv_fprop(x, graph.tensor([64, 64, 1, 1], [64, 1, 64, 64]), [0, 0])
        graph.concatenate([old, y], 1, in_place).set_output(True)
        assert configurations(graph) > 0


def test_moving_elements_needs_no_compute_type() -> None:
    """As in a matrix product of an int8 slice, widened to bf16, that names a compute type where one is needed."""
    graph = cudnn.pygraph(backend="reference")
    memory = torch.randint(-4, 5, (2, 8, 24), dtype=torch.int8)
    b = torch.randn(2, 16, 4, dtype=torch.bfloat16)
    x, weight = like(graph, memory), like(graph, b)
    part = graph.slice(x, [slice(0, 2), slice(0, 8), slice(4, 20)])
    wide = graph.identity(part, compute_data_type=FLOAT).set_data_type(BFLOAT16)
    out = graph.matmul(wide, weight, compute_data_type=FLOAT).set_output(True).set_data_type(BFLOAT16)
    (result,) = run(graph, {x: memory, weight: b}, out)
    wanted = memory[..., 4:20].float() @ b.float()
    torch.testing.assert_close(result.float(), wanted, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("method", ["reshape", "transpose", "concatenate"])
def test_the_others_that_move_need_none_either(method: str) -> None:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=HALF, backend="reference")
    x = graph.tensor([4, 6], [6, 1])
    made = {
        "reshape": lambda: graph.reshape(x, reshape_mode=LOGICAL).set_dim([3, 8]).set_stride([8, 1]),
        "transpose": lambda: graph.transpose(x, [1, 0]),
        "concatenate": lambda: graph.concatenate([x, x], 0),
    }[method]()
    data = torch.randn(4, 6, dtype=torch.float16)
    (result,) = run(graph, {x: data}, made.set_output(True))
    wanted = {"reshape": data.view(3, 8), "transpose": data.T, "concatenate": torch.cat([data, data])}[method]
    assert torch.equal(result, wanted)


def test_arithmetic_does_need_one() -> None:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=HALF, backend="reference")
    graph.neg(graph.tensor([4, 6], [6, 1]), name="minus").set_output(True)
    with pytest.raises(ValueError, match=r"minus \(neg\): compute_data_type: got none"):
        graph.validate()
