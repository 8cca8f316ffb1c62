"""GEMM + amax, + squared ReLU and its backward pass: their specific types, rules and operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from support import oracle
from support.api_cases import case, check
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32, FP4
from support.selection import ARCHES

BOTH = ("gemm_srelu", "gemm_dsrelu")
FLOATS, BYTES = (F16, BF16, F32), (E4M3, E5M2)


@pytest.mark.parametrize(
    ("name", "side", "out"),
    [
        *(("gemm_amax", None, out) for out in FLOATS + BYTES),
        *(("gemm_srelu", side, out) for side in FLOATS + BYTES for out in FLOATS),
        *(("gemm_dsrelu", side, out) for side in FLOATS for out in FLOATS),
    ],
)
def test_result_types(name: str, side: Any, out: Any) -> None:
    kwargs = {} if name == "gemm_amax" else {"side": side, "amax": True}
    alpha = {} if name == "gemm_amax" else {"alpha": 0.1}
    problem = case(name, 32, 64, 32, out=out, **kwargs)
    problem.operation()(**problem.arguments(), **alpha)
    check(problem, **alpha)


@pytest.mark.parametrize("kind", [FP4, torch.uint8])
def test_four_bit_results(kind: Any) -> None:
    """Saturated at 6, rounded to nearest even."""
    problem = case("gemm_amax", dtype=FP4, scale=E8M0, vector=32, m=64, n=64)
    problem.tensors["c"] = torch.empty_strided((64, 32, 1), (32, 1, 2048), dtype=torch.uint8).view(kind)
    problem.operation()(**problem.arguments())
    bytes_ = problem.tensors["c"].view(torch.uint8)[..., 0]
    actual = oracle.fp4_values(torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(1))
    z = oracle.matmul(problem.a, problem.b)[..., 0]
    grid = oracle.fp4_values(torch.arange(8, dtype=torch.uint8))
    nearest = (z.abs().clamp(max=6).unsqueeze(-1) - grid).abs().amin(-1)
    assert bool(((actual.abs() - z.abs().clamp(max=6)).abs() <= nearest + 1e-4).all())
    assert bool(((actual == 0) | (actual.sign() == z.sign())).all())
    assert float(problem.tensors["amax"]) == pytest.approx(float(z.abs().max()), rel=1e-5)


def test_bytes_are_exponents() -> None:
    """Scale factors of torch.int8 are e8m0."""
    problem = case("gemm_amax", dtype=E4M3, scale=E8M0)
    for name in ("sfa", "sfb"):
        problem.tensors[name] = problem.tensors[name].view(torch.int8)
    problem.operation()(**problem.arguments())
    check(problem)


@pytest.mark.parametrize("l", [1, 3])
def test_strides_of_prob(l: int) -> None:  # noqa: E741
    for stride in ((l, l, 1), (1, 1, 40), (1, 40, 40)):
        problem = case("gemm_srelu", 40, 64, 32, l)
        prob = torch.empty_strided((40, 1, l), stride).copy_(problem.tensors["prob"])
        problem.tensors["prob"] = prob
        problem.operation()(**problem.arguments())
        check(problem)
    problem.tensors["prob"] = torch.rand(80, 1, l)[::2]
    with pytest.raises(ValueError, match="prob tensor stride mismatch"):
        problem.operation().check_support()


def test_dprob_is_added_to() -> None:
    problem = case("gemm_dsrelu")
    gemm = problem.operation()
    gemm(**problem.arguments())
    once = problem.tensors["dprob"].clone()
    gemm(**problem.arguments())
    torch.testing.assert_close(problem.tensors["dprob"], 2 * once)


def test_nan_reaches_amax() -> None:
    problem = case("gemm_amax", l=2)
    problem.tensors["a"][3, 4, 1] = float("nan")
    problem.operation()(**problem.arguments())
    assert problem.tensors["amax"].isnan().all()
    assert problem.tensors["c"].isnan().any(1).nonzero().tolist() == [[3, 1]]


CLUSTER = r"cluster_shape_mn: got \(8, 1\); allowed: powers of 2 up to 4"
AMAX: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"amax": False}, {}, ValueError, "amax tensor: got None; allowed: a tensor"),
    ({"dtype": E4M3, "out": E5M2}, {}, NotImplementedError, "c tensor dtype: got float8_e5m2; allowed: float32,"),
    ({"m": 256}, {"mma_tiler_mn": (256, 128), "cluster_shape_mn": (2, 1)}, NotImplementedError, "allowed: 128 rows"),
    ({}, {"mma_tiler_mn": (256, 256)}, NotImplementedError, "allowed: 128 rows"),
    ({}, {"cluster_shape_mn": (8, 1)}, ValueError, CLUSTER),
    ({}, {"mma_tiler_mn": (128, 64)}, ValueError, "mma_tiler_mn: got .128, 64.; allowed: 128, 256 columns"),
    (
        {"dtype": FP4, "scale": E8M0, "vector": 32, "k": 128},
        {"mma_tiler_mn": (128, 256)},
        ValueError,
        "allowed: 128 columns, for operands of float4_e2m1fn_x2 with k up to 128",
    ),
    (
        {"dtype": FP4, "scale": E8M0, "vector": 16, "k": 256},
        {"mma_tiler_mn": (128, 256)},
        NotImplementedError,
        "allowed: 128 columns, for sf_vec_size=16 and c of bfloat16",
    ),
]
SRELU: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"dtype": FP4, "scale": E8M0, "vector": 32, "out": E4M3}, {}, ValueError, "d tensor dtype: got float8_e4m3fn; al"),
    ({}, {"mma_tiler_mn": (128, 96)}, ValueError, "mma_tiler_mn: got .128, 96.; allowed: 64, 128, 192, 256 columns"),
    ({}, {"cluster_shape_mn": (8, 1)}, ValueError, CLUSTER),
    ({}, {"mma_tiler_mn": (256, 256), "cluster_shape_mn": (1, 2)}, ValueError, "allowed: an even number of rows"),
]
REFUSED = [("gemm_amax", *row) for row in AMAX] + [(name, *row) for name in BOTH for row in SRELU]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("name", "kwargs", "more", "error", "words"), REFUSED)
def test_refused(arch: str, name: str, kwargs: dict[str, Any], more: dict[str, Any], error: Any, words: str) -> None:
    problem = case(name, device="meta", **kwargs)
    with pytest.raises(error, match=f"{problem.family.cls.__name__}: .*{words}"):
        problem.operation(**{"arch": arch, **more}).check_support()


@pytest.mark.parametrize("arch", ARCHES)
def test_four_bit_results_are_of_four_bit_operands_and_n_major(arch: str) -> None:
    kwargs = {"scale": E8M0, "vector": 32, "device": "meta"}
    assert case("gemm_amax", dtype=FP4, out=FP4, **kwargs).operation(arch=arch).check_support()
    problem = case("gemm_amax", out=FP4, device="meta")
    words = "c tensor dtype: got float4_e2m1fn_x2; allowed: other types, for operands of bfloat16"
    with pytest.raises(ValueError, match=words):
        problem.operation(arch=arch).check_support()
    problem = case("gemm_amax", dtype=FP4, **kwargs)
    problem.tensors["c"] = torch.empty_strided((64, 256, 1), (1, 64, 16384), dtype=torch.uint8, device="meta").view(FP4)
    with pytest.raises(ValueError, match="c tensor, packed: got m-major; allowed: n-major"):
        problem.operation(arch=arch).check_support()
    problem = case("gemm_amax", dtype=FP4, **kwargs)
    problem.tensors["a"] = torch.empty_strided((64, 128, 1), (1, 64, 8192), dtype=torch.uint8, device="meta").view(FP4)
    with pytest.raises(ValueError, match="a tensor, packed: got m-major; allowed: k-major"):
        problem.operation(arch=arch).check_support()


def test_wrapper_has_no_four_bit_results() -> None:
    tensors = case("gemm_amax", dtype=FP4, scale=E8M0, vector=32).tensors
    for kind in (FP4, torch.uint8):
        with pytest.raises(ValueError, match=r"gemm_amax_wrapper: c_dtype: got .*use the class GemmAmax"):
            cudnn.gemm_amax_wrapper(*(tensors[key] for key in ("a", "b", "sfa", "sfb")), c_dtype=kind)


@pytest.mark.parametrize("name", BOTH)
def test_c_and_d_have_one_major(name: str) -> None:
    problem = case(name, device="meta")
    problem.tensors["c"] = case(name, majors="kkm", device="meta").tensors["c"]
    with pytest.raises(ValueError, match="d tensor major mismatch: expected m, that of c, got n"):
        problem.operation(arch="sm_90a").check_support()


def test_c_of_the_backward_pass_has_no_8_bits() -> None:
    problem = case("gemm_dsrelu", side=BF16)
    problem.tensors["c"] = oracle.strided(torch.randn(128, 256, 1).to(E4M3), "k")
    with pytest.raises(ValueError, match="c tensor dtype mismatch: expected torch"):
        problem.operation().check_support()


@pytest.mark.parametrize("name", BOTH)
def test_default_tile_and_cluster(name: str) -> None:
    problem = case(name, device="meta")
    gemm = problem.family.cls(**problem.samples(), arch="sm_90a")
    assert gemm.check_support()
    assert (gemm.mma_tiler_mn, gemm.cluster_shape_mn) == ((256, 256), (2, 1))
    assert problem.family.cls(**problem.samples(), mma_tiler_mn=(128, 256), arch="sm_90a").cluster_shape_mn == (1, 1)


@pytest.mark.parametrize(
    ("name", "numbers", "more"),
    [
        ("gemm_amax", [], []),
        ("gemm_srelu", [0.5, "m", F32, BF16], [(1.0, "n", BF16, E4M3, torch.ones(1), 32)]),
        ("gemm_dsrelu", [0.5, "n", F16], [(1.0, "n", E4M3, torch.ones(1), 32)]),
        (
            "gemm_swiglu",
            [0.5, "m", None, F16],
            [(1.0, "n", BF16, BF16), (1.0, "n", BF16, E4M3, None, None, torch.ones(1), 32)],
        ),
    ],
)
def test_operator(name: str, numbers: list[Any], more: list[tuple[Any, ...]]) -> None:
    rows = (40, 64, 40) if name == "gemm_dsrelu" else (40, 64)
    tensors: list[Any] = [oracle.plain(count, 64, 2).tensor for count in rows]
    tensors += [None, None, torch.rand(40, 1, 2)] if name in BOTH else []
    named = {"c_dtype": BF16} if name == "gemm_amax" else {}
    operator = getattr(cudnn.ops, name)
    expected = getattr(cudnn, f"{name}_wrapper")(*tensors, *numbers, **named)
    for tensor, other in zip(getattr(torch.ops.cudnn, name)(*tensors, *numbers, **named), expected, strict=True):
        assert torch.equal(tensor, other) if other is not None else tensor.numel() == 0
    for kwargs in (numbers, *more):
        torch.library.opcheck(operator.operator, (*tensors, *kwargs))
    compiled = torch.compile(lambda a: operator(a, *tensors[1:])[1] + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(tensors[0]), operator(*tensors)[1] + 1)


def test_operator_of_four_bit_operands() -> None:
    s = oracle.scaled(128, 64, 1, FP4, E4M3, 16)
    arguments = (s.tensor, s.tensor.clone(), s.scales, s.scales, "m", BF16, 16)
    compiled = torch.compile(
        lambda *x: cudnn.ops.gemm_amax(*x, *arguments[4:])[1] * 2, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*arguments[:4]), cudnn.ops.gemm_amax(*arguments)[1] * 2)
