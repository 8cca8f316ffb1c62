"""wgmma of every type, A from shared memory and from registers; layouts by hand, after the figures of the PTX ISA."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptx_emulator
from emulator.harness import core_matrices, registers, run

N = 24
SHARED = ".shared .align 1024 .b8 buffer[8192];"
TYPES: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "s8": np.int8,
                         "u8": np.uint8, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}  # fmt: skip


def operand(rows: int, kind: str, seed: int) -> np.ndarray:
    k = 32 // np.dtype(TYPES[kind]).itemsize
    low = 0 if kind == "u8" else -3
    return np.random.default_rng(seed).integers(low, 4, (rows, k)).astype(TYPES[kind])


def load_a(per: int) -> str:
    """Register i of thread t: row t / 4 + 8 (i % 2) of the warp's 16, 4 bytes at 4 (t % 4) + 16 (i / 2)."""
    lines = ["shr.u32 %r4, %r99, 5; shl.b32 %r4, %r4, 4; and.b32 %r5, %r99, 31; shr.u32 %r6, %r5, 2; "
             "add.s32 %r4, %r4, %r6; and.b32 %r5, %r5, 3; mul.lo.s32 %r4, %r4, 32; mad.lo.s32 %r4, %r5, 4, %r4; "
             "cvt.u64.u32 %rd3, %r4; add.s64 %rd3, %rd3, %rd91;"]  # fmt: skip
    return "\n".join(lines + [f"ld.global.b32 %r{20 + i}, [%rd3+{i % 2 * 8 * 32 + i // 2 * 16}];" for i in range(4)])


def body(a: str, b: str, to: str, in_registers: bool, image: int) -> str:
    count = N // 2 // (2 if to == "f16" else 1)
    d, size = registers(30, count), np.dtype(TYPES[a]).itemsize
    describe = "".join(
        f"add.s32 %r6, %r1, {offset}; shr.u32 %r6, %r6, 4; cvt.u64.u32 %rd{n}, %r6; or.b64 %rd{n}, %rd{n}, "
        f"{128 >> 4 << 16 | 256 >> 4 << 32};" for n, offset in ((11, N * 32), (12, 0))
    )  # fmt: skip
    left = f"{{{registers(20, 4)}}}" if in_registers else "%rd11"
    # Negation takes floats; only 16-bit types have transposition bits, of which A in registers takes none.
    signs = "" if to == "s32" else ", SIGN, 1" + ((", 0" if in_registers else ", 0, 0") if size == 2 else "")
    wgmma = f"wgmma.mma_async.sync.aligned.m64n{N}k{32 // size}.{to}.{a}.{b} {{{d}}}, {left}, %rd12, %p1{signs};"
    fill = "".join(f"ld.global.v4.b32 {{{registers(50, 4)}}}, [%rd1+{at}]; st.shared.v4.b32 [%r5+{at}], "
                   f"{{{registers(50, 4)}}};" for at in range(0, image, 2048))  # fmt: skip
    return f"""mov.u32 %r1, buffer; mul.wide.u32 %rd1, %r99, 16; add.s64 %rd1, %rd1, %rd90; shl.b32 %r5, %r99, 4;
      add.s32 %r5, %r5, %r1; {fill} fence.proxy.async.shared::cta; bar.sync 0; {load_a(4 // size)} {describe}
      wgmma.fence.sync.aligned; setp.ne.s32 %p1, %r99, %r99; {wgmma.replace("SIGN", "1")}
      setp.eq.s32 %p1, %r99, %r99; {wgmma.replace("SIGN", "-1")} {wgmma.replace("SIGN", "-1")}
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      mul.wide.u32 %rd2, %r99, {4 * count}; add.s64 %rd2, %rd2, %rd92;
      {"".join(f"st.global.b32 [%rd2+{4 * i}], %r{30 + i};" for i in range(count))}"""


FORMS = [("bf16", "bf16", "f32"), ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("tf32", "tf32", "f32"),
         ("s8", "s8", "s32"), ("u8", "s8", "s32"), ("s8", "u8", "s32"), ("e4m3", "e5m2", "f32"),
         ("e5m2", "e4m3", "f16")]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("scheduler", ["lowest-pc", "lazy"])
