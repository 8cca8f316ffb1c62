"""SwiGLU in PyTorch, in float32, on any device."""

from __future__ import annotations

from typing import Any

from cudnn.lazy import torch

BLOCK = 32  # columns of one role


def swiglu(ab12: Any) -> Any:
    """(m, n, l) to (m, n / 2, l): of every 64 columns the first 32 are multiplied by silu of the others."""
    up, gate = ab12.unflatten(1, (-1, 2, BLOCK)).unbind(2)
    return (up * torch.nn.functional.silu(gate)).flatten(1, 2)


def swiglu_backward(ab12: Any, gradient: Any) -> Any:
    """The gradient (m, n, l) of ``ab12``, from that of :func:`swiglu`'s result."""
    up, gate = ab12.unflatten(1, (-1, 2, BLOCK)).unbind(2)
    gradient = gradient.unflatten(1, (-1, BLOCK))
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    both = [gradient * silu, gradient * up * (sigmoid + silu * (1 - sigmoid))]
    return torch.stack(both, dim=2).flatten(1, 3)
