"""Reads the description of a DLPack tensor (dlpack.h, version 1) without importing the library that made it."""

from __future__ import annotations

import ctypes
from typing import Any

from cudnn.arrays.layout import row_major
from cudnn.strided import readable

_CPU_DEVICES = (1,)  # kDLCPU; the others accepted are kDLCUDA (2), kDLCUDAHost (3) and kDLCUDAManaged (13)
_DEVICES = (1, 2, 3, 13)


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def _tensor(capsule: Any) -> _DLTensor:
    # An unversioned capsule ("dltensor") points at a DLManagedTensor, whose first member is the DLTensor.
    return _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))


def describe(source: Any) -> tuple[list[int], list[int], int, int, bool]:
    """Shape, strides (elements), type code, type bits, and whether the data lies in CPU memory."""
    capsule = readable(source).__dlpack__()
    tensor = _tensor(capsule)
    if tensor.device_type not in _DEVICES:
        raise ValueError(
            f"tensor_like: DLPack device type {tensor.device_type}; allowed: CPU, CUDA, CUDA host, managed."
        )
    dims = [tensor.shape[axis] for axis in range(tensor.ndim)]
    strides = [tensor.strides[axis] for axis in range(tensor.ndim)] if tensor.strides else row_major(dims)
    return dims, strides, tensor.type_code, tensor.type_bits, tensor.device_type in _CPU_DEVICES


def data_pointer(source: Any) -> int:
    """Address of the first element. The caller keeps ``source`` alive."""
    capsule = readable(source).__dlpack__()
    tensor = _tensor(capsule)
    return (tensor.data or 0) + tensor.byte_offset