def test_products(form: tuple[str, str, str], in_registers: bool, scheduler: str) -> None:
    a_kind, b_kind, to = form
    a, b = operand(64, a_kind, 1), operand(N, b_kind, 2)
    image = core_matrices(b.view(np.uint8)) + core_matrices(a.view(np.uint8))
    image += bytes(-len(image) % 2048)
    dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[to]
    out = np.zeros((128, N // 2), dtype)
    run(body(*form, in_registers, len(image)), np.frombuffer(image, np.uint8).copy(), a, out, block=128, shared=SHARED,
        races=True, scheduler=scheduler)  # fmt: skip
    # Thread t of warp w holds rows t / 4 and t / 4 + 8 of 16, columns 2 (t % 4) and the next of every 8.
    tile = out.reshape(4, 8, 4, N // 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, N)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    np.testing.assert_array_equal(tile, 3 * product if to == "s32" else -product)


@pytest.mark.parametrize("scheduler", ["lowest-pc", "lazy"])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_in_registers_with_b_in_columns(swizzle: int, scheduler: str) -> None:
    """The second product of attention: P in registers, V as it lies in memory, a row for every k. 64 x 64 x 16."""
    a, b = (operand(64, "bf16", seed) for seed in (3, 4))  # b holds rows of N; in shared memory it lies k by k
    image = np.zeros((16, 64), np.uint16)
    image[...] = b.view(np.uint16).T
    chunks = image.view(np.uint8).reshape(2, 8, 8, 16)  # 8 k, one row of 128 bytes each, in chunks of 8 columns
    if swizzle:
        swizzled = np.zeros_like(chunks)
        for row in range(8):
            for chunk in range(8):
                swizzled[:, row, chunk ^ row] = chunks[:, row, chunk]
        # Leading offset: the next 64 columns, of which there are none; stride offset: the next 8 k.
        raw, fields = swizzled, 1 << 62 | 1024 >> 4 << 32 | 1024 >> 4 << 16
    else:  # core matrices of 8 k x 8 columns; the next 8 k 128 bytes on, the next 8 columns 256
        raw, fields = chunks.transpose(2, 0, 1, 3), 256 >> 4 << 32 | 128 >> 4 << 16
    buffer = np.frombuffer(np.ascontiguousarray(raw).tobytes(), np.uint8).copy()
    out = np.zeros((128, 32), np.float32)
    code = f"""mov.u32 %r1, buffer; mul.wide.u32 %rd1, %r99, 16; add.s64 %rd1, %rd1, %rd90; shl.b32 %r5, %r99, 4;
      add.s32 %r5, %r5, %r1; ld.global.v4.b32 {{{registers(50, 4)}}}, [%rd1];
      st.shared.v4.b32 [%r5], {{{registers(50, 4)}}}; fence.proxy.async.shared::cta; bar.sync 0; {load_a(2)}
      shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd12, %r6; or.b64 %rd12, %rd12, {fields}; wgmma.fence.sync.aligned;
      setp.ne.s32 %p1, %r99, %r99; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{registers(30, 32)}}},
      {{{registers(20, 4)}}}, %rd12, %p1, 1, 1, 1; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      mul.wide.u32 %rd2, %r99, 128; add.s64 %rd2, %rd2, %rd92;
      {"".join(f"st.global.b32 [%rd2+{4 * i}], %r{30 + i};" for i in range(32))}"""
    run(code, buffer, a, out, block=128, shared=SHARED, races=True, scheduler=scheduler)
    tile = out.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)
    np.testing.assert_array_equal(tile, a.astype(np.float64) @ b.astype(np.float64).T)


def test_a_fence_is_needed_after_each_write_of_a_register() -> None:
    """Fragments of A and accumulators that an ordinary instruction wrote; what wgmma itself wrote needs none."""
    form = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    wgmma = f"""{form} {{{registers(30, 4)}}}, {{{registers(20, 4)}}}, %rd12, %p1, 1, 1, 0;
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""
    fence, write = "wgmma.fence.sync.aligned;", "mov.b32 %r22, 0;"
    begin = f"""mov.u32 %r1, buffer; mad.lo.s32 %r2, %r99, 16, %r1; st.shared.v4.b32 [%r2], {{%r8, %r8, %r8, %r8}};
      fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd12, %r6;
      setp.eq.s32 %p2, %r99, 3; {write}"""
    options: dict[str, Any] = {"block": 128, "shared": SHARED, "races": True}
    run(f"{begin} {fence} {wgmma} {wgmma} mov.b32 %r30, %r31; {wgmma} {write} {fence} {wgmma}", **options)
    for between in (write, "mul.f32 %r33, %r33, %r33;", f"@%p2 {write}"):
        with pytest.raises(ptx_emulator.Fault, match=r"without a wgmma\.fence since its registers were written"):
            run(f"{begin} {fence} {wgmma} {between} {wgmma}", **options)
    with pytest.raises(ptx_emulator.Fault, match=r"without a wgmma\.fence since its registers were written"):
        run(f"{begin} {wgmma}", **options)


def test_saturating_integers_are_refused() -> None:
    with pytest.raises(ptx_emulator.UnsupportedPTX, match=r"modifier \.satfinite"):
        run("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8.satfinite {%r1, %r2, %r3, %r4}, %rd1, %rd2, 1;", block=128)
