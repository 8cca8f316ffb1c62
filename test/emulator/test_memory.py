"""Loads, stores, atomics, asynchronous copies, mbarriers, clusters; run with every scheduler and races on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run

SHARED = ".shared .align 128 .b8 buffer[1024];\n  .shared .align 8 .b64 bar;"
PLACE = "mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0;"
INIT = f"{PLACE} @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @%p2 bra D; bra L; D:"
SCHEDULES: list[dict[str, Any]] = [{"scheduler": "lowest-pc"}, {"scheduler": "random", "seed": 1},
                                   {"scheduler": "lazy", "seed": 2}]  # fmt: skip


@pytest.fixture(params=SCHEDULES, ids=lambda s: s["scheduler"])
def schedule(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**request.param, "races": True}


def test_signed_and_vector_access() -> None:
    source = np.array([-5, 100, -128, 127], np.int8)
    out = np.zeros(4, np.int32)
    run("ld.global.v4.s8 {%r10, %r11, %r12, %r13}, [%rd90]; st.global.v4.b32 [%rd91], {%r10, %r11, %r12, %r13};",
        source, out, block=1)  # fmt: skip
    assert out.tolist() == source.tolist()


def test_local_memory_is_private() -> None:
    out = np.zeros((32, 2), np.uint32)
    code = """.local .align 16 .b8 depot[16]; mov.u64 %rd1, depot; cvta.local.u64 %rd2, %rd1; st.local.b32 [%rd1], %r99;
      add.s32 %r2, %r99, 7; st.b32 [%rd2+4], %r2; ld.b32 %r3, [%rd2]; ld.local.b32 %r4, [%rd1+4];
      mul.wide.u32 %rd3, %r99, 8; add.s64 %rd3, %rd3, %rd90; st.global.v2.b32 [%rd3], {%r3, %r4};"""
    run(code, out)
    assert out.tolist() == [[t, t + 7] for t in range(32)]


@pytest.mark.parametrize(("op", "expected"), [("add", 10 + 496), ("max", 31), ("min", 0), ("or", 31), ("inc", 10)])
def test_atomics(op: str, expected: int) -> None:
    start = 10
    data = np.array([start], np.uint32)
    kind = "b32" if op == "or" else "u32"
    value = "%r99" if op != "inc" else "%r5"
    run(f"mov.b32 %r5, 31; atom.global.{op}.{kind} %r1, [%rd90], {value};", data, races=True)
    if op == "inc":  # 32 increments that wrap to 0 after 31
        expected = (start + 32) % 32
    assert data[0] == expected


def test_float_and_packed_atomics() -> None:
    data = np.zeros(2, np.float32)
    run("cvt.rn.f32.u32 %f1, %r99; red.global.add.f32 [%rd90], %f1;", data)
    assert data[0] == 496
    half = np.zeros(2, np.float16)
    run("mov.b32 %r1, 0x40003C00; red.global.add.noftz.f16x2 [%rd90], %r1;", half)
    assert half.tolist() == [32.0, 64.0]
    out = np.zeros(1, np.uint32)
    run("mov.b32 %r2, 0; add.s32 %r3, %r99, 1; atom.global.cas.b32 %r1, [%rd90], %r2, %r3;", out)
    assert out[0] == 1


def test_bulk_copy_round_trip(schedule: dict[str, Any]) -> None:
    source, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    code = f"""{INIT} @!%p1 bra W;
      mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 256;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd90], 256, [%r3];
    W: {WAIT} shl.b32 %r4, %r99, 2; add.s32 %r4, %r4, %r1; ld.shared.b32 %r5, [%r4]; add.s32 %r5, %r5, 1;
      bar.sync 0; st.shared.b32 [%r4], %r5; FENCE bar.sync 0; @!%p1 bra E;
      cp.async.bulk.global.shared::cta.bulk_group [%rd91], [%r1], 256;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    E:"""
    fenced = code.replace("FENCE", "fence.proxy.async.shared::cta;")
    run(fenced, source, out, block=64, shared=SHARED, **schedule)
    assert out.tolist() == (source + 1).tolist()
    with pytest.raises(ptx_emulator.RaceError, match="read by bulk"):
        run(code.replace("FENCE", ""), source, out, block=64, shared=SHARED, **schedule)
    with pytest.raises((ptx_emulator.RaceError, ptx_emulator.UninitializedRead)):
        run(fenced.replace(WAIT, ""), source, out, block=64, shared=SHARED, **schedule)


def test_bulk_reduction(schedule: dict[str, Any]) -> None:
    source = np.arange(4, dtype=np.float32)
    out = np.full(4, 10, np.float32)
    code = f"""{PLACE} mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %rd90; ld.global.b32 %r5, [%rd1];
      shl.b32 %r4, %r99, 2; add.s32 %r4, %r4, %r1; st.shared.b32 [%r4], %r5; fence.proxy.async.shared::cta; bar.sync 0;
      @!%p1 bra E; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd91], [%r1], 16;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; E:"""
    run(code, source, out, block=4, shared=SHARED, **schedule)
    assert out.tolist() == [10, 11, 12, 13]


def test_cp_async_groups_and_zero_fill(schedule: dict[str, Any]) -> None:
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    code = f"""{PLACE} shl.b32 %r4, %r99, 4; add.s32 %r4, %r4, %r1; mul.wide.u32 %rd1, %r99, 16;
      add.s64 %rd2, %rd1, %rd90; and.b32 %r6, %r99, 1; shl.b32 %r6, %r6, 3; sub.s32 %r6, 16, %r6;
      cp.async.cg.shared.global [%r4], [%rd2], 16, %r6; cp.async.commit_group; cp.async.wait_group 0;
      ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r4]; add.s64 %rd3, %rd1, %rd91;
      st.global.v4.b32 [%rd3], {{%r10, %r11, %r12, %r13}};"""
    run(code, source, out, shared=SHARED, **schedule)
    expected = source.reshape(32, 4).copy()
    expected[1::2, 2:] = 0
    assert out.tolist() == expected.reshape(-1).tolist()
    with pytest.raises((ptx_emulator.RaceError, ptx_emulator.UninitializedRead)):
        run(code.replace("cp.async.wait_group 0;", ""), source, out, shared=SHARED, **schedule)


def test_distributed_shared_memory(schedule: dict[str, Any]) -> None:
    out = np.zeros(2, np.uint32)
    code = f"""{PLACE} mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r1, %r5;
      add.s32 %r7, %r4, 40; st.shared::cluster.b32 [%r6], %r7; ARRIVE barrier.cluster.wait.acquire;
      ld.shared.b32 %r8, [%r1]; mul.wide.u32 %rd1, %r4, 4; add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r8;"""
    run(code.replace("ARRIVE", "barrier.cluster.arrive.release;"), out, block=1, grid=2, cluster=2, shared=SHARED,
        **schedule)  # fmt: skip
    assert out.tolist() == [41, 40]
    with pytest.raises(ptx_emulator.RaceError, match="shared memory"):
        run(code.replace("ARRIVE", "barrier.cluster.arrive.relaxed;"), out, block=1, grid=2, cluster=2, shared=SHARED,
            **schedule)  # fmt: skip


def test_stores_and_reductions_to_the_other_block_complete_on_its_barrier(schedule: dict[str, Any]) -> None:
    out = np.zeros((2, 32), np.uint32)
    code = f"""{PLACE} mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; shl.b32 %r9, %r99, 2;
      add.s32 %r10, %r1, %r9; st.shared.b32 [%r10+128], 5; @%p1 mbarrier.init.shared.b64 [%r3], 1;
      @%p1 fence.mbarrier_init.release.cluster; @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 256;
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
      mapa.shared::cluster.u32 %r6, %r10, %r5; mapa.shared::cluster.u32 %r7, %r3, %r5;
      mad.lo.s32 %r8, %r4, 100, %r99;
      st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r6], %r8, [%r7];
      red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6+128], %r99, [%r7];
      {WAIT} ld.shared.b32 %r11, [%r10]; ld.shared.b32 %r12, [%r10+128]; mad.lo.s32 %r11, %r12, 1000, %r11;
      mul.wide.u32 %rd1, %r4, 128; mul.wide.u32 %rd2, %r99, 4; add.s64 %rd1, %rd1, %rd2; add.s64 %rd1, %rd1, %rd90;
      st.global.b32 [%rd1], %r11; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
    run(code, out, grid=2, cluster=2, shared=SHARED, **schedule)
    assert out.tolist() == [[(5 + t) * 1000 + (1 - rank) * 100 + t for t in range(32)] for rank in (0, 1)]
    with pytest.raises((ptx_emulator.RaceError, ptx_emulator.UninitializedRead)):
        run(code.replace(WAIT, ""), out, grid=2, cluster=2, shared=SHARED, **schedule)


