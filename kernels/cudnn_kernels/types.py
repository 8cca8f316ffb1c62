"""Element types by the name that PyTorch gives them, and stand-ins for tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

FP4 = "float4_e2m1fn_x2"  # two elements a byte; kernels get bytes

DTYPES: dict[str, Any] = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float8_e8m0fnu": cutlass.Float8E8M0FNU,
    "float4_e2m1fn_x2": cutlass.Float4E2M1FN,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
}


def fake(dtype: str, shape: Sequence[Any], inner: int | None, align: int = 16) -> Any:
    """A stand-in for a tensor with stride 1 in dimension ``inner`` and ``align`` bytes between other elements.

    Without ``inner``, with any strides of so many bytes.
    """
    element = DTYPES[dtype]
    step = max(1, align * 8 // element.width)
    stride = [1 if dim == inner else cute.sym_int64(divisibility=step) for dim in range(len(shape))]
    return make_fake_tensor(element, tuple(shape), tuple(stride), assumed_align=max(align, element.width // 8))


def fake_operand(dtype: str, mn: Any, k: Any, batch: Any, major: str) -> Any:
    """A stand-in for an operand (mn, k, l); of packed elements, for its bytes."""
    if dtype == FP4:
        return fake("uint8", (mn, cute.sym_int(), batch), 1)
    return fake(dtype, (mn, k, batch), 1 if major == "k" else 0)


def fake_scales(dtype: str) -> Any:
    """A stand-in for scale factors in the layout of 128 x 4 atoms: (32, 4, ceil(mn / 128), 4, ceil(k / 4), l)."""
    atoms, batch = (cute.sym_int64(divisibility=512) for _ in range(2))
    shape = (32, 4, cute.sym_int(), 4, cute.sym_int(), cute.sym_int())
    return make_fake_tensor(DTYPES[dtype], shape, (16, 4, atoms, 1, 512, batch), assumed_align=16)
