"""The MoE layer compared with SonicMoE: two processes that run each pass alternately.

    python benchmarks/moe_vs_sonicmoe.py FOLDER [SECONDS] [SHAPE ...]

FOLDER holds SonicMoE, its benchmark, and its version of the CuTe DSL, like that of `cudnn bench moe --sonicmoe`. SHAPE
is tokens,hidden,intermediate,experts,top_k, with `,zipf` for a Zipf distribution over experts; default: the three
shapes of `cudnn bench moe`. SECONDS (150) is the measuring time; before it SonicMoE compiles for more than a minute.

Both layers have the same tokens, router and top-k rule (a softmax of the selected experts' logits), and weights from
one distribution. SonicMoE's benchmark runs first, and the passes that it times are recorded. Its autotuners are then
reset, so that they tune again while nothing else runs. A pass runs in slices of 0.2 s; CUDA events time the last 60
percent of the calls. The order of the two layers is random. A ratio is SonicMoE's time divided by ours: the median over
the slices, with a 95 percent bootstrap confidence interval.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch

SHAPES = ("32768,2048,768,128,8", "32768,4096,1024,128,8", "32768,4096,256,128,8")
PASSES = ("forward", "both", "inference")
SECONDS_PER_RUN = 0.2
Passes = Mapping[str, Callable[[], Any]]


def sizes(shape: str) -> list[int]:
    """Tokens, hidden and intermediate size, experts, top-k."""
    return [int(x) for x in shape.split(",")[:5]]


def fill(shape: str, x: torch.Tensor, router: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Fills the tensors of a layer. Returns the load of the busiest expert, relative to the mean."""
    draw = torch.Generator(x.device).manual_seed(7)
    tokens = torch.randn(sizes(shape)[:2], generator=draw, device=x.device)
    rows = torch.randn(router.shape, generator=draw, device=x.device) * router.shape[1] ** -0.5
    if shape.endswith("zipf"):
        tokens[:, 0], rows = 1.0, rows * 1.28  # about the deviation of Gumbel's distribution, which would be exact
        rows[:, 0] = -torch.arange(1, len(rows) + 1, device=x.device).log()
    x.data.copy_(tokens.view(x.shape))
    router.data.copy_(rows)
    for weight in weights:
        for part in weight.data.flatten(0, -2).split(8192):
            part.copy_(torch.randn(part.shape, generator=draw, device=x.device) * 0.02)
    counts = (x.view(tokens.shape) @ router.T).topk(sizes(shape)[4]).indices.flatten().bincount(minlength=len(router))
    return float(counts.max() / counts.float().mean())


