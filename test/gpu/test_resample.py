"""Pooling and its gradient on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn
from gpu.common import IO_TYPES, assert_accurate, every_plan, gpu_graph
from support.graphs import like

MODE, PAD = cudnn.resample_mode, cudnn.padding_mode
LARGEST = {"resampling_mode": MODE.MAXPOOL, "padding_mode": PAD.NEG_INF_PAD}
KINDS: dict[str, dict[str, Any]] = {
    "max": LARGEST,
    "with padding": {"resampling_mode": MODE.AVGPOOL_INCLUDE_PADDING},
    "without padding": {"resampling_mode": MODE.AVGPOOL_EXCLUDE_PADDING},
}


def draw(spatial: int, kind: torch.dtype = torch.float16, rows: bool = False, channels: int = 24) -> torch.Tensor:
    """Values without ties in a window, channels last or row-major."""
    dims = [4, *[15, 12, 10][:spatial]]
    count = 4**spatial
    # Neighbours differ by their place in blocks of four along each axis, each position has a distinct value.
    place = torch.zeros(dims[1:], device="cuda")
    for axis, extent in enumerate(dims[1:]):
        steps = torch.arange(extent, device="cuda") % 4
        place = place * 4 + steps.view(-1, *[1] * (spatial - 1 - axis))
    order = torch.stack([torch.randperm(count, device="cuda") for _ in range(4 * channels)]).view(4, channels, count)
    x = order.gather(2, place.long().flatten().expand(4, channels, -1)).view(4, channels, *dims[1:])
    x = (x.float() / count - 0.5).to(kind)
    return x.contiguous() if rows else x.movedim(1, -1).contiguous().movedim(-1, 1)


def pooled(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Windows of 3, stride 2, padding 1, by PyTorch."""
    rank = x.dim() - 2
    if kind == "max":
        return getattr(F, f"max_pool{rank}d")(x, 3, 2, 1)
    options = {"count_include_pad": kind == "with padding"}
    return getattr(F, f"avg_pool{rank}d")(x, 3, 2, 1, **options)


def options(kind: str, spatial: int) -> dict[str, Any]:
    return {
        **KINDS[kind],
        "window": [3] * spatial,
        "stride": [2] * spatial,
        "pre_padding": [1] * spatial,
        "post_padding": [1] * spatial,
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [False, True], ids=["channels last", "row-major"])
@pytest.mark.parametrize(("spatial", "io"), [(1, torch.float16), *[(2, io) for io in IO_TYPES], (3, torch.float16)])
def test_forward_and_gradient(spatial: int, rows: bool, io: torch.dtype, kind: str) -> None:
    x = draw(spatial, io, rows)
    graph = gpu_graph(io=io)
    image = like(graph, x)
    y = graph.resample(image, **options(kind, spatial)).set_output(True)
    for (result,) in every_plan(graph, {image: x}, y).values():
        assert_accurate(result, lambda dtype: pooled(x.to(dtype), kind), io)

    stored = pooled(x, kind)
    dy = torch.empty_strided(y.get_dim(), y.get_stride(), dtype=io, device="cuda").normal_()
    graph = gpu_graph(io=io)
    loss = like(graph, dy)
    data: dict[Any, torch.Tensor] = {loss: dy}
    arguments: dict[str, Any] = {}
    if kind == "max" and rows:
        out = torch.empty_like(dy).copy_(stored)
        arguments = {"input": like(graph, x), "output": like(graph, out)}
        data |= {arguments["input"]: x, arguments["output"]: out}
    elif kind == "max":
        place = index_of(x)
        arguments = {"index": like(graph, place)}
        data |= {arguments["index"]: place}
    dx = graph.resample_backward(loss, **arguments, **options(kind, spatial)).set_output(True).set_dim(list(x.shape))
    dx.set_stride(list(x.stride()))

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        leaf = x.to(dtype).requires_grad_()
        return torch.autograd.grad(pooled(leaf, kind), leaf, dy.to(dtype))[0]

    for (result,) in every_plan(graph, data, dx).values():
        assert_accurate(result, gradient, io)


