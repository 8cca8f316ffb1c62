"""The kernels themselves, run on the CPU with race detection through the classes and wrappers of the fused GEMMs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from cudnn.gemm import base
from support.gemm_families import case, check, options
from support.gemms import BF16, E4M3, E5M2, E8M0, F16, F32, FP4

ptx_emulator = pytest.importorskip("ptx_emulator")

SMALL = {"m": 72, "n": 128, "k": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gemm_swiglu", {"majors": "knm", "l": 2}),
    ("gemm_swiglu", {"dtype": F16, "side": None, "out": F16, "majors": "mkn"}),
    ("gemm_swiglu", {"dtype": E5M2, "k": 144, "side": F32, "out": BF16}),
    ("gemm_swiglu", {"m": 128, "dtype": FP4, "scale": E4M3, "side": E4M3}),
    ("gemm_swiglu", {"out": E4M3, "side": BF16, "amax": True}),
    ("gemm_amax", {"m": 1, "n": 64, "k": 8, "out": F32}),
    ("gemm_amax", {"dtype": E4M3, "majors": "mnm", "m": 80, "k": 112}),
    ("gemm_amax", {"dtype": F32, "majors": "mnn", "k": 36, "out": F16}),
    ("gemm_amax", {"dtype": E4M3, "scale": E8M0, "majors": "mkn", "m": 80, "l": 2}),
    ("gemm_srelu", {"out": E5M2, "amax": True, "l": 2}),
    ("gemm_srelu", {"dtype": FP4, "scale": E8M0, "vector": 32, "side": E5M2}),
    ("gemm_srelu", {"dtype": E4M3, "majors": "kkm", "m": 80, "out": F32, "side": F16}),
    ("gemm_dsrelu", {"l": 2, "amax": True}),
    ("gemm_dsrelu", {"dtype": E5M2, "scale": E8M0, "out": E4M3, "amax": True}),
    ("gemm_dsrelu", {"dtype": F16, "majors": "nnm", "side": F32, "out": F32}),
]


@pytest.mark.parametrize(("name", "given"), CASES, ids=str)
def test_results_without_races(name: str, given: dict[str, Any]) -> None:
    problem = case(name, **{**SMALL, **given})
    alpha = {} if name == "gemm_amax" else {"alpha": 0.5}
    with cudnn.emulation("sm_90a", races=True) as report:
        problem.family.cls(**problem.samples(), **options(problem))(**problem.arguments(), **alpha)
    # TF32 has 10 bits of mantissa; the tensor cores add up 8-bit products with fewer bits than float32.
    slack = {F32: 3e-3, E4M3: 1e-3, E5M2: 1e-3}.get(given.get("dtype"), 1e-5) if "scale" not in given else 1e-5
    check(problem, **alpha, slack=slack)
    prepared = 2 if "scale" in given else sum(m != "k" for m in given.get("majors", "kk")[:2])
    wide = given.get("dtype", BF16) in (BF16, F16)
    assert len(report.launches) == 1 + (0 if wide else prepared)


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_dsrelu"])
def test_one_cluster_takes_many_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_MULTIPROCESSORS", {"sm_90a": 2})
    problem = case(name, 264, 192, 72, 2, out=F16, side=F16, dtype=F16, amax=True)
    with cudnn.emulation("sm_90a", races=True) as report:
        problem.family.cls(**problem.samples(), **options(problem))(**problem.arguments())
    check(problem)
    (launch,) = report.launches
    assert torch.Size(launch.grid).numel() == 2


def test_architectures_without_kernels_are_refused() -> None:
    problem = case("gemm_amax", **SMALL)
    with cudnn.emulation("sm_100a"), pytest.raises(RuntimeError, match="architecture: got sm_100a; allowed: sm_90a"):
        problem.family.cls(**problem.samples())(**problem.arguments())
