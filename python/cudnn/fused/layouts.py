"""Tensor specifications of the fused APIs: shapes and strides by the names of sizes, dtypes, which are optional."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn.api_base import TensorDesc, ceil_div, is_non_overlapping, same_stride, unpad
from cudnn.errors import make_error
from cudnn.gemm.formats import BLOCKWISE_DTYPE, BLOCKWISE_SIZE, FLOAT4, name_of
from cudnn.gemm.scales import (
    ATOM_ROWS,
    blockwise_scale_shape,
    blockwise_scale_stride,
    empty_scales,
    scale_shape,
    scale_stride,
)
from cudnn.lazy import torch

Sizes = Mapping[str, int]
"""Sizes by name, as an API's ``sizes_of`` gives them: ``m``, ``n``, ``k``, ``l`` and the like."""


class Layout(ABC):
    """The shape and strides of a tensor, by names of sizes."""

    rank: int
    alignment: int = 16  # of the first element, in bytes

    @abstractmethod
    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """The shape, in elements."""

    @abstractmethod
    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        """The strides of dense tensors, in elements."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        """Whether the strides are supported for elements of ``bits`` bits; elements of a ``written`` tensor must not
        overlap.

        The stride of a dimension of size 1 may be any.
        """
        return any(same_stride(shape, stride, other) for other in self.strides(sizes))

    def allowed(self, sizes: Sizes, written: bool) -> tuple[str, str]:
        """What :meth:`accepts` allows, in words, and a hint."""
        return " or ".join(str(tuple(stride)) for stride in self.strides(sizes)), ""

    def is_canonical(self, tensor: Any) -> bool:
        """Whether a tensor, or description, has the canonical dimensions of this layout."""
        return tensor.ndim == self.rank

    def canonicalize(self, tensor: Any) -> Any:
        """The tensor, or description, in the canonical dimensions of this layout: without trailing ones of size 1."""
        return unpad(tensor, self.rank)

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        """A tensor of this layout, not initialized."""
        return torch.empty_strided(self.shape(sizes), self.strides(sizes)[0], dtype=dtype, device=device)


@dataclass(frozen=True)
class Matrix(Layout):
    """(rows, columns, l) by the names of sizes; ``majors`` names the first two dimensions, "mk" say.

    One of the two has the stride 1; TMA needs the other strides to be multiples of 16 bytes.
    """

    rows: str
    columns: str
    majors: str
    batch: str = "l"
    rank = 3

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes[self.rows], sizes[self.columns], sizes[self.batch])

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
        outer = [stride[dim] for dim in range(3) if dim != inner and shape[dim] > 1]
        if any(step * bits % (8 * self.alignment) for step in outer):
            return False
        return not written or is_non_overlapping(shape, stride)

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
        majors = " or ".join(f"{major}-major" for major in reversed(self.majors))
        return f"({self.rows}, {self.columns}, {self.batch}), {majors}"


class OneMatrix(Matrix):
    """One matrix, of the shape (rows, columns, 1) or (rows, columns)."""

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.unsqueeze(0).permute(1, 2, 0) if tensor.ndim == 2 else super().canonicalize(tensor)

    def __str__(self) -> str:
        return f"{super().__str__().replace(', l)', ', 1)')}, or ({self.rows}, {self.columns})"


class Transposed(OneMatrix):
    """One matrix that is passed as (columns, rows)."""

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.unsqueeze(0).permute(2, 1, 0) if tensor.ndim == 2 else super().canonicalize(tensor)

    def __str__(self) -> str:
        return f"({self.columns}, {self.rows})"


class TokenBlocks(OneMatrix):
    """An operand of weight gradients: one matrix, or a batch of blocks of 128 tokens, passed as (l, rows, 128)."""

    def is_canonical(self, tensor: Any) -> bool:
        return super().is_canonical(tensor) and not self.is_blocks(tensor)

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.permute(1, 2, 0) if self.is_blocks(tensor) else super().canonicalize(tensor)

    @staticmethod
    def is_blocks(tensor: Any) -> bool:
        """Whether it is (blocks, rows, 128)."""
        return tensor.ndim == 3 and tensor.shape[2] == BLOCKWISE_SIZE and strides_of(tensor)[2] == 1

    def __str__(self) -> str:
        return f"{super().__str__()}, or (blocks, {self.rows}, 128)"


class TransposedTokenBlocks(Transposed):
    """The same, but one matrix is passed as (columns, rows)."""

    def is_canonical(self, tensor: Any) -> bool:
        return super().is_canonical(tensor) and not TokenBlocks.is_blocks(tensor)

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.permute(1, 2, 0) if TokenBlocks.is_blocks(tensor) else super().canonicalize(tensor)

    def __str__(self) -> str:
        return f"{super().__str__()}, or (blocks, {self.rows}, 128)"


class Weights(Matrix):
    """A matrix for each expert: (rows, columns, experts), or contiguous as (experts, rows, columns)."""

    def is_canonical(self, tensor: Any) -> bool:
        return super().is_canonical(tensor) and not self.is_experts_first(tensor)

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.permute(1, 2, 0) if self.is_experts_first(tensor) else super().canonicalize(tensor)

    @staticmethod
    def is_experts_first(tensor: Any) -> bool:
        """Whether it is contiguous as (experts, rows, columns)."""
        stride = strides_of(tensor)
        return tensor.ndim == 3 and stride[2] == 1 and 1 not in stride[:2]

    def __str__(self) -> str:
        return f"{super().__str__()}, or ({self.batch}, {self.rows}, {self.columns})"


class Gradients(Weights):
    """A matrix for each expert, passed as (experts, rows, columns), whose rows or columns are contiguous."""

    @staticmethod
    def is_experts_first(tensor: Any) -> bool:
        """Whether it is (experts, rows, columns): matrices follow each other, so no stride exceeds the first."""
        stride = strides_of(tensor)
        return Weights.is_experts_first(tensor) or (tensor.ndim == 3 and stride[1] == 1 and stride[0] >= stride[2])

    def __str__(self) -> str:
        return f"({self.batch}, {self.rows}, {self.columns})"


@dataclass(frozen=True)
class BlockScales(Layout):
    """The scale factors of a matrix (rows, columns, l), in atoms of 128 x 4; ``vector`` elements share one.

    Blockwise scales (``vector`` = 128) are a float32 matrix; ``shared`` names the number of rows that share one.
    """

    rows: str
    columns: str
    batch: str = "l"
    vector: int | None = None  # None: the size of that name
    shared: str = ""
    rank = 6

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        rows, columns, batch = sizes[self.rows], sizes[self.columns], sizes[self.batch]
        vector = self.vector or sizes["vector"]
        if vector == BLOCKWISE_SIZE:
            return blockwise_scale_shape(rows, columns, batch, self._block(sizes))
        return scale_shape(rows, columns, batch, vector)

    def _block(self, sizes: Sizes) -> int:
        return sizes[self.shared] if self.shared else 1

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        shape = self.shape(sizes)
        if len(shape) == 3:
            return [blockwise_scale_stride(shape, self._block(sizes)), (shape[1], 1, shape[0] * shape[1])]
        return [scale_stride(shape)]

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        if len(shape) == 3 and not written:
            return min(stride) >= 0
        return super().accepts(shape, stride, sizes, bits, written)

    def is_canonical(self, tensor: Any) -> bool:
        return super().is_canonical(tensor) and not self._is_memory_order(tensor)

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.permute(3, 4, 1, 5, 2, 0) if self._is_memory_order(tensor) else super().canonicalize(tensor)

    @staticmethod
    def _is_memory_order(tensor: Any) -> bool:
        """Whether its dimensions are in memory order: (l, atoms, atoms, 32, 4, 4)."""
        return tensor.ndim == 6 and strides_of(tensor)[3:] == (16, 4, 1) and tuple(tensor.shape[3:]) == (32, 4, 4)

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        vector = self.vector or sizes["vector"]
        if vector == BLOCKWISE_SIZE:
            return super().allocate(sizes, major, dtype, device)
        return empty_scales(sizes[self.rows], sizes[self.columns], sizes[self.batch], vector, dtype, device)

    def __str__(self) -> str:
        return f"scale factors of ({self.rows}, {self.columns}, {self.batch}), in atoms of 128 x 4"


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


class TokenColumn(Column):
    """A value for every token: (rows, 1, 1) or (rows,)."""

    def canonicalize(self, tensor: Any) -> Any:
        return tensor.unsqueeze(-1).unsqueeze(-1) if tensor.ndim == 1 else super().canonicalize(tensor)

    def __str__(self) -> str:
        return f"({self.rows}, 1, 1) or ({self.rows},), contiguous"


@dataclass(frozen=True)
class Columns(Layout):
    """A row of values for each expert: (columns, experts), contiguous for an expert."""

    columns: str
    experts: str
    rank = 2
    alignment = 2

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        return (sizes[self.columns], sizes[self.experts])

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [(1, sizes[self.columns])]

    def __str__(self) -> str:
        return f"({self.columns}, {self.experts}) with the strides (1, {self.columns})"


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

    def allocate(self, sizes: Sizes, major: str, dtype: Any, device: Any) -> Any:
        *before, last = self.shape(sizes)
        elements = 2 if dtype == torch.float4_e2m1fn_x2 else 1  # of a byte; torch.uint8 may be bytes of anything
        return torch.empty(*before, last // elements, dtype=dtype, device=device)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.dims))}{',' * (len(self.dims) == 1)})"


class Vector(Contiguous):
    """One dimension; those of size 1 may stand before or behind it."""

    def canonicalize(self, tensor: Any) -> Any:
        while tensor.ndim > 1 and tensor.shape[0] == 1:
            tensor = tensor.squeeze(0)
        return super().canonicalize(tensor)


class FirstOf(Contiguous):
    """One value; of several the first."""

    def is_canonical(self, tensor: Any) -> bool:
        return tensor.ndim == 1 and tensor.shape[0] == 1

    def canonicalize(self, tensor: Any) -> Any:
        tensor = super().canonicalize(tensor)
        return tensor.as_strided((1,), (1,)) if tensor.ndim == 1 and tensor.shape[0] > 1 else tensor


class Each(Contiguous):
    """One value for each of this size, at any stride."""

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        return True

    def __str__(self) -> str:
        return f"{super().__str__()}, any stride"


@dataclass(frozen=True)
class FlatScales(Layout):
    """The scale factors of a varlen_k operand: those of one expert after the other, each in atoms of 128 x 4, for
    ``scales`` blocks of all experts.

    Blockwise scales (float32) are (rows, 1, l), passed as (l, rows): one for each row of each block of 128 tokens.
    """

    rows: str
    scales: str
    rank = 1

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        rows = sizes[self.rows]
        if sizes["vector"] == BLOCKWISE_SIZE:
            return (rows, 1, sizes["l"])
        return (ATOM_ROWS * ceil_div(rows, ATOM_ROWS) * sizes[self.scales],)

    def strides(self, sizes: Sizes) -> Sequence[tuple[int, ...]]:
        return [(1, 1, sizes[self.rows])] if sizes["vector"] == BLOCKWISE_SIZE else [(1,)]

    def accepts(self, shape: Sequence[int], stride: Sequence[int], sizes: Sizes, bits: int, written: bool) -> bool:
        return (len(shape) == 3 and not written) or super().accepts(shape, stride, sizes, bits, written)

    def is_canonical(self, tensor: Any) -> bool:
        return tensor.ndim == (3 if name_of(tensor.dtype) == BLOCKWISE_DTYPE else 1)

    def canonicalize(self, tensor: Any) -> Any:
        if name_of(tensor.dtype) == BLOCKWISE_DTYPE:
            return tensor.unsqueeze(0).permute(2, 0, 1) if tensor.ndim == 2 else tensor
        return tensor.view(-1)

    def __str__(self) -> str:
        return f"({self.rows} rounded up to 128, {self.scales}), contiguous, or (blocks, {self.rows})"


class Rows(Contiguous):
    """The same; dimensions before the last that one stride leads through count as one."""

    def canonicalize(self, tensor: Any) -> Any:
        tensor = unpad(tensor, self.rank)
        return tensor if tensor.ndim <= self.rank else tensor.view(-1, *tensor.shape[1 - self.rank :])


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a fused API: ``sample_<name>`` of its constructor and ``<name>_tensor`` of its calls.

    ``types`` are names of PyTorch dtypes; with ``same_dtype``, its dtype is that of the tensor of this name. A result
    is ``written``: a wrapper allocates it, in the shape of the tensor ``same_shape`` or with ``padding`` more
    dimensions of size 1, if set, and fills it with ``fill``. It may be the input ``may_alias``.
    Examples and benchmarks fill an input with ``init``: a number, ``"normal"`` or ``"uniform"``. One that is not
    ``sampled`` is an argument of calls only.
    """

    name: str
    layout: Layout
    types: tuple[str, ...]
    optional: bool = False
    same_dtype: str = ""
    fill: float | None = None
    written: bool = False
    same_shape: str = ""
    may_alias: str = ""
    padding: int = 0
    init: str | float = "normal"
    sampled: bool = True
    about: str = ""


