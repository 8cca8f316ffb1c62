"""Expert tensor parallelism: each rank of a group has a slice of every expert's intermediate size.

up is split by rows (column parallel), down by columns (row parallel). The ranks of the group have the same tokens, run
the same kernels on their slices, and add up the results:

    y = sum over ranks of combine(down[:, slice] act(up[slice] x))

Gradients of what all ranks of the group have, tokens, router weights and down's bias, are partial sums, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cudnn.runtime.registration import once_differentiable


class _SumGradients(torch.autograd.Function):
    """The identity; its gradients are summed over the group."""

    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(_all_reduced(gradient, ctx.group) for gradient in gradients)


class _Sum(torch.autograd.Function):
    """The sum over the group; its gradient is that of every rank's addend."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduced(tensor, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


def _all_reduced(tensor: Tensor | None, group: Any) -> Any:
    """The sum of a tensor over the group; None stays None, on all ranks alike."""
    if tensor is None:
        return None
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def sum_gradients(group: Any, *tensors: Tensor | None) -> list[Tensor | None]:
    """The same tensors, whose gradients are summed over the group; None stays None."""
    summed = iter(_SumGradients.apply(group, *(tensor for tensor in tensors if tensor is not None)))
    return [None if tensor is None else next(summed) for tensor in tensors]


def sum_over(group: Any, tensor: Tensor) -> Tensor:
    """The sum of a tensor over the group, differentiable: the loss is computed alike on every rank of the group."""
    return _Sum.apply(group, tensor)
