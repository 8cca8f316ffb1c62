"""ldmatrix, stmatrix and mma.sync; thread-to-element maps written from the PTX ISA's figures and CuTe's layouts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize(
    ("shape", "kind", "accumulator"),
    [
        ("m16n8k16", "bf16", "f32"),
        ("m16n8k8", "f16", "f32"),
        ("m16n8k16", "f16", "f16"),
        ("m16n8k8", "tf32", "f32"),
        ("m16n8k32", "s8", "s32"),
        ("m16n8k32", "e4m3", "f32"),
    ],
)  # fmt: skip
def test_mma_sync(shape: str, kind: str, accumulator: str) -> None:
    k = int(shape.split("k")[1])
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32, "s8": torch.int8,
             "e4m3": torch.float8_e4m3fn}[kind]  # fmt: skip
    size = torch.empty(0, dtype=dtype).element_size()
    per = 4 // size
    torch.manual_seed(0)
    a, b = torch.randint(-3, 4, (16, k)), torch.randint(-3, 4, (8, k))
    na, nb = 2 * k // (4 * per), k // (4 * per)
    ra, rb = torch.zeros(32, na, per, dtype=dtype), torch.zeros(32, nb, per, dtype=dtype)
    for t in range(32):
        for e in range(per):
            for i in range(na):
                ra[t, i, e] = a[t // 4 + 8 * (i % 2), (i // 2) * 4 * per + (t % 4) * per + e].to(dtype)
            for i in range(nb):
                rb[t, i, e] = b[t // 4, i * 4 * per + (t % 4) * per + e].to(dtype)
    half = accumulator == "f16"
    out = np.zeros((32, 2 if half else 4), np.uint32)
    lines = ["mul.wide.u32 %rd1, %r99, 4;"]
    for base, name, count in ((90, 10, na), (91, 20, nb)):
        lines.append(f"mul.lo.s64 %rd2, %rd1, {count}; add.s64 %rd2, %rd2, %rd{base};")
        lines += [f"ld.global.b32 %r{name + i}, [%rd2+{4 * i}];" for i in range(count)]
    nd = 2 if half else 4
    d, c = (", ".join(f"%r{x + i}" for i in range(nd)) for x in (30, 40))
    lines += [f"mov.b32 %r{40 + i}, 0;" for i in range(nd)]
    left, right = (", ".join(f"%r{x + i}" for i in range(count)) for x, count in ((10, na), (20, nb)))
    lines.append(
        f"mma.sync.aligned.{shape}.row.col.{accumulator}.{kind}.{kind}.{accumulator} {{{d}}}, "
        f"{{{left}}}, {{{right}}}, {{{c}}};"
    )
    lines.append(f"mul.lo.s64 %rd2, %rd1, {nd}; add.s64 %rd2, %rd2, %rd92;")
    lines += [f"st.global.b32 [%rd2+{4 * i}], %r{30 + i};" for i in range(nd)]
    run("\n".join(lines), ra, rb, out)
    expected = (a @ b.T).numpy()
    for t in range(32):
        for i in range(nd):
            if half:
                row, column = t // 4 + 8 * i, 2 * (t % 4)
                assert (
                    out[t].view(np.float16)[2 * i : 2 * i + 2].tolist() == expected[row, column : column + 2].tolist()
                )
            else:
                got = out[t].view(np.int32 if accumulator == "s32" else np.float32)[i]
                assert got == expected[t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2]
