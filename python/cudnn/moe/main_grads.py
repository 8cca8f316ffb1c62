"""The convention of Megatron-Core for weights whose gradients are accumulated into ``weight.main_grad``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cudnn.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def dummy_grad(weight: Tensor) -> Tensor | None:
    """What autograd gets for a weight whose gradient has been added to its ``main_grad``.

    None, so that ``weight.grad`` stays None; but if the weight has the attribute ``grad_added_to_main_grad``, which
    Megatron's DDP sets to False, it becomes True, and autograd gets a tensor that is not initialized. The hooks of
    DDP, which with ``overlap_grad_reduce`` need a gradient, then drop that tensor. Zeros if ``zero_out_wgrad`` is set:
    DDP then adds the tensor to ``main_grad``.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)


def dummy_grads(weights: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """:func:`dummy_grad` of each weight whose gradient is needed; None for the others."""
    return [dummy_grad(weight) if need else None for weight, need in zip(weights, needed, strict=True)]
