"""Alignment and contiguity of tensors, as kernels need them."""

from __future__ import annotations

import torch


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor as graphs take it, contiguous and at a multiple of 16 bytes: a part of another one may be neither."""
    return placed(x.contiguous())


def placed(x: torch.Tensor) -> torch.Tensor:
    """The tensor at a multiple of 16 bytes, with the same strides."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def is_readable(x: torch.Tensor) -> bool:
    """Whether cuDNN's kernels can read the tensor in place: 16 bytes at a time, along the last dimension."""
    steps = [step * x.element_size() for step, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True) if extent > 1]
    return x.stride(-1) == 1 and all(step and step % 16 == 0 for step in steps) and x.data_ptr() % 16 == 0
