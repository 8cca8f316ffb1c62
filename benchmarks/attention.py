"""Times `cudnn.sdpa` beside FlashAttention-4 and cuDNN through PyTorch, in one process.

    python benchmarks/attention.py [--repeat MILLISECONDS]

TFLOP/s, the median of rounds in which all have a turn; forward 2 b h s^2 (d + dv) operations, backward
2 b h s^2 (3 d + 2 dv), half where causal.
FlashAttention-4: `pip install flash-attn-4==4.0.0b36 quack-kernels==0.6.5 torch-c-dlpack-ext einops`.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from cudnn.sdpa import SdpaBackward, SdpaForward

SHAPES = [  # batch, sequence, heads of q, of k and v, d, dv
    (4, 4096, 8, 8, 256, 256), (1, 16384, 8, 8, 256, 256), (4, 4096, 16, 2, 256, 256), (4, 4096, 16, 16, 128, 128),
    (1, 16384, 16, 16, 128, 128), (2, 8192, 16, 16, 192, 128), (4, 4096, 32, 32, 64, 64),
]  # fmt: skip
Call = Callable[[], Any]
ROUNDS = 6


def ours(q: Any, k: Any, v: Any, do: Any, causal: bool) -> tuple[Call, Call | None, list[Any]]:
    """Forward and, where there is a kernel, backward; and the results."""
    window: dict[str, Any] = {"is_causal": True, "window_size": (-1, 0)} if causal else {}
    o, lse = torch.full_like(do, float("nan")), torch.empty(q.shape[:3], device="cuda")
    forward = SdpaForward(q, k, v, o, lse, **window)
    forward.compile()
    run = functools.partial(forward.execute, q, k, v, o, lse)
    run()
    if (q.shape[-1], v.shape[-1]) not in SdpaBackward.head_sizes:
        return run, None, [o]
    gradients = [torch.full_like(x, float("nan")) for x in (q, k, v)]
    backward = SdpaBackward(q, k, v, o, do, lse, *gradients, **window)
    backward.compile()
    run_backward = functools.partial(backward.execute, q, k, v, o, do, lse, *gradients)
    run_backward()
    return run, run_backward, [o, *gradients]


def flash_attention(q: Any, k: Any, v: Any, do: Any, causal: bool) -> tuple[Call, Call, list[Any]]:
    """FlashAttention-4, on (b, s, h, d)."""
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))

    def forward() -> Any:
        found = flash_attn_func(q, k, v, causal=causal)
        return found[0] if isinstance(found, tuple) else found

    o, grad = forward(), do.transpose(1, 2)
    backward = functools.partial(torch.autograd.grad, o, (q, k, v), grad, retain_graph=True)
    with torch.no_grad():
        return torch.no_grad()(forward), backward, [x.transpose(1, 2) for x in (o, *backward())]


def cudnn_graph(q: Any, k: Any, v: Any, do: Any, causal: bool) -> tuple[Call, Call, list[Any]]:
    """cuDNN, chosen by PyTorch."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))

    def forward() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    o = forward()
    backward = functools.partial(torch.autograd.grad, o, (q, k, v), do, retain_graph=True)
    return torch.no_grad()(forward), backward, [o, *backward()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=150, help="milliseconds of all rounds of a candidate")
    repeat = parser.parse_args().repeat
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    print(f"{'b, s, hq, hk, d, dv':32}{'':8}{'':10}{'ours':>6}{'FA-4':>6}{'cuDNN':>6}   ours / best   difference")
    for b, s, hq, hk, d, dv in SHAPES:
        for causal in (False, True):
            drawn = [torch.randn(b, s, h, w, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                     for h, w in ((hq, d), (hk, d), (hk, dv), (hq, dv))]  # fmt: skip
            found = {}
            for peer in (ours, flash_attention, cudnn_graph):
                try:
                    found[peer] = peer(*drawn, causal)
                except Exception as error:  # noqa: PERF203  (a peer that does not take the problem)
                    print(f"{peer.__name__}: {str(error)[:100]}")
            for i, (name, share) in enumerate((("forward", d + dv), ("backward", 3 * d + 2 * dv))):
                if found[ours][i] is None:
                    continue
                flops = 2.0 * b * hq * s * s * share / (1 + causal)
                rounds: dict[Any, list[float]] = {peer: [] for peer in found}
                for turn in range(ROUNDS):  # in turn, and backwards every other time: who goes first has a cooler card
                    for peer in list(found)[:: 1 - turn % 2 * 2]:
                        time = do_bench(found[peer][i], warmup=20, rep=repeat // ROUNDS, return_mode="median")
                        rounds[peer].append(flops / time / 1e9)
                speed = {peer: statistics.median(values) for peer, values in rounds.items()}
                best = max(value for peer, value in speed.items() if peer is not ours)
                reference = found.get(flash_attention) or found[cudnn_graph]
                pairs = list(zip(found[ours][2], reference[2], strict=False))
                off = max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in pairs[i : 1 + 3 * i])
                figures = "".join(f"{speed.get(p, float('nan')):6.0f}" for p in (ours, flash_attention, cudnn_graph))
                where = f"{b}, {s}, {hq}, {hk}, {d}, {dv}"
                print(f"{where:32}{'causal' if causal else 'full':8}{name:10}{figures}   {speed[ours] / best:8.3f}"
                      f"      {off:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
