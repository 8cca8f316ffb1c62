"""GEMM + SwiGLU: its own rules, the activation, and the operator with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm_swiglu import GemmSwiglu, gemm_swiglu_wrapper
from cudnn.gemm_swiglu.gradients import swiglu_backward
from support import oracle
from support.api_cases import case, check, options
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32, FP4
from support.selection import ARCHES


def operation(problem: Any, **more: Any) -> GemmSwiglu:
    return GemmSwiglu(**problem.samples(), **{"arch": "sm_90a", **options(problem), **more})


@pytest.mark.parametrize("order", [(False, False), (False, True), (True, False), (True, True)])
def test_the_gradient_of_the_activation(order: tuple[bool, bool]) -> None:
    z = torch.randn(5, 192, 2, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(5, 96, 2, dtype=torch.float64)
    (expected,) = torch.autograd.grad(oracle.swiglu(z, *order), z, gradient)
    torch.testing.assert_close(swiglu_backward(z.detach(), gradient, *order), expected)


def test_ab12_need_not_be_stored() -> None:
    problem = case("gemm_swiglu", side=None)
    operation(problem, arch=None)(**problem.arguments())
    check(problem)
    actual = gemm_swiglu_wrapper(problem.a.tensor, problem.b.tensor, ab12_dtype=None, c_dtype=BF16)
    assert actual["ab12_tensor"] is None
    assert torch.equal(actual["c_tensor"], problem.tensors["c"])


def test_without_ab12_c_is_still_half_as_wide_as_the_product() -> None:
    problem, wider = case("gemm_swiglu", side=None), case("gemm_swiglu", 128, 512, side=None)
    gemm = operation(problem, arch=None)
    gemm.compile()
    with pytest.raises(ValueError, match=r"c tensor shape mismatch: expected \(128, 128, 1\), got \(128, 256, 1\)"):
        gemm.execute(**{**problem.arguments(), "c_tensor": wider.tensors["c"]})


SUPPORTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"out": F16, "side": F32}, {}),
    ({"dtype": F16, "side": F16, "out": F16}, {"acc_dtype": F16}),
    ({"dtype": E4M3, "side": BF16}, {"acc_dtype": F16, "mma_tiler_mn": (128, 96)}),
    ({"m": 256}, {"mma_tiler_mn": (256, 256)}),
    ({"m": 256}, {"mma_tiler_mn": (256, 32), "cluster_shape_mn": (4, 4)}),
    ({"amax": True, "out": F32}, {"cluster_shape_mn": (2, 2)}),
    ({"amax": True, "side": E5M2}, {}),
    ({"out": E5M2, "side": E4M3}, {}),
    ({"dtype": FP4, "scale": E8M0, "side": E4M3, "out": F16}, {}),
    ({"dtype": FP4, "scale": E8M0, "out": F16, "side": F32}, {"vector_f32": True, "ab12_stages": 2}),
    ({"dtype": E4M3, "scale": E8M0, "out": F32, "majors": "mnm"}, {}),
    ({"dtype": E4M3, "out": E4M3, "majors": "mnm"}, {}),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("kwargs", "more"), SUPPORTED, ids=str)
def test_supported(arch: str, kwargs: dict[str, Any], more: dict[str, Any]) -> None:
    assert operation(case("gemm_swiglu", device="meta", **kwargs), arch=arch, **more).check_support()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ({"n": 96}, {}, ValueError, "n: got 96; allowed: multiples of 64, pairs of 32"),
    ({"side": E4M3}, {}, NotImplementedError, "ab12 tensor dtype: got float8_e4m3fn; allowed: float32, float16,"),
    ({"out": F32}, {}, ValueError, "c tensor dtype: got float32; allowed: float16, bfloat16, without scale factors"),
    ({}, {"cluster_shape_mn": (2, 2)}, ValueError, r"cluster_shape_mn: got \(2, 2\); allowed: \(1, 1\), for a tile of"),
    ({"m": 256}, {"mma_tiler_mn": (256, 64), "cluster_shape_mn": (8, 4)}, ValueError, "allowed: at most 16 CTAs"),
    ({}, {"mma_tiler_mn": (128, 288)}, ValueError, "mma_tiler_mn: got .128, 288.; allowed: 32, 64, 96"),
    ({"dtype": BF16}, {"acc_dtype": F16}, ValueError, "acc_dtype: got torch.float16; allowed: torch.float32, for"),
    ({"dtype": F16, "side": F32}, {"acc_dtype": F16}, ValueError, "acc_dtype: got torch.float16; allowed:"),
    ({"dtype": F16, "side": F16, "amax": True}, {"acc_dtype": F16}, ValueError, "acc_dtype: got torch.float16;"),
    ({"amax": True, "out": F32, "side": F32}, {}, NotImplementedError, "c tensor dtype: got float32; allowed: float16"),
    ({"dtype": E4M3, "amax": True, "side": F32}, {}, ValueError, "ab12 tensor dtype: got float32; allowed: float16,"),
    ({"dtype": E4M3, "scale": E8M0, "side": E4M3}, {}, ValueError, "ab12 tensor dtype: got float8_e4m3fn; allowed:"),
    ({"dtype": E4M3, "scale": E8M0, "out": E4M3}, {}, ValueError, "c tensor dtype: got float8_e4m3fn; allowed:"),
    ({"dtype": FP4, "scale": E8M0, "vector": 32, "out": E4M3}, {}, ValueError, "c tensor dtype: got float8_e4m3fn;"),
    ({"dtype": FP4, "scale": E8M0, "majors": "kkm"}, {}, ValueError, "c tensor major: got m; allowed: n, for operands"),
    ({"dtype": FP4, "scale": E8M0}, {"mma_tiler_mn": (128, 96)}, ValueError, "allowed: multiples of 64 columns, for"),
    ({"dtype": FP4, "scale": E8M0, "amax": False}, {}, ValueError, "amax tensor: got None; allowed: a tensor, for"),
    ({"dtype": FP4, "scale": E8M0, "m": 100}, {}, ValueError, "m: got 100; allowed: multiples of 128, the tile, with"),
    ({"dtype": E4M3, "scale": E8M0, "n": 192}, {}, ValueError, "n: got 192; allowed: multiples of 128, the tile"),
    ({}, {"glu_layout": "halves"}, ValueError, "glu_layout: got 'halves'; allowed: 'interleaved' or 'concatenated'"),
    ({}, {"glu_order": "gate"}, ValueError, "glu_order: got 'gate'; allowed: 'up_gate' or 'gate_up'"),
    (
        {"majors": "knn"},
        {"glu_layout": "concatenated"},
        NotImplementedError,
        "b tensor major: got n; allowed: k, for glu_layout='concatenated'. To fix it, interleave the weights once",
    ),
]


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(("kwargs", "more", "error", "words"), REFUSED)
def test_refused(arch: str, kwargs: dict[str, Any], more: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=f"GemmSwiglu: .*{words}"):
        operation(case("gemm_swiglu", device="meta", **kwargs), arch=arch, **more).check_support()


def test_halves_of_weights_with_factors_are_whole_atoms() -> None:
    problem = case("gemm_swiglu", device="meta", dtype=FP4, scale=E8M0, n=384)
    assert operation(problem, arch="sm_90a", glu_layout="concatenated").check_support()
    with pytest.raises(NotImplementedError, match="on sm_100a: got 384; allowed: multiples of 256, whole atoms"):
        operation(problem, arch="sm_100a", glu_layout="concatenated").check_support()


def test_a_later_call_has_halves_of_whole_atoms_too() -> None:
    first, later = (case("gemm_swiglu", dtype=FP4, scale=E8M0, n=n) for n in (512, 384))
    created = operation(first, arch=None, glu_layout="concatenated")
    created.compile()
    kwargs = {parameter: later.tensors.get(name) for name, parameter in created.parameters.items()}
    created.execute(**kwargs)  # the reference takes them, and so does Hopper
    with (
        cudnn.emulation("sm_100a"),
        pytest.raises(NotImplementedError, match="on sm_100a: got 384; allowed: multiples of 256, whole atoms"),
    ):
        created.execute(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"n": 80}, "n: got 80; allowed: multiples of 32, the blocks of ab12"),
        ({"out": E4M3, "glu_layout": "concatenated"}, "d_ab12 tensor dtype: got .*, for glu_layout='concatenated'"),
        ({"out": E4M3, "dtype": FP4, "scale": E8M0}, "d_ab12 tensor dtype: got .*, for operands of float4"),
        ({"glu_order": "up"}, "glu_order: got 'up'; allowed: 'up_gate' or 'gate_up'"),
    ],
)
def test_what_the_backward_pass_refuses(kwargs: dict[str, Any], words: str) -> None:
    problem = case("gemm_dswiglu", device="meta", **kwargs)
    with pytest.raises(ValueError, match=f"GemmDswiglu: {words}"):
        problem.operation(arch="sm_90a").check_support()


def test_ab12_and_c_have_one_major() -> None:
    problem = case("gemm_swiglu", device="meta")
    problem.tensors["ab12"] = case("gemm_swiglu", majors="kkm", device="meta").tensors["ab12"]
    with pytest.raises(ValueError, match="c tensor major mismatch: expected m, that of ab12, got n"):
        operation(problem).check_support()


# The operator.


@pytest.mark.parametrize(("compiled", "halves"), [(False, False), (True, True)])
def test_gradients(compiled: bool, halves: bool) -> None:
    """Those of PyTorch for the definition, in float64; of both results and of one; with halves, gates first."""
    from cudnn.ops import gemm_swiglu

    layout: Any = {"glu_layout": "concatenated", "glu_order": "gate_up"} if halves else {}

    def loss(a: torch.Tensor, b: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ab12, c, *_ = gemm_swiglu(a, b, 0.5, "n", F32, F16, **layout)
        return (ab12 * weights[0]).sum() + (c.float() * weights[1]).sum()

    function = torch.compile(loss, backend="aot_eager") if compiled else loss
    a, b = (oracle.plain(size, 32, 2, F32).tensor.requires_grad_() for size in (24, 128))
    for scales in ((1.0, 1.0), (0.0, 1.0)):
        weights = (scales[0] * torch.randn(24, 128, 2), scales[1] * torch.randn(24, 64, 2).half().float())
        actual = torch.autograd.grad(function(a, b, weights), (a, b))
        wide = [x.detach().double().requires_grad_() for x in (a, b)]
        z = 0.5 * torch.einsum("mkl,nkl->mnl", *wide)
        activated = oracle.swiglu(z, halves, halves)
        expected = torch.autograd.grad((z * weights[0]).sum() + (activated * weights[1]).sum(), wide)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, check_dtype=False)


def test_gradients_of_16_bits_and_of_one_operand() -> None:
    from cudnn.ops import gemm_swiglu

    a, b = oracle.plain(24, 32).tensor.requires_grad_(), oracle.plain(128, 32).tensor
    gemm_swiglu(a, b, 1.0, "n", BF16, BF16)[1].float().square().sum().backward()
    wide = a.detach().double().requires_grad_()
    oracle.swiglu(torch.einsum("mkl,nkl->mnl", wide, b.double())).square().sum().backward()
    assert a.grad is not None
    assert wide.grad is not None
    assert a.grad.dtype == BF16
    error = (a.grad.double() - wide.grad).norm() / wide.grad.norm()
    assert float(error) < 0.01


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((1.0, "n", None, BF16), "got ab12_dtype=None; allowed: a stored ab12"),
        (
            (1.0, "n", BF16, E4M3, None, None, torch.ones(1), 32),
            "got operands of torch.bfloat16 and c of torch.float8_e4m3",
        ),
    ],
)
def test_no_gradients(arguments: tuple[Any, ...], words: str) -> None:
    from cudnn.ops import gemm_swiglu

    a, b = oracle.plain(24, 32).tensor.requires_grad_(), oracle.plain(128, 32).tensor
    ab12, c, *_ = gemm_swiglu(a, b, *arguments)
    with pytest.raises(RuntimeError, match=f"cudnn::gemm_swiglu: gradient: {words}"):
        (c if ab12.numel() == 0 else ab12).float().sum().backward()
