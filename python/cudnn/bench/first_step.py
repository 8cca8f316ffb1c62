"""The first training step of a mixture-of-experts layer in a new process: ``python -m cudnn.bench.first_step``.

Prints one line of JSON: the seconds of the layer's construction, of the forward and of the backward pass, and how many
kernels steps of other numbers of tokens compiled after it.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudnn import settings
from cudnn.bench import Call, Candidate, Clock
from cudnn.lazy import torch

SIZES = (2048, 768, 128, 8)
"""Hidden and intermediate size, experts and top_k of a layer of Qwen3-30B-A3B."""
TOKENS, MAX_TOKENS = 8192, 65536
PAUSE = 10.0
"""Seconds between construction and step, in which another program would load its data."""
COLD, SECOND = "cudnn.nn.MoE, empty kernel cache", "cudnn.nn.MoE, second process"
LATER = f"{COLD}, {PAUSE:.0f} s after construction"


def candidates() -> list[Candidate]:
    """The step of a process with an empty kernel cache, at once and after a pause, and that of a next process."""
    folder, other = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    cases = ((COLD, folder, 0.0), (SECOND, folder, 0.0), (LATER, other, PAUSE))
    return [Candidate(name, functools.partial(_measured, *case), ours=True) for name, *case in cases]


def _measured(folder: tempfile.TemporaryDirectory[str], pause: float) -> Call:
    """A call whose result is the time of a new process with this kernel cache."""
    figures = run(folder.name, pause=pause)
    return lambda: {"seconds": figures["forward"] + figures["backward"]}


def recorded_seconds(call: Callable[[], Any], calls: int) -> float:
    """The time that the result of a call says, not that of the call."""
    return call()["seconds"] * calls


RECORDED = Clock(recorded_seconds, rounds=1, burst=0.0, warm=0.0, summary=statistics.median)


def run(cache: str, others: int = 0, pause: float = 0.0) -> dict[str, float]:
    """The figures of a new process, which waits for ``pause`` seconds after it has constructed the layer, and takes
    steps of ``others`` further numbers of tokens.
    """
    command = [sys.executable, "-m", "cudnn.bench.first_step", str(others), str(pause)]
    environment = settings.environment_of_child(CUDNN_KERNEL_CACHE=cache)
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(process.stdout.splitlines()[-1])


def main(others: int = 0, pause: float = 0.0) -> None:
    """Takes the steps and prints their figures."""
    from cudnn.nn import MoE

    start = time.perf_counter()
    layer = MoE(*SIZES, renormalize=True, device="cuda")
    torch.cuda.synchronize()
    construction = time.perf_counter() - start
    time.sleep(pause)

    def step(tokens: int) -> tuple[float, float]:
        x = torch.randn(tokens, SIZES[0], dtype=torch.bfloat16, device="cuda").requires_grad_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        y = layer(x)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.autograd.grad(y, [x, *layer.parameters()], y)
        torch.cuda.synchronize()
        return middle - start, time.perf_counter() - middle

    forward, backward = step(TOKENS)
    files, counts = _cached_kernels(), random.Random(0)
    for _ in range(others):
        step(counts.randint(1, MAX_TOKENS))
    figures = {"construction": construction, "forward": forward, "backward": backward}
    print(json.dumps({**figures, "compiled": len(_cached_kernels() - files)}))


def _cached_kernels() -> set[Path]:
    return {*Path(settings.KERNEL_CACHE.get()).rglob("*.kernel")}


if __name__ == "__main__":
    others, *wait = sys.argv[1:]
    main(int(others), *map(float, wait))
