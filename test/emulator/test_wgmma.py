"""wgmma cases that ``test_calibration.py`` does not compare with the chip: A in registers, schedulers, fences."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptx_emulator
from emulator.harness import registers, run

SHARED = ".shared .align 1024 .b8 buffer[8192];"


def operand(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, (64, 16)).astype(ml_dtypes.bfloat16)


def load_a() -> str:
    """Register i of thread t: row t / 4 + 8 (i % 2) of the warp's 16, 4 bytes at 4 (t % 4) + 16 (i / 2)."""
    lines = [
        "shr.u32 %r4, %r99, 5; shl.b32 %r4, %r4, 4; and.b32 %r5, %r99, 31; shr.u32 %r6, %r5, 2; "
        "add.s32 %r4, %r4, %r6; and.b32 %r5, %r5, 3; mul.lo.s32 %r4, %r4, 32; mad.lo.s32 %r4, %r5, 4, %r4; "
        "cvt.u64.u32 %rd3, %r4; add.s64 %rd3, %rd3, %rd91;"
    ]
    return "\n".join(lines + [f"ld.global.b32 %r{20 + i}, [%rd3+{i % 2 * 8 * 32 + i // 2 * 16}];" for i in range(4)])


@pytest.mark.parametrize("scheduler", ["lowest-pc", "lazy"])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_a_in_registers_with_b_in_columns(swizzle: int, scheduler: str) -> None:
    """The second product of attention: P in registers, V as it lies in memory, a row for every k. 64 x 64 x 16."""
    a, b = (operand(seed) for seed in (3, 4))  # b holds rows of N; in shared memory it lies k by k
    image = np.zeros((16, 64), np.uint16)
    image[...] = b.view(np.uint16).T
    chunks = image.view(np.uint8).reshape(2, 8, 8, 16)  # 8 k, one row of 128 bytes each, in chunks of 8 columns
    if swizzle:
        swizzled = np.zeros_like(chunks)
        for row in range(8):
            for chunk in range(8):
                swizzled[:, row, chunk ^ row] = chunks[:, row, chunk]
        # Leading offset: the next 64 columns, unused here; stride offset: the next 8 k.
        raw, fields = swizzled, 1 << 62 | 1024 >> 4 << 32 | 1024 >> 4 << 16
    else:  # core matrices of 8 k x 8 columns; the next 8 k 128 bytes on, the next 8 columns 256
        raw, fields = chunks.transpose(2, 0, 1, 3), 256 >> 4 << 32 | 128 >> 4 << 16
    buffer = np.frombuffer(np.ascontiguousarray(raw).tobytes(), np.uint8).copy()
    out = np.zeros((128, 32), np.float32)
    code = f"""mov.u32 %r1, buffer; mul.wide.u32 %rd1, %r99, 16; add.s64 %rd1, %rd1, %rd90; shl.b32 %r5, %r99, 4;
      add.s32 %r5, %r5, %r1; ld.global.v4.b32 {{{registers(50, 4)}}}, [%rd1];
      st.shared.v4.b32 [%r5], {{{registers(50, 4)}}}; fence.proxy.async.shared::cta; bar.sync 0; {load_a()}
      shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd12, %r6; or.b64 %rd12, %rd12, {fields}; wgmma.fence.sync.aligned;
      setp.ne.s32 %p1, %r99, %r99; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{registers(30, 32)}}},
      {{{registers(20, 4)}}}, %rd12, %p1, 1, 1, 1; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      mul.wide.u32 %rd2, %r99, 128; add.s64 %rd2, %rd2, %rd92;
      {"".join(f"st.global.b32 [%rd2+{4 * i}], %r{30 + i};" for i in range(32))}"""
    launch = run(code, buffer, a, out, block=128, shared=SHARED, races=True, scheduler=scheduler)
    tile = out.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)
    np.testing.assert_array_equal(tile, a.astype(np.float64) @ b.astype(np.float64).T)
    assert launch.wgmma_wavefronts == 64 * 16 * 2 // 128  # of B


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
