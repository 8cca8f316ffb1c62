"""Benchmarks of the grouped fused GEMMs, on the layers of published mixtures of experts.

The yardstick is PyTorch's grouped product of the same tokens, which does nothing of the epilogue; the others are a
cuBLAS call for each expert, whose sizes the host must know, a Triton kernel, QuACK's where it is installed, and
PyTorch's product followed by the epilogue in torch.compile.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cudnn.bench import GPU, HOST, Benchmark, Call, Candidate, Options, Problem, declared, operands, returning
from cudnn.demo_cases import grouped
from cudnn.fused.grouped import ExpertsGemm
from cudnn.gemm.reference import evaluate
from cudnn.lazy import torch
from cudnn_kernels import epilogue

PRODUCT = "torch._grouped_mm"
FOLLOWED = "torch._grouped_mm + epilogue, compiled"
TRITON = "benchmarks/triton_grouped_gemm.py"
SMALL = (256, 128, 128, 2)
QUACK = (
    {"tile_m": 128, "tile_n": 192, "pingpong": True},
    {"tile_m": 128, "tile_n": 256, "pingpong": False},
    {"tile_m": 256, "tile_n": 192, "pingpong": False},
)
"""Tiles of QuACK's for Hopper; without them it would compile some thirty."""
ROUTINGS = ("uniform", "zipf")
MODELS = {
    "Mixtral 8x22B": (8, 2, 6144, 16384),
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-235B-A22B": (128, 8, 4096, 1536),
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
"""Experts, experts of a token, hidden and intermediate size: from the models' published configurations."""
TOKENS = (8192,)
ALL_TOKENS = tuple(1024 << i for i in range(8))


def benchmark(api: type[ExpertsGemm]) -> Benchmark:
    """The benchmark of an API."""
    return Benchmark(
        title=api.title,
        yardsticks=(PRODUCT, FOLLOWED) if api.tokens == "m" else (PRODUCT,),
        dtypes=("bf16",),
        dimensions=dict(zip((name.upper() for name in api.example[0]), api.steps, strict=True)),
        problems=functools.partial(problems, api),
        routings=ROUTINGS,
    )


def shapes(api: type[ExpertsGemm], options: Options) -> dict[tuple[int, ...], str]:
    """The shapes to measure, and what they are."""
    if options.shapes:
        return dict.fromkeys(options.shapes, "")
    found = dict.fromkeys(api.shapes, "")
    for model, (experts, chosen, hidden, inner) in MODELS.items():
        for tokens in ALL_TOKENS if options.all else TOKENS:
            found[layer(api, tokens * chosen, hidden, inner, experts)] = f"{model}, {tokens} tokens"
    return found


def layer(api: type[ExpertsGemm], rows: int, hidden: int, inner: int, experts: int) -> tuple[int, ...]:
    """The API's own problem in a gated feed-forward layer: its up projection, or its down projection where the API has
    no activation, its backward pass or weight gradient.
    """
    if api.tokens == "k":
        return 2 * inner, hidden, rows, experts
    if api.result_columns(64) < 64:
        return rows, 2 * inner, hidden, experts
    activation = api.result_columns(64) > 64 or "relu" in api.folder()
    return (rows, inner, hidden, experts) if activation else (rows, hidden, inner, experts)


def problems(api: type[ExpertsGemm], options: Options) -> list[Problem]:
    """The shapes, and the host time of calls."""
    found = []
    for shape, label in shapes(api, options).items():
        m, n, k, _ = shape
        text = f"{'x'.join(map(str, shape))} {label} {options.routing}".replace("  ", " ")
        made = functools.partial(candidates, api, shape, options.routing)
        found.append(Problem(text, made, flops=2.0 * m * n * k))
    return [*found, Problem("host time, warm", lambda: candidates(api, SMALL)[:1], clock=HOST)]


def ends(routing: str, experts: int, tokens: int, rows: int = 1) -> list[int]:
    """Where experts end, at multiples of ``rows``: equal parts or, by Zipf's law, 1, 1/2, 1/3 ... of the largest, in an
    order at random.
    """
    parts = [1.0] * experts
    if routing == "zipf":
        seeded = torch.Generator("cpu").manual_seed(0)
        order = torch.randperm(experts, generator=seeded, dtype=torch.int64, device="cpu").tolist()
        parts = [1 / (1 + place) for place in order]
    total = sum(parts)
    return [round(tokens // rows * part / total) * rows for part in itertools.accumulate(parts)]


def candidates(api: type[ExpertsGemm], shape: tuple[int, ...], routing: str = ROUTINGS[0]) -> list[Candidate]:
    """Ours with its epilogue, and the peers."""
    given = grouped.inputs(api, shape, operands.DEVICE, generated_on=operands.DEVICE)
    (offsets,) = (given[spec.name] for spec in api.tensors if spec.init == "ends")
    stops = ends(routing, shape[3], shape["mnk".index(api.tokens)], api.group_rows)
    offsets.copy_(torch.tensor(stops, dtype=torch.int32, device="cpu"))
    made = api.allocated(given, api.pointer_options(given))
    exact = grouped.expected(api, given, made)

    def check(results: Mapping[str, Any], slack: float = grouped.SLACK) -> str:
        for name, want in exact.items():
            found = grouped.judge(name, results[name], want, slack)
            if not found.passed:
                return f"wrong result: {name} is off by {found.error:.2e}, at most {found.allowed:.2e} is right"
        return ""

    peers = {
        PRODUCT: functools.partial(product, api, given, offsets),
        "cuBLAS, expert by expert": functools.partial(one_by_one, api, given, stops),
    }
    if api.tokens == "m":
        peers["Triton"] = functools.partial(triton, given, offsets)
        if importlib.util.find_spec("quack"):
            peers["QuACK"] = functools.partial(quack, given, offsets)
    found = [Candidate(api.__name__, lambda: ours(api, given, made), check, ours=True)]
    found += [Candidate(name, peer, lambda results: alike(api, given, results)) for name, peer in peers.items()]
    if api.tokens == "m":
        rough = functools.partial(check, slack=0.02)  # the product is rounded before the epilogue
        found.append(Candidate(FOLLOWED, lambda: followed(api, given, offsets, made), rough))
    return found


def alike(api: type[ExpertsGemm], given: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """What is wrong with a peer's product: it is compared with PyTorch's."""
    (offsets,) = (given[spec.name] for spec in api.tensors if spec.init == "ends")
    want, found = product(api, given, offsets)()["product"].float(), results["product"].float()
    error, allowed = float((found - want).abs().max()), 0.02 * float(want.abs().max())
    return "" if error <= allowed else f"wrong result: product is off by {error:.2e}, at most {allowed:.2e} is right"


def product(api: type[ExpertsGemm], given: Mapping[str, Any], offsets: Any) -> Call:
    """PyTorch's grouped product."""
    a, b = given["a"][..., 0], given["b"].permute(2, 1, 0)
    right = b[0] if api.tokens == "k" else b
    return lambda: {"product": torch._grouped_mm(a, right, offs=offsets)}


def one_by_one(api: type[ExpertsGemm], given: Mapping[str, Any], stops: list[int]) -> Call:
    """A product of cuBLAS for each expert that has tokens."""
    a, b = given["a"][..., 0], given["b"].permute(2, 1, 0)
    spans = [(e, x, y) for e, (x, y) in enumerate(itertools.pairwise([0, *stops])) if y > x]
    if api.tokens == "k":
        d = torch.zeros(len(stops), a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
        parts = [(a[:, x:y], b[0][x:y], d[e]) for e, x, y in spans]
    else:
        d = a.new_empty(a.shape[0], b.shape[2])
        parts = [(a[x:y], b[e], d[x:y]) for e, x, y in spans]

    def call() -> Mapping[str, Any]:
        for x, y, out in parts:
            torch.mm(x, y, out=out)
        return {"product": d}

    return call


def triton(given: Mapping[str, Any], offsets: Any) -> Call:
    """A kernel of the source tree."""
    kernel = declared.source_module(TRITON).grouped_gemm
    a, b = given["a"][..., 0], given["b"].permute(2, 0, 1)
    d = a.new_empty(a.shape[0], b.shape[1])
    return returning(functools.partial(kernel, a, b, offsets, d), {"product": d})


def quack(given: Mapping[str, Any], offsets: Any) -> Call:
    """QuACK's kernel, with the fastest of a few tiles here: to compile all that it would try takes a minute."""
    interface = importlib.import_module("quack.gemm_interface")
    a, b = given["a"][..., 0], given["b"].permute(2, 1, 0)
    d = a.new_empty(a.shape[0], b.shape[2])
    bounds = torch.cat([offsets.new_zeros(1), offsets])
    base = interface.default_config(a.device)
    run = functools.partial(interface.gemm_tuned.fn, a, b, d, cu_seqlens_m=bounds)
    tiles = (replace(base, **changes) for changes in QUACK)
    found = [returning(functools.partial(run, config=config), {"product": d}) for config in tiles]
    for call in found:
        call()
    return min(found, key=lambda call: min(GPU.seconds(call, 2) for _ in range(3)))


def followed(api: type[ExpertsGemm], given: Mapping[str, Any], offsets: Any, made: Mapping[str, Any]) -> Call:
    """PyTorch's product, rounded, and what follows it in one compiled function."""
    of_any: Any = api
    object_ = of_any(**api.samples({**given, **made}), **api.pointer_options(given))
    operations = [o for o in object_.operations() if not isinstance(o, epilogue.Scale)]
    results = {name: torch.full_like(x, api.spec(name).fill or 0.0) for name, x in made.items()}
    tensors = {name: api.canonicalize(name, x) for name, x in {**given, **results}.items() if name in api.parameters}
    tensors |= {name: getattr(object_, name) for name in api.scalars}
    rows = torch.arange(given["a"].shape[0], dtype=torch.int64, device=offsets.device)
    groups = torch.searchsorted(offsets, rows, right=True).clamp(max=len(offsets) - 1)
    begin = product(api, given, offsets)

    def rest(z: Any) -> None:
        evaluate(operations, z.float().unsqueeze(-1), tensors, groups)

    compiled: Callable[[Any], None] = torch.compile(rest, dynamic=False)

    def call() -> Mapping[str, Any]:
        compiled(begin()["product"])
        return results

    return call


def ours(api: type[ExpertsGemm], given: Mapping[str, Any], made: Mapping[str, Any]) -> Call:
    """The API itself. What it raises or adds to is not filled anew: the first call alone is checked."""
    tensors = {**given, **made}
    any_: Any = api
    object_ = any_(**api.samples(tensors), **api.pointer_options(given))
    object_.compile()
    run = functools.partial(object_.execute, **{p: tensors.get(name) for name, p in api.parameters.items()})
    return returning(run, made)
