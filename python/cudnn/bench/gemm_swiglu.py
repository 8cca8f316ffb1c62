"""GEMM + SwiGLU, with and without the pre-activation stored, beside cuBLAS, torch.compile and Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import cudnn
from cudnn.bench import gemm
from cudnn.bench.operands import Operands, batched, blank, minus_infinity
from cudnn.lazy import torch


def formula(z: Any, extras: gemm.Extras, out: Any) -> dict[str, Any]:
    """c = up * gate * sigmoid(gate): of every 64 columns the first 32 are up, the others gate."""
    up, gate = z.float().unflatten(1, (-1, 2, 32)).unbind(2)
    return {"c": (up * torch.nn.functional.silu(gate)).flatten(1).to(out)}


def prepare(o: Operands, extras: gemm.Extras, keep: bool) -> Callable[[], gemm.Results]:
    """GemmSwiglu."""
    m, n = o.a.plain.shape[0], o.peer_b.shape[0]
    tensors = gemm.inputs(o)
    tensors["ab12_tensor"] = batched(blank(m, n, o.out)) if keep else None
    tensors["c_tensor"] = batched(blank(m, n // 2, o.out))
    if o.a.tensor.dtype == torch.float4_e2m1fn_x2:
        tensors["amax_tensor"] = minus_infinity()
    made = cudnn.GemmSwiglu(**gemm.samples(tensors), alpha=o.alpha, **gemm.options_of(o))
    results = {"c": tensors["c_tensor"], "ab12": tensors["ab12_tensor"]}
    return gemm.executed(made, {**tensors, "alpha": o.alpha}, results)


def triton(o: Operands, keep: bool) -> Callable[[], gemm.Results]:
    """Our Triton kernel, autotuned at its first call."""
    kernel = _module().gemm_swiglu
    m, n = o.a.plain.shape[0], o.peer_b.shape[0]
    results = {"c": blank(m, n // 2, o.out), "ab12": blank(m, n, o.out) if keep else None}
    run = functools.partial(kernel, o.a.plain, o.peer_b, results["ab12"], results["c"], o.peer_alpha)

    def call() -> gemm.Results:
        run()
        return results

    return call


_module = functools.cache(gemm.triton_peer)

BENCHMARK = gemm.benchmark(
    gemm.Fused(
        "GemmSwiglu", "SwiGLU", formula, prepare, kept="ab12", gated=True, matrices=1.5, peers={"Triton, fused": triton}
    )
)
