"""What the programs of the fused GEMMs share: their shape, operands, and what is allowed for one rounding."""

from __future__ import annotations

from typing import Any

from cudnn.lazy import torch

DIMENSIONS, SHAPE = ("m", "n", "k"), (128, 128, 64)
ARCHITECTURES = ("sm_90a",)
ROUNDED = 0.51 / 128  # of bfloat16, relative: half a unit in the last place
SUMMED = 1e-4  # of float32 sums, absolute


def operands(shape: tuple[int, ...], device: str) -> tuple[Any, Any, Any]:
    """A (m, k, 1) and B (n, k, 1) of bfloat16, and their product in float64."""
    m, n, k = shape
    a, b = (torch.randn(1, size, k, device=device).bfloat16().permute(1, 2, 0) for size in (m, n))
    return a, b, torch.einsum("mkl,nkl->mnl", a.double(), b.double())
