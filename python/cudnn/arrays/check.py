"""What ``execute`` accepts as the memory of a graph tensor: arrays that hold its elements where the graph looks.

Accepted are its type, or bytes for types that PyTorch has no arithmetic for; and its shape and strides, or another view
of the same memory: without extents of 1, with dimensions in another order or merged, and the whole of an allocation of
which the graph's strides leave parts out. Refused are an array of the same shape with other strides, and memory of
another size.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from cudnn.arrays.dlpack import describe
from cudnn.arrays.layout import span
from cudnn.datatypes import (
    _is_torch_tensor,  # pyright: ignore[reportPrivateUsage]
    _torch_to_cudnn_data_type,  # pyright: ignore[reportPrivateUsage]
    dlpack_to_data_type,
    element_bits,
)
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import make_error

if TYPE_CHECKING:
    from cudnn.pygraph.tensor import Tensor

_BYTES = (data_type.UINT8, data_type.INT8)
# Types that programs keep in memory as bytes, also where PyTorch has a type for them.
_KEPT_AS_BYTES = frozenset(
    {
        data_type.BOOLEAN,
        data_type.FP8_E4M3,
        data_type.FP8_E5M2,
        data_type.FP8_E8M0,
        data_type.FP8_E5M3,
        data_type.FP4_E2M1,
        data_type.INT4,
        data_type.INT8x4,
        data_type.UINT8x4,
        data_type.INT8x32,
    }
)
# Types whose arrays have a different shape: BOOLEAN takes a byte or a bit per element, as the engine stores it.
_LOOSE = (data_type.BOOLEAN, data_type.INT8x4, data_type.UINT8x4, data_type.INT8x32)


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first to the last element of a graph tensor, both included."""
    if tensor.reordering_type is tensor_reordering.F8_128x4:
        _, rows, columns, batch = tiles(tensor)
        return rows * columns * batch
    return ceil(span(tensor.dim, tensor.stride) * element_bits(tensor.data_type) / 8)


def tiles(tensor: Tensor) -> tuple[int, int, int, int]:
    """Of a tensor in the layout F8_128x4: the dimension that runs inside tiles' rows, padded rows, columns, batch."""
    last = len(tensor.dim) - 1
    column = last if tensor.stride[last] <= tensor.stride[last - 1] else last - 1
    row = 2 * last - 1 - column
    padded = -(-tensor.dim[row] // 128) * 128, -(-tensor.dim[column] // 4) * 4
    return column, *padded, prod(tensor.dim[:-2])


def check_array(tensor: Tensor, array: Any, label: str, pool: bool = False) -> None:
    """Refuses an array that contradicts what the graph says of a tensor.

    Args:
        array: A ``torch.Tensor`` or an object with ``__dlpack__``.
        label: What messages call the tensor.
        pool: The array may be longer than the shape says, as pages and overridden tensors are.
    """
    if _is_torch_tensor(array):
        shape, steps = array.shape, array.stride()
        dtype, name, size = _torch_to_cudnn_data_type(array.dtype), str(array.dtype), array.itemsize
    else:
        shape, steps, code, bits, _ = describe(array)
        dtype = dlpack_to_data_type(code, bits)
        name, size = dtype.name if dtype else f"DLPack type {code} of {bits} bits", ceil(bits / 8)
    as_bytes = dtype in _BYTES and dtype is not tensor.data_type
    raw = as_bytes and dtype is data_type.UINT8 and len(shape) == 1 and steps[0] == 1
    if dtype is not tensor.data_type and not raw and not (as_bytes and tensor.data_type in _KEPT_AS_BYTES):
        raise make_error(
            ValueError,
            "execute",
            label,
            f"{name} of shape {[*shape]}",
            f"{tensor.data_type.name}, as the graph says",
            "convert the array, or describe the tensor with its type",
        )
    if tensor.ragged_offset is not None:
        return  # its offsets locate the rows, and the array holds all rows without padding
    if raw or tensor.data_type in _LOOSE or tensor.reordering_type is not tensor_reordering.NONE:
        needed = ceil(prod(tensor.dim) / 8) if tensor.data_type is data_type.BOOLEAN else span_bytes(tensor)
        fits, allowed = prod(shape) * size >= needed, f"{needed} bytes or more"
    else:
        if element_bits(tensor.data_type) == 4:
            shape, steps = _in_halves(shape, steps)
        fits, allowed = _same_memory(tensor, shape, steps, pool), "the same elements at the same places"
    if not fits:
        raise make_error(
            ValueError,
            "execute",
            label,
            f"shape {[*shape]} with strides {[*steps]}",
            f"dim={tensor.dim} with stride={tensor.stride}, or another view of that memory: {allowed}",
            "pass an array of that layout, or build a graph for the one you have",
        )


def _in_halves(shape: Sequence[int], steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """Shape and strides of 4-bit elements, two of which make a byte along the dimension of stride 1."""
    packed = next((axis for axis in reversed(range(len(steps))) if steps[axis] == 1), None)
    if packed is None:
        return [*shape, 2], [*(2 * step for step in steps), 1]
    dims, strides = [*shape], [2 * step for step in steps]
    dims[packed], strides[packed] = 2 * dims[packed], 1
    return dims, strides


def _same_memory(tensor: Tensor, shape: Sequence[int], steps: Sequence[int], pool: bool) -> bool:
    """Whether an array holds the elements of a tensor where the tensor's strides look for them."""
    described = [*zip(tensor.dim, tensor.stride, strict=True)]
    ours = [pair for pair in described if pair[0] > 1]
    theirs = [pair for pair in zip(shape, steps, strict=True) if pair[0] > 1]
    if [extent for extent, _ in ours] == [extent for extent, _ in theirs]:
        return ours == theirs
    if sorted(extent for extent, _ in ours) == sorted(extent for extent, _ in theirs):
        return sorted(ours) == sorted(theirs)  # the same dimensions in another order
    merged = _merged(theirs)
    if _merged(ours) == merged:
        return True
    # An array without gaps that also holds the gaps between the tensor's elements.
    dense = not merged or (len(merged) == 1 and merged[0][1] == 1)
    capacity = max((extent * step for extent, step in described), default=1)
    return dense and span(tensor.dim, tensor.stride) <= prod(shape) and (pool or prod(shape) <= capacity)


def _merged(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Extents and strides, fastest first, with dimensions that follow each other in memory as one."""
    merged: list[tuple[int, int]] = []
    for extent, step in sorted(pairs, key=lambda pair: (pair[1], pair[0])):
        if merged and merged[-1][0] * merged[-1][1] == step:
            merged[-1] = merged[-1][0] * extent, merged[-1][1]
        else:
            merged.append((extent, step))
    return merged
