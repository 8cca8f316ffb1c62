"""Element types by the name that PyTorch gives them, and stand-ins for tensors of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

DTYPES: dict[str, Any] = {
    "float32": cutlass.Float32,
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float8_e4m3fn": cutlass.Float8E4M3FN,
    "float8_e5m2": cutlass.Float8E5M2,
    "float8_e8m0fnu": cutlass.Float8E8M0FNU,
    "uint8": cutlass.Uint8,
    "int32": cutlass.Int32,
}


def fake(dtype: str, shape: Sequence[Any], inner: int, align: int = 16) -> Any:
    """A stand-in for a tensor with stride 1 in dimension ``inner`` and ``align`` bytes between other elements."""
    element = DTYPES[dtype]
    step = max(1, align * 8 // element.width)
    stride = [1 if dim == inner else cute.sym_int64(divisibility=step) for dim in range(len(shape))]
    return make_fake_tensor(element, tuple(shape), tuple(stride), assumed_align=max(align, element.width // 8))
