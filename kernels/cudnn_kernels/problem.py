"""What a GEMM is asked for, on any architecture: operands, epilogue, schedule. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudnn_kernels.formats import FORMATS, bits


@dataclass(frozen=True)
class BlockScale:
    """Scale factors of type ``dtype``: ``vector`` elements along k, and ``rows`` rows, share one."""

    dtype: str
    vector: int
    rows: int = 1

    @property
    def of_sums(self) -> bool:
        """Whether sums of ``vector`` products are multiplied by the factors, in float32; else the tensor cores multiply
        the operands by them, or the operands are dequantised.
        """
        return self.dtype == "float32"


@dataclass(frozen=True)
class Operand:
    """A or B, (mn, k, l): the type by PyTorch's name, the dimension of stride 1, ``k`` or ``mn``, scale factors.

    ``pointers``, of B alone: the matrices are not one tensor. Each lies at an address of its own, a multiple of 16
    bytes, without gaps between rows or columns; so do its scale factors.

    ``index`` names an int32 tensor: row i of the product's A is row ``index[i]`` of the tensor or, where experts have
    parts of k, k number i of the product is that one. A number that the tensor has not stands for zeros.

    ``ragged``, where experts have parts of k, K-major: each part is a matrix of its own, one after the other, without
    gaps. The tensor's shape says how large all are together.
    """

    dtype: str
    major: str = "k"
    scale: BlockScale | None = None
    pointers: bool = False
    index: str = ""
    ragged: bool = False

    @property
    def bits(self) -> int:
        """The width of an element."""
        return bits(self.dtype)

    @property
    def packed(self) -> int:
        """Elements that share a byte."""
        return FORMATS[self.dtype].packed


@dataclass(frozen=True)
class GemmProblem:
    """D = epilogue(A B^T) for A (m, k, l) and B (n, k, l).

    ``n`` and ``k`` choose among configurations that all compute every size. ``tile`` and ``cluster``, (m, n), are the
    caller's wishes. ``accurate``: products of 8 bits are added up as exactly as those of 16 bits. ``halves``: blocks of
    32 columns of the product come in turn from the two halves of B's rows, of which B, K-major then, has a multiple of
    64 or, with scale factors that Blackwell's tensor cores multiply by, of 256. ``groups``: the experts that share the
    rows, or k.
    """

    a: Operand
    b: Operand
    epilogue: tuple[Any, ...]
    schedule: Any
    n: int
    k: int
    tile: tuple[int, int] | None = None
    cluster: tuple[int, int] | None = None
    accurate: bool = False
    halves: bool = False
    groups: int = 1
