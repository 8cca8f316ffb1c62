"""Benchmarks of memory-bound fused APIs. The yardstick is a device copy of the same bytes; torch.compile is a peer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import GPU, HOST, QUICK, Benchmark, Call, Candidate, Options, Problem, operands, returning
from cudnn.fused.examples import compare, random_input
from cudnn.fused.host import FusedAPI
from cudnn.lazy import torch

COPY = "copy"
SMALL = 64  # the first dimension when host time is measured


def benchmark(api: type[FusedAPI]) -> Benchmark:
    """The benchmark of an API."""
    return Benchmark(
        title=api.title,
        yardsticks=(COPY,),
        dtypes=("bf16",),
        dimensions=dict(zip((name.upper() for name in api.example[0]), api.steps, strict=True)),
        problems=functools.partial(problems, api),
        quick=tuple(api.shapes),
    )


def tensors(api: type[FusedAPI], shape: tuple[int, ...]) -> dict[str, Any]:
    """Random inputs and NaN results by name, each in the first type that its specification allows."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True)))
    result = {}
    for spec in api.tensors:
        values = random_input(spec, spec.layout.shape(sizes), operands.DEVICE).to(getattr(torch, spec.types[0]))
        result[spec.name] = torch.full_like(values, float("nan")) if spec.name in api.returns else values
    return result


def problems(api: type[FusedAPI], options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    result, clock = [], QUICK if options.quick else GPU
    for shape in options.shapes or api.shapes:
        size = sum(x.numel() * x.element_size() for x in tensors_like(api, shape).values())
        label = "x".join(map(str, shape))
        result.append(Problem(label, functools.partial(candidates, api, shape), bytes=float(size), clock=clock))
    return [*result, Problem("host time, warm", functools.partial(host_candidates, api), clock=HOST)]


def tensors_like(api: type[FusedAPI], shape: tuple[int, ...]) -> dict[str, Any]:
    """Meta tensors of the same shapes and types."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True)))
    return {x.name: x.layout.allocate(sizes, "", getattr(torch, x.types[0]), "meta") for x in api.tensors}


def candidates(api: type[FusedAPI], shape: tuple[int, ...]) -> list[Candidate]:
    """The copy, the API, and the same computation in torch.compile."""
    torch._dynamo.reset()
    tensors_by_name = tensors(api, shape)
    inputs = {name: x for name, x in tensors_by_name.items() if name not in api.returns}
    exact = expected(api, tensors_by_name)

    def check(units: float, results: Mapping[str, Any]) -> str:
        for name, reference in exact.items():
            bound = units * torch.finfo(tensors_by_name[name].dtype).eps
            comparison = compare(name, results[name], reference, max(bound, 1e-5 * units * 2), 1e-5)
            if not comparison.passed:
                return (
                    f"wrong result: {name} is off by {comparison.error:.2e}, at most {comparison.allowed:.2e} is right"
                )
        return ""

    def compiled(function: Any) -> Call:
        run = torch.compile(functools.partial(function, **options(api, tensors_by_name)))
        return lambda: dict(zip(api.returns, run(*inputs.values()), strict=True))

    source = operands.normal(sum(x.numel() * x.element_size() for x in tensors_by_name.values()) // 8)
    target = torch.empty_like(source)
    result = [
        Candidate(COPY, lambda: lambda: {"copy": target.copy_(source)}),
        Candidate(api.__name__, lambda: ours(api, tensors_by_name), functools.partial(check, 0.51), ours=True),
    ]
    for name, function in api.formulas.items():
        result.append(Candidate(name, functools.partial(compiled, function), functools.partial(check, 1.01)))
    return result


def options(api: type[FusedAPI], tensors_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """The values that an object of the API derives from its arguments."""
    op: Any = api(**api.samples(tensors_by_name))
    return {name: getattr(op, name) for name in api.formula_options}


def expected(api: type[FusedAPI], tensors_by_name: Mapping[str, Any]) -> dict[str, Any]:
    """The results in float32, from the API's reference."""
    op: Any = api(**api.samples(tensors_by_name))
    float32_tensors = {name: x.float() for name, x in tensors_by_name.items()}
    op.reference({**float32_tensors, **{name: getattr(op, name) for name in api.scalars}})
    return {name: float32_tensors[name] for name in api.returns}


def ours(api: type[FusedAPI], tensors_by_name: Mapping[str, Any]) -> Call:
    """A call of the API."""
    op: Any = api(**api.samples(tensors_by_name))
    op.compile()
    run = functools.partial(
        op.execute, **{parameter: tensors_by_name[name] for name, parameter in api.parameters.items()}
    )
    return returning(run, {name: tensors_by_name[name] for name in api.returns})


def host_candidates(api: type[FusedAPI]) -> list[Candidate]:
    """The API and an addition of PyTorch."""
    tensors_by_name = tensors(api, (SMALL, *api.shapes[0][1:]))
    x = operands.normal(SMALL, SMALL)
    y = torch.empty_like(x)
    return [
        Candidate("torch.add(out=)", lambda: lambda: {"": torch.add(x, x, out=y)}),
        Candidate(f"{api.__name__}.execute", lambda: ours(api, tensors_by_name), ours=True),
    ]
