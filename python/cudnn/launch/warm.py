"""Compiles the usual configurations of the fused APIs ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from cudnn.launch.architecture import ARCHITECTURES
from cudnn.lazy import torch


def architectures() -> tuple[str, ...]:
    """Those that kernels are written for."""
    return tuple(ARCHITECTURES.values())


def warm(arch: str) -> Iterator[tuple[int, int, str]]:
    """Compiles what is not in the cache yet; after each kernel yields its number, their number and its name."""
    from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax
    from cudnn_kernels.norm.heuristics import USUAL_COLUMNS

    for done, n in enumerate(USUAL_COLUMNS, start=1):
        x = torch.empty(2, n, dtype=torch.bfloat16, device="meta")
        RmsNormRhtAmax(x, x[0], x, torch.empty(1, device="meta"), arch=arch).compile()
        yield done, len(USUAL_COLUMNS), f"RmsNormRhtAmax, {n} columns"
