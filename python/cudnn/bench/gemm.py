"""Shapes, peers and checks that the benchmarks of fused GEMMs share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cudnn.bench import GPU, HOST, QUICK, Benchmark, Candidate, Options, Problem, gemm_peers, returning
from cudnn.bench.operands import BITS, Operands, batched, blank, normal, operands
from cudnn.gemm.formats import BLOCKWISE_DTYPE, BLOCKWISE_SIZE, name_of
from cudnn.lazy import torch
from cudnn.runtime import launch

DIMENSIONS = {"M": 1, "N": 64, "K": 64}
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096), (16384, 4096, 7168))
QUICK_SHAPES = ((8192, 8192, 8192), (8192, 28672, 4096), (4096, 4096, 4096))
MODELS = {
    "Llama 3 8B": (4096, 14336),
    "Llama 3 70B": (8192, 28672),
    "Qwen3 8B": (4096, 12288),
    "Qwen3 32B": (5120, 25600),
    "DeepSeek-V3": (7168, 18432),
}
"""Hidden size and intermediate size of the dense FFN."""
TOKENS = (4096, 8192)
CHOSEN = (("Llama 3 8B", 4096), ("Qwen3 32B", 4096), ("DeepSeek-V3", 4096))
"""Models and tokens that are measured without ``--all``."""
HOST_SIZE = 256
COPY_BYTES = 1 << 30
CUBLAS = "cuBLAS"
_KERNELS: Mapping[str, str] = {"sm_90a": "cudnn_kernels.sm90.gemm:Gemm"}

Extras = dict[str, Any]
Results = Mapping[str, Any]


@dataclass(frozen=True)
class Fused:
    """A fused API for the benchmark.

    ``formula(z, extras, out)`` is the activation: results by name, computed in float32, rounded to ``out``.
    ``prepare(operands, extras, keep)`` returns a call of the API and ``extras(operands, m, n)`` its other inputs;
    without ``keep`` the pre-activation is not stored. The API moves A, B and ``matrices`` 16-bit matrices of the size
    of the output. ``peers`` are other fused kernels. ``host`` are more calls of the API, timed on the host only.
    """

    name: str
    activation: str
    formula: Callable[[Any, Extras, Any], dict[str, Any]]
    prepare: Callable[[Operands, Extras, bool], Callable[[], Results]]
    extras: Callable[[Operands, int, int], Extras] = lambda o, m, n: {}
    preact: str = ""  # name of the pre-activation, if the API stores it
    optional: str = ""  # the same name, if storing it is optional
    gated: bool = False
    matrices: float = 1.0
    scaled: bool = True
    peers: Mapping[str, Callable[[Operands, bool], Callable[[], Results]]] = field(default_factory=dict)
    host: Mapping[str, Callable[[], Callable[[], Any]]] = field(default_factory=dict)

    @property
    def cublas(self) -> str:
        """Name of the candidate that runs cuBLAS, then the compiled activation."""
        return f"{CUBLAS} + {self.activation}"


def benchmark(fused: Fused) -> Benchmark:
    """The benchmark of a fused API."""
    return Benchmark(
        title=f"GEMM + {fused.activation}",
        yardsticks=(CUBLAS, fused.cublas),
        dtypes=tuple(BITS),
        dimensions=DIMENSIONS,
        problems=functools.partial(problems, fused),
        optional=fused.optional,
        quick=QUICK_SHAPES,
    )


def labelled(options: Options, gated: bool) -> dict[tuple[int, ...], str]:
    """Labels (the names of models) by shape."""
    if options.shapes:
        return dict.fromkeys(options.shapes, "")
    labels: dict[tuple[int, ...], str] = dict.fromkeys(SHAPES, "")
    pairs = [(model, tokens) for model in MODELS for tokens in TOKENS]
    for model, tokens in pairs if options.all else CHOSEN:
        hidden, ffn = MODELS[model]
        labels.setdefault((tokens, 2 * ffn if gated else ffn, hidden), model)
    return labels


def problems(fused: Fused, options: Options) -> list[Problem]:
    """The GEMMs, the device copy that the roofline needs, and the host time of calls."""
    result, clock = [], QUICK if options.quick else GPU
    for (m, n, k), label in labelled(options, fused.gated).items():
        size = (m * k + n * k) * BITS[options.dtype] / 8 + 2 * m * n * fused.matrices
        make = functools.partial(candidates, fused, options, m, n, k)
        result.append(Problem(f"{m}x{n}x{k} {label}".strip(), make, 2.0 * m * n * k, size, clock))
    result.append(Problem("device copy", copy_candidates, bytes=2.0 * COPY_BYTES, clock=clock))
    result.append(Problem("host time, warm", functools.partial(host_candidates, fused, options), clock=HOST))
    return result


def candidates(fused: Fused, options: Options, m: int, n: int, k: int) -> list[Candidate]:
    """cuBLAS and our GEMM without epilogue; cuBLAS then the compiled activation, the fused API, and its other peers."""
    torch._dynamo.reset()
    o = operands(options.dtype, m, n, k, fused.scaled)
    extras = fused.extras(o, m, n)
    z = o.accumulator()
    product = {"z": z}
    preact = {fused.preact: z} if fused.preact else {}
    activated = fused.formula(z, extras, torch.float32)
    limit = 2 * torch.finfo(o.out).eps

    def candidate(name: str, prepare: Any, expected: Results, ours: bool = False, bound: float = limit) -> Candidate:
        return Candidate(name, prepare, functools.partial(wrong, expected, bound), ours)

    matmul = cublas(o)
    matmul_then_activation = functools.partial(compiled, fused, matmul, extras, o.out)
    result = [
        candidate(CUBLAS, lambda: matmul, product),
        candidate("our GEMM alone", lambda: plain(o, m, n, k), product, ours=True),
        candidate(
            fused.cublas, matmul_then_activation, {**activated, **preact}, bound=2 * limit
        ),  # cuBLAS rounds its output
        candidate(fused.name, lambda: fused.prepare(o, extras, True), {**activated, **preact}, ours=True),
    ]
    if options.dtype == "fp8_128":
        result.insert(1, candidate("torch._scaled_mm, blocks", lambda: cublas_blocks(o), product))
        peer = candidate(gemm_peers.DEEP_GEMM, lambda: deep_gemm(o), product)
        result.insert(2, replace(peer, package=gemm_peers.DEEP_GEMM_PACKAGE))
    if options.dtype in ("bf16", "fp16"):
        peer = candidate(gemm_peers.QUACK, lambda: quack(o), product)
        result.insert(1, replace(peer, package=gemm_peers.QUACK_PACKAGE))
    if options.dtype == "fp8":  # the fp8 accumulator has fewer bits than float32: errors of a few per cent
        result.insert(1, candidate("cuBLAS, fast accumulation", lambda: cublas(o, fast=True), product, bound=8 * limit))
    for name, prepare in fused.peers.items():
        peer = candidate(name, functools.partial(prepare, o, True), {**activated, **preact})
        result.append(replace(peer, package="triton"))
    if options.without_optional:
        call = functools.partial(fused.prepare, o, extras, False)
        result.append(candidate(f"{fused.name}, no {fused.optional}", call, activated, ours=True))
        for name, prepare in fused.peers.items():
            peer = candidate(f"{name}, no {fused.optional}", functools.partial(prepare, o, False), activated)
            result.append(replace(peer, package="triton"))
    return result


def wrong(expected: Results, limit: float, results: Results) -> str:
    """Checks results. Errors are relative to the reference plus its root mean square. Returns a message, or ``""``."""
    for name, reference in expected.items():
        result = results[name].float().reshape(reference.shape)
        error = float(((result - reference).abs() / (reference.abs() + reference.square().mean().sqrt())).max())
        if not error <= limit:
            return f"wrong result: {name} is off by {error:.2g}, at most {limit:.2g} is right"
    return ""


def cublas(o: Operands, fast: bool = False) -> Callable[[], dict[str, Any]]:
    """cuBLAS's GEMM in the peers' type."""
    a, b = o.a.plain, o.peer_b.t()
    if a.dtype == torch.float8_e4m3fn:
        one, alpha = (torch.tensor(scale, dtype=torch.float32, device=a.device) for scale in (1.0, o.peer_alpha))
        return lambda: {"z": torch._scaled_mm(a, b, one, alpha, out_dtype=o.out, use_fast_accum=fast)}
    z = blank(a.shape[0], b.shape[1], o.out)
    return lambda: {"z": torch.matmul(a, b, out=z)}


def cublas_blocks(o: Operands) -> Callable[[], dict[str, Any]]:
    """PyTorch's GEMM with fp32 blockwise scales."""
    a, b, sfa, sfb = (x[..., 0] for x in (o.a.tensor, o.b.tensor, o.a.scale, o.b.scale * o.alpha))
    return lambda: {"z": torch._scaled_mm(a, b.t(), sfa, sfb.t(), out_dtype=o.out)}


