"""Host time of warm calls on this GPU: ``torch.add(out=)``, ``execute``, wrappers, operators, and eager layers.

    python benchmarks/wrapper_overhead.py [--csv FILE]

Candidates take turns: 40 rounds of about 1 ms each, the minimum of the rounds counts. Sizes are so small that the GPU
waits for the host. Takes less than 40 s with a warm kernel cache.
"""

from __future__ import annotations

import argparse
import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cudnn
from cudnn.bench import HOST, compare
from cudnn.nn import GatedMLP, MoE

SIZE, EXPERTS = 256, 4
BF16 = torch.bfloat16
BARS = {"gemm_swiglu_wrapper": 20.0, "grouped_gemm_glu_wrapper": 20.0, "MoE, 1 token, no gradient": 150.0}
BARS |= {"MoE, 1 token, both passes": 900.0}


def batched(*shape: int) -> torch.Tensor:
    """A matrix, or several, in the layout of the fused APIs, (rows, columns, batch)."""
    return torch.randn(*shape, device="cuda").to(BF16).permute(1, 2, 0)


def gemms() -> dict[str, Callable[[], Any]]:
    """``execute``, wrappers and operators."""
    a, b, weights = batched(1, SIZE, SIZE), batched(1, SIZE, SIZE), batched(EXPERTS, SIZE, SIZE)
    swiglu = functools.partial(cudnn.gemm_swiglu_wrapper, a, b, ab12_dtype=BF16, c_dtype=None)
    ab12, c, _, _ = swiglu()
    gemm = cudnn.GemmSwiglu(a, b, ab12, c)
    gemm.check_support()
    gemm.compile()
    ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device="cuda") * (SIZE // EXPERTS)
    alpha = torch.ones(EXPERTS, device="cuda")
    glu = functools.partial(cudnn.grouped_gemm_glu_wrapper, a, None, ends, alpha, weights, d_dtype=BF16)
    x, w = a[..., 0], b[..., 0]
    return {
        "GemmSwiglu.execute": functools.partial(gemm.execute, a_tensor=a, b_tensor=b, ab12_tensor=ab12, c_tensor=c),
        "gemm_swiglu_wrapper": swiglu,
        "grouped_gemm_glu_wrapper": glu,
        "cudnn.ops.gemm_swiglu": functools.partial(cudnn.ops.gemm_swiglu, x, w),
    }


def layers() -> dict[str, Callable[[], Any]]:
    """Eager layers with one token, without gradients and in both passes."""
    modules = {
        "MoE": MoE(2048, 768, 128, 8, renormalize=True, device="cuda"),
        "GatedMLP": GatedMLP(2048, 6144, device="cuda"),
    }
    x = torch.randn(1, 2048, device="cuda").to(BF16)
    calls: dict[str, Callable[[], Any]] = {}
    for name, module in modules.items():
        calls[f"{name}, 1 token, no gradient"] = functools.partial(infer, module, x)
        calls[f"{name}, 1 token, both passes"] = functools.partial(train, module, x.clone().requires_grad_())
    return calls


def infer(module: Any, x: torch.Tensor) -> None:
    """One pass without gradients."""
    with torch.no_grad():
        module(x)


def train(module: Any, x: torch.Tensor) -> None:
    """Both passes; gradients are not kept."""
    y = module(x)
    torch.autograd.grad(y, [x, *module.parameters()], y)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(SIZE, SIZE, device="cuda").to(BF16)
    y = torch.empty_like(x)
    calls = {"torch.add(out=)": lambda: torch.add(x, x, out=y), **gemms(), **layers()}
    for call in calls.values():
        for _ in range(3):
            call()
    times = compare(list(calls.values()), HOST)
    rows = [(name, HOST.summary(seconds) * 1e6, BARS.get(name)) for name, seconds in zip(calls, times, strict=True)]
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cudnn-fused {cudnn.__version__}")
    for name, microseconds, bar in rows:
        print(f"{name:34s}{microseconds:9.2f} us{'' if bar is None else f'   bar {bar:g}'}")
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            csv.writer(file).writerows([("call", "microseconds", "bar"), *rows])


if __name__ == "__main__":
    main()
