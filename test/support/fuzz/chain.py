"""Random programs of element-wise operations: all that pygraph has, on values and tensors that suit them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

import cudnn
from support.fuzz.approx import APPROXIMATE, Approx, apply
from support.fuzz.case import Spec, packed, pick

ANY = (-1e9, 1e9)
_LARGEST = 500.0  # no value beyond it, so that float16 holds all


@dataclass(frozen=True)
class Op:
    """An operation: its method in pygraph, the same on float64, and what it takes.

    Attributes:
        domains: For each argument, the interval outside of which the operation is undefined or too steep.
        approximate: Computed by instructions that approximate.
        result: ``float`` or ``bool``.
    """

    method: str
    function: Callable[..., torch.Tensor]
    domains: tuple[tuple[float, float], ...] = (ANY,)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    approximate: bool = False
    result: str = "float"
    weight: float = 1.0

    def add(self, graph: cudnn.pygraph, *arguments: cudnn.tensor) -> cudnn.tensor:
        """Logic wants BOOLEAN as its compute type."""
        compute = {"compute_data_type": cudnn.data_type.BOOLEAN} if self.method.startswith("logical") else {}
        return getattr(graph, self.method)(*arguments, **self.options, **compute)

    def suited(self, *arguments: torch.Tensor) -> list[torch.Tensor]:
        """Random arguments as the operation takes them: masks are boolean, and what is compared is often equal."""
        if self.method.startswith("cmp"):
            return [x.round_() for x in arguments]
        masks = range(2, 3) if self.method == "binary_select" else range(3 * self.method.startswith("logical"))
        return [x > 0 if position in masks else x for position, x in enumerate(arguments)]

    def approx(self, *arguments: Approx) -> Approx:
        if self.result == "bool":
            return apply(self.function, *arguments)
        error = APPROXIMATE if self.approximate else 0.0
        return apply(self.function, *arguments, relative=max(error, 2**-22), absolute=error)


class Remainder(Op):
    """The one operation that jumps and rises again within an interval: what happens at its ends bounds nothing."""

    def approx(self, *arguments: Approx) -> Approx:
        count = apply(torch.trunc, apply(torch.div, *arguments, relative=2**-20))
        error = APPROXIMATE
        return apply(lambda a, b, n: a - b * n, *arguments, count, relative=error, absolute=error)


def _derivative(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def gradient(loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(loss.shape, x.shape)
        with torch.enable_grad():
            leaf = x.detach().expand(shape).clone().requires_grad_()
            return torch.autograd.grad(function(leaf), leaf, loss.expand(shape))[0]

    return gradient


def _relu(slope: float = 0.0, lower: float = 0.0, upper: float = torch.inf) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.where(x > lower, x, lower + slope * (x - lower)).clamp(max=upper)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _slow_swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(0.5 * x)


_POSITIVE, _SMALL, _UPTO = (0.05, 1e9), (-1.3, 1.3), (-1e9, 6.1)
_TWO = (ANY, ANY)
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_approx_tanh": _gelu_tanh,
    "softplus": F.softplus,
    "swish": F.silu,
}
_OPS = [
    Op("relu", _relu(), weight=4),
    Op("relu", _relu(lower=-0.5), options={"lower_clip": -0.5}),
    Op("relu", _relu(upper=1.5), options={"upper_clip": 1.5}),
    Op("relu", _relu(slope=0.1), options={"negative_slope": 0.1}),
    Op("leaky_relu", _relu(slope=0.2), options={"negative_slope": 0.2}),
    Op("swish", _slow_swish, options={"swish_beta": 0.5}, approximate=True),
    *(Op(name, function, approximate=True, weight=2) for name, function in _ACTIVATIONS.items()),
    Op("exp", torch.exp, (_UPTO,), approximate=True),
    Op("log", torch.log, (_POSITIVE,), approximate=True),
    Op("sqrt", torch.sqrt, (_POSITIVE,), approximate=True),
    Op("rsqrt", torch.rsqrt, (_POSITIVE,), approximate=True),
    Op("reciprocal", torch.reciprocal, (_POSITIVE,), approximate=True),
    Op("erf", torch.erf, approximate=True),
    Op("sin", torch.sin, approximate=True),
    Op("cos", torch.cos, approximate=True),
    Op("tan", torch.tan, (_SMALL,), approximate=True),
    Op("identity", torch.clone),
    Op("neg", torch.neg),
    Op("abs", torch.abs),
    Op("ceil", torch.ceil),
    Op("floor", torch.floor),
    Op("add", torch.add, _TWO, weight=4),
    Op("bias", torch.add, _TWO, weight=4),
    Op("sub", torch.sub, _TWO, weight=2),
    Op("mul", torch.mul, _TWO, weight=4),
    Op("scale", torch.mul, _TWO, weight=4),
    Op("div", torch.div, (ANY, _POSITIVE), approximate=True),
    Op("add_square", lambda a, b: a + b * b, _TWO),
    Op("max", torch.maximum, _TWO),
    Op("min", torch.minimum, _TWO),
    Remainder("mod", torch.fmod, (ANY, (0.4, 1e9)), approximate=True, weight=0.5),
    Op("pow", torch.pow, (_POSITIVE, (-2.0, 2.0)), approximate=True),
    Op("relu_backward", lambda dy, x: torch.where(x > 0, dy, 0.0 * dy), _TWO, weight=2),
    Op("leaky_relu_backward", lambda dy, x: torch.where(x > 0, dy, 0.1 * dy), _TWO, {"negative_slope": 0.1}),
    *(Op(f"{name}_backward", _derivative(function), _TWO, approximate=True) for name, function in _ACTIVATIONS.items()),
    Op("relu_backward", _derivative(_relu(lower=-0.5)), _TWO, {"lower_clip": -0.5}, weight=0),
    Op("relu_backward", _derivative(_relu(upper=1.5)), _TWO, {"upper_clip": 1.5}, weight=0),
    Op("silu", F.silu, approximate=True, weight=0),
    Op("swish_backward", _derivative(_slow_swish), _TWO, {"swish_beta": 0.5}, approximate=True, weight=0),
    Op("cmp_eq", lambda a, b: (a == b).double(), _TWO, result="bool", weight=0),
    Op("cmp_neq", lambda a, b: (a != b).double(), _TWO, result="bool", weight=0),
    Op("cmp_gt", lambda a, b: (a > b).double(), _TWO, result="bool"),
    Op("cmp_ge", lambda a, b: (a >= b).double(), _TWO, result="bool"),
    Op("cmp_lt", lambda a, b: (a < b).double(), _TWO, result="bool"),
    Op("cmp_le", lambda a, b: (a <= b).double(), _TWO, result="bool"),
    Op("logical_and", torch.mul, _TWO, result="bool", weight=0),
    Op("logical_or", torch.maximum, _TWO, result="bool", weight=0),
    Op("logical_not", lambda a: 1.0 - a, result="bool", weight=0),
    Op("binary_select", lambda a, b, mask: torch.where(mask > 0, a, b), (ANY, ANY, ANY), weight=0),
]
OPS = {f"{op.method}{''.join(f',{key}={value}' for key, value in op.options.items())}": op for op in _OPS}
_DRAWN = {name: op.weight for name, op in OPS.items() if op.weight}


@dataclass(frozen=True)
class Instruction:
    """One operation on earlier results (``x0`` is what the program starts from) or on tensors of the case.

    ``dtype`` is what the result is stored as, though virtual: None for the graph's intermediate type.
    """

    op: str
    arguments: tuple[str, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class Program:
    """Instructions, the result of the last one being the program's; ``taps`` are further outputs."""

    instructions: tuple[Instruction, ...] = ()
    taps: tuple[int, ...] = ()

    def build(self, graph: cudnn.pygraph, x: cudnn.tensor, tensors: dict[str, cudnn.tensor]) -> list[cudnn.tensor]:
        """Every result, that from which the program starts first."""
        results = [x]
        for step in self.instructions:
            op = OPS[step.op]
            arguments = [results[int(a[1:])] if a[0] == "x" else tensors[a] for a in step.arguments]
            computed = op.add(graph, *arguments)
            if step.dtype is not None:
                computed.set_data_type(getattr(torch, step.dtype))
            results.append(computed)
        return results

    def formula(self, x: Approx, data: dict[str, torch.Tensor], output: torch.dtype) -> list[Approx]:
        """Every result; ``output`` is the type of the taps. Later operations may read those rounded, or not."""
        results = [x]
        for index, step in enumerate(self.instructions, start=1):
            op = OPS[step.op]
            arguments = [results[int(a[1:])] if a[0] == "x" else Approx(data[a].double()) for a in step.arguments]
            computed = op.approx(*arguments)
            if op.result != "bool" and (step.dtype is not None or index in self.taps):
                computed = computed.stored(getattr(torch, step.dtype) if step.dtype else output)
            results.append(computed)
        return results


