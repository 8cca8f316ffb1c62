"""ldmatrix and stmatrix, by maps from the PTX ISA's figures and CuTe's layouts; test_calibration.py has the chip's."""

from __future__ import annotations

import numpy as np
import pytest

from emulator.harness import run

SHARED = ".shared .align 16 .b8 buffer[1024];"
# Copies 512 bytes from global memory to `buffer`, 16 per thread; %r1 is this thread's row, %rd1 its results' address.
FILL = """mov.u32 %r1, buffer; shl.b32 %r2, %r99, 4; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd1, %r99, 16;
  add.s64 %rd2, %rd90, %rd1; ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd2];
  st.shared.v4.b32 [%r1], {%r10, %r11, %r12, %r13}; bar.warp.sync -1; add.s64 %rd1, %rd91, %rd1;"""
STORE = "st.global.v4.b32 [%rd1], {%r20, %r21, %r22, %r23};"


def load(instruction: str) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(1).integers(0, 256, 512, dtype=np.uint8)
    out = np.zeros((32, 16), np.uint8)
    run(f"{FILL} mov.b32 %r22, 0; mov.b32 %r23, 0; {instruction} {STORE}", source, out, shared=SHARED, races=True)
    return source, out


@pytest.mark.parametrize("transpose", [False, True])
def test_ldmatrix_m8n8(transpose: bool) -> None:
    suffix = ".trans" if transpose else ""
    source, out = load(f"ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r20, %r21, %r22, %r23}}, [%r1];")
    matrices, got = source.view(np.uint16).reshape(4, 8, 8), out.view(np.uint16).reshape(32, 4, 2)
    for t in range(32):
        for i in range(4):
            for e in range(2):
                row, column = t // 4, 2 * (t % 4) + e
                assert got[t, i, e] == (matrices[i, column, row] if transpose else matrices[i, row, column])


def test_ldmatrix_m16n16_bytes() -> None:
    source, out = load("ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {%r20, %r21, %r22, %r23}, [%r1];")
    matrices = source.reshape(2, 16, 16)
    for t in range(32):
        for i in range(4):
            for j in range(4):
                assert out[t, 4 * i + j] == matrices[i // 2, 4 * (t % 4) + j, t // 4 + 8 * (i % 2)]


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("form", ["m8n16.x4", "m16n16.x2.trans"])
def test_ldmatrix_of_narrow_elements(form: str, bits: int) -> None:
    """Rows of 16 elements in the first bytes of every 16, each widened to a byte."""
    kind = {4: "b4x16_p64", 6: "b6x16_p32"}[bits]
    source, out = load(f"ldmatrix.sync.aligned.{form}.shared.b8x16.{kind} {{%r20, %r21, %r22, %r23}}, [%r1];")
    numbers = [int.from_bytes(row[: 2 * bits].tobytes(), "little") for row in source.reshape(32, 16)]
    rows = np.array([[number >> bits * i & (1 << bits) - 1 for i in range(16)] for number in numbers])
    for t in range(32):
        for i in range(4):
            for j in range(4):
                if form == "m8n16.x4":
                    expected = rows[8 * i + t // 4, 4 * (t % 4) + j]
                else:
                    expected = rows[16 * (i // 2) + 4 * (t % 4) + j, t // 4 + 8 * (i % 2)]
                assert out[t, 4 * i + j] == expected


@pytest.mark.parametrize("form", ["m8n8.x4", "m8n8.x4.trans", "m16n8.x4.trans"])
def test_stmatrix(form: str) -> None:
    source, out = np.random.default_rng(2).integers(0, 256, (32, 16), dtype=np.uint8), np.zeros(512, np.uint8)
    kind = "b8" if "m16n8" in form else "b16"
    code = f"""mov.u32 %r1, buffer; shl.b32 %r2, %r99, 4; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd1, %r99, 16;
      add.s64 %rd2, %rd90, %rd1; ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2];
      stmatrix.sync.aligned.{form}.shared.{kind} [%r1], {{%r10, %r11, %r12, %r13}}; bar.warp.sync -1;
      ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r1]; add.s64 %rd1, %rd91, %rd1; {STORE}"""
    run(code, source, out, shared=SHARED, races=True)
    if kind == "b16":
        matrices, halves = out.view(np.uint16).reshape(4, 8, 8), source.view(np.uint16).reshape(32, 4, 2)
        for t in range(32):
            for i in range(4):
                for e in range(2):
                    place = (t // 4, 2 * (t % 4) + e)
                    assert matrices[(i, *(place[::-1] if "trans" in form else place))] == halves[t, i, e]
        return
    rows = out.reshape(4, 8, 16)
    for t in range(32):
        for i in range(4):
            for v in range(4):
                assert rows[i, 2 * (t % 4) + v % 2, t // 4 + 8 * (v // 2)] == source[t, 4 * i + v]