def quack(o: Operands) -> Callable[[], Results]:
    """QuACK's GEMM in the peers' type."""
    a, b = o.a.plain, o.peer_b.t()
    return gemm_peers.quack(a, b, blank(a.shape[0], b.shape[1], o.out), "z", alpha=o.peer_alpha)


def deep_gemm(o: Operands) -> Callable[[], Results]:
    """DeepGEMM with fp32 blockwise scales."""
    a, b, sfa, sfb = (x[..., 0] for x in (o.a.tensor, o.b.tensor, o.a.scale, o.b.scale * o.alpha))
    return gemm_peers.deep_gemm(a, sfa, b, sfb, blank(a.shape[0], b.shape[0], o.out), "z")


def compiled(
    fused: Fused, matmul: Callable[[], dict[str, Any]], extras: Extras, out: Any
) -> Callable[[], dict[str, Any]]:
    """cuBLAS, then the activation by torch.compile. cuBLAS's output is the pre-activation."""
    formula = fused.formula
    activation = torch.compile(lambda z: formula(z, extras, out), dynamic=False)

    def call() -> dict[str, Any]:
        z = matmul()["z"]
        return {**activation(z), fused.preact: z}

    return call


def plain(o: Operands, m: int, n: int, k: int) -> Callable[[], Results]:
    """Our kernel in the peers' type. The epilogue stores the tile, after scaling by alpha where it is not 1.

    fp32 blockwise scales are applied to the accumulators in the main loop.
    """
    from cudnn_kernels.architecture import ARCHITECTURES
    from cudnn_kernels.epilogue import Scale, StoreTile
    from cudnn_kernels.gemm.problem import BlockScale, GemmProblem, Operand
    from cudnn_kernels.schedule import Dense

    blockwise = o.vector == BLOCKWISE_SIZE
    a, b = (o.a.tensor, o.b.tensor) if blockwise else (batched(o.a.plain), batched(o.peer_b))
    alpha = o.alpha if blockwise else o.peer_alpha
    dtype_name, out = (name_of(dtype) for dtype in (a.dtype, o.out))
    scale = () if alpha == 1.0 else (alpha,)
    epilogue = (*(Scale() for _ in scale), StoreTile("z", out))
    operands = [
        Operand(dtype_name, "k", BlockScale(BLOCKWISE_DTYPE, BLOCKWISE_SIZE, rows) if blockwise else None)
        for rows in (1, BLOCKWISE_SIZE)
    ]
    problem = GemmProblem(operands[0], operands[1], epilogue, Dense(), n, k)
    configuration = ARCHITECTURES["sm_90a"].configure(problem)
    device = torch.cuda.current_device()
    arch = launch.device_architecture(device)
    kernel = launch.kernel(launch.pick(_KERNELS, arch, "cudnn bench"), configuration, arch)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    z = blank(m, n, o.out)
    values = {"a": a, "b": b, "sfa": o.a.scale, "sfb": o.b.scale, "alpha": alpha, "z": batched(z)}
    values |= {"num_sms": multiprocessors, "stream": launch.raw_stream(None, device)}
    arguments = [values[slot.name] for slot in configuration.slots()]
    return returning(functools.partial(kernel, *arguments), {"z": z})


