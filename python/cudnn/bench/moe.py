"""Benchmark of a whole layer of experts: router, experts and weighted sum, forward and backward.

The yardstick is the same layer in PyTorch, compiled: tokens copied into the experts' order, ``torch._grouped_mm``, and
a weighted sum of each token's rows. Weights are the softmax of the chosen experts' logits, as SonicMoE has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cudnn.bench import Benchmark, Call, Candidate, Options, Problem, moe_peers, off_by_norm, operands
from cudnn.bench.grouped import MODELS, TOKENS
from cudnn.lazy import torch

NAME = "moe"
PEER = "PyTorch"
TRANSFORMERS = "transformers"
LOOP = "cuBLAS, one by one"
SONICMOE = "SonicMoE"
OURS = "MoE"
NARROW = "MoE, fp8"
SHAPES = ((32768, 4096, 1024, 128, 8), (32768, 2048, 768, 128, 8), (32768, 4096, 256, 128, 8))
SWEEPS = (
    *((tokens, 4096, 1024, 128, 8) for tokens in (2048, 4096, 8192, 16384)),
    *((32768, 4096, 1024, experts, 8) for experts in (32, 64, 256)),
    *((32768, 4096, inner, 128, 8) for inner in (512, 2048)),
)
"""Around the first shape: by tokens, experts and intermediate size."""
PASSES = ("forward", "inference", "backward")
NAMES = ("x", "up", "down", "router")
SLACK = 0.02  # of the norm: each of the two rounds three times
NARROW_SLACK = 0.1


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, hidden and intermediate size, experts, experts of a token."""
    return Benchmark(
        title="Layer of experts",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"T": 1, "H": 64, "I": 32, "E": 1, "K": 1},
        problems=problems,
        quick=(SHAPES[1],),
        outside=SONICMOE,
    )


def problems(options: Options) -> list[Problem]:
    """Each shape's passes; TFLOP/s counts the products, 6 T H I K forward and twice as many backward."""
    shapes = dict.fromkeys(options.shapes or SHAPES, "")
    if options.all and not options.shapes:
        shapes |= dict.fromkeys(SWEEPS, "")
        for model, (experts, chosen, hidden, inner) in MODELS.items():
            shapes |= {(tokens, hidden, inner, experts, chosen): f" {model}" for tokens in TOKENS}

    def problem(shape: tuple[int, ...], which: str, flops: float) -> Problem:
        label = f"{'x'.join(map(str, shape))}{shapes[shape]} {which}"
        made = functools.partial(candidates, shape, which, options.sonicmoe)
        return Problem(label, made, flops, memory=True)

    passes_of = {shape: zip(PASSES, products(shape), strict=True) for shape in shapes}
    return [problem(shape, which, flops) for shape, found in passes_of.items() for which, flops in found]


def products(shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Floating-point operations of each pass."""
    tokens, hidden, inner, _, chosen = shape
    forward = 6.0 * tokens * hidden * inner * chosen
    return forward, forward, 2 * forward


def candidates(shape: tuple[int, ...], which: str, folder: Path | None = None) -> list[Candidate]:
    """Ours and the peers, on the same values; SonicMoE where its folder is given."""
    from cudnn.nn import MoE

    torch.compiler.reset()  # PyTorch compiles a function for a few shapes, and no more
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
        ours = layer.route(x)[1].indices.long()  # of equal logits, PyTorch may choose another

    def check(indices: Any, results: Mapping[str, Any], slack: float = SLACK) -> str:
        return off_by_norm(passes(lambda: grouped(*inputs, indices=indices), inputs, gradient, which)(), results, slack)

    def candidate(name: str, run: Callable[[], Any], indices: Any = None, given: Sequence[Any] = inputs) -> Candidate:
        prepare = functools.partial(passes, run, given, gradient, which)
        return Candidate(name, prepare, functools.partial(check, indices), name == OURS)

    made = [
        candidate(PEER, lambda: compiled(*inputs)),
        candidate(LOOP, lambda: loop(*inputs)),
        candidate(OURS, lambda: layer(x), ours),
    ]
    if moe_peers.has_transformers():
        block = moe_peers.transformers_layer(shape, *inputs[1:])
        given = [x, block.experts.gate_up_proj, block.experts.down_proj, block.gate.weight]
        peer = candidate(TRANSFORMERS, lambda: block(x[None])[0], given=given)

        def has_block_scales(results: Mapping[str, Any]) -> str:
            return check(None, {n: moe_peers.blocks(found) if n == "up" else found for n, found in results.items()})

        made.insert(1, replace(peer, check=has_block_scales))
    if which != PASSES[2] and not hidden % 128 and not inner % 128:
        narrow = MoE(hidden, inner, experts, chosen, renormalize=True, fp8=True, device="meta")
        narrow.router.weight, narrow.up, narrow.down = layer.router.weight, layer.up, layer.down
        one = candidate(NARROW, lambda: narrow(x), ours)
        made.append(replace(one, check=functools.partial(check, ours, slack=NARROW_SLACK), ours=True))
    if folder is not None:
        measured = functools.partial(moe_peers.sonicmoe, folder, shape, which)
        made.append(Candidate(SONICMOE, outside=measured))
    return made


def passes(run: Callable[[], Any], inputs: Sequence[Any], gradient: Any, which: str) -> Call:
    """A call of one pass."""
    if which == "backward":
        y = run()
        return lambda: dict(zip(NAMES, torch.autograd.grad(y, inputs, gradient, retain_graph=True), strict=True))

    def forward() -> Mapping[str, Any]:
        with torch.set_grad_enabled(which == "forward"):
            return {"y": run()}

    return forward
