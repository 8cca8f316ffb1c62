"""Random operands of every type: as a fused API takes them, and as its peers do, with equal values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cudnn.gemm import dequantize, quantize_rows
from cudnn.lazy import torch

DEVICE = "cuda"
BITS = {"bf16": 16.0, "fp16": 16.0, "fp8": 8.0, "fp8_128": 8.125, "mxfp8": 8.25, "nvfp4": 4.5}
"""Of an element, with its share of a scale factor."""
VECTORS = {"fp8_128": 128, "mxfp8": 32, "nvfp4": 16}
"""Elements along K that share a scale factor."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_E4M3_LARGEST, _FP4_LARGEST = 448.0, 6.0


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
    return torch.randn(*shape, device=DEVICE)


def blank(rows: int, columns: int, dtype: Any) -> Any:
    """Memory for a result, filled with NaN so that what is not written shows."""
    return torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)


def operands(dtype: str, m: int, n: int, k: int, scaled: bool = True) -> Operands:
    """Standard normal A and B; with ``scaled``, alpha gives the product a variance near 1."""
    alpha = 2.0 ** -round(math.log2(k) / 2) if scaled else 1.0
    a, b = (operand(dtype, normal(rows, k), block) for rows, block in ((m, 1), (n, 128)))
    out = torch.float16 if dtype == "fp16" else torch.bfloat16
    if dtype == "fp8":
        return Operands(a, b, alpha, b.plain, alpha, out, None)
    return Operands(a, b, alpha, b.plain * alpha, 1.0, out, VECTORS.get(dtype))


def operand(dtype: str, x: Any, rows: int = 1) -> Operand:
    """Rounds a float32 matrix (mn, k); ``rows`` share a float32 factor."""
    if dtype == "fp8_128":
        chosen = {"rows": rows, "power_of_two": True}
        tensor, scale = quantize_rows(batched(x), torch.float8_e4m3fn, torch.float32, VECTORS[dtype], **chosen)
        return Operand(tensor, scale, dequantize(tensor, scale, VECTORS[dtype])[..., 0].bfloat16())
    if dtype in VECTORS:
        return _block_scaled(dtype, x, VECTORS[dtype])
    plain = x.to({"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}[dtype])
    return Operand(batched(plain), None, plain)


def _block_scaled(dtype: str, x: Any, vector: int) -> Operand:
    blocks = x.unflatten(1, (-1, vector))
    largest = blocks.abs().amax(dim=2)
    if dtype == "mxfp8":
        exponent = (largest / _E4M3_LARGEST).log2().ceil()
        factors, scale = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu), exponent.exp2()
        rounded = (blocks / scale.unsqueeze(2)).to(torch.float8_e4m3fn)
        tensor, values = rounded.flatten(1), rounded.float()
    else:
        factors = (largest / _FP4_LARGEST).to(torch.float8_e4m3fn)
        scale = factors.float()
        codes, values = _fp4(blocks / scale.unsqueeze(2))
        tensor = (codes[..., 0::2] | codes[..., 1::2] << 4).flatten(1).view(torch.float4_e2m1fn_x2)
    plain = (values * scale.unsqueeze(2)).flatten(1).to(torch.bfloat16)
    return Operand(batched(tensor), atoms(factors), plain)


def _fp4(x: Any) -> tuple[Any, Any]:
    """Codes, as uint8, and values of the nearest fp4 numbers."""
    index = torch.bucketize(x.abs(), torch.tensor(_BETWEEN, device=x.device), out_int32=True)
    values = torch.tensor(_FP4, device=x.device)[index]
    return (index | (x < 0).int() << 3).to(torch.uint8), torch.where(x < 0, -values, values)


def atoms(factors: Any) -> Any:
    """Scale factors (rows, columns) in 128 x 4 atoms: (32, 4, ceil(rows / 128), 4, ceil(columns / 4), 1)."""
    rows, columns = factors.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8, device=factors.device)
    padded[:rows, :columns] = factors.view(torch.uint8)
    tiled = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).contiguous()
    return tiled.unsqueeze(0).permute(3, 4, 1, 5, 2, 0).view(factors.dtype)
