"""Random inputs of the fused APIs, and how their results are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cudnn.fused.layouts import TensorSpec
from cudnn.lazy import torch


@dataclass(frozen=True)
class Comparison:
    """A result compared with its reference, at the element with the largest error relative to the tolerance."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


def random_input(spec: TensorSpec, shape: Sequence[int], device: str, generated_on: str = "cpu") -> Any:
    """Random float32 values, or one value, for an input; generated on the CPU, they are the same for every device."""
    if isinstance(spec.init, float):
        values = torch.full(tuple(shape), spec.init, dtype=torch.float32, device=generated_on)
    elif spec.init == "normal":
        values = torch.randn(*shape, dtype=torch.float32, device=generated_on)
    else:
        values = torch.rand(*shape, dtype=torch.float32, device=generated_on) + 0.5
    return values.to(device)


def compare(name: str, actual: Any, expected: Any, relative: float, absolute: float = 0.0) -> Comparison:
    """Judges each element: an error of ``relative * |expected| + absolute`` is allowed.

    ``expected`` has the shape of ``actual`` and a type with room for its errors.
    """
    allowed = (relative * expected.abs() + absolute).flatten()
    error = (actual.to(expected.dtype) - expected).abs().flatten()
    ratio = (error / allowed.clamp(min=torch.finfo(error.dtype).tiny)).nan_to_num(nan=float("inf"))
    worst = int(ratio.argmax())
    return Comparison(name, float(error[worst]), float(allowed[worst]))
