"""A fused API on random tensors of a shape, judged by its own reference in float32."""

from __future__ import annotations

import inspect
from typing import Any

from cudnn.demo_cases import Problem, Program
from cudnn.fused import registry
from cudnn.fused.examples import Comparison, compare, random_input
from cudnn.fused.host import FusedAPI
from cudnn.lazy import torch


def program(api: type[FusedAPI]) -> Program:
    """The program of an API."""
    dimensions, shape = api.example
    return Program(
        api.title, dimensions, shape, lambda sizes, device: make(api, sizes, device), tuple(api.architectures)
    )


def make(api: type[FusedAPI], sizes: tuple[int, ...], device: str) -> Problem:
    """The API on inputs of the first type that each may have."""
    dimensions, _ = api.example
    named = api.example_sizes(dict(zip(dimensions, sizes, strict=True)))
    inputs = [spec for spec in api.tensors if spec.name not in api.returns]
    input_tensors = {
        spec.name: random_input(spec, spec.layout.shape(named), device).to(getattr(torch, spec.types[0]))
        for spec in inputs
    }
    wrapper: Any = registry.wrapper(api.folder())
    parameters = inspect.signature(wrapper).parameters
    arguments = {next(p for p in (f"{n}_tensor", n) if p in parameters): tensor for n, tensor in input_tensors.items()}

    def compared(results: Any) -> list[Comparison]:
        output_tensors = {name: results[f"{name}_tensor"] for name in api.returns}
        object_: Any = api(**api.samples(input_tensors | output_tensors))
        wide = {name: tensor.float() for name, tensor in input_tensors.items()}
        exact = {name: torch.empty_like(tensor, dtype=torch.float32) for name, tensor in output_tensors.items()}
        object_.reference({**wide, **exact, **{name: getattr(object_, name) for name in api.scalars}})
        return [_judge(name, tensor, exact[name]) for name, tensor in output_tensors.items()]

    return Problem(lambda: wrapper(**arguments), compared)


def _judge(name: str, actual: Any, expected: Any) -> Comparison:
    """Rounded once, after an error of some float32 operations."""
    rounding = 0.51 * torch.finfo(actual.dtype).eps
    return compare(name, actual, expected, max(rounding, 1e-5), 0.0 if actual.dtype == torch.float32 else 1e-5)
