"""tcgen05.ld and st: which thread holds which lane and column, as CuTe's copy atoms say."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run

SHARED = ".shared .align 8 .b32 holder;"
ALLOC = """mov.u32 %r3, holder; setp.lt.u32 %p1, %r99, 32;
  @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32; bar.sync 0; ld.shared.b32 %r10, [%r3];
  shl.b32 %r4, %r99, 16; and.b32 %r4, %r4, 0x600000; add.s32 %r10, %r10, %r4;"""
FREE = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 32;"


def fill(columns: int) -> str:
    """Every thread writes lane * 256 + column into the first columns of its lane."""
    names = [f"%r{20 + i}" for i in range(columns)]
    values = "".join(f"add.s32 {name}, %r5, {i};" for i, name in enumerate(names))
    return f"""shl.b32 %r5, %r99, 8; {values}
      tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r10], {{{", ".join(names)}}};
      tcgen05.wait::st.sync.aligned; bar.sync 0;"""


FILL = fill(8)


def load(shape: str, registers: int, suffix: str = "", filler: str = FILL, packed: bool = False) -> np.ndarray:
    out = np.zeros((128, registers), np.uint32)
    names = ", ".join(f"%r{40 + i}" for i in range(registers))
    repeat = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    form = f"{shape}.x{registers // repeat}{'.pack::16b' if packed else ''}"
    code = f"""{ALLOC} {filler} tcgen05.ld.sync.aligned.{form}.b32 {{{names}}}, [%r10]{suffix};
      tcgen05.wait::ld.sync.aligned; mul.wide.u32 %rd1, %r99, {4 * registers}; add.s64 %rd1, %rd1, %rd90;"""
    code += "".join(f"st.global.b32 [%rd1+{4 * i}], %r{40 + i};" for i in range(registers)) + FREE
    run(code, out, block=128, shared=SHARED, races=True)
    return out


def lane_and_column(shape: str, t: int, i: int) -> tuple[int, int]:
    """The lane and the column of register ``i`` of thread ``t`` of a warp."""
    return {
        "32x32b": (t, i),
        "16x64b": (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * i),
        "16x128b": (t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)),
        "16x256b": (t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2),
        "16x32bx2": (t % 16, i + 4 * (t // 16)),
    }[shape]


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"])
def test_load_shapes(shape: str) -> None:
    registers = {"32x32b": 4, "16x64b": 4, "16x128b": 4, "16x256b": 4, "16x32bx2": 2}[shape]
    got = load(shape, registers, ", 4" if shape == "16x32bx2" else "")
    for thread in range(128):
        for i in range(registers):
            lane, column = lane_and_column(shape, thread % 32, i)
            assert got[thread, i] == (thread // 32 * 32 + lane) * 256 + column


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
def test_packed_loads(shape: str) -> None:
    """Of the unpacked map's columns each register takes two neighbours, as CuTe's packed copy atoms do."""
    registers = {"32x32b": 4, "16x64b": 2, "16x128b": 2, "16x256b": 4}[shape]
    got = load(shape, registers, packed=True, filler=fill(16))
    for thread in range(128):
        for i in range(registers):
            lane, column = lane_and_column(shape, thread % 32, i)
            low, high = ((thread // 32 * 32 + lane) * 256 + 2 * column + j for j in (0, 1))
            assert got[thread, i] == low & 0xFFFF | (high & 0xFFFF) << 16


def test_store_needs_its_wait() -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"tcgen05\.st"):
        load("32x32b", 2, filler=FILL.replace("tcgen05.wait::st.sync.aligned;", ""))


def test_a_load_used_before_its_wait_is_warned_of() -> None:
    code = f"{ALLOC} {FILL} tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r40}}, [%r10]; WAIT add.s32 %r41, %r40, 1; {FREE}"
    wait = code.replace("WAIT", "tcgen05.wait::ld.sync.aligned;")
    assert run(wait, block=128, shared=SHARED).warnings == []
    launch = run(code.replace("WAIT", ""), block=128, shared=SHARED)
    assert [w for w in launch.warnings if "tcgen05.wait::ld" in w]


def test_alloc_refuses_what_hardware_would_wait_for() -> None:
    code = f"{ALLOC} @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 512;"
    with pytest.raises(ptx_emulator.TensorMemoryError, match="would wait: 480 of 512 are free"):
        run(code, block=128, shared=SHARED)
