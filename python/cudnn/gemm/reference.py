"""What the fused GEMMs compute, in PyTorch: the product, and the epilogue as the kernels' own reference has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cudnn.gemm.formats import FLOAT4, name_of
from cudnn.gemm.scales import dequantize
from cudnn.lazy import torch
from cudnn_kernels.epilogue import reference


def product(tensors: Mapping[str, Any], vector: int) -> Any:
    """acc[m, n, l] = sum over k of A[m, k, l] B[n, k, l], in float32, of the operands times their scale factors."""
    a = dequantize(tensors["a"], tensors.get("sfa"), vector)
    b = dequantize(tensors["b"], tensors.get("sfb"), vector)
    return torch.einsum("mkl,nkl->mnl", a, b)


def evaluate(operations: Sequence[Any], accumulator: Any, tensors: Mapping[str, Any], groups: Any = None) -> None:
    """Does to a call's tensors, and numbers, what an epilogue does. ``groups``: the expert of each row."""
    packed = {n: x.view(torch.uint8) for n, x in tensors.items() if name_of(getattr(x, "dtype", "")) == FLOAT4}
    reference.evaluate(operations, accumulator, {**tensors, **packed}, groups)  # PyTorch does not copy packed elements
