"""What a case is: pure data that a seed determines, from which graph, inputs and expected results are made."""

from __future__ import annotations

import dataclasses
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from typing_extensions import Self

import cudnn
from support.fuzz.approx import Approx

View = tuple[tuple[Any, ...], torch.Tensor]


def packed(dims: Sequence[int], order: Iterable[int], gap: int = 0) -> tuple[int, ...]:
    """Strides with the dimensions in ``order``, slowest first, and ``gap`` elements after each fastest row."""
    strides, step = [1] * len(dims), 1
    for position, axis in enumerate(reversed(list(order))):
        strides[axis] = step
        step = step * dims[axis] + (gap if position == 0 else 0)
    return tuple(strides)


@dataclass(frozen=True)
class Spec:
    """A tensor in memory.

    Attributes:
        fill: ``normal`` (times ``scale``), ``positive`` (0.5 to 1.5), ``integers`` (-4 to 4),
            ``bytes`` (-128 to 127), ``mask`` (0 and 1), or ``literal``.
        literal: The values, in row-major order.
        by_value: A number that the host passes.
        span: Elements of memory, where shape and strides do not say.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    fill: str = "normal"
    scale: float = 1.0
    literal: tuple[float, ...] = ()
    by_value: bool = False
    span: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def elements(self) -> int:
        """Of memory."""
        return self.span or 1 + sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True))

    def values(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """``count`` values in ``torch_dtype``, on the generator's device."""
        device = generator.device
        if self.fill == "normal":
            data = torch.randn(count, generator=generator, device=device) * self.scale
        elif self.fill == "positive":
            data = torch.rand(count, generator=generator, device=device) + 0.5
        elif self.fill in ("integers", "bytes", "mask"):
            low, high = {"integers": (-4, 5), "bytes": (-128, 128), "mask": (0, 2)}[self.fill]
            data = torch.randint(low, high, (count,), generator=generator, device=device)
        else:
            data = torch.tensor(self.literal, device=device)
        return data.to(self.torch_dtype)


def literal(*values: float, dtype: str = "float32", dims: tuple[int, ...] = (1, 1, 1, 1), **more: Any) -> Spec:
    """A tensor of these values."""
    return Spec(dims, packed(dims, range(len(dims))), dtype, "literal", literal=values, **more)


@dataclass(frozen=True)
class Case(ABC):
    """One random graph.

    Attributes:
        seed: Determines all the others, and the data.
        io, intermediate, compute: Data types of the graph, named as PyTorch names them.
        inputs: Tensors that the graph reads.
    """

    family: ClassVar[str]
    full: ClassVar[int]  # cases of a full run
    most_refused: ClassVar[float]  # the share that cuDNN may refuse

    seed: int
    io: str
    intermediate: str
    compute: str
    inputs: dict[str, Spec]

    @classmethod
    @abstractmethod
    def draw(cls, seed: int) -> Self:
        """The case of a seed."""

    @abstractmethod
    def build(self, graph: cudnn.pygraph, tensors: dict[str, cudnn.tensor]) -> dict[str, cudnn.tensor]:
        """Adds the operations; ``tensors`` are the inputs. Returns the outputs."""

    @abstractmethod
    def expected(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> dict[str, Approx]:
        """By output. ``results`` are for random numbers alone, which no formula knows."""

    def derived(self, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Values of inputs that are made from other inputs."""
        return {}

    def objection(self, data: dict[str, torch.Tensor], results: dict[str, torch.Tensor]) -> str:
        """What is wrong with the results in addition to ``expected``; the empty string for nothing."""
        return ""

    def views(self, spec: Spec, memory: torch.Tensor, name: str) -> list[View]:
        """Where the elements of output ``name`` lie in its memory: places in the expected tensor, and views."""
        return [((...,), memory.as_strided(spec.dims, spec.strides))]

    def span(self, name: str) -> int:
        """Elements of memory of an output whose shape and strides do not determine it; else 0."""
        return 0

    def lead(self, name: str) -> int:
        """Elements by which the data of a tensor miss an address that 256 bytes divide."""
        return 0

    @property
    def size(self) -> int:
        """For choosing the smallest among failures."""
        return sum(prod(spec.dims) for spec in self.inputs.values())

    def json(self) -> str:
        return json.dumps({"family": self.family, **dataclasses.asdict(self)}, separators=(",", ":"))


def pick(rng: random.Random, weights: dict[Any, float]) -> Any:
    """One of the keys, as often as its weight says."""
    return rng.choices([*weights], [*weights.values()])[0]


def extent(rng: random.Random, largest: int) -> int:
    """A number up to ``largest``: mostly multiples of 8, some odd."""
    unit = pick(rng, {8: 5, 16: 2, 64: 2, 1: 1, 4: 0.5, 2: 0.5})
    return unit * rng.randint(1, max(1, largest // unit))
