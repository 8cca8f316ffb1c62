"""The pytest plugin: the mark `emulate` runs a test for each chip and schedule, and a failure has the report."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path

import pytest

from ptx_emulator.testing import schedules

pytest_plugins = ["pytester"]

RACE = """
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

@cute.kernel
def kernel(a: cute.Tensor, b: cute.Tensor, synchronized: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    tile = cute.make_tensor(cute.arch.alloc_smem(cute.Float32, 64), cute.make_layout(64))
    tile[thread] = a[thread]
    if cutlass.const_expr(synchronized):
        cute.arch.barrier()
    b[thread] = tile[thread ^ 32]

@cute.jit
def turn(a: cute.Tensor, b: cute.Tensor, synchronized: cutlass.Constexpr):
    kernel(a, b, synchronized).launch(grid=(1, 1, 1), block=(64, 1, 1))
"""
HEADER = "import cutlass\n" + RACE


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    options = "-p ptx_emulator.testing -p no:cacheprovider --strict-markers"
    pytester.makeini(f"[pytest]\npythonpath = {Path(__file__).parents[1]}\naddopts = {options}\n")
    return pytester


MARKED = """
@pytest.mark.emulate("sm_90a", "sm_100a")
@pytest.mark.parametrize("synchronized", [True, False])
def test_turn(synchronized, emulation):
    a, b = torch.arange(64.0), torch.zeros(64)
    turn(from_dlpack(a), from_dlpack(b), synchronized)
    assert emulation.arch in ("sm_90a", "sm_100a")
    assert len(emulation.launches) == 1
"""
OPTIONS = """
from ptx_emulator.runtime.hook import HOOK

@pytest.mark.emulate("sm_90a", warn=["PE101"])
class TestTurn:
    def test_warned(self, emulation):
        a, b = torch.arange(64.0), torch.zeros(64)
        turn(from_dlpack(a), from_dlpack(b), False)
        assert emulation.launches[0].codes == ["PE101"]
        assert emulation.errors == []

    @pytest.mark.emulate(scheduler="random", seed=7, races=False)
    def test_own_schedule(self):
        options = HOOK.session.options
        assert (options.scheduler, options.seed, options.races, list(options.warn)) == ("random", 7, False, ["PE101"])

    def test_wrong_result(self):
        a, b = torch.arange(64.0), torch.zeros(64)
        turn(from_dlpack(a), from_dlpack(b), True)
        assert b[0] == 0, "a wrong result of the kernel"

def test_not_emulated():
    assert HOOK.session is None
"""


def test_marked_tests_run_for_each_chip_and_schedule(project: pytest.Pytester) -> None:
    """In a process of its own: the DSL is loaded once in a process."""
    project.makepyfile(test_marked=HEADER + MARKED, test_options=HEADER + OPTIONS)
    result = project.runpytest_subprocess("--emulate-schedules", "2", "-v")
    result.assert_outcomes(passed=8, failed=6)
    for arch in ("sm_90a", "sm_100a"):
        for schedule in ("lowest-pc", "lazy-0"):
            result.stdout.fnmatch_lines_random(
                [f"*test_turn?{arch}-{schedule}-True? PASSED*", f"*test_turn?{arch}-{schedule}-False? FAILED*"]
            )
    result.stdout.fnmatch_lines(["*PE101: race on shared memory*", "*- emulator -*", "*error: RaceError: PE101*"])
    result.stdout.fnmatch_lines(["*a wrong result of the kernel*", "*- emulator -*", "*warp instructions*"])


PTX = (
    """
import numpy as np
import pytest
import ptx_emulator
from emulator.harness import kernel
from ptx_emulator.runtime.hook import HOOK

BODY = """
    + '"""'
    + """.shared .align 4 .b8 tile[256]; mov.u32 %r1, tile; shl.b32 %r2, %r99, 2; add.s32 %r3, %r1, %r2;
  st.shared.b32 [%r3], %r99; WAIT xor.b32 %r4, %r3, 128; ld.shared.b32 %r5, [%r4];
  cvt.u64.u32 %rd1, %r2; add.s64 %rd1, %rd90, %rd1; st.global.b32 [%rd1], %r5;"""
    + '"""'
    + """

def run(wait="bar.sync 0;", target="sm_90a", **options):
    out = np.zeros(64, np.uint32)
    return ptx_emulator.run_ptx(kernel(BODY.replace("WAIT", wait), target=target), "k", 1, 64, [out], **options)

@pytest.mark.emulate("sm_90a", timeline=0)
def test_right(emulation):
    launch = run()
    assert emulation.launches == [launch] and launch.timeline is not None
    assert run(scheduler="random", seed=3, timeline=9).timeline is None

@pytest.mark.emulate("sm_90a", warn=["PE101", "PE203"])
def test_warned(emulation):
    assert "PE101" in run("").codes

@pytest.mark.emulate("sm_90a")
def test_racy():
    run("")

@pytest.mark.emulate("sm_90a")
def test_explicit():
    assert run("", races=False).codes == []

@pytest.mark.emulate("sm_100a")
def test_other_chip():
    with pytest.raises(ptx_emulator.EmulatorError, match="compiled for sm_90a, and this block emulates sm_100a"):
        run()
    run(target="sm_80")
"""
)


def test_ptx_takes_the_options_of_the_mark(project: pytest.Pytester) -> None:
    """And its schedule; `--emulate-report` writes what each test found."""
    project.makepyfile(test_ptx=PTX)
    result = project.runpytest_subprocess("--emulate-schedules", "3", "--emulate-report", "found")
    result.assert_outcomes(passed=9 + 3, failed=3)
    assert "pytest_runtest_call" not in result.stdout.str()  # no line of the plugin in a trace
    reports = [json.loads(path.read_text()) for path in (project.path / "found").glob("*.json")]
    assert len(reports) == 15
    racy = [report for report in reports if "test_racy" in report["test"]]
    assert {report["test"].split("[")[1] for report in racy} == {
        "sm_90a-lowest-pc]",
        "sm_90a-lazy-0]",
        "sm_90a-random-0]",
    }
    assert all(report["outcome"] == "failed" for report in racy)
    assert all("PE101" in report["reports"][0]["launches"][0]["codes"] for report in racy)


@pytest.mark.parametrize(
    ("mark", "arguments", "said"),
    [
        ('"sm_80"', [], "*the mark emulate takes sm_90a, sm_100a; got 'sm_80'*"),
        ("", ["--emulate-schedules", "0"], "*--emulate-schedules must be 1 or more; got 0*"),
    ],
)
def test_wrong_uses_are_refused(project: pytest.Pytester, mark: str, arguments: list[str], said: str) -> None:
    project.makepyfile(f"import pytest\n@pytest.mark.emulate({mark})\ndef test_nothing():\n    pass\n")
    result = project.runpytest_inprocess(*arguments)
    assert result.ret != 0
    (result.stdout if mark else result.stderr).fnmatch_lines([said])


def test_schedules() -> None:
    assert schedules(1) == [("lowest-pc", 0)]
    assert schedules(5) == [("lowest-pc", 0), ("lazy", 0), ("random", 0), ("lazy", 1), ("random", 1)]
    assert len(set(schedules(20))) == 20


def test_the_package_brings_the_plugin() -> None:
    """`-p` finds it by the same name."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (line,) = re.findall(r'^\[project\.entry-points\.pytest11\]\n(?:#.*\n)*"(.*)" = "(.*)"$', text, re.MULTILINE)
    assert importlib.metadata.EntryPoint(*line, "pytest11").load().pytest_generate_tests
    assert line == ("ptx_emulator.testing", "ptx_emulator.testing")
