"""The MoE layer compared with SonicMoE: two processes that run each pass alternately.

    python benchmarks/moe_vs_sonicmoe.py FOLDER --tune [SHAPE ...]
    python benchmarks/moe_vs_sonicmoe.py FOLDER [--seconds 150] [--save benchmarks/results] [SHAPE ...]

FOLDER holds the unpacked wheels of sonic-moe 0.1.2.post1, quack-kernels 0.3.11 and nvidia-cutlass-dsl 4.4.2, which
need another version of the CuTe DSL than this library. SHAPE is tokens,hidden,intermediate,experts,top_k, with
``,zipf`` for a Zipf distribution over experts; default: the three shapes of ``cudnn bench moe``.

SonicMoE's autotuner compiles six GEMMs in about 30 configurations each, which takes several minutes for a shape.
``--tune`` does only that. The autotuner keeps its results in ``~/.quack``, so a second call measures at once; a call
that is interrupted continues where it stopped.

Both layers have the same tokens, router and top-k rule (a softmax of the selected experts' logits), and weights from
one distribution. A pass runs in slices of 0.2 s; CUDA events time the last 60 percent of the calls. The order of the
two layers is random. A ratio is SonicMoE's time divided by ours: the median over the slices, with a 95 percent
bootstrap confidence interval. ``--save`` replaces ``moe_sonicmoe.csv`` in a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import torch

SHAPES = ("32768,2048,768,128,8", "32768,4096,1024,128,8", "32768,4096,256,128,8")
PASSES = ("forward", "both", "inference")
OPERATIONS = {"forward": 6.0, "both": 18.0, "inference": 6.0}
"""Floating-point operations of the GEMMs, in units of tokens x hidden x intermediate x top-k."""
LAYERS = ("SonicMoE", "MoE")
SECONDS_PER_RUN = 0.2
COMPILE_WORKERS = "8"
Passes = Mapping[str, Callable[[], Any]]


class Layer(NamedTuple):
    """A layer in its process: version of its package, relative load of the busiest expert, peak GB of both passes."""

    version: str
    busiest: float
    memory: float


def sizes(shape: str) -> list[int]:
    """Tokens, hidden and intermediate size, experts, top-k."""
    return [int(x) for x in shape.split(",")[:5]]


def fill(shape: str, x: torch.Tensor, router: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """Fills the tensors of a layer. Returns the load of the busiest expert, relative to the mean."""
    generator = torch.Generator(x.device).manual_seed(7)
    tokens = torch.randn(sizes(shape)[:2], generator=generator, device=x.device)
    rows = torch.randn(router.shape, generator=generator, device=x.device) * router.shape[1] ** -0.5
    if shape.endswith("zipf"):
        tokens[:, 0], rows = 1.0, rows * 1.28  # about the deviation of Gumbel's distribution, which would be exact
        rows[:, 0] = -torch.arange(1, len(rows) + 1, device=x.device).log()
    x.data.copy_(tokens.view(x.shape))
    router.data.copy_(rows)
    for weight in weights:
        for chunk in weight.data.flatten(0, -2).split(8192):
            chunk.copy_(torch.randn(chunk.shape, generator=generator, device=x.device) * 0.02)
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


def passes(forward: Callable[[bool], Any], leaves: Sequence[Any], gradient: torch.Tensor) -> Passes:
    """The passes of a layer; ``forward`` takes whether no gradients are needed. Gradients are not accumulated."""

    def both() -> None:
        for tensor in leaves:
            tensor.grad = None
        forward(False).backward(gradient)

    def inference() -> None:
        with torch.no_grad():
            forward(True)

    return {"forward": lambda: forward(False), "both": both, "inference": inference}


def ours(shape: str) -> tuple[Passes, str, float]:
    """Passes of ``cudnn.nn.MoE``, its version, and the relative load of the busiest expert."""
    import cudnn

    tokens, *layer_sizes = sizes(shape)
    layer = cudnn.nn.MoE(*layer_sizes, renormalize=True, device="cuda")
    x = torch.empty(tokens, layer_sizes[0], device="cuda", dtype=torch.bfloat16).requires_grad_()
    busiest = fill(shape, x, layer.router.weight, [layer.up, layer.down])
    return passes(lambda _: layer(x), [x, *layer.parameters()], torch.randn_like(x)), cudnn.__version__, busiest


def sonicmoe(shape: str) -> tuple[Passes, str, float]:
    """Passes of SonicMoE, its version, and the relative load of the busiest expert."""
    from sonicmoe import MoE, moe_TC_softmax_topk_layer  # pyright: ignore[reportMissingImports]
    from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]

    tokens, hidden, inner, experts, top_k = sizes(shape)
    swiglu = ActivationType.SWIGLU
    layer = MoE(
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        intermediate_size=inner,
        activation_function=swiglu,
        add_bias=False,
        std=0.02,
    ).to(device="cuda", dtype=torch.bfloat16)
    x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    up, down = layer.c_fc.weight, layer.c_proj.weight
    busiest = fill(shape, x, layer.router.weight, [up, down])

    def forward(is_inference: bool) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        weights = (up.permute(1, 2, 0), None, down.permute(1, 2, 0), None)
        return moe_TC_softmax_topk_layer(x, layer.router.weight, *weights, top_k, stream, swiglu, is_inference)[0]

    version = importlib.metadata.version("sonic-moe")
    return passes(forward, [x, *layer.parameters()], torch.randn_like(x)), version, busiest


def serve(which: str, shape: str, address: str) -> None:
    """Main loop of a layer's process: creates the layer on request, then times passes until it receives None."""
    with Client(address, "AF_UNIX") as connection:
        connection.recv()
        with contextlib.redirect_stdout(sys.stderr):
            calls, version, busiest = {"MoE": ours, "SonicMoE": sonicmoe}[which](shape)
            for call in calls.values():
                call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        calls["both"]()
        connection.send(Layer(version, busiest, (torch.cuda.max_memory_allocated() - before) * 1e-9))
        while (pass_ := connection.recv()) is not None:
            connection.send(measure(calls[pass_], SECONDS_PER_RUN))


