"""Attention on fp8 tensors for tests: graphs, and the same steps in PyTorch with a rounding where the graph has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cudnn
from support.attention import Described, Problem
from support.graphs import FLOAT

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
    "descale_q": 0.25, "descale_k": 0.125, "descale_v": 0.5, "descale_s": 1 / 256, "scale_s": 256.0, "scale_o": 32.0,
    "descale_o": 1 / 32, "descale_dO": 0.5, "descale_dP": 1 / 64, "scale_dQ": 8.0, "scale_dK": 4.0, "scale_dV": 2.0,
    "scale_dP": 64.0,
}  # fmt: skip
FORWARD = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD = (
    "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP", "scale_s", "scale_dQ",
    "scale_dK", "scale_dV", "scale_dP",
)  # fmt: skip


def fp8(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Rounded, with what is too large at the largest number."""
    limit = torch.finfo(kind).max
    return x.clamp(-limit, limit).to(kind)


def tensors(problem: Problem, kind: torch.dtype = E4M3, device: str = "cpu") -> dict[str, torch.Tensor]:
    """q, k, v in ``kind`` and dO in E5M2: normal values, divided by their descales."""
    made = problem.tensors(torch.float32, device)
    scaled = {name: made[name] / SCALES[f"descale_{name}"] for name in ("q", "k", "v", "dO")}
    return {name: fp8(x, E5M2 if name == "dO" else kind) for name, x in scaled.items()}


def meant(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The values that the tensors stand for, in float64."""
    return {
        name: x.double() * SCALES[f"descale_{name}"] if name in ("q", "k", "v", "dO") else x for name, x in data.items()
    }


def attention_fp8(problem: Problem, data: dict[str, torch.Tensor], kind: torch.dtype = E4M3) -> dict[str, torch.Tensor]:
    """All results, those in fp8 as the numbers that are stored. Of dropout ``data`` has the mask."""
    groups = problem.h_q // problem.h_k
    scale = 1.0 if problem.scale is None else problem.scale
    x = {name: value.double() for name, value in meant(data).items()}
    k, v = (x[name].repeat_interleave(groups, 1) for name in "kv")

    def stored(value: torch.Tensor, name: str, target: torch.dtype = kind) -> torch.Tensor:
        return fp8(value * SCALES[f"scale_{name}"], target).double()

    def largest(value: torch.Tensor) -> torch.Tensor:
        return value.abs().amax().view(1, 1, 1, 1)

    valid = problem.valid(str(k.device))
    dO, rows = torch.where(valid["q"], x["dO"], 0.0), torch.where(valid["q"], x["q"], 0.0)
    scores = (scale * x["q"] @ k.mT).masked_fill(~problem.visible().to(k.device), float("-inf"))
    stats = scores.logsumexp(-1, keepdim=True)
    weights = torch.where(stats.isinf(), 0.0, scores.softmax(-1))
    keep = data["mask"].double() / (1 - problem.dropout) if "mask" in data else 1.0
    descale = {name: SCALES[f"descale_{name}"] for name in ("s", "dP")}
    p = stored(weights * keep, "s") * descale["s"]
    o = p @ v
    found = {
        "O": stored(o, "o"), "Stats": stats, "Amax_S": largest(weights * keep), "Amax_O": largest(o),
        "Max": scores.amax(-1, keepdim=True), "Sum_exp": torch.exp(stats - scores.amax(-1, keepdim=True)),
    }  # fmt: skip
    row_sums = (dO * found["O"] * SCALES["descale_o"]).sum(-1, keepdim=True)
    d_scores = scale * weights * (dO @ v.mT * keep - row_sums)
    d_p = stored(d_scores, "dP", E5M2) * descale["dP"]
    totals = {"dQ": d_p @ k, "dK": d_p.mT @ rows, "dV": p.mT @ dO}
    for name in ("dK", "dV"):
        totals[name] = totals[name].unflatten(1, (-1, groups)).sum(2)
    found |= {name: stored(total, name) for name, total in totals.items()}
    found |= {f"Amax_{name}": largest(total) for name, total in totals.items()}
    return {**found, "Amax_dP": largest(d_scores)}


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
    made = Described(graph, problem, torch.device("cpu") if data["q"].is_meta else data["q"].device)
    backward = "Stats" in data
    arguments: dict[str, Any] = {**problem.options, **options, "name": "attention", "attn_scale": problem.scale}
    arguments |= {name: made.tensor(name, data[name]) for name in "qkv"}
    for name in BACKWARD if backward else FORWARD:
        arguments[name] = made.tensor(name, torch.full((1, 1, 1, 1), SCALES[name], device=made.device))
    if problem.lengths_q:
        lengths = problem.lengths(str(made.device))
        arguments |= {"use_padding_mask": True, **{name: made.tensor(name, value) for name, value in lengths.items()}}
    if problem.sink:
        arguments["sink_token"] = graph.tensor([1, problem.h_q, 1, 1], [problem.h_q, 1, 1, 1], FLOAT)
    shape = [problem.b, problem.h_q, problem.s_q]
    if problem.dropout:
        seeds = (made.tensor(name, torch.full((1, 1, 1, 1), 5, device=made.device)) for name in ("seed", "offset"))
        arguments["dropout"] = (problem.dropout, *seeds)
        if not backward:
            arguments["rng_dump"] = made.output("RNG_DUMP", [*shape, problem.s_kv], FLOAT)
    if backward:
        given = (("o", "O"), ("dO", "dO"), ("stats", "Stats"))
        arguments |= {name: made.tensor(name, data[port]) for name, port in given}
        names = ("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP")
        made.outputs |= dict(zip(names, graph.sdpa_fp8_backward(**arguments), strict=True))
    else:
        if problem.statistics:
            arguments |= {"score_max": made.output("Max", [*shape, 1], FLOAT),
                          "score_sum_exp": made.output("Sum_exp", [*shape, 1], FLOAT)}  # fmt: skip
        stats = not problem.statistics
        results = graph.sdpa_fp8(**arguments, generate_stats=stats)
        found = zip(("O", "Stats", "Amax_S", "Amax_O"), results, strict=True)
        made.outputs |= {name: tensor for name, tensor in found if tensor is not None}
    for tensor in made.outputs.values():
        tensor.set_output(True)
    change(made.outputs)
    return made


def backward_data(problem: Problem, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The forward pass's data with O and Stats of the right shape, for graphs that are built but not run."""
    o = torch.empty_like(data["dO"], dtype=data["q"].dtype)
    return {**data, "O": o, "Stats": torch.empty(*o.shape[:3], 1, device=o.device)}
