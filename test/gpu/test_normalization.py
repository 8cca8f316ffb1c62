"""Normalisations on a GPU against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

import cudnn
from gpu.common import gpu_graph
from support.graphs import FLOAT, HALF, run

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
INFERENCE, TRAINING = cudnn.norm_forward_phase.INFERENCE, cudnn.norm_forward_phase.TRAINING
SEED = torch.seed()  # inputs are fresh in every run; failures print it
EPSILON = 1e-3
TYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
PHASES = pytest.mark.parametrize("phase", [INFERENCE, TRAINING])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers off zero; four-dimensional ones channels-last, the layout that cuDNN's engines are written for."""
    data = (torch.randn(shape, device=DEVICE) + 0.25).to(dtype)
    return data.contiguous(memory_format=torch.channels_last) if data.dim() == 4 else data


def accurate(found: torch.Tensor, formula: Callable[..., torch.Tensor], *inputs: torch.Tensor, terms: int = 1) -> None:
    """Compares with a formula in PyTorch: at most twice the formula's error in the output's type, plus its rounding.

    ``terms`` is how many numbers each result sums up: another order of summation moves it by sqrt(terms) roundings.
    """
    exact = formula(*(t.double() for t in inputs)).reshape(found.shape)
    same_type = formula(*(t.to(found.dtype) for t in inputs)).reshape(found.shape).double()
    largest = float(exact.abs().max())
    bound = 2 * float((same_type - exact).abs().max()) + torch.finfo(found.dtype).eps * largest * terms**0.5
    error = float((found.double() - exact).abs().nan_to_num(float("inf")).max())
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, largest value {largest:.3g}, seed {SEED}"


def outputs(tensors: Sequence[Any]) -> list[Any]:
    """Marks what is there as output: the first in the graph's type, statistics and gradients of parameters in FLOAT."""
    present = [tensor for tensor in tensors if tensor is not None]
    for index, tensor in enumerate(present):
        tensor.set_output(True)
        if index:
            tensor.set_data_type(FLOAT)
    return present


def gradient(forward: Callable[..., torch.Tensor], which: int) -> Callable[..., torch.Tensor]:
    """The gradient of ``forward(*inputs)`` with respect to one input, as a function of dY and the inputs."""

    def formula(dy: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            held = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in inputs]
            return torch.autograd.grad(forward(*held), held[which], dy.contiguous())[0]

    return formula


