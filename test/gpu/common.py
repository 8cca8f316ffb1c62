"""What the GPU tests share: the bound on errors, and random chains of element-wise operations for the fuzzers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

import cudnn
from support.graphs import FLOAT, MODES, like, run

IO_TYPES = [torch.float16, torch.bfloat16, torch.float32]
_ROUNDING = {
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float32: 2**-10,
}  # of float32: tensor cores round to TF32


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether PyTorch may use TF32 for float32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def assert_accurate(result: torch.Tensor, formula: Callable[[torch.dtype], torch.Tensor], kind: torch.dtype) -> None:
    """Compares with float32 PyTorch.

    The error may be twice that of ``formula`` computed in ``kind``, plus the rounding of ``kind`` of the largest value.
    """
    with tf32(False):
        exact = formula(torch.float32).float()
    with tf32(True):
        typed = formula(kind).float()
    assert result.shape == exact.shape
    assert torch.isfinite(result.float()).all(), "not every element was written"
    error = (result.float() - exact).abs().max().item()
    # PyTorch may overflow inside a chain that is computed in float16 throughout: such elements bound nothing.
    typed = torch.where(torch.isfinite(typed), typed, exact)
    allowed = 2 * (typed - exact).abs().max().item() + _ROUNDING[kind] * exact.abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def gpu_graph(io: object, intermediate: object = FLOAT, compute: object = FLOAT) -> cudnn.pygraph:
    """A graph that cuDNN runs."""
    return cudnn.pygraph(
        io_data_type=io, intermediate_data_type=intermediate, compute_data_type=compute, backend="cudnn"
    )


# Element-wise operations: method and arguments, the same in PyTorch, and whether there is a second operand.
Step = tuple[Callable[..., Any], Callable[..., torch.Tensor], bool]
STEPS: dict[str, Step] = {
    "add": (lambda g, x, t: g.add(x, t), lambda x, t: x + t, True),
    "sub": (lambda g, x, t: g.sub(x, t), lambda x, t: x - t, True),
    "mul": (lambda g, x, t: g.mul(x, t), lambda x, t: x * t, True),
    "max": (lambda g, x, t: g.max(x, t), torch.maximum, True),
    "min": (lambda g, x, t: g.min(x, t), torch.minimum, True),
    "relu": (lambda g, x: g.relu(x), torch.relu, False),
    "relu6": (lambda g, x: g.relu(x, upper_clip=6.0), torch.nn.functional.relu6, False),
    "leaky_relu": (lambda g, x: g.leaky_relu(x, 0.1), lambda x: torch.nn.functional.leaky_relu(x, 0.1), False),
    "gelu": (lambda g, x: g.gelu(x), torch.nn.functional.gelu, False),
    "swish": (lambda g, x: g.swish(x, 0.5), lambda x: x * torch.sigmoid(0.5 * x), False),
    "sigmoid": (lambda g, x: g.sigmoid(x), torch.sigmoid, False),
    "tanh": (lambda g, x: g.tanh(x), torch.tanh, False),
    "abs": (lambda g, x: g.abs(x), torch.abs, False),
}


class Data:
    """Draws problems from one seed: structure from ``rng``, values from a generator of PyTorch's."""

    def __init__(self, seed: int, device: str) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def tensor(self, dims: Iterable[int], order: Iterable[int], kind: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Normal values in memory packed with the dimensions in ``order``, slowest first."""
        dims, order = list(dims), list(order)
        values = torch.randn([dims[axis] for axis in order], generator=self._generator).mul_(scale)
        return values.to(self.device, kind).permute([order.index(axis) for axis in range(len(dims))])


class Epilogue:
    """Up to ``most`` random operations on a result of shape ``dims``, whose memory order is ``order``."""

    def __init__(
        self, data: Data, dims: list[int], order: list[int], vector: int, kind: torch.dtype, most: int = 4
    ) -> None:
        names = data.rng.choices(sorted(STEPS), k=data.rng.randint(0, most))
        self.steps: list[tuple[Step, list[torch.Tensor]]] = []
        for name in names:
            operands: list[torch.Tensor] = []
            if STEPS[name][2]:
                shapes = [dims, [extent if axis == vector else 1 for axis, extent in enumerate(dims)]]
                operands = [data.tensor(data.rng.choice(shapes), order, kind)]
            self.steps.append((STEPS[name], operands))

    def build(self, graph: cudnn.pygraph, x: cudnn.tensor, values: dict[cudnn.tensor, torch.Tensor]) -> cudnn.tensor:
        for (method, _, _), operands in self.steps:
            tensors = [like(graph, operand) for operand in operands]
            values.update(zip(tensors, operands, strict=True))
            x = method(graph, x, *tensors)
        return x

    def formula(self, x: torch.Tensor) -> torch.Tensor:
        for (_, function, _), operands in self.steps:
            x = function(x, *(operand.to(x.dtype) for operand in operands))
        return x


class Problem(Protocol):
    """One random graph: how it is built, and what it computes."""

    kind: torch.dtype

    def build(self, graph: cudnn.pygraph) -> tuple[dict[cudnn.tensor, torch.Tensor], cudnn.tensor]: ...

    def formula(self, dtype: torch.dtype) -> torch.Tensor: ...


def fuzz(problems: Iterable[tuple[int, Problem]]) -> str:
    """Runs every problem on the GPU; returns how many ran and how many cuDNN refused."""
    ran = skipped = 0
    for seed, problem in problems:
        graph = gpu_graph(problem.kind)
        values, out = problem.build(graph)
        try:
            (result,) = run(graph, values, out)
        except cudnn.cudnnGraphNotSupportedError:
            skipped += 1
            continue
        ran += 1
        try:
            assert_accurate(result, problem.formula, problem.kind)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {graph.get_plan_name()}: {error}\n{graph}") from error
    return f"{ran} ran, {skipped} refused by cuDNN as not supported"


def count_refused(problems: Iterable[tuple[int, Problem]], device: Any) -> int:
    """How many of the problems cuDNN has no engine for on a described device. Needs no GPU."""
    refused = 0
    for _, problem in problems:
        graph = cudnn.pygraph(
            io_data_type=problem.kind, intermediate_data_type=FLOAT, compute_data_type=FLOAT, device_property=device
        )
        problem.build(graph)
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(MODES)
        except cudnn.cudnnGraphNotSupportedError:
            refused += 1
    return refused
