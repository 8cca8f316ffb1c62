"""What a warm call asks PyTorch: whether tensors are as before, and which device is current."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from cudnn.lazy import torch


def like(arrays: Sequence[Any]) -> Callable[..., bool]:
    """Whether as many PyTorch tensors have the types, shapes, strides and devices of these, which it does not keep.

    It is ``TensorGuards`` of PyTorch, by which compiled code tells its inputs; that is no public interface, so another
    PyTorch may have none. It also tells tensors apart that differ in ``requires_grad`` or their Python class, and takes
    no tensor twice; then they are compared here, one by one.
    """
    shapes, strides = [[*array.shape] for array in arrays], [[*array.stride()] for array in arrays]
    with contextlib.suppress(AttributeError):
        guards = torch._C._dynamo.guards.TensorGuards
        alike = guards(*arrays, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check
        if alike(*arrays):
            return alike
    known = [_described(array) for array in arrays]
    return lambda *given: known == [_described(array) for array in given]


def _described(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.stride(), array.device, array.is_neg()


def alike_but_for_sizes(arrays: Sequence[Any]) -> Callable[..., bool]:
    """Whether as many PyTorch tensors have the types and devices of these and, like them, are no negative views.

    One call for all tensors. False may mean no more than that they differ in their number of dimensions, in
    ``requires_grad`` or their Python class, that one comes twice, or that this PyTorch cannot tell.
    """
    free = [[None] * array.ndim for array in arrays]
    with contextlib.suppress(AttributeError):
        return torch._C._dynamo.guards.TensorGuards(*arrays, dynamic_dims_sizes=free, dynamic_dims_strides=free).check
    return lambda *_: False


def current_device() -> Callable[[], int] | None:
    """Tells the thread's current device, whose default stream stream 0 is; None where there are not several devices."""
    return torch._C._cuda_getDevice if torch.cuda.device_count() > 1 else None
