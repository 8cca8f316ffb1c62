"""Benchmark of native sparse attention: its steps and the whole, forward and backward.

The yardstick is fla-core's Triton kernels. The whole is also compared with FlashAttention-4's dense causal attention.
All candidates get the same tensors, and the same block lists for selection. Lists are random and independent from row
to row, or correlated: a row shares nine tenths of its list with the row before, like rows of a trained model.
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
PACKAGES = {PEER: "fla-core", DENSE: "flash-attn-4"}
BLOCK, SELECTED, WINDOW = 64, 16, 512
SHAPES = ((65536, 64, 4, 128), (8192, 64, 4, 128), (32768, 64, 4, 128))
ALL = (*SHAPES, (4096, 64, 4, 128), (16384, 64, 4, 128), (131072, 64, 4, 128))
CHECKED_TOKENS = 1024  # problem size at which results are compared with dense attention in float32
TOLERANCE = 0.02  # of the norm
PERIOD = 10  # correlated lists: rows after which a block of the list is sampled again


@dataclass(frozen=True)
class Step:
    """A part, or the whole, and its pass. ``alike``: neighboring rows choose mostly the same blocks."""

    name: str
    backward: bool = False
    correlated: bool = False

    @property
    def label(self) -> str:
        """The name in the table."""
        return self.name + ", alike" * self.correlated + ", backward" * self.backward


STEPS = (
    Step("compression"),
    Step("compression", backward=True),
    Step("top-k"),
    Step("selection"),
    Step("selection", backward=True),
    Step("selection", correlated=True),
    Step("selection", backward=True, correlated=True),
    Step("whole"),
    Step("whole", backward=True),
    Step("whole", correlated=True),
    Step("whole", backward=True, correlated=True),
)


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, heads of Q, heads of K and elements of a head."""
    return Benchmark(
        title="Native sparse attention",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"T": CHECKED_TOKENS, "HQ": 1, "HK": 1, "D": 64},
        problems=problems,
        quick=SHAPES,
    )


def problems(options: Options) -> list[Problem]:
    """The steps of each shape. A rate counts the GEMMs over unmasked pairs of rows and keys.

    ``--quick`` measures independent lists only, and the whole of all shapes first.
    """
    shapes = options.shapes or (ALL if options.all else SHAPES)
    pairs = [(shape, step) for shape in shapes for step in STEPS if not (options.quick and step.correlated)]
    if options.quick:
        pairs.sort(key=lambda pair: pair[1].name != "whole")  # stable
    return [
        Problem(
            f"{'x'.join(map(str, shape))} {step.label}",
            functools.partial(candidates, shape, step),
            flops_of(shape, step),
            clock=QUICK if options.quick else GPU,
        )
        for shape, step in pairs
    ]


