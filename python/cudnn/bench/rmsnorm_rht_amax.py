"""RMSNorm + Hadamard transform + amax beside a device copy of the same bytes, the yardstick, and ``torch.compile``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

from cudnn.bench import Row, host_time, median
from cudnn.lazy import torch
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, reference

TITLE = "RMSNorm + Hadamard + amax, bfloat16: speed, the copy of the same bytes = 1"
SHAPES = ((32768, 4096), (16384, 8192))
ROWS = 8
EPS = 1e-5


def tensors(m: int, n: int) -> tuple[Any, ...]:
    """x, w, and results filled with NaN."""
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    w = (torch.rand(n, device="cuda") + 0.5).bfloat16()
    return x, w, torch.full_like(x, float("nan")), torch.full((m // ROWS,), float("nan"), device="cuda")


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


def peers() -> dict[str, Callable[..., Any]]:
    """The same computation for torch.compile, the Hadamard transform as additions and as a product."""
    h = reference.hadamard(torch.eye(16, device="cuda")) / 4

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


def rows(shapes: tuple[tuple[int, int], ...] = SHAPES, with_peers: bool = True) -> Iterator[Row]:
    """Measures. The copy is timed before, between and after our calls, and its mean counts."""
    for m, n in shapes:
        problem = f"{m} x {n}"
        x, w, o, amax = tensors(m, n)
        norm = RmsNormRhtAmax(x, w, o, amax, EPS, rows_per_cta=ROWS)
        norm(x_tensor=x, w_tensor=w, o_tensor=o, amax_tensor=amax)
        error_o, error_amax = errors(x, w, o, amax)
        if error_o > 0.51 or error_amax > 1e-5:
            raise RuntimeError(f"RmsNormRhtAmax, {problem}: wrong by {error_o:.2f} units, amax by {error_amax:.1e}")
        copies, ours = [median(o.copy_, x)], []
        for _ in range(2):
            ours.append(median(norm.execute, x, w, o, amax))
            copies.append(median(o.copy_, x))
        copy, mine = statistics.mean(copies), statistics.mean(ours)
        yield Row(problem, "copy", copy, 1.0, _bandwidth(m, n, copy))
        yield Row(problem, "RmsNormRhtAmax", mine, copy / mine, _bandwidth(m, n, mine), ours=True)
        for name, peer in peers().items() if with_peers else ():
            torch._dynamo.reset()
            theirs = median(peer, x, w)
            yield Row(problem, name, theirs, copy / theirs, _bandwidth(m, n, theirs))
    x, w, o, amax = tensors(64, 4096)
    norm = RmsNormRhtAmax(x, w, o, amax, EPS, rows_per_cta=ROWS)
    norm.compile()
    add = host_time(lambda: torch.add(x, x, out=o))
    yield Row("host time of a call", "torch.add(out=)", add, 1.0)
    mine = host_time(norm.execute, x, w, o, amax)
    yield Row("host time of a call", "RmsNormRhtAmax", mine, add / mine, ours=True)


def _bandwidth(m: int, n: int, microseconds: float) -> str:
    """x read once, o written once."""
    return f"{4e-6 * m * n / microseconds:.2f} TB/s"
