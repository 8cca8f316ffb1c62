"""``cudnn selftest``: its variants, verdicts and report; on the GPU in child processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

import cudnn
from cudnn.cli import selftest
from cudnn.demo_cases import gemm_operands, grouped
from cudnn.demo_cases.gemm_variants import Variant, sample, variants
from cudnn.fused import registry
from cudnn.runtime import launch
from support.cli import invoke, words
from support.selection import brief

ARCHITECTURES = ("sm_90a", "sm_100a")
SMALL = Variant("gemm_amax", (128, 128, 64, 1))
GROUPED = sorted(name for name in registry.packages() if "grouped" in name)


def run(*arguments: str) -> Result:
    return invoke("selftest", *arguments)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Two variants."""
    chosen = [SMALL, Variant("gemm_srelu", (128, 128, 256, 1), "float8_e4m3fn", scale="float8_e8m0fnu", vector=32)]
    monkeypatch.setattr(selftest, "sample", lambda arch, count: chosen)
    monkeypatch.setattr(grouped, "variants", lambda full: [])
    return chosen


def test_matrix() -> None:
    """Every variant of sm_90a is one of sm_100a, which differ in nothing but tile and cluster from the others."""
    hopper, blackwell = (variants(arch) for arch in ARCHITECTURES)
    assert len(set(blackwell)) == len(blackwell) > len(set(hopper)) == len(hopper)
    assert set(hopper) < set(blackwell)
    assert {v.api for v in hopper} == set(registry.gemms())
    tilings = {(v.tile, v.cluster) for v in blackwell if v.api == "gemm_srelu" and v.scale}
    assert {((128, 128), (1, 1)), ((128, 256), (2, 1)), ((256, 256), (2, 2))} < tilings
    for arch in ARCHITECTURES:
        for count in (8, 60):
            chosen = sample(arch, count)
            assert count <= len(chosen) < 2 * count
            assert {v.api for v in chosen} == {v.api for v in hopper}


def test_grouped_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each API one, or one for each type; here the reference runs, against itself or a wrong one."""
    few, every = grouped.variants(False), grouped.variants(True)
    assert {v.api for v in every} == {v.api for v in few} == {x for x in registry.packages() if "grouped" in x}
    assert set(few) < set(every)
    tried = [v for v in few if v.api in ("grouped_gemm_wgrad", "discrete_grouped_gemm_swiglu")]
    assert {selftest.try_variant(v, "cpu").verdict for v in tried} == {selftest.AGREES}
    expected = grouped.expected
    monkeypatch.setattr(grouped, "expected", lambda *given: {name: 1.5 * x for name, x in expected(*given).items()})
    assert {selftest.try_variant(v, "cpu").verdict for v in tried} == {selftest.FAILED}


@pytest.mark.parametrize("arch", brief(ARCHITECTURES, 0))
@pytest.mark.parametrize("name", brief(GROUPED, GROUPED.index("grouped_gemm_glu_hadamard_quant")))
def test_kernels_of_grouped_gemms(name: str, arch: str) -> None:
    """In the emulator, races on: experts end where the API lets them."""
    with cudnn.emulation(arch, races=True):
        assert selftest.try_variant(grouped.Variant(name, "bf16"), "cpu").verdict == selftest.AGREES


@pytest.mark.parametrize("arch", brief(ARCHITECTURES, 0))
def test_in_the_emulator(arch: str, few: list[Variant], tmp_path: Path) -> None:
    result = run("--arch", arch, "--emulate", "--json", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["about"]["where"] == f"emulated {arch}"
    assert report["about"]["torch"] == torch.__version__
    found = [(f["name"], f["verdict"]) for f in report["findings"]]
    assert found == [(str(variant), selftest.AGREES) for variant in few]
    assert f"0 of {len(report['findings'])} failed." in words(result)


def test_wrong_results_make_it_fail(few: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GEMM with another definition, and one that is refused."""
    few[1] = Variant("gemm_srelu", (128, 128, 256, 1), scale="float8_e8m0fnu")
    operands = gemm_operands.operands

    def doubled(variant: Variant, device: str) -> Any:
        found = operands(variant, device)
        found.product.mul_(2)
        return found

    monkeypatch.setattr("cudnn.demo_cases.dense.operands", doubled)
    result = run("--arch", "sm_90a", "--emulate")
    assert result.exit_code == 1
    assert f"gemm_amax, {SMALL}: amax: error" in words(result)
    assert "GemmSrelu: a tensor dtype, with scale factors: got bfloat16" in words(result)
    assert "2 of" in result.output.splitlines()[-1]


def test_processes_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every variant fails in its process, for want of a GPU or of such a shape; each has a finding."""
    chosen = [Variant("gemm_amax", (128, 128, 60, 1)), Variant("gemm_srelu", (128, 128, 60, 1))]
    findings = list(selftest._on_gpu(chosen))
    assert [(f.group, f.verdict) for f in findings] == [(v.api, selftest.FAILED) for v in chosen]
    assert all("Error" in finding.detail for finding in findings)
    monkeypatch.setattr(selftest, "TIMEOUT", 0.01)
    assert [f.detail for f in selftest._on_gpu(chosen[:1])] == ["no end in 0.01 s"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arch", "sm_80", "--emulate"], "got 'sm_80'; allowed: sm_90a, sm_100a."),
        (["--arch", "sm_100a"], "got 'sm_100a'; here: sm_90a. To fix it, add --emulate."),
    ],
)
def test_what_it_cannot_do_is_refused(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "device_architecture", lambda index: "sm_90a")
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in words(result)


@pytest.mark.gpu
def test_on_the_gpu(few: list[Variant]) -> None:
    result = run("--arch", launch.device_architecture(0))
    assert result.exit_code == 0, result.output
