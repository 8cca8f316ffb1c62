"""Convolution and its gradients: values against sums over windows, inference, refusals, plans of cuDNN."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudnn
from cudnn.enums import convolution_mode
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, evaluate, like, planned_graph, reference_graph, run
from support.refusals import check_refused

INT8, INT32 = cudnn.data_type.INT8, cudnn.data_type.INT32


def channels_last(dims: list[int]) -> tuple[int, ...]:
    return torch.empty([dims[0], *dims[2:], dims[1]]).movedim(-1, 1).stride()


def test_window_by_window() -> None:
    """Asymmetric padding, stride, dilation, two groups, both orientations; the fuzzer has more, and gradients."""
    x, w = torch.randn(2, 4, 7, 6), torch.randn(6, 2, 2, 3)
    pre, post, stride, dilation = [1, 0], [2, 1], [2, 1], [2, 1]
    padded = torch.zeros(2, 4, 10, 7)
    padded[:, :, 1:8, 0:6] = x
    for mode in convolution_mode:
        options = {"pre_padding": pre, "post_padding": post, "stride": stride, "dilation": dilation}
        _, (result,) = evaluate("conv_fprop", x, w, **options, convolution_mode=mode)
        assert result.shape == (2, 6, 4, 5)
        assert result.stride() == channels_last([2, 6, 4, 5])
        taps = w if mode is convolution_mode.CROSS_CORRELATION else w.flip([2, 3])
        for n, k, p, q in itertools.product(range(2), range(6), range(4), range(5)):
            group = k // 3
            patch = padded[n, 2 * group : 2 * group + 2, 2 * p : 2 * p + 3 : 2, q : q + 3]
            torch.testing.assert_close(result[n, k, p, q], (patch * taps[k]).sum(), rtol=1e-4, atol=1e-5)


def test_int8_is_exact() -> None:
    x, w = (torch.randint(-128, 128, dims, dtype=torch.int8) for dims in ([2, 64, 5, 5], [8, 64, 3, 3]))
    _, (y,) = evaluate("conv_fprop", x, w, [1, 1], types=(INT32, INT32, INT32))
    assert torch.equal(y.double(), F.conv2d(x.double(), w.double(), padding=1))


def test_call_forms() -> None:
    x, w = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    mode = convolution_mode.CROSS_CORRELATION
    forms: list[Callable[[Any, Any, Any], Any]] = [
        lambda g, x, w: g.conv_fprop(x, w, [1, 1], [2, 2], [1, 1]),
        lambda g, x, w: g.conv_fprop(x, w, (1, 1), torch.Size([2, 2]), (1, 1), mode, FLOAT, "conv"),
        lambda g, x, w: g.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[2, 2]),
        lambda g, x, w: g.conv_fprop(
            image=x, weight=w, pre_padding=[1, 1], post_padding=[1, 1], stride=[2, 2], dilation=[1, 1], name="conv"
        ),
    ]
    for form in forms:
        graph = reference_graph()
        image, weight = like(graph, x), like(graph, w)
        y = form(graph, image, weight).set_output(True)
        torch.testing.assert_close(
            run(graph, {image: x, weight: w}, y)[0], F.conv2d(x, w, None, 2, 1), check_stride=False
        )
        assert y.get_name() in ("0::Y", "conv::Y")


def test_gradient_shapes_are_inferred_for_stride_one() -> None:
    graph = reference_graph()
    x, w, y = graph.tensor([2, 3, 9, 8], [216, 72, 8, 1]), graph.tensor([4, 3, 3, 2], [18, 6, 2, 1]), None
    y = graph.conv_fprop(x, w, pre_padding=[1, 0], post_padding=[2, 1], dilation=[2, 3])
    dx = graph.conv_dgrad(weight=w, loss=y, pre_padding=[1, 0], post_padding=[2, 1], dilation=[2, 3], name="d")
    dw = graph.conv_wgrad(x, y, pre_padding=[1, 0], post_padding=[2, 1], dilation=[2, 3])
    for tensor in (y, dx, dw):
        tensor.set_output(True)
    graph.validate()
    assert y.get_dim() == [2, 4, 8, 6]
    for tensor, dims in ((dx, [2, 3, 9, 8]), (dw, [4, 3, 3, 2])):
        assert (tensor.get_dim(), tensor.get_stride()) == (dims, [*channels_last(dims)])
    assert (dx.get_name(), dw.get_name()) == ("d::DX", "::DW")


X, W, DY = (2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 4, 4)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, t: g.conv_fprop(t(*X), t(*W)), ValueError, ["not set", "padding=[0, 0]"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1]), ValueError, ["2 numbers"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1, -1]), ValueError, ["from 0 upwards"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1, 1], [0, 1]), ValueError, ["stride", "from 1"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), 1), TypeError, ["padding", "one per spatial"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1, 1], [1, 1], [1, 1], [1, 1]), TypeError, ["by keyword"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1, 1], pre_padding=[1, 1]), ValueError, ["one of the two"]),
        (lambda g, t: g.conv_fprop(t(*X), t(4, 2, 3, 3), [1, 1]), ValueError, ["channels", "groups"]),
        (lambda g, t: g.conv_fprop(t(2, 4, 8, 8), t(3, 2, 3, 3), [1, 1]), ValueError, ["channels", "groups"]),
        (lambda g, t: g.conv_fprop(t(2, 3, 2, 8), t(*W), [0, 0]), ValueError, ["window", "padded image"]),
        (lambda g, t: g.conv_fprop(t(2, 3, 8), t(*W), [1]), ValueError, ["one rank"]),
        (lambda g, t: g.conv_fprop(t(2, 3), t(4, 3), []), ValueError, ["rank 3, 4, 5"]),
        (lambda g, t: g.conv_fprop(t(*X), t(*W), [1, 1]).set_dim([2, 4, 7, 7]), ValueError, ["Y dim=[2, 4, 8, 8]"]),
        (lambda g, t: g.conv_dgrad(t(*DY), t(*W), [1, 1], [2, 2]), ValueError, ["DX", "set_dim"]),
        (lambda g, t: g.conv_wgrad(t(*X), t(*DY), [1, 1], [2, 2]), ValueError, ["DW", "set_dim"]),
        (lambda g, t: g.conv_dgrad(t(*DY), t(*W), [1, 1], [2, 2]).set_dim([2, 3, 9, 9]), ValueError, ["[2, 4, 5, 5]"]),
        (lambda g, t: g.conv_dgrad(t(*DY), padding=[1, 1]), TypeError, ["input W", "got None"]),
        (lambda g, t: g.conv_fprop(t(*X), torch.ones(4, 3, 3, 3), [1, 1]), TypeError, ["input W", "cudnn.tensor"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(
        lambda graph: build(graph, lambda *dims: graph.tensor(dims, torch.empty(dims).stride())),
        error,
        ["conv_", *words],
    )


def nhwc(graph: cudnn.pygraph, *dims: int, dtype: object = HALF) -> cudnn.tensor:
    return graph.tensor(dims, channels_last(list(dims)), dtype)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_cudnn_has_engines(spatial: int, dtype: object, device_properties: Any) -> None:
    extents, window, ones = [8, 16, 16][-spatial:], [3] * spatial, [1] * spatial
    for method, first, second, out in (
        ("conv_fprop", [4, 64, *extents], [32, 64, *window], None),
        ("conv_dgrad", [4, 32, *extents], [32, 64, *window], [4, 64, *extents]),
        ("conv_wgrad", [4, 64, *extents], [4, 32, *extents], [32, 64, *window]),
    ):
        graph = planned_graph(device_properties, io=dtype)
        y = getattr(graph, method)(
            nhwc(graph, *first, dtype=dtype), nhwc(graph, *second, dtype=dtype), ones, ones, ones
        )
        y.set_output(True)
        if out is not None:
            y.set_dim(out)
        assert configurations(graph) > 0


@pytest.mark.deviceless_919
def test_cudnn_builds_fusions(device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    y = graph.conv_fprop(nhwc(graph, 4, 64, 16, 16), nhwc(graph, 32, 64, 3, 3), [1, 1])
    graph.relu(graph.bias(y, nhwc(graph, 1, 32, 1, 1)), upper_clip=6.0).set_output(True)
    assert configurations(graph) > 0
    graph.build_plans()
    assert graph.get_plan_name()
