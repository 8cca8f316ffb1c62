"""What a fused GEMM says of its tensors: shapes and strides by the names of sizes, types, who may leave one out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import same_stride
from cudnn.gemm.formats import BLOCK_SCALED, FLOAT4, PLAIN, SCALES, name_of
from cudnn.gemm.scales import empty_scales, scale_shape, scale_stride
from cudnn.lazy import torch

Sizes = Mapping[str, int]
"""Sizes by name: ``m``, ``n``, ``k``, ``l``, ``columns`` of the result, ``vector`` elements that share a scale."""


class Layout(ABC):
    """Where the elements of a tensor lie."""

    rank: int
    alignment: int = 16  # of the first element, in bytes

    @abstractmethod
    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape, in elements."""

    @abstractmethod
    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        """The strides of dense tensors, in elements."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        """Whether elements of so many bits may lie so; those that are ``written`` lie apart from each other.

        No element lies at the stride of a dimension of size 1, so it may be any.
        """
        return any(same_stride(shape, stride, other) for other in self.strides(sizes))

    def allowed(self, sizes: Sizes, written: bool) -> tuple[str, str]:
        """What :meth:`accepts`, in words, and what to do for it."""
        return " or ".join(str(tuple(stride)) for stride in self.strides(sizes)), ""

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        """A tensor of this layout, not initialised."""
        return torch.empty_strided(self.shape(sizes), self.strides(sizes)[0], dtype=dtype, device=device)


@dataclass(frozen=True)
class Matrix(Layout):
    """(rows, columns, l) by the names of sizes; ``majors`` names the first two dimensions, "mk" say.

    One of the two has the stride 1; the copy engine wants other strides to be multiples of 16 bytes, no more.
    """

    rows: str
    columns: str
    majors: str
    rank = 3

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes[self.rows], sizes[self.columns], sizes["l"])

    def stride(self, sizes: Sizes, major: str) -> tuple[int, ...]:
        """The strides with ``major`` as the dimension of stride 1."""
        rows, columns, _ = self.shape(sizes)
        return (1, rows, rows * columns) if major == self.majors[0] else (columns, 1, rows * columns)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [self.stride(sizes, major) for major in reversed(self.majors)]

    def major(self, shape: Sequence[int], stride: Sequence[int]) -> str:
        """The dimension of stride 1; of two, the longer one, and the second one, where they are equally long."""
        two = zip(shape[:2], stride[:2], strict=True)
        first, second = (size if step == 1 or size == 1 else 0 for size, step in two)
        return self.majors[0] if first > second else self.majors[1]

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        if super().accepts(shape, stride, sizes, bits, written):
            return True
        inner = self.majors.index(self.major(shape, stride))
        if stride[inner] != 1 and shape[inner] != 1:
            return False
        others = sorted((stride[dim], shape[dim]) for dim in range(3) if dim != inner and shape[dim] > 1)
        if any(step * bits % (8 * self.alignment) for step, _ in others):
            return False
        reach = shape[inner]
        for step, size in others if written else ():
            if step < reach:
                return False
            reach += (size - 1) * step
        return True

    def allowed(self, sizes: Sizes, written: bool) -> tuple[str, str]:
        dense, _ = super().allowed(sizes, written)
        shape = self.shape(sizes)
        new = f"allocate it as torch.empty({shape[2]}, {shape[0]}, {shape[1]}, ...).permute(1, 2, 0)"
        copied = "pass tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)"
        return f"{dense}, or further apart by multiples of 16 bytes", new if written else copied

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        shape, stride = self.shape(sizes), self.stride(sizes, major)
        if name_of(dtype) == FLOAT4:  # two elements a byte, along the second dimension
            shape, stride = (shape[0], shape[1] // 2, shape[2]), tuple(s if s == 1 else s // 2 for s in stride)
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


@dataclass(frozen=True)
class BlockScales(Layout):
    """The scale factors of a matrix (rows, columns, l), in atoms of 128 x 4."""

    rows: str
    columns: str
    rank = 6

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return scale_shape(sizes[self.rows], sizes[self.columns], sizes["l"], sizes["vector"])

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [scale_stride(self.shape(sizes))]

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        return empty_scales(sizes[self.rows], sizes[self.columns], sizes["l"], sizes["vector"], dtype, device)


@dataclass(frozen=True)
class Column(Layout):
    """A value for every row: (rows, 1, l), one matrix after the other or contiguous."""

    rows: str
    rank = 3
    alignment = 4

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes[self.rows], 1, sizes["l"])

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        rows, _, batch = self.shape(sizes)
        return [(batch, batch, 1), (batch, 1, 1), (1, 1, rows), (1, rows, rows)]


@dataclass(frozen=True)
class One(Layout):
    """A single value: (1,). Wrappers allocate it with ``dimensions`` dimensions of size 1."""

    dimensions: int = 1
    rank = 1
    alignment = 4

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (1,)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [(1,)]

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        return torch.empty((1,) * self.dimensions, dtype=dtype, device=device)


@dataclass(frozen=True)
class Argument:
    """A tensor of a fused GEMM: ``sample_<name>`` of its constructor and ``<name>_tensor`` of its calls.

    ``types`` are PyTorch's names. Results are ``written``. A wrapper fills what it allocates with ``fill``, where that
    is given.
    """

    name: str
    layout: Layout
    types: tuple[str, ...]
    optional: bool = False
    fill: float | None = None
    written: bool = False


def operands(scales: tuple[str, ...] = SCALES) -> tuple[Argument, ...]:
    """A, B and their scale factors of the types ``scales``."""
    types = tuple(dict.fromkeys([*PLAIN, *BLOCK_SCALED]))
    return (
        Argument("a", Matrix("m", "k", "mk"), types),
        Argument("b", Matrix("n", "k", "nk"), types),
        Argument("sfa", BlockScales("m", "k"), scales, optional=True),
        Argument("sfb", BlockScales("n", "k"), scales, optional=True),
    )


def amax(dimensions: int, optional: bool = True) -> Argument:
    """The largest magnitude, raised from what it was before. Wrappers allocate it with so many dimensions of size 1."""
    return Argument("amax", One(dimensions), ("float32",), optional, fill=float("-inf"), written=True)


def quantizer(name: str, columns: str) -> tuple[Argument, ...]:
    """The scale factors of a result with so many columns, and the constant that they are chosen by."""
    return (
        Argument(name, BlockScales("m", columns), SCALES, optional=True, written=True),
        Argument("norm_const", One(), ("float32",), optional=True),
    )
