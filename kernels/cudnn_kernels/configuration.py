"""What GEMM kernels are asked for, and what they are compiled for, on any architecture. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GemmProblem:
    """D = epilogue(A B^T) for A (m, k, l) and B (n, k, l).

    Types by PyTorch's names; majors by the dimension of stride 1, ``m``, ``n`` or ``k``. ``n`` and ``k`` choose among
    configurations that all compute every size.
    """

    a: str
    b: str
    epilogue: tuple[Any, ...]
    schedule: Any
    n: int
    k: int
    a_major: str = "k"
    b_major: str = "k"


@dataclass(frozen=True)
class GemmConfiguration:
    """``tile`` is (m, n, k) of a CTA, ``cluster`` (m, n) in CTAs.

    With ``pingpong`` each of two warpgroups has a tile of its own and one works on its epilogue while the other
    multiplies; else both share one. ``promote`` k tiles' sum leaves the tensor cores for registers, 0: only the whole. ``part`` accumulator columns pass through the epilogue at a time, and ``staged``
    buffers hold them.
    """

    a: str
    b: str
    epilogue: tuple[Any, ...]
    schedule: Any
    a_major: str = "k"
    b_major: str = "k"
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    promote: int = 0
    part: int = 64
    staged: int = 1
