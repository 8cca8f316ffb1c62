"""Helpers of the operators' ``torch.vmap`` rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def in_front(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """The tensor with the dimension that is mapped over first; one that is not mapped over is expanded."""
    return x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def one_by_one(
    operator: Callable[..., Any], size: int, dims: Sequence[Any], arguments: Sequence[Any]
) -> tuple[Any, Any]:
    """Calls the operator for each index of the mapped dimension: the stacked results, and their mapped dimensions.

    A list of tensors has a list of dimensions.
    """

    def at(index: int, x: Any, dim: Any) -> Any:
        if isinstance(dim, (list, tuple)):
            return [at(index, *pair) for pair in zip(x, dim, strict=True)]
        return x if dim is None else x.select(dim, index)

    results = [operator(*(at(index, *pair) for pair in zip(arguments, dims, strict=True))) for index in range(size)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = type(results[0])(map(torch.stack, zip(*results, strict=True)))
    return stacked, type(results[0])([0] * len(stacked))
