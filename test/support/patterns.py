"""Fusions that users build, each as a graph and as a formula, for tests of both executors and of cuDNN's engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cudnn
from support.graphs import BFLOAT16, FLOAT, HALF, like, run

Data = dict[str, torch.Tensor]
Tensors = dict[str, cudnn.tensor]
E4M3, INT8, INT32, BOOLEAN = (cudnn.data_type[name] for name in ("FP8_E4M3", "INT8", "INT32", "BOOLEAN"))
BY_VALUE = ("first_scale", "second_scale", "epsilon")
FP8 = torch.float8_e4m3fn
_ROUNDING = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-10, FP8: 2**-3}  # twice that of one


@dataclass(frozen=True)
class Pattern:
    """``build`` marks its outputs and returns them by name; ``formula`` takes the inputs as float64."""

    data: Callable[[], Data]
    build: Callable[[cudnn.pygraph, Tensors], Tensors]
    formula: Callable[[Data], Data]
    io: object = HALF
    intermediate: object = FLOAT
    compute: object = FLOAT
    devices: tuple[str, ...] = ("h200", "b200")  # for which cuDNN 9.19 and 9.28 have engines
    precompiled: bool = False  # its engines load kernels into a driver, so that only a GPU builds the plan


def describe(pattern: Pattern, graph: cudnn.pygraph, data: Data) -> tuple[Tensors, Tensors]:
    """Input and output tensors by name."""
    inputs = {
        name: graph.tensor(t.shape, t.stride(), t.dtype, is_pass_by_value=True, name=name)
        if name in BY_VALUE
        else like(graph, t, name)
        for name, t in data.items()
    }
    return inputs, pattern.build(graph, inputs)


def assert_computes(pattern: Pattern, graph: cudnn.pygraph, device: str) -> None:
    """Runs the pattern and compares every output with the formula."""
    data = {name: t if name in BY_VALUE else t.to(device) for name, t in pattern.data().items()}
    inputs, outputs = describe(pattern, graph, data)
    results = run(graph, {inputs[name]: t for name, t in data.items()}, *outputs.values())
    expected = pattern.formula({name: t.to(device).double() for name, t in data.items()})
    for (name, _), result in zip(outputs.items(), results, strict=True):
        wanted, rounding = expected[name], _ROUNDING.get(result.dtype, 0.0)
        magnitude = wanted.double().abs()
        error = (result.double() - wanted.double()).abs()
        allowed = rounding * magnitude + 2**-10 * magnitude.max()  # sums of fp8 and of rounded terms are that exact
        assert result.shape == wanted.shape
        assert bool((error <= allowed).all()), f"{name}: error {error.max():.3g} of {wanted.abs().max():.3g}"


def nhwc(*dims: int, scale: float = 1.0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return (torch.randn(dims[0], *dims[2:], dims[1]) * scale).to(dtype).movedim(-1, 1)


def columns(batch: int, k: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """``[batch, k, n]`` with k fastest."""
    return torch.randn(batch, n, k).to(dtype).mT


def marked(tensor: cudnn.tensor, dtype: object = FLOAT, dim: list[int] | None = None) -> cudnn.tensor:
    """An output of a type; row-major where a shape is given."""
    tensor.set_output(True).set_data_type(dtype)
    if dim is not None:
        tensor.set_dim(dim).set_stride(list(torch.empty(dim, device="meta").stride()))
    return tensor


# SiLU of one product times another: two weights as a batch, told apart by a mask, multiplied by a reduction.
def silu_data() -> Data:
    return {
        "x": torch.randn(1, 128, 128).to(FP8),
        "w": columns(2, 128, 256, FP8),
        "first_scale": torch.full((1, 1, 1), 0.25),
        "second_scale": torch.full((1, 1, 1), 0.5),
        "mask": torch.tensor([1, 0], dtype=torch.int32).view(2, 1, 1),
    }


def silu_and_mul(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y = g.mul(g.mul(g.matmul(t["x"], t["w"]), t["first_scale"]), t["second_scale"])
    gated = g.binary_select(g.mul(y, g.sigmoid(y)), y, t["mask"])
    return {"y": marked(g.reduction(gated, cudnn.reduction_mode.MUL), dim=[1, 128, 256])}


def silu_formula(d: Data) -> Data:
    gate, up = ((d["x"] @ d["w"]) * 0.125).unbind(0)
    return {"y": (F.silu(gate) * up).unsqueeze(0)}


# Per-tensor scales of an fp8 matmul, its amax, and its result as fp8.
def scaled_fp8(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y = g.matmul(t["a"], t["b"])
    for scale in ("scale_a", "scale_b"):
        y = g.mul(y, t[scale])
    amax = g.reduction(y, cudnn.reduction_mode.AMAX)
    return {"amax": marked(amax, dim=[1, 1, 1]), "y": marked(g.mul(y, t["scale_y"]), E4M3)}


def scaled_fp8_formula(d: Data) -> Data:
    y = d["a"] @ d["b"] * d["scale_a"] * d["scale_b"]
    return {"amax": y.abs().amax().view(1, 1, 1), "y": y * d["scale_y"]}


def scaled_fp8_data() -> Data:
    scales = {name: torch.full((1, 1, 1), value) for name, value in (("scale_a", 0.5), ("scale_b", 0.25))}
    return {
        "a": torch.randn(1, 128, 256).to(FP8),
        "b": columns(1, 256, 128, FP8),
        **scales,
        "scale_y": torch.full((1, 1, 1), 2.0),
    }


# Blocks of 128 of an fp8 matrix share a float scale; of the weight, squares of 128 x 128.
def blockwise(g: cudnn.pygraph, t: Tensors) -> Tensors:
    a = g.block_scale_dequantize(t["a"], t["scale_a"], [1, 128])
    b = g.block_scale_dequantize(t["b"], t["scale_b"], [128, 128])
    return {"y": marked(g.matmul(a, b), HALF)}


def blockwise_formula(d: Data) -> Data:
    wide_a = d["scale_a"].repeat_interleave(128, 2)
    return {"y": (d["a"] * wide_a) @ (d["b"] * d["scale_b"].repeat_interleave(128, 1).repeat_interleave(128, 2))}


def mixed(g: cudnn.pygraph, t: Tensors) -> Tensors:
    return {"y": marked(g.matmul(g.identity(t["a"]).set_data_type(HALF), t["b"]), HALF)}


# Normalisations with what follows them.
def rms_silu(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y, _ = g.rmsnorm(cudnn.norm_forward_phase.INFERENCE, t["x"], t["scale"], epsilon=t["epsilon"])
    return {"y": marked(g.swish(y), BFLOAT16)}


def rms_silu_formula(d: Data) -> Data:
    root = (d["x"].square().mean(1, keepdim=True) + d["epsilon"]).rsqrt()
    return {"y": F.silu(d["x"] * root * d["scale"])}


def layer_fp8(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y = g.layernorm(cudnn.norm_forward_phase.INFERENCE, t["x"], t["scale"], t["bias"], t["epsilon"])[0]
    amax = g.reduction(y, cudnn.reduction_mode.AMAX)
    return {"y": marked(g.mul(y, t["factor"]), E4M3), "amax": marked(amax, dim=[1, 1, 1, 1])}


def layer_fp8_formula(d: Data) -> Data:
    y = F.layer_norm(d["x"].squeeze(), (512,), d["scale"].flatten(), d["bias"].flatten(), 1e-5).view_as(d["x"])
    return {"y": y * d["factor"], "amax": y.abs().amax().view(1, 1, 1, 1)}


def rows(*names: str, dtype: torch.dtype = torch.float16, parameters: torch.dtype = torch.float32) -> Data:
    data: Data = {"x": torch.randn(256, 512, 1, 1).to(dtype), "epsilon": torch.full((1, 1, 1, 1), 1e-5)}
    return data | {name: (torch.rand(1, 512, 1, 1) + 0.5).to(parameters) for name in names}


def instance_relu(g: cudnn.pygraph, t: Tensors) -> Tensors:
    phase = cudnn.norm_forward_phase.TRAINING
    y, mean, inv = g.instancenorm(phase, t["x"], t["scale"], t["bias"], t["epsilon"])
    return {"y": marked(g.relu(y), HALF), "mean": marked(mean), "inv": marked(inv)}


def instance_relu_formula(d: Data) -> Data:
    x = d["x"]
    inv = (x.var((2, 3), correction=0, keepdim=True) + d["epsilon"]).rsqrt()
    mean = x.mean((2, 3), keepdim=True)
    return {"y": F.relu((x - mean) * inv * d["scale"] + d["bias"]), "mean": mean, "inv": inv}


# Convolutions behind scale, bias and ReLU.
def prologue(g: cudnn.pygraph, t: Tensors) -> cudnn.tensor:
    return g.relu(g.bias(g.scale(t["x"], t["scale"]), t["bias"]))


def activated(d: Data) -> torch.Tensor:
    return F.relu(d["x"] * d["scale"] + d["bias"])


def channels() -> Data:
    return {"scale": nhwc(1, 64, 1, 1, scale=0.5) + 1, "bias": nhwc(1, 64, 1, 1)}


def convolution_statistics(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y = marked(g.conv_fprop(prologue(g, t), t["w"], [1, 1], [1, 1], [1, 1]), HALF)
    total, squares = g.genstats(y)
    return {"y": y, "sum": marked(total), "squares": marked(squares)}


def convolution_statistics_formula(d: Data) -> Data:
    y = F.conv2d(activated(d), d["w"], padding=1)
    return {"y": y, "sum": y.sum((0, 2, 3), keepdim=True), "squares": y.square().sum((0, 2, 3), keepdim=True)}


def weight_gradient(g: cudnn.pygraph, t: Tensors) -> Tensors:
    dw = g.conv_wgrad(prologue(g, t), t["dy"], [1, 1], [1, 1], [1, 1])
    return {"dw": dw.set_output(True).set_data_type(HALF).set_dim([64, 64, 3, 3])}


def weight_gradient_formula(d: Data) -> Data:
    return {"dw": torch.nn.grad.conv2d_weight(activated(d), [64, 64, 3, 3], d["dy"], padding=1)}


# Element-wise graphs and reductions on their own.
def rotation(g: cudnn.pygraph, t: Tensors) -> Tensors:
    low, high, cos, sin = (t[name] for name in ("low", "high", "cos", "sin"))
    transposed = {
        "low'": g.sub(g.mul(low, cos), g.mul(high, sin)),
        "high'": g.add(g.mul(low, sin), g.mul(high, cos)),
    }
    for tensor in transposed.values():
        tensor.set_output(True).set_data_type(torch.bfloat16).set_dim([1, 96, 32]).set_stride([96 * 64, 64, 1])
    return transposed


def rotation_formula(d: Data) -> Data:
    low, high, cos, sin = d["low"], d["high"], d["cos"], d["sin"]
    return {"low'": low * cos - high * sin, "high'": low * sin + high * cos}


def rotation_data() -> Data:
    low, high = torch.randn(1, 96, 64).bfloat16().split(32, -1)  # halves of the heads, where they lie
    angle = torch.rand(1, 96, 32) * 6
    return {"low": low, "high": high, "cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16()}


def channel_maximum(g: cudnn.pygraph, t: Tensors) -> Tensors:
    y = g.reduction(g.abs(t["x"]), cudnn.reduction_mode.MAX)
    return {"y": y.set_output(True).set_data_type(FLOAT).set_dim([1, 64, 1, 1])}


def logic(g: cudnn.pygraph, t: Tensors) -> Tensors:
    return {"y": marked(g.logical_or(g.logical_and(t["a"], t["b"]), g.logical_not(t["a"])), BOOLEAN)}


def masks() -> Data:
    return {name: torch.rand(1, 64, 128) > 0.5 for name in "ab"}


PATTERNS = {
    "silu_and_mul": Pattern(silu_data, silu_and_mul, silu_formula, E4M3),
    "fp8 with scales": Pattern(scaled_fp8_data, scaled_fp8, scaled_fp8_formula, E4M3),
    "fp8 in blocks": Pattern(
        lambda: {
            "a": torch.randn(2, 128, 512).to(FP8),
            "scale_a": torch.rand(2, 128, 4) + 0.5,
            "b": columns(2, 512, 256, FP8),
            "scale_b": torch.rand(2, 2, 4).mT + 0.5,
        },
        blockwise,
        blockwise_formula,
        E4M3,
    ),
    "int8 by half": Pattern(
        lambda: {
            "a": torch.randint(-128, 128, (4, 128, 64), dtype=torch.int8),
            "b": columns(4, 64, 128, torch.float16),
        },
        mixed,
        lambda d: {"y": d["a"] @ d["b"]},
    ),
    "rmsnorm + silu": Pattern(
        lambda: rows("scale", dtype=torch.bfloat16, parameters=torch.bfloat16),
        rms_silu,
        rms_silu_formula,
        BFLOAT16,
        precompiled=True,
    ),
    "layernorm to fp8": Pattern(
        lambda: rows("scale", "bias") | {"factor": torch.full((1, 1, 1, 1), 8.0)}, layer_fp8, layer_fp8_formula
    ),
    "instancenorm + relu": Pattern(
        lambda: {
            "x": nhwc(4, 64, 16, 16),
            "scale": nhwc(1, 64, 1, 1, dtype=torch.float32),
            "bias": nhwc(1, 64, 1, 1, dtype=torch.float32),
            "epsilon": torch.full((1, 1, 1, 1), 1e-5),
        },
        instance_relu,
        instance_relu_formula,
    ),
    "convolution with prologue and statistics": Pattern(
        lambda: {"x": nhwc(4, 64, 16, 16), "w": nhwc(64, 64, 3, 3, scale=1 / 24), **channels()},
        convolution_statistics,
        convolution_statistics_formula,
        intermediate=HALF,
        devices=("h200",),
    ),
    "weight gradient with prologue": Pattern(
        lambda: {"x": nhwc(4, 64, 16, 16), "dy": nhwc(4, 64, 16, 16, scale=1 / 32), **channels()},
        weight_gradient,
        weight_gradient_formula,
        intermediate=HALF,
        devices=("h200",),
    ),
    "rotary embedding of element-wise operations": Pattern(rotation_data, rotation, rotation_formula, BFLOAT16),
    "largest value of a channel": Pattern(
        lambda: {"x": nhwc(4, 64, 16, 16)},
        channel_maximum,
        lambda d: {"y": d["x"].abs().amax((0, 2, 3), keepdim=True)},
    ),
    "logic": Pattern(masks, logic, lambda d: {"y": (d["a"] * d["b"] + (1 - d["a"])).bool()}, BOOLEAN, BOOLEAN, BOOLEAN),
}
