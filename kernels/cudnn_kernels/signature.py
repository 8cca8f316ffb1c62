"""The arguments of a kernel as named slots: what the host binds, by name, and the kernel takes, by name.

A kernel's parts contribute the slots: operands, schedule, epilogue. A configuration's ``slots`` are in the order of the
compiled function, which is nobody else's business: the host takes a call's tensors by the slots' names, and
``__call__`` makes a mapping of what it gets. Plain data, without the CuTe DSL.

Sizes have names too. ``m``, ``n``, ``k``, ``l`` are those of the product, ``experts`` the groups of a grouped one;
``columns`` is what a gated activation leaves of ``n``. Slots that name the same size must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cudnn_kernels.formats import FORMATS

START = 256  # bytes: regions of the workspace begin at multiples

Sizes = Mapping[str, Any]
"""Sizes by name: integers on the host, values of the program where a kernel is traced."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a type by PyTorch's name. Kernels get packed types as bytes.

    ``shape`` in elements: numbers, and sizes by name. ``strides`` in elements: numbers, or None for any multiple of
    ``align`` bytes, to which the address is aligned too.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    strides: tuple[int | None, ...]
    align: int = 16

    @property
    def packed(self) -> int:
        """Elements of the dimension of stride 1 that share a byte."""
        return FORMATS[self.dtype].packed if self.dtype in FORMATS else 1


@dataclass(frozen=True)
class Scalar:
    """A number of the host's."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Stream:
    """The CUDA stream, as an integer."""

    name: str = "stream"


@dataclass(frozen=True)
class Region:
    """A part of the workspace, by name; ``bytes`` tells how many it takes."""

    name: str
    bytes: Callable[[Sizes], Any]


@dataclass(frozen=True)
class Workspace:
    """Memory of the call, a tensor of bytes that is divided into regions."""

    regions: tuple[Any, ...]
    name: str = "workspace"

    def places(self, sizes: Sizes) -> tuple[dict[str, Any], Any]:
        """The regions' first bytes by name, and the size of all."""
        found: dict[str, Any] = {}
        end: Any = 0
        for region in self.regions:
            found[region.name] = end
            end = end + (region.bytes(sizes) + START - 1) // START * START
        return found, end


Slot = Tensor | Scalar | Workspace | Stream

MULTIPROCESSORS = Scalar("multiprocessors", "int32")
"""How many multiprocessors the kernel may use."""


class Configuration(Protocol):
    """What a kernel is compiled for."""

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel, in the order of the compiled function."""
        ...


def bind(slots: Sequence[Slot], arguments: Sequence[Any]) -> dict[str, Any]:
    """Arguments by the slots' names.

    Raises:
        ValueError: more or fewer arguments than slots.
    """
    return {slot.name: argument for slot, argument in zip(slots, arguments, strict=True)}


def sizes_of(slots: Sequence[Slot], arguments: Mapping[str, Any], integer: Any = int) -> dict[str, Any]:
    """Sizes by name, from the arguments by name; those of packed elements are of elements."""
    found: dict[str, Any] = {}
    for slot in slots:
        if isinstance(slot, Tensor):
            for name, size, stride in zip(slot.shape, arguments[slot.name].shape, slot.strides, strict=True):
                if isinstance(name, str):
                    found.setdefault(name, integer(size * (slot.packed if stride == 1 else 1)))
        elif isinstance(slot, Scalar) and slot.dtype == "int32":
            found.setdefault(slot.name, integer(arguments[slot.name]))
    return found


def workspace_size(slots: Sequence[Slot], sizes: Sizes) -> int:
    """Bytes of the workspace for a call's sizes, 0 without one."""
    return sum(slot.places(sizes)[1] for slot in slots if isinstance(slot, Workspace))


def matrix(name: str, dtype: str, shape: tuple[str, str, str], major: int) -> Tensor:
    """A tensor (rows, columns, l) whose dimension ``major`` has the stride 1."""
    return Tensor(name, dtype, shape, tuple(1 if dim == major else None for dim in range(3)))


def block_scales(name: str, dtype: str, rows: str, blocks: str, batch: str) -> Tensor:
    """Scale factors in atoms of 128 rows x 4 blocks: (32, 4, ceil(rows / 128), 4, ceil(blocks / 4), l)."""
    shape = (32, 4, f"{rows} / 128", 4, f"{blocks} / 4", batch)
    return Tensor(name, dtype, shape, (16, 4, None, 1, 512, None))


def flat_scales(name: str, dtype: str) -> Tensor:
    """The same atoms, without a shape of their own."""
    return Tensor(name, dtype, (f"{name} count",), (1,))


def addresses(name: str, count: str) -> Tensor:
    """The addresses of so many tensors."""
    return Tensor(name, "int64", (count,), (1,), align=8)


def sum_scales(name: str, rows: str, blocks: str, batch: str) -> Tensor:
    """float32 scale factors (rows, blocks, l), with any strides."""
    return Tensor(name, "float32", (rows, blocks, batch), (None, None, None), align=4)


def vector(name: str, dtype: str, *shape: str) -> Tensor:
    """A tensor whose first dimension has the stride 1, aligned to its elements."""
    size = FORMATS[dtype].bits // 8 if dtype in FORMATS else 4
    return Tensor(name, dtype, shape, (1, *[None] * (len(shape) - 1)), align=size)


def column(name: str, rows: str, batch: str, dtype: str = "float32") -> Tensor:
    """A value for every row: (rows, 1, l), with any strides."""
    return Tensor(name, dtype, (rows, 1, batch), (None, None, None), align=FORMATS[dtype].bits // 8)
