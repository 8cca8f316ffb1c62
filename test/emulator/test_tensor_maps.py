"""Tensor maps edited on the device, their fences, and tensor reductions. The maps are encoded by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run

SHARED = """.shared .align 128 .b8 buffer[1024];
  .shared .align 128 .b8 map[128];
  .shared .align 8 .b64 bar;"""
CODES = {"u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "bf16": 10}


def aligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    view = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def encode(tensor: np.ndarray, kind: str, box: tuple[int, int]) -> np.ndarray:
    """The map of a matrix without swizzle: sizes and boxes innermost first."""
    words = np.zeros(32, np.uint32)
    words[:2] = np.array([tensor.ctypes.data], np.uint64).view(np.uint32)
    words[2] = 1 << 4 | CODES[kind] << 7 | 1 << 18 | 2 << 21
    words[3] = tensor.strides[0] >> 4
    words[8], words[9] = tensor.shape[1] - 1, tensor.shape[0] - 1
    raw = words.view(np.uint8)
    raw[55], raw[56] = box[0] - 1, box[1] - 1
    return aligned(words)


START = """mov.u32 %r1, buffer; mov.u32 %r2, map; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0;
  @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster;
  shl.b32 %r4, %r99, 2; cvt.u64.u32 %rd1, %r4; add.s64 %rd2, %rd90, %rd1; ld.global.b32 %r5, [%rd2];"""
EDIT = """@%p1 tensormap.replace.tile.global_address.{space}.b1024.b64 [{map}], %rd92;
  @%p1 tensormap.replace.tile.global_dim.{space}.b1024.b32 [{map}], 0, 8;
  @%p1 tensormap.replace.tile.global_dim.{space}.b1024.b32 [{map}], 1, 3;
  @%p1 tensormap.replace.tile.global_stride.{space}.b1024.b64 [{map}], 0, %rd5;
  @%p1 tensormap.replace.tile.box_dim.{space}.b1024.b32 [{map}], 1, 4;"""
LOAD = """@!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 128;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd91, {0, 1}], [%r3];
  W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra W;
  add.s32 %r6, %r1, %r4; ld.shared.b32 %r7, [%r6]; add.s64 %rd4, %rd93, %rd1; st.global.b32 [%rd4], %r7;"""
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%rd91], 128;"
RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
THROUGH_SHARED = f"""{START} add.s32 %r8, %r2, %r4; st.shared.b32 [%r8], %r5; bar.warp.sync -1; mov.b64 %rd5, 64;
  {EDIT.format(space="shared::cta", map="%r2")}
  tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd91], [%r2], 128;
  {ACQUIRE} {LOAD}"""
IN_GLOBAL = f"""{START} add.s64 %rd6, %rd91, %rd1; st.global.b32 [%rd6], %r5; bar.warp.sync -1; mov.b64 %rd5, 64;
  {EDIT.format(space="global", map="%rd91")} {RELEASE} {ACQUIRE} {LOAD}"""


def edited(code: str, **options: Any) -> None:
    """The given map describes zeros; the edited one 3 x 8 words of a matrix with rows of 16, box 8 x 4."""
    zeros, matrix = aligned(np.zeros((2, 8), np.uint32)), aligned(np.arange(1, 65, dtype=np.uint32).reshape(4, 16))
    given, place, out = encode(zeros, "u32", (8, 2)), aligned(np.zeros(32, np.uint32)), np.zeros(32, np.uint32)
    run(code, given, place, matrix, out, shared=SHARED, memory=[zeros], races=True, **options)
    expected = np.zeros((4, 8), np.uint32)
    expected[:2] = matrix[1:3, :8]  # row 3 is outside the tensor now
    assert out.reshape(4, 8).tolist() == expected.tolist()


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
@pytest.mark.parametrize("code", [THROUGH_SHARED, IN_GLOBAL], ids=["shared", "global"])
def test_edits(code: str, scheduler: str) -> None:
    edited(code, scheduler=scheduler)


@pytest.mark.parametrize("code", [THROUGH_SHARED, IN_GLOBAL], ids=["shared", "global"])
def test_edits_need_their_fences(code: str) -> None:
    with pytest.raises(ptx_emulator.RaceError, match=r"read by TMA is not ordered after the write by warp 0"):
        edited(code.replace(ACQUIRE, ""))
    with pytest.raises(ptx_emulator.RaceError, match="read by TMA is not ordered"):
        edited(code.replace(ACQUIRE, "fence.proxy.async;"))
    if RELEASE in code:
        with pytest.raises(ptx_emulator.RaceError, match=r"edited without fence\.proxy\.tensormap::generic\.release"):
            edited(code.replace(RELEASE, ""))


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_a_map_is_edited_for_one_group_after_the_other(scheduler: str) -> None:
    """As in a grouped GEMM: one warp edits the map, another loads with it; then again, for a tensor of another size."""
    first, second = (aligned(np.arange(8 * rows, dtype=np.uint32).reshape(rows, 8) + rows) for rows in (4, 1))
    given, place, out = encode(first, "u32", (8, 4)), aligned(np.zeros(32, np.uint32)), np.zeros((2, 4, 8), np.uint32)
    tables = np.array([[first.ctypes.data, 4], [second.ctypes.data, 1]], np.uint64)
    code = """mov.u32 %r1, buffer; mov.u32 %r2, map; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0;
      setp.eq.s32 %p3, %r99, 32; @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster;
      setp.ge.u32 %p4, %r99, 32; and.b32 %r98, %r99, 31; shl.b32 %r4, %r98, 2; cvt.u64.u32 %rd1, %r4;
      add.s64 %rd2, %rd90, %rd1; ld.global.b32 %r5, [%rd2]; add.s32 %r8, %r2, %r4; mov.b32 %r50, 0; bar.sync 0;
      @%p4 bra NEXT; st.shared.b32 [%r8], %r5; bar.warp.sync -1;
    NEXT: mul.wide.u32 %rd10, %r50, 16; add.s64 %rd10, %rd10, %rd92; @%p4 bra LOAD;
      ld.global.v2.b64 {%rd11, %rd12}, [%rd10]; cvt.u32.u64 %r12, %rd12;
      @%p1 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r2], %rd11;
      @%p1 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r2], 1, %r12; bar.warp.sync -1;
      tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd91], [%r2], 128;
    LOAD: bar.sync 1, 64; @!%p4 bra DONE; ACQUIRE @!%p3 bra WAIT;
      mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 128;
      cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd91, {0, 0}], [%r3];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r50; @!%p2 bra WAIT; add.s32 %r6, %r1, %r4;
      ld.shared.b32 %r7, [%r6]; mul.wide.u32 %rd4, %r50, 128; add.s64 %rd4, %rd4, %rd1; add.s64 %rd4, %rd4, %rd93;
      st.global.b32 [%rd4], %r7; fence.proxy.async.shared::cta;
    DONE: bar.sync 2, 64; add.s32 %r50, %r50, 1; setp.lt.u32 %p5, %r50, 2; @%p5 bra NEXT;"""
    options: dict[str, Any] = {"block": 64, "shared": SHARED, "races": True, "scheduler": scheduler, "seed": 3}
    reachable = {"memory": [first, second]}
    run(code.replace("ACQUIRE", ACQUIRE), given, place, tables, out, **reachable, **options)
    assert out[0].tolist() == first.tolist()
    assert out[1].tolist() == [*second.tolist(), [0] * 8, [0] * 8, [0] * 8]
    with pytest.raises(ptx_emulator.RaceError, match="read by TMA is not ordered"):
        run(code.replace("ACQUIRE", ""), given, place, tables, out, **reachable, **options)


def test_fields_that_cannot_be_edited_are_named() -> None:
    with pytest.raises(ptx_emulator.UnsupportedPTX, match=r"tensormap\.replace\.tile\.element_stride"):
        edited(THROUGH_SHARED.replace("tile.box_dim", "tile.element_stride"))


def test_unordered_reductions_are_no_race_but_a_store_is() -> None:
    target = aligned(np.zeros((4, 8), np.float32))
    code = f"""{START.replace("ld.global.b32 %r5, [%rd2];", "")} add.s32 %r6, %r1, %r4; st.shared.b32 [%r6], 0x3F800000;
      fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra E;
      cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd90, {{0, 0}}], [%r1];
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    given = encode(target, "f32", (8, 4))
    options: dict[str, Any] = {"grid": 2, "shared": SHARED, "memory": [target], "races": True}
    run(code, given, **options)
    assert (target == 2).all()
    with pytest.raises(ptx_emulator.RaceError, match="global memory"):
        run(code.replace("cp.reduce", "cp").replace(".add", ""), given, **options)
