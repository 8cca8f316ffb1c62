"""GEMM + backward pass of the squared ReLU: its formula, types and operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.gemm_dsrelu import GemmDsrelu, gemm_dsrelu_wrapper
from support import gemms
from support.gemm_families import case, check, options
from support.gemms import BF16, E4M3, F16, F32


def operation(problem: Any, **more: Any) -> GemmDsrelu:
    return GemmDsrelu(**problem.samples(), **{**options(problem), **more})


@pytest.mark.parametrize("side", [F16, BF16, F32])
@pytest.mark.parametrize("out", [F16, BF16, F32])
def test_types(side: Any, out: Any) -> None:
    problem = case("gemm_dsrelu", 32, 64, 32, side=side, out=out, amax=True)
    operation(problem)(**problem.arguments(), alpha=0.1)
    check(problem, alpha=0.1)


def test_c_has_no_8_bits() -> None:
    problem = case("gemm_dsrelu", side=BF16)
    problem.tensors["c"] = gemms.strided(torch.randn(128, 256, 1).to(E4M3), "k")
    with pytest.raises(ValueError, match="c tensor dtype mismatch: expected torch"):
        operation(problem).check_support()


def test_dprob_is_added_to() -> None:
    problem = case("gemm_dsrelu")
    gemm = operation(problem)
    gemm(**problem.arguments())
    once = problem.tensors["dprob"].clone()
    gemm(**problem.arguments())
    torch.testing.assert_close(problem.tensors["dprob"], 2 * once)


def test_operator() -> None:
    from cudnn.ops import gemm_dsrelu

    a, b, prob = gemms.plain(40, 64, 2).tensor, gemms.plain(64, 64, 2).tensor, torch.rand(40, 1, 2)
    c = gemms.plain(40, 64, 2).tensor
    found = torch.ops.cudnn.gemm_dsrelu(a, b, c, None, None, prob, 0.5, "n", F16)
    expected = gemm_dsrelu_wrapper(a, b, c, None, None, prob, 0.5, "n", F16)
    for tensor, other in zip(found, expected, strict=True):
        assert torch.equal(tensor, other) if other is not None else tensor.numel() == 0
    for arguments in ((0.5, "n", F16), (1.0, "n", E4M3, torch.ones(1), 32)):
        results = torch.library.opcheck(gemm_dsrelu, (a, b, c, None, None, prob, *arguments))
        assert set(results.values()) == {"SUCCESS"}
    compiled = torch.compile(lambda a: gemm_dsrelu(a, b, c, None, None, prob)[1], backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a), gemm_dsrelu(a, b, c, None, None, prob)[1])