def flops_of(shape: tuple[int, ...], step: Step) -> float:
    """Floating-point operations: per pair QK and PV forward, five GEMMs backward; QK alone for top-k."""
    tokens, hq, _, d = shape
    selected = BLOCK * min(SELECTED, tokens // BLOCK)
    visible_keys = {
        "compression": tokens / BLOCK / 2,
        "top-k": tokens / BLOCK / 2,
        "selection": selected,
        "whole": tokens / BLOCK / 2 + selected + WINDOW,
    }
    gemms = 5 if step.backward else 1 if step.name == "top-k" else 2
    return 2.0 * gemms * tokens * hq * d * visible_keys[step.name]


@dataclass(frozen=True)
class Tensors:
    """The operands, (1, T, H, D), and lists of blocks, (1, T, H_k, 16)."""

    q: Any
    k: Any
    v: Any
    gates: Any
    gradient: Any
    block_lists: Any


def make_tensors(shape: tuple[int, ...], correlated: bool) -> Tensors:
    """Random operands."""
    tokens, hq, hk, d = shape
    q, k, v = (operands.normal(1, tokens, h, d) for h in (hq, hk, hk))
    q = correlate_rows(q) if correlated else q
    q, k, v = (x.bfloat16().requires_grad_() for x in (q, k, v))
    gates = torch.rand(1, tokens, hq, 3, dtype=torch.float32, device=operands.DEVICE).bfloat16()
    return Tensors(q, k, v, gates, operands.normal(1, tokens, hq, d).bfloat16(), block_lists(tokens, hk, correlated))


def correlate_rows(x: Any, decay: float = 0.97) -> Any:
    """Filters x (1, T, H, D) along T so that neighboring rows are correlated: top-k selects mostly the same blocks."""
    filtered, weight, distance = x.clone(), decay, 1
    while distance < x.shape[1]:  # each iteration doubles the number of rows in the sum
        filtered[:, distance:] += weight * filtered[:, :-distance]
        weight, distance = weight * weight, 2 * distance
    return filtered * (1 - decay * decay) ** 0.5


def block_lists(tokens: int, heads: int, correlated: bool) -> Any:
    """Block lists of the rows: the first block, the row's block, the block before it and 13 random others; then -1.

    In correlated lists each of the 13 is sampled again once in ten rows. Duplicates are removed.
    """
    device, random_blocks, period = operands.DEVICE, SELECTED - 3, PERIOD if correlated else 1
    row = torch.arange(tokens, dtype=torch.int64, device=device)[:, None]
    slot = torch.arange(random_blocks, dtype=torch.int64, device=device)
    sample = (row + slot * (period // 2)) // period  # index of the sample that slot has at this row
    first_row = (sample * period - slot * (period // 2)).clamp(min=0)  # first row of the sample
    uniform = torch.rand(int(sample.max()) + 1, heads, random_blocks, dtype=torch.float32, device=device)
    uniform = uniform[sample, :, slot]
    sampled = 1 + (uniform * (first_row // BLOCK - 2).clamp(min=0)[..., None]).int().transpose(1, 2)
    row_block = (row // BLOCK)[:, None]
    forced = (
        torch.stack([torch.zeros_like(row_block), row_block - 1, row_block], -1).expand(-1, heads, -1, -1).flatten(2)
    )
    result = torch.cat([forced, torch.where(sampled < row_block - 1, sampled, -1)], -1).sort(-1, descending=True).values
    duplicate = torch.nn.functional.pad(result.diff(dim=-1) == 0, (1, 0))
    return result.masked_fill(duplicate, -1).sort(-1, descending=True).values.int()[None]


def candidates(shape: tuple[int, ...], step: Step) -> list[Candidate]:
    """Ours and the peers, on the same values. Each is compared with dense attention on few tokens."""
    tensors, few_tokens = (
        make_tensors(shape, step.correlated),
        make_tensors((CHECKED_TOKENS, *shape[1:]), step.correlated),
    )

    def candidate(name: str, functions: Callable[[int, int, int], nsa_peers.Functions], step: Step) -> Candidate:
        def check(results: Mapping[str, Any]) -> str:
            bad = [x for x, value in results.items() if value.is_floating_point() and not value.isfinite().all()]
            if bad:
                return f"wrong result: {bad[0]} is not finite"
            return wrong(step, few_tokens, call(step, functions(BLOCK, SELECTED, WINDOW), few_tokens)())

        def prepare() -> Call:
            return call(step, functions(BLOCK, SELECTED, WINDOW), tensors)

        return Candidate(name, prepare, check, name == OURS, package=PACKAGES.get(name, ""))

    result = [candidate(PEER, nsa_peers.fla, step), candidate(OURS, nsa_peers.ours, step)]
    if step.name == "whole" and nsa_peers.has_flash_attention():
        result.append(candidate(DENSE, lambda *sizes: {"dense": nsa_peers.dense}, replace(step, name="dense")))
    return result


def call(step: Step, functions: nsa_peers.Functions, tensors: Tensors) -> Call:
    """A call of one step: the forward pass, as in training, or the backward pass alone."""
    inputs = {"q": tensors.q, "k": tensors.k, "v": tensors.v}
    if step.name in ("compression", "top-k"):
        means = (x.detach().unflatten(1, (-1, BLOCK)).mean(2).requires_grad_() for x in (tensors.k, tensors.v))
        inputs |= dict(zip("kv", means, strict=True))
    if step.name == "top-k":
        with torch.no_grad():
            _, lse = functions["compression"](*inputs.values())
        return lambda: {"lists": functions["top-k"](tensors.q.detach(), inputs["k"].detach(), lse)}
    further = {"selection": [tensors.block_lists], "whole": [tensors.gates]}.get(step.name, [])

    def run() -> Mapping[str, Any]:
        output = functions[step.name](*inputs.values(), *further)
        return {"o": output[0] if step.name == "compression" else output}

    if not step.backward:
        return run
    y, leaves = run()["o"], list(inputs.values())
    return lambda: dict(zip(inputs, torch.autograd.grad(y, leaves, tensors.gradient, retain_graph=True), strict=True))


def wrong(step: Step, tensors: Tensors, results: Mapping[str, Any]) -> str:
    """Checks results of few tokens, for which the whole selects all blocks. Returns a message, or ``""``."""
    tokens = tensors.q.shape[1]
    row = torch.arange(tokens, dtype=torch.int64, device=tensors.q.device)
    if step.name == "top-k":
        block_list = results["lists"].sort(-1).values
        duplicate = (block_list.diff(dim=-1) == 0) & (block_list[..., 1:] >= 0)
        future = block_list > (row // BLOCK)[:, None, None]
        return "wrong result: a list has a block twice, or one of the future" if duplicate.any() or future.any() else ""
    return off_by_norm(call(step, {step.name: functools.partial(exact, step.name)}, tensors)(), results, TOLERANCE)


def exact(name: str, q: Any, k: Any, v: Any, further: Any = None) -> Any:
    """A step, computed in float32 with a mask over all pairs of rows and keys."""
    row = torch.arange(q.shape[1], dtype=torch.int64, device=q.device)[:, None]
    key = torch.arange(k.shape[1], dtype=torch.int64, device=q.device)
    past = (key <= row)[:, None]
    if name == "compression":
        return [masked(q, k, v, (key < (row + 1) // BLOCK)[:, None])]
    if name == "selection":
        return masked(q, k, v, (further[0][..., None] == key // BLOCK).any(2) & past)
    if name == "dense":
        return masked(q, k, v, past)
    compressed = [x.unflatten(1, (-1, BLOCK)).mean(2) for x in (k, v)]
    complete = key[: compressed[0].shape[1]] < (row + 1) // BLOCK
    outputs = (
        masked(q, compressed[0], compressed[1], complete[:, None]),
        masked(q, k, v, past),
        masked(q, k, v, past & (key > row - WINDOW)[:, None]),
    )
    return sum(output * further[..., i, None] for i, output in enumerate(outputs))


def masked(q: Any, k: Any, v: Any, visible: Any) -> Any:
    """Attention of q (1, T, H, D) with the mask ``visible`` (T, H_k or 1, keys); 0 for rows without a visible key."""
    dtype = q.dtype
    q, k, v = (x[0].float().unflatten(1, (k.shape[2], -1)) for x in (q, k, v))
    scores = torch.einsum("ihgd,jhxd->ihgj", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, :, None], -math.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("ihgj,jhxd->ihgd", weights, v).flatten(1, 2)[None].to(dtype)
