"""``data_type`` and its counterparts in PyTorch, DLPack and memory: one table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from cudnn.enums import data_type
from cudnn.errors import make_error
from cudnn.lazy import torch


class _Row(NamedTuple):
    torch_name: str  # attribute of the torch module, "" where PyTorch has no such type
    dlpack: tuple[int, int]  # DLPack type code and bits, (-1, 0) where it has none
    bits: int  # bits an element takes in memory


# DLPack type codes, dlpack.h 1.1: kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4, kDLBool 6; float8 and float4 10 to 17.
_TABLE: dict[data_type, _Row] = {
    data_type.FLOAT: _Row("float32", (2, 32), 32),
    data_type.DOUBLE: _Row("float64", (2, 64), 64),
    data_type.HALF: _Row("float16", (2, 16), 16),
    data_type.BFLOAT16: _Row("bfloat16", (4, 16), 16),
    data_type.INT8: _Row("int8", (0, 8), 8),
    data_type.INT32: _Row("int32", (0, 32), 32),
    data_type.INT64: _Row("int64", (0, 64), 64),
    data_type.UINT8: _Row("uint8", (1, 8), 8),
    data_type.BOOLEAN: _Row("bool", (6, 8), 8),
    data_type.FP8_E4M3: _Row("float8_e4m3fn", (10, 8), 8),
    data_type.FP8_E5M2: _Row("float8_e5m2", (12, 8), 8),
    data_type.FP8_E8M0: _Row("float8_e8m0fnu", (14, 8), 8),
    data_type.FP4_E2M1: _Row("float4_e2m1fn_x2", (17, 4), 4),
    data_type.INT4: _Row("", (0, 4), 4),
    data_type.INT8x4: _Row("", (-1, 0), 32),
    data_type.UINT8x4: _Row("", (-1, 0), 32),
    data_type.INT8x32: _Row("", (-1, 0), 256),
    data_type.FP8_E5M3: _Row("", (-1, 0), 8),
}
_FROM_TORCH_NAME = {"torch." + row.torch_name: value for value, row in _TABLE.items() if row.torch_name}
_FROM_DLPACK = {row.dlpack: value for value, row in _TABLE.items() if row.dlpack[1]}

FLOAT8 = frozenset({data_type.FP8_E4M3, data_type.FP8_E5M2})


def is_torch_available() -> bool:
    """True when PyTorch can be imported."""
    try:
        torch.Tensor  # noqa: B018
    except ImportError:
        return False
    return True


def is_cutlass_available() -> bool:
    """True when the CuTe DSL, the package ``cutlass``, can be imported; imports it to find out."""
    try:
        _cutlass_types()
    except ImportError:
        return False
    return True


def _cutlass_types() -> Mapping[str, Any]:
    """The types of the CuTe DSL by PyTorch's names."""
    from cudnn_kernels.fakes import DTYPES

    return DTYPES


def _torch_to_cutlass_data_type(dtype: object, interpret_uint8_as_fp4x2: bool = False) -> Any:
    """The type of the CuTe DSL for a ``torch.dtype``, such as ``cutlass.Float8E4M3FN``; None if it has none.

    Packed four-bit elements are ``cutlass.Float4E2M1FN``; so are bytes with ``interpret_uint8_as_fp4x2``.

    Raises:
        ImportError: the CuTe DSL is not installed.
    """
    name = str(dtype).removeprefix("torch.")
    if name == "uint8" and interpret_uint8_as_fp4x2:
        name = "float4_e2m1fn_x2"
    return _cutlass_types().get(name) if str(dtype).startswith("torch.") else None


def _convert_to_cutlass_data_type(dtype: object, interpret_uint8_as_fp4x2: bool = False) -> Any:
    """The type of the CuTe DSL for a ``torch.dtype``, a ``data_type`` or a type of the CuTe DSL, which stays as it is.

    Packed four-bit elements are ``cutlass.Float4E2M1FN``; so are bytes with ``interpret_uint8_as_fp4x2``.

    Raises:
        ValueError: the CuTe DSL has no such type.
        ImportError: the CuTe DSL is not installed.
    """
    if any(dtype is cutlass_type for cutlass_type in _cutlass_types().values()):
        return dtype
    torch_dtype = _cudnn_to_torch_data_type(dtype) if isinstance(dtype, data_type) else dtype
    converted = _torch_to_cutlass_data_type(torch_dtype, interpret_uint8_as_fp4x2)
    if converted is None:
        allowed = ", ".join(f"torch.{name}" for name in _cutlass_types())
        raise make_error(ValueError, "data type for the CuTe DSL", "dtype", repr(dtype), allowed)
    return converted


def _is_torch_tensor(obj: object) -> TypeGuard[Any]:
    """True for a ``torch.Tensor``; does not import PyTorch to find out."""
    module = sys.modules.get("torch")
    return module is not None and isinstance(obj, module.Tensor)


def _torch_to_cudnn_data_type(dtype: object) -> data_type | None:
    """The ``data_type`` of a ``torch.dtype``, None if it has none."""
    return _FROM_TORCH_NAME.get(str(dtype))


def _cudnn_to_torch_data_type(dtype: data_type) -> Any:
    """The ``torch.dtype`` of a ``data_type``, None if this PyTorch has none."""
    row = _TABLE.get(dtype)
    return getattr(torch, row.torch_name, None) if row is not None and row.torch_name else None


def dlpack_to_data_type(code: int, bits: int) -> data_type:
    """The ``data_type`` of a DLPack type, ``NOT_SET`` if it has none."""
    return _FROM_DLPACK.get((code, bits), data_type.NOT_SET)


def element_bits(dtype: data_type) -> int:
    """Bits that one element takes in memory."""
    return _TABLE[dtype].bits


def element_bytes(dtype: data_type) -> int:
    """What divides the address of every element's first byte."""
    return max(1, element_bits(dtype) // 8)


def library_type(value: object) -> data_type:
    """A ``data_type`` from a ``data_type``, a ``torch.dtype``, or None (``NOT_SET``)."""
    if isinstance(value, data_type):
        return value
    if value is None:
        return data_type.NOT_SET
    converted = _torch_to_cudnn_data_type(value)
    if converted is None:
        raise ValueError(
            f"data type: got {value!r}; allowed: a cudnn.data_type or one of {', '.join(sorted(_FROM_TORCH_NAME))}."
        )
    return converted


_library_type = library_type
