"""The same computation in PyTorch, in float32, on any device."""

from __future__ import annotations

from typing import Any

from cudnn.lazy import torch

BLOCK = 16


def rmsnorm_rht_amax(x: Any, w: Any, eps: float, rows_per_cta: int) -> tuple[Any, Any]:
    """``o``, rounded to the type of ``x``, and ``amax``, taken before rounding.

    x has the shape (m, n), w (n,); o has that of x, amax is (m / rows_per_cta,), float32.
    """
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + eps) * w.float()
    y = hadamard(y.unflatten(1, (-1, BLOCK))).flatten(1) / BLOCK**0.5
    return y.to(x.dtype), y.abs().unflatten(0, (-1, rows_per_cta)).amax(dim=(1, 2))


def hadamard(y: Any) -> Any:
    """Applies the Hadamard transform (Sylvester's matrix) to the last dimension, a power of two, by butterflies."""
    size = y.shape[-1]
    if size == 1:
        return y
    first, second = y[..., : size // 2], y[..., size // 2 :]
    return torch.cat([hadamard(first + second), hadamard(first - second)], dim=-1)


def additions(x: Any, w: Any, eps: float, rows_per_cta: int) -> tuple[Any, Any]:
    """The same, for a compiler."""
    return rmsnorm_rht_amax(x, w, eps, rows_per_cta)


def product(x: Any, w: Any, eps: float, rows_per_cta: int) -> tuple[Any, Any]:
    """The same for a compiler, the Hadamard transform as a product."""
    h = hadamard(torch.eye(BLOCK, dtype=torch.float32, device=x.device)) / BLOCK**0.5
    y = x.float()
    y = (y * torch.rsqrt(y.square().mean(dim=1, keepdim=True) + eps) * w.float()).unflatten(1, (-1, BLOCK)) @ h
    return y.flatten(1).to(x.dtype), y.flatten(1).abs().unflatten(0, (-1, rows_per_cta)).amax(dim=(1, 2))