def start_worker(
    which: str, shape: str, folder: Path | None, address: str
) -> tuple[subprocess.Popen[bytes], Connection]:
    """A process of :func:`serve`, and the connection to it. SonicMoE's has its own folder and packages."""
    environment = dict(os.environ)
    if folder is not None:
        paths = [folder, folder / "nvidia_cutlass_dsl" / "python_packages", os.environ.get("PYTHONPATH", "")]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUTE_DSL_ARCH": "sm_90a"}
        environment |= {"TORCH_CUDA_ARCH_LIST": "9.0a", "QUACK_PRINT_AUTOTUNING": "1"}
        environment.setdefault("QUACK_COMPILE_WORKERS", COMPILE_WORKERS)
    with Listener(address, "AF_UNIX") as listener:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", which, shape, address]
        process = subprocess.Popen(command, env=environment)
        listener._listener._socket.settimeout(120)  # a process that ends early does not connect
        return process, listener.accept()


def interval(ratios: Sequence[float], samples: int = 2000) -> tuple[float, float]:
    """The 95 percent bootstrap confidence interval of the median."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[samples // 40], medians[-1 - samples // 40]


def interleave(which: str, connections: Sequence[Any], seconds: float) -> list[tuple[float, float]]:
    """Times of SonicMoE and ours per slice. The first slice is a warm-up."""
    slices, end = [], time.time() + seconds
    while len(slices) < 6 or time.time() < end:
        times = {}
        for index in random.sample((0, 1), 2):
            connections[index].send(which)
            times[index] = connections[index].recv()
        slices.append((times[0], times[1]))
    return slices[1:]


def rows_of(shape: str, which: str, slices: Sequence[tuple[float, float]], layers: Sequence[Layer]) -> list[Any]:
    """The two rows of a pass, as ``cudnn bench`` has them."""
    from cudnn.bench import Ratio, Row

    tokens, hidden, inner, _, top_k = sizes(shape)
    low, high = interval([a / b for a, b in slices])
    ratio = Ratio(statistics.median(a / b for a, b in slices), low, high)
    label = f"{'x'.join(map(str, sizes(shape)))} {'Zipf ' * shape.endswith('zipf')}{which}"
    rows = []
    for index, name in enumerate(LAYERS):
        times = [each[index] * 1e3 for each in slices]
        memory = layers[index].memory * 1e9 if which == "both" else float("nan")
        flops = OPERATIONS[which] * tokens * hidden * inner * top_k
        row = Row(label, name, statistics.median(times), (ratio if index else None,), flops, ours=bool(index))
        quartiles = statistics.quantiles(times, n=4)
        rows.append(replace(row, spread=(quartiles[2] - quartiles[0]) / 2, memory=memory))
    return rows


def write(path: Path, commit: str, rows: Sequence[Any], layers: Sequence[Layer]) -> None:
    """Replaces the result file."""
    from cudnn.bench import results
    from cudnn.cli.info import driver_version

    run = results.this_run(driver_version(), commit)
    version = {name: layer.version for name, layer in zip(LAYERS, layers, strict=True)}
    lines = results.results(run, "moe_sonicmoe", "bf16", LAYERS[:1], rows)
    results.write(path, [replace(line, peer_version=version[line.peer]) for line in lines])


def compare(shape: str, folder: Path, seconds: float) -> tuple[list[Any], list[Layer]]:
    """Measures and prints the passes of a shape."""
    rows = []
    with tempfile.TemporaryDirectory() as spot:
        workers = [
            start_worker(which, shape, folder_, f"{spot}/{which}")
            for which, folder_ in zip(LAYERS, (folder, None), strict=True)
        ]
        connections, layers = [connection for _, connection in workers], list[Layer]()
        for connection in connections:  # one after the other, so that SonicMoE's tuner measures alone
            connection.send("make")
            layers.append(connection.recv())
        print(f"{shape}, the busiest expert {layers[1].busiest:.1f} times the mean", flush=True)
        for which in PASSES:
            slices = interleave(which, connections, seconds / len(PASSES))
            theirs, our = rows_of(shape, which, slices, layers)
            rows += [theirs, our]
            ratio = our.ratios[0]
            print(
                f"  {which}: {theirs.microseconds * 1e-3:.3f}, {our.microseconds * 1e-3:.3f} ms; "
                f"{ratio.median:.3f} [{ratio.low:.3f} to {ratio.high:.3f}] of {len(slices)}",
                flush=True,
            )
        for process, connection in workers:
            connection.send(None)
            process.wait(60)
    return rows, layers


def tune(shape: str, folder: Path) -> None:
    """Creates SonicMoE's layer and runs each pass once."""
    start = time.time()
    with tempfile.TemporaryDirectory() as spot:
        process, connection = start_worker(LAYERS[0], shape, folder, f"{spot}/tune")
        connection.send("make")
        layer = connection.recv()
        connection.send(None)
        process.wait(60)
    print(f"{shape}: SonicMoE {layer.version} tuned in {time.time() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the unpacked wheels of SonicMoE")
    parser.add_argument("shapes", nargs="*", default=SHAPES, metavar="SHAPE")
    parser.add_argument("--tune", action="store_true", help="only run SonicMoE's autotuner")
    parser.add_argument("--seconds", type=float, default=150.0, help="time of the measurement (default: 150)")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="replace moe_sonicmoe.csv in this folder")
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    arguments = parser.parse_intermixed_args()
    folder = arguments.folder.resolve()
    if not (folder / "sonicmoe").is_dir():
        parser.error(f"FOLDER: {folder} holds no folder `sonicmoe`; unpack the wheels there.")
    if arguments.tune:
        for shape in arguments.shapes:
            tune(shape, folder)
        return
    commit = arguments.commit
    if arguments.save is not None:
        from cudnn.bench import results

        commit = commit or results.source_commit()
        if not commit:
            parser.error("--commit: got nothing; needed where the package does not run from a git clone.")
    rows: list[Any] = []
    print("pass: SonicMoE, ours; ratio [95 percent interval] of slices")
    for shape in arguments.shapes:
        new_rows, layers = compare(shape, folder, arguments.seconds / len(arguments.shapes))
        rows += new_rows
        if arguments.save is not None:  # after each shape: an interrupted run keeps its figures
            write(arguments.save / "moe_sonicmoe.csv", commit, rows, layers)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(*sys.argv[2:5])
    else:
        main()
