"""Benchmark of the gated MLP, and of each of its GEMMs, forward and backward.

The yardstick is Llama's MLP in PyTorch, compiled: three linear layers. ``python -m cudnn.bench.gated_mlp`` measures
Llama 3's sizes on this GPU in about a minute, and ``python -m cudnn.bench.gated_mlp gemms`` each GEMM.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from cudnn.bench import GPU, Benchmark, Call, Candidate, Options, Problem, measure, off_by_norm, operands
from cudnn.lazy import torch

NAME = "gated_mlp"
PEER = "PyTorch"
MERGED = "PyTorch, one gate_up"
OURS = "GatedMLP"
CUBLAS = "cuBLAS"
SHAPES: dict[tuple[int, ...], str] = {(8192, 4096, 14336): "Llama 3 8B", (8192, 8192, 28672): "Llama 3 70B"}
CLOCK = replace(GPU, rounds=12)
TOLERANCE = 0.02  # of the norm: both results are rounded several times
TILES = {
    "our kernel": (),
    "256 x 128, shared A": (("tile", (256, 128)), ("epi_tile_n", 64), ("cluster", (1, 2))),
    "128 x 192, ping-pong": (("tile", (128, 192)), ("epi_tile_n", 64), ("cluster", (2, 1)), ("pingpong", True)),
}
"""Configurations of our kernel: the library's own choice first."""


def benchmark() -> Benchmark:
    """The benchmark: a shape is tokens, hidden and intermediate size."""
    return Benchmark(
        title="Gated MLP",
        yardsticks=(PEER,),
        dtypes=("bf16",),
        dimensions={"T": 1, "H": 64, "I": 32},
        problems=problems,
        quick=(next(iter(SHAPES)),),
    )


def problems(options: Options) -> list[Problem]:
    """Training and inference passes of each shape."""
    shapes = options.shapes or tuple(SHAPES)
    return [whole(shape, which) for shape in shapes for which in ("forward + backward", "forward, inference")]


def whole(shape: tuple[int, ...], which: str) -> Problem:
    """The layer. TFLOP/s counts the GEMMs: 6 T H I forward, twice that backward."""
    tokens, hidden, inner = shape
    flops = 6.0 * tokens * hidden * inner * (3 if "backward" in which else 1)
    label = f"{'x'.join(map(str, shape))} {SHAPES.get(shape, '')} {which}"
    return Problem(label, functools.partial(candidates, shape, which), flops, memory=True)


