"""GEMM + squared ReLU on bfloat16."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program, compare
from cudnn.cli.programs.gemm_operands import ARCHITECTURES, DIMENSIONS, ROUNDED, SHAPE, SUMMED, operands
from cudnn.gemm_srelu import gemm_srelu_wrapper
from cudnn.gemm_srelu.reference import squared_relu
from cudnn.lazy import torch


def _make(shape: tuple[int, ...], device: str) -> Problem:
    a, b, product = operands(shape, device)
    prob = torch.rand(shape[0], 1, 1, device=device)

    def compared(results: Any) -> list[Comparison]:
        d = squared_relu(product, prob.double())
        return [
            compare("c", results["c_tensor"], product, ROUNDED, SUMMED),
            compare("d", results["d_tensor"], d, ROUNDED, 1e-3),
        ]

    return Problem(lambda: gemm_srelu_wrapper(a, b, None, None, prob), compared)


PROGRAM = Program("GEMM + squared ReLU", DIMENSIONS, SHAPE, _make, ARCHITECTURES)
