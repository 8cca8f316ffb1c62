"""Benchmark of native sparse attention: its parts and the whole, forward and backward.

The yardstick is fla-core's Triton kernels. Beside the whole there is dense causal attention of FlashAttention-4. All
have the same tensors, selection the same lists: of random blocks, which neighbouring rows choose independently of each
other, or lists of which a row has nine tenths in common with the row before, as rows of a trained model may have.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cudnn.bench import GPU, QUICK, Benchmark, Call, Candidate, Options, Problem, nsa_peers, off_by_norm, operands
from cudnn.lazy import torch

NAME = "nsa"
PEER = "fla-core"
DENSE = "FlashAttention-4, dense"
OURS = "NSA"
BLOCK, CHOSEN, WINDOW = 64, 16, 512
SHAPES = ((65536, 64, 4, 128), (8192, 64, 4, 128), (32768, 64, 4, 128))
ALL = (*SHAPES, (4096, 64, 4, 128), (16384, 64, 4, 128), (131072, 64, 4, 128))
CHECKED = 1024  # tokens, on which results are compared with dense attention in float32
SLACK = 0.02  # of the norm
PERIOD = 10  # rows after which a block of a list is drawn anew, where rows choose alike


@dataclass(frozen=True)
class Part:
    """A part, or the whole, and its pass. ``alike``: neighbouring rows choose mostly the same blocks."""

    name: str
    backward: bool = False
    alike: bool = False

    @property
    def label(self) -> str:
        """As the table has it."""
        return self.name + ", alike" * self.alike + ", backward" * self.backward


PARTS = (
    Part("compression"),
    Part("compression", backward=True),
    Part("top-k"),
    Part("selection"),
    Part("selection", backward=True),
    Part("selection", alike=True),
    Part("selection", backward=True, alike=True),
    Part("whole"),
    Part("whole", backward=True),
    Part("whole", alike=True),
    Part("whole", backward=True, alike=True),
)


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, heads of Q, heads of K and elements of a head."""
    return Benchmark(
        title="Native sparse attention",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"T": CHECKED, "HQ": 1, "HK": 1, "D": 64},
        problems=problems,
        quick=SHAPES[:1],
    )


def problems(options: Options) -> list[Problem]:
    """Each shape's parts; a rate counts the products of the pairs of rows and keys that are seen.

    Where there is little time, rows choose independently in all parts.
    """
    shapes = options.shapes or (ALL if options.all else SHAPES)
    return [
        Problem(
            f"{'x'.join(map(str, shape))} {part.label}",
            functools.partial(candidates, shape, part),
            products(shape, part),
            clock=QUICK if options.quick else GPU,
        )
        for shape in shapes
        for part in PARTS
        if not (options.quick and part.alike)
    ]


