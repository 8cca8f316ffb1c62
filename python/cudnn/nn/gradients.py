"""Clipping of gradients that are spread over several device meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from cudnn.errors import checked_number, make_error


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clips the norm of gradients, like ``torch.nn.utils.clip_grad_norm_``, for DTensors over different meshes.

    A model with expert parallelism and FSDP2 has such gradients: those of experts are sharded over other dimensions
    than the others. The norm is that of all gradients as one vector, the same on every rank. A plain tensor, such as
    the weight of a router that every rank has, counts once; its gradient has to be the same on all ranks.

    Args:
        parameters: The parameters, all ranks' in the same order.
        max_norm: The norm to clip to, 0 or more; ``math.inf`` clips nothing.
        norm_type: The p of the p-norm, also ``math.inf``.
        error_if_nonfinite: Raises an error if the norm is NaN or infinite.
        foreach: As in PyTorch.

    Returns:
        The norm before clipping, a plain tensor.

    Raises:
        ValueError, TypeError: ``max_norm`` is below 0, which would turn gradients round, NaN, or no number.
        RuntimeError: the norm is not finite, with ``error_if_nonfinite``.
    """
    max_norm = checked_number("clip_grad_norm_", "max_norm", max_norm, limit=True)
    if max_norm < 0:
        raise make_error(ValueError, "clip_grad_norm_", "max_norm", max_norm, "0 or more", "pass math.inf for no limit")
    groups: dict[Any, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            groups.setdefault((mesh, gradient.device), []).append(parameter)
    norms = []
    for members in groups.values():
        norm = get_total_norm([x.grad for x in members if x.grad is not None], norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not norms:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), norm_type)
    if error_if_nonfinite and not math.isfinite(float(total)):
        message = f"the norm of order {norm_type} of the gradients is {float(total)}, so it cannot clip them"
        raise RuntimeError(f"clip_grad_norm_: {message}")
    for members in groups.values():
        clip_grads_with_norm_(members, max_norm, total.to(members[0].device), foreach)
    return total
