"""Pointer arrays (ptr-array grouped GEMM): the device pointer of each expert's tensor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from cudnn.api_base import TensorDesc, check_tensor
from cudnn.errors import make_error
from cudnn.gemm.formats import BLOCKWISE_SIZE, FLOAT4, name_of
from cudnn.gemm.scales import ATOM_BLOCKS, ATOM_ROWS, blockwise_scale_shape, scale_shape
from cudnn.lazy import torch


def described(name: str, count: int, device: Any) -> TensorDesc:
    """The description of a pointer array of ``count`` entries."""
    return TensorDesc(torch.int64, (count,), (1,), (0,), device, name=name)


def check(where: str, name: str, addresses: Any, count: int | None, device: Any) -> None:
    """Raises unless it is a pointer array of ``count`` entries (None: any number) on a device.

    Raises:
        TypeError: no tensor.
        ValueError: None, or another type, shape, stride or device.
    """
    if addresses is None:
        raise make_error(ValueError, where, name, "None", "an array of addresses, int64, one for each expert")
    check_tensor(where, name, addresses)
    length, expected = addresses.numel(), f"expected {count}, one for each expert"
    for wrong, what, got, allowed in (
        (addresses.dtype != torch.int64, "must be int64", addresses.dtype, "torch.int64"),
        (addresses.ndim != 1, "must be 1-D", f"{addresses.ndim} dimensions", "1"),
        (count not in (None, length), "length mismatch", length, expected),
        (not addresses.is_contiguous(), "must be contiguous", f"the stride {addresses.stride()}", "1"),
        (addresses.device != device, f"must be on {device}", addresses.device, f"{device}, as the operands"),
    ):
        if wrong:
            raise make_error(ValueError, where, f"{name} {what}", got, allowed)


def matrices(addresses: Any, rows: int, columns: int, dtype: Any, column_major: bool = False) -> list[Any]:
    """The dense matrices (rows, columns, 1) at pointers to CPU memory; sizes in elements."""
    packed = 2 if name_of(dtype) == FLOAT4 else 1
    shape = (columns, rows) if column_major else (rows, columns // packed)
    tensors = [_at(address, shape, dtype) for address in addresses.tolist()]
    return [(x.T if column_major else x).unsqueeze(-1) for x in tensors]


def joined(addresses: Any, shape: tuple[int, int], dim: int, dtype: Any, column_major: bool) -> list[Any]:
    """Matrices (rows, columns, 1) whose halves along ``dim`` are at separate pointers: first all first halves."""
    rows, columns = (size // 2 if each == dim else size for each, size in enumerate(shape))
    halves = matrices(addresses, rows, columns, dtype, column_major)
    pairs = zip(halves[: len(halves) // 2], halves[len(halves) // 2 :], strict=True)
    return [torch.cat(pair, dim) for pair in pairs]


def scales(addresses: Any, rows: int, k: int, vector: int, dtype: Any) -> list[Any]:
    """The scale factors of matrices (rows, k), one tensor of atoms each; blockwise scales as :func:`matrices`."""
    if vector == BLOCKWISE_SIZE:
        shape = blockwise_scale_shape(rows, k, 1, BLOCKWISE_SIZE)
        return matrices(addresses, *shape[:2], dtype)
    _, _, atoms, _, groups, _ = scale_shape(rows, k, 1, vector)
    shape = (1, atoms, groups, ATOM_ROWS // ATOM_BLOCKS, ATOM_BLOCKS, ATOM_BLOCKS)
    return [_at(address, shape, dtype).permute(3, 4, 1, 5, 2, 0) for address in addresses.tolist()]


def _at(address: int, shape: Sequence[int], dtype: Any) -> Any:
    memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
