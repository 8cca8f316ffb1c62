"""Benchmarks of the grouped fused GEMMs, on the layers of published MoE models.

The yardstick is PyTorch's grouped GEMM on the same tokens, without the epilogue. The other peers are one cuBLAS call
per expert, whose sizes the host must know, a Triton kernel, QuACK's kernel if it is installed, and PyTorch's grouped
GEMM followed by the epilogue in torch.compile.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from cudnn.bench import (
    GPU,
    HOST,
    QUICK,
    Benchmark,
    Call,
    Candidate,
    Options,
    Problem,
    dense_gemm,
    gemm_peers,
    operands,
    returning,
)
from cudnn.demo_cases import grouped
from cudnn.fused.grouped import ExpertsGemm
from cudnn.gemm.reference import evaluate
from cudnn.lazy import torch
from cudnn_kernels import epilogue

PRODUCT = "torch._grouped_mm"
PRODUCT_THEN_EPILOGUE = "torch._grouped_mm + epilogue, compiled"
TRITON = "benchmarks/triton_grouped_gemm.py"
SMALL = (256, 128, 128, 2)
ROUTINGS = ("uniform", "zipf")
MODELS = {
    "Mixtral 8x22B": (8, 2, 6144, 16384),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-235B-A22B": (128, 8, 4096, 1536),
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
"""Experts, top-k, hidden and intermediate size: from the models' published configurations."""
TOKENS = (8192,)
ALL_TOKENS = tuple(1024 << i for i in range(8))


def benchmark(api: type[ExpertsGemm]) -> Benchmark:
    """The benchmark of an API."""
    return Benchmark(
        title=api.title,
        yardsticks=(PRODUCT, PRODUCT_THEN_EPILOGUE) if api.tokens == "m" else (PRODUCT,),
        dtypes=("bf16",),
        dimensions=dict(zip((name.upper() for name in api.example[0]), api.steps, strict=True)),
        problems=functools.partial(problems, api),
        routings=ROUTINGS,
        quick=tuple(api.shapes),
    )


def shapes(api: type[ExpertsGemm], options: Options) -> dict[tuple[int, ...], str]:
    """Labels by shape."""
    if options.shapes:
        return dict.fromkeys(options.shapes, "")
    result = dict.fromkeys(api.shapes, "")
    for model, (experts, chosen, hidden, inner) in MODELS.items():
        for tokens in ALL_TOKENS if options.all else TOKENS:
            result[layer(api, tokens * chosen, hidden, inner, experts)] = f"{model}, {tokens} tokens"
    return result


def layer(api: type[ExpertsGemm], rows: int, hidden: int, inner: int, experts: int) -> tuple[int, ...]:
    """The shape of the API's GEMM in a gated feed-forward layer.

    That is the up projection; for an API without an activation the down projection, and for APIs of the backward pass
    the gradient of either.
    """
    if api.tokens == "k":
        return 2 * inner, hidden, rows, experts
    if api.result_columns(64) < 64:
        return rows, 2 * inner, hidden, experts
    activation = api.result_columns(64) > 64 or "relu" in api.folder()
    return (rows, inner, hidden, experts) if activation else (rows, hidden, inner, experts)


