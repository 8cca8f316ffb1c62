"""Peers of the MoE layer: PyTorch, transformers, and SonicMoE in a separate process."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudnn.lazy import torch

_SECONDS = 240  # it compiles for more than a minute
_HOPPER = {"CUTE_DSL_ARCH": "sm_90a", "TORCH_CUDA_ARCH_LIST": "9.0a"}
_SCRIPT = """
import runpy, sys, torch
sys.path[0], sys.argv = "bench", sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("\\npeak bytes", torch.cuda.max_memory_allocated(), flush=True)
"""


GroupedProduct = Callable[[Any, Any, Any], Any]
"""Takes rows (R, k), weights (E, n, k) and the end row of each expert."""


def plain(
    grouped_product: GroupedProduct, top_k: int, x: Any, up: Any, down: Any, router: Any, indices: Any = None
) -> Any:
    """The layer in PyTorch. ``up`` interleaves blocks of 32 gate and 32 up rows. ``indices`` replaces the router's."""
    logits = torch.nn.functional.linear(x, router).float()
    if indices is None:
        indices = logits.topk(top_k).indices
    weights = logits.gather(1, indices).softmax(-1)
    flat = indices.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(len(up), dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, flat, torch.ones_like(flat, dtype=torch.int32)).cumsum(0).int()
    h = grouped_product(x[order // top_k], up, ends)
    gate, other = h.unflatten(1, (-1, 2, 32)).unbind(2)
    activated = (torch.nn.functional.silu(gate.float()) * other.float()).to(x.dtype).flatten(1)
    rows = grouped_product(activated, down, ends)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(len(order), dtype=torch.int64, device=x.device)
    return (rows[row_of_slot].view(len(x), top_k, -1).float() * weights.unsqueeze(2)).sum(1).to(x.dtype)


def grouped(rows: Any, weights: Any, ends: Any) -> Any:
    """PyTorch's grouped GEMM."""
    return torch._grouped_mm(rows, weights.mT, offs=ends)


def one_by_one(rows: Any, weights: Any, ends: Any) -> Any:
    """cuBLAS for each expert; the host waits for the sizes."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat(
        [rows_of_expert @ weight.T for rows_of_expert, weight in zip(rows.split(sizes), weights.unbind(), strict=True)]
    )


def concatenated(up: Any) -> Any:
    """Interleaved weights (E, 2 I, H), blocks of 32, as concatenated gate and up halves."""
    return up.unflatten(1, (-1, 2, 32)).transpose(1, 2).flatten(1, 3)


def interleaved(up: Any) -> Any:
    """Concatenated gate and up halves as interleaved blocks of 32."""
    return up.unflatten(1, (2, -1, 32)).transpose(1, 2).flatten(1, 3)


def has_transformers() -> bool:
    """Whether Hugging Face transformers is installed."""
    return importlib.util.find_spec("transformers") is not None


def transformers_layer(shape: tuple[int, ...], up: Any, down: Any, router: Any) -> Any:
    """Hugging Face transformers' Qwen3-MoE block with copied weights; its experts use ``torch._grouped_mm``."""
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe  # pyright: ignore

    _, hidden, inner, experts, chosen = shape
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=chosen,
        norm_topk_prob=True,
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock(config)
    for module, name, weight in (
        (block.experts, "gate_up_proj", concatenated(up.detach()).contiguous()),
        (block.experts, "down_proj", down.detach()),
        (block.gate, "weight", router.detach()),
    ):
        setattr(module, name, torch.nn.Parameter(weight))
    return block


def sonicmoe(folder: Path, shape: tuple[int, ...], which: str) -> tuple[float, float]:
    """Seconds of a pass of SonicMoE and, for the backward pass, peak memory in bytes without weights and tokens.

    SonicMoE's benchmark, ``bench/moe-cute.py`` in the folder, runs in a separate process on random tokens and a random
    router. The peak is the maximum over its passes.

    Raises:
        RuntimeError: it failed, took more than four minutes, or printed no times.
    """
    text, error = _run_sonicmoe(folder, shape)
    times = sonicmoe_times(text, shape)
    if which not in times:
        last_output = " ".join((error or text).split())[-300:]
        raise RuntimeError(f"bench/moe-cute.py printed no time of the pass; its last words: {last_output}")
    tokens, hidden, inner, experts, _ = shape
    operand_bytes = 2.0 * (experts * hidden * (3 * inner + 1) + 2 * tokens * hidden)
    peak = re.search(r"^peak bytes (\d+)$", text, re.MULTILINE)
    return times[which], float(peak[1]) - operand_bytes if peak and which == "backward" else float("nan")


@functools.lru_cache(maxsize=1)
def _run_sonicmoe(folder: Path, shape: tuple[int, ...]) -> tuple[str, str]:
    """Output of SonicMoE's benchmark. The folder holds its packages and its version of the CuTe DSL."""
    paths = [folder, folder / "nvidia_cutlass_dsl" / "python_packages"]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), **_HOPPER}
    command = [
        "env",
        *(f"{name}={value}" for name, value in environment.items()),
        sys.executable,
        "-c",
        _SCRIPT,
        "bench/moe-cute.py",
        "--thiek",
        ",".join(map(str, shape)),
        "--skip_test",
    ]
    try:
        completed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no end within {_SECONDS} s"
    return completed.stdout, completed.stderr


def sonicmoe_times(text: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Seconds of each pass, parsed from lines that have a time in milliseconds and a rate in TFLOP/s.

    Time times rate identifies the pass: the backward pass has twice the operations of the forward pass. A line whose
    numbers match neither is skipped.
    """
    tokens, hidden, inner, _, chosen = shape
    forward, times = 6.0 * tokens * hidden * inner * chosen, {}
    for line in text.lower().splitlines():
        time = re.search(r"([\d.]+) ?ms\b", line)
        if not time:
            continue
        seconds = float(time[1]) * 1e-3
        multiples = [float(rate) * 1e12 * seconds / forward for rate in re.findall(r"\d[\d.]*(?:e[+-]?\d+)?", line)]
        for which, expected_multiple in (("inference" if "inference" in line else "forward", 1), ("backward", 2)):
            if any(abs(multiple / expected_multiple - 1) < 0.02 for multiple in multiples):
                times.setdefault(which, seconds)
    return times
