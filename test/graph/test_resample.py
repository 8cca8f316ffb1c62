"""Pooling and its gradient: values against PyTorch's own, inference, refusals, plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.backend import library
from cudnn.pygraph import known_faults
from support.drawing import strided
from support.graphs import BFLOAT16, FLOAT, HALF, configurations, evaluate, planned_graph, reference_graph
from support.refusals import check_refused

MODE, PAD = cudnn.resample_mode, cudnn.padding_mode
INT8, INT32 = cudnn.data_type.INT8, cudnn.data_type.INT32
AVERAGES = ["AVGPOOL_INCLUDE_PADDING", "AVGPOOL_EXCLUDE_PADDING"]
OWN_PADDING = {"MAXPOOL": "NEG_INF_PAD", **dict.fromkeys(AVERAGES, "ZERO_PAD")}  # what cuDNN takes


class Case(NamedTuple):
    x: torch.Tensor
    window: list[int]
    stride: list[int]
    pre: list[int]
    post: list[int]

    def options(self, mode: str, padding: str) -> dict[str, Any]:
        return {
            "resampling_mode": MODE[mode],
            "padding_mode": PAD[padding],
            "pre_padding": self.pre,
            "post_padding": self.post,
            "stride": self.stride,
            "window": self.window,
        }

    def padded(self, x: torch.Tensor, padding: str) -> torch.Tensor:
        amounts = [n for pair in zip(self.pre[::-1], self.post[::-1], strict=True) for n in pair]
        if padding == "EDGE_VAL_PAD":
            return F.pad(x, amounts, mode="replicate")
        return F.pad(x, amounts, value=float("-inf") if padding == "NEG_INF_PAD" else 0.0)

    def pooled(self, x: torch.Tensor, mode: str, padding: str) -> torch.Tensor:
        """By PyTorch's pooling of an image that is padded already."""
        rank = len(self.window)
        average, largest = getattr(F, f"avg_pool{rank}d"), getattr(F, f"max_pool{rank}d")
        if mode == "MAXPOOL":
            return largest(self.padded(x, padding), self.window, self.stride)
        if mode == "AVGPOOL_INCLUDE_PADDING":
            return average(self.padded(x, padding), self.window, self.stride)
        inside = average(self.padded(torch.ones_like(x), "ZERO_PAD"), self.window, self.stride)
        return average(self.padded(x, "ZERO_PAD"), self.window, self.stride) / inside

    def places(self) -> torch.Tensor:
        """Where in its window the largest element stands, from its place in the padded image."""
        image = self.padded(self.x, "NEG_INF_PAD")
        rank = len(self.window)
        _, flat = getattr(F, f"max_pool{rank}d")(image, self.window, self.stride, return_indices=True)
        place = torch.zeros_like(flat)
        steps = [1]
        for window in self.window[:0:-1]:
            steps.insert(0, steps[0] * window)
        for axis in reversed(range(rank)):
            flat, at = flat // image.shape[2 + axis], flat % image.shape[2 + axis]
            start = torch.arange(flat.shape[2 + axis]) * self.stride[axis]
            place += (at - start.view(-1, *[1] * (rank - 1 - axis))) * steps[axis]
        return place


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rank = draw(st.integers(1, 3))
    window = [draw(st.integers(1, 3)) for _ in range(rank)]
    pre, post = ([draw(st.integers(0, size - 1)) for size in window] for _ in range(2))
    dims = [draw(st.integers(1, 3)), draw(st.integers(1, 4)), *[draw(st.integers(size, 6)) for size in window]]
    return Case(draw(strided(dims)), window, [draw(st.integers(1, 3)) for _ in range(rank)], pre, post)


@pytest.mark.parametrize("mode", OWN_PADDING)
@pytest.mark.parametrize("padding", ["ZERO_PAD", "NEG_INF_PAD", "EDGE_VAL_PAD"])
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_values(mode: str, padding: str, case: Case) -> None:
    _, (result,) = evaluate("resample", case.x, **case.options(mode, padding))
    torch.testing.assert_close(result, case.pooled(case.x, mode, padding), check_stride=False)


