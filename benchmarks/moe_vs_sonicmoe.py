"""The MoE layer beside SonicMoE, in turns: two processes, each told in turn to run a pass for a while.

    python benchmarks/moe_vs_sonicmoe.py FOLDER [SECONDS] [SHAPE ...]

FOLDER has SonicMoE, its benchmark, and the CuTe DSL that it needs, as `cudnn bench moe --sonicmoe` takes it. SHAPE is
tokens,hidden,intermediate,experts,top_k, with `,zipf` for experts by Zipf's law; without, the three of `cudnn bench
moe`. SECONDS, 150, are those of the turns: SonicMoE compiles for more than a minute before.

Both have the same tokens, router and rule, a softmax of the chosen experts' logits, and weights from one distribution.
SonicMoE's benchmark runs first; its passes are kept, and so stay what it measures. When nothing else runs, its tuners
forget what they chose, and choose again. A pass has turns of 0.2 s, of which the last 60 per cent of the calls count,
by CUDA events; of the two, chance says which is first. A ratio is SonicMoE's time over ours, the median over the turns,
with the interval in which the median of 95 per cent of random draws with repetition lies.
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
TURN = 0.2
Passes = Mapping[str, Callable[[], Any]]


def sizes(shape: str) -> list[int]:
    """Tokens, hidden and intermediate size, experts, experts of a token."""
    return [int(x) for x in shape.split(",")[:5]]


def fill(shape: str, x: torch.Tensor, router: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Fills tensors with what both layers get. Returns how many times the mean the busiest expert has."""
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
    """Milliseconds of a call: the median of the last 60 per cent of those that fill the time."""
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
    """A call that begins without old gradients, so that none is added to another."""

    def call() -> None:
        for tensor in tensors:
            tensor.grad = None
        run()

    return call


def ours(shape: str) -> tuple[Passes, float]:
    """Passes of ``cudnn.nn.MoE``, and the busiest expert."""
    import cudnn

    tokens, *layer_sizes = sizes(shape)
    layer = cudnn.nn.MoE(*layer_sizes, renormalize=True, device="cuda")
    x = torch.empty(tokens, layer_sizes[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
    busiest = fill(shape, x, layer.router.weight, [layer.up, layer.down])
    gradient = torch.randn_like(x)
    both = without_gradients([x, *layer.parameters()], lambda: layer(x).backward(gradient))
    return {"forward": lambda: layer(x), "inference": torch.no_grad()(lambda: layer(x)), "both": both}, busiest


def sonicmoe(shape: str) -> tuple[Passes, float]:
    """Those of SonicMoE's benchmark, by what it times: with gradients, without, and both passes."""
    import triton.testing  # pyright: ignore[reportMissingImports]

    timed, kept = triton.testing.do_bench, []

    def keep(run: Callable[[], Any], *arguments: Any, **options: Any) -> Any:
        frame, files = sys._getframe(1), []
        while frame is not None and len(files) < 6:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        if any("autotun" in file for file in files):
            return timed(run, *arguments, **options)
        kept.append((run, torch.is_grad_enabled() and not torch.is_inference_mode_enabled()))
        return timed(run, **{**options, "warmup": 5, "rep": 10})

    triton.testing.do_bench = keep
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
    calls = [without_gradients(leaves, run if grad else torch.no_grad()(run)) for run, grad in kept]
    for forget in (o for o in gc.get_objects() if type(o).__name__ == "Autotuner" and hasattr(o, "cache")):
        forget.cache.clear()
    times = [measure(call, 0.1) for call in calls]
    found: dict[str, Callable[[], Any]] = {}
    for call, (_, grad), seconds in zip(calls, kept, times, strict=True):
        found.setdefault("inference" if not grad else "forward" if seconds < 2 * times[0] else "both", call)
    if "inference" not in found:
        found["inference"] = torch.no_grad()(found["forward"])
    return found, busiest[-1]


def serve(which: str, shape: str, address: str) -> None:
    """A process of one layer: makes it when told to, then times passes, until told to end."""
    with Client(address, "AF_UNIX") as line:
        line.recv()
        with contextlib.redirect_stdout(sys.stderr):
            passes, busiest = {"ours": ours, "sonicmoe": sonicmoe}[which](shape)
        line.send((list(passes), busiest))
        while (asked := line.recv()) is not None:
            line.send(measure(passes[asked], TURN))


def started(which: str, shape: str, folder: Path | None, spot: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of :func:`serve`, and the line to it. SonicMoE's has its own folder and packages."""
    environment = dict(os.environ)
    if folder is not None:
        paths = [folder, folder / "nvidia_cutlass_dsl" / "python_packages"]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUTE_DSL_ARCH": "sm_90a"}
        environment["TORCH_CUDA_ARCH_LIST"] = "9.0a"
    with Listener(spot, "AF_UNIX") as listener:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", which, shape, spot]
        process = subprocess.Popen(command, cwd=folder, env=environment)
        return process, listener.accept()


def interval(ratios: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Where the median of 95 per cent of random draws with repetition lies."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[draws // 40], medians[-1 - draws // 40]


def turns(which: str, lines: Sequence[Connection], seconds: float) -> list[tuple[float, float]]:
    """Times of SonicMoE and ours, turn by turn. The first turn does not count."""
    found, end = [], time.time() + seconds
    while len(found) < 6 or time.time() < end:
        times = {}
        for number in random.sample((0, 1), 2):
            lines[number].send(which)
            times[number] = lines[number].recv()
        found.append((times[0], times[1]))
    return found[1:]


def main() -> None:
    """The table, a line as soon as it is known."""
    folder, rest = Path(sys.argv[1]).resolve(), sys.argv[2:]
    seconds = float(rest.pop(0)) if rest and "," not in rest[0] else 150.0
    shapes = rest or SHAPES
    print("pass: SonicMoE, ours in ms; ratio [95 per cent] (least to greatest) of turns")
    for shape in shapes:
        with tempfile.TemporaryDirectory() as spot:
            layers = {
                which: started(which, shape, place, f"{spot}/{which}")
                for which, place in (("sonicmoe", folder), ("ours", None))
            }
            lines = [line for _, line in layers.values()]
            known = []
            for line in lines:  # one after the other, so that SonicMoE's tuners measure alone
                line.send("make")
                known.append(line.recv())
            print(f"{shape}, the busiest expert {known[1][1]:.1f} times the mean", flush=True)
            for which in PASSES:
                found = turns(which, lines, seconds / len(shapes) / len(PASSES))
                ratios = [a / b for a, b in found]
                low, high = interval(ratios)
                theirs, own = (statistics.median(times) for times in zip(*found, strict=True))
                print(
                    f"  {which}: {theirs:.3f}, {own:.3f}; {statistics.median(ratios):.3f} [{low:.3f} to {high:.3f}] "
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
