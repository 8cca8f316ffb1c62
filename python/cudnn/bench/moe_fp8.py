"""Benchmark of training an MoE layer with e4m3 GEMMs: an optimizer step's four micro-batches, forward and backward.

The yardstick is the same layer in bfloat16. Gradients of weights are added to float32 ``main_grad``. A call begins as
after an optimizer's step: it quantizes the weights, once for the four micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import GPU, QUICK, Benchmark, Call, Candidate, Options, Problem, off_by_norm, operands
from cudnn.lazy import torch

NAME = "moe_fp8"
BF16 = "MoE, bf16"
RECIPES = {
    BF16: False,
    "MoE, fp8 forward": True,
    "MoE, fp8": "blockwise",
    "MoE, fp8, 16 bits saved": "blockwise_save16",
}
SHAPES = ((32768, 4096, 1024, 128, 8), (16384, 7168, 2048, 64, 8), (32768, 2048, 768, 128, 8))
MICRO_BATCHES = 4
DIMENSIONS = {"T": 1, "H": 128, "I": 128, "E": 1, "K": 1}
TOLERANCE = 0.1  # of the norm: a gradient has passed through three GEMMs with e4m3 operands


def benchmark() -> Benchmark:
    """The benchmark: a shape is the tokens of a micro-batch, hidden and intermediate size, experts, top-k."""
    return Benchmark(
        title="Training a layer of experts in fp8",
        yardsticks=(BF16,),
        dtypes=("fp8",),
        dimensions=dict(DIMENSIONS),
        problems=problems,
        quick=SHAPES,
    )


def problems(options: Options) -> list[Problem]:
    """The shapes. TFLOP/s counts the GEMMs: 18 T H I K operations in each micro-batch."""
    return [
        Problem(
            "x".join(map(str, shape)),
            functools.partial(candidates, shape),
            flops=MICRO_BATCHES * 18.0 * shape[0] * shape[1] * shape[2] * shape[4],
            clock=QUICK if options.quick else GPU,
            memory=True,
        )
        for shape in options.shapes or SHAPES
    ]


def candidates(shape: tuple[int, ...]) -> list[Candidate]:
    """The recipes, with equal weights, tokens and gradients."""
    from cudnn.nn import MoE

    tokens, hidden, inner, experts, chosen = shape
    sizes = (hidden, inner, experts, chosen)
    options: dict[str, Any] = {"renormalize": True, "into_main_grad": True}
    layer: Any = MoE(*sizes, **options, device=operands.DEVICE)
    for weight in (layer.up, layer.down):
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    x = operands.normal(tokens, hidden).bfloat16().requires_grad_()
    gradient = operands.normal(tokens, hidden).bfloat16()
    expected: dict[str, Any] = {}

    def check(results: Mapping[str, Any]) -> str:
        if not expected:
            expected.update({name: value.clone() for name, value in results.items()})
        return off_by_norm(expected, results, TOLERANCE)

    def candidate(name: str, fp8: bool | str) -> Candidate:
        each = layer
        if fp8:
            each = MoE(*sizes, **options, fp8=fp8, device="meta")
            each.router.weight = layer.router.weight
            for weight in ("up", "down"):  # tensors of its own, so that each recipe has its e4m3 copies
                parameter: Any = torch.nn.Parameter(getattr(layer, weight).detach())
                parameter.main_grad = getattr(layer, weight).main_grad
                setattr(each, weight, parameter)
        return Candidate(name, functools.partial(training_step, each, x, gradient), check, ours=True)

    return [candidate(name, fp8) for name, fp8 in RECIPES.items()]


def training_step(layer: Any, x: Any, gradient: Any) -> Call:
    """A call: four micro-batches of the same tokens. Its results are those of the last one."""
    inputs = [x, layer.router.weight, layer.up, layer.down]

    def run() -> Mapping[str, Any]:
        layer.weights_changed()
        for _ in range(MICRO_BATCHES):
            y = layer(x)
            dx, drouter, *_ = torch.autograd.grad(y, inputs, gradient, allow_unused=True)
        return {"y": y.detach(), "x": dx, "router": drouter}

    return run
