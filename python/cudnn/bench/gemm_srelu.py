"""GEMM + squared ReLU beside cuBLAS and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudnn
from cudnn.bench import gemm
from cudnn.bench.operands import Operands, batched, blank, minus_infinity, normal
from cudnn.lazy import torch


def extras(o: Operands, m: int, n: int) -> gemm.Extras:
    """A positive factor for each row."""
    return {"prob": normal(m, 1).abs()}


def formula(z: Any, extras: gemm.Extras, out: Any) -> dict[str, Any]:
    """d = relu(z)^2 * prob."""
    return {"d": (z.float().relu().square() * extras["prob"]).to(out)}


def prepare(o: Operands, extras: gemm.Extras, keep: bool) -> Callable[[], gemm.Results]:
    """GemmSrelu."""
    m, n = o.a.plain.shape[0], o.peer_b.shape[0]
    tensors = {
        **gemm.inputs(o),
        "c_tensor": batched(blank(m, n, o.out)),
        "d_tensor": batched(blank(m, n, o.out)),
        "prob_tensor": batched(extras["prob"]),
    }
    if o.a.tensor.dtype == torch.float4_e2m1fn_x2:
        tensors["amax_tensor"] = minus_infinity()
    made = cudnn.GemmSrelu(**gemm.samples(tensors), alpha=o.alpha, **gemm.options_of(o))
    return gemm.executed(made, tensors, {"c": tensors["c_tensor"], "d": tensors["d_tensor"]})


BENCHMARK = gemm.benchmark(gemm.Fused("GemmSrelu", "squared ReLU", formula, prepare, extras, kept="c", matrices=2.0))
