"""GEMM + squared ReLU: its own rules, types and operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.gemm_srelu import GemmSrelu, gemm_srelu_wrapper
from support import gemms
from support.gemm_families import ARCHITECTURES, case, check, options
from support.gemms import BF16, E4M3, E5M2, E8M0, F16, F32, FP4


def operation(problem: Any, **more: Any) -> GemmSrelu:
    return GemmSrelu(**problem.samples(), **{**options(problem), **more})


@pytest.mark.parametrize("side", [F16, BF16, F32, E4M3, E5M2])
@pytest.mark.parametrize("out", [F16, BF16, F32])
def test_result_types(side: Any, out: Any) -> None:
    problem = case("gemm_srelu", 32, 64, 32, side=side, out=out, amax=True)
    operation(problem)(**problem.arguments(), alpha=0.1)
    check(problem, alpha=0.1)


@pytest.mark.parametrize("l", [1, 3])
def test_strides_of_prob(l: int) -> None:  # noqa: E741
    for stride in ((l, l, 1), (1, 1, 40), (1, 40, 40)):
        problem = case("gemm_srelu", 40, 64, 32, l)
        prob = torch.empty_strided((40, 1, l), stride).copy_(problem.tensors["prob"])
        problem.tensors["prob"] = prob
        operation(problem)(**problem.arguments())
        check(problem)
    problem.tensors["prob"] = torch.rand(80, 1, l)[::2]
    with pytest.raises(ValueError, match="prob tensor stride mismatch"):
        operation(problem).check_support()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    (
        {"dtype": FP4, "scale": E8M0, "vector": 32, "out": E4M3},
        {},
        ValueError,
        "d tensor dtype: got float8_e4m3fn; allowed",
    ),
    ({}, {"mma_tiler_mn": (128, 96)}, ValueError, "mma_tiler_mn: got .128, 96.; allowed: 64, 128, 192, 256 columns"),
    ({}, {"cluster_shape_mn": (8, 1)}, ValueError, r"cluster_shape_mn: got \(8, 1\); allowed: powers of 2 up to 4"),
    ({}, {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (1, 2)}, ValueError, "allowed: an even number of rows"),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["gemm_srelu", "gemm_dsrelu"])
@pytest.mark.parametrize(("given", "more", "error", "words"), REFUSED)
def test_refused(arch: str, name: str, given: dict[str, Any], more: dict[str, Any], error: Any, words: str) -> None:
    problem = case(name, device="meta", **given)
    with pytest.raises(error, match=f"{problem.family.cls.__name__}: .*{words}"):
        problem.family.cls(**problem.samples(), **{"arch": arch, **options(problem), **more}).check_support()


@pytest.mark.parametrize("name", ["gemm_srelu", "gemm_dsrelu"])
def test_c_and_d_have_one_major(name: str) -> None:
    problem = case(name, device="meta")
    problem.tensors["c"] = case(name, majors="kkm", device="meta").tensors["c"]
    with pytest.raises(ValueError, match="d tensor major mismatch: expected m, that of c, got n"):
        problem.family.cls(**problem.samples(), **options(problem), arch="sm_90a").check_support()


@pytest.mark.parametrize("name", ["gemm_srelu", "gemm_dsrelu"])
def test_default_tile_and_cluster(name: str) -> None:
    problem = case(name, device="meta")
    gemm = problem.family.cls(**problem.samples(), arch="sm_90a")
    assert gemm.check_support()
    assert (gemm.mma_tiler_mn, gemm.cluster_shape_mn) == ((256, 256), (2, 1))
    assert problem.family.cls(**problem.samples(), mma_tiler_mn=(128, 256), arch="sm_90a").cluster_shape_mn == (1, 1)


def test_operator() -> None:
    from cudnn.ops import gemm_srelu

    a, b, prob = gemms.plain(40, 64, 2).tensor, gemms.plain(64, 64, 2).tensor, torch.rand(40, 1, 2)
    found = torch.ops.cudnn.gemm_srelu(a, b, None, None, prob, 0.5, "m", F32, BF16)
    expected = gemm_srelu_wrapper(a, b, None, None, prob, 0.5, "m", F32, BF16)
    for tensor, other in zip(found, expected, strict=True):
        assert torch.equal(tensor, other) if other is not None else tensor.numel() == 0
    for arguments in ((0.5, "m", F32, BF16), (1.0, "n", BF16, E4M3, torch.ones(1), 32)):
        results = torch.library.opcheck(gemm_srelu, (a, b, None, None, prob, *arguments))
        assert set(results.values()) == {"SUCCESS"}
    compiled = torch.compile(lambda a: gemm_srelu(a, b, None, None, prob)[1] + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a), gemm_srelu(a, b, None, None, prob)[1] + 1)
