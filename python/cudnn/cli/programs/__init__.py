"""The fused APIs that ``cudnn emulate`` and ``cudnn demo`` run: each makes its tensors, is called and is judged.

A fused API joins with a module of its name here that holds ``PROGRAM``, and its name in ``PROGRAMS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnn.lazy import torch

PROGRAMS = ("gemm_amax", "gemm_dsrelu", "gemm_srelu", "gemm_swiglu", "rmsnorm_rht_amax")


@dataclass(frozen=True)
class Comparison:
    """A result beside its reference, at the element that comes closest to what is allowed, or exceeds it most."""

    name: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True)
class Problem:
    """Random tensors of one shape: ``call()`` runs the API on them, ``compare`` takes what it returned."""

    call: Callable[[], Any]
    compare: Callable[[Any], list[Comparison]]


@dataclass(frozen=True)
class Program:
    """A fused API. ``make(shape, device)`` draws the tensors; ``shape``, the default, is small enough to emulate.

    ``architectures`` are those that it has kernels for.
    """

    title: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...], str], Problem]
    architectures: tuple[str, ...] = ("sm_90a", "sm_100a")


def find(name: str) -> Program:
    """The program of a name in ``PROGRAMS``."""
    return importlib.import_module(f"cudnn.cli.programs.{name}").PROGRAM


def compare(name: str, found: Any, expected: Any, relative: float, absolute: float = 0.0) -> Comparison:
    """Judges each element: an error of ``relative * |expected| + absolute`` is allowed.

    ``expected`` has the shape of ``found`` and a type with room for its errors.
    """
    allowed = (relative * expected.abs() + absolute).flatten()
    error = (found.to(expected.dtype) - expected).abs().flatten()
    share = (error / allowed.clamp(min=torch.finfo(error.dtype).tiny)).nan_to_num(nan=float("inf"))
    worst = int(share.argmax())
    return Comparison(name, float(error[worst]), float(allowed[worst]))
