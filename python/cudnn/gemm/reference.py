"""What the references of the fused GEMMs share: the product, and rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.gemm.formats import FLOAT4, name_of
from cudnn.gemm.scales import dequantize, quantize_rows, round_to
from cudnn.lazy import torch


def product(tensors: Mapping[str, Any], vector: int) -> Any:
    """acc[m, n, l] = sum over k of A[m, k, l] B[n, k, l], in float32, of the operands times their scale factors."""
    a = dequantize(tensors["a"], tensors.get("sfa"), vector)
    b = dequantize(tensors["b"], tensors.get("sfb"), vector)
    return torch.einsum("mkl,nkl->mnl", a, b)


def store(tensor: Any, values: Any) -> None:
    """Rounds float32 values to a tensor's type."""
    rounded = round_to(values, tensor.dtype)
    if name_of(tensor.dtype) == FLOAT4:  # PyTorch does not copy this type
        tensor, rounded = tensor.view(torch.uint8), rounded.view(torch.uint8)
    tensor.copy_(rounded)


def store_quantized(tensor: Any, scales: Any, values: Any, vector: int, norm_const: Any) -> None:
    """Rounds float32 values to a tensor's type, each ``vector`` of them along n divided by a factor."""
    elements, factors = quantize_rows(values, tensor.dtype, scales.dtype, vector, norm_const)
    tensor.copy_(elements)
    scales.copy_(factors)


def raise_amax(amax: Any, values: Any) -> None:
    """amax = max(amax, |values|), NaN where there is one."""
    amax.copy_(torch.maximum(amax, values.abs().amax()))
