"""Matrix product: values that the fuzzer does not have, inference, refusals, and plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from support.drawing import strided
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, evaluate, like, planned_graph, reference_graph, run
from support.refusals import check_refused

INT8, INT32, FP8 = cudnn.data_type.INT8, cudnn.data_type.INT32, cudnn.data_type.FP8_E4M3


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_matrix_times_a_batch(data: st.DataObject) -> None:
    a, b = data.draw(strided([3, 4, 5])), data.draw(strided([5, 2]))
    _, (result,) = evaluate("matmul", a, b)
    torch.testing.assert_close(result, a @ b)
    assert result.is_contiguous()


def test_grouped_batches() -> None:
    a, b = torch.randn(2, 6, 4, 8), torch.randn(2, 2, 8, 3)
    _, (result,) = evaluate("matmul", a, b)
    for head in range(6):
        torch.testing.assert_close(result[:, head], a[:, head] @ b[:, head // 3])


def test_output_strides_are_the_users() -> None:
    a, b = torch.randn(2, 4, 8), torch.randn(2, 8, 3)
    graph = reference_graph()
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(first, second).set_output(True).set_stride([12, 1, 4])
    (result,) = run(graph, {first: a, second: b}, c)
    assert result.stride() == (12, 1, 4)
    torch.testing.assert_close(result, a @ b, check_stride=False)


def test_types() -> None:
    a, b = torch.randn(1, 64, 256).half(), torch.randn(1, 256, 64).half()
    _, (result,) = evaluate("matmul", a, b, types=(HALF,))
    assert torch.equal(result, (a.float() @ b.float()).half())  # float32 sums, rounded once

    a8, b8 = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ([1, 8, 512], [1, 512, 4]))
    _, (result,) = evaluate("matmul", a8, b8, types=(INT32, INT32, INT32))
    assert torch.equal(result.long(), a8.long() @ b8.long())


def test_names() -> None:
    graph = reference_graph()
    a, b, c = (graph.tensor([1, 4, 4], [16, 4, 1]) for _ in range(3))
    first = graph.matmul(a, b)
    second = graph.matmul(first, c, FLOAT, 0.0, "mm")
    assert [t.get_name() for t in (a, b, first, c, second)] == ["0::A", "0::B", "0::C", "mm::B", "mm::C"]


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, t: g.matmul(t(2, 4, 8), t(3, 8, 3)), ValueError, ["batch"]),
        (lambda g, t: g.matmul(t(2, 4, 8), t(2, 3, 8)), ValueError, ["inner extents 8 and 3", "transpose B"]),
        (lambda g, t: g.matmul(t(2, 8, 4), t(2, 8, 3)), ValueError, ["inner extents 4 and 8", "transpose A"]),
        (lambda g, t: g.matmul(t(2, 4, 8), t(2, 5, 3)), ValueError, ["inner extents 8 and 5", "correct one"]),
        (lambda g, t: g.matmul(t(2, 4, 8), torch.ones(2, 8, 3)), TypeError, ["input B", "cudnn.tensor"]),
        (lambda g, t: g.matmul(t(2, 4, 8), g.tensor([2, 8, 3], [3, 1])), ValueError, ["one stride per dimension"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(
        lambda graph: build(graph, lambda *dims: graph.tensor(dims, [*dims[1:], 1])), error, ["matmul", *words]
    )


def rows(graph: cudnn.pygraph, *dims: int, dtype: object = HALF, column_major: bool = False) -> cudnn.tensor:
    *_, m, n = dims
    return graph.tensor(dims, [m * n, 1, m] if column_major else [m * n, n, 1], dtype)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT, FP8])
def test_cudnn_has_engines(dtype: object, device_properties: Any) -> None:
    graph = planned_graph(device_properties, io=dtype)
    a, b = rows(graph, 4, 128, 64, dtype=dtype), rows(graph, 4, 64, 256, dtype=dtype, column_major=True)
    graph.matmul(a, b).set_output(True).set_data_type(HALF if dtype is FP8 else dtype)
    assert configurations(graph) > 0


def test_cudnn_has_engines_for_int8(device_properties: Any) -> None:
    graph = planned_graph(device_properties, io=INT32, intermediate=INT32, compute=INT32)
    a, b = rows(graph, 4, 128, 64, dtype=INT8), rows(graph, 4, 64, 256, dtype=INT8, column_major=True)
    graph.matmul(a, b).set_output(True)
    assert configurations(graph) > 0


@pytest.mark.deviceless_919
def test_cudnn_builds_fusions(device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    a, b = rows(graph, 4, 128, 64), rows(graph, 1, 64, 256)
    scaled = graph.mul(graph.identity(a), rows(graph, 4, 128, 1)).set_data_type(HALF)
    biased = graph.bias(graph.matmul(scaled, b), rows(graph, 1, 1, 256))
    graph.gelu(biased).set_output(True)
    assert configurations(graph) > 0
    graph.build_plans()
    assert graph.get_plan_name()
