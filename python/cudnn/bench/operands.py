"""Random operands of every type: as a fused API takes them, and as its peers do, with equal values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cudnn.fused.gemm import OPERAND_TYPES
from cudnn.gemm import dequantize, quantize_rows
from cudnn.gemm.formats import BLOCKWISE_DTYPE
from cudnn.lazy import torch

DEVICE = "cuda"
BITS = {"bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "fp8_128": 8.125, "mxfp8": 8.25, "nvfp4": 4.5}
"""Of an element, with its share of a scale factor."""


@dataclass(frozen=True)
class Operand:
    """``tensor`` (mn, k, 1) and ``scale``, the factors as the APIs take them or None; ``plain`` (mn, k) has the same
    values.

    ``plain`` is bfloat16 for block-scaled types, of which it holds every value exactly, since float32 factors are
    powers of two here; else it is the tensor.
    """

    tensor: Any
    scale: Any
    plain: Any


@dataclass(frozen=True)
class Operands:
    """For alpha A B^T. ``peer_b`` and ``peer_alpha``: alpha, a power of two, is part of B where that is exact."""

    a: Operand
    b: Operand
    alpha: float
    peer_b: Any
    peer_alpha: float
    out: Any  # type of results of 16 bits
    vector: int | None

    def accumulator(self) -> Any:
        """alpha A B^T in float32."""
        return self.a.plain.float() @ self.peer_b.float().t() * self.peer_alpha


def batched(x: Any) -> Any:
    """(rows, columns) as (rows, columns, 1), with the strides (columns, 1, rows * columns)."""
    return x.unsqueeze(0).permute(1, 2, 0)


def normal(*shape: int) -> Any:
    """Standard normal float32 numbers."""
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE)


def blank(rows: int, columns: int, dtype: Any) -> Any:
    """Memory for a result, filled with NaN so that what is not written shows."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def operands(dtype: str, m: int, n: int, k: int, scaled: bool = True) -> Operands:
    """Standard normal A and B; with ``scaled``, alpha gives the product a variance near 1."""
    alpha = 2.0 ** -round(math.log2(k) / 2) if scaled else 1.0
    a, b = (operand(dtype, normal(rows, k), block) for rows, block in ((m, 1), (n, 128)))
    kind = OPERAND_TYPES[dtype]
    out = getattr(torch, kind.out)
    if dtype == "fp8":
        return Operands(a, b, alpha, b.plain, alpha, out, None)
    return Operands(a, b, alpha, b.plain * alpha, 1.0, out, kind.vector if kind.scale else None)


def operand(dtype: str, x: Any, rows: int = 1) -> Operand:
    """Rounds a float32 matrix (mn, k); ``rows`` share a float32 factor."""
    kind = OPERAND_TYPES[dtype]
    if not kind.scale:
        plain = x.to(getattr(torch, kind.element))
        return Operand(batched(plain), None, plain)
    of_sums = {"rows": rows, "power_of_two": True} if kind.scale == BLOCKWISE_DTYPE else {}
    element, factors = getattr(torch, kind.element), getattr(torch, kind.scale)
    tensor, scale = quantize_rows(batched(x), element, factors, kind.vector, **of_sums)
    return Operand(tensor, scale, dequantize(tensor, scale, kind.vector)[..., 0].bfloat16())
