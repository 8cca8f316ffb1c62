"""The fused APIs that ``cudnn emulate`` and ``cudnn demo`` run: tensors are made, the API is called and is judged.

All of it derives from the APIs' declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnn.fused import registry
from cudnn.fused.examples import Comparison, compare

__all__ = ["PROGRAMS", "Comparison", "Problem", "Program", "compare", "find"]

PROGRAMS = tuple(registry.packages())
"""Names of the fused APIs."""


@dataclass(frozen=True)
class Problem:
    """Random tensors of one shape: ``call()`` runs the API on them, ``compare`` takes what it returned."""

    call: Callable[[], Any]
    compare: Callable[[Any], list[Comparison]]


@dataclass(frozen=True)
class Program:
    """A fused API. ``make(shape, device)`` samples the tensors; ``shape``, the default, is small enough to emulate.

    ``architectures`` are those that it has kernels for.
    """

    title: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...], str], Problem]
    architectures: tuple[str, ...] = ("sm_90a", "sm_100a")


def find(name: str) -> Program:
    """The program of a name in ``PROGRAMS``."""
    from cudnn.demo_cases import dense, generic, grouped
    from cudnn.fused.dense import DenseGemm
    from cudnn.fused.grouped import ExpertsGemm

    api: Any = registry.find(name)
    programs = {DenseGemm: dense.program, ExpertsGemm: grouped.program}
    return next((program for base, program in programs.items() if issubclass(api, base)), generic.program)(api)
