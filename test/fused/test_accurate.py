"""Operands of 8 bits, whose products Hopper's tensor cores add up with few bits, unless ``accurate`` is asked for.

The emulator has the chip's bits.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import cudnn
from cudnn.runtime import launch
from support import oracle
from support.api_cases import NAMES, case, check, execute
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32
from support.selection import ARCHES, WHERE, brief, in_turn

pytest.importorskip("ptx_emulator")


def within(where: str) -> Any:
    return cudnn.emulation(where) if where in ARCHES else contextlib.nullcontext()


def few_bits(where: str) -> bool:
    """Whether 8-bit MMAs accumulate with 13 bits there."""
    return where == "sm_90a" or (where == "gpu" and launch.device_architecture(0) == "sm_90a")


def far_off(actual: torch.Tensor, expected: torch.Tensor) -> int:
    """How many values miss a tolerance of 0.01, and 0.009 of the value."""
    expected = expected.to(actual.dtype).double()
    return int(((actual.double() - expected).abs() > 0.01 + 0.009 * expected.abs()).sum())


@pytest.mark.parametrize("where", brief(WHERE, 0, 1, 3))
def test_sums_of_8_bits_within_a_hundredth(where: str) -> None:
    """Operands between -2 and 2, 512 products each."""
    device = "cuda" if where == "gpu" else "cpu"
    a, b = ((torch.rand(rows, 512, 1) * 4 - 2).to(E4M3).to(device) for rows in (128, 64))
    z = torch.einsum("mkl,nkl->mnl", a.double(), b.double())
    misses = {}
    for accurate in (False, True):
        with within(where):
            actual = cudnn.gemm_swiglu_wrapper(a, b, ab12_dtype=F32, c_dtype=F16, accurate=accurate)
        misses[accurate] = far_off(actual["ab12_tensor"], z), far_off(actual["c_tensor"], oracle.swiglu(z))
    assert misses[True] == (0, 0)
    assert (misses[False] == (0, 0)) is not few_bits(where)


@pytest.mark.parametrize(
    ("where", "name", "dtype", "majors", "scale"),
    in_turn(
        [
            ("gemm_amax", E4M3, "kkn", None),
            ("gemm_dsrelu", E5M2, "knn", None),
            ("gemm_swiglu", E5M2, "mnn", None),
            ("gemm_srelu", E4M3, "mkm", None),
            ("gemm_amax", E4M3, "kkn", F32),
        ],
        0,
        places=WHERE,
    ),
    ids=str,
)
def test_accurate_results(where: str, name: str, dtype: Any, majors: str, scale: Any) -> None:
    """As near as those of operands of 16 bits; without, the error is up to 50 times as large."""
    arguments = {"dtype": dtype, "majors": majors, "l": 2, "amax": True, "scale": scale}
    problem = case(name, 80, 192, 144, **arguments, device="cuda" if where == "gpu" else "cpu")
    report = execute(problem, where, accurate=True)
    check(problem, slack=2e-5)
    if where == "sm_90a":
        assert len(report.launches) == 2  # both operands widened, the GEMM


@pytest.mark.parametrize("name", NAMES)
def test_what_it_changes(name: str) -> None:
    """Only 8-bit operands without scale factors on Hopper; it is part of the kernel's configuration."""

    def plan(arch: str, accurate: bool, **arguments: Any) -> tuple[Any, int]:
        problem = case(name, device="meta", **arguments)
        gemm = problem.operation(arch=arch, accurate=accurate)
        return gemm.plan(arch, gemm.sizes(gemm.descs)).configuration, gemm.workspace_size()

    for majors in ("kkn", "mnm"):
        (plain, _), (accurate, size) = (plan("sm_90a", value, dtype=E4M3, majors=majors) for value in (False, True))
        assert plain != accurate
        assert accurate.a.dtype == "bfloat16"
        assert size == 2 * (128 + 256) * 128
    for arch, arguments in (
        ("sm_100a", {"dtype": E4M3}),
        ("sm_90a", {"dtype": BF16}),
        ("sm_90a", {"dtype": F32}),
        ("sm_90a", {"dtype": E4M3, "scale": E8M0}),
    ):
        assert plan(arch, True, **arguments) == plan(arch, False, **arguments)


@pytest.mark.parametrize("name", brief(NAMES, 1))
def test_wrapper_and_operator(name: str) -> None:
    """Both pass it on, and the wrapper keeps an object for each."""
    import cudnn.ops

    problem = case(name, 64, 64, 512, dtype=E4M3)
    family = problem.family
    inputs = {key: problem.tensors[key] for key in ("a", "b", "sfa", "sfb", *family.extra)}
    types = {"gemm_amax": {"c_dtype": F32}, "gemm_swiglu": {"ab12_dtype": F32}}.get(
        name, {"c_dtype": F32} if name == "gemm_srelu" else {"d_dtype": F32}
    )
    family.cache.clear()
    actual = {}
    with cudnn.emulation("sm_90a"):
        for accurate in (False, True):
            arguments = {f"{key}_tensor": tensor for key, tensor in inputs.items()}
            first = family.wrapper(**arguments, **types, accurate=accurate)[0]
            actual[accurate] = first
            assert torch.equal(getattr(cudnn.ops, name)(**inputs, **types, accurate=accurate)[0], first)
    assert len(family.cache) == 2
    assert not torch.equal(actual[False], actual[True])
    family.cache.clear()
