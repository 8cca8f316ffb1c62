"""Benchmarks of fused APIs that move bytes: beside a device copy of as many, the yardstick, and PyTorch's compiler."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import HOST, Benchmark, Call, Candidate, Options, Problem, operands, returning
from cudnn.fused.examples import compare, random_input
from cudnn.fused.host import FusedAPI
from cudnn.lazy import torch

COPY = "copy"
SMALL = 64  # of the first size, for the host's time


def benchmark(api: type[FusedAPI]) -> Benchmark:
    """The benchmark of an API."""
    return Benchmark(
        title=api.title,
        yardsticks=(COPY,),
        dtypes=("bf16",),
        dimensions=dict(zip((name.upper() for name in api.example[0]), api.steps, strict=True)),
        problems=functools.partial(problems, api),
    )


def tensors(api: type[FusedAPI], shape: tuple[int, ...]) -> dict[str, Any]:
    """Random inputs in the first type that each may have, and results, by name."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True)))
    found = {}
    for spec in api.tensors:
        values = random_input(spec, spec.layout.shape(sizes), operands.DEVICE).to(getattr(torch, spec.types[0]))
        found[spec.name] = torch.full_like(values, float("nan")) if spec.name in api.returns else values
    return found


def problems(api: type[FusedAPI], options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    found = []
    for shape in options.shapes or api.shapes:
        size = sum(x.numel() * x.element_size() for x in tensors_like(api, shape).values())
        label = " x ".join(map(str, shape))
        found.append(Problem(label, functools.partial(candidates, api, shape), bytes=float(size)))
    return [*found, Problem("host time, warm", functools.partial(host_candidates, api), clock=HOST)]


def tensors_like(api: type[FusedAPI], shape: tuple[int, ...]) -> dict[str, Any]:
    """Tensors of the same sizes without data."""
    sizes = api.example_sizes(dict(zip(api.example[0], shape, strict=True)))
    return {x.name: x.layout.allocate(sizes, "", getattr(torch, x.types[0]), "meta") for x in api.tensors}


def candidates(api: type[FusedAPI], shape: tuple[int, ...]) -> list[Candidate]:
    """The copy, ours, and the same computation compiled."""
    torch._dynamo.reset()
    made = tensors(api, shape)
    given = {name: x for name, x in made.items() if name not in api.returns}
    exact = expected(api, made)

    def check(units: float, results: Mapping[str, Any]) -> str:
        for name, want in exact.items():
            bound = units * torch.finfo(made[name].dtype).eps
            found = compare(name, results[name], want, max(bound, 1e-5 * units * 2), 1e-5)
            if not found.passed:
                return f"wrong result: {name} is off by {found.error:.2e}, at most {found.allowed:.2e} is right"
        return ""

    def compiled(function: Any) -> Call:
        run = torch.compile(functools.partial(function, **options(api, made)))
        return lambda: dict(zip(api.returns, run(*given.values()), strict=True))

    source = operands.normal(sum(x.numel() * x.element_size() for x in made.values()) // 8)
    target = torch.empty_like(source)
    found = [
        Candidate(COPY, lambda: lambda: {"copy": target.copy_(source)}),
        Candidate(api.__name__, lambda: ours(api, made), functools.partial(check, 0.51), ours=True),
    ]
    for name, function in api.formulas.items():
        found.append(Candidate(name, functools.partial(compiled, function), functools.partial(check, 1.01)))
    return found


def options(api: type[FusedAPI], made: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that an object of the API chose by itself."""
    object_: Any = api(**api.samples(made))
    return {name: getattr(object_, name) for name in api.formula_options}


def expected(api: type[FusedAPI], made: Mapping[str, Any]) -> dict[str, Any]:
    """The results in float32, by the API's own reference."""
    object_: Any = api(**api.samples(made))
    wide = {name: x.float() for name, x in made.items()}
    object_.reference({**wide, **{name: getattr(object_, name) for name in api.scalars}})
    return {name: wide[name] for name in api.returns}


def ours(api: type[FusedAPI], made: Mapping[str, Any]) -> Call:
    """The API itself."""
    object_: Any = api(**api.samples(made))
    object_.compile()
    run = functools.partial(object_.execute, **{parameter: made[name] for name, parameter in api.parameters.items()})
    return returning(run, {name: made[name] for name in api.returns})


def host_candidates(api: type[FusedAPI]) -> list[Candidate]:
    """The API beside an addition."""
    made = tensors(api, (SMALL, *api.shapes[0][1:]))
    x = operands.normal(SMALL, SMALL)
    y = torch.empty_like(x)
    return [
        Candidate("torch.add(out=)", lambda: lambda: {"": torch.add(x, x, out=y)}),
        Candidate(f"{api.__name__}.execute", lambda: ours(api, made), ours=True),
    ]