def executed(api: Any, tensors: Mapping[str, Any], results: Results) -> Callable[[], Results]:
    """Compiles an API. The call executes it with ``tensors`` and a preallocated workspace."""
    api.check_support()
    api.compile()
    size = api.workspace_size()
    workspace = torch.empty(size, dtype=torch.uint8, device=tensors["a_tensor"].device) if size else None
    run = functools.partial(api.execute, **tensors, workspace_tensor=workspace)
    return returning(run, results)


def copy_candidates() -> list[Candidate]:
    """A device copy: bytes read plus bytes written give the bandwidth of the roofline."""
    source = normal(COPY_BYTES // 4)
    target = torch.full_like(source, float("nan"))
    check = functools.partial(wrong, {"copy": source}, 0.0)
    return [Candidate("device copy", lambda: lambda: {"copy": target.copy_(source)}, check)]


def host_candidates(fused: Fused, options: Options) -> list[Candidate]:
    """The API and calls of PyTorch, unchecked, at a size where the host takes longer than the GPU."""
    o = operands(options.dtype, HOST_SIZE, HOST_SIZE, HOST_SIZE, fused.scaled)
    x = normal(HOST_SIZE, HOST_SIZE).bfloat16()
    y = torch.empty_like(x)
    extras = fused.extras(o, HOST_SIZE, HOST_SIZE)
    ours = {f"{fused.name}.execute": functools.partial(fused.prepare, o, extras, True), **fused.host}
    return [
        Candidate("torch.add(out=)", lambda: lambda: {"": torch.add(x, x, out=y)}),
        Candidate("torch.matmul(out=)", lambda: lambda: {"": torch.matmul(x, x, out=y)}),
        *(Candidate(name, prepare, ours=True) for name, prepare in ours.items()),
    ]
