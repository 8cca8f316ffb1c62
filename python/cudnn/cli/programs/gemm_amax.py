"""GEMM + amax on bfloat16."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program, compare
from cudnn.cli.programs.gemm_operands import ARCHITECTURES, DIMENSIONS, ROUNDED, SHAPE, SUMMED, operands
from cudnn.gemm_amax import gemm_amax_wrapper
from cudnn.lazy import torch


def _make(shape: tuple[int, ...], device: str) -> Problem:
    a, b, product = operands(shape, device)

    def compared(results: Any) -> list[Comparison]:
        largest = product.abs().max().reshape(1)
        return [
            compare("c", results["c_tensor"], product, ROUNDED, SUMMED),
            compare("amax", results["amax_tensor"], largest, 0.0, SUMMED),
        ]

    return Problem(lambda: gemm_amax_wrapper(a, b, c_dtype=torch.bfloat16), compared)


PROGRAM = Program("GEMM + amax", DIMENSIONS, SHAPE, _make, ARCHITECTURES)
