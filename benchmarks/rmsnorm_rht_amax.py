"""Finds the fastest configuration of RMSNorm + Hadamard + amax on this GPU, and times loading a compiled kernel.

    python benchmarks/rmsnorm_rht_amax.py

Times every configuration and a copy of the same bytes, and checks the results. `cudnn bench rmsnorm_rht_amax` measures
the API with its default configuration.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from cudnn.bench.rmsnorm_rht_amax import EPS, SHAPES, errors, tensors

from cudnn.bench import GPU, compare, ratio
from cudnn.rmsnorm_rht_amax.api import _KERNELS
from cudnn.runtime import launch
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
from cudnn_kernels.pipeline.shared_memory import SHARED_MEMORY

MORE_SHAPES = ((65536, 2048), (16384, 7168), (8192, 16384), (4096, 32768))


def configurations(n: int) -> Iterator[RmsNormRhtAmaxConfiguration]:
    """Configurations to try."""
    for columns, teams, stages in itertools.product((128, 64, 32), (1, 2, 4, 8), (2, 3, 4)):
        c = RmsNormRhtAmaxConfiguration("bfloat16", n, max(32, n // columns // 32 * 32), teams, stages)
        if c.threads * teams <= 1024 and c.shared_memory <= SHARED_MEMORY:
            yield c


def tune(m: int, n: int) -> None:
    """Prints the speed of every configuration relative to the copy, best first."""
    x, w, o, amax = tensors(m, n)
    target, stream = torch.empty_like(x), torch.cuda.current_stream().cuda_stream
    arguments = (x, w, o, amax, EPS, stream)
    calls: list[Callable[[], Any]] = [lambda: target.copy_(x)]
    labels = []
    for c in dict.fromkeys(configurations(n)):
        run = functools.partial(launch.kernel(_KERNELS["sm_90a"], c, launch.device_architecture(0)), *arguments)
        o.fill_(float("nan"))
        run()
        error_o, error_amax = errors(x, w, o, amax)
        right = error_o < 0.51 and error_amax < 1e-5
        wrong = "" if right else f"  WRONG by {error_o:.2f} units, amax {error_amax:.1e}"
        calls.append(run)
        labels.append((f"threads {c.threads:4d} teams {c.teams:2d} stages {c.stages}", wrong))
    copy, *times = compare(calls, GPU)
    seconds = GPU.summary(copy)
    print(f"\n{m} x {n}, bfloat16: copy {seconds * 1e6:.1f} us, {4e-12 * m * n / seconds:.2f} TB/s")
    measured = zip(labels, times, strict=True)
    rows = [(ratio(copy, own_times).median, GPU.summary(own_times) * 1e6, *label) for label, own_times in measured]
    for speed, microseconds, label, wrong in sorted(rows, reverse=True):
        print(f"   {speed:.3f}  {label}  {microseconds:8.1f} us{wrong}")


RELOAD = """
import time, torch, cudnn
x = torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16)
norm = cudnn.RmsNormRhtAmax(x, x[0], x, torch.empty(8, device="cuda"), rows_per_cta=8)
norm.check_support()
start = time.perf_counter()
norm.compile()
print(f"new process: compile() takes {(time.perf_counter() - start) * 1e3:.1f} ms")
"""


def main() -> None:
    """Runs all of it."""
    print(torch.cuda.get_device_name(), torch.__version__)
    for _ in range(3):
        subprocess.run([sys.executable, "-c", RELOAD], check=True, env=os.environ)
    for m, n in SHAPES + MORE_SHAPES:
        tune(m, n)


if __name__ == "__main__":
    main()