@settings(max_examples=20, deadline=None)
@given(case=cases())
def test_index(case: Case) -> None:
    options = {"generate_index": True, **case.options("MAXPOOL", "NEG_INF_PAD")}
    _, (values, places) = evaluate("resample", case.x, outputs=None, **options)
    assert torch.equal(values, case.pooled(case.x, "MAXPOOL", "NEG_INF_PAD"))
    assert places.dtype is torch.int8
    assert torch.equal(places.long(), case.places())


@pytest.mark.parametrize("mode", OWN_PADDING)
@pytest.mark.parametrize("by_index", [True, False], ids=["by index", "by input and output"])
@settings(max_examples=10, deadline=None)
@given(case=cases())
def test_gradient(mode: str, by_index: bool, case: Case) -> None:
    image = case.x.clone().requires_grad_()
    expected_y = case.pooled(image, mode, OWN_PADDING[mode])
    loss = torch.randn(expected_y.shape)
    (expected,) = torch.autograd.grad(expected_y, image, loss)

    given: dict[str, Any] = {}
    if mode == "MAXPOOL":
        given = {"index": case.places().to(torch.int8)} if by_index else {"input": case.x, "output": expected_y.data}
    dim = None if "input" in given else list(case.x.shape)
    _, (result,) = evaluate("resample_backward", loss, dim=dim, **given, **case.options(mode, OWN_PADDING[mode]))
    torch.testing.assert_close(result, expected, check_stride=False)


def test_integers() -> None:
    """An average is rounded to the nearest, the largest is exact."""
    x = torch.randint(-128, 128, (2, 3, 6, 6), dtype=torch.int8)
    case = Case(x, [2, 2], [2, 2], [1, 0], [1, 0])
    for mode, padding in OWN_PADDING.items():
        _, (result,) = evaluate("resample", x, types=(INT8,), **case.options(mode, padding))
        exact = case.pooled(x.double(), mode, padding)
        assert (result.double() - exact).abs().max() <= (0.0 if mode == "MAXPOOL" else 0.5)


POOL = {"window": [3, 3], "stride": [2, 2], "pre_padding": [1, 1], "post_padding": [1, 1]}
LARGEST = {"resampling_mode": MODE.MAXPOOL, "padding_mode": PAD.NEG_INF_PAD, **POOL}
AVERAGE = {"resampling_mode": MODE.AVGPOOL_INCLUDE_PADDING, **POOL}


def test_inference() -> None:
    graph = reference_graph(io=HALF)
    last = graph.tensor([2, 3, 8, 9], [216, 1, 27, 3])
    y, index = graph.resample(last, generate_index=True, name="pool", **LARGEST)
    rows = graph.resample(graph.tensor([2, 3, 8, 9], [216, 72, 9, 1]), **AVERAGE)
    wide = graph.resample(last, MODE.MAXPOOL, stride=[1, 1], window=[8, 9], generate_index=True)
    whole = graph.resample(
        graph.tensor([1, 2, 12, 12], [288, 1, 24, 2]),
        MODE.MAXPOOL,
        PAD.NEG_INF_PAD,
        [],
        [],
        [1, 1],
        [12, 12],
        True,
        FLOAT,
        "whole",
    )
    for tensor in (y, index, rows, *wide, *whole):
        tensor.set_output(True)
    dx = graph.resample_backward(y, index=index, **LARGEST).set_output(True).set_dim([2, 3, 8, 9])
    given = graph.resample_backward(y, input=last, output=y, **LARGEST).set_output(True)
    graph.validate()
    assert (y.get_name(), y.get_dim(), y.get_stride()) == ("pool::Y", [2, 3, 4, 5], [60, 1, 15, 3])
    assert (index.get_name(), index.get_dim(), index.get_stride()) == ("pool::INDEX", [2, 3, 4, 5], [60, 1, 15, 3])
    assert rows.get_stride() == [60, 20, 5, 1]
    assert (y.get_data_type(), index.get_data_type()) == (HALF, INT8)
    assert [tensor.get_data_type() for tensor in (wide[1], whole[1])] == [INT8, INT32]
    assert whole[0].get_dim() == [1, 2, 1, 1]
    assert dx.get_stride() == given.get_stride() == [216, 1, 27, 3]


