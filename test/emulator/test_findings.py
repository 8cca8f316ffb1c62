"""A run collects its findings. Every kind of finding has a code, a row of the page, a place that raises it and a kernel
that shows it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import kernel, run
from emulator.test_faults import ADDRESS, SHARED
from emulator.test_faults import ALLOC as ALLOCATE
from emulator.test_faults import FREE as DEALLOCATE
from emulator.test_in_flight import BEGIN, EARLY, HOLDER, LOAD, LOAD_WAIT, USE, multiply
from emulator.test_in_flight import SHARED as OPERANDS
from emulator.test_launch_control import SHARED as RESPONSE
from emulator.test_launch_control import kernel as launch_control
from emulator.test_tensor_maps import ACQUIRE, THROUGH_SHARED, encode
from emulator.test_tensor_maps import SHARED as MAPS
from emulator.test_tensor_memory import ALLOC, FILL, FREE
from ptx_emulator import errors
from ptx_emulator.findings import RULES

SOURCES = Path(ptx_emulator.__file__).parent
RACES: dict[str, Any] = {"shared": SHARED, "races": True}
TENSOR: dict[str, Any] = {"shared": HOLDER, "races": True, "block": 128}
INIT = f"{ADDRESS} setp.eq.s32 %p1, %r99, 0; @%p1 mbarrier.init.shared.b64 [%r3], 1;"
VISIBLE = "@%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
FILL_SHARED = f"{ADDRESS} setp.eq.s32 %p1, %r99, 0; st.shared.b32 [%r2], %r99;"
STORE = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r1], 128; @%p1 cp.async.bulk.commit_group;"
STORE_WAIT = "@%p1 cp.async.bulk.wait_group.read 0;"
REMOTE = """mov.u32 %r5, %ctaid.x; setp.eq.s32 %p1, %r5, 0; mov.u32 %r1, buffer; mapa.shared::cluster.u32 %r2, %r1, 0;
  @%p1 bra END; mov.b32 %r6, 0; L: add.s32 %r6, %r6, 1; setp.lt.s32 %p2, %r6, 99; @%p2 bra L;
  st.shared::cluster.b32 [%r2], 1; END:"""


class Case(NamedTuple):
    """A kernel with a fault. `size`: of its array of 32-bit integers."""

    body: str
    options: dict[str, Any]
    size: int = 64


def tensor_map(body: str) -> tuple[str, list[np.ndarray]]:
    """A kernel that edits a tensor map, and its arrays."""
    matrix = np.zeros((4, 16), np.uint32)
    template, target = encode(matrix, "u32", (8, 4)), encode(matrix, "u32", (8, 4))
    return body, [template, target, matrix, np.zeros(64, np.uint32)]


CASES = {
    "PE101": Case(
        f"{ADDRESS} xor.b32 %r4, %r2, 128; st.shared.b32 [%r2], 1; ld.shared.b32 %r5, [%r4];", RACES | {"block": 64}
    ),
    "PE102": Case(f"{FILL_SHARED} bar.sync 0; {STORE} {STORE_WAIT}", RACES),
    "PE103": Case(f"{ADDRESS} xor.b32 %r4, %r2, 4; st.shared.b32 [%r2], 1; ld.shared.b32 %r5, [%r4];", RACES),
    "PE104": Case(BEGIN + EARLY["read"], {"shared": OPERANDS, "races": True, "block": 128}),
    "PE105": Case(f"{ALLOC} {FILL} {LOAD} {USE} {LOAD_WAIT} {FREE}", TENSOR),
    "PE107": Case(f"{INIT} setp.eq.s32 %p2, %r99, 1; @%p2 mbarrier.arrive.shared.b64 %rd1, [%r3];", RACES),
    "PE201": Case("st.global.b32 [%rd90+256], 1;", {}),
    "PE202": Case("st.global.b32 [%rd90+1], 1;", {}),
    "PE203": Case(f"{ADDRESS} ld.shared.b32 %r4, [%r2];", RACES),
    "PE204": Case(REMOTE, {"shared": SHARED, "grid": 2, "cluster": 2}),
    "PE205": Case(f"{FILL_SHARED} fence.proxy.async.shared::cta; bar.sync 0; {STORE}", RACES),
    "PE301": Case("bar.sync 1, 64;", {}),
    "PE302": Case(f"{ADDRESS} mbarrier.arrive.shared.b64 %rd1, [%r3];", {"shared": SHARED}),
    "PE303": Case(f"{INIT} bar.sync 0; mbarrier.arrive.shared.b64 %rd1, [%r3], 2;", {"shared": SHARED}),
    "PE304": Case(
        f"""{INIT} bar.sync 0; @!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd90], 128, [%r3];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra W;""",
        RACES,
    ),
    "PE305": Case("bar.sync 1, 40;", {"block": 64}),
    "PE306": Case("barrier.cluster.wait.aligned;", {}),
    "PE401": Case("setp.lt.u32 %p1, %r99, 16; @%p1 shfl.sync.bfly.b32 %r1, %r99, 1, 31, -1;", {}),
    "PE402": Case(f"{BEGIN} add.s32 %r22, %r22, 1; {multiply()}", {"shared": OPERANDS, "races": True, "block": 128}),
    "PE403": Case(
        f"{ALLOCATE} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r11}}, [%r10]; {DEALLOCATE}",
        {"shared": SHARED, "block": 128},
    ),
    "PE404": Case(ALLOCATE.replace("64;", "48;"), {"shared": SHARED, "block": 128}),
    "PE405": Case(ALLOCATE, {"shared": SHARED, "block": 128}),
    "PE501": Case("trap;", {}),
    "PE502": Case(
        launch_control(1).replace("@%p4 bra WORK", "bra WORK"),
        {"grid": 2, "block": 64, "shared": RESPONSE, "multiprocessors": 2},
    ),
    "PE503": Case(
        f"""{INIT} {VISIBLE} mov.b16 %h1, 6;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1], [%rd90], 128, [%r3], %h1;""",
        {"shared": SHARED},
    ),
}
WARNED = "PE307"
EDITED = "PE106"


@pytest.mark.parametrize("code", CASES)
def test_a_fault_has_its_code(code: str) -> None:
    case = CASES[code]
    with pytest.raises(ptx_emulator.Fault, match=f"^{code}: ") as caught:
        run(case.body, np.zeros(case.size, np.uint32), **case.options)
    assert caught.value.code == code
    assert type(caught.value) is RULES[code].exception


@pytest.mark.parametrize("missing", [ACQUIRE, "bar.warp.sync -1;"])
def test_a_tensor_map_without_acquire_has_its_code(missing: str) -> None:
    body, arrays = tensor_map(THROUGH_SHARED)
    run(body, *arrays, shared=MAPS, races=True)
    with pytest.raises(ptx_emulator.RaceError, match=f"^{EDITED if missing == ACQUIRE else 'PE103'}: "):
        run(body.replace(missing, ""), *arrays, shared=MAPS, races=True)


def test_warnings_have_codes() -> None:
    launch = run("bar.arrive 1, 64;")
    assert launch.codes == [WARNED]
    assert launch.warnings[0].startswith(f"{WARNED}: ")
    early = CASES["PE104"]
    launch = run(early.body, np.zeros(early.size, np.uint32), shared=OPERANDS, block=128)
    assert launch.codes == ["PE104"]
    launch = run(CASES["PE105"].body, **TENSOR, warn=["PE105"])
    assert launch.as_dict()["codes"] == ["PE105"]


@pytest.mark.parametrize("code", [code for code in CASES if RULES[code].continues])
def test_a_launch_goes_on_behind_an_ignored_finding(code: str) -> None:
    case = CASES[code]
    lazy: dict[str, Any] = case.options | {"scheduler": "lazy"}
    for options in (case.options, lazy):
        launch = run(case.body, np.zeros(case.size, np.uint32), **options, ignore=[code])
        assert (launch.error, launch.warnings, launch.codes) == ("", [], [])
    with pytest.raises(ptx_emulator.Fault, match=f"^{code}: "):
        run(case.body, np.zeros(case.size, np.uint32), **case.options, ignore=[WARNED])


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_constants_that_a_compiler_moves_behind_the_fence_are_a_warning(scheduler: str) -> None:
    """The zeroing of accumulators. Other values, and constants behind a `wgmma` of the same fence, are errors."""
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    options: dict[str, Any] = {"shared": OPERANDS, "block": 128, "races": True, "scheduler": scheduler}
    zero = "mov.b32 %r30, 0; mov.b32 %r31, %r30;"
    launch = run(f"{BEGIN} {zero} {multiply()} {end}", **options)
    assert [(finding.code, finding.severity) for finding in launch.findings] == [("PE406", "warning")]
    assert run(f"{zero} {BEGIN} {multiply()} {end}", **options).findings == []
    for wrong in (
        f"{BEGIN} add.f32 %r30, %r60, %r60; {multiply()} {end}",
        f"{BEGIN} mov.b32 %r30, %r60; {multiply()} {end}",
        f"{BEGIN} {multiply()} {end} {zero} {multiply()} {end}",
        f"{BEGIN} {multiply()} {end} {zero} wgmma.fence.sync.aligned; add.s32 %r20, %r20, 1; {multiply()} {end}",
    ):
        with pytest.raises(ptx_emulator.Fault, match=r"^PE402: "):
            run(wrong, **options)


def test_ignored_warnings_and_tensor_maps() -> None:
    assert run("bar.arrive 1, 64;", ignore=[WARNED]).warnings == []
    assert run(CASES["PE105"].body, **TENSOR, warn=["PE105"], ignore=["PE105"]).warnings == []
    early = CASES["PE104"]
    assert run(early.body, np.zeros(64, np.uint32), shared=OPERANDS, block=128, ignore=["PE104"]).codes == []
    body, arrays = tensor_map(THROUGH_SHARED)
    run(body.replace(ACQUIRE, ""), *arrays, shared=MAPS, races=True, ignore=[EDITED])


def test_an_ignored_finding_hides_no_other_one() -> None:
    """The copy reads what its own warp wrote without a proxy fence, and what warp 1 wrote without a barrier."""
    body = FILL_SHARED + "bar.warp.sync -1;" + STORE.replace("128", "256") + STORE_WAIT
    options: dict[str, Any] = RACES | {"block": 64}
    for ignore, code in (([], "PE101"), (["PE102"], "PE101"), (["PE101"], "PE102")):
        with pytest.raises(ptx_emulator.RaceError, match=f"^{code}: "):
            run(body, np.zeros(64, np.uint32), **options, ignore=ignore)
    run(body, np.zeros(64, np.uint32), **options, ignore={"PE101", "PE102"})


def test_codes_that_cannot_be_ignored_are_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"ignore got 'PE999': there is no such code\. .*PE101, PE102"),
        ptx_emulator.emulate("sm_90a", ignore=["PE101", "PE999"]),
    ):
        pass
    with pytest.raises(ValueError, match=r"ignore got 'PE201': a launch cannot go on behind it\."):
        run("trap;", ignore=["PE201"])
    with pytest.raises(TypeError, match=r"ignore must be a list of codes, such as \['PE101'\]"):
        run("trap;", ignore="PE101")


SAME = """mov.u32 %r1, %ctaid.x; VALUE setp.ne.s32 %p1, %r1, 0; @%p1 bra LATE; st.global.v2.b32 [%rd90], {%r2, %r3};
  bra END; LATE: st.global.v2.b32 [%rd90], {%r2, %r3}; END:"""


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_unordered_stores_of_the_same_value_are_a_warning(scheduler: str) -> None:
    options: dict[str, Any] = {"races": True, "block": 1, "grid": 2, "scheduler": scheduler}
    same, other = SAME.replace("VALUE", "mov.b32 %r2, 7;"), SAME.replace("VALUE", "mov.b32 %r3, %r1;")
    launch = run(same, np.zeros(2, np.uint32), **options)
    assert launch.codes == ["PE108"]
    assert "store of the same value to global memory" in launch.warnings[0]
    assert run(same, np.zeros(2, np.uint32), **options, ignore=["PE108"]).codes == []
    with pytest.raises(ptx_emulator.RaceError, match=r"^PE101: .*write by warp 0 .* after the write by warp 0"):
        run(other, np.zeros(2, np.uint32), **options)


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
@pytest.mark.parametrize("width", ["b32", "b64"])
def test_stores_of_different_warps_in_one_step(width: str, scheduler: str) -> None:
    """Both warps execute the same instruction. The lanes of a warp may store to one place together."""
    options: dict[str, Any] = RACES | {"block": 64, "scheduler": scheduler}
    store = f"mov.b64 %rd1, {{%r5, %r5}}; st.shared.{width} [%r1], {'%r5' if width == 'b32' else '%rd1'};"
    with pytest.raises(
        ptx_emulator.RaceError, match=r"^PE101: race on .* write by warp [01] .* the write by warp [01]"
    ):
        run(f"{ADDRESS} mov.b32 %r5, %r99; {store}", **options)
    assert run(f"{ADDRESS} mov.b32 %r5, 7; {store}", **options).codes == ["PE108"]
    by_warp = "shr.u32 %r6, %r99, 5; shl.b32 %r6, %r6, 3; add.s32 %r1, %r1, %r6;"
    assert run(f"{ADDRESS} {by_warp} mov.b32 %r5, %r99; {store}", **options).findings == []


@pytest.mark.parametrize(("width", "registers"), [("b32", "%r9"), ("b64", "%rd1"), ("v4.b32", "{%r9, %r9, 3, %r9}")])
def test_stores_of_the_same_value_within_a_warp(width: str, registers: str) -> None:
    """Lane 0 stores, then lane 1 does. A read in between is a race still."""
    body = f"""{ADDRESS} setp.eq.s32 %p1, %r99, 0; setp.eq.s32 %p2, %r99, 1; mov.b32 %r9, 5; mov.b64 %rd1, 5;
      @%p1 st.shared.{width} [%r1], {registers}; READ CHANGE @%p2 st.shared.{width} [%r1], {registers};"""
    assert run(body.replace("READ", "").replace("CHANGE", ""), **RACES).codes == ["PE108"]
    for read, change in (("@%p1 ld.shared.b32 %r10, [%r1];", ""), ("", "add.s32 %r9, %r9, 1; add.s64 %rd1, %rd1, 1;")):
        with pytest.raises(ptx_emulator.RaceError, match=r"^PE103: "):
            run(body.replace("READ", read).replace("CHANGE", change), **RACES)


TWO_RACES = f"""{ADDRESS} xor.b32 %r4, %r2, 128; st.shared.b32 [%r2], 0; bar.sync 0; st.shared.b32 [%r2], 1;
  ld.shared.b32 %r5, [%r4]; bar.sync 0; st.shared.b32 [%r2], 2; ld.shared.b32 %r6, [%r4]; bar.sync 0;
  setp.eq.s32 %p1, %r99, 0; @%p1 st.global.b32 [%rd90], 7;""".replace("; ", ";\n")


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_all_findings_of_a_launch_are_collected(scheduler: str) -> None:
    """Two races are two findings; the launch runs to its end; its end raises the first."""
    options: dict[str, Any] = RACES | {"block": 64, "scheduler": scheduler}
    out = np.zeros(1, np.uint32)
    text = r"^PE101: (?s:.*)1 more error:\n  PE101 data race at PTX line \d+, with PTX line \d+( \(\d times\))?$"
    with pytest.raises(ptx_emulator.RaceError, match=text) as caught:
        run(TWO_RACES, out, **options)
    assert out[0] == 7
    first, second = caught.value.findings
    assert (first.fault, first.code, first.severity, first.fatal) == (caught.value, "PE101", "error", False)
    assert {first.at.text, first.other.text} == {"ld.shared.b32 %r5, [%r4];", "st.shared.b32 [%r2], 1;"}
    assert {second.at.text, second.other.text} == {"ld.shared.b32 %r6, [%r4];", "st.shared.b32 [%r2], 2;"}
    assert f"PTX line {first.at.line}" in first.where
    launch = run(TWO_RACES, out, **options, on_error="report")
    assert launch.codes == ["PE101", "PE101"]
    with pytest.raises(ptx_emulator.RaceError, match=r"^PE101: ") as caught:
        run(TWO_RACES, out, **options, on_error="raise")
    assert caught.value.findings[0].fatal


def test_a_finding_is_counted_where_it_repeats() -> None:
    again = "bar.sync 0; add.s32 %r8, %r8, 1; setp.lt.s32 %p5, %r8, 3; @%p5 bra L;"
    body = f"mov.b32 %r8, 0; L: {CASES['PE103'].body} {again}"
    launch = run(body, **RACES, grid=2, on_error="report")
    assert [(finding.code, finding.count >= 3) for finding in launch.findings] == [("PE103", True)]
    assert f"({launch.findings[0].count} times)" in str(launch)


def test_findings_can_be_warnings() -> None:
    launch = run(CASES["PE101"].body, **RACES, block=64, warn=["PE101"])
    (finding,) = launch.findings
    assert (finding.severity, finding.fault, launch.errors, launch.error) == ("warning", None, [], "")
    assert str(launch).count("warning: PE101: race on") == 1
    with pytest.raises(ptx_emulator.RaceError, match=r"^PE103"):
        run(CASES["PE103"].body, **RACES, warn=["PE101"])
    with pytest.raises(ValueError, match=r"warn got 'PE201': a launch cannot go on behind it\."):
        run("trap;", warn=["PE201"])


def test_a_launch_that_cannot_go_on_names_the_first_error() -> None:
    body = CASES["PE103"].body + "bar.warp.sync -1; trap;"
    with pytest.raises(ptx_emulator.RaceError, match=r"^PE103: (?s:.*)1 more error:\n  PE501 trap at PTX line \d+$"):
        run(body, **RACES)
    launch = run(body, **RACES, on_error="report")
    assert [(each.code, each.fatal) for each in launch.findings] == [("PE103", False), ("PE501", True)]


def test_reports_in_json_name_both_accesses() -> None:
    launch = run(CASES["PE103"].body.replace("; ", ";\n"), **RACES, on_error="report")
    (found,) = json.loads(json.dumps(launch.as_dict()))["findings"]
    assert found["at"]["text"] == "ld.shared.b32 %r5, [%r4];"
    line = found["at"]["line"] - 1
    assert found["other"] == {"line": line, "text": "st.shared.b32 [%r2], 1;", "file": "", "source_line": 0}
    assert found["fix"].startswith("Put `bar.warp.sync`")
    with pytest.raises(ValueError, match=r"on_error must be one of collect, raise, report; got 'stop'"):
        run("trap;", on_error="stop")


def test_old_names_are_deprecated() -> None:
    with pytest.warns(DeprecationWarning, match="use run_ptx"):
        ptx_emulator.run(kernel("", 0), "k", 1, 32)
    with pytest.warns(DeprecationWarning, match=r'load_waits=False is warn=\["PE105"\]') as caught:
        assert run(CASES["PE105"].body, **TENSOR, load_waits=False).codes == ["PE105"]
    assert Path(caught[0].filename).name == "harness.py"


def raised() -> dict[str, set[str]]:
    """The codes that each class is raised with, from the sources of the emulator."""
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    codes: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            kind = classes.get(node.func.id)
            if kind is None or not issubclass(kind, ptx_emulator.Fault):
                continue
            given = [*node.args[3:], *(word.value for word in node.keywords if word.arg == "code")]
            found = {x.value for y in given for x in ast.walk(y) if isinstance(x, ast.Constant)} or {kind.code}
            codes.setdefault(node.func.id, set()).update(map(str, found))
    return codes


def test_each_class_is_raised_with_its_codes_only() -> None:
    """In `Registers` and the shadow check the code is a variable: the tests above show its values."""
    expected: dict[str, set[str]] = {}
    for code, finding in RULES.items():
        if finding.exception:
            expected.setdefault(finding.exception.__name__, set()).add(code)
    found = raised()
    found["RaceError"] = found["RaceError"] - {""} | {"PE101", "PE102", "PE104", "PE105"}
    assert found == expected


def test_each_code_has_a_kernel_and_a_row() -> None:
    assert {*CASES, WARNED, EDITED, "PE108", "PE406"} == set(RULES)
    assert all(code == finding.code for code, finding in RULES.items())
    page = (SOURCES.parents[1] / "docs" / "emulator-findings.md").read_text()
    assert [code for code in RULES if f"\n| {code} |" not in page] == []
