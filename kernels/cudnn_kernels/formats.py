"""Element types of GEMM operands and results, by PyTorch's names: the only table of widths, limits and packing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FP4 = "float4_e2m1fn_x2"
FP8 = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Format:
    """``bits`` of an element. Rounding saturates at ``largest``, if it is not None.

    A quantizer maps the amax of a block to ``block_limit``, approximately. ``packed`` elements share a byte, the
    first one in the low half; kernels get tensors of bytes.
    """

    bits: int
    largest: float | None = None
    block_limit: float = 1.0
    packed: int = 1


FORMATS: Mapping[str, Format] = {
    "float32": Format(32),
    "float16": Format(16),
    "bfloat16": Format(16),
    "float8_e4m3fn": Format(8, 448.0, 448.0),
    "float8_e5m2": Format(8, 57344.0, 128.0),  # values of a block reach 128 only, as those of cuDNN's kernels do
    "float8_e8m0fnu": Format(8),
    FP4: Format(4, 6.0, 6.0, packed=2),
}


def bits(dtype: str) -> int:
    """The width of an element."""
    return FORMATS[dtype].bits


def row_bytes(dtype: str, count: int) -> int:
    """The bytes of ``count`` contiguous elements."""
    return count * bits(dtype) // 8
