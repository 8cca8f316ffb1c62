"""``cudnn emulate``: fused APIs and scripts run in the emulator; faults and wrong results make it fail."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import Result

from cudnn import demo_cases
from cudnn.cli.emulate import instruction_class
from cudnn.rmsnorm_rht_amax import reference
from support.cli import invoke, words
from support.selection import brief

PAGE = (Path(__file__).parents[2] / "docs" / "laptop.md").read_text()
SCRIPT = PAGE.split('```python title="turn.py"\n')[1].split("```")[0]
STORE, LOAD = "    tile[thread] = a[thread]", "    b[thread] = tile[(thread + 1) % THREADS]"


def emulate(*arguments: str | Path) -> Result:
    return invoke("emulate", *arguments)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", "matrix product"),
        ("tcgen05.mma.cta_group::1.kind::f16", "matrix product"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "matrix product"),
        ("wgmma.wait_group.sync.aligned", "synchronization"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64", "synchronization"),
        ("cp.async.bulk.wait_group.read", "synchronization"),
        ("mbarrier.try_wait", "synchronization"),
        ("bar.sync", "synchronization"),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "asynchronous copy"),
        ("ld.param.b64", "parameter"),
        ("st.local.b32", "local memory"),
        ("ld.shared.v4.b32", "shared memory"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "shared memory"),
        ("red.global.max.s32", "global memory"),
        ("redux.sync.max.s32", "exchange in a warp"),
        ("bra", "control flow"),
        ("brev.b32", "integer, logic"),
        ("setp.lt.f32", "comparison, selection"),
        ("mov.b32", "move, address"),
        ("cvt.rn.bf16x2.f32", "conversion"),
        ("fma.rn.f32.bf16", "floating point"),
        ("add.rn.f16x2", "floating point"),
        ("add.s32", "integer, logic"),
    ],
)
def test_classes_of_instructions(text: str, name: str) -> None:
    assert instruction_class(text) == name


def test_comparison_is_of_the_worst_element() -> None:
    expected = torch.tensor([[1.0, 100.0], [0.0, 4.0]])
    found = expected + torch.tensor([[0.01, 0.1], [0.0, 0.0]])
    worst = demo_cases.compare("y", found, expected, relative=0.02)
    assert worst.error == pytest.approx(0.01, rel=1e-4)
    assert worst.allowed == pytest.approx(0.02)
    assert worst.passed
    assert not demo_cases.compare("y", found, expected, relative=0.001).passed
    assert demo_cases.compare("y", expected, expected, relative=0.0).passed
    for wrong in (math.nan, math.inf):
        assert not demo_cases.compare(
            "y", torch.full_like(expected, wrong), expected, relative=1.0, absolute=1.0
        ).passed


EVERY = [(name, arch) for name in demo_cases.PROGRAMS for arch in demo_cases.find(name).architectures]
USUAL = [
    ("gemm_amax", "sm_90a"),
    ("gemm_rope", "sm_100a"),
    ("grouped_gemm_glu", "sm_90a"),
    ("rmsnorm_rht_amax", "sm_100a"),
]
"""A program of each kind: an API's results are compared in its own tests too."""


@pytest.mark.parametrize(("name", "arch"), brief(EVERY, *map(EVERY.index, USUAL)))
def test_fused_apis(name: str, arch: str, tmp_path: Path) -> None:
    result = emulate(name, "--arch", arch, "--json", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    assert "data races none found" in words(result)
    assert "agrees with its reference" in words(result)
    assert max(map(len, result.output.splitlines())) <= 80
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["target"], report["arch"], report["races"]) == (name, arch, True)
    assert report["comparisons"]
    assert all(comparison["passed"] for comparison in report["comparisons"])
    (launch,) = report["launches"]
    for text in (
        f"{sum(launch['instructions'].values()):,}",
        *(f"{size:,} bytes" for size in launch["bytes"].values()),
    ):
        assert text in words(result)


