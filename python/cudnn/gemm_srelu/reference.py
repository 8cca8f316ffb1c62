"""The squared ReLU and its backward pass in PyTorch, in float32, on any device."""

from __future__ import annotations

from typing import Any


def squared_relu(x: Any, prob: Any) -> Any:
    """relu(x)^2 * prob, x (m, n, l), prob (m, 1, l)."""
    return x.relu().square() * prob


def squared_relu_backward(x: Any, c: Any, prob: Any) -> tuple[Any, Any]:
    """2 relu(x) c prob, and the sums over n of relu(x)^2 c: (m, n, l) and (m, 1, l)."""
    positive = x.relu()
    return 2 * positive * c * prob, (positive.square() * c).sum(1, keepdim=True)
