"""Cases that ``cudnn emulate`` and ``cudnn demo`` run: random tensors, a call of a fused API, a check of its results.

They derive from the APIs' declarations.
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
    """A call on random tensors of one shape: ``call()`` runs the API, ``compare`` checks what it returned."""

    call: Callable[[], Any]
    compare: Callable[[Any], list[Comparison]]


@dataclass(frozen=True)
class Program:
    """A fused API. ``make(shape, device)`` creates random tensors; the default ``shape`` is small enough to emulate.

    ``architectures`` are those for which it has kernels.
    """

    title: str
    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[tuple[int, ...], str], Problem]
    architectures: tuple[str, ...] = ("sm_90a", "sm_100a")


def find(name: str) -> Program:
    """Returns the program with a name in ``PROGRAMS``."""
    from cudnn.demo_cases import dense, grouped, non_gemm
    from cudnn.fused.dense import DenseGemm
    from cudnn.fused.grouped import ExpertsGemm

    api: Any = registry.find(name)
    programs = {DenseGemm: dense.program, ExpertsGemm: grouped.program}
    make = next((make for base, make in programs.items() if issubclass(api, base)), non_gemm.program)
    return make(api)
