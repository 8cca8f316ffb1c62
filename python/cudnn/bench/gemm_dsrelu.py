"""GEMM + squared ReLU's backward beside cuBLAS and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cudnn
from cudnn.bench import gemm
from cudnn.bench.operands import Operands, batched, blank, empty_atoms, minus_infinity, normal, operands
from cudnn.lazy import torch


def extras(o: Operands, m: int, n: int) -> gemm.Extras:
    """A positive factor for each row, and the factor c."""
    return {"prob": normal(m, 1).abs(), "c": normal(m, n).to(o.out)}


def formula(z: Any, extras: gemm.Extras, out: Any) -> dict[str, Any]:
    """d = 2 relu(z) c prob; dprob = the sum of relu(z)^2 c over a row."""
    x, c = z.float().relu(), extras["c"].float()
    return {"d": (2 * x * c * extras["prob"]).to(out), "dprob": (x.square() * c).sum(1, keepdim=True)}


def prepare(o: Operands, extras: gemm.Extras, keep: bool) -> Callable[[], gemm.Results]:
    """GemmDsrelu."""
    tensors = _tensors(o, extras, o.out)
    if o.a.tensor.dtype == torch.float4_e2m1fn_x2:
        tensors["amax_tensor"] = minus_infinity()
    return _executed(o, tensors)


def all_tensors() -> Callable[[], gemm.Results]:
    """GemmDsrelu with each of its 11 tensors: MXFP8 operands and an MXFP8 result."""
    size = gemm.HOST_SIZE
    o = operands("mxfp8", size, size, size)
    tensors = _tensors(o, extras(o, size, size), torch.float8_e4m3fn)
    tensors["sfd_tensor"] = empty_atoms(size, size // 32, torch.float8_e8m0fnu)
    tensors["amax_tensor"] = minus_infinity()
    tensors["norm_const_tensor"] = torch.ones(1, device=o.a.plain.device)
    return _executed(o, tensors)


def _tensors(o: Operands, extras: gemm.Extras, result: Any) -> dict[str, Any]:
    m, n = extras["c"].shape
    return {
        **gemm.inputs(o),
        "c_tensor": batched(extras["c"]),
        "d_tensor": batched(blank(m, n, torch.float32).to(result)),
        "dprob_tensor": batched(torch.zeros_like(extras["prob"])),
        "prob_tensor": batched(extras["prob"]),
    }


def _executed(o: Operands, tensors: dict[str, Any]) -> Callable[[], gemm.Results]:
    made = cudnn.GemmDsrelu(**gemm.samples(tensors), alpha=o.alpha, **gemm.options_of(o))
    return gemm.executed(made, tensors, {"d": tensors["d_tensor"], "dprob": tensors["dprob_tensor"]})


BENCHMARK = gemm.benchmark(
    gemm.Fused(
        "GemmDsrelu",
        "dsReLU",
        formula,
        prepare,
        extras,
        matrices=2.0,
        host={"GemmDsrelu.execute, 11 tensors": all_tensors},
    )
)
