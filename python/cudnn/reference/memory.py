"""Typed, strided views of the memory that a call passes, and conversions between element types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cudnn.arrays.check import span_bytes, tiles
from cudnn.datatypes import (
    _cudnn_to_torch_data_type,
    _is_torch_tensor,
    element_bits,
)
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import make_error
from cudnn.gemm.scales import pack_float4, unpack_float4
from cudnn.lazy import torch
from cudnn.strided import readable

if TYPE_CHECKING:
    from cudnn.pygraph.tensor import Tensor

# Largest finite values: fp8 formats saturate on conversion (OCP 8-bit floating point specification, revision 1.0).
_FP8_MAX = {data_type.FP8_E4M3: 448.0, data_type.FP8_E5M2: 57344.0}


def torch_type(element_type: data_type, where: str) -> Any:
    """The torch.dtype that holds single values of a type: that type, and float32 for FP4_E2M1."""
    dtype = torch.float32 if element_type is data_type.FP4_E2M1 else _cudnn_to_torch_data_type(element_type)
    if dtype is None:
        raise make_error(
            NotImplementedError,
            where,
            "data type",
            element_type.name,
            "a type that PyTorch computes with",
            "run this graph on a GPU",
        )
    return dtype


def rounded(value: Any, element_type: data_type, where: str) -> Any:
    """``value`` in the storage type ``element_type``.

    Conversions to fp8, fp4 and to narrower integers saturate; those to integers round to nearest even; BOOLEAN is
    anything but zero.
    """
    if element_type is data_type.FP4_E2M1:
        return _pairs_to_values(_values_to_pairs(value))[: value.numel()].view(value.shape)
    limit = _FP8_MAX.get(element_type)
    if limit is not None:
        value = value.float().clamp(-limit, limit)
    elif element_type in (data_type.INT8, data_type.UINT8, data_type.INT32) and value.dtype is not torch.bool:
        info = torch.iinfo(torch_type(element_type, where))
        # float32 cannot hold the largest int32: clamp in float64 so that saturation does not wrap round.
        value = value.double().round() if value.dtype.is_floating_point else value.long()
        value = value.clamp(info.min, info.max)
    elif element_type is data_type.INT64 and value.dtype.is_floating_point:
        value = value.round()
    return value.to(torch_type(element_type, where))


def memory(data: Any, nbytes: int, where: str) -> Any:
    """A uint8 view of the ``nbytes`` bytes at a torch tensor's or DLPack object's first element."""
    if not _is_torch_tensor(data):
        data = torch.from_dlpack(readable(data))
    start = data.storage_offset() * data.element_size()
    available = data.untyped_storage().nbytes() - start
    if available < nbytes:
        raise make_error(
            ValueError,
            where,
            "memory",
            f"{available} bytes",
            f"the {nbytes} bytes that the graph's tensor spans",
            "pass a tensor of the graph tensor's shape, strides and type",
        )
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage(), start, (nbytes,), (1,))


def view(raw: Any, element_type: data_type, dims: Sequence[int], strides: Sequence[int], where: str) -> Any:
    """Bytes as a strided tensor of a type."""
    dtype = torch_type(element_type, where)
    size = element_bits(element_type) // 8
    usable = raw[: raw.numel() // size * size]
    if raw.data_ptr() % size:
        raise make_error(
            ValueError,
            where,
            "memory",
            f"address {raw.data_ptr():#x}",
            f"a multiple of {size} bytes for {element_type.name}",
            "pass an aligned tensor",
        )
    return usable.view(dtype).as_strided(tuple(dims), tuple(strides))


def elements(marks: Any, start: int, tensor: Tensor) -> Any:
    """The entries, one for each byte of memory, that the elements of a graph tensor at a byte take."""
    bits = element_bits(tensor.data_type)
    if tensor.reordering_type is not tensor_reordering.NONE or bits < 8:
        return marks[start : start + span_bytes(tensor)]
    steps = [step * bits // 8 for step in tensor.stride]
    return marks.as_strided([*tensor.dim, bits // 8], [*steps, 1], start)


def read(raw: Any, tensor: Tensor, where: str) -> Any:
    """The values of a graph tensor in the bytes of its memory."""
    if tensor.reordering_type is not tensor_reordering.NONE:
        return raw[_offsets(tensor, raw.device, where)].view(torch_type(tensor.data_type, where))
    if tensor.data_type is data_type.FP4_E2M1:
        return _pairs_to_values(raw).as_strided(tensor.dim, tensor.stride)
    return view(raw, tensor.data_type, tensor.dim, tensor.stride, where)


def write(raw: Any, tensor: Tensor, value: Any, where: str) -> None:
    """Stores values, which have been rounded to the type of a graph tensor, in the bytes of its memory."""
    if tensor.reordering_type is not tensor_reordering.NONE:
        raw[_offsets(tensor, raw.device, where)] = value.contiguous().view(torch.uint8)
    elif tensor.data_type is data_type.FP4_E2M1:
        values = _pairs_to_values(raw)  # bytes between the elements stay
        values.as_strided(tensor.dim, tensor.stride).copy_(value)
        raw.copy_(_values_to_pairs(values))
    else:
        view(raw, tensor.data_type, tensor.dim, tensor.stride, where).copy_(value)


def _pairs_to_values(raw: Any) -> Any:
    """FP4_E2M1 bytes, two elements each, the first in the low bits, as two float32 values a byte."""
    return unpack_float4(raw.view(1, -1, 1)).flatten()


def _values_to_pairs(values: Any) -> Any:
    """Values rounded to FP4_E2M1, as bytes; an odd count is padded with zero."""
    flat = values.float().flatten()
    return pack_float4(torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(1, -1, 1)).view(torch.uint8).flatten()


def _offsets(tensor: Tensor, device: Any, where: str) -> Any:
    """Where each element of a tensor in the layout F8_128x4 lies, in bytes, in the shape of the tensor.

    Tiles of 128 rows by 4 columns (the faster of the last two dimensions) take 512 bytes each and follow one another
    along the columns. The last ones are padded (cuBLAS documentation, "1D Block Scaling Factors Layout").
    """
    if tensor.reordering_type is not tensor_reordering.F8_128x4 or element_bits(tensor.data_type) != 8:
        raise make_error(
            NotImplementedError,
            where,
            "reordering_type",
            f"{tensor.reordering_type.name} of {tensor.data_type.name}",
            "NONE, or F8_128x4 of an 8-bit type, on the reference executor",
            "run this graph on a GPU",
        )
    column, rows, columns, _ = tiles(tensor)
    last = len(tensor.dim) - 1
    position = [
        torch.arange(extent, dtype=torch.int64, device=device).view([-1 if at == axis else 1 for at in range(last + 1)])
        for axis, extent in enumerate(tensor.dim)
    ]
    c, r = position[column], position[2 * last - 1 - column]
    offset = ((r // 128) * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4
    step = rows * columns
    for axis in sorted(range(last - 1), key=lambda axis: tensor.stride[axis]):
        offset = offset + position[axis] * step
        step *= tensor.dim[axis]
    return offset.expand(tensor.dim)


def pack_bits(mask: Any) -> Any:
    """A BOOLEAN tensor ``[N, C, ...]`` as the channels-last bit mask that cuDNN's fusion engines write.

    Eight channels share a byte, the lowest channel in the lowest bit: ``[N, C / 8, ...]`` uint8.
    """
    groups = mask.to(torch.uint8).unflatten(1, (-1, 8))
    weights = (1 << torch.arange(8, dtype=torch.int64, device=mask.device)).view(1, 1, 8, *[1] * (mask.dim() - 2))
    return (groups * weights).sum(2).to(torch.uint8)


def unpack_bits(packed: Any) -> Any:
    """The inverse of ``pack_bits``."""
    shifts = torch.arange(8, dtype=torch.int64, device=packed.device).view(1, 1, 8, *[1] * (packed.dim() - 2))
    return ((packed.unsqueeze(2) >> shifts) & 1).flatten(1, 2).bool()
