"""``cudnn demo``: builds and runs real graphs and fused kernels, and checks each against PyTorch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import cudnn
from cudnn import demo_cases
from cudnn.cli import progress
from cudnn.fused.warm import architectures
from cudnn.lazy import torch
from cudnn.runtime import launch


@dataclass
class Case:
    """A graph, not yet built, with its tensors and the same computation in PyTorch.

    ``formula`` takes the inputs in the order of ``inputs``. On float32 copies it computes the expected result; on the
    inputs themselves it shows the error of the half-precision type.
    """

    name: str
    graph: Any
    inputs: dict[Any, Any]  # graph tensor: torch tensor
    output: Any  # graph tensor
    formula: Callable[..., Any]


@dataclass
class Result:
    """Result of a case or a kernel. ``error`` and ``tolerance``: the largest absolute difference, and its bound."""

    name: str
    where: str
    plan: str = ""
    error: float = float("nan")
    tolerance: float = 0.0
    seconds: float = 0.0
    failure: str = ""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.tolerance


def convolution(handle: Any, device: str) -> Case:
    """3 x 3 convolution, channels last."""

    def channels_last(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.float16, device=device).to(memory_format=torch.channels_last)

    x, w = channels_last(8, 64, 28, 28), channels_last(128, 64, 3, 3) / 24
    graph = _graph(handle, torch.float16)
    image, weight = graph.tensor_like(x), graph.tensor_like(w)
    y = graph.conv_fprop(image, weight, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv")
    y.set_output(True)
    return Case(
        "convolution 3x3", graph, {image: x, weight: w}, y, lambda x, w: torch.nn.functional.conv2d(x, w, padding=1)
    )


def matmul_bias_gelu(handle: Any, device: str) -> Case:
    """Matrix product with bias and GELU."""
    a = torch.randn(4, 256, 512, dtype=torch.float16, device=device)
    b = torch.randn(4, 512, 256, dtype=torch.float16, device=device) / 512**0.5
    d = torch.randn(1, 1, 256, dtype=torch.float16, device=device)
    graph = _graph(handle, torch.float16)
    ta, tb, td = graph.tensor_like(a), graph.tensor_like(b), graph.tensor_like(d)
    product = graph.matmul(ta, tb, name="matmul")
    y = graph.gelu(graph.bias(product, td, name="bias"), name="gelu")
    y.set_output(True)
    return Case(
        "matmul + bias + gelu",
        graph,
        {ta: a, tb: b, td: d},
        y,
        lambda a, b, d: torch.nn.functional.gelu(torch.matmul(a, b) + d),
    )


def rmsnorm(handle: Any, device: str) -> Case:
    """RMSNorm over the hidden dimension of a batch of tokens."""
    tokens, hidden = 2048, 1024
    x = torch.randn(tokens, hidden, 1, 1, dtype=torch.bfloat16, device=device)
    scale = torch.rand(1, hidden, 1, 1, dtype=torch.float32, device=device) + 0.5
    epsilon = torch.full((1, 1, 1, 1), 1e-5, dtype=torch.float32, device="cpu")  # in host memory: passed by value
    graph = _graph(handle, torch.bfloat16)
    tx, tscale, tepsilon = graph.tensor_like(x), graph.tensor_like(scale), graph.tensor_like(epsilon)
    y, _ = graph.rmsnorm(cudnn.norm_forward_phase.INFERENCE, tx, tscale, epsilon=tepsilon, name="rmsnorm")
    y.set_output(True)

    def formula(x: Any, scale: Any, epsilon: Any) -> Any:
        weight = scale.flatten().to(x.dtype)
        return torch.nn.functional.rms_norm(x.flatten(1), (hidden,), weight, float(epsilon)).view(x.shape)

    return Case("RMSNorm", graph, {tx: x, tscale: scale, tepsilon: epsilon}, y, formula)


def causal_attention(handle: Any, device: str) -> Case:
    """Scaled dot-product attention with a causal mask."""
    shape = (2, 8, 512, 64)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    graph = _graph(handle, torch.bfloat16)
    tq, tk, tv = (graph.tensor_like(tensor) for tensor in (q, k, v))
    o, _ = graph.sdpa(
        tq, tk, tv, attn_scale=shape[-1] ** -0.5, use_causal_mask=True, generate_stats=False, name="attention"
    )
    o.set_output(True).set_dim(shape).set_stride(q.stride())
    attention = torch.nn.functional.scaled_dot_product_attention
    return Case("causal attention", graph, {tq: q, tk: k, tv: v}, o, lambda q, k, v: attention(q, k, v, is_causal=True))


CASES = (convolution, matmul_bias_gelu, rmsnorm, causal_attention)
KERNELS = ("rmsnorm_rht_amax", "gemm_swiglu")
"""Names in ``demo_cases.PROGRAMS``."""
_ALLOWED = (
    "Allowed for a graph: twice the error of PyTorch in the same type, and a unit in the last place. For a fused "
    "kernel: half a unit in the last place of the element shown, the one nearest to its bound. A kernel rounds each "
    "result once, so of thousands of elements some come within 1 or 2 % of that."
)
"""Explains the column ``allowed``."""


def check(make: Callable[[Any, str], Case], handle: Any, device: str) -> Result:
    """Builds, runs and checks one case. An error becomes part of the result, so that the other cases still run."""
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    result = Result(make.__name__.replace("_", " "), where)
    try:
        case = make(handle, device)
        result.name = case.name
        graph = case.graph
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        result.plan = graph.get_plan_name()
        out = torch.full_like(case.formula(*case.inputs.values()), float("nan"))
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device=device)
        tensors = {**case.inputs, case.output: out}
        result.seconds = _time(lambda: graph.execute(tensors, workspace, handle=handle), device)
        result.error, result.tolerance = _compare(case, out)
    except Exception as error:  # the table shows any error
        result.failure = f"{type(error).__name__}: {error}"
    return result


def check_kernel(name: str, arch: str) -> Result:
    """Runs and checks a fused API: on the GPU or, if ``arch`` is set, in the emulator, which also detects races."""
    program = demo_cases.find(name)
    result = Result(program.title, f"emulated {arch}" if arch else torch.cuda.get_device_name(), "CuTe DSL")
    try:
        problem = program.make(program.shape, "cpu" if arch else "cuda")
        if arch:
            with cudnn.emulation(arch, races=True) as report:
                results = problem.call()
            result.seconds = sum(launched.seconds for launched in report.launches)
        else:
            results = problem.call()
            result.seconds = _time(problem.call, "cuda")
        comparisons = problem.compare(results)
        worst = next((comparison for comparison in comparisons if not comparison.passed), comparisons[0])
        result.error, result.tolerance = worst.error, worst.allowed
    except Exception as error:  # the table shows any error
        result.failure = f"{type(error).__name__}: {error}"
    return result


def run(device: str) -> int:
    """Runs every case on ``"cuda"``, ``"cpu"`` or ``"auto"`` and prints the table. Returns the exit code.

    The fused kernels run on the GPU, or in the emulator if they do not support it or ``device`` is ``"cpu"``.
    """
    console = Console(highlight=False)
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        console.print("--device cuda: PyTorch sees no GPU. To fix it, see `cudnn info`, or use --device cpu.")
        return 1
    chosen = ("cuda" if has_gpu else "cpu") if device == "auto" else device
    on_gpu = chosen == "cuda" and launch.device_architecture(torch.cuda.current_device()) in architectures()
    torch.manual_seed(0)
    handle = cudnn.create_handle() if chosen == "cuda" or not has_gpu else None
    graphs: list[Result] = []
    kernels: list[Result] = []
    runs = [(name, arch) for name in KERNELS for arch in ([""] if on_gpu else architectures())]
    with progress.shown("building and running graphs", len(CASES) + len(runs)) as steps:
        for make in CASES:
            graphs.append(check(make, handle, chosen))
            steps.advance()
        for name, arch in runs:
            steps.doing = f"{name}, emulated {arch}" if arch else name
            kernels.append(check_kernel(name, arch))
            steps.advance()
    console.print(_table(graphs + kernels))
    console.print(_ALLOWED)
    for result in graphs + kernels:
        if result.failure:
            console.print(f"[bold red]{result.name}[/]: ", end="")
            console.print(result.failure, soft_wrap=True, markup=False)
    passed = [sum(result.passed for result in results) for results in (graphs, kernels)]
    console.print(f"{passed[0]} of {len(graphs)} graphs agree with PyTorch in float32.")
    console.print(f"{passed[1]} of {len(kernels)} runs of fused kernels agree with their references in PyTorch.")
    if not on_gpu and passed[1] == len(kernels):
        console.print(
            f"Those ran as compiled for {' and '.join(architectures())}, in an emulator that found no data race; "
            f"its times say nothing about a GPU. More: cudnn emulate {KERNELS[0]}"
        )
    return 0 if passed == [len(graphs), len(kernels)] else 1


def _graph(handle: Any, io: Any) -> Any:
    return cudnn.pygraph(
        handle=handle, io_data_type=io, intermediate_data_type=torch.float32, compute_data_type=torch.float32
    )


def _compare(case: Case, out: Any) -> tuple[float, float]:
    """Largest error against float32, and the largest allowed: twice PyTorch's in the output type, plus its rounding."""
    expected = case.formula(*(tensor.float() for tensor in case.inputs.values()))
    plain = case.formula(*case.inputs.values())
    rounding = torch.finfo(out.dtype).eps * expected.abs().max().item()
    error = (out.float() - expected).abs().max().item()
    return error, 2 * (plain.float() - expected).abs().max().item() + rounding


def _time(call: Callable[[], None], device: str) -> float:
    """Median seconds of one call, after a first one that does not count."""
    call()
    if device == "cpu":
        return statistics.median(_seconds(call) for _ in range(3))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds: list[float] = []
    for _ in range(20):
        start.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _table(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("graph or kernel", no_wrap=True)
    table.add_column("ran on", overflow="fold")
    table.add_column("plan", overflow="fold", min_width=10)  # names of cuDNN's plans are long
    for heading in ("max error", "allowed", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for result in results:
        figures = (f"{result.error:.1e}", f"{result.tolerance:.1e}", _duration(result.seconds))
        verdict = "[green]ok[/]" if result.passed else "[bold red]failed[/]"
        table.add_row(result.name, result.where, result.plan, *(("", "", "") if result.failure else figures), verdict)
    return table


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
