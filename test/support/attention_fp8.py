"""Attention on fp8 tensors for tests: graphs, and the same steps in PyTorch with a rounding where the graph has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cudnn
from cudnn.enums import reduction_mode
from support.attention import Described, Problem, describe
from support.dense_attention import attend
from support.fuzz.approx import SUM, Approx, apply, contraction, reduce
from support.graphs import FLOAT
from support.oracle import rounding_interval

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BASE = {"h_k": 4, "h_v": 4, "d_qk": 128, "d_v": 128, "scale": 0.088}
CASES = {
    "plain": Problem(**BASE),
    "grouped heads": Problem(**{**BASE, "h_k": 2, "h_v": 2}),
    "causal": Problem(**BASE, options={"use_causal_mask": True}),
    "odd lengths": Problem(**BASE, s_q=131, s_kv=200),
    "sliding window": Problem(**BASE, options={"use_causal_mask": True, "left_bound": 40}),
    "padding": Problem(**BASE, lengths_q=(77, 192), lengths_kv=(128, 33)),
    "padding, causal": Problem(**BASE, lengths_q=(77, 192), lengths_kv=(128, 192), options={"use_causal_mask": True}),
    "statistics": Problem(**BASE, statistics=True),
    "dropout": Problem(**BASE, dropout=0.25),
}
SCALES = {
    "descale_q": 0.25,
    "descale_k": 0.125,
    "descale_v": 0.5,
    "descale_s": 1 / 256,
    "scale_s": 256.0,
    "scale_o": 32.0,
    "descale_o": 1 / 32,
    "descale_dO": 0.5,
    "descale_dP": 1 / 64,
    "scale_dQ": 8.0,
    "scale_dK": 4.0,
    "scale_dV": 2.0,
    "scale_dP": 64.0,
}
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = (
    "descale_q",
    "descale_k",
    "descale_v",
    "descale_o",
    "descale_dO",
    "descale_s",
    "descale_dP",
    "scale_s",
    "scale_dQ",
    "scale_dK",
    "scale_dV",
    "scale_dP",
)


def fp8(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounded, with what is too large at the largest number."""
    limit = torch.finfo(kind).max
    return x.clamp(-limit, limit).to(kind)


def tensors(problem: Problem, kind: torch.dtype = E4M3, device: str = "cpu") -> dict[str, torch.Tensor]:
    """q, k, v in ``kind`` and dO in E5M2: normal values, divided by their descales."""
    made = problem.tensors(torch.float32, device)
    scaled = {name: made[name] / SCALES[f"descale_{name}"] for name in ("q", "k", "v", "dO")}
    return made | {name: fp8(x, E5M2 if name == "dO" else kind) for name, x in scaled.items()}


def meant(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values that the tensors stand for, in float64."""
    return {
        name: x.double() * SCALES[f"descale_{name}"] if name in ("q", "k", "v", "dO") else x for name, x in data.items()
    }


def attention_fp8(problem: Problem, data: dict[str, torch.Tensor], kind: torch.dtype = E4M3) -> dict[str, Approx]:
    """All results after sums in float32, those in fp8 as the numbers stored. Of dropout ``data`` has the mask.

    Values near the middle between two fp8 numbers may be rounded to either within a bound; results
    computed from them have one too.
    """
    scale = 1.0 if problem.scale is None else problem.scale
    x = {name: value.double() for name, value in meant(data).items()}
    k, v = (x[name].repeat_interleave(problem.h_q // problem.h_k, 1) for name in "kv")

    def stored(x: Approx, name: str, target: torch.dtype = kind) -> Approx:
        factor = SCALES[f"scale_{name}"]
        return Approx(*rounding_interval(x.value * factor, x.bound * factor, target))

    def product(a: Approx, b: torch.Tensor, descale: float = 1.0) -> Approx:
        return contraction(torch.matmul, Approx(a.value * descale, a.bound * descale), Approx(b), torch.float16)

    def largest(x: Approx) -> Approx:
        low, high = ((x.value.abs() + sign * x.bound).amax().view(1, 1, 1, 1) for sign in (-1, 1))
        return Approx((low + high) / 2, (high - low) / 2)

    def turned(x: Approx) -> Approx:
        return Approx(x.value.mT, x.bound.mT)

    valid = problem.valid(str(k.device))
    dO, rows = torch.where(valid["q"], x["dO"], 0.0), torch.where(valid["q"], x["q"], 0.0)
    visible = problem.visible().to(k.device)
    _, *statistics, weights = attend(x["q"], k, v, visible, scale=scale)
    stats, maxima = (y.unsqueeze(-1) for y in statistics)
    score_error = (scale * SUM * (x["q"].abs() @ k.mT.abs())).amax(-1, keepdim=True)
    relative = 2 * score_error + 2**-20
    keep = data["mask"].double() / (1 - problem.dropout) if "mask" in data else torch.ones_like(weights)
    dropped = Approx(weights * keep, relative * weights * keep)
    p = stored(dropped, "s")
    o = product(p, v, SCALES["descale_s"])
    total = torch.exp(stats - maxima)
    actual = {
        "O": stored(o, "o"),
        "Stats": Approx(stats, relative),
        "Amax_S": largest(dropped),
        "Amax_O": largest(o),
        "Max": Approx(maxima, score_error),
        "Sum_exp": Approx(total, relative * total),
    }
    terms = apply(torch.mul, Approx(dO), actual["O"])
    by_weights = product(Approx(dO), v.mT)
    row = reduce(Approx(terms.value, terms.bound), reduction_mode.ADD, [3])
    inner = by_weights.value * keep - row.value * SCALES["descale_o"]
    error = by_weights.bound * keep + row.bound * SCALES["descale_o"] + (relative + 2**-20) * inner.abs()
    d_scores = Approx(scale * weights * inner, scale * weights * error)
    d_p = stored(d_scores, "dP", E5M2)
    totals = {
        "dQ": product(d_p, k, SCALES["descale_dP"]),
        "dK": product(turned(d_p), rows, SCALES["descale_dP"]),
        "dV": product(turned(p), dO, SCALES["descale_s"]),
    }
    for name in ("dK", "dV"):
        sums = (y.unflatten(1, (problem.h_k, -1)).sum(2) for y in (totals[name].value, totals[name].bound))
        totals[name] = Approx(*sums)
    actual |= {name: stored(x, name) for name, x in totals.items()}
    actual |= {f"Amax_{name}": largest(x) for name, x in totals.items()}
    return {**actual, "Amax_dP": largest(d_scores)}


def new_graph(kind: torch.dtype = E4M3, **options: Any) -> cudnn.pygraph:
    return cudnn.pygraph(io_data_type=kind, intermediate_data_type=FLOAT, compute_data_type=FLOAT, **options)


def describe_fp8(
    graph: cudnn.pygraph,
    problem: Problem,
    data: dict[str, torch.Tensor],
    change: Callable[[dict[str, cudnn.tensor]], Any] = lambda outputs: None,
    **options: Any,
) -> Described:
    """The backward pass where ``data`` has O and Stats, else the forward pass; ``change`` gets the outputs."""
    names = BACKWARD if "Stats" in data else FORWARD
    factors = {name: torch.full((1, 1, 1, 1), SCALES[name]) for name in names}
    made = describe(graph, problem, data, stats=not problem.statistics, factors=factors, **options)
    change(made.outputs)
    return made
