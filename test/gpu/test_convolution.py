"""Convolutions on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn
from cudnn.enums import convolution_mode
from gpu.common import IO_TYPES, assert_accurate, gpu_graph
from support.graphs import FLOAT, MODES, buffer, like, run

pytestmark = pytest.mark.gpu
INT32 = cudnn.data_type.INT32


def draw(*dims: int, kind: torch.dtype = torch.float16) -> torch.Tensor:
    """Normal values, channels last."""
    return torch.randn([dims[0], *dims[2:], dims[1]], device="cuda").to(kind).movedim(-1, 1)


@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_forward_and_gradients(spatial: int, kind: torch.dtype) -> None:
    extents = [10, 14, 12][:spatial]
    x, w = draw(4, 32, *extents, kind=kind), draw(64, 32, *[3] * spatial, kind=kind)
    options: dict[str, Any] = {"padding": [1] * spatial, "stride": [2] * spatial, "dilation": [1] * spatial}
    convolve = getattr(F, f"conv{spatial}d")

    def forward(dtype: torch.dtype) -> torch.Tensor:
        return convolve(x.to(dtype), w.to(dtype), **options)

    dy = draw(*forward(kind).shape, kind=kind)

    def gradient(which: int, dtype: torch.dtype) -> torch.Tensor:
        leaves = [item.to(dtype).requires_grad_() for item in (x, w)]
        return torch.autograd.grad(convolve(*leaves, **options), leaves, dy.to(dtype))[which]

    graph = gpu_graph(io=kind)
    image, weight = like(graph, x), like(graph, w)
    y = graph.conv_fprop(image, weight, **options).set_output(True)
    assert_accurate(run(graph, {image: x, weight: w}, y)[0], forward, kind)

    graph = gpu_graph(io=kind)
    loss, weight = like(graph, dy), like(graph, w)
    dx = graph.conv_dgrad(loss, weight, **options).set_output(True).set_dim(x.shape)
    assert_accurate(run(graph, {loss: dy, weight: w}, dx)[0], lambda dtype: gradient(0, dtype), kind)

    graph = gpu_graph(io=kind)
    image, loss = like(graph, x), like(graph, dy)
    dw = graph.conv_wgrad(image, loss, **options).set_output(True).set_dim(w.shape)
    assert_accurate(run(graph, {image: x, loss: dy}, dw)[0], lambda dtype: gradient(1, dtype), kind)


def test_asymmetric_padding_and_mirrored_filter() -> None:
    x, w = draw(2, 16, 11, 9), draw(32, 16, 3, 3)
    graph = gpu_graph(io=torch.float16)
    image, weight = like(graph, x), like(graph, w)
    y = graph.conv_fprop(
        image, weight, pre_padding=[0, 1], post_padding=[2, 0], convolution_mode=convolution_mode.CONVOLUTION
    ).set_output(True)
    try:
        (result,) = run(graph, {image: x, weight: w}, y)
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error)[:200])
    assert_accurate(
        result, lambda dtype: F.conv2d(F.pad(x.to(dtype), [1, 0, 0, 2]), w.to(dtype).flip([2, 3])), torch.float16
    )


def test_int8_is_exact() -> None:
    x, w = (
        torch.randint(-128, 128, dims, device="cuda", dtype=torch.int8).movedim(-1, 1)
        for dims in ([2, 8, 8, 64], [32, 3, 3, 64])
    )
    # In FLOAT, which holds sums of 8-bit products exactly up to 2 ** 24; 9.19 writes a wrong INT32 output.
    graph = gpu_graph(io=FLOAT, intermediate=INT32, compute=INT32)
    image, weight = like(graph, x), like(graph, w)
    y = graph.conv_fprop(image, weight, [1, 1]).set_output(True)
    (result,) = run(graph, {image: x, weight: w}, y)
    assert torch.equal(result.double(), F.conv2d(x.double(), w.double(), padding=1))


@pytest.mark.parametrize(
    ("image", "window"), [((2, 64, 8, 8), 3), ((1, 64, 16, 16), 1), ((4, 32, 14, 12), 3), ((2, 128, 9, 7), 3)], ids=str
)
def test_int8_with_int32_output(image: tuple[int, ...], window: int) -> None:
    """Every plan writes the exact integers."""
    x, w = (
        torch.randint(-128, 128, (dims[0], *dims[2:], dims[1]), device="cuda", dtype=torch.int8).movedim(-1, 1)
        for dims in (image, (64, image[1], window, window))
    )
    expected = F.conv2d(x.double(), w.double(), padding=window // 2)
    graph = gpu_graph(io=INT32, intermediate=INT32, compute=INT32)
    tensors = [like(graph, x), like(graph, w)]
    y = graph.conv_fprop(*tensors, [window // 2] * 2, [1, 1], [1, 1]).set_output(True)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans(MODES)
    graph.check_support()
    said: dict[str, float] = {}  # the wrong share of elements by plan
    for index in range(graph.get_execution_plan_count()):
        try:
            graph.build_plan_at_index(index)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue
        result = buffer(y, "cuda")
        size = graph.get_workspace_size_plan_at_index(index)
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device="cuda")
        graph.execute_plan_at_index({tensors[0]: x, tensors[1]: w, y: result}, workspace, index)
        said[graph.get_plan_name_at_index(index)] = (result.double() != expected).float().mean().item()
    assert said
    assert not any(said.values()), said
