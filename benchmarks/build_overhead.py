"""Host time from the first call that describes a graph to its plan, compared with cuDNN's other Python frontend.

    python benchmarks/build_overhead.py --peer FOLDER [--rounds 3] [--csv FILE]

FOLDER holds the unpacked wheel of nvidia-cudnn-frontend 1.23.0, made for this Python. Both packages are imported as
``cudnn``, so each runs in separate processes that alternate. Graphs are built for the GPU or, without one, for a
described H200. The clock is the thread's CPU time, which other processes disturb less; each result is the minimum over
all builds. The first plan compiles a kernel, which takes longer than all other steps together. "to plan" is the sum
with that plan; "cached" is a whole build with a kernel cache that has the kernel (attention has none).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("describe", "validate", "operations", "heuristics", "check", "plan")
BUILDS, PLANS = 30, 2
BAR = 1.2


def matmul(graph: Any, cudnn: Any) -> None:
    """relu(A B + bias), fp16."""
    a = graph.tensor(dim=[4, 128, 256], stride=[128 * 256, 256, 1], name="a")
    b = graph.tensor(dim=[4, 256, 64], stride=[256 * 64, 64, 1], name="b")
    bias = graph.tensor(dim=[1, 128, 64], stride=[128 * 64, 64, 1], name="bias")
    shifted = graph.bias(name="shift", input=graph.matmul(name="mm", A=a, B=b), bias=bias)
    graph.relu(name="act", input=shifted).set_output(True)


def convolution(graph: Any, cudnn: Any) -> None:
    """3 x 3, channels last, fp16."""
    x = graph.tensor(dim=[8, 64, 56, 56], stride=[64 * 56 * 56, 1, 64 * 56, 64], name="x")
    w = graph.tensor(dim=[64, 64, 3, 3], stride=[64 * 9, 1, 64 * 3, 64], name="w")
    y = graph.conv_fprop(image=x, weight=w, padding=[1, 1], stride=[1, 1], dilation=[1, 1], name="conv")
    y.set_output(True)


def attention(graph: Any, cudnn: Any) -> None:
    """Causal, with statistics, fp16."""
    dims, strides = [2, 8, 1024, 64], [8 * 1024 * 64, 1024 * 64, 64, 1]
    q, k, v = (graph.tensor(dim=dims, stride=strides, name=name) for name in "qkv")
    o, stats = graph.sdpa(q=q, k=k, v=v, attn_scale=0.125, is_inference=False, use_causal_mask=True, name="sdpa")
    o.set_output(True).set_dim(dims).set_stride(strides)
    stats.set_output(True).set_data_type(cudnn.data_type.FLOAT)


PROBLEMS: dict[str, Callable[[Any, Any], None]] = {"matmul": matmul, "convolution": convolution, "attention": attention}


def work() -> None:
    """The process of one package: prints its figures in microseconds as JSON."""
    sys.path.append(str(ROOT / "test"))
    from support import driver

    driver.load_stub_driver()  # if no real driver is installed

    import cudnn

    options: dict[str, Any] = {"sm_version": 90}
    try:
        import torch

        on_gpu = torch.cuda.is_available()
    except ImportError:
        on_gpu = False
    if on_gpu:
        options = {"handle": cudnn.create_handle()}
    else:
        text = driver.device_json("h200", cudnn.backend_version())
        options["device_property"] = cudnn.create_device_properties(text)

    def new(**more: Any) -> Any:
        types = {"io_data_type": cudnn.data_type.HALF, "intermediate_data_type": cudnn.data_type.FLOAT}
        return cudnn.pygraph(compute_data_type=cudnn.data_type.FLOAT, **types, **options, **more)

    modes = [cudnn.heur_mode.A]
    best_times: dict[str, dict[str, float]] = {}
    for name, describe in PROBLEMS.items():
        best = dict.fromkeys(STEPS, float("inf"))
        for i in range(BUILDS):
            clock = [time.thread_time()]
            graph = new()
            describe(graph, cudnn)
            clock.append(time.thread_time())
            graph.validate()
            clock.append(time.thread_time())
            graph.build_operation_graph()
            clock.append(time.thread_time())
            graph.create_execution_plans(modes)
            clock.append(time.thread_time())
            graph.check_support()
            clock.append(time.thread_time())
            if i < PLANS:
                graph.build_plans()
                clock.append(time.thread_time())
            for step, start, end in zip(STEPS, clock, clock[1:], strict=False):
                best[step] = min(best[step], 1e6 * (end - start))
        best["to plan"] = sum(best.values())
        if name != "attention":
            cache = cudnn.create_kernel_cache()
            times: list[float] = []
            for _ in range(BUILDS):
                start = time.thread_time()
                graph = new(kernel_cache=cache)
                describe(graph, cudnn)
                graph.build(modes)
                times.append(1e6 * (time.thread_time() - start))
            best["cached"] = min(times)
        best_times[name] = best
    print(json.dumps({"version": f"{cudnn.__version__}, cuDNN {cudnn.backend_version()}", "found": best_times}))


def measure(paths: list[Path]) -> dict[str, Any]:
    """One process of one package."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, __file__, "--work"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of building graphs, against nvidia-cudnn-frontend.")
    parser.add_argument("--peer", type=Path, help="folder with the unpacked wheel of nvidia-cudnn-frontend 1.23.0")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each package (default: 3)")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work()
        return
    if arguments.peer and not (arguments.peer / "cudnn").is_dir():
        parser.error(f"--peer: {arguments.peer} holds no folder `cudnn`; unpack the wheel there.")
    packages = [[ROOT / "python", ROOT / "kernels"], *([[arguments.peer.resolve()]] if arguments.peer else [])]
    best: list[dict[str, Any]] = []
    for round_ in range(arguments.rounds):
        for i, paths in enumerate(packages):
            answer = measure(paths)
            if not round_:
                best.append(answer)
            for problem, figures in best[i]["found"].items():
                for step in figures:
                    figures[step] = min(figures[step], answer["found"][problem][step])
    print("ours", best[0]["version"], *(["; peer", best[1]["version"]] if arguments.peer else []))
    print(f"{'graph':14}{'step':12}{'ours, us':>12}{'peer, us':>12}{'ratio':>8}   bar {BAR} for `to plan` and `cached`")
    rows: list[tuple[Any, ...]] = []
    for problem, figures in best[0]["found"].items():
        for step, ours in figures.items():
            peer = best[1]["found"][problem][step] if arguments.peer else None
            rows.append((problem, step, round(ours, 1), peer and round(peer, 1), peer and round(ours / peer, 2)))
            peer_columns = "" if peer is None else f"{peer:12.1f}{ours / peer:8.2f}"
            print(f"{problem:14}{step:12}{ours:12.1f}{peer_columns}")
    if arguments.csv:
        with arguments.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("graph", "step", "ours_us", "peer_us", "ratio"), *rows])


if __name__ == "__main__":
    main()
