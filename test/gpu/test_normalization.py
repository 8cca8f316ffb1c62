"""Normalisations on a GPU against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch.nn import functional

import cudnn
from gpu.common import gpu_graph
from support.graphs import HALF, evaluate, outputs, run

DEVICE = "cuda"
INFERENCE, TRAINING = cudnn.norm_forward_phase.INFERENCE, cudnn.norm_forward_phase.TRAINING
SEED = torch.seed()  # inputs are fresh in every run; failures print it
EPSILON = 1e-3
TYPES = (torch.float16, torch.bfloat16, torch.float32)
PHASES = pytest.mark.parametrize("phase", [INFERENCE, TRAINING])


def packed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers off zero, row after row."""
    return (torch.randn(shape, device=DEVICE) + 0.25).to(dtype)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Four-dimensional ones channels-last, the layout that cuDNN's engines are written for."""
    data = packed(*shape, dtype=dtype)
    return data.contiguous(memory_format=torch.channels_last) if data.dim() == 4 else data


def accurate(actual: torch.Tensor, formula: Callable[..., torch.Tensor], *inputs: torch.Tensor, terms: int = 1) -> None:
    """Compares with a formula in PyTorch: at most twice the formula's error in the output's type, plus its rounding.

    ``terms`` is how many numbers each result sums up: another order of summation moves it by sqrt(terms) roundings.
    """
    exact = formula(*(t.double() for t in inputs)).reshape(actual.shape)
    same_type = formula(*(t.to(actual.dtype) for t in inputs)).reshape(actual.shape).double()
    largest = float(exact.abs().max())
    bound = 2 * float((same_type - exact).abs().max()) + torch.finfo(actual.dtype).eps * largest * terms**0.5
    error = float((actual.double() - exact).abs().nan_to_num(float("inf")).max())
    assert error <= bound, f"error {error:.3g}, bound {bound:.3g}, largest value {largest:.3g}, seed {SEED}"


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


def check_gradients(
    results: list[torch.Tensor], forward: Callable[..., torch.Tensor], dy: torch.Tensor, *inputs: torch.Tensor, row: int
) -> None:
    """Of X, for which ``row`` elements are summed up, and of the parameters, for which all are that share one."""
    for which, result in enumerate(results):
        terms = row if which == 0 else inputs[0].numel() // inputs[1].numel()
        accurate(result, gradient(forward, which), dy, *inputs, terms=terms)


def varying(scale: torch.Tensor) -> list[int]:
    return [axis for axis, extent in enumerate(scale.shape) if extent != 1]


ROWS = {
    "rows": ((768, 1024, 1, 1), (1, 1024, 1, 1)),
    "tokens": ((4, 192, 1024), (1, 1, 1024)),
    "samples": ((96, 4, 16, 32), (1, 4, 16, 32)),
}
Case = tuple[str, Callable[..., torch.Tensor], tuple[int, ...], tuple[int, ...]]
NORMS: dict[str, Case] = {
    **{name: ("layernorm", layer, *shapes) for name, shapes in ROWS.items()},
    "images": ("instancenorm", instance, (8, 64, 24, 24), (1, 64, 1, 1)),
    "shifts of samples": ("adalayernorm", ada_layer, (4, 96, 512), (4, 1, 512)),
}


@PHASES
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in NORMS for dtype in TYPES[: 1 if name.startswith("shifts") else 3]]
)
def test_norms_and_gradients(name: str, dtype: torch.dtype, phase: Any) -> None:
    operation, formula, x_shape, scale_shape = NORMS[name]
    draw = randn if name == "images" else packed
    x, dy = draw(*x_shape, dtype=dtype), draw(*x_shape, dtype=dtype)
    scale, bias = draw(*scale_shape), draw(*scale_shape)
    _, (actual, *statistics) = evaluate(operation, phase, x, scale, bias, EPSILON, graph=gpu_graph(dtype))
    accurate(actual, formula, x, scale, bias)
    assert len(statistics) == (0 if phase is INFERENCE else 2)
    if phase is INFERENCE:
        return
    axes = {"instancenorm": [2, 3], "adalayernorm": [2]}.get(operation, varying(scale))
    row = prod(x_shape[axis] for axis in axes)
    accurate(statistics[0], lambda x: x.mean(axes, keepdim=True), x, terms=row)
    accurate(statistics[1], inverse_deviation(axes), x, terms=row)
    _, results = evaluate(f"{operation}_backward", dy, x, scale, *statistics, graph=gpu_graph(dtype))
    check_gradients(results, formula, dy, x, scale, bias, row=row)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_rmsnorm(name: str, has_bias: bool, dtype: torch.dtype) -> None:
    x_shape, scale_shape = ROWS[name]
    x, dy, scale, bias = (
        packed(*x_shape, dtype=dtype),
        packed(*x_shape, dtype=dtype),
        *(packed(*scale_shape) for _ in "ab"),
    )
    parameters, axes, row = (scale, bias)[: 1 + has_bias], varying(scale), scale.numel()
    arguments = bias if has_bias else None
    _, (actual, inv) = evaluate("rmsnorm", TRAINING, x, scale, arguments, EPSILON, graph=gpu_graph(dtype))
    accurate(actual, rms, x, *parameters)
    accurate(inv, lambda x: ((x * x).mean(axes, keepdim=True) + EPSILON).rsqrt(), x, terms=row)
    _, results = evaluate("rmsnorm_backward", dy, x, scale, inv, has_bias, graph=gpu_graph(dtype))
    assert len(results) == 2 + has_bias
    check_gradients(results, rms, dy, x, *parameters, row=row)


