"""Number formats of GEMM operands and results: names, widths, limits, and which block scales go with which elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.lazy import torch
from cudnn_kernels.formats import FORMATS, FP4, FP8

FLOAT4, FLOAT8 = FP4, FP8
PLAIN = ("float16", "bfloat16", "float32", *FLOAT8)
BLOCK_SCALED = (FLOAT4, "uint8", *FLOAT8)  # uint8 holds packed pairs of four-bit elements
SCALES = ("float8_e8m0fnu", "float8_e4m3fn")
BLOCKWISE_DTYPE, BLOCKWISE_SIZE = "float32", 128
"""Blockwise scales: float32, one for 128 elements along k, applied to partial accumulators (DeepGEMM's 1D1D and 1D2D).
"""

BITS: Mapping[str, int] = {name: x.bits for name, x in FORMATS.items()}

LARGEST: Mapping[str, float] = {name: x.largest for name, x in FORMATS.items() if x.largest is not None}
"""The largest finite value of the dtypes that saturate."""

QUANTIZED_LIMIT: Mapping[str, float] = {name: FORMATS[name].block_limit for name in LARGEST}
"""The value that the amax of a block is scaled to, before the scale factor is rounded."""


def name_of(dtype: Any) -> str:
    """PyTorch's name of a type; bytes are pairs of four-bit elements, or e8m0 exponents where they are signed."""
    name = str(dtype).removeprefix("torch.")
    return {"uint8": FLOAT4, "int8": "float8_e8m0fnu"}.get(name, name)


_CUTLASS = {
    "Float32": "float32",
    "Float16": "float16",
    "BFloat16": "bfloat16",
    "Float8E4M3FN": "float8_e4m3fn",
    "Float8E5M2": "float8_e5m2",
    "Float8E8M0FNU": "float8_e8m0fnu",
    "Float4E2M1FN": FLOAT4,
}


def torch_type(dtype: Any) -> Any:
    """PyTorch's type for a type of the CuTe DSL, of NumPy or of JAX; None and what is unknown stay as they are."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", "")
    return getattr(torch, _CUTLASS.get(name, name), dtype) if name in (*_CUTLASS, *FORMATS) else dtype


def wide(x: Any) -> Any:
    """A tensor in the type that references compute in: float64 stays, all others become float32."""
    return x if x.dtype is torch.float64 else x.float()


def dtypes(names: tuple[str, ...]) -> list[Any]:
    """PyTorch's types of these names."""
    return [getattr(torch, name) for name in names]