def pooled_back(g: cudnn.pygraph, x: cudnn.tensor, **options: Any) -> cudnn.tensor:
    return g.resample_backward(g.tensor([2, 3, 4, 4], [48, 1, 12, 3]), **{**AVERAGE, **options})


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, x: g.resample(x, "MAXPOOL", **POOL), ValueError, ["resampling_mode", "'MAXPOOL'", "BILINEAR"]),
        (lambda g, x: g.resample(x, MODE.NOT_SET, **POOL), ValueError, ["resampling_mode", "NOT_SET", "MAXPOOL"]),
        (lambda g, x: g.resample(x, MODE.MAXPOOL, 1, **POOL), ValueError, ["padding_mode", "got 1", "NEG_INF_PAD"]),
        (lambda g, x: g.resample(x, MODE.MAXPOOL, stride=[1, 1]), ValueError, ["window: got nothing", "window=[1, 1]"]),
        (lambda g, x: g.resample(x, MODE.MAXPOOL, window=[2, 2]), ValueError, ["stride: got nothing"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "stride": [0, 1]}), ValueError, ["stride", "[0, 1]", "from 1"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "stride": [0.5, 1]}), TypeError, ["stride", "[0.5, 1]", "whole"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "window": 3}), TypeError, ["window", "got 3", "list"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "pre_padding": [-1, 0]}), ValueError, ["pre_padding", "[-1, 0]"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "post_padding": [0, 3]}), ValueError, ["[0, 3]", "less than"]),
        (lambda g, x: g.resample(x, **{**AVERAGE, "window": [3, 11]}), ValueError, ["[3, 11]", "dim=[2, 3, 8, 8]"]),
        (lambda g, x: g.resample(x, **AVERAGE).set_dim([2, 3, 8, 8]), ValueError, ["Y", "dim=[2, 3, 4, 4]"]),
        (lambda g, x: g.resample(g.tensor([8, 8], [8, 1]), **AVERAGE), ValueError, ["rank 2", "rank 3, 4, 5"]),
        (lambda g, x: g.resample(x, generate_index=True, **AVERAGE)[1], ValueError, ["generate_index", "MAXPOOL"]),
        (
            lambda g, x: g.resample(x, generate_index=True, **LARGEST)[1].set_data_type(HALF),
            ValueError,
            ["index", "HALF", "INT8 (up to 128 elements in a window) or INT32"],
        ),
        (
            lambda g, x: g.resample(
                g.tensor([1, 1, 12, 12], [144, 1, 12, 1]),
                MODE.MAXPOOL,
                stride=[1, 1],
                window=[12, 12],
                generate_index=True,
            )[1].set_data_type(INT8),
            ValueError,
            ["INT8", "a window has 144 elements"],
        ),
        (pooled_back, ValueError, ["output DX", "no dim", "set_dim"]),
        (lambda g, x: pooled_back(g, x).set_dim([2, 3, 9, 8]), ValueError, ["DX dim=[2, 3, 9, 8]", "[2, 3, 5, 4]"]),
        (
            lambda g, x: pooled_back(g, x).set_dim([2, 3, 8]),
            ValueError,
            ["DX dim=[2, 3, 8]", "number of dimensions as DX"],
        ),
        (lambda g, x: pooled_back(g, x, **LARGEST), ValueError, ["index", "input and output", "generate_index=True"]),
        (lambda g, x: pooled_back(g, x, input=x, output=x, **LARGEST), ValueError, ["Y dim=[2, 3, 8, 8]"]),
        (
            lambda g, x: pooled_back(g, x, index=g.tensor([2, 3, 8, 8], [192, 1, 24, 3], INT8), input=x, **LARGEST),
            ValueError,
            ["index", "dim=[2, 3, 8, 8]", "dim=[2, 3, 4, 4]"],
        ),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, graph.tensor([2, 3, 8, 8], [192, 1, 24, 3])), error, words)


