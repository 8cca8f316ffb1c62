"""GEMM + squared ReLU."""

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
from cudnn.gemm_srelu import gemm_srelu_wrapper
from cudnn.gemm_srelu.reference import squared_relu
from cudnn.lazy import torch


def make(v: Variant, device: str) -> Problem:
    """The API on random tensors of a variant."""
    x = operands(v, device)
    norm_const = quantizer(v, device)
    m, _, _, batch = v.shape
    prob = torch.rand(m, 1, batch).to(device)

    def call() -> Any:
        types = {"c_dtype": getattr(torch, v.side), "d_dtype": getattr(torch, v.out), "c_major": v.majors[2]}
        return gemm_srelu_wrapper(
            x.a, x.b, x.sfa, x.sfb, prob, 0.5, norm_const_tensor=norm_const, **types, **options(v)
        )

    def compared(results: Any) -> list[Comparison]:
        z = 0.5 * x.product
        return [
            judge("c", results["c_tensor"], z, x.slack),
            *judge_result(v, ("d", "sfd"), results, squared_relu(z, prob.double()), 4 * x.slack),
        ]

    return Problem(call, compared)


PROGRAM = Program(
    "GEMM + squared ReLU", DIMENSIONS, SHAPE, lambda shape, device: make(plain("gemm_srelu", shape), device)
)
