"""Checks that the memory of a tensor holds its values: no lazy (negative, conjugate), nested, sparse or fake tensors.

A negative or conjugate view shows other values than its memory has. Functions copy such inputs and refuse such outputs.
Tensors without strides or without memory are refused, and so are outputs that are read-only.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from cudnn.datatypes import _is_torch_tensor  # pyright: ignore[reportPrivateUsage]
from cudnn.errors import make_error
from cudnn.lazy import torch

_PACKED = "pass packed sequences, nested.values() with cu_seqlens (ragged offsets), or nested.to_padded_tensor(0.0)"


def check_strided(where: str, what: str, tensor: Any) -> None:
    """Raises TypeError for a tensor of PyTorch without strides: nested, sparse, quantized, of MKL-DNN, distributed."""
    if not _is_torch_tensor(tensor) or _is_plain(tensor):
        return
    got, hint = "", ""
    if tensor.is_nested:
        got, hint = "a nested tensor", _PACKED
    elif tensor.layout is not torch.strided:
        got, hint = f"a tensor of the layout {tensor.layout}", "pass tensor.to_dense()"
    elif tensor.is_quantized:
        got, hint = f"a quantized tensor ({tensor.dtype})", "pass tensor.dequantize()"
    elif hasattr(tensor, "device_mesh"):  # the module of DTensor, which may not be loaded, takes long to
        got, hint = f"a {type(tensor).__name__}", "pass tensor.to_local(), the part of this rank"
    if got:
        raise make_error(TypeError, where, what, got, "dense tensors (torch.strided)", hint)


def check_memory(where: str, what: str, tensor: Any) -> None:
    """Raises as :func:`check_strided`, and ValueError for a tensor of PyTorch that has no memory.

    That is one of the meta device, a fake one, one that a transform of ``torch.func`` wraps, or another class's.
    """
    if not _is_torch_tensor(tensor) or _is_plain(tensor):
        return
    check_strided(where, what, tensor)
    got, hint = "", ""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        got, hint = "a tensor within a transform of torch.func", "call an operator of cudnn.ops instead"
    elif tensor.device.type == "meta" or _is_fake(tensor):
        got, hint = f"{type(tensor).__name__} without data, as on the meta device", "pass a tensor of a CPU or GPU"
    elif not torch._C._has_storage(tensor):
        got, hint = f"a {type(tensor).__name__}, which has no memory", "pass the torch.Tensor that it wraps"
    if got:
        raise make_error(ValueError, where, what, got, "tensors with memory", hint)


def _is_plain(tensor: Any) -> bool:
    """Whether a tensor is a plain strided torch.Tensor with memory: the fast path of most calls."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not torch._C._has_storage(tensor):
        return False
    return not (tensor.is_meta or tensor.is_nested or tensor.is_quantized)  # sparse ones have no storage


def _is_fake(tensor: Any) -> bool:
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(tensor, module.FakeTensor)


def is_lazy(tensor: Any) -> bool:
    """Whether a tensor of PyTorch shows other values than its memory has: a negative or conjugate view."""
    return _is_torch_tensor(tensor) and (tensor.is_neg() or tensor.is_conj())


def resolved(tensor: Any) -> Any:
    """An input as kernels read it: a copy of a negative or conjugate view with the same strides, others as they are."""
    if not is_lazy(tensor):
        return tensor
    if tensor.is_conj():
        return tensor.detach().resolve_conj()
    memory = torch._neg_view(tensor.detach())  # twice negative: the values in memory
    reach = sum((size - 1) * step for size, step in zip(memory.shape, memory.stride(), strict=True))
    values = memory.as_strided((reach + 1 if memory.numel() else 0,), (1,)).neg()  # strides may lead to elements twice
    return values.as_strided(tensor.shape, tensor.stride())


def as_input(where: str, what: str, array: Any) -> Any:
    """An input as kernels and the reference read it, which may be a copy. Raises as :func:`check_memory`."""
    check_memory(where, what, array)
    return resolved(readable(array))


def check_resolved(where: str, what: str, tensor: Any) -> None:
    """Raises as :func:`check_memory`, and ValueError for a negative or conjugate view, where no copy can be made."""
    check_memory(where, what, tensor)
    if is_lazy(tensor):
        state, method = ("negative", "resolve_neg") if tensor.is_neg() else ("conjugate", "resolve_conj")
        got = f"a {state} view, whose memory has other values"
        raise make_error(ValueError, where, what, got, "tensors whose values lie in memory", f"pass tensor.{method}()")


def check_output(where: str, what: str, array: Any) -> None:
    """Raises as :func:`check_memory`, and ValueError for a negative or conjugate view, or a read-only NumPy array."""
    check_memory(where, what, array)
    if is_lazy(array):
        state = "negative" if array.is_neg() else "conjugate"
        hint = "allocate it with torch.empty(), and apply the view to the result"
        raise make_error(ValueError, where, what, f"a {state} view", "outputs whose values lie in memory", hint)
    if _is_read_only(array):
        hint = "pass a copy, array.copy(), and read the result there"
        raise make_error(ValueError, where, what, "a read-only array", "outputs that can be written to", hint)


def readable(array: Any) -> Any:
    """An input that DLPack exports: a read-only NumPy array as a writable view, others as they are.

    Nothing writes to it. The caller keeps ``array`` alive.
    """
    if not _is_read_only(array):
        return array
    if not array.size:
        return array.copy(order="K")
    numpy = sys.modules["numpy"]
    steps = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    below, above = -sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    memory = (ctypes.c_uint8 * (below + above + array.itemsize)).from_address(array.ctypes.data - below)
    return numpy.ndarray(array.shape, array.dtype, memory, below, array.strides)


def _is_read_only(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(array, numpy.ndarray) and not array.flags.writeable
