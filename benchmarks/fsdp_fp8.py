"""An fp8 MoE layer under FSDP2 over two GPUs: weights gathered in 16 bits, and in e4m3, about 20 s.

    python benchmarks/fsdp_fp8.py [--save benchmarks/results] [--small]

Two layers of Qwen3-30B-A3B's sizes with float32 weights, sharded over both GPUs by ``fully_shard``, train by SGD. First
both ways run the same steps: outputs, gradients of x and weights must be equal, bit by bit. Then the steps
of both ways run interleaved; the median over the rounds is shown, its spread is half the range. Memory is the peak of
what a step allocates, without parameters and what is kept between steps; bytes are all that a rank gathers in a step.

``--save`` replaces ``fsdp_fp8.csv`` in a folder. ``--small`` is for CPUs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.multiprocessing.spawn import spawn

import cudnn
from cudnn.bench import OURS_PACKAGE, order, results
from cudnn.cli.info import driver_version

RANKS, STEPS, ROUNDS, LAYERS, NAME = 2, 3, 8, 2, "fsdp_fp8"
FIGURES = {"time of a step": ("time", "ms", 1e3), "memory": ("memory", "GB", 1e-9), "gathered": ("bytes", "GB", 1e-9)}
BITS16, E4M3 = "gathered in 16 bits", "gathered in e4m3"
SIZES, SMALL = (8192, 2048, 768, 128, 8), (64, 128, 128, 4, 2)  # tokens of a rank, hidden, intermediate, experts, top-k
SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(way: str, sizes: tuple[int, ...]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The layers, sharded, and their optimizer."""
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE, (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"renormalize": True, "fp8": "blockwise", "dtype": torch.float32, "device": DEVICE}
    model = torch.nn.Sequential(*(cudnn.nn.MoE(*sizes[1:], **options) for _ in range(LAYERS)))
    for layer in list[Any](model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        if DEVICE == "cpu":
            layer.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
        if way == E4M3:
            layer.enable_fsdp_fp8_all_gather()
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)


def step(model: Any, optimizer: torch.optim.Optimizer, x: Any, dy: Any) -> list[torch.Tensor]:
    """Forward, backward and optimizer; returns y and the gradient of x."""
    x.grad = None
    y = model(x)
    y.backward(dy)
    optimizer.step()
    optimizer.zero_grad()
    gradient: Any = x.grad
    return [y.detach(), gradient.clone()]


def synchronize() -> None:
    dist.barrier()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and the bytes that it allocates at the most."""
    held = 0
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    synchronize()
    begin = time.perf_counter()
    call()
    synchronize()
    seconds = time.perf_counter() - begin
    return seconds, torch.cuda.max_memory_allocated() - held if DEVICE == "cuda" else 0.0


def run_rank(rank: int, store: str, sizes: tuple[int, ...], folder: str) -> None:
    """The process of one rank; rank 0 saves its figures."""
    address: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": RANKS}
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        address["device_id"] = torch.device("cuda", rank)
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", **address)
    torch.manual_seed(rank)
    x, dy = (torch.randn(sizes[0], sizes[1], device=DEVICE).bfloat16() for _ in range(2))
    x.requires_grad_()
    runs = {way: make(way, sizes) for way in (BITS16, E4M3)}

    gathered, gather = [0], DefaultAllGather.__call__

    def counted(self: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        gathered[0] += output_tensor.nbytes
        return gather(self, output_tensor, *args, **kwargs)

    figures: dict[tuple[str, str], list[float]] = {}
    for _ in range(STEPS):
        outputs = []
        for way, (model, optimizer) in runs.items():
            DefaultAllGather.__call__, gathered[0] = counted, 0
            y = step(model, optimizer, x, dy)
            DefaultAllGather.__call__ = gather
            figures[way, "gathered"] = [float(gathered[0])]
            outputs.append([*y, *(p._local_tensor for p in model.parameters())])  # pyright: ignore
        for index, (a, b) in enumerate(zip(*outputs, strict=True)):
            if not torch.equal(a, b):
                raise RuntimeError(f"rank {rank}: result {index} is not the same in both ways")
    for round_index in range(ROUNDS):
        for index in order(len(runs), round_index):
            way = list(runs)[index]
            seconds, memory = timed(lambda way=way: [step(*runs[way], x, dy) for _ in range(2)])
            figures.setdefault((way, "time of a step"), []).append(seconds / 2)
            figures.setdefault((way, "memory"), []).append(memory)
    dist.barrier()
    if rank == 0:
        torch.save(figures, Path(folder) / "figures.pt")
    dist.destroy_process_group()


def summary(figures: dict[tuple[str, str], list[float]]) -> list[tuple[str, str, str, float, str, float]]:
    """Case, way, metric, median, unit and half of the range."""
    rows = []
    for case, (metric, unit, scale) in FIGURES.items():
        for way in (BITS16, E4M3):
            values = [value * scale for value in figures[way, case]]
            rows.append((case, way, metric, statistics.median(values), unit, (max(values) - min(values)) / 2))
    return rows


def save(folder: Path, rows: list[tuple[str, str, str, float, str, float]], commit: str) -> None:
    """Replaces the result file."""
    run = results.this_run(driver_version(), commit)
    start = (
        run.hardware,
        run.driver,
        run.cuda,
        run.torch,
        run.commit,
        run.date,
        NAME,
        "fp8",
        "x".join(map(str, SIZES)),
    )
    version, lines = results.version_of(OURS_PACKAGE), []
    for case, way, metric, value, unit, spread in rows:
        figure = (metric, results.significant(value), unit, results.significant(spread))
        lines.append(results.Result(*start, case, way, version, 1, *figure))
    results.write(results.path_of(folder, NAME), lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FOLDER", help=f"replace {NAME}.csv in this folder")
    parser.add_argument("--commit", default="", help="the library's commit; default: that of its git clone")
    parser.add_argument("--small", action="store_true", help="sizes for CPUs")
    arguments = parser.parse_args()
    commit = arguments.commit or results.source_commit()
    if arguments.save is not None and not commit:
        parser.error("--commit: got nothing; needed where the package does not run from a git clone.")
    os.environ.update(SETTINGS)
    sizes = SMALL if arguments.small else SIZES
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (str(Path(folder) / "store"), sizes, folder), nprocs=RANKS)
        figures = torch.load(Path(folder) / "figures.pt")
    rows = summary(figures)
    print(f"a training step of {LAYERS} layers over {RANKS} ranks, sizes {sizes}; the same bits in both ways")
    print("| what | weights | | spread |\n|---|---|---:|---:|")
    for case, way, _, value, unit, spread in rows:
        print(f"| {case} | {way} | {value:.4g} {unit} | {spread:.2g} |")
    if arguments.save is not None:
        save(arguments.save, rows, commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