def index_of(x: torch.Tensor) -> torch.Tensor:
    """Where in its window, in row-major order, the largest element stands; channels last."""
    windows = F.pad(x.float(), [1] * (2 * (x.dim() - 2)), value=float("-inf"))
    for axis in range(2, x.dim()):
        windows = windows.unfold(axis, 3, 2)
    place = windows.flatten(x.dim()).argmax(-1).to(torch.int8)
    return place.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize(
    ("spatial", "io"), [(1, torch.float16), *[(2, io) for io in (*IO_TYPES, torch.int8)], (3, torch.float16)]
)
@pytest.mark.parametrize("integer", [torch.int8, torch.int32], ids=str)
def test_index_is_the_place_in_the_window(integer: torch.dtype, spatial: int, io: torch.dtype) -> None:
    x = draw(spatial, io) if io.is_floating_point else (draw(spatial, torch.float32) * 128).to(io)
    graph = gpu_graph(io=io)
    image = like(graph, x)
    y, index = graph.resample(image, generate_index=True, **options("max", spatial))
    y.set_output(True).set_data_type(io)
    index.set_output(True).set_data_type(integer)
    for values, places in every_plan(graph, {image: x}, y, index).values():
        assert torch.equal(values.double(), pooled(x.double(), "max"))
        assert torch.equal(places.long(), index_of(x).long())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [False, True], ids=["channels last", "row-major"])
def test_int8(kind: str, rows: bool) -> None:
    x = (draw(2, torch.float32, rows) * 250).to(torch.int8)
    graph = gpu_graph(io=torch.int8)
    image = like(graph, x)
    y = graph.resample(image, **options(kind, 2)).set_output(True)
    exact = pooled(x.double(), kind)
    for name, (result,) in every_plan(graph, {image: x}, y).items():
        error = (result.double() - exact).abs().max().item()
        assert error <= (0 if kind == "max" else 0.51), f"plan {name}: error {error}"


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_padding_and_few_channels(kind: str) -> None:
    x = draw(2, torch.float16, channels=3)
    graph = gpu_graph(io=torch.float16)
    image = like(graph, x)
    y = graph.resample(
        image, **{**options(kind, 2), "pre_padding": [0, 2], "post_padding": [1, 0], "stride": [1, 2]}
    ).set_output(True)

    def formula(dtype: torch.dtype) -> torch.Tensor:
        padding = [2, 0, 0, 1]
        value = float("-inf") if kind == "max" else 0.0
        padded = F.pad(x.to(dtype), padding, value=value)
        if kind == "max":
            return F.max_pool2d(padded, 3, (1, 2))
        share = F.avg_pool2d(F.pad(torch.ones_like(x, dtype=dtype), padding), 3, (1, 2))
        return F.avg_pool2d(padded, 3, (1, 2)) / (1 if kind == "with padding" else share)

    for (result,) in every_plan(graph, {image: x}, y).values():
        assert_accurate(result, formula, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_with_element_wise_operations(before: bool, kind: str) -> None:
    x = draw(2)
    scale = torch.rand(1, 1, 1, 24, device="cuda").half().movedim(-1, 1)
    graph = gpu_graph(io=torch.float16)
    image, factor = like(graph, x), like(graph, scale)
    if before:
        y = graph.resample(graph.relu(graph.mul(image, factor)), **options(kind, 2))
    else:
        y = graph.relu(graph.mul(graph.resample(image, **options(kind, 2)), factor))

    def formula(dtype: torch.dtype) -> torch.Tensor:
        values, factors = x.to(dtype), scale.to(dtype)
        return pooled((values * factors).relu(), kind) if before else (pooled(values, kind) * factors).relu()

    for (result,) in every_plan(graph, {image: x, factor: scale}, y.set_output(True)).values():
        assert_accurate(result, formula, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
def test_after_convolution(kind: str) -> None:
    x = draw(2)
    w = (torch.randn(32, 3, 3, 24, device="cuda") / 15).half().movedim(-1, 1)
    graph = gpu_graph(io=torch.float16)
    image, weight = like(graph, x), like(graph, w)
    y = graph.resample(graph.conv_fprop(image, weight, [1, 1]), **options(kind, 2)).set_output(True)
    for (result,) in every_plan(graph, {image: x, weight: w}, y).values():
        assert_accurate(
            result, lambda dtype: pooled(F.conv2d(x.to(dtype), w.to(dtype), padding=1), kind), torch.float16
        )
