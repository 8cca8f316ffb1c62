"""Loads, stores, atomics, asynchronous copies, mbarriers, clusters; run with every scheduler and races on."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run

SHARED = ".shared .align 128 .b8 buffer[1024];\n  .shared .align 8 .b64 bar;"
PLACE = "mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0;"
INIT = f"{PLACE} @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @%p2 bra D; bra L; D:"
SCHEDULES: list[dict[str, Any]] = [
    {"scheduler": "lowest-pc"},
    {"scheduler": "random", "seed": 1},
    {"scheduler": "lazy", "seed": 2},
]


@pytest.fixture(params=SCHEDULES, ids=lambda s: s["scheduler"])
def schedule(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {**request.param, "races": True}


VECTORS = {  # a type's elements and the bytes of each
    "v2.f32": np.float32,
    "v4.f32": np.float32,
    "v2.f16x2": np.float16,
    "v4.bf16x2": ml_dtypes.bfloat16,
    "v8.bf16": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("form", VECTORS)
@pytest.mark.parametrize("instruction", ["red", "atom"])
def test_vector_reductions(form: str, instruction: str) -> None:
    """Every thread adds its vector to one of four places; `atom` also gives what was there before."""
    dtype, count = VECTORS[form], int(form[1])
    words = count if form.endswith("32") or "x2" in form else count // 2
    size = 4 * words // np.dtype(dtype).itemsize  # elements of a vector
    added = np.random.default_rng(7).integers(-4, 5, (32, size)).astype(dtype)
    target = np.random.default_rng(8).integers(-4, 5, (4, size)).astype(dtype)
    expected = target.astype(np.float64) + added.astype(np.float64).reshape(8, 4, size).sum(0)
    started, old = target.copy(), np.zeros((32, size), dtype)
    # Each 16-bit element fills a separate register.
    single = count > words
    width, registers = ("b16", "%h") if single else ("b32", "%r")
    names = [f"{registers}{10 + i if not single else 1 + i}" for i in range(count)]
    step = 2 if single else 4
    loads = "".join(f"ld.global.{width} {name}, [%rd2+{step * i}];" for i, name in enumerate(names))
    back = [f"{registers}{(20 if not single else 10) + i}" for i in range(count)] if instruction == "atom" else []
    stores = "".join(f"st.global.{width} [%rd4+{step * i}], {name};" for i, name in enumerate(back))
    given = f"{{{', '.join(back)}}}, " if back else ""
    code = f"""mul.wide.u32 %rd1, %r99, {4 * words}; add.s64 %rd2, %rd1, %rd90; add.s64 %rd4, %rd1, %rd92; {loads}
      and.b32 %r2, %r99, 3; mul.wide.u32 %rd3, %r2, {4 * words}; add.s64 %rd3, %rd3, %rd91;
      {instruction}.relaxed.gpu.global.add{"" if "f32" in form else ".noftz"}.{form} {given}[%rd3],
        {{{", ".join(names)}}}; {stores}"""
    run(code, added, target, old, races=True)
    assert target.astype(np.float64).tolist() == expected.tolist()
    if back:
        assert old[:4].astype(np.float64).tolist() == started.astype(np.float64).tolist()


def test_a_vector_reduction_wants_its_own_alignment() -> None:
    code = "red.global.add.v4.f32 [%rd90+8], {%r1, %r2, %r3, %r4};"
    with pytest.raises(ptx_emulator.Misaligned, match="is not a multiple of 16"):
        run(code, np.zeros(8, np.float32), block=1)


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


def test_what_threads_copy_is_of_the_generic_proxy(schedule: dict[str, Any]) -> None:
    """An mbarrier makes it visible to other threads, but TMA sees it only after a proxy fence."""
    source, out = np.arange(128, dtype=np.uint32), np.zeros(128, np.uint32)
    code = f"""{PLACE} @%p1 mbarrier.init.shared.b64 [%r3], 32; bar.sync 0; mad.lo.s32 %r4, %r99, 16, %r1;
      mul.wide.u32 %rd1, %r99, 16; add.s64 %rd1, %rd1, %rd90; cp.async.cg.shared.global [%r4], [%rd1], 16;
      cp.async.mbarrier.arrive.noinc.shared.b64 [%r3]; {WAIT} FENCE @!%p1 bra E;
      cp.async.bulk.global.shared::cta.bulk_group [%rd91], [%r1], 512;
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
    E:"""
    run(code.replace("FENCE", "fence.proxy.async.shared::cta;"), source, out, block=32, shared=SHARED, **schedule)
    assert out.tolist() == source.tolist()
    with pytest.raises(ptx_emulator.RaceError, match="read by bulk"):
        run(code.replace("FENCE", ""), source, out, block=32, shared=SHARED, **schedule)


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


def test_cp_async_arrives_on_a_barrier(schedule: dict[str, Any]) -> None:
    """Two warps copy 16 bytes a thread, every third one zeros; a third warp waits for all of them, twice."""
    source, out = np.arange(512, dtype=np.uint32), np.zeros((2, 64, 4), np.uint32)
    code = """mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 64;
      @%p1 mbarrier.init.shared.b64 [%r3], 64; @%p1 mbarrier.init.shared.b64 [%r3+8], 1; bar.sync 0; mov.b32 %r50, 0;
      setp.ge.u32 %p3, %r99, 64; @%p3 bra C;
      rem.u32 %r4, %r99, 3; setp.eq.s32 %p4, %r4, 2; selp.b32 %r5, 0, 16, %p4; shl.b32 %r6, %r99, 4;
    P: and.b32 %r51, %r50, 1; xor.b32 %r52, %r51, 1;
      E: mbarrier.try_wait.parity.shared.b64 %p2, [%r3+8], %r52; @!%p2 bra E;
      shl.b32 %r7, %r50, 10; add.s32 %r7, %r7, %r6; cvt.u64.u32 %rd1, %r7; add.s64 %rd1, %rd1, %rd90;
      add.s32 %r8, %r6, %r1; cp.async.cg.shared.global [%r8], [%rd1], 16, %r5;
      cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r3];
      add.s32 %r50, %r50, 1; setp.lt.u32 %p5, %r50, 2; @%p5 bra P; ret;
    C: sub.s32 %r6, %r99, 64; shl.b32 %r6, %r6, 4; add.s32 %r8, %r6, %r1; cvt.u64.u32 %rd3, %r6;
      add.s64 %rd3, %rd3, %rd91;
    N: WAIT ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r8]; ld.shared.v4.b32 {%r14, %r15, %r16, %r17}, [%r8+512];
      bar.warp.sync -1; @%p1 mbarrier.arrive.shared.b64 %rd5, [%r3+8];
      st.global.v4.b32 [%rd3], {%r10, %r11, %r12, %r13}; st.global.v4.b32 [%rd3+512], {%r14, %r15, %r16, %r17};
      add.s64 %rd3, %rd3, 1024; add.s32 %r50, %r50, 1; setp.lt.u32 %p5, %r50, 2; @%p5 bra N;"""
    wait = "L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], %r50; @!%p2 bra L;"
    shared = SHARED.replace(".b64 bar;", ".b64 bar[2];")
    options: dict[str, Any] = {"block": 96, "shared": shared, **schedule}
    run(code.replace("WAIT", wait), source, out, **options)
    expected = source.reshape(2, 64, 4).copy()
    expected[:, 2::3] = 0
    assert out.tolist() == expected.tolist()
    with pytest.raises((ptx_emulator.RaceError, ptx_emulator.UninitializedRead)):
        run(code.replace("WAIT", ""), source, out, **options)
    with pytest.raises(ptx_emulator.Deadlock):
        run(code.replace("WAIT", wait).replace(".noinc", ""), source, out, **options)


def test_distributed_shared_memory(schedule: dict[str, Any]) -> None:
    out = np.zeros(2, np.uint32)
    code = f"""{PLACE} mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r1, %r5;
      add.s32 %r7, %r4, 40; st.shared::cluster.b32 [%r6], %r7; ARRIVE barrier.cluster.wait.acquire;
      ld.shared.b32 %r8, [%r1]; mul.wide.u32 %rd1, %r4, 4; add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r8;"""
    run(
        code.replace("ARRIVE", "barrier.cluster.arrive.release;"),
        out,
        block=1,
        grid=2,
        cluster=2,
        shared=SHARED,
        **schedule,
    )
    assert out.tolist() == [41, 40]
    with pytest.raises(ptx_emulator.RaceError, match="shared memory"):
        run(
            code.replace("ARRIVE", "barrier.cluster.arrive.relaxed;"),
            out,
            block=1,
            grid=2,
            cluster=2,
            shared=SHARED,
            **schedule,
        )


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


@pytest.mark.parametrize(("form", "words"), [("b32", 1), ("b64", 2), ("v2.b32", 2), ("v4.b32", 4), ("v4.f32", 4)])
def test_stores_to_the_other_block_by_width(form: str, words: int, schedule: dict[str, Any]) -> None:
    out = np.zeros((2, 32, words), np.uint32)
    values = [f"%r{20 + i}" for i in range(words)]
    given = {"b32": "%r20", "b64": "%rd8"}.get(form, f"{{{', '.join(values)}}}")
    compute = [f"mad.lo.s32 {x}, %r4, 1000, %r99; add.s32 {x}, {x}, {100 * i};" for i, x in enumerate(values)]
    code = f"""{PLACE} mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mad.lo.s32 %r10, %r99, {4 * words}, %r1;
      {"".join(compute)} mov.b64 %rd8, {{%r20, %r21}};
      @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster;
      @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], {128 * words}; barrier.cluster.arrive.release;
      barrier.cluster.wait.acquire; mapa.shared::cluster.u32 %r6, %r10, %r5; mapa.shared::cluster.u32 %r7, %r3, %r5;
      st.async.shared::cluster.mbarrier::complete_tx::bytes.{form} [%r6], {given}, [%r7]; {WAIT}
      mad.lo.s32 %r8, %r4, 32, %r99; mul.wide.u32 %rd2, %r8, {4 * words}; add.s64 %rd2, %rd2, %rd90;
      {"".join(f"ld.shared.b32 %r30, [%r10+{4 * i}]; st.global.b32 [%rd2+{4 * i}], %r30;" for i in range(words))}
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
    run(code, out, grid=2, cluster=2, shared=SHARED, **schedule)
    rank, thread, word = np.indices(out.shape)
    assert out.tolist() == ((1 - rank) * 1000 + thread + 100 * word).tolist()


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