def measure(run: Callable[[], Any], seconds: float) -> float:
    """Milliseconds of a call: the median over the last 60 percent of the calls in ``seconds``."""
    start = time.perf_counter()
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    count = max(6, int(seconds * 3 / (time.perf_counter() - start)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times[int(0.4 * count) :])


def without_gradients(tensors: Sequence[torch.Tensor], run: Callable[[], Any]) -> Callable[[], Any]:
    """A call that first resets the gradients, so that none are accumulated."""

    def call() -> None:
        for tensor in tensors:
            tensor.grad = None
        run()

    return call


def ours(shape: str) -> tuple[Passes, float]:
    """Passes of ``cudnn.nn.MoE``, and the relative load of the busiest expert."""
    import cudnn

    tokens, *layer_sizes = sizes(shape)
    layer = cudnn.nn.MoE(*layer_sizes, renormalize=True, device="cuda")
    x = torch.empty(tokens, layer_sizes[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
    busiest = fill(shape, x, layer.router.weight, [layer.up, layer.down])
    gradient = torch.randn_like(x)
    both = without_gradients([x, *layer.parameters()], lambda: layer(x).backward(gradient))
    return {"forward": lambda: layer(x), "inference": torch.no_grad()(lambda: layer(x)), "both": both}, busiest


def sonicmoe(shape: str) -> tuple[Passes, float]:
    """Passes that SonicMoE's benchmark times: forward with gradients, inference, and forward plus backward."""
    import triton.testing  # pyright: ignore[reportMissingImports]

    do_bench, recorded = triton.testing.do_bench, []

    def record(run: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        frame, files = sys._getframe(1), []
        while frame is not None and len(files) < 6:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if any("autotun" in file for file in files):
            return do_bench(run, *arguments, **options)
        recorded.append((run, torch.is_grad_enabled() and not torch.is_inference_mode_enabled()))
        return do_bench(run, **{**options, "warmup": 5, "rep": 10})

    triton.testing.do_bench = record
    sys.argv = ["bench/moe-cute.py", "--thiek", ",".join(map(str, sizes(shape))), "--skip_test"]
    sys.path[0] = "bench"
    runpy.run_path(sys.argv[0], run_name="__main__")
    tokens, hidden, inner, experts, _ = sizes(shape)
    known = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter) and o.device.type == "cuda"]
    parameters = [o for o in known if isinstance(o, torch.nn.Parameter)]
    plain = [o for o in known if type(o) is torch.Tensor and o.is_leaf and o.requires_grad]
    given = [o for o in plain if o.numel() == tokens * hidden]
    router = next(o for o in parameters if o.shape == (experts, hidden))
    weights = [o for o in parameters if o.numel() in (experts * hidden * inner, 2 * experts * hidden * inner)]
    busiest = [fill(shape, x, router, weights) for x in given]
    leaves = [*given, *parameters]
    calls = [without_gradients(leaves, run if grad else torch.no_grad()(run)) for run, grad in recorded]
    for forget in (o for o in gc.get_objects() if type(o).__name__ == "Autotuner" and hasattr(o, "cache")):
        forget.cache.clear()
    times = [measure(call, 0.1) for call in calls]
    passes: dict[str, Callable[[], Any]] = {}
    for call, (_, grad), seconds in zip(calls, recorded, times, strict=True):
        passes.setdefault("inference" if not grad else "forward" if seconds < 2 * times[0] else "both", call)
    if "inference" not in passes:
        passes["inference"] = torch.no_grad()(passes["forward"])
    return passes, busiest[-1]


def serve(which: str, shape: str, address: str) -> None:
    """Main loop of a layer's process: creates the layer on request, then times passes until it receives None."""
    with Client(address, "AF_UNIX") as connection:
        connection.recv()
        with contextlib.redirect_stdout(sys.stderr):
            passes, busiest = {"ours": ours, "sonicmoe": sonicmoe}[which](shape)
        connection.send((list(passes), busiest))
        while (pass_ := connection.recv()) is not None:
            connection.send(measure(passes[pass_], SECONDS_PER_RUN))


def start_worker(
    which: str, shape: str, folder: Path | None, address: str
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of :func:`serve`, and the line to it. SonicMoE's has its own folder and packages."""
    environment = dict(os.environ)
    if folder is not None:
        paths = [folder, folder / "nvidia_cutlass_dsl" / "python_packages"]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUTE_DSL_ARCH": "sm_90a"}
        environment["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    with Listener(address, "AF_UNIX") as listener:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", which, shape, address]
        process = subprocess.Popen(command, cwd=folder, env=environment)
        return process, listener.accept()


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 percent bootstrap confidence interval of the median."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-1 - draws // 40]


def interleave(which: str, connections: Sequence[Connection], seconds: float) -> list[tuple[float, float]]:
    """Times of SonicMoE and ours per slice. The first slice is a warm-up."""
    times_, end = [], time.time() + seconds
    while len(times_) < 6 or time.time() < end:
        times = {}
        for index in random.sample((0, 1), 2):
            connections[index].send(which)
            times[index] = connections[index].recv()
        times_.append((times[0], times[1]))
    return times_[1:]


def main() -> None:
    """Prints the table row by row."""
    folder, rest = Path(sys.argv[1]).resolve(), sys.argv[2:]
    seconds = float(rest.pop(0)) if rest and "," not in rest[0] else 150.0
    shapes = rest or SHAPES
    print("pass: SonicMoE, ours in ms; ratio [95 percent interval] (minimum to maximum) of slices")
    for shape in shapes:
        with tempfile.TemporaryDirectory() as spot:
            layers = {
                which: start_worker(which, shape, folder_, f"{spot}/{which}")
                for which, folder_ in (("sonicmoe", folder), ("ours", None))
            }
            connections = [line for _, line in layers.values()]
            descriptions = []
            for line in connections:  # one after the other, so that SonicMoE's tuners measure alone
                line.send("make")
                descriptions.append(line.recv())
            print(f"{shape}, the busiest expert {descriptions[1][1]:.1f} times the mean", flush=True)
            for which in PASSES:
                times_ = interleave(which, connections, seconds / len(shapes) / len(PASSES))
                ratios = [a / b for a, b in times_]
                low, high = interval(ratios)
                sonicmoe_ms, ours_ms = (statistics.median(times) for times in zip(*times_, strict=True))
                print(
                    f"  {which}: {sonicmoe_ms:.3f}, {ours_ms:.3f}; {statistics.median(ratios):.3f} "
                    f"[{low:.3f} to {high:.3f}] "
                    f"({min(ratios):.3f} to {max(ratios):.3f}) of {len(ratios)}",
                    flush=True,
                )
            for process, line in layers.values():
                line.send(None)
                process.wait(60)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:5])
    else:
        main()
