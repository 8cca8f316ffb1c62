"""GEMM + amax beside cuBLAS and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudnn
from cudnn.bench import gemm
from cudnn.bench.operands import Operands, batched, blank, minus_infinity


def formula(z: Any, extras: gemm.Extras, out: Any) -> dict[str, Any]:
    """The largest magnitude."""
    return {"amax": z.float().abs().amax().view(1)}


def prepare(o: Operands, extras: gemm.Extras, keep: bool) -> Callable[[], gemm.Results]:
    """GemmAmax."""
    m, n = o.a.plain.shape[0], o.peer_b.shape[0]
    tensors = {
        **gemm.inputs(o),
        "c_tensor": batched(blank(m, n, o.out)),
        "amax_tensor": minus_infinity(),
    }
    made = cudnn.GemmAmax(**gemm.samples(tensors), **gemm.options_of(o))
    return gemm.executed(made, tensors, {"c": tensors["c_tensor"], "amax": tensors["amax_tensor"]})


BENCHMARK = gemm.benchmark(gemm.Fused("GemmAmax", "amax", formula, prepare, kept="c", scaled=False))
