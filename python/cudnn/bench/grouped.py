"""Benchmarks of the grouped fused GEMMs: beside PyTorch's grouped product of the same tokens, the yardstick, which does
nothing of the epilogue.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from cudnn.bench import HOST, Benchmark, Call, Candidate, Options, Problem, operands
from cudnn.cli.programs import grouped
from cudnn.fused.grouped import ExpertsGemm
from cudnn.lazy import torch

PRODUCT = "torch._grouped_mm"
SMALL = (256, 128, 128, 2)


def benchmark(api: type[ExpertsGemm]) -> Benchmark:
    """The benchmark of an API."""
    return Benchmark(
        title=api.title,
        yardsticks=(PRODUCT,),
        dtypes=("bf16",),
        dimensions=dict(zip((name.upper() for name in api.example[0]), api.steps, strict=True)),
        problems=functools.partial(problems, api),
    )


def problems(api: type[ExpertsGemm], options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    found = []
    for shape in options.shapes or api.shapes:
        m, n, k, _ = shape
        label = " x ".join(map(str, shape))
        found.append(Problem(label, functools.partial(candidates, api, shape), flops=2.0 * m * n * k))
    return [*found, Problem("host time, warm", functools.partial(candidates, api, SMALL), clock=HOST)]


def candidates(api: type[ExpertsGemm], shape: tuple[int, ...]) -> list[Candidate]:
    """PyTorch's product, and ours with its epilogue."""
    given = grouped.inputs(api, shape, operands.DEVICE)
    made = api.allocated(given, api.hidden_weights(given))
    exact = grouped.expected(api, given, made)

    def check(results: Mapping[str, Any]) -> str:
        for name, want in exact.items():
            found = grouped.judge(name, results[name], want, grouped.SLACK)
            if not found.passed:
                return f"wrong result: {name} is off by {found.error:.2e}, at most {found.allowed:.2e} is right"
        return ""

    def product() -> Call:
        a, b = given["a"][..., 0], given["b"].permute(2, 1, 0)
        ends = next(given[spec.name] for spec in api.tensors if spec.draw == "ends")
        right = b[0] if api.tokens == "k" else b
        return lambda: {"product": torch._grouped_mm(a, right, offs=ends)}

    return [
        Candidate(PRODUCT, product, lambda results: ""),
        Candidate(api.__name__, lambda: ours(api, given, made), check, ours=True),
    ]


def ours(api: type[ExpertsGemm], given: Mapping[str, Any], made: Mapping[str, Any]) -> Call:
    """The API itself. What it raises or adds to is not filled anew: the first call alone is checked."""
    tensors = {**given, **made}
    any_: Any = api
    object_ = any_(**api.samples(tensors), **api.hidden_weights(given))
    object_.compile()
    run = functools.partial(object_.execute, **{p: tensors.get(name) for name, p in api.parameters.items()})

    def call() -> Mapping[str, Any]:
        run()
        return made

    return call
