"""Random operands of every type, in the form of a fused API and in that of its peers, with equal values."""

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
"""Bits per element, including its share of a scale factor."""


@dataclass(frozen=True)
class Operand:
    """``tensor`` (mn, k, 1) with its scale factors ``scale`` or None, and ``plain`` (mn, k) with the same values.

    For block-scaled types ``plain`` is bfloat16. It is exact because float32 scales are powers of two here. For other
    types it is the tensor.
    """

    tensor: Any
    scale: Any
    plain: Any


@dataclass(frozen=True)
class Operands:
    """Operands of alpha A B^T. alpha, a power of two, is folded into ``peer_b`` if that is exact, else in
    ``peer_alpha``.
    """

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
    """Memory for a result, filled with NaN so that missing writes are detected."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def operands(dtype: str, m: int, n: int, k: int, scaled: bool = True) -> Operands:
    """Standard normal A and B; with ``scaled``, alpha brings the variance of alpha A B^T near 1."""
    alpha = 2.0 ** -round(math.log2(k) / 2) if scaled else 1.0
    a, b = (operand(dtype, normal(rows, k), block) for rows, block in ((m, 1), (n, 128)))
    operand_type = OPERAND_TYPES[dtype]
    out = getattr(torch, operand_type.out)
    if dtype == "fp8":
        return Operands(a, b, alpha, b.plain, alpha, out, None)
    return Operands(a, b, alpha, b.plain * alpha, 1.0, out, operand_type.vector if operand_type.scale else None)


def operand(dtype: str, x: Any, rows: int = 1) -> Operand:
    """Quantizes a float32 matrix (mn, k); ``rows`` share a float32 scale."""
    operand_type = OPERAND_TYPES[dtype]
    if not operand_type.scale:
        plain = x.to(getattr(torch, operand_type.element))
        return Operand(batched(plain), None, plain)
    quantize_options = {"rows": rows, "power_of_two": True} if operand_type.scale == BLOCKWISE_DTYPE else {}
    element, scale_dtype = getattr(torch, operand_type.element), getattr(torch, operand_type.scale)
    tensor, scale = quantize_rows(batched(x), element, scale_dtype, operand_type.vector, **quantize_options)
    return Operand(tensor, scale, dequantize(tensor, scale, operand_type.vector)[..., 0].bfloat16())
