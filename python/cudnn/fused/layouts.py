"""How a fused API describes its tensors: shapes and strides by the names of sizes, types, who may leave one out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import same_stride, unpad
from cudnn.gemm.formats import FLOAT4, name_of
from cudnn.gemm.scales import empty_scales, scale_shape, scale_stride
from cudnn.lazy import torch

Sizes = Mapping[str, int]
"""Sizes by name, as an API's ``sizes_of`` gives them: ``m``, ``n``, ``k``, ``l`` and the like."""


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

    def fitted(self, tensor: Any) -> Any:
        """The tensor, or description, in the dimensions of this layout: without trailing ones of size 1."""
        return unpad(tensor, self.rank)

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

    def __str__(self) -> str:
        return f"({self.rows}, {self.columns}, l), {' or '.join(f'{major}-major' for major in reversed(self.majors))}"


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

    def __str__(self) -> str:
        return f"scale factors of ({self.rows}, {self.columns}, l), in atoms of 128 x 4"


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

    def __str__(self) -> str:
        return f"({self.rows}, 1, l), contiguous or with the strides (1, 1, {self.rows})"


@dataclass(frozen=True, init=False)
class Contiguous(Layout):
    """Row-major with these sizes: names, or numbers for what never changes."""

    dims: tuple[str | int, ...]
    alignment: int

    def __init__(self, *dims: str | int, alignment: int = 16) -> None:
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "alignment", alignment)

    @property
    def rank(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return len(self.dims)

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.dims)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        stride = [1]
        for size in reversed(self.shape(sizes)[1:]):
            stride.append(stride[-1] * size)
        return [tuple(reversed(stride))]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.dims))}{',' * (len(self.dims) == 1)})"


class Rows(Contiguous):
    """The same; dimensions before the last that one stride leads through count as one."""

    def fitted(self, tensor: Any) -> Any:
        tensor = unpad(tensor, self.rank)
        return tensor if tensor.ndim <= self.rank else tensor.view(-1, *tensor.shape[1 - self.rank :])


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a fused API: ``sample_<name>`` of its constructor and ``<name>_tensor`` of its calls.

    ``types`` are PyTorch's names; where there is a tensor ``same``, its type is that one's. A result is ``written``: a
    wrapper allocates it, in the shape of the tensor ``like`` or with ``padding`` more dimensions of size 1 where these
    are given, and fills it with ``fill``. It may lie in the memory of the input ``over``. Examples and benchmarks fill
    an input with ``draw``: a number, ``"normal"`` or ``"uniform"``.
    """

    name: str
    layout: Layout
    types: tuple[str, ...]
    optional: bool = False
    same: str = ""
    fill: float | None = None
    written: bool = False
    like: str = ""
    over: str = ""
    padding: int = 0
    draw: str | float = "normal"
    about: str = ""