def products(shape: tuple[int, ...], part: Part) -> float:
    """Floating-point operations: of every pair a product with K and one with V, backward five; of top-k one."""
    tokens, hq, _, d = shape
    chosen = BLOCK * min(CHOSEN, tokens // BLOCK)
    seen = {
        "compression": tokens / BLOCK / 2,
        "top-k": tokens / BLOCK / 2,
        "selection": chosen,
        "whole": tokens / BLOCK / 2 + chosen + WINDOW,
    }
    each = 5 if part.backward else 1 if part.name == "top-k" else 2
    return 2.0 * each * tokens * hq * d * seen[part.name]


@dataclass(frozen=True)
class Tensors:
    """The operands, (1, T, H, D), and lists of blocks, (1, T, H_k, 16)."""

    q: Any
    k: Any
    v: Any
    gates: Any
    gradient: Any
    lists: Any


def tensors(shape: tuple[int, ...], alike: bool) -> Tensors:
    """Random operands."""
    tokens, hq, hk, d = shape
    q, k, v = (operands.normal(1, tokens, h, d) for h in (hq, hk, hk))
    q = smooth(q) if alike else q
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    gates = torch.rand(1, tokens, hq, 3, dtype=torch.float32, device=operands.DEVICE).bfloat16()
    return Tensors(q, k, v, gates, operands.normal(1, tokens, hq, d).bfloat16(), lists(tokens, hk, alike))


def smooth(x: Any, keeps: float = 0.97) -> Any:
    """Rows, (1, T, H, D), each of which keeps most of the row before: top-k chooses mostly the same blocks for both."""
    found, factor, distance = x.clone(), keeps, 1
    while distance < x.shape[1]:  # a sum of rows before, of twice as many after every step
        found[:, distance:] += factor * found[:, :-distance]
        factor, distance = factor * factor, 2 * distance
    return found * (1 - keeps * keeps) ** 0.5


def lists(tokens: int, heads: int, alike: bool) -> Any:
    """Blocks that rows choose: the first one, their own, the one before it, and 13 of the others at random; then -1.

    Where rows choose alike, each of the 13 is drawn anew once in ten rows. What is drawn twice is left out.
    """
    device, others, period = operands.DEVICE, CHOSEN - 3, PERIOD if alike else 1
    row = torch.arange(tokens, dtype=torch.int64, device=device)[:, None]
    place = torch.arange(others, dtype=torch.int64, device=device)
    number = (row + place * (period // 2)) // period  # of the draw
    first = (number * period - place * (period // 2)).clamp(min=0)  # the row that it is for
    draws = torch.rand(int(number.max()) + 1, heads, others, dtype=torch.float32, device=device)[number, :, place]
    drawn = 1 + (draws * (first // BLOCK - 2).clamp(min=0)[..., None]).int().transpose(1, 2)
    own = (row // BLOCK)[:, None]
    forced = torch.stack([torch.zeros_like(own), own - 1, own], -1).expand(-1, heads, -1, -1).flatten(2)
    found = torch.cat([forced, torch.where(drawn < own - 1, drawn, -1)], -1).sort(-1, descending=True).values
    twice = torch.nn.functional.pad(found.diff(dim=-1) == 0, (1, 0))
    return found.masked_fill(twice, -1).sort(-1, descending=True).values.int()[None]


def candidates(shape: tuple[int, ...], part: Part) -> list[Candidate]:
    """Ours and the peers, on the same values; each is also compared with dense attention, on few tokens."""
    given, small = tensors(shape, part.alike), tensors((CHECKED, *shape[1:]), part.alike)

    def candidate(name: str, functions: Callable[[int, int, int], nsa_peers.Functions], part: Part) -> Candidate:
        def check(results: Mapping[str, Any]) -> str:
            bad = [x for x, found in results.items() if found.is_floating_point() and not found.isfinite().all()]
            if bad:
                return f"wrong result: {bad[0]} is not finite"
            return wrong(part, small, call(part, functions(BLOCK, CHOSEN, WINDOW), small)())

        return Candidate(name, lambda: call(part, functions(BLOCK, CHOSEN, WINDOW), given), check, name == OURS)

    made = [candidate(PEER, nsa_peers.fla, part), candidate(OURS, nsa_peers.ours, part)]
    if part.name == "whole" and nsa_peers.has_flash_attention():
        made.append(candidate(DENSE, lambda *sizes: {"dense": nsa_peers.dense}, replace(part, name="dense")))
    return made


def call(part: Part, functions: nsa_peers.Functions, given: Tensors) -> Call:
    """A call of one part: the forward pass, as in training, or the backward pass alone."""
    inputs = {"q": given.q, "k": given.k, "v": given.v}
    if part.name in ("compression", "top-k"):
        means = (x.detach().unflatten(1, (-1, BLOCK)).mean(2).requires_grad_() for x in (given.k, given.v))
        inputs |= dict(zip("kv", means, strict=True))
    if part.name == "top-k":
        with torch.no_grad():
            _, lse = functions["compression"](*inputs.values())
        return lambda: {"lists": functions["top-k"](given.q.detach(), inputs["k"].detach(), lse)}
    more = {"selection": [given.lists], "whole": [given.gates]}.get(part.name, [])

    def run() -> Mapping[str, Any]:
        found = functions[part.name](*inputs.values(), *more)
        return {"o": found[0] if part.name == "compression" else found}

    if not part.backward:
        return run
    y, leaves = run()["o"], list(inputs.values())
    return lambda: dict(zip(inputs, torch.autograd.grad(y, leaves, given.gradient, retain_graph=True), strict=True))


def wrong(part: Part, given: Tensors, results: Mapping[str, Any]) -> str:
    """What is wrong with results of few tokens: all blocks are in the lists of whole native sparse attention."""
    tokens = given.q.shape[1]
    row = torch.arange(tokens, dtype=torch.int64, device=given.q.device)
    if part.name == "top-k":
        found = results["lists"].sort(-1).values
        twice = (found.diff(dim=-1) == 0) & (found[..., 1:] >= 0)
        late = found > (row // BLOCK)[:, None, None]
        return "wrong result: a list has a block twice, or one of the future" if twice.any() or late.any() else ""
    return off_by_norm(call(part, {part.name: functools.partial(exact, part.name)}, given)(), results, SLACK)


def exact(name: str, q: Any, k: Any, v: Any, more: Any = None) -> Any:
    """A part, computed in float32 with a mask over all pairs of rows and keys."""
    row = torch.arange(q.shape[1], dtype=torch.int64, device=q.device)[:, None]
    key = torch.arange(k.shape[1], dtype=torch.int64, device=q.device)
    past = (key <= row)[:, None]
    if name == "compression":
        return [masked(q, k, v, (key < (row + 1) // BLOCK)[:, None])]
    if name == "selection":
        return masked(q, k, v, (more[0][..., None] == key // BLOCK).any(2) & past)
    if name == "dense":
        return masked(q, k, v, past)
    small = [x.unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v)]
    complete = key[: small[0].shape[1]] < (row + 1) // BLOCK
    parts = (
        masked(q, small[0], small[1], complete[:, None]),
        masked(q, k, v, past),
        masked(q, k, v, past & (key > row - WINDOW)[:, None]),
    )
    return sum(part * more[..., i, None] for i, part in enumerate(parts))


def masked(q: Any, k: Any, v: Any, seen: Any) -> Any:
    """Attention of (1, T, H, D) to the keys that ``seen``, (T, H_k or 1, keys), has; 0 without any."""
    kind = q.dtype
    q, k, v = (x[0].float().unflatten(1, (k.shape[2], -1)) for x in (q, k, v))
    scores = torch.einsum("ihgd,jhxd->ihgj", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, :, None], -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("ihgj,jhxd->ihgd", weights, v).flatten(1, 2)[None].to(kind)
