"""Convolutions on the GPU, where random graphs (``test_fuzz``) have few: each rank, type and gradient; integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn
from gpu.common import IO_TYPES, assert_accurate, every_plan, gpu_graph
from support.graphs import evaluate, like

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

    _, (y,) = evaluate("conv_fprop", x, w, **options, graph=gpu_graph(kind))
    assert_accurate(y, forward, kind)
    _, (dx,) = evaluate("conv_dgrad", dy, w, **options, dim=x.shape, graph=gpu_graph(kind))
    assert_accurate(dx, lambda dtype: gradient(0, dtype), kind)
    _, (dw,) = evaluate("conv_wgrad", x, dy, **options, dim=w.shape, graph=gpu_graph(kind))
    assert_accurate(dw, lambda dtype: gradient(1, dtype), kind)


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
    plans = every_plan(graph, dict(zip(tensors, (x, w), strict=True)), y)
    wrong = {name: (result.double() != expected).float().mean().item() for name, (result,) in plans.items()}
    assert not any(wrong.values()), wrong  # the share of elements by plan