@pytest.mark.parametrize("mode", ["BILINEAR", "NEAREST"])
def test_interpolation_is_refused(mode: str) -> None:
    graph = reference_graph()
    graph.resample(graph.tensor([2, 3, 8, 8], [192, 1, 24, 3]), MODE[mode], stride=[1, 1], window=[2, 2])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=rf"resampling_mode: got {mode}; .*MAXPOOL"):
        graph.validate()


def image(graph: cudnn.pygraph, dtype: Any = HALF, spatial: int = 2, rows: bool = False) -> cudnn.tensor:
    dims = [4, 24, 16, 12, 8][: 2 + spatial]
    data = torch.empty(dims) if rows else torch.empty(4, *dims[2:], 24).movedim(-1, 1)
    return graph.tensor(dims, list(data.stride()), dtype)


def forward(device: Any, mode: str, dtype: Any = HALF, spatial: int = 2, rows: bool = False, **more: Any) -> Any:
    graph = planned_graph(device, io=dtype)
    case = Case(torch.empty(0), [3] * spatial, [2] * spatial, [1] * spatial, [1] * spatial)
    results = graph.resample(image(graph, dtype, spatial, rows), **{**case.options(mode, OWN_PADDING[mode]), **more})
    for tensor in results if isinstance(results, list) else [results]:
        tensor.set_output(True)
    return graph


def backward(device: Any, mode: str, dtype: Any = HALF, spatial: int = 2, *, by: str) -> cudnn.pygraph:
    graph, rows = planned_graph(device, io=dtype), by == "input"
    case = Case(torch.empty(0), [3] * spatial, [2] * spatial, [1] * spatial, [1] * spatial)
    x = image(graph, dtype, spatial, rows)
    dims = [4, 24, 8, 6, 4][: 2 + spatial]
    strides = list((torch.empty(dims) if rows else torch.empty(4, *dims[2:], 24).movedim(-1, 1)).stride())
    dy, y, index = (graph.tensor(dims, strides, each) for each in (dtype, dtype, INT8))
    given = {"index": {"index": index}, "input": {"input": x, "output": y}, "": {}}[by]
    dx = graph.resample_backward(dy, **given, **case.options(mode, OWN_PADDING[mode]))
    dx.set_output(True).set_dim(x.get_dim())
    return graph


@pytest.mark.parametrize("mode", OWN_PADDING)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT16, FLOAT, INT8])
def test_cudnn_has_engines(mode: str, dtype: Any, device_properties: Any) -> None:
    for spatial in (1, 2, 3):
        assert configurations(forward(device_properties, mode, dtype, spatial)) > 0
        assert configurations(forward(device_properties, mode, dtype, spatial, rows=True)) > 0
        by = "index" if mode == "MAXPOOL" else ""
        assert configurations(backward(device_properties, mode, dtype, spatial, by=by)) > 0
    if mode == "MAXPOOL":
        assert configurations(forward(device_properties, mode, dtype, generate_index=True)) > 0
    if dtype is not INT8:
        assert configurations(backward(device_properties, mode, dtype, by="input")) > 0


