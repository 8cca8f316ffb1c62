"""RMSNorm + Hadamard transform + amax beside a device copy of the same bytes, the yardstick, and ``torch.compile``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cudnn.bench import HOST, Benchmark, Call, Candidate, Options, Problem
from cudnn.bench.operands import normal
from cudnn.lazy import torch
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, reference

COPY = "copy"
SHAPES = ((32768, 4096), (16384, 8192))
ROWS = 8
EPS = 1e-5


def tensors(m: int, n: int) -> tuple[Any, ...]:
    """x, w, and results filled with NaN."""
    x = normal(m, n).bfloat16()
    w = (torch.rand(n, device=x.device) + 0.5).bfloat16()
    return x, w, torch.full_like(x, float("nan")), torch.full((m // ROWS,), float("nan"), device=x.device)


def errors(x: Any, w: Any, o: Any, amax: Any) -> tuple[float, float]:
    """Largest error of o in units of its spacing at the true value, and of amax, relative; against float64."""
    worst_o = worst_amax = 0.0
    for start in range(0, x.shape[0], 4096):
        part = x[start : start + 4096].double()
        y = part * torch.rsqrt(part.square().mean(dim=1, keepdim=True) + EPS) * w.double()
        y = reference.hadamard(y.unflatten(1, (-1, 16))).flatten(1) / 4
        spacing = torch.finfo(o.dtype).eps * 2.0 ** y.abs().clamp(min=2**-6).log2().floor()
        worst_o = max(worst_o, float(((o[start : start + 4096].double() - y).abs() / spacing).max()))
        largest = y.abs().unflatten(0, (-1, ROWS)).amax(dim=(1, 2))
        found = amax[start // ROWS : start // ROWS + len(largest)]
        worst_amax = max(worst_amax, float(((found - largest).abs() / largest).max()))
    return worst_o, worst_amax


def peers(device: Any) -> dict[str, Callable[..., Any]]:
    """The same computation for torch.compile, the Hadamard transform as additions and as a product."""
    h = reference.hadamard(torch.eye(16, device=device)) / 4

    def normed(x: Any, w: Any) -> Any:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + EPS) * w.float()).unflatten(1, (-1, 16))

    def finish(y: Any, x: Any) -> tuple[Any, Any]:
        return y.flatten(1).to(x.dtype), y.flatten(1).abs().unflatten(0, (-1, ROWS)).amax(dim=(1, 2))

    def additions(x: Any, w: Any) -> tuple[Any, Any]:
        return finish(reference.hadamard(normed(x, w)) / 4, x)

    def product(x: Any, w: Any) -> tuple[Any, Any]:
        return finish(normed(x, w) @ h, x)

    return {"torch.compile, additions": torch.compile(additions), "torch.compile, product": torch.compile(product)}


def problems(options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    found = [
        Problem(f"{m} x {n}", functools.partial(candidates, m, n), bytes=4.0 * m * n)
        for m, n in options.shapes or SHAPES
    ]
    return [*found, Problem("host time, warm", host_candidates, clock=HOST)]


def candidates(m: int, n: int) -> list[Candidate]:
    """The copy, ours, and the same computation compiled."""
    torch._dynamo.reset()
    x, w, o, amax = tensors(m, n)

    def check(units: float, relative: float, results: Mapping[str, Any]) -> str:
        error_o, error_amax = errors(x, w, results["o"], results["amax"])
        right = error_o < units and error_amax < relative
        return "" if right else f"wrong result: o is off by {error_o:.2f} units, amax by {error_amax:.1e}"

    def compiled(peer: Callable[..., Any]) -> Call:
        return lambda: dict(zip(("o", "amax"), peer(x, w), strict=True))

    target = torch.empty_like(x)
    found = [
        Candidate(COPY, lambda: lambda: {"o": target.copy_(x)}, lambda results: ""),
        Candidate("RmsNormRhtAmax", lambda: ours(x, w, o, amax), functools.partial(check, 0.51, 1e-5), ours=True),
    ]
    for name, peer in peers(x.device).items():
        found.append(Candidate(name, functools.partial(compiled, peer), functools.partial(check, 1.01, 1e-3)))
    return found


def ours(x: Any, w: Any, o: Any, amax: Any) -> Call:
    """RmsNormRhtAmax."""
    norm = RmsNormRhtAmax(x, w, o, amax, EPS, rows_per_cta=ROWS)
    norm.compile()

    def call() -> dict[str, Any]:
        norm.execute(x, w, o, amax)
        return {"o": o, "amax": amax}

    return call


def host_candidates() -> list[Candidate]:
    """The API beside an addition."""
    x, w, o, amax = tensors(64, 4096)
    return [
        Candidate("torch.add(out=)", lambda: lambda: {"": torch.add(x, x, out=o)}, lambda results: ""),
        Candidate("RmsNormRhtAmax.execute", lambda: ours(x, w, o, amax), lambda results: "", ours=True),
    ]


BENCHMARK = Benchmark(
    title="RMSNorm + Hadamard + amax",
    yardsticks=(COPY,),
    dtypes=("bf16",),
    dimensions={"M": ROWS, "N": 512},
    problems=problems,
)
