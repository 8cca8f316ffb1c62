"""Fused APIs other than GEMMs on random tensors of a shape, compared with their references in float32."""

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


def make(api: type[FusedAPI], shape: tuple[int, ...], device: str) -> Problem:
    """The API on inputs of the first type that each specification allows."""
    dimensions, _ = api.example
    sizes_by_name = api.example_sizes(dict(zip(dimensions, shape, strict=True)))
    inputs = [spec for spec in api.tensors if spec.name not in api.returns]
    inputs_by_name = {
        spec.name: random_input(spec, spec.layout.shape(sizes_by_name), device).to(getattr(torch, spec.types[0]))
        for spec in inputs
    }
    wrapper: Any = registry.wrapper(api.folder())
    parameters = inspect.signature(wrapper).parameters
    arguments = {next(p for p in (f"{n}_tensor", n) if p in parameters): tensor for n, tensor in inputs_by_name.items()}

    def compare_results(results: Any) -> list[Comparison]:
        outputs = {name: results[f"{name}_tensor"] for name in api.returns}
        op: Any = api(**api.samples(inputs_by_name | outputs))
        float32_inputs = {name: tensor.float() for name, tensor in inputs_by_name.items()}
        reference = {name: torch.empty_like(tensor, dtype=torch.float32) for name, tensor in outputs.items()}
        op.reference({**float32_inputs, **reference, **{name: getattr(op, name) for name in api.scalars}})
        return [_judge(name, tensor, reference[name]) for name, tensor in outputs.items()]

    return Problem(lambda: wrapper(**arguments), compare_results)


def _judge(name: str, result: Any, expected: Any) -> Comparison:
    """Checks a result that is rounded once after float32 operations."""
    rounding = 0.51 * torch.finfo(result.dtype).eps
    return compare(name, result, expected, max(rounding, 1e-5), 0.0 if result.dtype == torch.float32 else 1e-5)