def problems(api: type[ExpertsGemm], options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    result, clock = [], QUICK if options.quick else GPU
    for shape, label in shapes(api, options).items():
        m, n, k, _ = shape
        text = f"{'x'.join(map(str, shape))} {label} {options.routing}".replace("  ", " ")
        make_candidates = functools.partial(candidates, api, shape, options.routing)
        result.append(Problem(text, make_candidates, flops=2.0 * m * n * k, clock=clock))
    return [*result, Problem("host time, warm", lambda: candidates(api, SMALL)[:1], clock=HOST)]


def ends(routing: str, experts: int, tokens: int, rows: int = 1) -> list[int]:
    """End row of each expert, a multiple of ``rows``.

    Experts have equal sizes or, by Zipf's law, 1, 1/2, 1/3 ... of the largest, in random order.
    """
    weights = [1.0] * experts
    if routing == "zipf":
        seeded = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(experts, generator=seeded, dtype=torch.int64, device="cpu").tolist()
        weights = [1 / (1 + rank) for rank in order]
    total = sum(weights)
    return [round(tokens // rows * weight / total) * rows for weight in itertools.accumulate(weights)]


def candidates(api: type[ExpertsGemm], shape: tuple[int, ...], routing: str = ROUTINGS[0]) -> list[Candidate]:
    """The API with its epilogue, and the peers."""
    inputs = grouped.inputs(api, shape, operands.DEVICE, generated_on=operands.DEVICE)
    (offsets,) = (inputs[spec.name] for spec in api.tensors if spec.init == "ends")
    end_rows = ends(routing, shape[3], shape["mnk".index(api.tokens)], api.group_rows)
    offsets.copy_(torch.tensor(end_rows, dtype=torch.int32, device="cpu"))
    outputs = api.allocated(inputs, api.pointer_options(inputs))
    reference = grouped.expected(api, inputs, outputs)

    def check(results: Mapping[str, Any], tolerance: float = grouped.TOLERANCE) -> str:
        for name, expected in reference.items():
            comparison = grouped.judge(name, results[name], expected, tolerance)
            if not comparison.passed:
                return (
                    f"wrong result: {name} is off by {comparison.error:.2e}, at most {comparison.allowed:.2e} is right"
                )
        return ""

    peers = {
        PRODUCT: functools.partial(product, api, inputs, offsets),
        "cuBLAS, expert by expert": functools.partial(one_by_one, api, inputs, end_rows),
    }
    if api.tokens == "m":
        peers["Triton"] = functools.partial(triton, inputs, offsets)
        peers[gemm_peers.QUACK] = functools.partial(quack, inputs, offsets)
    result = [Candidate(api.__name__, lambda: ours(api, inputs, outputs), check, ours=True)]
    packages = {"Triton": "triton", gemm_peers.QUACK: gemm_peers.QUACK_PACKAGE}
    result += [
        Candidate(
            name,
            peer,
            lambda results: check_product(api, inputs, results),
            package=packages.get(name, "torch"),
        )
        for name, peer in peers.items()
    ]
    if api.tokens == "m":
        loose_check = functools.partial(check, tolerance=0.02)  # the GEMM's output is rounded before the epilogue
        result.append(
            Candidate(PRODUCT_THEN_EPILOGUE, lambda: product_then_epilogue(api, inputs, offsets, outputs), loose_check)
        )
    return result


def check_product(api: type[ExpertsGemm], inputs: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Compares a peer's grouped GEMM with PyTorch's. Returns a message, or ``""``."""
    (offsets,) = (inputs[spec.name] for spec in api.tensors if spec.init == "ends")
    expected, actual = product(api, inputs, offsets)()["product"].float(), results["product"].float()
    error, allowed = float((actual - expected).abs().max()), 0.02 * float(expected.abs().max())
    return "" if error <= allowed else f"wrong result: product is off by {error:.2e}, at most {allowed:.2e} is right"


def product(api: type[ExpertsGemm], inputs: Mapping[str, Any], offsets: Any) -> Call:
    """PyTorch's grouped GEMM."""
    a, b = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0)
    right = b[0] if api.tokens == "k" else b
    return lambda: {"product": torch._grouped_mm(a, right, offs=offsets)}


def one_by_one(api: type[ExpertsGemm], inputs: Mapping[str, Any], end_rows: list[int]) -> Call:
    """A cuBLAS GEMM for each expert that has tokens."""
    a, b = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0)
    spans = [(e, x, y) for e, (x, y) in enumerate(itertools.pairwise([0, *end_rows])) if y > x]
    if api.tokens == "k":
        d = torch.zeros(len(end_rows), a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
        operands_of_experts = [(a[:, x:y], b[0][x:y], d[e]) for e, x, y in spans]
    else:
        d = a.new_empty(a.shape[0], b.shape[2])
        operands_of_experts = [(a[x:y], b[e], d[x:y]) for e, x, y in spans]

    def call() -> Mapping[str, Any]:
        for x, y, out in operands_of_experts:
            torch.mm(x, y, out=out)
        return {"product": d}

    return call


def triton(inputs: Mapping[str, Any], offsets: Any) -> Call:
    """The Triton kernel of the source tree."""
    kernel = dense_gemm.source_module(TRITON).grouped_gemm
    a, b = inputs["a"][..., 0], inputs["b"].permute(2, 0, 1)
    d = a.new_empty(a.shape[0], b.shape[1])
    return returning(functools.partial(kernel, a, b, offsets, d), {"product": d})


def quack(inputs: Mapping[str, Any], offsets: Any) -> Call:
    """QuACK's grouped GEMM."""
    a, b = inputs["a"][..., 0], inputs["b"].permute(2, 1, 0)
    d = a.new_empty(a.shape[0], b.shape[2])
    bounds = torch.cat([offsets.new_zeros(1), offsets])
    return gemm_peers.quack(a, b, d, "product", cu_seqlens_m=bounds)


def product_then_epilogue(
    api: type[ExpertsGemm], inputs: Mapping[str, Any], offsets: Any, outputs: Mapping[str, Any]
) -> Call:
    """PyTorch's grouped GEMM, whose output is rounded, then the epilogue in one compiled function."""
    untyped_api: Any = api
    op = untyped_api(**api.samples({**inputs, **outputs}), **api.pointer_options(inputs))
    operations = [o for o in op.operations() if not isinstance(o, epilogue.Scale)]
    results = {name: torch.full_like(x, api.spec(name).fill or 0.0) for name, x in outputs.items()}
    tensors = {name: api.canonicalize(name, x) for name, x in {**inputs, **results}.items() if name in api.parameters}
    tensors |= {name: getattr(op, name) for name in api.scalars}
    rows = torch.arange(inputs["a"].shape[0], dtype=torch.int64, device=offsets.device)
    groups = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
    grouped_mm = product(api, inputs, offsets)

    def rest(z: Any) -> None:
        evaluate(operations, z.float().unsqueeze(-1), tensors, groups)

    compiled: Callable[[Any], None] = torch.compile(rest, dynamic=False)

    def call() -> Mapping[str, Any]:
        compiled(grouped_mm()["product"])
        return results

    return call


def ours(api: type[ExpertsGemm], inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Call:
    """The API. Only its first call is checked: outputs that it accumulates into are not reset."""
    tensors = {**inputs, **outputs}
    untyped_api: Any = api
    op = untyped_api(**api.samples(tensors), **api.pointer_options(inputs))
    op.compile()
    run = functools.partial(op.execute, **{p: tensors.get(name) for name, p in api.parameters.items()})
    return returning(run, outputs)
