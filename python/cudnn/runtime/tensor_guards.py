"""Guards of warm calls: whether tensors have the metadata of earlier ones, and the current device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from cudnn.lazy import torch


def guard(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A function that compares tensors with the dtypes, shapes, strides and devices of these, which it does not keep.

    It is ``TensorGuards`` of PyTorch, which Dynamo uses. That is no public interface, so another PyTorch may not have
    it. It also compares ``requires_grad`` and the Python class, and rejects duplicates; then tensors are compared here,
    one by one.
    """
    shapes, strides = [[*array.shape] for array in arrays], [[*array.stride()] for array in arrays]
    with contextlib.suppress(AttributeError):
        guards = torch._C._dynamo.guards.TensorGuards
        matches = guards(*arrays, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        if matches(*arrays):
            return matches
    expected = [_described(array) for array in arrays]
    return lambda *tensors: expected == [_described(array) for array in tensors]


def _described(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.stride(), array.device, array.is_neg()


def dynamic_shape_guard(arrays: Sequence[Any]) -> Callable[..., bool]:
    """A function that compares tensors with the dtypes and devices of these, and rejects negative views.

    One call for all tensors. False may mean no more than that they differ in their number of dimensions, in
    ``requires_grad`` or their Python class, that one comes twice, or that this PyTorch cannot tell.
    """
    free = [[None] * array.ndim for array in arrays]
    with contextlib.suppress(AttributeError):
        return torch._C._dynamo.guards.TensorGuards(*arrays, dynamic_dims_sizes=free, dynamic_dims_strides=free).check
    return lambda *_: False


def current_device() -> Callable[[], int] | None:
    """A function that returns the current device, to which stream 0 belongs; None with fewer than two devices."""
    return torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None
