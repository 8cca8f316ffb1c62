"""GEMM + amax."""

from __future__ import annotations

from typing import Any

from cudnn.api_base import TupleDict
from cudnn.cli.programs import Comparison, Problem, Program
from cudnn.cli.programs.gemm_matrix import FP4, Variant
from cudnn.cli.programs.gemm_operands import DIMENSIONS, SHAPE, Operands, judge_result, operands, options, plain
from cudnn.gemm_amax import GemmAmax, gemm_amax_wrapper
from cudnn.lazy import torch


def make(v: Variant, device: str) -> Problem:
    """The API on random tensors of a variant."""
    x = operands(v, device)

    def call() -> Any:
        if v.out == FP4:
            return _four_bits(v, x, device)
        out = getattr(torch, v.out)
        return gemm_amax_wrapper(x.a, x.b, x.sfa, x.sfb, v.majors[2], out, **options(v))

    def compared(results: Any) -> list[Comparison]:
        return judge_result(v, ("c", ""), results, x.product, x.slack)

    return Problem(call, compared)


def _four_bits(v: Variant, x: Operands, device: str) -> TupleDict:
    """The wrapper allocates no packed results."""
    m, n, _, batch = v.shape
    c = torch.empty(batch, m, n // 2, dtype=torch.uint8, device=device).permute(1, 2, 0).view(torch.float4_e2m1fn_x2)
    amax = torch.full((1,), float("-inf"), device=device)
    gemm = GemmAmax(x.a, x.b, x.sfa, x.sfb, c, amax, **options(v))
    gemm(a_tensor=x.a, b_tensor=x.b, sfa_tensor=x.sfa, sfb_tensor=x.sfb, c_tensor=c, amax_tensor=amax)
    return TupleDict(c_tensor=c, amax_tensor=amax)


PROGRAM = Program("GEMM + amax", DIMENSIONS, SHAPE, lambda shape, device: make(plain("gemm_amax", shape), device))