def separate(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """Llama's MLP in PyTorch."""
    linear = torch.nn.functional.linear
    return linear(torch.nn.functional.silu(linear(x, gate)) * linear(x, up), down)


def merged(x: Any, gate_up: Any, down: Any) -> Any:
    """The same with one weight for gate and up."""
    linear = torch.nn.functional.linear
    gate, up = linear(x, gate_up).chunk(2, -1)
    return linear(torch.nn.functional.silu(gate) * up, down)


def candidates(shape: tuple[int, ...], which: str) -> list[Candidate]:
    """PyTorch's; ours with weights in one tensor, interleaved, and apart."""
    from cudnn.gated_mlp.operator import gated_mlp

    torch.compiler.reset()
    tokens, hidden, _ = shape
    leaves = [each.requires_grad_() for each in tensors(shape)]
    x, gate_up, down = leaves
    dy = operands.normal(tokens, hidden).bfloat16()
    gate, up = (each.detach().requires_grad_() for each in gate_up.detach().chunk(2))
    pair, blocks = [x, gate, up, down], [x, interleaved(gate_up.detach()).requires_grad_(), down]
    compiled, compiled_merged = (torch.compile(each, dynamic=False) for each in (separate, merged))
    expected = passes(lambda: merged(*leaves), leaves, dy, which)()

    def candidate(name: str, run: Callable[[], Any], inputs: list[Any]) -> Candidate:
        def check(results: Mapping[str, Any]) -> str:
            if len(expected) == 1:
                return off_by_norm(expected, results, TOLERANCE)
            dgate_up = torch.cat([results[name] for name in results if name.startswith("gate_up")])
            dgate_up = concatenated(dgate_up) if inputs is blocks else dgate_up
            return off_by_norm(expected, {**results, "gate_up0": dgate_up}, TOLERANCE)

        call = passes(run, inputs, dy, which)
        return Candidate(name, lambda: call, check, name.startswith(OURS))

    return [
        candidate(PEER, lambda: compiled(*pair), pair),
        candidate(MERGED, lambda: compiled_merged(*leaves), leaves),
        candidate(OURS, lambda: gated_mlp(*leaves), leaves),
        candidate(f"{OURS}, interleaved", lambda: gated_mlp(*blocks, glu_layout="interleaved"), blocks),
        candidate(f"{OURS}, gate and up apart", lambda: gated_mlp(x, (gate, up), down), pair),
    ]


def tensors(shape: tuple[int, ...]) -> list[Any]:
    """x, gate_up and down."""
    tokens, hidden, inner = shape
    x, gate_up = operands.normal(tokens, hidden), operands.normal(2 * inner, hidden) * hidden**-0.5
    return [each.bfloat16() for each in (x, gate_up, operands.normal(hidden, inner) * inner**-0.5)]


def interleaved(gate_up: Any) -> Any:
    """Rows of gate and up in alternating blocks of 32."""
    return gate_up.unflatten(0, (2, -1, 32)).transpose(0, 1).flatten(0, 2)


def concatenated(gate_up: Any) -> Any:
    """The inverse of :func:`interleaved`."""
    return gate_up.unflatten(0, (-1, 2, 32)).transpose(0, 1).flatten(0, 2)


def passes(run: Callable[[], Any], inputs: list[Any], gradient: Any, which: str) -> Call:
    """A call of the passes: its results are y, or y and the gradients of x, gate_up and down."""
    gate_up = [f"gate_up{i}" for i in range(len(inputs) - 2)]

    def train() -> Mapping[str, Any]:
        y = run()
        gradients = torch.autograd.grad(y, inputs, gradient)
        return dict(zip(["y", "x", *gate_up, "down"], [y.detach(), *gradients], strict=True))

    def infer() -> Mapping[str, Any]:
        with torch.no_grad():
            return {"y": run()}

    return train if "backward" in which else infer


# Each GEMM.


def gemm_problems(shape: tuple[int, ...]) -> list[Problem]:
    """Each GEMM of the layer by cuBLAS and by our kernels."""
    tokens, hidden, inner = shape
    flops = 2.0 * tokens * hidden * inner
    counts = {"up GEMM + SwiGLU": 2, "down": 1, "down^T + dSwiGLU": 1, "ddown": 1, "dx": 2, "dgate_up": 2}
    counts |= {"ddown into main_grad": 1, "dgate_up into main_grad": 2}
    size = "x".join(map(str, shape))
    return [
        Problem(f"{size} {name}", functools.partial(gemm_candidates, shape, name), flops * count)
        for name, count in counts.items()
    ]


def gemm_candidates(shape: tuple[int, ...], name: str) -> list[Candidate]:
    """The candidates of one GEMM."""
    torch.compiler.reset()
    tokens, hidden, inner = shape
    x, gate_up, down = tensors(shape)
    if name.startswith("up"):
        return _up(x, gate_up)
    dy, preact = (operands.normal(tokens, columns).bfloat16() for columns in (hidden, 2 * inner))
    if name.startswith("down^T"):
        return _dact(dy, preact, down)
    act = preact[:, :inner].contiguous()
    factors = {"down": (act, down), "dx": (preact, gate_up.T), "ddown": (dy.T, act.T), "dgate_up": (preact.T, x.T)}
    a, b = factors[name.split()[0]]
    return _accumulated(a, b) if "main_grad" in name else _plain(a, b)


def _plain(a: Any, b: Any) -> list[Candidate]:
    from cudnn.fused import plain_gemm

    out = operands.blank(a.shape[0], b.shape[0], a.dtype)
    expected = {"y": a @ b.T}

    def ours(choice: Any) -> Mapping[str, Any]:
        plain_gemm.run(a, b, out, False, choice)
        return {"y": out}

    check = functools.partial(off_by_norm, expected, tolerance=TOLERANCE)
    cublas = Candidate(CUBLAS, lambda: lambda: {"y": torch.mm(a, b.T, out=out)}, check)
    tiles = [Candidate(n, lambda c=c: functools.partial(ours, c), check, True) for n, c in TILES.items()]
    return [cublas, *tiles]


def _accumulated(a: Any, b: Any) -> list[Candidate]:
    from cudnn.fused import plain_gemm

    shape = (a.shape[0], b.shape[0])
    buffers = [torch.zeros(shape, dtype=torch.float32, device=a.device) for _ in range(2 + len(TILES))]
    expected = {"y": a.float() @ b.float().T}

    def rounded() -> Mapping[str, Any]:
        return {"y": buffers[0].add_(a @ b.T)}

    def wide() -> Mapping[str, Any]:
        return {"y": buffers[1].add_(torch.mm(a, b.T, out_dtype=torch.float32))}

    def ours(buffer: Any, choice: Any) -> Mapping[str, Any]:
        plain_gemm.run(a, b, buffer, True, choice)
        return {"y": buffer}

    check = functools.partial(off_by_norm, expected, tolerance=TOLERANCE)
    return [
        Candidate(CUBLAS, lambda: rounded, check),
        Candidate("cuBLAS, float32 result", lambda: wide, check),
        *(
            Candidate(name, lambda c=choice, y=buffer: functools.partial(ours, y, c), check, True)
            for (name, choice), buffer in zip(TILES.items(), buffers[2:], strict=True)
        ),
    ]


def _up(x: Any, gate_up: Any) -> list[Candidate]:
    from cudnn.gated_mlp import layer

    @functools.partial(torch.compile, dynamic=False)
    def activate(h: Any) -> Any:
        gate, up = h.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).bfloat16()

    tokens, rows = x.shape[0], gate_up.shape[0]
    h, act = operands.blank(tokens, rows, x.dtype), operands.blank(tokens, rows // 2, x.dtype)
    blocks, down = interleaved(gate_up), act.new_empty(x.shape[1], rows // 2)
    reference = x @ gate_up.T
    expected = {"act": activate(reference)}
    check = functools.partial(off_by_norm, expected, tolerance=TOLERANCE)

    def peer() -> Mapping[str, Any]:
        torch.mm(x, gate_up.T, out=h)
        return {"act": activate(h)}

    def ours(weight: Any, layout: str, saves: bool) -> Call:
        w = layer.Weights([weight], down, None, None, "swiglu", [1.0, 1.702, 7.0, -7.0], layout)
        saved = h if saves else None
        return lambda: (layer.up_gemm(x, w, saved, act), {"act": act})[1]

    return [
        Candidate(CUBLAS, lambda: peer, check),
        Candidate("concatenated", lambda: ours(gate_up, "concatenated", True), check, True),
        Candidate("interleaved", lambda: ours(blocks, "interleaved", True), check, True),
        Candidate("concatenated, inference", lambda: ours(gate_up, "concatenated", False), check, True),
        Candidate("interleaved, inference", lambda: ours(blocks, "interleaved", False), check, True),
    ]


def _dact(dy: Any, preact: Any, down: Any) -> list[Candidate]:
    from cudnn.gated_mlp import layer

    @functools.partial(torch.compile, dynamic=False)
    def differentiate(dact: Any, h: Any) -> Any:
        gate, up = h.float().chunk(2, -1)
        sigmoid, d = gate.sigmoid(), dact.float()
        dgate, dup = d * up * sigmoid * (1 + gate * (1 - sigmoid)), d * gate * sigmoid
        return torch.cat([dgate, dup], -1).bfloat16(), (gate * sigmoid * up).bfloat16()

    tokens, inner = dy.shape[0], down.shape[1]
    dact, act = (operands.blank(tokens, inner, dy.dtype) for _ in range(2))
    results: dict[str, Any] = dict(zip(("dh", "act"), differentiate(dy @ down, preact), strict=True))
    check = functools.partial(off_by_norm, results, tolerance=TOLERANCE)
    dh, gate_up = torch.empty_like(preact), dy.new_empty(2 * inner, dy.shape[1])

    def peer() -> Mapping[str, Any]:
        torch.mm(dy, down, out=dact)
        return dict(zip(("dh", "act"), differentiate(dact, preact), strict=True))

    def ours(h: Any, layout: str, activation: Any) -> Call:
        w = layer.Weights([gate_up], down, None, None, "swiglu", [1.0, 1.702, 7.0, -7.0], layout)
        return lambda: (layer.dact_gemm(dy, h, w, dh, activation), {"dh": dh, "act": act})[1]

    def joined(results_: Mapping[str, Any]) -> str:
        h, y = (results_[name].unflatten(1, (-1, 32)) for name in ("dh", "act"))
        return check({"dh": h.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1), "act": y.flatten(1)})

    blocks = preact.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1).contiguous()
    return [
        Candidate(CUBLAS, lambda: peer, check),
        Candidate("concatenated", lambda: ours(preact, "concatenated", act), check, True),
        Candidate("interleaved", lambda: ours(blocks, "interleaved", act), joined, True),
        Candidate("concatenated, no act", lambda: ours(preact, "concatenated", None), check, True),
    ]


