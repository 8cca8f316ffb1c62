"""GEMM + SwiGLU on bfloat16."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program, compare
from cudnn.cli.programs.gemm_operands import ARCHITECTURES, DIMENSIONS, ROUNDED, SHAPE, SUMMED, operands
from cudnn.gemm_swiglu import gemm_swiglu_wrapper
from cudnn.gemm_swiglu.reference import swiglu
from cudnn.lazy import torch


def _make(shape: tuple[int, ...], device: str) -> Problem:
    a, b, product = operands(shape, device)

    def compared(results: Any) -> list[Comparison]:
        return [
            compare("ab12", results["ab12_tensor"], product, ROUNDED, SUMMED),
            compare("c", results["c_tensor"], swiglu(product), ROUNDED, 1e-3),  # a product of two sums
        ]

    call = {"ab12_dtype": torch.bfloat16, "c_dtype": torch.bfloat16}
    return Problem(lambda: gemm_swiglu_wrapper(a, b, **call), compared)


PROGRAM = Program("GEMM + SwiGLU", DIMENSIONS, SHAPE, _make, ARCHITECTURES)
