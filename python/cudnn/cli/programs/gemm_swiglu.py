"""GEMM + SwiGLU."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program
from cudnn.cli.programs.gemm_matrix import Variant
from cudnn.cli.programs.gemm_operands import (
    DIMENSIONS,
    SHAPE,
    judge,
    judge_result,
    operands,
    options,
    plain,
    quantizer,
)
from cudnn.gemm_swiglu import gemm_swiglu_wrapper
from cudnn.gemm_swiglu.reference import swiglu
from cudnn.lazy import torch


def make(v: Variant, device: str) -> Problem:
    """The API on random tensors of a variant."""
    x = operands(v, device)
    norm_const = quantizer(v, device)

    def call() -> Any:
        side, out = getattr(torch, v.side), getattr(torch, v.out)
        more = {"sfa_tensor": x.sfa, "sfb_tensor": x.sfb, "norm_const_tensor": norm_const, **options(v)}
        return gemm_swiglu_wrapper(x.a, x.b, 0.5, v.majors[2], side, out, **more)

    def compared(results: Any) -> list[Comparison]:
        z = 0.5 * x.product
        return [
            judge("ab12", results["ab12_tensor"], z, x.slack),
            *judge_result(v, ("c", "sfc"), results, swiglu(z), 4 * x.slack),  # a product of two sums
        ]

    return Problem(call, compared)


PROGRAM = Program("GEMM + SwiGLU", DIMENSIONS, SHAPE, lambda shape, device: make(plain("gemm_swiglu", shape), device))
