"""The problem that a GEMM kernel is configured for: operands, epilogue, schedule. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cudnn_kernels.formats import FORMATS, bits


@dataclass(frozen=True)
class BlockScale:
    """Block scale factors of type ``dtype``, one for ``vector`` elements along k and ``rows`` rows."""

    dtype: str
    vector: int
    rows: int = 1

    @property
    def scales_accumulator(self) -> bool:
        """Whether they scale the accumulator of ``vector`` elements of k, in fp32 (DeepGEMM's 1D1D and 1D2D);
        else the tensor cores apply them (block-scaled MMA), or the operands are dequantized first.
        """
        return self.dtype == "float32"


@dataclass(frozen=True)
class Operand:
    """A or B, (mn, k, l): the type by PyTorch's name, the dimension of stride 1, ``k`` or ``mn``, scale factors.

    ``pointers``, for B: a ptr-array. Each matrix, and its scale factors, is packed at a separate address, a multiple of
    16 bytes. ``halves``: it has two matrices for each group, those of all first halves before those of the second ones:
    halves of the rows with ``concat_glu``, which are gate and up weights, else of k.

    ``index`` names the index tensor of a gathered operand (gather_A), int32: row i of the GEMM's A is row ``index[i]``
    of the tensor or, with varlen_k, index i along k is ``index[i]``. Out-of-range indices read as zero.

    ``ragged``, for K-major operands with varlen_k: the matrix of each group is contiguous, one group after the other.
    The tensor's shape is the total size.
    """

    dtype: str
    major: str = "k"
    scale: BlockScale | None = None
    pointers: bool = False
    halves: bool = False
    index: str = ""
    ragged: bool = False

    @property
    def bits(self) -> int:
        """The width of an element."""
        return bits(self.dtype)

    @property
    def packed(self) -> int:
        """Elements per byte."""
        return FORMATS[self.dtype].packed


@dataclass(frozen=True)
class GemmProblem:
    """D = epilogue(A B^T) for A (m, k, l) and B (n, k, l).

    ``m``, ``n`` and ``k`` are hints for the heuristics: every configuration computes all sizes. m is 0 if it is not
    known, as of dense projections inside other kernels. ``tile`` and ``cluster``, (m, n), are the caller's choice, if
    any. ``accurate``: 8-bit operands are accumulated as exactly as 16-bit ones. ``concat_glu``: B holds concatenated
    gate and up weights; blocks of 32 columns of the result alternate between the halves. B is K-major then, with a
    multiple of 64 rows or, if the MMA is block-scaled, of 256; a ptr-array has ``halves``. Halves of k are multiples of
    a k tile, 128 bytes. ``groups``: the number of groups (experts) that share the rows, or k.
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
    concat_glu: bool = False
    groups: int = 1
    m: int = 0
