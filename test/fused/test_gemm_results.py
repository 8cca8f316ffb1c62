"""Results of the dense fused GEMMs, the same problems everywhere: reference, emulated architectures, GPU.

The matrix is that of ``cudnn selftest``, its tensors and definitions are those of the tests. Without ``--full`` the
emulators run a fixed sample of it; the whole takes about 45 minutes of one core:

    pytest -n auto test/fused/test_gemm_results.py --full
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.demo_cases.gemm_variants import Variant, sample, variants
from cudnn.fused import host
from cudnn.runtime import launch
from cudnn_kernels import architecture
from support.api_cases import BY_NAME, FAMILIES, case, check, execute, of_variant, slack
from support.oracle import BF16, E4M3, E5M2, E8M0, F16, F32, FP4
from support.selection import ARCHES, WHERE, brief, in_turn, selected

pytest.importorskip("ptx_emulator")

NAMES = list(BY_NAME)
USUAL = [pytest.param(name, marks=[] if BY_NAME[name] in FAMILIES else pytest.mark.full) for name in NAMES]
PLAIN = [
    {"dtype": BF16, "majors": "kkn"},
    {"dtype": F16, "majors": "mnm", "l": 3},
    {"dtype": F32, "majors": "knm"},
    {"dtype": F32, "majors": "mkn", "m": 64, "l": 2},
    {"dtype": E4M3, "majors": "mkn"},
    {"dtype": E5M2, "majors": "knm", "l": 2},
    {"dtype": BF16, "m": 1, "k": 8, "n": 64},
    {"dtype": BF16, "m": 13 * 8, "k": 7 * 8, "n": 192, "majors": "mnm"},
]
BLOCK_SCALED = [
    {"dtype": FP4, "scale": E8M0, "vector": 16},
    {"dtype": FP4, "scale": E8M0, "vector": 32, "l": 2},
    {"dtype": FP4, "scale": E4M3, "vector": 16},
    {"dtype": E4M3, "scale": E8M0, "majors": "knm"},
    {"dtype": E5M2, "scale": E8M0, "majors": "mkn"},
    {"dtype": E4M3, "scale": F32, "k": 144, "l": 2},
    {"dtype": E5M2, "scale": F32, "majors": "mnm", "rows": 1},
]

SMALL = {"m": 72, "n": 128, "k": 64}
EDGES: list[tuple[str, dict[str, Any]]] = [
    ("gemm_swiglu", {"majors": "knm", "l": 2}),
    ("gemm_swiglu", {"dtype": F16, "side": None, "out": F16, "majors": "mkn"}),
    ("gemm_swiglu", {"dtype": E5M2, "k": 144, "side": F32, "out": BF16}),
    ("gemm_swiglu", {"m": 128, "dtype": FP4, "scale": E4M3, "side": E4M3}),
    ("gemm_swiglu", {"out": E4M3, "side": BF16, "amax": True}),
    ("gemm_amax", {"m": 1, "n": 64, "k": 8, "out": F32}),
    ("gemm_amax", {"dtype": E4M3, "majors": "mnm", "m": 80, "k": 112}),
    ("gemm_amax", {"dtype": F32, "majors": "mnn", "k": 36, "out": F16}),
    ("gemm_amax", {"dtype": E4M3, "scale": E8M0, "majors": "mkn", "m": 80, "l": 2}),
    ("gemm_amax", {"dtype": FP4, "scale": E8M0, "vector": 32, "out": FP4}),
    ("gemm_srelu", {"out": E5M2, "amax": True, "l": 2}),
    ("gemm_srelu", {"dtype": E4M3, "majors": "kkm", "m": 80, "out": F32, "side": F16}),
    ("gemm_dsrelu", {"l": 2, "amax": True}),
    ("gemm_dsrelu", {"dtype": E5M2, "scale": E8M0, "out": E4M3, "amax": True}),
    ("gemm_dsrelu", {"dtype": F16, "majors": "nnm", "side": F32, "out": F32}),
    ("gemm_swiglu", {"dtype": E4M3, "scale": F32, "k": 144, "side": F32}),
    ("gemm_srelu", {"dtype": E4M3, "scale": F32, "out": E4M3, "n": 208, "k": 144}),
    ("gemm_amax", {"dtype": E4M3, "scale": F32, "k": 272, "n": 200, "out": F32}),
    ("gemm_srelu", {"dtype": E5M2, "scale": F32, "rows": 1, "l": 2}),
    ("gemm_dsrelu", {"dtype": E4M3, "scale": F32, "majors": "mkn", "m": 80, "k": 160}),
    ("gemm_dsrelu", {"out": E4M3, "vector": 128, "amax": True}),
]


def run(where: str, name: str, given: dict[str, Any]) -> Any:
    problem = case(name, **given, device="cuda" if where == "gpu" else "cpu")
    alpha = None if name == "gemm_amax" else 0.5
    report = execute(problem, where, alpha)
    check(problem, alpha or 1.0, slack(problem))
    return report


HALVES = {"glu_layout": "concatenated"}
GATE_FIRST = {**HALVES, "glu_order": "gate_up"}
GATES: list[tuple[str, dict[str, Any]]] = [
    ("gemm_dswiglu", {"amax": True, "n": 96}),
    ("gemm_swiglu", {**HALVES, "m": 128, "n": 512, "dtype": FP4, "scale": E4M3}),
    ("gemm_dswiglu", {"dtype": E4M3, "scale": E8M0, "majors": "mkm", "m": 80, "out": F32, "amax": True}),
    ("gemm_dswiglu", {**GATE_FIRST, "n": 96, "amax": True}),
    ("gemm_dswiglu", {"l": 2, "n": 160, "out": E4M3}),
    ("gemm_swiglu", {**GATE_FIRST, "dtype": E4M3, "side": F32, "majors": "kkm", "m": 80, "l": 2}),
    ("gemm_swiglu", {**HALVES, "dtype": F32, "out": E4M3, "side": F16, "n": 192}),
    ("gemm_swiglu", {"glu_order": "gate_up"}),
    ("gemm_dswiglu", {**HALVES, "majors": "mnm", "side": F16, "out": F32, "l": 2}),
    ("gemm_swiglu", {"out": E4M3, "vector": 128, "n": 576, "m": 136, "side": BF16, "amax": True}),
    ("gemm_swiglu", {**HALVES, "out": E5M2, "vector": 128, "n": 704, "side": None}),
    ("gemm_swiglu", {**HALVES, "n": 320}),
    ("gemm_swiglu", {**GATE_FIRST, "m": 256, "n": 768, "k": 288, "l": 2, "dtype": E5M2, "scale": E8M0, "out": F16}),
    ("gemm_swiglu", {**HALVES, "dtype": E4M3, "scale": F32, "n": 448, "k": 272, "l": 2}),
    ("gemm_swiglu", {**HALVES, "dtype": E4M3, "scale": F32, "n": 320, "rows": 1, "side": None}),
]


@pytest.mark.parametrize(
    ("where", "name", "given"), [*in_turn(EDGES, 2, places=WHERE), *in_turn(GATES, 2, places=WHERE)], ids=str
)
def test_partial_tiles(where: str, name: str, given: dict[str, Any]) -> None:
    report = run(where, name, {**SMALL, **given})
    if where == "sm_90a":
        of_sums = given.get("scale", F32) == F32
        prepared = given.get("majors", "kk")[:2] != "kk" if of_sums else True
        assert len(report.launches) == 1 + (prepared and given.get("dtype", BF16) not in (BF16, F16))
    elif where == "sm_100a":
        assert len(report.launches) == 1


@pytest.mark.parametrize("where", [where for where in WHERE if getattr(where, "values", (where,))[0] != "sm_100a"])
def test_operands_and_gated_results_by_128(where: str) -> None:
    run(where, "gemm_swiglu", {**SMALL, "dtype": E4M3, "scale": F32, "n": 320, "k": 144, "out": E4M3, "side": None})


SLOW = [pytest.param(where, marks=pytest.mark.full) for where in ARCHES]


@pytest.mark.parametrize("where", [WHERE[0], *SLOW, WHERE[-1]])
def test_factors_that_are_powers_of_two(where: str) -> None:
    """Scale factors just above the usual ones, and matching elements."""
    actual = []
    problem = case("gemm_srelu", out=E4M3, vector=128, n=208, device="cuda" if where == "gpu" else "cpu")
    for chosen in (False, True):
        execute(problem, where, power_of_two_scales=chosen)
        actual.append((problem.tensors["d"].float(), problem.tensors["sfd"].clone()))
    (d, factors), (again, powers) = actual
    mantissa, exponent = factors.frexp()
    assert torch.equal(powers, torch.ones_like(powers).ldexp(exponent - (mantissa == 0.5).int()))
    d, again = (x * s.repeat_interleave(128, 1)[:, :208] for x, s in ((d, factors), (again, powers)))
    assert bool(d.any())
    torch.testing.assert_close(again, d, rtol=1 / 7, atol=float(powers.max()) / 256)


@pytest.mark.parametrize("where", [WHERE[0], *SLOW, WHERE[-1]])
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("given", PLAIN + BLOCK_SCALED, ids=str)
def test_types_and_majors(where: str, name: str, given: dict[str, Any]) -> None:
    run(where, name, given)


@pytest.mark.parametrize("where", [WHERE[0], *SLOW, WHERE[-1]])
@pytest.mark.parametrize("name", [x for name, x in zip(NAMES, USUAL, strict=True) if BY_NAME[name].quantized])
@pytest.mark.parametrize("out", [E4M3, E5M2])
@pytest.mark.parametrize("given", [{}, {"dtype": F16, "majors": "mnm", "l": 2}, {"m": 5, "n": 192}], ids=str)
def test_quantised_results(where: str, name: str, out: Any, given: dict[str, Any]) -> None:
    run(where, name, {"out": out, "amax": True, **given})


def matrix() -> list[Any]:
    """Places and variants; those that only ``--full`` runs are marked."""
    gpu = launch.device_architecture(0) if torch.cuda.is_available() else "sm_90a"
    actual = []
    for where, arch, count in (("reference", "sm_90a", 40), ("sm_90a", "sm_90a", 1), ("sm_100a", "sm_100a", 1)):
        usual = set(sample(arch, count))
        actual += [(where, v, [] if v in usual else [pytest.mark.full]) for v in variants(arch)]
    usual = set(sample(gpu, 40))
    actual += [("gpu", v, [pytest.mark.gpu, *([] if v in usual else [pytest.mark.full])]) for v in variants(gpu)]
    known = [row for row in actual if row[1].api in BY_NAME]  # declared later: in test_declarations, test_selftest
    return selected([pytest.param(where, v, marks=marks, id=f"{where}: {v}") for where, v, marks in known])


@pytest.mark.parametrize(("where", "variant"), matrix())
def test_matrix(where: str, variant: Variant) -> None:
    problem = of_variant(variant, "cuda" if where == "gpu" else "cpu")
    execute(problem, where, mma_tiler_mn=variant.tile, cluster_shape_mn=variant.cluster)
    check(problem, slack=slack(problem))


CLUSTERS = [(m, n) for m in (1, 2, 4) for n in (1, 2, 4) if m * n <= 8]


def drawn(draw: random.Random) -> tuple[Any, dict[str, Any]]:
    """A problem that its API takes, and options; others are generated again. Sizes reach beyond tiles and clusters."""

    def size(most: int, *steps: int) -> int:
        step = draw.choice(steps)
        return step * draw.randint(1, most // step)

    while True:
        name, formats = draw.choice(NAMES), draw.choice([*SCALED_FORMATS, *PLAIN_FORMATS])
        results = [draw.choice((BF16, F16, F32, E4M3, E5M2)) for _ in range(2)]
        given = {
            "m": size(520, 1, 8, 128),
            "n": size(520, 8, 64, 128),
            "k": size(400, 8, 32),
            "l": draw.randint(1, 2),
            "majors": "".join(map(draw.choice, ("mk", "nk", "mn"))),
            "out": results[0],
            "side": results[1],
            "amax": draw.choice((None, True)),
            **formats,
        }
        chosen = {
            "mma_tiler_mn": (draw.choice((128, 256)), draw.choice((32, 64, 96, 128, 192, 256))),
            "cluster_shape_mn": draw.choice(CLUSTERS),
        }
        try:
            problem = case(name, **given, device="meta")
            problem.operation(**chosen, arch="sm_100a").check_support()
        except (ValueError, NotImplementedError, RuntimeError):
            continue  # also where random operands cannot be made, of an odd k
        return case(name, **given), chosen


PLAIN_FORMATS = [{"dtype": dtype} for dtype in (BF16, F16, F32, E4M3, E5M2)]
SCALED_FORMATS = [{key: given[key] for key in given if key in ("dtype", "scale", "vector")} for given in BLOCK_SCALED]
BRIEFLY: dict[str, Any] = {"derandomize": True, "suppress_health_check": list(HealthCheck), "database": None}


def try_random_problem(where: str, seed: int) -> None:
    problem, chosen = drawn(random.Random(seed))
    execute(problem, where, **chosen)
    check(problem, slack=slack(problem))


@pytest.mark.parametrize("where", [WHERE[0], *SLOW])
@settings(max_examples=1, **BRIEFLY)
@given(seed=st.integers(0, 2**32 - 1))
def test_random_problems(where: str, seed: int) -> None:
    """Sizes, types, majors, tiles and clusters of any kind."""
    try_random_problem(where, seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("share", range(8))  # for the same number of processes
@pytest.mark.parametrize("where", [WHERE[0], *ARCHES])
@settings(max_examples=6, **{**BRIEFLY, "derandomize": False})
@given(seed=st.integers(0, 2**32 - 1))
def test_many_random_problems(where: str, share: int, seed: int) -> None:
    try_random_problem(where, seed)


def test_every_variant_has_room_for_two_k_tiles(pytestconfig: pytest.Config) -> None:
    """In Blackwell's shared memory, with its epilogue's staging buffers; with 32 bits in both too. One in five."""
    from cudnn_kernels.sm100.gemm import Gemm

    every = [v for v in variants("sm_100a") if v.api in BY_NAME]
    wide = [replace(v, side="float32") for v in every if v.api in ("gemm_srelu", "gemm_dsrelu", "gemm_dswiglu")]
    plain = {"shape": (256, 256, 160, 1), "majors": "kkn"}
    different = list(dict.fromkeys(replace(v, **plain, cluster=(v.tile[0] // 128, 1)) for v in every + wide))
    for v in different[:: 1 if pytestconfig.getoption("full") else 5]:
        problem = of_variant(v, "meta")
        gemm = problem.operation(mma_tiler_mn=v.tile, cluster_shape_mn=v.cluster, arch="sm_100a")
        assert gemm.check_support()
        ((_, configuration, _),) = gemm.kernels()
        assert Gemm(configuration).stages() >= 2


@pytest.mark.parametrize(
    ("arch", "name", "tile", "cluster"),
    brief(
        [
            ("sm_90a", "gemm_swiglu", (128, 128), (1, 1)),
            ("sm_90a", "gemm_dsrelu", (128, 128), (1, 1)),
            ("sm_100a", "gemm_swiglu", (128, 96), (1, 1)),
            ("sm_100a", "gemm_dsrelu", (256, 64), (2, 1)),
        ],
        0,
    ),
)
def test_one_cluster_takes_many_tiles(
    arch: str, name: str, tile: Any, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SMs of one cluster; on sm_100a the caller's, on sm_90a one of two CTAs."""
    size = 2 if arch == "sm_90a" else cluster[0] * cluster[1]
    few = replace(architecture.ARCHITECTURES[arch], num_sms=size)
    monkeypatch.setattr(host, "ARCHITECTURES", {**architecture.ARCHITECTURES, arch: few})
    problem = case(name, 264, 192, 72, 2, out=F16, side=F16, dtype=F16, amax=name == "gemm_dsrelu")
    report = execute(problem, arch, mma_tiler_mn=tile, cluster_shape_mn=cluster)
    check(problem)
    (launched,) = report.launches
    assert torch.Size(launched.grid).numel() == size


def test_architectures_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case("gemm_amax", **SMALL)
    with pytest.raises(ValueError, match=r"cudnn.emulation: arch: got 'sm_80'; allowed: sm_90a, sm_100a"):
        execute_on(problem, "sm_80")
    monkeypatch.setattr(launch, "emulated_architecture", lambda: "sm_120a")
    with pytest.raises(RuntimeError, match="GemmAmax: architecture: got sm_120a; allowed: sm_90a, sm_100a"):
        execute(problem, "reference")


def execute_on(problem: Any, arch: str) -> None:
    with cudnn.emulation(arch):
        execute(problem, "reference")
