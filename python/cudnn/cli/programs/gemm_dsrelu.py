"""GEMM + backward pass of the squared ReLU."""

from __future__ import annotations

from typing import Any

from cudnn.cli.programs import Comparison, Problem, Program
from cudnn.cli.programs.gemm_matrix import Variant
from cudnn.cli.programs.gemm_operands import (
    DIMENSIONS,
    SHAPE,
    judge,
    judge_result,
    matrix,
    operands,
    options,
    plain,
    quantizer,
)
from cudnn.gemm_dsrelu import gemm_dsrelu_wrapper
from cudnn.gemm_srelu.reference import squared_relu_backward
from cudnn.lazy import torch


def make(v: Variant, device: str) -> Problem:
    """The API on random tensors of a variant."""
    x = operands(v, device)
    norm_const = quantizer(v, device)
    m, n, _, batch = v.shape
    c = matrix(m, n, batch, v.side, v.majors[2] == "n", device)
    prob = torch.rand(m, 1, batch).to(device)

    def call() -> Any:
        types = {"d_dtype": getattr(torch, v.out), "d_major": v.majors[2]}
        return gemm_dsrelu_wrapper(
            x.a, x.b, c, x.sfa, x.sfb, prob, 0.5, norm_const_tensor=norm_const, **types, **options(v)
        )

    def compared(results: Any) -> list[Comparison]:
        d, dprob = squared_relu_backward(0.5 * x.product, c.double(), prob.double())
        return [
            judge("dprob", results["dprob_tensor"], dprob, 10 * x.slack),  # sums of squares, terms of either sign
            *judge_result(v, ("d", "sfd"), results, d, 4 * x.slack),
        ]

    return Problem(call, compared)


PROGRAM = Program("GEMM + dsReLU", DIMENSIONS, SHAPE, lambda shape, device: make(plain("gemm_dsrelu", shape), device))
