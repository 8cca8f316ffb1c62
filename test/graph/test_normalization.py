"""Normalisations: results and gradients by their formula, shapes, call forms, messages, cuDNN's plans without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import cudnn
from cudnn.pygraph.lowering import Lowering
from support.drawing import strided
from support.graphs import (
    FLOAT,
    HALF,
    MODES,
    configurations,
    evaluate,
    outputs,
    packed,
    planned_graph,
    reference_graph,
    run,
)
from support.refusals import check_refused
from support.selection import brief

BOOLEAN = cudnn.data_type.BOOLEAN
INFERENCE, TRAINING = cudnn.norm_forward_phase.INFERENCE, cudnn.norm_forward_phase.TRAINING


def close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(
        actual, expected.reshape(actual.shape).to(actual.dtype), rtol=1e-4 * scale, atol=2e-5 * scale
    )


@st.composite
def arrays(draw: st.DrawFn, min_rank: int = 2) -> torch.Tensor:
    dims = draw(st.lists(st.integers(1, 5), min_size=min_rank, max_size=5))
    dims[0], dims[-1] = dims[0] + 1, dims[-1] + 1  # torch refuses one value per channel
    return draw(strided(dims))


def parameter(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    return torch.randn([extent if axis in axes else 1 for axis, extent in enumerate(x.shape)])


def formula(
    x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, axes: Sequence[int], epsilon: float, centred: bool
) -> list[torch.Tensor]:
    """Y, the mean and the inverse deviation of what ``axes`` bring together. One value has no deviation."""
    mean = x.mean(axes, keepdim=True)
    x = x - mean if centred else x
    inv = (x.square().mean(axes, keepdim=True) + epsilon).rsqrt()
    return [x * inv * scale + bias, mean, inv]


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "instancenorm", "batchnorm", "adalayernorm"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_results_and_gradients(name: str, data: st.DataObject) -> None:
    """In float64, differentiated by PyTorch."""
    x = data.draw(arrays(min_rank=3 if name in ("instancenorm", "adalayernorm") else 2))
    x = x.flatten(2) if name == "adalayernorm" else x
    chosen = sorted(data.draw(st.sets(st.integers(1, x.dim() - 1), min_size=1)))
    space = range(2, x.dim())
    axes, varying = {
        "instancenorm": ([*space], [1]),
        "batchnorm": ([0, *space], [1]),
        "adalayernorm": ([2], [0, 2]),
    }.get(name, (chosen, chosen))
    scale, bias, dy = parameter(x, varying), parameter(x, varying), torch.randn(x.shape)
    epsilon, centred = data.draw(st.sampled_from([1e-5, 1e-2])), name != "rmsnorm"
    has_bias = name not in ("rmsnorm", "adalayernorm") or data.draw(st.booleans())
    options = {"zero_centered_gamma": True} if name == "layernorm" and data.draw(st.booleans()) else {}
    phase = [] if name == "batchnorm" else [TRAINING]
    (y, *statistics), (found, *values) = evaluate(
        name, *phase, x, scale, bias if has_bias else None, epsilon=epsilon, **options
    )
    held = [t.double().requires_grad_() for t in (x, scale, bias)]
    gamma = held[1] + 1 if options else held[1]
    beta = held[2] if has_bias else held[2] - held[2].detach()
    expected, *of_rows = formula(held[0], gamma, beta, axes, epsilon, centred)
    close(found, expected.detach())
    assert len(values) == 1 + centred
    for tensor, value, wanted in zip(statistics, values, of_rows[-len(values) :], strict=True):
        assert tensor.get_dim() == list(wanted.shape)
        close(value, wanted.detach(), 10)
    assert y.get_stride() == list(x.stride())
    if options:
        return

    more = [] if centred else [has_bias]
    outputs, got = evaluate(f"{name}_backward", dy, x, scale, *values, *more)
    assert outputs[0].get_stride() == list(x.stride())
    names = ["::DX", "::DSCALE", "::DBIAS"][: 3 if centred else 2 + has_bias]
    assert [tensor.get_name().upper() for tensor in outputs] == names
    gradients = torch.autograd.grad(expected, held[: len(got)], dy.double())
    for result, wanted in zip(got, gradients, strict=True):
        close(result, wanted, max(1.0, float(values[-1].max())))


@settings(deadline=None, max_examples=25)
@given(arrays(), st.floats(0, 1, width=16), st.booleans())
def test_running_statistics(data: torch.Tensor, momentum: float, by_tensor: bool) -> None:
    weight, offset, old_mean = (parameter(data, [1]) for _ in range(3))
    old_var = parameter(data, [1]).exp()
    scalars = [torch.full([1] * data.dim(), value) if by_tensor else value for value in (1e-3, momentum)]
    wanted, (found, *_, new_mean, new_var) = evaluate("batchnorm", data, weight, offset, old_mean, old_var, *scalars)
    assert [t.get_dim() for t in wanted[1:]] == [list(weight.shape)] * 4
    running = [old_mean.flatten().clone(), old_var.flatten().clone()]
    expected = functional.batch_norm(
        data, *running, weight.flatten(), offset.flatten(), training=True, momentum=momentum, eps=1e-3
    )
    close(found, expected)
    close(new_mean, running[0])
    close(new_var, running[1])


def test_batchnorm_without_running_statistics_returns_none_for_them() -> None:
    data, weight = torch.randn(4, 3, 2, 2), torch.ones(1, 3, 1, 1)
    _, (found, *statistics) = evaluate("batchnorm", data, weight, torch.zeros(1, 3, 1, 1))
    assert len(statistics) == 2
    close(found, functional.batch_norm(data, None, None, training=True))


@settings(deadline=None, max_examples=20)
@given(arrays())
def test_batchnorm_inference(data: torch.Tensor) -> None:
    mean, inv, weight, offset = (parameter(data, [1]) for _ in range(4))
    inv = inv.abs() + 0.5
    (y,), (found,) = evaluate("batchnorm_inference", data, mean, inv, weight, offset, name="bn")
    assert y.get_name() == "bn::Y"
    close(
        found,
        functional.batch_norm(data, mean.flatten(), inv.flatten() ** -2, weight.flatten(), offset.flatten(), eps=1e-30),
    )


def test_half_precision_outputs_are_the_float_results_rounded_once() -> None:
    data, weight = torch.randn(6, 16, dtype=torch.float16), torch.randn(1, 16)
    _, (found, inv) = evaluate("rmsnorm", TRAINING, data, weight, types=(HALF,))
    assert (found.dtype, inv.dtype) == (torch.float16, torch.float32)
    exact = functional.rms_norm(data.double(), [16], weight[0].double(), 1e-5)
    assert torch.all((found.double() - exact).abs() <= exact.abs() * 2**-11 * 1.01 + 1e-7)


# How the methods may be called.


def shape_graph() -> tuple[cudnn.pygraph, Any, Any, Any]:
    graph = reference_graph()
    x, scale, bias = torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)
    return graph, graph.tensor_like(x), graph.tensor_like(scale), graph.tensor_like(bias)


def test_the_phase_may_be_left_out_and_means_inference() -> None:
    graph, x, scale, bias = shape_graph()
    for results in (
        graph.layernorm(x, scale, bias),
        graph.layernorm(x, scale, bias, 1e-3),
        graph.layernorm(x, scale, bias=bias, epsilon=1e-3),
        graph.layernorm(input=x, scale=scale, bias=bias),
        graph.layernorm(INFERENCE, x, scale, bias),
        graph.layernorm(norm_forward_phase=INFERENCE, input=x, scale=scale, bias=bias),
    ):
        assert len(results) == 3
        assert results[0] is not None
        assert results[1:] == [None, None]
    for results in (
        graph.rmsnorm(x, scale, epsilon=1e-5),
        graph.rmsnorm(x, scale, bias),
        graph.rmsnorm(INFERENCE, x, scale),
    ):
        assert len(results) == 2
        assert results[1] is None
    assert [node.phase for node in graph.nodes] == [INFERENCE] * len(graph.nodes)


def test_gamma_of_rank_one_runs_along_the_last_dimension_and_validation_repeats() -> None:
    data, gamma, beta = torch.randn(2, 3, 8), torch.randn(16)[::2], torch.randn(8)
    graph = reference_graph()
    x, scale, bias = graph.tensor_like(data), graph.tensor_like(gamma), graph.tensor_like(beta)
    y = graph.layernorm(x, scale, bias, epsilon=1e-2, zero_centered_gamma=True)[0].set_output(True)
    graph.validate()
    graph.validate()
    assert scale.get_dim() == bias.get_dim() == [1, 1, 8]
    assert (scale.get_stride()[-1], bias.get_stride()) == (2, [8, 8, 1])
    (found,) = run(graph, {x: data, scale: gamma, bias: beta}, y)
    close(found, functional.layer_norm(data, [8], 1 + gamma, beta, 1e-2))


def test_vectors_run_along_the_channels_of_instance_and_batch_normalisation() -> None:
    data, gamma, beta = torch.randn(2, 4, 3, 3), torch.randn(4), torch.randn(4)
    _, (found,) = evaluate("instancenorm", data, gamma, beta)
    close(found, functional.instance_norm(data, weight=gamma, bias=beta))


def test_parameters_without_shape_take_theirs_from_x() -> None:
    graph = reference_graph()
    x = graph.tensor([2, 4, 3, 5], [60, 1, 20, 4])
    layer, batch = ([graph.tensor([], []) for _ in range(2)] for _ in range(2))
    graph.layernorm(TRAINING, x, *layer)[0].set_output(True)
    graph.batchnorm(x, *batch)[0].set_output(True)
    graph.validate()
    assert [t.get_dim() for t in (*layer, *batch)] == [[1, 4, 3, 5]] * 2 + [[1, 4, 1, 1]] * 2
    assert layer[0].get_stride() == [60, 1, 20, 4]
    assert batch[0].get_stride() == [4, 1, 4, 4]


def test_statistics_take_the_type_of_outputs() -> None:
    for io in (HALF, FLOAT):
        graph = reference_graph(io)
        x, scale = graph.tensor([8, 32, 1, 1], [32, 1, 32, 32]), graph.tensor([1, 32, 1, 1], [32, 1, 32, 32])
        found = graph.layernorm(TRAINING, x, scale, scale)
        for tensor in found:
            tensor.set_output(True)
        graph.validate()
        assert {tensor.get_data_type() for tensor in found} == {io}


def test_names_and_shapes_of_outputs() -> None:
    graph = reference_graph()
    x = graph.tensor([8, 32, 1, 1], [32, 1, 32, 32])
    vector, column = ([1, 32, 1, 1], [32, 1, 32, 32]), ([8, 1, 1, 1], [1, 1, 1, 1])
    scale, bias = graph.tensor(*vector), graph.tensor(*vector)
    forward = graph.layernorm(TRAINING, x, scale, bias, name="ln")
    backward = graph.layernorm_backward(x, x, scale, forward[1], forward[2], name="ln_bwd")
    rms = graph.rmsnorm_backward(x, x, scale, forward[2], True, name="rms_bwd")
    for tensor in (*forward, *backward, *rms):
        tensor.set_output(True)
    graph.validate()
    assert [t.get_name() for t in forward] == ["ln::Y", "ln::MEAN", "ln::INV_VARIANCE"]
    assert [t.get_name() for t in backward] == ["ln_bwd::DX", "ln_bwd::DSCALE", "ln_bwd::DBIAS"]
    assert [t.get_name() for t in rms] == ["rms_bwd::DX", "rms_bwd::Dscale", "rms_bwd::Dbias"]
    assert [(t.get_dim(), t.get_stride()) for t in forward[1:]] == [column, column]
    assert [(t.get_dim(), t.get_stride()) for t in backward[1:]] == [vector, vector]


# Messages.


X, S = (2, 4, 3, 3), (1, 4, 1, 1)


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            lambda g, t: g.layernorm(cudnn.norm_forward_phase.NOT_SET, t(*X), t(*S), t(*S)),
            ValueError,
            ["norm_forward_phase", "TRAINING"],
        ),
        (
            lambda g, t: g.layernorm("TRAINING", t(*X), t(*S), t(*S)),
            ValueError,
            ["norm_forward_phase: got 'TRAINING'; allowed"],
        ),
        (lambda g, t: g.layernorm(t(*X), t(*S), None), TypeError, ["layernorm: input BIAS: got None"]),
        (lambda g, t: g.rmsnorm(t(*X), 3.0), TypeError, ["rmsnorm: input SCALE: got float"]),
        (lambda g, t: g.rmsnorm(t(*X), t(*S), epsilon="1e-5"), TypeError, ["rmsnorm: epsilon: got str"]),
        (lambda g, t: g.rmsnorm(t(*X), t(*S), epsilon=t(*S)), ValueError, ["EPSILON", "one element"]),
        (lambda g, t: g.instancenorm_backward(t(*X), t(*X), t(*S)), TypeError, ["input MEAN: got None"]),
        (
            lambda g, t: g.rmsnorm(t(*X), t(1, 5, 1, 1), name="norm"),
            ValueError,
            ["norm (rmsnorm): input SCALE", "[1, 5, 1, 1] with X of dim=[2, 4, 3, 3]", "extents of X, or 1"],
        ),
        (lambda g, t: g.rmsnorm(t(*X), t(4, 3)), ValueError, ["input SCALE"]),
        (
            lambda g, t: g.layernorm(t(*X), t(*S), t(1, 4, 3, 3)),
            ValueError,
            ["input BIAS", "dim=[1, 4, 1, 1], as SCALE"],
        ),
        (
            lambda g, t: g.batchnorm(t(*X), t(1, 4, 3, 3), t(*S)),
            ValueError,
            ["input SCALE", "allowed: dim=[1, 4, 1, 1]"],
        ),
        (lambda g, t: g.batchnorm_backward(t(*X), t(*X), t(*S), t(*S), t(2, 4, 1, 1)), ValueError, ["INV_VARIANCE"]),
        (lambda g, t: g.batchnorm(t(*X), *(t(*S) for _ in range(4))), ValueError, ["statistics: got no momentum"]),
        (lambda g, t: g.batchnorm(t(*X), t(*S), t(*S), t(*S), None, 1e-5, 0.1), ValueError, ["got no in_running_var"]),
        (
            lambda g, t: g.batchnorm_backward(t(2, 4, 3, 1), t(*X), t(*S), t(*S), t(*S)),
            ValueError,
            ["input DY", "as X"],
        ),
        (lambda g, t: g.rmsnorm(t(4), t(4)), ValueError, ["input X ", "rank 1"]),
        (lambda g, t: [g.rmsnorm(t(*X), t(*S))[0].set_dim([2, 4, 9])], ValueError, ["output Y ", "dim=[2, 4, 3, 3]"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, lambda *dims: graph.tensor(dims, packed(*dims)))[0], error, words)


def test_one_process_is_its_own_peer(caplog: pytest.LogCaptureFixture) -> None:
    data, loss, vector = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3), torch.rand(1, 4, 1, 1) + 0.5
    buffers = [torch.full((2, 16, 1, 1), 7.0) for _ in range(2)]
    leaf = data.clone().requires_grad_()
    expected = functional.batch_norm(leaf, None, None, vector.flatten(), vector.flatten(), training=True, eps=0.5)
    (gradient,) = torch.autograd.grad(expected, leaf, loss)
    graph = reference_graph()
    x, dy, s, *peers = (graph.tensor_like(tensor) for tensor in (data, loss, vector, *buffers))
    y, mean, inv, *_ = graph.batchnorm(x, s, s, epsilon=0.5, peer_stats=peers, name="bn")
    dx = graph.batchnorm_backward(dy, x, s, mean, inv, peers)[0]
    inputs = {x: data, dy: loss, s: vector, **dict(zip(peers, buffers, strict=True))}
    found = run(graph, inputs, *outputs([y, dx]))
    close(found[0], expected.detach())
    close(found[1], gradient)
    assert all(bool((buffer == 7).all()) for buffer in buffers)
    assert "bn (batchnorm): peer_stats" in caplog.text


# Every operation as a graph. Layouts and types are those that cuDNN's engines are written for.

Nhwc = tuple[list[int], list[int]]
IMAGE: Nhwc = ([4, 64, 16, 16], [64 * 256, 1, 64 * 16, 64])
CHANNELS: Nhwc = ([1, 64, 1, 1], [64, 1, 64, 64])
PER_SAMPLE: Nhwc = ([4, 64, 1, 1], [64, 1, 64, 64])
ROWS: Nhwc = ([96, 128, 1, 1], [128, 1, 128, 128])
HIDDEN: Nhwc = ([1, 128, 1, 1], [128, 1, 128, 128])
ROW_STATISTICS: Nhwc = ([96, 1, 1, 1], [1, 1, 1, 1])
TOKENS: Nhwc = ([4, 24, 128], [24 * 128, 128, 1])
LAST: Nhwc = ([1, 1, 128], [128, 128, 1])
PER_BATCH: Nhwc = ([4, 1, 128], [128, 128, 1])
TOKEN_STATISTICS: Nhwc = ([4, 24, 1], [24, 1, 1])
PEERS: Nhwc = ([2, 4 * 64, 1, 1], [256, 1, 256, 256])


def real(graph: cudnn.pygraph, shape: Nhwc, count: int = 1, dtype: cudnn.data_type = FLOAT) -> list[Any]:
    return [graph.tensor(*shape, dtype) for _ in range(count)]


def norm(method: str, x: Nhwc, *parameters: Nhwc, phase: Any = None, peers: int = 0, **keywords: Any) -> Any:
    """Describes an operation: its phase, DY of a gradient, X, then parameters and statistics in FLOAT."""

    def add(g: cudnn.pygraph) -> None:
        backward = method.endswith("_backward")
        given = [*([] if phase is None else [phase]), *real(g, x, 1 + backward, HALF)]
        given += [tensor for shape in parameters for tensor in real(g, shape)]
        exchange = {"peer_stats": real(g, PEERS, peers)} if peers else {}
        outputs(getattr(g, method)(*given, **({} if backward else {"epsilon": 1e-5}), **keywords, **exchange))

    return add


def batchnorm_relu_mask(g: cudnn.pygraph) -> None:
    y, *statistics = g.batchnorm(*real(g, IMAGE, 1, HALF), *real(g, CHANNELS, 4), 1e-5, 0.1)
    relu = g.relu(y)
    mask = g.cmp_gt(relu, *real(g, ([1] * 4, [1] * 4)))
    outputs([relu, *statistics])
    mask.set_output(True).set_data_type(BOOLEAN)


def batchnorm_add_relu(g: cudnn.pygraph) -> None:
    y, *statistics = g.batchnorm(*real(g, IMAGE, 1, HALF), *real(g, CHANNELS, 4), 1e-5, 0.1)
    outputs([g.relu(g.add(y, *real(g, IMAGE, 1, HALF))), *statistics])


def batchnorm_inference_relu_batchnorm_backward(g: cudnn.pygraph) -> None:
    x, dy = real(g, IMAGE, 2, HALF)
    mean, inv, scale, bias = real(g, CHANNELS, 4)
    y = g.batchnorm_inference(x, mean, inv, scale, bias).set_data_type(HALF)
    outputs(g.batchnorm_backward(g.relu_backward(dy, y).set_data_type(HALF), x, scale, mean, inv))


def mask_batchnorm_backward(g: cudnn.pygraph) -> None:
    (mask,) = real(g, IMAGE, 1, BOOLEAN)
    x, dy = real(g, IMAGE, 2, HALF)
    scale, mean, inv = real(g, CHANNELS, 3)
    outputs(g.batchnorm_backward(g.mul(dy, mask).set_data_type(HALF), x, scale, mean, inv))


GRAPHS: dict[str, Callable[[cudnn.pygraph], None]] = {
    "layernorm inference": norm("layernorm", ROWS, HIDDEN, HIDDEN, phase=INFERENCE),
    "layernorm training": norm("layernorm", ROWS, HIDDEN, HIDDEN, phase=TRAINING),
    "layernorm of tokens": norm("layernorm", TOKENS, LAST, LAST, phase=TRAINING),
    "layernorm zero-centred": norm("layernorm", ROWS, HIDDEN, HIDDEN, phase=TRAINING, zero_centered_gamma=True),
    "layernorm_backward": norm("layernorm_backward", ROWS, HIDDEN, ROW_STATISTICS, ROW_STATISTICS),
    "layernorm_backward of tokens": norm("layernorm_backward", TOKENS, LAST, TOKEN_STATISTICS, TOKEN_STATISTICS),
    "rmsnorm inference": norm("rmsnorm", ROWS, HIDDEN, phase=INFERENCE),
    "rmsnorm training with bias": norm("rmsnorm", ROWS, HIDDEN, HIDDEN, phase=TRAINING),
    "rmsnorm of tokens, gamma a vector": norm("rmsnorm", TOKENS, ([128], [1]), phase=TRAINING),
    "rmsnorm_backward": norm("rmsnorm_backward", ROWS, HIDDEN, ROW_STATISTICS, has_dbias=False),
    "rmsnorm_backward with bias": norm("rmsnorm_backward", ROWS, HIDDEN, ROW_STATISTICS, has_dbias=True),
    "instancenorm inference": norm("instancenorm", IMAGE, CHANNELS, CHANNELS, phase=INFERENCE),
    "instancenorm training": norm("instancenorm", IMAGE, CHANNELS, CHANNELS, phase=TRAINING),
    "instancenorm_backward": norm("instancenorm_backward", IMAGE, CHANNELS, PER_SAMPLE, PER_SAMPLE),
    "adalayernorm inference": norm("adalayernorm", TOKENS, PER_BATCH, PER_BATCH, phase=INFERENCE),
    "adalayernorm training": norm("adalayernorm", TOKENS, PER_BATCH, PER_BATCH, phase=TRAINING),
    "adalayernorm_backward": norm("adalayernorm_backward", TOKENS, PER_BATCH, TOKEN_STATISTICS, TOKEN_STATISTICS),
    "batchnorm": norm("batchnorm", IMAGE, *[CHANNELS] * 4, momentum=0.1),
    "batchnorm without running statistics": norm("batchnorm", IMAGE, CHANNELS, CHANNELS),
    "batchnorm with peers": norm("batchnorm", IMAGE, *[CHANNELS] * 4, momentum=0.1, peers=2),
    "batchnorm_backward": norm("batchnorm_backward", IMAGE, *[CHANNELS] * 3),
    "batchnorm + relu + mask": batchnorm_relu_mask,
    "batchnorm + add + relu": batchnorm_add_relu,
    "batchnorm_inference + relu_backward + batchnorm_backward": batchnorm_inference_relu_batchnorm_backward,
    "mask + batchnorm_backward": mask_batchnorm_backward,
}


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", GRAPHS)
def test_cudnn_has_engines(name: str, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    GRAPHS[name](graph)
    assert configurations(graph) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize("name", brief(list(GRAPHS), 1, 4, 7, 9, 12, 15, 17, 20, 22))
def test_cudnn_builds_a_plan(name: str, device_properties: Any) -> None:
    """Which compiles its kernels."""
    graph = planned_graph(device_properties)
    GRAPHS[name](graph)
    graph.build(MODES)
    assert graph.get_workspace_size() >= 0


@pytest.mark.parametrize("name", GRAPHS)
def test_cudnn_is_told_of_every_tensor(name: str, libcudnn: Any) -> None:
    graph = reference_graph(HALF)
    GRAPHS[name](graph)
    graph.validate()
    lowering = Lowering(graph.context, graph.nodes, libcudnn.version)
    lowering.run(graph.nodes)
    tensors = [tensor for node in graph.nodes for tensor in node.tensors()]
    assert lowering.bindings.user == sorted({t.get_uid() for t in tensors if not t.is_virtual and t.value is None})


def test_batchnorm_inference_alone_is_left_to_fusions_by_cudnn(h200: Any) -> None:
    graph = planned_graph(h200)
    outputs([graph.batchnorm_inference(*real(graph, IMAGE, 1, HALF), *real(graph, CHANNELS, 4))])
    with pytest.raises(cudnn.cudnnGraphNotSupportedError):
        configurations(graph)