def strides_of(tensor: Any) -> tuple[int, ...]:
    """The strides of a tensor or of a description."""
    return tensor.stride if isinstance(tensor, TensorDesc) else tensor.stride()


def in_atoms(where: str, name: str, scales: Any, shape: Sequence[int], vector: int) -> Any:
    """A view of a flat, contiguous buffer of scale factors of an operand (mn, k, l) in atoms.

    Raises:
        ValueError: it has another number of elements, or gaps.
    """
    _, _, rows, _, groups, batch = scale_shape(shape[0], shape[1], shape[2], vector)
    count = 512 * rows * groups * batch
    if scales.numel() != count or not scales.is_contiguous():
        got = f"{scales.numel()} elements with the strides {tuple(scales.stride())}"
        raise make_error(ValueError, where, f"{name} tensor", got, f"{count}, contiguous")
    return scales.view(batch, rows, groups, 32, 4, 4)


def is_unpacked_fp4(a: Any, sfa: Any, vector: int, otherwise: bool) -> bool:
    """Whether bytes (m, k, 1) count one FP4 element each, not two, by the number of scale factors. ``otherwise`` if
    both fit.

    Such elements lie where the strides say, two to a byte: in the first half of the memory.
    """
    if a.ndim != 3 or sfa.ndim != 6:
        return False
    groups = sfa.shape[2] if tuple(sfa.shape[3:]) == (32, 4, 4) else sfa.shape[4]
    packed, raw = (ceil_div(ceil_div(k, vector), 4) for k in (2 * a.shape[1], a.shape[1]))
    return groups == raw and (raw != packed or otherwise)


def fp4_pairs(x: Any) -> Any:
    """A view of bytes (rows, k, l), one per FP4 element, as packed FP4 pairs (rows, k / 2, l)."""
    rows, k, batch = x.shape
    pairs = x.as_strided((rows, k // 2, batch), (k // 2, 1, rows * k // 2), x.storage_offset())
    return pairs.view(torch.float4_e2m1fn_x2)
