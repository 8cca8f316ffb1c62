"""Reductions and genstats on the GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import cudnn
from gpu.common import assert_accurate, gpu_graph
from support.graphs import FLOAT, evaluate, like, run

FORMULAS: dict[str, Callable[[torch.Tensor, list[int]], torch.Tensor]] = {
    "ADD": lambda x, axes: x.sum(axes, keepdim=True),
    "MIN": lambda x, axes: x.amin(axes, keepdim=True),
    "MAX": lambda x, axes: x.amax(axes, keepdim=True),
    "AMAX": lambda x, axes: x.abs().amax(axes, keepdim=True),
    "AVG": lambda x, axes: x.mean(axes, keepdim=True),
    "NORM1": lambda x, axes: x.abs().sum(axes, keepdim=True),
}


@pytest.mark.parametrize("mode", FORMULAS)
def test_after_matmul(mode: str) -> None:
    a, b = torch.randn(4, 96, 64, device="cuda").half(), torch.randn(4, 64, 128, device="cuda").half()
    graph = gpu_graph(io=torch.float16)
    first, second = like(graph, a), like(graph, b)
    y = graph.reduction(graph.matmul(first, second), cudnn.reduction_mode[mode]).set_output(True)
    y.set_data_type(FLOAT).set_dim([4, 96, 1]).set_stride([96, 1, 1])
    (result,) = run(graph, {first: a, second: b}, y)
    assert_accurate(result, lambda dtype: FORMULAS[mode](a.to(dtype) @ b.to(dtype), [2]), torch.float16)


@pytest.mark.parametrize("mode", ["MUL", "MUL_NO_ZEROS"])
def test_products_after_matmul(mode: str) -> None:
    """Each row of the first matrix picks a row of the second: its elements, powers of two and zeros, are exact."""
    a = torch.eye(128, device="cuda")[torch.randperm(128)].half()[None]
    b = torch.tensor([-1.0, 0.5, 2.0], device="cuda")[torch.randint(3, (1, 128, 64), device="cuda")].half()
    b[:, ::3, 7] = 0.0
    graph = gpu_graph(io=torch.float16)
    first, second = like(graph, a), like(graph, b)
    y = graph.reduction(graph.matmul(first, second), cudnn.reduction_mode[mode]).set_output(True)
    y.set_data_type(FLOAT).set_dim([1, 128, 1]).set_stride([128, 1, 1])
    (result,) = run(graph, {first: a, second: b}, y)
    values = a.double() @ b.double()
    values = values if mode == "MUL" else torch.where(values == 0, 1.0, values)
    assert torch.equal(result.double(), values.prod(2, keepdim=True))


@pytest.mark.parametrize("mode", FORMULAS)
def test_channels_last_alone(mode: str) -> None:
    x = torch.randn(4, 16, 16, 64, device="cuda").half().movedim(-1, 1)
    options = {"first": FLOAT, "dim": [1, 64, 1, 1], "graph": gpu_graph(torch.float16)}
    _, (result,) = evaluate("reduction", x, cudnn.reduction_mode[mode], **options)
    assert_accurate(result, lambda dtype: FORMULAS[mode](x.to(dtype), [0, 2, 3]), torch.float16)


def test_after_convolution() -> None:
    x = torch.randn(4, 16, 16, 64, device="cuda").half().movedim(-1, 1)
    w = torch.randn(32, 3, 3, 64, device="cuda").half().movedim(-1, 1)
    graph = gpu_graph(io=torch.float16)
    image, weight = like(graph, x), like(graph, w)
    y = graph.reduction(graph.conv_fprop(image, weight, [1, 1]), cudnn.reduction_mode.ADD).set_output(True)
    y.set_data_type(FLOAT).set_dim([1, 32, 1, 1])
    (result,) = run(graph, {image: x, weight: w}, y)
    assert_accurate(
        result,
        lambda dtype: F.conv2d(x.to(dtype), w.to(dtype), padding=1).sum([0, 2, 3], keepdim=True),
        torch.float16,
    )
