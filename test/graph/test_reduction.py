"""Reductions and genstats: values against loops over PyTorch's own, inference, refusals, plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from support.drawing import shapes, strided
from support.graphs import FLOAT, configurations, evaluate, planned_graph, reference_graph, run
from support.refusals import check_refused

MODE = cudnn.reduction_mode
INT32 = cudnn.data_type.INT32
# Each takes the elements that fall together, along the last dimension.
FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ADD": lambda x: reduce(torch.add, x.unbind(-1)),
    "MUL": lambda x: reduce(torch.mul, x.unbind(-1)),
    "MIN": lambda x: reduce(torch.minimum, x.unbind(-1)),
    "MAX": lambda x: reduce(torch.maximum, x.unbind(-1)),
    "AMAX": lambda x: reduce(torch.maximum, x.abs().unbind(-1)),
    "AVG": lambda x: reduce(torch.add, x.unbind(-1)) / x.shape[-1],
    "NORM1": lambda x: torch.linalg.vector_norm(x, 1, dim=-1),
    "NORM2": lambda x: torch.linalg.vector_norm(x, 2, dim=-1),
    "MUL_NO_ZEROS": lambda x: reduce(torch.mul, torch.where(x == 0, torch.ones(()), x).unbind(-1)),
}


def together(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """The elements that a reduction to ``dims`` brings together, along a new last dimension."""
    kept = [axis for axis, extent in enumerate(dims) if extent == x.shape[axis]]
    gone = [axis for axis in range(x.dim()) if axis not in kept]
    return x.permute(*kept, *gone).reshape(*[x.shape[axis] for axis in kept], -1)


@pytest.mark.parametrize("mode", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_values(mode: str, data: st.DataObject) -> None:
    x = data.draw(shapes(largest=4).flatmap(strided))
    x = x.masked_fill_(x.abs() < 0.3, 0.0)
    dims = [data.draw(st.sampled_from([1, extent])) for extent in x.shape]
    _, (result,) = evaluate("reduction", x, MODE[mode], dim=dims)
    expected = FORMULAS[mode](together(x, dims)).reshape(dims)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6, check_stride=False)


@pytest.mark.parametrize("mode", FORMULAS)
@pytest.mark.parametrize("closed", [False, True], ids=["to the end", "to another offset"])
def test_groups_of_rows(mode: str, closed: bool) -> None:
    x, bounds = torch.randn(1, 9, 5), [0, 1, 6, 8] if closed else [0, 1, 6]
    first = torch.tensor(bounds, dtype=torch.int32).view(-1, 1, 1)
    _, (result,) = evaluate("reduction", x, MODE[mode], group_offset=first, dim=[3, 1, 5] if closed else None)
    parts = [FORMULAS[mode](x[0, a:b].T) for a, b in zip(bounds, [*bounds[1:], 9], strict=True)][:3]
    torch.testing.assert_close(result, torch.stack(parts).unsqueeze(1), rtol=1e-5, atol=1e-6, check_stride=False)


def test_groups_that_do_not_rise_are_refused() -> None:
    graph = reference_graph()
    x, offsets = graph.tensor([1, 4, 2], [8, 2, 1]), graph.tensor([2, 1, 1], [1, 1, 1], INT32)
    y = graph.reduction(x, MODE.ADD, group_offset=offsets).set_output(True)
    with pytest.raises(ValueError, match="rising values from 0 to 4"):
        run(graph, {x: torch.ones(1, 4, 2), offsets: torch.tensor([[[2]], [[2]]], dtype=torch.int32)}, y)


def grouped(graph: cudnn.pygraph, mode: str = "ADD") -> cudnn.tensor:
    x, offsets = graph.tensor([1, 512, 128], [65536, 128, 1]), graph.tensor([4, 1, 1], [1, 1, 1], INT32)
    return graph.reduction(x, MODE[mode], group_offset=offsets).set_output(True).set_data_type(FLOAT)


def test_integers_are_exact() -> None:
    x = torch.randint(-1000, 1000, (4, 300), dtype=torch.int32)
    _, (y,) = evaluate("reduction", x, MODE.ADD, types=(INT32, INT32, INT32), dim=[4, 1])
    assert torch.equal(y.long(), x.long().sum(1, keepdim=True))


def test_strides_are_channels_last() -> None:
    graph = reference_graph()
    x = graph.tensor([2, 3, 4, 5], [60, 20, 5, 1])
    whole = graph.reduction(x, MODE.ADD)
    part = graph.reduction(x, mode=MODE.ADD, compute_data_type=FLOAT, name="sum").set_dim([2, 3, 1, 5])
    given = graph.reduction(x, MODE.MAX).set_dim([2, 1, 1, 1]).set_stride([1, 1, 1, 1])
    for tensor in (whole, part, given):
        tensor.set_output(True)
    graph.validate()
    assert (whole.get_dim(), whole.get_stride()) == ([2, 3, 4, 5], [60, 1, 15, 3])
    assert (part.get_name(), part.get_stride()) == ("sum::Y", [15, 1, 15, 3])
    assert given.get_stride() == [1, 1, 1, 1]


@settings(max_examples=15, deadline=None)
@given(x=st.integers(3, 5).flatmap(lambda rank: shapes(rank, 4)).flatmap(strided))
def test_genstats(x: torch.Tensor) -> None:
    (total, squares), results = evaluate("genstats", x, name="stats")
    assert (total.get_name(), squares.get_name()) == ("stats_sum_output", "stats_sq_sum_output")
    channels = x.shape[1]
    for result, values in zip(results, (x, x.square()), strict=True):
        assert list(result.shape) == [1, channels, *[1] * (x.dim() - 2)]
        for channel in range(channels):
            torch.testing.assert_close(result[0, channel].squeeze(), values[:, channel].sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, x: g.reduction(x, MODE.ADD).set_dim([4, 3]), ValueError, ["dim=[4, 3]", "dim=[4, 6]", "set_dim"]),
        (lambda g, x: g.reduction(x, MODE.ADD).set_dim([4]), ValueError, ["dim=[4]"]),
        (lambda g, x: g.reduction(x, MODE.NOT_SET), ValueError, ["mode", "ADD, MUL"]),
        (lambda g, x: g.reduction(x, "ADD"), ValueError, ["mode", "'ADD'", "reduction_mode"]),
        (lambda g, x: g.reduction(torch.ones(3), MODE.ADD), TypeError, ["input X"]),
        (lambda g, x: grouped(g).set_dim([3, 2, 128]), ValueError, ["group_offset", "[groups, 1, 128]"]),
        (lambda g, x: grouped(g).set_dim([5, 1, 128]), ValueError, ["group_offset", "dim=[5, 1, 128]"]),
        (lambda g, x: g.genstats(x)[0], ValueError, ["genstats", "rank"]),
        (lambda g, x: g.genstats(g.tensor([2, 3, 4], [12, 4, 1]))[0].set_dim([1, 4, 1]), ValueError, ["dim=[1, 3, 1]"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, graph.tensor([4, 6], [6, 1])), error, words)


def after_matmul(device: Any, mode: str, dims: list[int], compute: object = FLOAT) -> cudnn.pygraph:
    graph = planned_graph(device)
    a, b = graph.tensor([4, 64, 128], [8192, 128, 1]), graph.tensor([4, 128, 256], [32768, 256, 1])
    y = graph.reduction(graph.matmul(a, b), MODE[mode], compute).set_output(True).set_data_type(FLOAT)
    y.set_dim(dims).set_stride([dims[1] * dims[2], dims[2], 1])
    return graph


@pytest.mark.deviceless_919
@pytest.mark.parametrize("mode", [mode for mode in FORMULAS if mode != "NORM2"])
@pytest.mark.parametrize("dims", [[4, 64, 1], [4, 64, 256]], ids=["rows", "nothing"])
def test_cudnn_has_engines_after_matmul(mode: str, dims: list[int], device_properties: Any) -> None:
    assert configurations(after_matmul(device_properties, mode, dims)) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize("mode", [mode for mode in FORMULAS if mode not in ("MUL", "MUL_NO_ZEROS", "NORM2")])
def test_cudnn_has_engines_for_channels_last_tensors(mode: str, device_properties: Any) -> None:
    for dims in ([1, 64, 1, 1], [4, 1, 16, 16], [1, 1, 1, 1]):
        graph = planned_graph(device_properties)
        x = graph.tensor([4, 64, 16, 16], [16384, 1, 1024, 64])
        graph.reduction(x, MODE[mode]).set_output(True).set_data_type(FLOAT).set_dim(dims)
        assert configurations(graph) > 0


def test_what_no_lowering_makes_is_refused(h200: Any) -> None:
    graph = planned_graph(h200)
    grouped(graph, "AVG")
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="AVG of groups"):
        configurations(graph)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"reduction: mode: got NORM2; .*second graph"):
        configurations(after_matmul(h200, "NORM2", [4, 64, 1]))
    for mode in ("AVG", "NORM1", "MUL_NO_ZEROS"):
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=rf"compute_data_type for mode {mode}: got INT32"):
            configurations(after_matmul(h200, mode, [4, 64, 1], INT32))


@pytest.mark.deviceless_919
@pytest.mark.parametrize("mode", ["ADD", "AVG", "MUL_NO_ZEROS"])
def test_cudnn_builds_a_plan(mode: str, device_properties: Any) -> None:
    graph = after_matmul(device_properties, mode, [4, 64, 1])
    configurations(graph)
    graph.build_plans()
    assert graph.get_plan_name()
