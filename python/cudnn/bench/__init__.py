"""Benchmarks: each kernel beside its peers in the same run, since absolute figures move with the card's power state."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cudnn.lazy import torch

BENCHMARKS = ("rmsnorm_rht_amax",)
"""Modules of this package. Each has ``rows()``, which measures."""


@dataclass(frozen=True)
class Row:
    """A measurement. ``ratio`` is the time of the problem's yardstick divided by this time: more is better."""

    problem: str
    name: str
    microseconds: float
    ratio: float
    note: str = ""
    ours: bool = False


def median(function: Callable[..., Any], *arguments: Any) -> float:
    """Microseconds of a call on the GPU: the median of some hundred, the caches cleared before each."""
    from triton.testing import do_bench  # pyright: ignore[reportMissingImports]

    return do_bench(lambda: function(*arguments), warmup=25, rep=150, return_mode="median") * 1e3


def host_time(function: Callable[..., Any], *arguments: Any) -> float:
    """Microseconds that a call takes the host: the least of 40 batches of 200 calls."""
    best = float("inf")
    for _ in range(40):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            function(*arguments)
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / 200 * 1e6


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Bars of the ratios, a group for each problem, as an image file."""
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.32 * len(rows)), layout="constrained")
    labels = [f"{row.problem}   {row.name}" for row in rows]
    bars = axes.barh(labels, [row.ratio for row in rows], color=["#76b900" if row.ours else "#9aa5b1" for row in rows])
    axes.bar_label(bars, [f"{row.ratio:.2f}" for row in rows], padding=3)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