def test_barrier_with_a_reduction(schedule: dict[str, Any]) -> None:
    out = np.zeros((64, 3), np.uint32)
    code = """setp.ge.u32 %p1, %r99, 23; barrier.cta.red.popc.sync.aligned.u32 %r1, 2, 64, %p1;
      bar.red.and.pred %p2, 3, 64, %p1; bar.red.or.pred %p3, 3, !%p1; selp.b32 %r2, 1, 0, %p2; selp.b32 %r3, 1, 0, %p3;
      mul.wide.u32 %rd1, %r99, 12; add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r1; st.global.b32 [%rd1+4], %r2;
      st.global.b32 [%rd1+8], %r3;"""
    run(code.replace(".sync", ""), out, block=64, **schedule)
    assert out.tolist() == [[41, 0, 1]] * 64


def test_named_barriers_between_producer_and_consumer(schedule: dict[str, Any]) -> None:
    out = np.zeros(32, np.uint32)
    code = f"""{PLACE} and.b32 %r4, %r99, 31; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r1; setp.ge.u32 %p3, %r99, 32;
      @%p3 bra C; st.shared.b32 [%r4], %r99; bar.arrive 3, 64; ret;
    C: bar.sync 3, 64; ld.shared.b32 %r5, [%r4]; sub.s32 %r6, %r99, 32; mul.wide.u32 %rd1, %r6, 4;
      add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r5;"""
    run(code, out, block=64, shared=SHARED, **schedule)
    assert out.tolist() == list(range(32))


def test_bank_conflicts_are_counted() -> None:
    for stride, extra in ((4, 0), (8, 1), (32, 7), (128, 31)):
        shared = ".shared .align 128 .b8 buffer[4096];"
        code = f"mov.u32 %r1, buffer; mul.lo.s32 %r2, %r99, {stride}; add.s32 %r1, %r1, %r2; st.shared.b32 [%r1], %r2;"
        assert run(code, shared=shared, races=True).bank_conflicts == extra
    wide = """mov.u32 %r1, buffer; shl.b32 %r2, %r99, 4; add.s32 %r1, %r1, %r2;
      st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};"""
    assert run(wide, shared=".shared .align 128 .b8 buffer[4096];", races=True).bank_conflicts == 0