def test_rmsnorm_in_the_short_form_with_a_vector() -> None:
    x, gamma = packed(2, 64, 512, dtype=torch.bfloat16), packed(512)
    _, (actual,) = evaluate("rmsnorm", x, gamma, epsilon=EPSILON, graph=gpu_graph(torch.bfloat16))
    accurate(actual, rms, x, gamma)


def test_layernorm_with_zero_centred_gamma() -> None:
    x, gamma, beta = packed(256, 512, 1, 1, dtype=torch.float16), packed(1, 512, 1, 1), packed(1, 512, 1, 1)
    _, (actual,) = evaluate("layernorm", x, gamma, beta, EPSILON, zero_centered_gamma=True, graph=gpu_graph(HALF))
    accurate(actual, lambda x, scale, bias: layer(x, 1 + scale, bias), x, gamma, beta)


IMAGE, CHANNELS, PIXELS = (16, 64, 28, 28), (1, 64, 1, 1), 16 * 28 * 28


@pytest.mark.parametrize("dtype", TYPES)
def test_batchnorm(dtype: torch.dtype) -> None:
    x, dy = randn(*IMAGE, dtype=dtype), randn(*IMAGE, dtype=dtype)
    scale, bias, old_mean = (randn(*CHANNELS) for _ in range(3))
    old_var, over = randn(*CHANNELS).exp(), (0, 2, 3)
    _, results = evaluate("batchnorm", x, scale, bias, old_mean, old_var, EPSILON, 0.25, graph=gpu_graph(dtype))
    actual, mean, inv, new_mean, new_var = results
    accurate(actual, batch, x, scale, bias)
    accurate(mean, lambda x: x.mean(over), x, terms=PIXELS)
    accurate(inv, inverse_deviation(over), x, terms=PIXELS)
    accurate(new_mean, lambda x, old: 0.75 * old.flatten() + 0.25 * x.mean(over), x, old_mean, terms=PIXELS)
    accurate(new_var, lambda x, old: 0.75 * old.flatten() + 0.25 * x.var(over), x, old_var, terms=PIXELS)
    _, results = evaluate("batchnorm_backward", dy, x, scale, mean, inv, graph=gpu_graph(dtype))
    check_gradients(results, batch, dy, x, scale, bias, row=PIXELS)


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
    actual, found_mean, found_inv = run(graph, {**dict(zip(tensors, arrays, strict=True)), mask: bits}, *wanted)
    accurate(actual, lambda *inputs: batch(*inputs).relu(), x_data, scale_data, bias_data)
    packed = x_data.numel() // 8
    assert bool((bits[packed:] == 0xA5).all()), "more than one bit an element was written"
    n, c, h, w = IMAGE
    octets = bits[:packed].reshape(n, h, w, c // 8, 1) >> torch.arange(8, dtype=torch.uint8, device=DEVICE)
    positive = (octets & 1).bool().reshape(n, h, w, c).permute(0, 3, 1, 2)
    # A result below the smallest half is positive, and stored as 0.
    assert int((positive != (actual > 0)).sum()) <= 2

    graph = gpu_graph(HALF)
    m = graph.tensor(list(IMAGE), list(x_data.stride()), cudnn.data_type.BOOLEAN)
    arrays = (dy_data, x_data, scale_data, found_mean, found_inv)
    tensors = [graph.tensor_like(t) for t in arrays]
    masked = graph.mul(tensors[0], m).set_data_type(HALF)
    wanted = outputs(graph.batchnorm_backward(masked, *tensors[1:]))
    results = run(graph, {**dict(zip(tensors, arrays, strict=True)), m: bits[:packed]}, *wanted)
    check_gradients(results, batch, dy_data * positive, x_data, scale_data, bias_data, row=PIXELS)


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
    check_gradients(results, batch, dy_data * (y_exact > 0), x_data, scale_data, bias_data, row=PIXELS)