def layer(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    hidden = scale.numel()
    flat = functional.layer_norm(x.reshape(-1, hidden), [hidden], scale.flatten(), bias.flatten(), EPSILON)
    return flat.reshape(x.shape)


def rms(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    hidden = scale.numel()
    flat = functional.rms_norm(x.reshape(-1, hidden), [hidden], scale.flatten(), EPSILON)
    return flat.reshape(x.shape) if bias is None else flat.reshape(x.shape) + bias


def instance(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.instance_norm(x, weight=scale.flatten(), bias=bias.flatten(), eps=EPSILON)


def batch(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.batch_norm(x, None, None, scale.flatten(), bias.flatten(), training=True, eps=EPSILON)


def ada_layer(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], eps=EPSILON) * scale + bias


def inverse_deviation(axes: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x.var(axes, unbiased=False, keepdim=True) + EPSILON).rsqrt()


ROWS = pytest.mark.parametrize(
    ("x_shape", "scale_shape"),
    [((768, 1024, 1, 1), (1, 1024, 1, 1)), ((4, 192, 1024), (1, 1, 1024)), ((96, 4, 16, 32), (1, 4, 16, 32))],
    ids=["rows", "tokens", "samples"],
)


def rows(x_shape: tuple[int, ...], scale_shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """X, dY, scale and bias, all packed row after row."""
    shapes = ((x_shape, dtype), (x_shape, dtype), (scale_shape, torch.float32), (scale_shape, torch.float32))
    return tuple((torch.randn(shape, device=DEVICE) + 0.25).to(kind) for shape, kind in shapes)


def row_axes(scale: torch.Tensor) -> list[int]:
    return [axis for axis, extent in enumerate(scale.shape) if extent != 1]


@TYPES
@PHASES
@ROWS
def test_layernorm(dtype: torch.dtype, phase: Any, x_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
    x_data, dy_data, scale_data, bias_data = rows(x_shape, scale_shape, dtype)
    graph = gpu_graph(dtype)
    x, scale, bias = map(graph.tensor_like, (x_data, scale_data, bias_data))
    wanted = outputs(graph.layernorm(phase, x, scale, bias, EPSILON))
    found, *statistics = run(graph, {x: x_data, scale: scale_data, bias: bias_data}, *wanted)
    accurate(found, layer, x_data, scale_data, bias_data)
    if phase is INFERENCE:
        return
    mean, inv = statistics
    terms = scale_data.numel()
    accurate(mean, lambda x: x.mean(row_axes(scale_data), keepdim=True), x_data, terms=terms)
    accurate(inv, inverse_deviation(row_axes(scale_data)), x_data, terms=terms)

    graph = gpu_graph(dtype)
    inputs = (dy_data, x_data, scale_data, mean, inv)
    tensors = [graph.tensor_like(t) for t in inputs]
    wanted = outputs(graph.layernorm_backward(*tensors))
    results = run(graph, dict(zip(tensors, inputs, strict=True)), *wanted)
    for which, result in enumerate(results):
        summed = terms if which == 0 else x_data.numel() // terms
        accurate(result, gradient(layer, which), dy_data, x_data, scale_data, bias_data, terms=summed)


@TYPES
@pytest.mark.parametrize("has_bias", [False, True])
@ROWS
def test_rmsnorm(dtype: torch.dtype, has_bias: bool, x_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> None:
    x_data, dy_data, scale_data, bias_data = rows(x_shape, scale_shape, dtype)
    parameters = (scale_data, bias_data) if has_bias else (scale_data,)
    graph = gpu_graph(dtype)
    tensors = [graph.tensor_like(t) for t in (x_data, *parameters)]
    epsilon_data = torch.full([1] * len(x_shape), EPSILON)
    epsilon = graph.tensor_like(epsilon_data)
    wanted = outputs(graph.rmsnorm(TRAINING, *tensors, epsilon=epsilon))
    inputs = {**dict(zip(tensors, (x_data, *parameters), strict=True)), epsilon: epsilon_data}
    found, inv = run(graph, inputs, *wanted)
    accurate(found, rms, x_data, *parameters)
    terms = scale_data.numel()
    root = row_axes(scale_data)
    accurate(inv, lambda x: ((x * x).mean(root, keepdim=True) + EPSILON).rsqrt(), x_data, terms=terms)

    graph = gpu_graph(dtype)
    saved = (dy_data, x_data, scale_data, inv)
    tensors = [graph.tensor_like(t) for t in saved]
    wanted = outputs(graph.rmsnorm_backward(*tensors, has_dbias=has_bias))
    results = run(graph, dict(zip(tensors, saved, strict=True)), *wanted)
    assert len(results) == 2 + has_bias
    for which, result in enumerate(results):
        summed = terms if which == 0 else x_data.numel() // terms
        accurate(result, gradient(rms, which), dy_data, x_data, *parameters, terms=summed)


def test_rmsnorm_in_the_short_form_with_a_vector() -> None:
    x_data, gamma = torch.randn(2, 64, 512, device=DEVICE, dtype=torch.bfloat16), torch.randn(512, device=DEVICE)
    graph = gpu_graph(torch.bfloat16)
    x, scale = graph.tensor_like(x_data), graph.tensor_like(gamma)
    y, absent = graph.rmsnorm(x, scale, epsilon=EPSILON)
    assert absent is None
    (found,) = run(graph, {x: x_data, scale: gamma}, *outputs([y]))
    accurate(found, rms, x_data, gamma)


def test_layernorm_with_zero_centred_gamma() -> None:
    x_data, _, gamma, beta = rows((256, 512, 1, 1), (1, 512, 1, 1), torch.float16)
    graph = gpu_graph(HALF)
    x, scale, bias = map(graph.tensor_like, (x_data, gamma, beta))
    y = graph.layernorm(x, scale, bias, EPSILON, zero_centered_gamma=True)[0]
    (found,) = run(graph, {x: x_data, scale: gamma, bias: beta}, *outputs([y]))
    accurate(found, lambda x, scale, bias: layer(x, 1 + scale, bias), x_data, gamma, beta)


@pytest.mark.parametrize("phase", [INFERENCE, TRAINING])
def test_adalayernorm(phase: Any) -> None:
    x_data, dy_data = (torch.randn(4, 96, 512, device=DEVICE, dtype=torch.float16) for _ in range(2))
    scale_data, bias_data = (torch.randn(4, 1, 512, device=DEVICE) for _ in range(2))
    graph = gpu_graph(HALF)
    x, scale, bias = map(graph.tensor_like, (x_data, scale_data, bias_data))
    wanted = outputs(graph.adalayernorm(phase, x, scale, bias, EPSILON))
    found, *statistics = run(graph, {x: x_data, scale: scale_data, bias: bias_data}, *wanted)
    accurate(found, ada_layer, x_data, scale_data, bias_data)
    if phase is INFERENCE:
        return
    graph = gpu_graph(HALF)
    inputs = (dy_data, x_data, scale_data, *statistics)
    tensors = [graph.tensor_like(t) for t in inputs]
    results = run(graph, dict(zip(tensors, inputs, strict=True)), *outputs(graph.adalayernorm_backward(*tensors)))
    for which, result in enumerate(results):
        summed = 96 if which else 512
        accurate(result, gradient(ada_layer, which), dy_data, x_data, scale_data, bias_data, terms=summed)


@TYPES
@PHASES
def test_instancenorm(dtype: torch.dtype, phase: Any) -> None:
    x_data, dy_data = randn(8, 64, 24, 24, dtype=dtype), randn(8, 64, 24, 24, dtype=dtype)
    scale_data, bias_data = randn(1, 64, 1, 1), randn(1, 64, 1, 1)
    graph = gpu_graph(dtype)
    x, scale, bias = map(graph.tensor_like, (x_data, scale_data, bias_data))
    wanted = outputs(graph.instancenorm(phase, x, scale, bias, EPSILON))
    found, *statistics = run(graph, {x: x_data, scale: scale_data, bias: bias_data}, *wanted)
    accurate(found, instance, x_data, scale_data, bias_data)
    if phase is INFERENCE:
        return
    mean, inv = statistics
    accurate(mean, lambda x: x.mean((2, 3)), x_data, terms=24 * 24)
    accurate(inv, inverse_deviation((2, 3)), x_data, terms=24 * 24)

    graph = gpu_graph(dtype)
    inputs = (dy_data, x_data, scale_data, mean, inv)
    tensors = [graph.tensor_like(t) for t in inputs]
    wanted = outputs(graph.instancenorm_backward(*tensors))
    results = run(graph, dict(zip(tensors, inputs, strict=True)), *wanted)
    for which, result in enumerate(results):
        summed = 24 * 24 * (8 if which else 1)
        accurate(result, gradient(instance, which), dy_data, x_data, scale_data, bias_data, terms=summed)


IMAGE, CHANNELS, PIXELS = (16, 64, 28, 28), (1, 64, 1, 1), 16 * 28 * 28


@TYPES
def test_batchnorm(dtype: torch.dtype) -> None:
    x_data, dy_data = randn(*IMAGE, dtype=dtype), randn(*IMAGE, dtype=dtype)
    scale_data, bias_data, old_mean = (randn(*CHANNELS) for _ in range(3))
    old_var = randn(*CHANNELS).exp()
    graph = gpu_graph(dtype)
    arrays = (x_data, scale_data, bias_data, old_mean, old_var)
    tensors = [graph.tensor_like(t) for t in arrays]
    wanted = outputs(graph.batchnorm(*tensors, EPSILON, 0.25))
    found, mean, inv, new_mean, new_var = run(graph, dict(zip(tensors, arrays, strict=True)), *wanted)
    accurate(found, batch, x_data, scale_data, bias_data)
    over = (0, 2, 3)
    accurate(mean, lambda x: x.mean(over), x_data, terms=PIXELS)
    accurate(inv, inverse_deviation(over), x_data, terms=PIXELS)
    accurate(new_mean, lambda x, old: 0.75 * old.flatten() + 0.25 * x.mean(over), x_data, old_mean, terms=PIXELS)
    accurate(new_var, lambda x, old: 0.75 * old.flatten() + 0.25 * x.var(over), x_data, old_var, terms=PIXELS)

    graph = gpu_graph(dtype)
    inputs = (dy_data, x_data, scale_data, mean, inv)
    tensors = [graph.tensor_like(t) for t in inputs]
    wanted = outputs(graph.batchnorm_backward(*tensors))
    results = run(graph, dict(zip(tensors, inputs, strict=True)), *wanted)
    for which, result in enumerate(results):
        accurate(result, gradient(batch, which), dy_data, x_data, scale_data, bias_data, terms=PIXELS)


def test_batchnorm_updates_running_statistics_in_place() -> None:
    x_data, scale_data, bias_data = randn(*IMAGE, dtype=torch.float16), randn(*CHANNELS), randn(*CHANNELS)
    mean_data, var_data = randn(*CHANNELS), randn(*CHANNELS).exp()
    before = (mean_data.clone(), var_data.clone())
    graph = gpu_graph(HALF)
    arrays = (x_data, scale_data, bias_data, mean_data, var_data)
    tensors = [graph.tensor_like(t) for t in arrays]
    y, mean, inv, new_mean, new_var = outputs(graph.batchnorm(*tensors, EPSILON, 0.25))
    inputs = {**dict(zip(tensors, arrays, strict=True)), new_mean: mean_data, new_var: var_data}
    run(graph, inputs, y, mean, inv)
    over = (0, 2, 3)
    accurate(mean_data, lambda x, old: 0.75 * old.flatten() + 0.25 * x.mean(over), x_data, before[0], terms=PIXELS)
    accurate(var_data, lambda x, old: 0.75 * old.flatten() + 0.25 * x.var(over), x_data, before[1], terms=PIXELS)


def test_relu_mask_goes_from_the_forward_to_the_backward_graph() -> None:
    x_data, dy_data = randn(*IMAGE, dtype=torch.float16), randn(*IMAGE, dtype=torch.float16)
    scale_data, bias_data = randn(*CHANNELS), randn(*CHANNELS)
    zero_data = torch.zeros(1, 1, 1, 1, device=DEVICE)
    graph = gpu_graph(HALF)
    arrays = (x_data, scale_data, bias_data, zero_data)
    tensors = [graph.tensor_like(t) for t in arrays]
    y, mean, inv = graph.batchnorm(*tensors[:3], epsilon=EPSILON)[:3]
    relu = graph.relu(y)
    mask = graph.cmp_gt(relu, tensors[3]).set_data_type(cudnn.data_type.BOOLEAN).set_output(True)
    # One byte an element would fill the buffer; the norm engines pack eight channels into each.
    bits = torch.full((x_data.numel(),), 0xA5, dtype=torch.uint8, device=DEVICE)
    wanted = outputs([relu, mean, inv])
    found, found_mean, found_inv = run(graph, {**dict(zip(tensors, arrays, strict=True)), mask: bits}, *wanted)
    accurate(found, lambda *inputs: batch(*inputs).relu(), x_data, scale_data, bias_data)
    packed = x_data.numel() // 8
    assert bool((bits[packed:] == 0xA5).all()), "more than one bit an element was written"
    n, c, h, w = IMAGE
    octets = bits[:packed].reshape(n, h, w, c // 8, 1) >> torch.arange(8, dtype=torch.uint8, device=DEVICE)
    positive = (octets & 1).bool().reshape(n, h, w, c).permute(0, 3, 1, 2)
    # A result below the smallest half is positive, and stored as 0.
    assert int((positive != (found > 0)).sum()) <= 2

    graph = gpu_graph(HALF)
    m = graph.tensor(list(IMAGE), list(x_data.stride()), cudnn.data_type.BOOLEAN)
    arrays = (dy_data, x_data, scale_data, found_mean, found_inv)
    tensors = [graph.tensor_like(t) for t in arrays]
    masked = graph.mul(tensors[0], m).set_data_type(HALF)
    wanted = outputs(graph.batchnorm_backward(masked, *tensors[1:]))
    results = run(graph, {**dict(zip(tensors, arrays, strict=True)), m: bits[:packed]}, *wanted)
    for which, result in enumerate(results):
        accurate(result, gradient(batch, which), dy_data * positive, x_data, scale_data, bias_data, terms=PIXELS)


def test_batchnorm_inference_and_relu_backward_before_batchnorm_backward() -> None:
    x_data, dy_data = randn(*IMAGE, dtype=torch.float16), randn(*IMAGE, dtype=torch.float16)
    scale_data, bias_data = randn(*CHANNELS), randn(*CHANNELS)
    mean_data = x_data.float().mean((0, 2, 3), keepdim=True)
    inv_data = inverse_deviation((0, 2, 3))(x_data.float())
    y_exact = batch(x_data.double(), scale_data.double(), bias_data.double())
    dy_data = dy_data * (y_exact.abs() > 1e-3)  # closer to 0 the sign hangs on a rounding
    graph = gpu_graph(HALF)
    arrays = (dy_data, x_data, scale_data, bias_data, mean_data, inv_data)
    tensors = [graph.tensor_like(t) for t in arrays]
    dy, x, scale, bias, mean, inv = tensors
    y = graph.batchnorm_inference(x, mean, inv, scale, bias).set_data_type(HALF)
    through = graph.relu_backward(dy, y).set_data_type(HALF)
    wanted = outputs(graph.batchnorm_backward(through, x, scale, mean, inv))
    results = run(graph, dict(zip(tensors, arrays, strict=True)), *wanted)
    for which, result in enumerate(results):
        accurate(result, gradient(batch, which), dy_data * (y_exact > 0), x_data, scale_data, bias_data, terms=PIXELS)
