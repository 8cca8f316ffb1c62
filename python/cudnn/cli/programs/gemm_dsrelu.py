"""GEMM + backward pass of the squared ReLU on bfloat16."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program, compare
from cudnn.cli.programs.gemm_operands import ARCHITECTURES, DIMENSIONS, ROUNDED, SHAPE, operands
from cudnn.gemm_dsrelu import gemm_dsrelu_wrapper
from cudnn.gemm_srelu.reference import squared_relu_backward
from cudnn.lazy import torch


def _make(shape: tuple[int, ...], device: str) -> Problem:
    a, b, product = operands(shape, device)
    c = torch.randn(1, *shape[:2], device=device).bfloat16().permute(1, 2, 0)
    prob = torch.rand(shape[0], 1, 1, device=device)

    def compared(results: Any) -> list[Comparison]:
        d, dprob = squared_relu_backward(product, c.double(), prob.double())
        return [
            compare("d", results["d_tensor"], d, ROUNDED, 1e-3),
            compare("dprob", results["dprob_tensor"], dprob, 1e-5, 1e-2),  # sums of squares, terms of either sign
        ]

    return Problem(lambda: gemm_dsrelu_wrapper(a, b, c, None, None, prob), compared)


PROGRAM = Program("GEMM + dsReLU", DIMENSIONS, SHAPE, _make, ARCHITECTURES)
