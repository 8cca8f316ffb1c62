"""What GEMM kernels are asked for, and what they are compiled for, on any architecture. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BITS: Mapping[str, int] = {
    "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "float32": 32, "float4_e2m1fn_x2": 4,
}  # fmt: skip
SHARED_MEMORY = 227 * 1024  # bytes that a CTA may use, on Hopper and Blackwell alike
K_BYTES = 128  # of a k tile: one row of the widest swizzle


@dataclass(frozen=True)
class GemmProblem:
    """D = epilogue(A B^T) for A (m, k, l) and B (n, k, l).

    Types by PyTorch's names; majors by the dimension of stride 1, ``m``, ``n`` or ``k``. ``n`` and ``k`` choose among
    configurations that all compute every size. ``scale`` is the type of the factors that ``vector`` elements along k
    share, of A and of B, where the tensor cores take them. ``tile`` and ``cluster``, (m, n), are the caller's wishes.
    """

    a: str
    b: str
    epilogue: tuple[Any, ...]
    schedule: Any
    n: int
    k: int
    a_major: str = "k"
    b_major: str = "k"
    scale: str = ""
    vector: int = 0
    tile: tuple[int, int] | None = None
    cluster: tuple[int, int] | None = None

    def configured(self, tile: tuple[int, int], cluster: tuple[int, int], **chosen: Any) -> GemmConfiguration:
        """What is asked for, with a tile (m, n), a cluster and what else is ``chosen``."""
        shape = (*tile, K_BYTES * 8 // BITS[self.a])
        same = (self.a, self.b, self.epilogue, self.schedule, self.a_major, self.b_major, self.scale, self.vector)
        return GemmConfiguration(*same, tile=shape, cluster=cluster, **chosen)


@dataclass(frozen=True)
class GemmConfiguration:
    """``tile`` is (m, n, k) of a CTA, or of a pair on Blackwell, ``cluster`` (m, n) in CTAs.

    With ``pingpong`` each of two warpgroups has a tile of its own and one works on its epilogue while the other
    multiplies; else both share one. Every ``promote`` k tiles, their sum is added to float32 registers; 0: the tensor
    cores add up all of it. ``part`` accumulator columns pass through the epilogue at a time; ``staged`` buffers hold
    them. ``dynamic``: whoever is done takes the next tile.
    """

    a: str
    b: str
    epilogue: tuple[Any, ...]
    schedule: Any
    a_major: str = "k"
    b_major: str = "k"
    scale: str = ""
    vector: int = 0
    tile: tuple[int, int, int] = (128, 256, 64)
    cluster: tuple[int, int] = (2, 1)
    pingpong: bool = False
    promote: int = 0
    part: int = 64
    staged: int = 1
    dynamic: bool = False


@dataclass(frozen=True)
class OperandConfiguration:
    """What Hopper's tensor cores need done to an operand (mn, k, l) before they multiply.

    With ``scale_dtype``: every value times the scale of its ``vector`` neighbours along k, to bfloat16, ``major`` kept,
    ``k`` or ``mn``. Without: the same values, MN-major to K-major. ``float4_e2m1fn_x2`` has two values to a byte along
    k. The grid has at most ``resident`` CTAs for each multiprocessor, which share the tiles.

    Raises:
        ValueError: a combination that no GEMM takes, such as MN-major fp4.
    """

    dtype: str
    major: str = "k"
    scale_dtype: str | None = None
    vector: int = 0
    resident: int = 1 << 10

    def __post_init__(self) -> None:
        if (self.dtype, self.major, self.scale_dtype, self.vector) not in OPERANDS:
            raise ValueError(f"{self}: got neither a block-scaled format nor an MN-major operand of 1, 2 or 4 bytes")

    @property
    def to(self) -> str:
        """The result's type."""
        return "bfloat16" if self.scale_dtype else self.dtype

    @property
    def to_major(self) -> str:
        """The result's dimension of stride 1."""
        return self.major if self.scale_dtype else "k"


@dataclass(frozen=True)
class PreparedGemmConfiguration:
    """A GEMM some of whose operands are prepared first, in the same call."""

    gemm: GemmConfiguration
    a: OperandConfiguration | None
    b: OperandConfiguration | None


OPERANDS = frozenset(
    [
        *((fp8, major, "float8_e8m0fnu", 32) for fp8 in ("float8_e4m3fn", "float8_e5m2") for major in ("k", "mn")),
        ("float4_e2m1fn_x2", "k", "float8_e8m0fnu", 32),
        ("float4_e2m1fn_x2", "k", "float8_e8m0fnu", 16),
        ("float4_e2m1fn_x2", "k", "float8_e4m3fn", 16),
        *((t, "mn", None, 0) for t in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")),
    ]
)
"""Every (dtype, major, scale_dtype, vector) of an :class:`OperandConfiguration`."""