def _reach(op: Op, ranges: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The interval of results for arguments from given intervals; None where the operation does not suit them."""
    for (low, high), (least, most) in zip(ranges, op.domains, strict=True):
        if low < least or high > most:
            return None
    grids = torch.meshgrid(*(torch.linspace(*r, 65 if len(ranges) < 3 else 9).double() for r in ranges), indexing="ij")
    values = op.function(*grids)
    if not values.isfinite().all() or values.abs().max() > _LARGEST:
        return None
    return values.min().item(), values.max().item()


class Drawing:
    """Samples a program for a value of shape ``dims`` in memory order ``order``, and the tensors that it reads."""

    _FILLS = {"normal": (-5.0, 5.0), "positive": (0.5, 1.5)}  # noqa: RUF012

    def __init__(
        self,
        rng: random.Random,
        dims: Sequence[int],
        order: Sequence[int],
        shapes: dict[tuple[int, ...], float],
        types: dict[str, float],
        start: tuple[float, float] = (-7.0, 7.0),
        prefix: str = "t",
        by_value: float = 0.1,
    ) -> None:
        self.rng, self.dims, self.order, self.shapes, self.types = rng, tuple(dims), tuple(order), shapes, types
        self.prefix, self.by_value = prefix, by_value
        self.ranges = [start]
        self.instructions: list[Instruction] = []
        self.specs: dict[str, Spec] = {}

    def program(self, count: int) -> Program:
        """Of about ``count`` operations."""
        while len(self.instructions) < count:
            name = pick(self.rng, _DRAWN)
            if OPS[name].result == "bool":
                self._select(name)
            else:
                self._append(name, self._last())
        taps = ()
        if count > 1 and self.rng.random() < 0.1:
            taps = tuple(
                i for i in [self.rng.randint(1, count - 1)] if OPS[self.instructions[i - 1].op].result != "bool"
            )
        return Program(tuple(self.instructions), taps)

    def _last(self) -> str:
        return f"x{len(self.instructions)}"

    def _range(self, argument: str) -> tuple[float, float]:
        return self.ranges[int(argument[1:])] if argument[0] == "x" else self._FILLS[self.specs[argument].fill]

    def _operand(self, domain: tuple[float, float]) -> str:
        """A new tensor, or an earlier result."""
        results = ["float", *(OPS[instruction.op].result for instruction in self.instructions)]
        floats = [
            index
            for index, (low, high) in enumerate(self.ranges)
            if domain[0] <= low and high <= domain[1] and results[index] == "float"
        ]
        if floats and self.rng.random() < 0.15:
            return f"x{self.rng.choice(floats)}"
        fill = "normal" if domain[0] <= -5 and self.rng.random() < 0.8 else "positive"
        name = f"{self.prefix}{len(self.specs)}"
        if self.rng.random() < self.by_value:
            ones = (1,) * len(self.dims)
            self.specs[name] = Spec(ones, ones, "float32", fill, by_value=True)
        else:
            dims = pick(self.rng, self.shapes)
            self.specs[name] = Spec(dims, packed(dims, self.order), pick(self.rng, self.types), fill)
        return name

    def _append(self, name: str, x: str) -> None:
        """Appends an operation on ``x`` where that suits it."""
        op = OPS[name]
        before = dict(self.specs)
        position = self.rng.randrange(len(op.domains)) if op.method not in ("bias", "scale") else 0
        arguments = [x if i == position else self._operand(domain) for i, domain in enumerate(op.domains)]
        reach = _reach(op, [self._range(a) for a in arguments])
        # cuDNN refuses a graph whose first tensor is broadcast to the result of an operation.
        if reach is None:
            self.specs = before
            return
        self._add(name, arguments, reach)

    def _add(self, name: str, arguments: Sequence[str], reach: tuple[float, float], dtype: str | None = None) -> str:
        self.instructions.append(Instruction(name, tuple(arguments), dtype))
        self.ranges.append(reach)
        return self._last()

    def _select(self, comparison: str) -> None:
        """A comparison, now and then logic on its result, and a selection by it."""
        x = self._last()
        mask = self._add(comparison, [x, self._operand(ANY)], (0.0, 1.0), "bool")
        logic = pick(self.rng, {"": 6, "logical_not": 1, "logical_and": 1, "logical_or": 1})
        if logic == "logical_not":
            mask = self._add(logic, [mask], (0.0, 1.0), "bool")
        elif logic:
            other = self._add("cmp_gt", [x, self._operand(ANY)], (0.0, 1.0), "bool")
            mask = self._add(logic, [mask, other], (0.0, 1.0), "bool")
        ranges = [self._range(x), self._range(other := self._operand(ANY))]
        self._add("binary_select", [x, other, mask], (min(r[0] for r in ranges), max(r[1] for r in ranges)))


def most_types(io: str, rng: random.Random) -> dict[str, float]:
    """Types of the tensors that a program reads: mostly those of the graph's inputs."""
    return {io: 4, "float32": 1} if io in ("float16", "bfloat16", "float32") else {"float32": 1, "float16": 1}


__all__ = ["OPS", "Any", "Drawing", "Instruction", "Program", "most_types"]
