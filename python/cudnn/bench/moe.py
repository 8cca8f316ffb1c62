"""Benchmark of the MoE layer: router, experts and weighted sum, forward and backward.

The yardstick is the same layer in PyTorch, compiled: tokens permuted into expert order, ``torch._grouped_mm``, and the
weighted sum of each token's rows. Weights are the softmax of the selected experts' logits, as in SonicMoE.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cudnn.bench import (
    GPU,
    QUICK,
    Benchmark,
    Call,
    Candidate,
    Options,
    Problem,
    moe_peers,
    off_by_norm,
    operands,
)
from cudnn.bench.grouped import MODELS, TOKENS
from cudnn.lazy import torch

NAME = "moe"
PEER = "PyTorch"
TRANSFORMERS = "transformers"
LOOP = "cuBLAS, one by one"
OURS = "MoE"
FP8 = "MoE, fp8"
SHAPES = ((32768, 4096, 1024, 128, 8), (32768, 2048, 768, 128, 8), (32768, 4096, 256, 128, 8))
SWEEPS = (
    *((tokens, 4096, 1024, 128, 8) for tokens in (2048, 4096, 8192, 16384)),
    *((32768, 4096, 1024, experts, 8) for experts in (32, 64, 256)),
    *((32768, 4096, inner, 128, 8) for inner in (512, 2048)),
)
"""Variations of the first shape: tokens, experts and intermediate size."""
PASSES = ("forward", "inference", "backward")
DIMENSIONS = {"T": 1, "H": 64, "I": 32, "E": 1, "K": 1}
NAMES = ("x", "up", "down", "router")
TOLERANCE = 0.02  # of the norm: both results are rounded three times
FP8_TOLERANCE = 0.1


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, hidden and intermediate size, experts, top-k."""
    return Benchmark(
        title="Layer of experts",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions=dict(DIMENSIONS),
        problems=problems,
        quick=(SHAPES[1], SHAPES[0]),
    )


def problems(options: Options) -> list[Problem]:
    """The passes of each shape. TFLOP/s counts the GEMMs: 6 T H I K operations forward, twice that backward."""
    shapes = dict.fromkeys(options.shapes or SHAPES, "")
    if options.all and not options.shapes:
        shapes |= dict.fromkeys(SWEEPS, "")
        for model, (experts, chosen, hidden, inner) in MODELS.items():
            shapes |= {(tokens, hidden, inner, experts, chosen): f" {model}" for tokens in TOKENS}

    def problem(shape: tuple[int, ...], which: str, flops: float) -> Problem:
        label = f"{'x'.join(map(str, shape))}{shapes[shape]} {which}"
        make_candidates = functools.partial(candidates, shape, which)
        return Problem(label, make_candidates, flops, clock=QUICK if options.quick else GPU, memory=True)

    passes_of = {shape: zip(PASSES, flops_of(shape), strict=True) for shape in shapes}
    return [
        problem(shape, which, flops) for shape, flops_of_passes in passes_of.items() for which, flops in flops_of_passes
    ]


def flops_of(shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Floating-point operations of each pass."""
    tokens, hidden, inner, _, chosen = shape
    forward = 6.0 * tokens * hidden * inner * chosen
    return forward, forward, 2 * forward


def candidates(shape: tuple[int, ...], which: str) -> list[Candidate]:
    """Ours and the peers, on the same values."""
    from cudnn.nn import MoE

    torch.compiler.reset()  # torch.compile stops recompiling a function after a few shapes
    tokens, hidden, inner, experts, chosen = shape
    layer = MoE(hidden, inner, experts, chosen, renormalize=True, device=operands.DEVICE)
    with torch.no_grad():
        layer.router.weight.normal_()
    x = (operands.normal(tokens, hidden) * hidden**-0.5).bfloat16().requires_grad_()
    gradient = operands.normal(tokens, hidden).bfloat16()
    inputs = [x, layer.up, layer.down, layer.router.weight]
    grouped = functools.partial(moe_peers.plain, moe_peers.grouped, chosen)
    compiled = torch.compile(grouped, dynamic=False)
    loop = functools.partial(moe_peers.plain, moe_peers.one_by_one, chosen)
    with torch.no_grad():
        our_indices = layer.route(x)[1].indices.long()  # PyTorch breaks ties of logits differently

    def check(indices: Any, results: Mapping[str, Any], tolerance: float = TOLERANCE) -> str:
        return off_by_norm(
            passes(lambda: grouped(*inputs, indices=indices), inputs, gradient, which)(), results, tolerance
        )

    def candidate(name: str, run: Callable[[], Any], indices: Any = None, leaves: Sequence[Any] = inputs) -> Candidate:
        prepare = functools.partial(passes, run, leaves, gradient, which)
        return Candidate(name, prepare, functools.partial(check, indices), name == OURS)

    result = [
        candidate(PEER, lambda: compiled(*inputs)),
        candidate(LOOP, lambda: loop(*inputs)),
        candidate(OURS, lambda: layer(x), our_indices),
    ]
    if moe_peers.has_transformers():
        block = moe_peers.transformers_layer(shape, *inputs[1:])
        leaves = [x, block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight]
        peer = candidate(TRANSFORMERS, lambda: block(x[None])[0], leaves=leaves)

        def in_blocks(results: Mapping[str, Any]) -> str:
            return check(
                None, {n: moe_peers.interleaved(value) if n == "up" else value for n, value in results.items()}
            )

        result.insert(1, replace(peer, check=in_blocks, package="transformers"))
    if which != PASSES[2] and not hidden % 128 and not inner % 128:
        fp8_layer = MoE(hidden, inner, experts, chosen, renormalize=True, fp8=True, device="meta")
        fp8_layer.router.weight, fp8_layer.up, fp8_layer.down = layer.router.weight, layer.up, layer.down
        fp8_candidate = candidate(FP8, lambda: fp8_layer(x), our_indices)
        result.append(
            replace(fp8_candidate, check=functools.partial(check, our_indices, tolerance=FP8_TOLERANCE), ours=True)
        )
    return result


def passes(run: Callable[[], Any], inputs: Sequence[Any], gradient: Any, which: str) -> Call:
    """A call of one pass."""
    if which == "backward":
        y = run()
        return lambda: dict(zip(NAMES, torch.autograd.grad(y, inputs, gradient, retain_graph=True), strict=True))

    def forward() -> Mapping[str, Any]:
        with torch.set_grad_enabled(which == "forward"):
            return {"y": run()}

    return forward
