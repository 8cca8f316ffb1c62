"""The one copy that a call may need: a few constant words into the workspace."""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_size_t, c_uint64, c_void_p
from typing import Any

from cudnn.backend.handle import Handle, get_stream


@functools.cache
def _copy_function() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    function.argtypes = (c_uint64, c_void_p, c_size_t, c_void_p)
    return function


def copy_to_device(target: int, source: ctypes.Array[Any], handle: Handle) -> None:
    """Queues a copy from host memory, which must outlive it, on the handle's stream. A stream capture records it."""
    status = _copy_function()(target, ctypes.addressof(source), ctypes.sizeof(source), get_stream(handle))
    if status:
        raise RuntimeError(f"cuMemcpyHtoDAsync failed with CUresult {status}")
