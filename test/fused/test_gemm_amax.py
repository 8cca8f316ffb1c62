"""GEMM + amax: its own rules, types and operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn.gemm_amax import GemmAmax, gemm_amax_wrapper
from support import gemms
from support.gemm_families import ARCHITECTURES, case, check, options
from support.gemms import BF16, E4M3, E5M2, E8M0, F16, F32, FP4


def operation(problem: Any, **more: Any) -> GemmAmax:
    return GemmAmax(**problem.samples(), **{**options(problem), **more})


@pytest.mark.parametrize("out", [F32, F16, BF16, E4M3, E5M2])
def test_result_types(out: Any) -> None:
    problem = case("gemm_amax", out=out)
    operation(problem)(**problem.arguments())
    check(problem)


@pytest.mark.parametrize("kind", [FP4, torch.uint8])
def test_four_bit_results(kind: Any) -> None:
    """Saturated at 6, rounded to nearest even."""
    problem = case("gemm_amax", dtype=FP4, scale=E8M0, vector=32, m=64, n=64)
    problem.tensors["c"] = torch.empty_strided((64, 32, 1), (32, 1, 2048), dtype=torch.uint8).view(kind)
    operation(problem)(**problem.arguments())
    bytes_ = problem.tensors["c"].view(torch.uint8)[..., 0]
    found = gemms.fp4_values(torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(1))
    z = gemms.matmul(problem.a, problem.b)[..., 0]
    grid = gemms.fp4_values(torch.arange(8, dtype=torch.uint8))
    nearest = (z.abs().clamp(max=6).unsqueeze(-1) - grid).abs().amin(-1)
    assert bool(((found.abs() - z.abs().clamp(max=6)).abs() <= nearest + 1e-4).all())
    assert bool(((found == 0) | (found.sign() == z.sign())).all())
    assert float(problem.tensors["amax"]) == pytest.approx(float(z.abs().max()), rel=1e-5)


def test_bytes_are_exponents() -> None:
    """Scale factors of torch.int8 are e8m0."""
    problem = case("gemm_amax", dtype=E4M3, scale=E8M0)
    for name in ("sfa", "sfb"):
        problem.tensors[name] = problem.tensors[name].view(torch.int8)
    operation(problem)(**problem.arguments())
    check(problem)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"amax": False}, {}, ValueError, "amax tensor: got None; allowed: a tensor"),
    ({"dtype": E4M3, "out": E5M2}, {}, NotImplementedError, "c tensor dtype: got float8_e5m2; allowed: float32,"),
    ({"m": 256}, {"mma_tiler_mn": (256, 128), "cluster_shape_mn": (2, 1)}, NotImplementedError, "allowed: 128 rows"),
    ({}, {"cluster_shape_mn": (8, 1)}, ValueError, r"cluster_shape_mn: got \(8, 1\); allowed: powers of 2 up to 4"),
    ({}, {"mma_tiler_mn": (128, 64)}, ValueError, "mma_tiler_mn: got .128, 64.; allowed: 128, 256 columns"),
    (
        {"dtype": FP4, "scale": E8M0, "vector": 32, "k": 128}, {"mma_tiler_mn": (128, 256)}, ValueError,
        "allowed: 128 columns, for operands of float4_e2m1fn_x2 with k up to 128",
    ),
    (
        {"dtype": FP4, "scale": E8M0, "vector": 16, "k": 256}, {"mma_tiler_mn": (128, 256)}, NotImplementedError,
        "allowed: 128 columns, for sf_vec_size=16 and c of bfloat16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("given", "more", "error", "words"), REFUSED)
def test_refused(arch: str, given: dict[str, Any], more: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=f"GemmAmax: .*{words}"):
        operation(case("gemm_amax", device="meta", **given), arch=arch, **more).check_support()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_four_bit_results_are_of_four_bit_operands_and_n_major(arch: str) -> None:
    given = {"scale": E8M0, "vector": 32, "device": "meta"}
    assert operation(case("gemm_amax", dtype=FP4, out=FP4, **given), arch=arch).check_support()
    problem = case("gemm_amax", out=FP4, device="meta")
    words = "c tensor dtype: got float4_e2m1fn_x2; allowed: other types, for operands of bfloat16"
    with pytest.raises(ValueError, match=words):
        operation(problem, arch=arch).check_support()
    problem = case("gemm_amax", dtype=FP4, **given)
    problem.tensors["c"] = torch.empty_strided((64, 256, 1), (1, 64, 16384), dtype=torch.uint8, device="meta").view(FP4)
    with pytest.raises(ValueError, match="c tensor, packed: got m-major; allowed: n-major"):
        operation(problem, arch=arch).check_support()


def test_packed_operands_are_k_major() -> None:
    problem = case("gemm_amax", dtype=FP4, scale=E8M0, vector=32, device="meta")
    data = torch.empty_strided((64, 128, 1), (1, 64, 8192), dtype=torch.uint8, device="meta").view(FP4)
    problem.tensors["a"] = data
    with pytest.raises(ValueError, match="a tensor, packed: got m-major; allowed: k-major"):
        operation(problem, arch="sm_90a").check_support()


def test_wrapper_has_no_four_bit_results() -> None:
    problem = case("gemm_amax", dtype=FP4, scale=E8M0, vector=32)
    tensors = problem.tensors
    for kind in (FP4, torch.uint8):
        with pytest.raises(ValueError, match=r"gemm_amax_wrapper: c_dtype: got .*use the class GemmAmax"):
            gemm_amax_wrapper(tensors["a"], tensors["b"], tensors["sfa"], tensors["sfb"], c_dtype=kind)


def test_nan_reaches_amax() -> None:
    problem = case("gemm_amax", l=2)
    problem.tensors["a"][3, 4, 1] = float("nan")
    operation(problem)(**problem.arguments())
    assert problem.tensors["amax"].isnan().all()
    assert problem.tensors["c"].isnan().any(1).nonzero().tolist() == [[3, 1]]


def test_operator() -> None:
    from cudnn.ops import gemm_amax

    a, b = gemms.plain(40, 64, 2).tensor, gemms.plain(64, 64, 2).tensor
    found = torch.ops.cudnn.gemm_amax(a, b, c_dtype=BF16)
    for tensor, other in zip(found, gemm_amax_wrapper(a, b, c_dtype=BF16), strict=True):
        assert torch.equal(tensor, other)
    assert set(torch.library.opcheck(gemm_amax, (a, b)).values()) == {"SUCCESS"}
    s = gemms.scaled(128, 64, 1, FP4, E4M3, 16)
    arguments = (s.tensor, s.tensor.clone(), s.scales, s.scales, "m", BF16, 16)
    compiled = torch.compile(lambda *x: gemm_amax(*x, *arguments[4:])[1] * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments[:4]), gemm_amax(*arguments)[1] * 2)
