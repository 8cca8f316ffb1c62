"""What the programs of the fused GEMMs share: shapes, operands, how results are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import ceil_div
from cudnn.demo_cases import Comparison, compare
from cudnn.demo_cases.gemm_matrix import BF16, BYTES, E4M3, E5M2, F16, F32, FP4, Variant
from cudnn.gemm import dequantize, pack_scales, scale_values, unpack_float4, unpack_scales
from cudnn.gemm.formats import BLOCKWISE_SIZE, LARGEST, QUANTIZED_LIMIT, name_of
from cudnn.gemm.scales import blockwise_scale_shape, blockwise_scale_stride
from cudnn.lazy import torch

NORM_CONST = 0.01

_ROUNDED = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3, FP4: 0.25}
"""Half a unit in the last place, relative to the least number that has it."""
_LEAST = {F16: 2.0**-25, E4M3: 2.0**-10, E5M2: 2.0**-17, FP4: 0.25}
"""Half the distance of the smallest numbers."""
_SUMMED = {F32: 3e-3, E4M3: 1e-3, E5M2: 1e-3}
"""Error of a product, relative to the largest: TF32 has 10 bits; Hopper adds up 8-bit products with few."""


@dataclass(frozen=True)
class Operands:
    """A, B, their scale factors where they have some, and their product in float64, which may be off by ``slack``."""

    a: Any
    b: Any
    sfa: Any
    sfb: Any
    product: Any
    slack: float


def plain(api: str, shape: tuple[int, ...]) -> Variant:
    """bfloat16 of one matrix (m, n, k)."""
    m, n, k = shape
    return Variant(api, (m, n, k, 1))


def operands(v: Variant, device: str) -> Operands:
    """Random ones, the same on every device."""
    m, n, k, batch = v.shape
    (a, sfa, x), (b, sfb, y) = (
        _operand(v, mn, k, batch, major, rows)
        for mn, major, rows in zip((m, n), v.majors, (1, BLOCKWISE_SIZE), strict=False)
    )
    product = torch.einsum("mkl,nkl->mnl", x.double(), y.double())
    moved = (None if tensor is None else tensor.to(device) for tensor in (a, b, sfa, sfb, product))
    return Operands(*moved, slack=2e-5 if v.scale not in ("", F32) else _SUMMED.get(v.dtype, 2e-5))


def matrix(rows: int, columns: int, batch: int, dtype: str, row_major: bool, device: str = "cpu") -> Any:
    """Random numbers (rows, columns, l), dense."""
    shape = (batch, rows, columns) if row_major else (batch, columns, rows)
    values = torch.randn(shape, dtype=torch.float32, device="cpu").to(getattr(torch, dtype)).to(device)
    return values.permute(1, 2, 0) if row_major else values.permute(2, 1, 0)


def judge(name: str, actual: Any, expected: Any, slack: float, roundings: int = 1) -> Comparison:
    """A result that is rounded ``roundings`` times, after an error of ``slack`` times the largest magnitude."""
    dtype = name_of(actual.dtype)
    limit = LARGEST.get(dtype, float("inf"))
    values = unpack_float4(actual) if dtype == FP4 else actual
    absolute = 1.01 * _LEAST.get(dtype, 0.0) + slack * float(expected.abs().max())
    return compare(name, values, expected.clamp(-limit, limit), 1.01 * roundings * _ROUNDED[dtype], absolute)


def judge_quantised(
    v: Variant, names: tuple[str, str], actual: Mapping[str, Any], expected: Any, slack: float
) -> list[Comparison]:
    """A result of 8 bits and its scale factors."""
    name, scales = names
    rows, columns, _ = expected.shape
    scale_factors = scale_values(unpack_scales(actual[scales], rows, ceil_div(columns, v.vector)))
    blocks = torch.nn.functional.pad(expected, (0, 0, 0, -columns % v.vector)).unflatten(1, (-1, v.vector))
    least = blocks.abs().amax(2) * NORM_CONST / QUANTIZED_LIMIT[v.out]  # the next power of two is less than twice that
    loose = slack * float(least.max())
    back = actual[name].double() * scale_factors.repeat_interleave(v.vector, 1)[:, :columns] / NORM_CONST
    distance = 1.01 * _LEAST[v.out] * float(scale_factors.max()) / NORM_CONST
    largest = float(expected.abs().max())
    return [
        compare(name, back, expected, 1.01 * _ROUNDED[v.out], distance + slack * largest),
        compare(scales, scale_factors, 1.5 * least, 1 / 3, loose),
    ]


def _operand(v: Variant, mn: int, k: int, batch: int, major: str, rows: int) -> tuple[Any, Any, Any]:
    """The tensor, its scale factors, its values. ``rows`` share an fp32 blockwise scale."""
    if not v.scale:
        tensor = matrix(mn, k, batch, v.dtype, major == "k")
        return tensor, None, tensor
    if v.scale == F32:
        shape = blockwise_scale_shape(mn, k, batch, rows)
        scales = torch.empty_strided(shape, blockwise_scale_stride(shape, rows), dtype=torch.float32, device="cpu")
        scales.uniform_(0.5, 2.0)
        tensor = matrix(mn, k, batch, v.dtype, major == "k")
        return tensor, scales, dequantize(tensor, scales, v.vector)
    shape = (mn, ceil_div(k, v.vector), batch)
    scale_factors = torch.exp2(torch.randint(-2, 3, shape, dtype=torch.int64, device="cpu").float())
    if v.scale == E4M3:
        scale_factors *= 1 + torch.randint(0, 8, shape, dtype=torch.int64, device="cpu").float() / 8
    scales = pack_scales(scale_factors.to(getattr(torch, v.scale)))
    if v.dtype in (FP4, BYTES):
        tensor = torch.randint(0, 256, (batch, mn, k // 2), dtype=torch.uint8, device="cpu").permute(1, 2, 0)
        tensor = tensor.view(getattr(torch, v.dtype))
    else:
        tensor = matrix(mn, k, batch, v.dtype, major == "k")
    return tensor, scales, dequantize(tensor, scales, v.vector)
