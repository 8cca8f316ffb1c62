"""Shapes, operands and checks of results that the cases of the fused GEMMs share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import ceil_div
from cudnn.demo_cases import Comparison, compare
from cudnn.demo_cases.gemm_variants import BF16, BYTES, E4M3, E5M2, F16, F32, FP4, Variant
from cudnn.gemm import dequantize, pack_scales, scale_values, unpack_float4, unpack_scales
from cudnn.gemm.formats import BLOCKWISE_SIZE, LARGEST, QUANTIZED_LIMIT, name_of
from cudnn.gemm.scales import blockwise_scale_shape, blockwise_scale_stride
from cudnn.lazy import torch

NORM_CONST = 0.01

_HALF_ULP = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, E4M3: 2.0**-4, E5M2: 2.0**-3, FP4: 0.25}
"""Half a unit in the last place, relative to the smallest number of the binade."""
_HALF_SUBNORMAL = {F16: 2.0**-25, E4M3: 2.0**-10, E5M2: 2.0**-17, FP4: 0.25}
"""Half the spacing of subnormal numbers."""
_MMA_ERROR = {F32: 3e-3, E4M3: 1e-3, E5M2: 1e-3}
"""Error of a GEMM relative to its largest result: TF32 has 10 bits; Hopper accumulates fp8 products with few bits."""


@dataclass(frozen=True)
class Operands:
    """A, B, their scale factors or None, and A B^T in float64, from which a kernel may differ by ``tolerance``."""

    a: Any
    b: Any
    sfa: Any
    sfb: Any
    product: Any
    tolerance: float


def plain(api: str, shape: tuple[int, ...]) -> Variant:
    """bfloat16 of one matrix (m, n, k)."""
    m, n, k = shape
    return Variant(api, (m, n, k, 1))


def operands(v: Variant, device: str) -> Operands:
    """Random operands, the same on every device."""
    m, n, k, batch = v.shape
    (a, sfa, x), (b, sfb, y) = (
        _operand(v, mn, k, batch, major, rows)
        for mn, major, rows in zip((m, n), v.majors, (1, BLOCKWISE_SIZE), strict=False)
    )
    product = torch.einsum("mkl,nkl->mnl", x.double(), y.double())
    moved = (None if tensor is None else tensor.to(device) for tensor in (a, b, sfa, sfb, product))
    return Operands(*moved, tolerance=2e-5 if v.scale not in ("", F32) else _MMA_ERROR.get(v.dtype, 2e-5))


def matrix(rows: int, columns: int, batch: int, dtype: str, row_major: bool, device: str = "cpu") -> Any:
    """Random numbers (rows, columns, l), dense."""
    shape = (batch, rows, columns) if row_major else (batch, columns, rows)
    values = torch.randn(shape, dtype=torch.float32, device="cpu").to(getattr(torch, dtype)).to(device)
    return values.permute(1, 2, 0) if row_major else values.permute(2, 1, 0)


def judge(name: str, result: Any, expected: Any, tolerance: float, roundings: int = 1) -> Comparison:
    """Checks a result that is rounded ``roundings`` times after an error of ``tolerance`` times the largest value."""
    dtype_name = name_of(result.dtype)
    limit = LARGEST.get(dtype_name, float("inf"))
    values = unpack_float4(result) if dtype_name == FP4 else result
    absolute = 1.01 * _HALF_SUBNORMAL.get(dtype_name, 0.0) + tolerance * float(expected.abs().max())
    return compare(name, values, expected.clamp(-limit, limit), 1.01 * roundings * _HALF_ULP[dtype_name], absolute)


def judge_quantized(
    v: Variant, names: tuple[str, str], results: Mapping[str, Any], expected: Any, tolerance: float
) -> list[Comparison]:
    """Checks an fp8 result and its scale factors."""
    name, scales = names
    rows, columns, _ = expected.shape
    scale_values_ = scale_values(unpack_scales(results[scales], rows, ceil_div(columns, v.vector)))
    blocks = torch.nn.functional.pad(expected, (0, 0, 0, -columns % v.vector)).unflatten(1, (-1, v.vector))
    smallest_scale = (
        blocks.abs().amax(2) * NORM_CONST / QUANTIZED_LIMIT[v.out]
    )  # the next power of two is less than twice that
    scale_tolerance = tolerance * float(smallest_scale.max())
    dequantized = results[name].double() * scale_values_.repeat_interleave(v.vector, 1)[:, :columns] / NORM_CONST
    distance = 1.01 * _HALF_SUBNORMAL[v.out] * float(scale_values_.max()) / NORM_CONST
    largest = float(expected.abs().max())
    return [
        compare(name, dequantized, expected, 1.01 * _HALF_ULP[v.out], distance + tolerance * largest),
        compare(scales, scale_values_, 1.5 * smallest_scale, 1 / 3, scale_tolerance),
    ]


def _operand(v: Variant, mn: int, k: int, batch: int, major: str, rows: int) -> tuple[Any, Any, Any]:
    """The tensor, its scale factors, and its values. ``rows`` share an fp32 blockwise scale."""
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
    values = torch.exp2(torch.randint(-2, 3, shape, dtype=torch.int64, device="cpu").float())
    if v.scale == E4M3:
        values *= 1 + torch.randint(0, 8, shape, dtype=torch.int64, device="cpu").float() / 8
    scales = pack_scales(values.to(getattr(torch, v.scale)))
    if v.dtype in (FP4, BYTES):
        tensor = torch.randint(0, 256, (batch, mn, k // 2), dtype=torch.uint8, device="cpu").permute(1, 2, 0)
        tensor = tensor.view(getattr(torch, v.dtype))
    else:
        tensor = matrix(mn, k, batch, v.dtype, major == "k")
    return tensor, scales, dequantize(tensor, scales, v.vector)
