"""What a GEMM kernel is compiled for, on any architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GemmConfiguration:
    """Types by PyTorch's names; majors by the dimension of stride 1, ``m``, ``n`` or ``k``.

    ``tile`` is (m, n, k) of a CTA, ``cluster`` (m, n) in CTAs. With ``pingpong`` each of two warpgroups has a tile of
    its own and one works on its epilogue while the other multiplies; else both share one. ``part`` accumulator columns
    pass through the epilogue at a time, and ``staged`` buffers hold them.
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
    part: int = 64
    staged: int = 1
    options: tuple[str, ...] = field(default=())