@pytest.mark.deviceless_919
def test_padding_that_nothing_reads_may_be_any(h200: Any) -> None:
    bare: dict[str, Any] = {"pre_padding": [0, 0], "post_padding": [0, 0], "stride": [3, 3]}
    assert configurations(forward(h200, "MAXPOOL", padding_mode=PAD.ZERO_PAD, **bare)) > 0
    assert configurations(forward(h200, "AVGPOOL_EXCLUDE_PADDING", padding_mode=PAD.NEG_INF_PAD)) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize(
    ("mode", "options", "message"),
    [
        ("MAXPOOL", {"padding_mode": PAD.ZERO_PAD}, "got ZERO_PAD; .*NEG_INF_PAD for MAXPOOL"),
        ("MAXPOOL", {"padding_mode": PAD.EDGE_VAL_PAD}, "got EDGE_VAL_PAD"),
        (AVERAGES[0], {"padding_mode": PAD.NEG_INF_PAD}, "got NEG_INF_PAD; .*ZERO_PAD for AVGPOOL_INCLUDE_PADDING"),
        ("MAXPOOL", {"generate_index": True, "rows": True}, "generate_index: .*channels-last"),
        ("MAXPOOL", {"compute_data_type": HALF}, None),
        (AVERAGES[0], {"dtype": INT32, "rows": True}, None),
    ],
)
def test_what_cudnn_refuses(mode: str, options: dict[str, Any], message: str | None, h200: Any) -> None:
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=message):
        configurations(forward(h200, mode, **options))


def fused(device: Any, mode: str, before: bool, after: bool) -> cudnn.pygraph:
    graph = planned_graph(device)
    case = Case(torch.empty(0), [3, 3], [2, 2], [1, 1], [1, 1])
    x = graph.relu(image(graph)) if before else image(graph)
    y = graph.resample(x, **case.options(mode, OWN_PADDING[mode]))
    y = graph.mul(y, graph.tensor([1, 24, 1, 1], [24, 1, 24, 24])) if after else y
    y.set_output(True)
    return graph


@pytest.mark.parametrize("mode", OWN_PADDING)
def test_cudnn_fuses_element_wise_operations(mode: str, device_properties: Any) -> None:
    assert configurations(fused(device_properties, mode, before=True, after=False)) > 0
    assert configurations(fused(device_properties, mode, before=False, after=True)) > 0
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="relu"):
        configurations(fused(device_properties, mode, before=True, after=True))


@pytest.mark.deviceless_919
def test_gradients_that_cudnn_refuses(h200: Any) -> None:
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        configurations(backward(h200, "MAXPOOL", INT8, by="input"))


@pytest.mark.parametrize("mode", ["MAXPOOL", AVERAGES[1]])
def test_cudnn_builds_plans(mode: str, h200: Any) -> None:
    index = mode == "MAXPOOL"
    for graph in (forward(h200, mode, generate_index=index), backward(h200, mode, by="index" if index else "")):
        configurations(graph)
        graph.build_plans()
        assert graph.get_plan_name()


WRONG: dict[str, Callable[[Any], cudnn.pygraph]] = {
    "one spatial dimension": lambda device: forward(device, "MAXPOOL", spatial=1),
    "an operation before it": lambda device: fused(device, "MAXPOOL", before=True, after=False),
    "the gradient of an average": lambda device: backward(device, AVERAGES[0], by=""),
    "BFLOAT16, channels last, without an index": lambda device: forward(device, "MAXPOOL", BFLOAT16),
}


@pytest.mark.deviceless_919
@pytest.mark.parametrize("fault", WRONG)
def test_what_cudnn_was_seen_to_compute_wrongly_is_refused(fault: str, h200: Any) -> None:
    graph = WRONG[fault](h200)
    if library.version() > known_faults.SEEN_IN:
        graph.validate()
        return
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=f"got {fault} with cuDNN .*computes it wrongly"):
        graph.validate()


@pytest.mark.deviceless_919
def test_what_it_computes_right_is_not(h200: Any) -> None:
    for graph in (
        forward(h200, AVERAGES[0]),
        forward(h200, "MAXPOOL", BFLOAT16, rows=True),
        forward(h200, "MAXPOOL", INT8),
        forward(h200, "MAXPOOL", BFLOAT16, generate_index=True),
        backward(h200, "MAXPOOL", by="index"),
        backward(h200, "MAXPOOL", by="input"),
        fused(h200, AVERAGES[1], before=False, after=True),
    ):
        assert configurations(graph) > 0