def main() -> None:
    """Measures the layers or, with the argument "gemms", each GEMM at the first size; with "gemms 2", at the second."""
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, CUDA {torch.version.cuda}", flush=True)
    shapes, start = list(SHAPES), time.perf_counter()
    if sys.argv[1:2] == ["gemms"]:
        yardstick, chosen = CUBLAS, gemm_problems(shapes[sys.argv[2:] == ["2"]])
        _compile_in_parallel(chosen)
    else:
        yardstick = PEER
        chosen = [whole(shapes[0], "forward + backward"), whole(shapes[1], "forward + backward")]
        chosen.append(whole(shapes[0], "forward, inference"))
    for problem in chosen:
        for row in measure(replace(problem, clock=CLOCK), (yardstick,)):
            (ratio,) = row.ratios or (None,)
            words = "" if ratio is None else f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
            memory = f"{row.memory * 1e-9:.2f} GB" if row.memory == row.memory else ""
            text = row.refused or f"{row.microseconds:9.1f} us {row.rate:>7s}  {words}  {memory}"
            print(f"{problem.label:48s} {row.name:30s} {text}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


def _compile_in_parallel(chosen: list[Problem]) -> None:
    """Fills the cache of compiled kernels by processes of their own: in one, the DSL compiles one at a time."""
    device = torch.cuda.current_device()
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_prepare, [problem.candidates for problem in chosen], [device] * len(chosen)))


def _prepare(make: Callable[[], list[Candidate]], device: int) -> None:
    torch.cuda.set_device(device)
    for candidate in make():
        if candidate.ours and candidate.prepare is not None:
            candidate.prepare()()


if __name__ == "__main__":
    main()