def test_shape_seed_and_scheduler_arrive() -> None:
    arguments = ("rmsnorm_rht_amax", "--shape", "8x1024", "--scheduler", "random", "--no-races", "--json", "-")
    first, again, other = (json.loads(emulate(*arguments, "--seed", seed).stdout) for seed in "334")
    assert first["launches"][0]["bytes"]["shared to global bulk"] == 8 * 1024 * 2
    assert (first["scheduler"], first["seed"], first["races"]) == ("random", 3, False)
    assert first["comparisons"] == again["comparisons"] != other["comparisons"]


def test_a_wrong_result_makes_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference.rmsnorm_rht_amax

    def doubled(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        o, amax = right(*arguments)
        return 2 * o, amax

    monkeypatch.setattr(reference, "rmsnorm_rht_amax", doubled)
    result = emulate("rmsnorm_rht_amax")
    assert result.exit_code == 1
    assert "o wrong: error" in words(result)
    assert "amax agrees with its reference" in words(result)


def test_a_refused_shape_makes_it_fail() -> None:
    result = emulate("rmsnorm_rht_amax", "--shape", "16x520")
    assert result.exit_code == 1
    assert "RmsNormRhtAmax: columns of x: got 520" in words(result)
    assert "the run failed" in words(result)
    assert "Traceback" not in result.output


def test_a_defect_of_a_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = demo_cases.Problem(lambda: {}["o"], lambda _: [])
    monkeypatch.setattr(demo_cases, "find", lambda name: demo_cases.Program("", (), (), lambda shape, device: problem))
    assert isinstance(emulate("rmsnorm_rht_amax").exception, KeyError)


@pytest.mark.usefixtures("source_lines")
def test_the_race_of_the_documentation_is_shown_with_its_source(tmp_path: Path) -> None:
    script = tmp_path / "turn.py"
    script.write_text(SCRIPT)
    result = emulate(script)
    assert result.exit_code == 1
    for text in (STORE, LOAD):
        assert f"{script}:{SCRIPT.splitlines().index(text) + 1}\n{text}" in result.output
    assert "RaceError: PE103: race on shared memory" in result.output
    assert "block (0, 0, 0)" in result.output
    assert "the run failed" in words(result)
    outside = SCRIPT.replace("= a[thread]", "= a[thread + 4096]").replace("\nturn(", "\ntry:\n    turn(")
    script.write_text(outside.replace("assert b[0] == 1", "except RuntimeError: pass"))
    handled = emulate(script)
    assert "the run had a fault, which the script handled" in words(handled)
    assert "none found" not in words(handled)
    script.write_text(SCRIPT)
    without = emulate("--no-races", script)
    assert without.exit_code == 0, without.output
    assert "data races not looked for" in words(without)


def test_a_script_without_a_race_and_its_arguments(tmp_path: Path) -> None:
    script = tmp_path / "turn.py"
    more = "turn(from_dlpack(a), from_dlpack(b))\nimport sys\nprint('arguments', sys.argv[1:])\n"
    script.write_text(SCRIPT.replace(STORE, f"{STORE}\n    cute.arch.barrier()") + more)
    result = emulate("--arch", "sm_90a", "--ptx", script, "--arch", "--", "x")
    assert result.exit_code == 0, result.output
    assert "arguments ['--arch', '--', 'x']" in words(result)
    assert "grid 1x1x1, block 64x1x1, cluster 1x1x1, 256 bytes of shared memory, 2 launches" in words(result)
    assert "global store 512 bytes" in words(result)  # 64 threads of 4 bytes, twice
    assert ".target sm_90a" in result.output
    assert "data races none found" in words(result)


def test_ignored_findings(tmp_path: Path) -> None:
    """The race of the documentation is one within a warp, and between the two warps."""
    script = tmp_path / "turn.py"
    script.write_text(SCRIPT)
    result = emulate("--ignore", "PE103", script)
    assert result.exit_code == 1
    assert "RaceError: PE101: race on shared memory" in result.output
    report = tmp_path / "report.json"
    result = emulate("--ignore", "PE103", "--ignore", "PE101", "--json", report, script)
    assert result.exit_code == 0
    assert "ignored findings PE103, PE101" in words(result)
    given = json.loads(report.read_text())
    assert given["ignore"] == ["PE103", "PE101"]
    assert given["launches"][0]["codes"] == []
    for code in ("PE999", "PE201"):
        refused = emulate("--ignore", code, script)
        assert refused.exit_code == 2
        assert f"'{code}'" in refused.output
        assert "PE101, PE102" in words(refused)


def test_findings_as_warnings(tmp_path: Path) -> None:
    script = tmp_path / "turn.py"
    script.write_text(SCRIPT)
    report = tmp_path / "report.json"
    result = emulate("--warn", "PE101", "--json", report, script)
    assert result.exit_code == 1
    assert "warning: PE101: race on" in words(result)
    assert "error: RaceError: PE103: race on" in words(result)
    assert "findings 1 errors, 1 warnings" in words(result)
    result = emulate("--warn", "PE101", "--warn", "PE103", "--json", report, script)
    assert result.exit_code == 0, result.output
    assert "as warnings PE101, PE103" in words(result)
    found = json.loads(report.read_text())["launches"][0]["findings"]
    assert {(each["code"], each["severity"]) for each in found} == {("PE101", "warning"), ("PE103", "warning")}


def test_a_timeline_is_drawn_for_each_launch(tmp_path: Path) -> None:
    script = tmp_path / "turn.py"
    script.write_text(SCRIPT + "turn(from_dlpack(a), from_dlpack(b))\n")
    result = emulate("--no-races", "--timeline", tmp_path / "turn.svg", script)
    assert result.exit_code == 0, result.output
    for number in (1, 2):
        assert "warp 1" in (tmp_path / f"turn-{number}.svg").read_text()
    script.write_text(SCRIPT)
    emulate("--no-races", "--timeline", tmp_path / "one.svg", script)
    assert "block (0, 0, 0)" in (tmp_path / "one.svg").read_text()


def test_a_script_for_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "turn.py"
    script.write_text(SCRIPT.replace("torch.zeros(64)", 'torch.zeros(64, device="cuda")'))
    assert "CUDA" in emulate("--no-races", script).output
    result = emulate("--no-races", "--cuda", script)
    assert result.exit_code == 0, result.output


def test_the_old_option_for_tensor_memory_is_deprecated(tmp_path: Path) -> None:
    script = tmp_path / "options.py"
    script.write_text("from ptx_emulator.runtime.hook import HOOK\nprint('warn', *HOOK.session.options.warn, '.')\n")
    assert "warn ." in words(emulate(script))
    with pytest.warns(DeprecationWarning, match="use --warn PE105"):
        assert "warn PE105 ." in words(emulate("--no-load-waits", script))


def test_a_script_that_runs_no_kernel(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3\n")
    script = tmp_path / "plain.py"
    script.write_text("import helper, sys\nprint(helper.VALUE, __name__)\nsys.exit(helper.VALUE)\n")
    result = emulate(script)
    assert result.exit_code == 3
    assert "3 __main__" in result.output
    assert "No kernel ran in the emulator" in words(result)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1\nraise KeyError('k')\n", 'Traceback (most recent call last): File "{}", line 2, in <module>'),
        ("x = (\n", "SyntaxError: '(' was never closed"),
        ("import sys\nsys.exit('no more')\n", "no more the run failed"),
    ],
)
def test_errors_of_a_script_are_its_own(tmp_path: Path, code: str, said: str) -> None:
    script = tmp_path / "plain.py"
    script.write_text(code)
    result = emulate("--json", "-", script)
    assert result.exit_code == 1
    assert said.format(script) in words(result)
    report = json.loads(result.stdout)
    assert (report["exit_code"], report["launches"]) == (1, [])
    assert report["failure"]
    assert "runpy" not in result.output