@pytest.mark.parametrize(
    ("stride", "width", "sectors"),
    [(4, "b32", 4), (8, "b32", 8), (32, "b32", 32), (128, "b32", 32), (8, "b64", 8), (16, "v4.b32", 16), (0, "b32", 1)],
)
def test_sectors_of_a_warps_access(stride: int, width: str, sectors: int) -> None:
    """Distinct aligned 32 bytes, whatever the lanes take of them."""
    registers = {"b32": "%r1", "b64": "%rd1", "v4.b32": "{%r1, %r2, %r3, %r4}"}[width]
    body = f"mul.wide.u32 %rd2, %r99, {stride}; add.s64 %rd2, %rd2, %rd90; ld.global.{width} {registers}, [%rd2];"
    aligned = np.zeros(4096 + 8, np.uint32)
    start = -aligned.ctypes.data % 32 // 4
    launch = run(body, aligned[start : start + 4096], memory=[aligned], races=True)
    assert launch.sectors == {"global load": sectors}
    both = run(body, aligned[start : start + 4096], memory=[aligned], races=True, block=64, grid=2)
    assert both.sectors["global load"] >= 2 * sectors


def test_sectors_of_cp_async() -> None:
    """32 lanes of 16 bytes: 16 sectors; a lane that copies nothing, and so fills with zeros, has none."""
    body = """mov.u32 %r1, buffer; shl.b32 %r2, %r99, 4; add.s32 %r1, %r1, %r2; mul.wide.u32 %rd1, %r99, 16;
      add.s64 %rd1, %rd1, %rd90; setp.lt.u32 %p1, %r99, 8; selp.b32 %r6, 16, 0, %p1;
      cp.async.cg.shared.global [%r1], [%rd1], 16SIZE; cp.async.commit_group; cp.async.wait_group 0;"""
    raw = np.zeros(128 + 8, np.uint32)
    data = raw[-raw.ctypes.data % 32 // 4 :][:128]
    for size, sectors in (("", 16), (", %r6", 4)):
        shared = ".shared .align 128 .b8 buffer[512];"
        launch = run(body.replace("SIZE", size), data, memory=[raw], shared=shared, races=True)
        assert launch.sectors == {"global to shared cp.async": sectors}
        assert (launch.wavefronts, launch.bank_conflicts) == (4, 0)  # what it writes to shared memory, zeros too


@pytest.mark.parametrize(
    ("access", "asked", "read"),
    [
        ("ld.global.b32 %r5, [%rd1];", 16, 8),  # the second warp of a block finds them in L1
        ("ld.global.cg.b32 %r5, [%rd1];", 16, 16),
        ("ld.volatile.global.b32 %r5, [%rd1];", 16, 16),
        ("cp.async.ca.shared.global [%r1], [%rd1], 4;", 16, 8),
        ("add.s64 %rd1, %rd1, %rd2; cp.async.cg.shared.global [%r1], [%rd1], 16;", 64, 64),
        ("st.global.b32 [%rd1], %r4;", 16, 0),
    ],
)
def test_sectors_that_reach_l2(access: str, asked: int, read: int) -> None:
    """Two blocks of two warps, all of which access the same 128 bytes (with 16 bytes a lane, 512)."""
    body = f"""mov.u32 %r1, buffer; shl.b32 %r2, %r99, 4; add.s32 %r1, %r1, %r2; and.b32 %r4, %r99, 31;
      mul.wide.u32 %rd1, %r4, 4; mul.wide.u32 %rd2, %r4, 12; add.s64 %rd1, %rd1, %rd90; {access}
      cp.async.wait_all;"""
    raw = np.zeros(128 + 8, np.uint32)
    data = raw[-raw.ctypes.data % 32 // 4 :][:128]
    shared = ".shared .align 128 .b8 buffer[1024];"
    launch = run(body, data, memory=[raw], shared=shared, races=True, block=64, grid=2, on_error="report")
    assert sum(launch.sectors.values()) == asked
    assert launch.l2_sectors == {"read": read, "write": 0 if read else asked}


def test_shuffles_are_wavefronts_of_l1() -> None:
    body = "shfl.sync.bfly.b32 %r1, %r99, 1, 31, -1; shfl.sync.up.b32 %r2, %r1, 1, 0, -1;"
    launch = run(body, block=64, races=True)
    assert (launch.l1_wavefronts, launch.wavefronts) == (4, 0)


def test_wavefronts_are_passes_and_conflicts() -> None:
    body = "mov.u32 %r1, buffer; mad.lo.s32 %r2, %r99, 8, %r1; st.shared.b32 [%r2], %r99;"
    launch = run(body, shared=".shared .align 16 .b8 buffer[1024];", races=True)
    assert (launch.wavefronts, launch.bank_conflicts) == (2, 1)
