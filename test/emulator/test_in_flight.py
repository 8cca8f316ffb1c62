"""Registers that wgmma and tcgen05.ld hold until they are waited for: an early touch is found under every schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import registers, run
from emulator.test_tensor_memory import ALLOC, FILL, FREE
from emulator.test_tensor_memory import SHARED as HOLDER

SCHEDULES = pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
SHARED = ".shared .align 1024 .b8 buffer[2048];"
D, OTHER, A = registers(30, 4), registers(40, 4), registers(20, 4)
BEGIN = """mov.u32 %r1, buffer; mad.lo.s32 %r2, %r99, 16, %r1; st.shared.v4.b32 [%r2], {%r8, %r8, %r8, %r8};
  fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd12, %r6; wgmma.fence.sync.aligned;"""
COMMIT, WAIT = "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned {};"


def multiply(d: str = D, a: str = f"{{{A}}}") -> str:
    signs = "1, 1, 0" if a.startswith("{") else "1, 1, 0, 0"
    return f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{d}}}, {a}, %rd12, 1, {signs};"


def wgmma(code: str, scheduler: str, races: bool = True) -> ptx_emulator.Launch:
    out = np.zeros((128, 4), np.uint32)
    end = f"""{COMMIT} {WAIT.format(0)} mul.wide.u32 %rd2, %r99, 16; add.s64 %rd2, %rd2, %rd90;
      st.global.v4.b32 [%rd2], {{{D}}};"""
    options: dict[str, Any] = {"block": 128, "shared": SHARED, "races": races, "scheduler": scheduler, "seed": 1}
    return run(BEGIN + code + end, out, **options)


ONE = multiply() + COMMIT
TWO = multiply() + COMMIT + multiply(OTHER) + COMMIT
EARLY = {
    "read": ONE + "add.f32 %f1, %r33, %r33;",
    "moved": ONE + "mov.b32 %r50, %r33;",
    "written": ONE + "mov.b32 %r33, 0;",
    "stored": ONE + "st.shared.b32 [%r2], %r33;",
    "an address": ONE + "ld.shared.b32 %r50, [%r33];",
    "A read": ONE + "add.f32 %f1, %r22, %r22;",
    "A written": ONE + "mov.b32 %r22, 0;",
    "never committed": multiply() + WAIT.format(0) + "add.f32 %f1, %r33, %r33;",
    "the last group": TWO + WAIT.format(1) + "add.f32 %f1, %r43, %r43;",
    "both groups": TWO + WAIT.format(2) + "add.f32 %f1, %r33, %r33;",
    "A of the next": ONE + multiply(OTHER, f"{{{D}}}"),
    "accumulators that are A": ONE + multiply(A, "%rd12"),
    "on one path": ONE + f"setp.gt.u32 %p1, %r99, 127; @%p1 bra E; {WAIT.format(1)} E: add.f32 %f1, %r33, %r33;",
    "in a loop": f"""mov.b32 %r60, 0; L: setp.eq.s32 %p1, %r60, 0; @%p1 bra F; add.f32 %f1, %r33, %r33;
      F: {ONE} add.s32 %r60, %r60, 1; setp.lt.s32 %p2, %r60, 2; @%p2 bra L;""",
}
LATER = {
    "waited": ONE + WAIT.format(0) + "add.f32 %f1, %r33, %r33;",
    "the group before the last": TWO + WAIT.format(1) + "add.f32 %f1, %r33, %r33;",
    "another register": ONE + "add.f32 %f1, %r43, %r43;",
    "same accumulators": ONE + ONE + multiply(D, "%rd12"),
    "only where it was waited for": ONE
    + f"""setp.ge.u32 %p1, %r99, 0; @!%p1 bra E; {WAIT.format(0)}
      E: add.f32 %f1, %r33, %r33;""",
}


@SCHEDULES
@pytest.mark.parametrize("case", EARLY)
def test_registers_of_wgmma_are_not_touched_before_its_wait(case: str, scheduler: str) -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"is used while .*wgmma\.mma_async.* no wgmma\.wait_group"):
        wgmma(EARLY[case], scheduler)


@SCHEDULES
@pytest.mark.parametrize("case", LATER)
def test_registers_of_wgmma_are_free_after_its_wait(case: str, scheduler: str) -> None:
    assert wgmma(LATER[case], scheduler).warnings == []


def test_without_races_a_touch_that_may_come_early_is_a_warning() -> None:
    assert wgmma(LATER["waited"], "lowest-pc", races=False).warnings == []
    (warning,) = wgmma(EARLY["read"], "lowest-pc", races=False).warnings
    assert "%r33 of a wgmma is used without wgmma.wait_group" in warning


def tensor(code: str, scheduler: str = "lowest-pc", **options: Any) -> ptx_emulator.Launch:
    body = f"{ALLOC} {FILL} {code} {FREE}"
    return run(body, block=128, shared=HOLDER, **{"races": True, "scheduler": scheduler, "seed": 1, **options})


LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r40, %r41}, [%r10];"
LOAD_WAIT = "tcgen05.wait::ld.sync.aligned;"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r10], {%r20}; tcgen05.wait::st.sync.aligned;"
USE = "add.s32 %r45, %r41, 1;"


@SCHEDULES
@pytest.mark.parametrize("use", [USE, "mov.b32 %r41, 0; " + USE, "mov.b64 %rd5, {%r40, %r41}; add.s64 %rd5, %rd5, 1;"])
def test_registers_of_a_load_are_not_touched_before_its_wait(use: str, scheduler: str) -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"is used while .*tcgen05\.ld.* no tcgen05\.wait::ld"):
        tensor(LOAD + use + LOAD_WAIT, scheduler)
    assert tensor(LOAD + LOAD_WAIT + use, scheduler).warnings == []


def test_the_compiler_may_put_loaded_registers_together_before_the_wait() -> None:
    together = "mov.b64 %rd5, {%r40, %r41}; mov.b64 %rd6, %rd5;"
    tensor(LOAD + together + LOAD_WAIT + "add.s64 %rd7, %rd6, 1;")
    with pytest.raises(ptx_emulator.RaceError, match=r"%rd6 is used while .*tcgen05\.ld"):
        tensor(LOAD + together + "add.s64 %rd7, %rd6, 1;" + LOAD_WAIT)


@SCHEDULES
def test_tensor_memory_is_not_written_before_the_wait_of_its_load(scheduler: str) -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"write by tcgen05\.st .* after the read by tcgen05\.ld"):
        tensor(LOAD + STORE + LOAD_WAIT + USE, scheduler)
    tensor(LOAD + LOAD_WAIT + USE + STORE, scheduler)


@SCHEDULES
def test_tensor_memory_is_not_read_before_the_wait_of_its_store(scheduler: str) -> None:
    unwaited = STORE.replace("tcgen05.wait::st.sync.aligned;", "")
    with pytest.raises(ptx_emulator.RaceError, match=r"read by tcgen05\.ld .* after the write by tcgen05\.st"):
        tensor(unwaited + LOAD + LOAD_WAIT + USE, scheduler)


@SCHEDULES
def test_tensor_memory_is_not_freed_before_the_wait_of_its_load(scheduler: str) -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"is not ordered after the read by tcgen05\.ld"):
        tensor(LOAD, scheduler)


def test_a_kernel_may_leave_the_wait_to_the_compiler_if_asked_to() -> None:
    """The first use of a load's registers is its wait then; tensor memory that is written before it is a race still."""
    for after in ("", STORE, USE + STORE):
        launch = tensor(LOAD + USE + after, warn=["PE105"])
        assert [w for w in launch.warnings if "no tcgen05.wait::ld" in w]
    with pytest.raises(ptx_emulator.RaceError, match=r"write by tcgen05\.st .* after the read by tcgen05\.ld"):
        tensor(LOAD + STORE + USE, warn=["PE105"])
    two = LOAD + LOAD.replace("%r40, %r41", "%r50, %r51")
    with pytest.raises(ptx_emulator.RaceError, match=r"is not ordered after the read by tcgen05\.ld"):
        tensor(two + USE, warn=["PE105"])
