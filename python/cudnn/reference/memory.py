"""Typed, strided views of the memory that a call hands over, and conversions between element types."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cudnn.datatypes import (
    _cudnn_to_torch_data_type,
    _is_torch_tensor,
    element_bits,
)
from cudnn.enums import data_type
from cudnn.errors import refusal
from cudnn.lazy import torch

# Largest finite values: fp8 formats saturate on conversion (OCP 8-bit floating point specification, revision 1.0).
_FP8_MAX = {data_type.FP8_E4M3: 448.0, data_type.FP8_E5M2: 57344.0}


def torch_type(kind: data_type, where: str) -> Any:
    """The torch.dtype in which the executor stores a type."""
    dtype = _cudnn_to_torch_data_type(kind)
    if dtype is None or kind is data_type.FP4_E2M1:
        raise NotImplementedError(
            refusal(where, "data type", kind.name, "a type that PyTorch computes with", "run this graph on a GPU")
        )
    return dtype


def rounded(value: Any, kind: data_type, where: str) -> Any:
    """``value`` in the storage type ``kind``.

    Conversions to fp8 and to narrower integers saturate; those to integers round to nearest even; BOOLEAN is anything
    but zero.
    """
    limit = _FP8_MAX.get(kind)
    if limit is not None:
        value = value.float().clamp(-limit, limit)
    elif kind in (data_type.INT8, data_type.UINT8, data_type.INT32) and value.dtype is not torch.bool:
        info = torch.iinfo(torch_type(kind, where))
        # float32 cannot hold the largest int32: clamp in float64 so that saturation does not wrap round.
        value = value.double().round() if value.dtype.is_floating_point else value.long()
        value = value.clamp(info.min, info.max)
    elif kind is data_type.INT64 and value.dtype.is_floating_point:
        value = value.round()
    return value.to(torch_type(kind, where))


def memory(data: Any, nbytes: int, device: Any, where: str) -> Any:
    """A uint8 view of the ``nbytes`` bytes at a torch tensor's, DLPack object's or raw pointer's first element."""
    if isinstance(data, int):
        return _from_pointer(data, nbytes, device)
    if not _is_torch_tensor(data):
        if not hasattr(data, "__dlpack__"):
            raise TypeError(
                refusal(where, "data", type(data).__name__, "a torch.Tensor, an object with __dlpack__, or an address "
                        "(int)", "pass one of these")
            )  # fmt: skip
        data = torch.from_dlpack(data)
    start = data.storage_offset() * data.element_size()
    available = data.untyped_storage().nbytes() - start
    if available < nbytes:
        raise ValueError(
            refusal(where, "memory", f"{available} bytes", f"the {nbytes} bytes that the graph's tensor spans",
                    "pass a tensor of the graph tensor's shape, strides and type")
        )  # fmt: skip
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage(), start, (nbytes,), (1,))


def _from_pointer(address: int, nbytes: int, device: Any) -> Any:
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


def view(raw: Any, kind: data_type, dims: Sequence[int], strides: Sequence[int], where: str) -> Any:
    """Bytes as a strided tensor of a type."""
    dtype = torch_type(kind, where)
    size = element_bits(kind) // 8
    usable = raw[: raw.numel() // size * size]
    if raw.data_ptr() % size:
        raise ValueError(
            refusal(where, "memory", f"address {raw.data_ptr():#x}", f"a multiple of {size} bytes for {kind.name}",
                    "pass an aligned tensor")
        )  # fmt: skip
    return usable.view(dtype).as_strided(tuple(dims), tuple(strides))


def pack_bits(mask: Any) -> Any:
    """A BOOLEAN tensor ``[N, C, ...]`` as the channels-last bit mask that cuDNN's fusion engines write.

    Eight channels share a byte, the lowest channel in the lowest bit: ``[N, C / 8, ...]`` uint8.
    """
    groups = mask.to(torch.uint8).unflatten(1, (-1, 8))
    weights = (1 << torch.arange(8, device=mask.device)).view(1, 1, 8, *[1] * (mask.dim() - 2))
    return (groups * weights).sum(2).to(torch.uint8)


def unpack_bits(packed: Any) -> Any:
    """The inverse of ``pack_bits``."""
    shifts = torch.arange(8, device=packed.device).view(1, 1, 8, *[1] * (packed.dim() - 2))
    return ((packed.unsqueeze(2) >> shifts) & 1).flatten(1, 2).bool()
