"""Benchmark of a whole layer of experts: router, experts and weighted sum, forward and backward.

The yardstick is the same layer in PyTorch, compiled: tokens copied into the experts' order, ``torch._grouped_mm``, and
a weighted sum of each token's rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cudnn.bench import Benchmark, Call, Candidate, Options, Problem, operands
from cudnn.bench.grouped import MODELS, TOKENS
from cudnn.lazy import torch

NAME = "moe"
PEER = "torch._grouped_mm, compiled"
OURS = "MoE"
SHAPES = ((32768, 4096, 1024, 128, 8), (32768, 2048, 768, 128, 8), (32768, 4096, 256, 128, 8))
PASSES = ("forward", "forward, inference", "backward")
SLACK = 0.02  # of the norm: each of the two rounds three times


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, hidden and intermediate size, experts, experts of a token."""
    return Benchmark(
        title="Layer of experts",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"T": 1, "H": 64, "I": 32, "E": 1, "K": 1},
        problems=problems,
    )


def problems(options: Options) -> list[Problem]:
    """Each shape's passes; TFLOP/s counts the products, 6 T H I K forward and twice as many backward."""
    shapes = dict.fromkeys(options.shapes or SHAPES, "")
    if options.all and not options.shapes:
        for model, (experts, chosen, hidden, inner) in MODELS.items():
            shapes |= {(tokens, hidden, inner, experts, chosen): f" {model}" for tokens in TOKENS}
    return [
        Problem(f"{'x'.join(map(str, shape))}{label}, {which}", functools.partial(candidates, shape, which), flops)
        for shape, label in shapes.items()
        for which, flops in zip(PASSES, products(shape), strict=True)
    ]


def products(shape: tuple[int, ...]) -> tuple[float, float, float]:
    """Floating-point operations of each pass."""
    tokens, hidden, inner, _, chosen = shape
    forward = 6.0 * tokens * hidden * inner * chosen
    return forward, forward, 2 * forward


def candidates(shape: tuple[int, ...], which: str) -> list[Candidate]:
    """Ours and the peer, on the same values."""
    from cudnn.nn import MoE

    tokens, hidden, inner, experts, chosen = shape
    layer = MoE(hidden, inner, experts, chosen, device=operands.DEVICE)
    with torch.no_grad():
        layer.router.weight.normal_()
    x = (operands.normal(tokens, hidden) * hidden**-0.5).bfloat16().requires_grad_()
    gradient = operands.normal(tokens, hidden).bfloat16()
    inputs = [x, *layer.parameters()]
    peer = torch.compile(functools.partial(plain, chosen), dynamic=False)
    with torch.no_grad():
        ours = layer.route(x)[1].indices.long()  # of equal logits, PyTorch may choose another

    def check(indices: Any, results: Mapping[str, Any]) -> str:
        want = passes(lambda: plain(chosen, *inputs, indices=indices), inputs, gradient, which)()
        for name, expected in want.items():
            found, expected = results[name].detach().float(), expected.detach().float()
            error = float((found - expected).norm() / expected.norm().clamp(min=1e-9))
            if not error <= SLACK:
                return f"wrong result: {name} is off by {error:.2e} of its norm, at most {SLACK} is right"
        return ""

    return [
        Candidate(PEER, lambda: passes(lambda: peer(*inputs), inputs, gradient, which), functools.partial(check, None)),
        Candidate(
            OURS, lambda: passes(lambda: layer(x), inputs, gradient, which), functools.partial(check, ours), True
        ),
    ]


def passes(run: Callable[[], Any], inputs: list[Any], gradient: Any, which: str) -> Call:
    """A call of one pass."""
    if which == "backward":
        y = run()
        names = ("x", "up", "down", "router")
        return lambda: dict(zip(names, torch.autograd.grad(y, inputs, gradient, retain_graph=True), strict=True))

    def forward() -> Mapping[str, Any]:
        with torch.set_grad_enabled(which == "forward"):
            return {"y": run()}

    return forward


def plain(chosen: int, x: Any, up: Any, down: Any, router: Any, indices: Any = None) -> Any:
    """The layer in PyTorch; ``up`` in blocks of 32 gates and 32 others. ``indices``: a choice made elsewhere."""
    experts = len(up)
    scores = torch.nn.functional.linear(x, router).float().softmax(-1)
    if indices is None:
        indices = scores.topk(chosen).indices
    weights = scores.gather(1, indices)
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    h = torch._grouped_mm(x[order // chosen], up.mT, offs=ends)
    gate, other = h.unflatten(1, (-1, 2, 32)).unbind(2)
    activated = (torch.nn.functional.silu(gate.float()) * other.float()).to(x.dtype).flatten(1)
    rows = torch._grouped_mm(activated, down.mT, offs=ends)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return (rows[places].view(len(x), chosen, -1).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)
