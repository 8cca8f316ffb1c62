"""Arrays of addresses: one tensor for each expert, wherever it lies."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

from cudnn.api_base import TensorDesc, check_tensor
from cudnn.errors import refused
from cudnn.gemm.formats import FLOAT4, SUM_VECTOR, name_of
from cudnn.gemm.scales import ATOM_BLOCKS, ATOM_ROWS, scale_shape, sum_scale_shape
from cudnn.lazy import torch


def described(name: str, count: int, device: Any) -> TensorDesc:
    """The description of so many addresses."""
    return TensorDesc(torch.int64, (count,), (1,), (0,), device, name=name)


def check(where: str, name: str, addresses: Any, count: int | None, device: Any) -> None:
    """Raises unless it is an array of so many addresses, or any number, on a device.

    Raises:
        TypeError: no tensor.
        ValueError: None, or another type, shape, stride or device.
    """
    if addresses is None:
        raise refused(ValueError, where, name, "None", "an array of addresses, int64, one for each expert")
    check_tensor(where, name, addresses)
    found, expected = addresses.numel(), f"expected {count}, one for each expert"
    for wrong, what, got, allowed in (
        (addresses.dtype != torch.int64, "must be int64", addresses.dtype, "torch.int64"),
        (addresses.ndim != 1, "must be 1-D", f"{addresses.ndim} dimensions", "1"),
        (count not in (None, found), "length mismatch", found, expected),
        (not addresses.is_contiguous(), "must be contiguous", f"the stride {addresses.stride()}", "1"),
        (addresses.device != device, f"must be on {device}", addresses.device, f"{device}, as the operands"),
    ):
        if wrong:
            raise refused(ValueError, where, f"{name} {what}", got, allowed)


def matrices(addresses: Any, rows: int, columns: int, dtype: Any, column_major: bool = False) -> list[Any]:
    """The dense matrices (rows, columns, 1) at addresses of the CPU's memory; sizes in elements."""
    packed = 2 if name_of(dtype) == FLOAT4 else 1
    shape = (columns, rows) if column_major else (rows, columns // packed)
    found = [_at(address, shape, dtype) for address in addresses.tolist()]
    return [(x.T if column_major else x).unsqueeze(-1) for x in found]


def scales(addresses: Any, rows: int, k: int, vector: int, dtype: Any) -> list[Any]:
    """The scale factors of matrices (rows, k), each in atoms of its own; those of sums as :func:`matrices`."""
    if vector == SUM_VECTOR:
        shape = sum_scale_shape(rows, k, 1, SUM_VECTOR)
        return matrices(addresses, *shape[:2], dtype)
    _, _, atoms, _, groups, _ = scale_shape(rows, k, 1, vector)
    shape = (1, atoms, groups, ATOM_ROWS // ATOM_BLOCKS, ATOM_BLOCKS, ATOM_BLOCKS)
    return [_at(address, shape, dtype).permute(3, 4, 1, 5, 2, 0) for address in addresses.tolist()]


def _at(address: int, shape: Sequence[int], dtype: Any) -> Any:
    memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(*shape)
