"""Number formats of GEMM operands and results: names, widths, limits, and which block scales go with which elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.lazy import torch

FLOAT4 = "float4_e2m1fn_x2"
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
PLAIN = ("float16", "bfloat16", "float32", *FLOAT8)
BLOCK_SCALED = (FLOAT4, "uint8", *FLOAT8)  # uint8 holds packed pairs of four-bit elements
SCALES = ("float8_e8m0fnu", "float8_e4m3fn")

BITS: Mapping[str, int] = {"float32": 32, "float16": 16, "bfloat16": 16, **dict.fromkeys(FLOAT8, 8), FLOAT4: 4}

LARGEST: Mapping[str, float] = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, FLOAT4: 6.0}
"""Of the types that rounding saturates at."""

QUANTIZED_LIMIT: Mapping[str, float] = {"float8_e4m3fn": 448.0, "float8_e5m2": 128.0, FLOAT4: 6.0}
"""What the largest magnitude of a block becomes, nearly. That of e5m2 leaves room, as cuDNN's kernels do."""


def name_of(dtype: Any) -> str:
    """PyTorch's name of a type; bytes are pairs of four-bit elements, or e8m0 exponents where they are signed."""
    name = str(dtype).removeprefix("torch.")
    return {"uint8": FLOAT4, "int8": "float8_e8m0fnu"}.get(name, name)


def dtypes(names: tuple[str, ...]) -> list[Any]:
    """PyTorch's types of these names."""
    return [getattr(torch, name) for name in names]
