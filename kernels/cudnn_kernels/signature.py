"""The signature (ABI) of a kernel: its arguments as named slots, which host and kernel bind by name.

The operands, schedule and epilogue of a configuration contribute slots. A configuration's ``slots`` are in the order of
the compiled function's parameters: the host takes a call's tensors by the slots' names, and ``__call__`` makes a
mapping of what it gets. Plain data, without the CuTe DSL.

Sizes have names too. ``m``, ``n``, ``k``, ``l`` are those of the GEMM, ``experts`` the number of groups; ``columns`` is
the output width of a gated activation. Slots that name the same size must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cudnn_kernels.formats import FORMATS

START = 256  # bytes: alignment of workspace regions

Sizes = Mapping[str, Any]
"""Sizes by name: integers on the host, traced values in a kernel."""


@dataclass(frozen=True)
class Tensor:
    """A tensor, with its dtype by PyTorch's name. Kernels get packed types as bytes.

    ``shape`` in elements: integers, or names of sizes. ``strides`` in elements: integers, or None for any multiple of
    ``align`` bytes, to which the address is aligned too.
    """

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    strides: tuple[int | None, ...]
    align: int = 16

    @property
    def packed(self) -> int:
        """Elements per byte along the dimension of stride 1."""
        return FORMATS[self.dtype].packed if self.dtype in FORMATS else 1


@dataclass(frozen=True)
class Scalar:
    """A scalar argument."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Stream:
    """The CUDA stream, as an integer."""

    name: str = "stream"


@dataclass(frozen=True)
class Region:
    """A region of the workspace; ``bytes`` computes its size."""

    name: str
    bytes: Callable[[Sizes], Any]


@dataclass(frozen=True)
class Workspace:
    """Temporary memory of a call: a tensor of bytes, suballocated into regions."""

    regions: tuple[Any, ...]
    name: str = "workspace"

    def offsets(self, sizes: Sizes) -> tuple[dict[str, Any], Any]:
        """The byte offsets of the regions by name, and the total size."""
        offsets: dict[str, Any] = {}
        end: Any = 0
        for region in self.regions:
            offsets[region.name] = end
            end = end + (region.bytes(sizes) + START - 1) // START * START
        return offsets, end


Slot = Tensor | Scalar | Workspace | Stream

NUM_SMS = Scalar("num_sms", "int32")
"""The number of SMs that the kernel may use."""


class Configuration(Protocol):
    """The compile-time configuration of a kernel."""

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
    """Sizes by name, from the arguments by name; in elements, also of packed types."""
    sizes: dict[str, Any] = {}
    for slot in slots:
        if isinstance(slot, Tensor):
            for name, size, stride in zip(slot.shape, arguments[slot.name].shape, slot.strides, strict=True):
                if isinstance(name, str):
                    sizes.setdefault(name, integer(size * (slot.packed if stride == 1 else 1)))
        elif isinstance(slot, Scalar) and slot.dtype == "int32":
            sizes.setdefault(slot.name, integer(arguments[slot.name]))
    return sizes


def workspace_size(slots: Sequence[Slot], sizes: Sizes) -> int:
    """Bytes of the workspace for a call's sizes; 0 without a workspace."""
    return sum(slot.offsets(sizes)[1] for slot in slots if isinstance(slot, Workspace))


def matrix(name: str, dtype: str, shape: tuple[str, str, str], major: int) -> Tensor:
    """A tensor (rows, columns, l) with stride 1 in dimension ``major``."""
    return Tensor(name, dtype, shape, tuple(1 if dim == major else None for dim in range(3)))


def block_scales(name: str, dtype: str, rows: str, blocks: str, batch: str) -> Tensor:
    """Block scale factors in atoms of 128 rows x 4 blocks: (32, 4, ceil(rows / 128), 4, ceil(blocks / 4), l)."""
    shape = (32, 4, f"{rows} / 128", 4, f"{blocks} / 4", batch)
    return Tensor(name, dtype, shape, (16, 4, None, 1, 512, None))


def flat_scales(name: str, dtype: str) -> Tensor:
    """The same atoms as a flat tensor."""
    return Tensor(name, dtype, (f"{name} count",), (1,))


def addresses(name: str, count: str) -> Tensor:
    """A pointer array of ``count`` tensors."""
    return Tensor(name, "int64", (count,), (1,), align=8)


def accumulator_scales(name: str, rows: str, blocks: str, batch: str) -> Tensor:
    """fp32 scale factors of accumulators, (rows, blocks, l), with any strides."""
    return Tensor(name, "float32", (rows, blocks, batch), (None, None, None), align=4)


def vector(name: str, dtype: str, *shape: str) -> Tensor:
    """A tensor whose first dimension has the stride 1, aligned to its elements."""
    size = FORMATS[dtype].bits // 8 if dtype in FORMATS else 4
    return Tensor(name, dtype, shape, (1, *[None] * (len(shape) - 1)), align=size)


def column(name: str, rows: str, batch: str, dtype: str = "float32") -> Tensor:
    """A column vector: (rows, 1, l), with any strides."""
    return Tensor(name, dtype, (rows, 1, batch), (None, None, None), align=FORMATS[dtype].bits // 8)
