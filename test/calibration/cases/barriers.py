"""mbarriers, named barriers, cluster barriers, distributed shared memory, dependent launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from calibration.case import Case, raw, store_words

SHARED = ".shared .align 16 .b8 buffer[1024]; .shared .align 8 .b64 bar[2];"
INIT = "mov.u32 %r1, bar; mov.u32 %r2, buffer; setp.eq.s32 %p1, %r99, 0;"


def phases(name: str, count: int, steps: list[str]) -> Case:
    """One thread works an mbarrier of `count` arrivals; after each step bit 0 is the answer of test_wait.parity 0,
    bit 1 that of parity 1, bit 2 that of test_wait with the state of the step's arrival, if it had one."""
    lines = [INIT, f"mbarrier.init.shared.b64 [%r1], {count}; mov.b32 %r20, 0; mov.b64 %rd20, 0;"]
    for number, step in enumerate(steps):
        lines += [
            step,
            "mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.b32 %r3, 1, 0, %p2;",
            "mbarrier.test_wait.parity.shared.b64 %p3, [%r1], 1; selp.b32 %r4, 2, 0, %p3; or.b32 %r3, %r3, %r4;",
        ]
        if "%rd20," in step:
            lines.append("mbarrier.test_wait.shared.b64 %p4, [%r1], %rd20; selp.b32 %r4, 4, 0, %p4;")
            lines.append("or.b32 %r3, %r3, %r4;")
        lines.append(f"st.global.b32 [%rd0+{4 * number}], %r3;")
    return Case("mbarrier", name, "\n".join(lines), (), (np.zeros(len(steps), np.uint32),), block=1, shared=SHARED)


def mbarriers() -> list[Case]:
    arrive, by = "mbarrier.arrive.shared.b64 %rd20, [%r1];", "mbarrier.arrive.shared.b64 %rd20, [%r1], "
    expect = "mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r1], "
    sink = "mbarrier.arrive.shared.b64 _, [%r1];"
    only, done = (
        "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], ",
        "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], ",
    )
    again = "mbarrier.inval.shared.b64 [%r1]; mbarrier.init.shared.b64 [%r1], 1;"
    return [
        phases("arrive.1", 1, [""] + [arrive] * 5),
        phases("arrive.3", 3, [""] + [arrive] * 10),
        phases("arrive.sink", 2, ["", *[sink] * 6]),
        phases("arrive.count", 10, [by + "3;", by + "3;", by + "4;", by + "9;", by + "1;", by + "10;"]),
        phases("tx.after", 1, ["", expect + "64;", done + "16;", done + "48;", expect + "0;", arrive]),
        phases("tx.before", 2, [done + "32;", arrive, expect + "32;", arrive, expect + "8;", done + "8;"]),
        phases("tx.only", 1, [only + "128;", arrive, done + "100;", only + "4;", done + "32;", arrive]),
        phases("tx.limit", 1, [expect + "1048575;", done + "1048574;", done + "1;", arrive]),
        phases("inval", 1, [arrive, again, arrive, arrive]),
        pending_count(),
        replace(
            phases(
                "arrive_drop",
                3,
                ["", arrive, "mbarrier.arrive_drop.shared.b64 %rd20, [%r1];", arrive, arrive, arrive, arrive],
            ),
            refused=True,
        ),
        asynchronous_stores(),
        ring(),
        cluster_arrivals(),
    ]


def pending_count() -> Case:
    """The state that an arrival returns tells how many were pending before it."""
    lines = [INIT, "mbarrier.init.shared.b64 [%r1], 5;"]
    lines += [
        f"mbarrier.arrive.shared.b64 %rd20, [%r1]; mbarrier.pending_count.b64 %r3, %rd20; "
        f"st.global.b32 [%rd0+{4 * number}], %r3;"
        for number in range(7)
    ]
    return Case(
        "mbarrier",
        "pending_count",
        "\n".join(lines),
        (),
        (np.zeros(7, np.uint32),),
        block=1,
        shared=SHARED,
        refused=True,
    )


def asynchronous_stores() -> Case:
    """st.async and red.async into the other block, which its mbarrier counts."""
    body = f"""{INIT} mov.u32 %r3, %cluster_ctarank; mov.b32 %r9, 100; mad.lo.s32 %r10, %r99, 4, %r2;
      st.shared.b32 [%r10+512], %r9; @%p1 mbarrier.init.shared.b64 [%r1], 1;
      @%p1 fence.mbarrier_init.release.cluster; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 640;
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire; xor.b32 %r4, %r3, 1;
      mapa.shared::cluster.u32 %r5, %r1, %r4; mapa.shared::cluster.u32 %r6, %r2, %r4; mad.lo.s32 %r7, %r99, 16, %r6;
      mad.lo.s32 %r8, %r3, 32, %r99; mad.lo.s32 %r11, %r8, 3, 1;
      st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r7], {{%r8, %r11, %r99, %r3}}, [%r5];
      mad.lo.s32 %r12, %r99, 4, %r6; add.s32 %r12, %r12, 512;
      red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r12], %r11, [%r5];
      W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 0; @%p3 bra D; bra W;
      D: mad.lo.s32 %r13, %r99, 16, %r2; ld.shared.v4.b32 {{%r14, %r15, %r16, %r17}}, [%r13];
      ld.shared.b32 %r18, [%r10+512]; mov.b32 %r99, %r8; {store_words("%r", 14, 5, 0)}
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
    return Case("cluster", "st.async", body, (), (np.zeros(320, np.uint32),), grid=2, cluster=2, shared=SHARED)


def ring() -> Case:
    """Two warps hand 32 words to and fro, twelve times, through a full and an empty barrier."""
    body = f"""{INIT} @%p1 mbarrier.init.shared.b64 [%r1], 32; @%p1 mbarrier.init.shared.b64 [%r1+8], 32; bar.sync 0;
      and.b32 %r5, %r99, 31; shl.b32 %r6, %r5, 2; add.s32 %r6, %r6, %r2; setp.ge.u32 %p5, %r99, 32;
      mov.b32 %r10, 0; mov.b32 %r11, 0; mov.b32 %r12, 1; mad.lo.s32 %r13, %r5, 77, 5; @%p5 bra CONSUME;
      PRODUCE: xor.b32 %r14, %r11, 1;
      PW: mbarrier.try_wait.parity.shared.b64 %p6, [%r1+8], %r14; @!%p6 bra PW;
      mad.lo.s32 %r13, %r13, 5, %r10; st.shared.b32 [%r6], %r13; mbarrier.arrive.shared.b64 %rd20, [%r1];
      xor.b32 %r11, %r11, 1; add.s32 %r10, %r10, 1; setp.lt.s32 %p7, %r10, 12; @%p7 bra PRODUCE; ret;
      CONSUME: mov.b32 %r15, 0;
      CW: mbarrier.try_wait.parity.shared.b64 %p6, [%r1], %r11; @%p6 bra CD; bra CW;
      CD: xor.b32 %r16, %r5, 1; shl.b32 %r16, %r16, 2; add.s32 %r16, %r16, %r2; ld.shared.b32 %r17, [%r16];
      mad.lo.s32 %r15, %r15, 31, %r17; mbarrier.arrive.shared.b64 %rd20, [%r1+8];
      xor.b32 %r11, %r11, 1; add.s32 %r10, %r10, 1; setp.eq.s32 %p7, %r10, 12; @%p7 bra OUT; bra CW;
      OUT: sub.s32 %r99, %r99, 32; {store_words("%r", 15, 1, 0)}"""
    return Case("mbarrier", "ring", body, (), (np.zeros(32, np.uint32),), block=64, shared=SHARED)


def cluster_arrivals() -> Case:
    """Every thread of four blocks arrives at the barrier of block 0 and block 0 reads what they wrote there."""
    body = f"""{INIT} mov.u32 %r3, %cluster_ctarank; @%p1 mbarrier.init.shared.b64 [%r1], 128;
      @%p1 fence.mbarrier_init.release.cluster; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
      mov.b32 %r4, 0; mapa.shared::cluster.u32 %r5, %r1, %r4; mapa.shared::cluster.u32 %r6, %r2, %r4;
      mad.lo.s32 %r7, %r3, 32, %r99; mad.lo.s32 %r8, %r7, 4, %r6; mad.lo.s32 %r9, %r7, 3, %r3;
      st.shared::cluster.b32 [%r8], %r9; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];
      setp.ne.s32 %p2, %r3, 0; @%p2 bra E;
      W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 0; @%p3 bra D; bra W;
      D: xor.b32 %r10, %r99, 5; mad.lo.s32 %r10, %r10, 16, %r2;
      ld.shared.v4.b32 {{%r11, %r12, %r13, %r14}}, [%r10]; {store_words("%r", 11, 4, 0)}
      E: barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"""
    return Case("mbarrier", "cluster", body, (), (np.zeros(128, np.uint32),), grid=4, cluster=4, shared=SHARED)


def named() -> list[Case]:
    place = f"{INIT} and.b32 %r4, %r99, 31; mad.lo.s32 %r5, %r99, 4, %r2;"
    halves = f"""{place} st.shared.b32 [%r5], %r99; shr.u32 %r6, %r99, 6; add.s32 %r6, %r6, 1; bar.sync %r6, 64;
      xor.b32 %r7, %r99, 33; mad.lo.s32 %r7, %r7, 4, %r2; ld.shared.b32 %r10, [%r7]; {store_words("%r", 10, 1, 0)}"""
    handover = f"""{place} mad.lo.s32 %r5, %r4, 4, %r2; setp.ge.u32 %p3, %r99, 32; @%p3 bra C;
      mad.lo.s32 %r6, %r4, 9, 1; st.shared.b32 [%r5], %r6; bar.arrive 3, 64; ret;
      C: bar.sync 3, 64; xor.b32 %r4, %r4, 7; mad.lo.s32 %r5, %r4, 4, %r2; ld.shared.b32 %r10, [%r5];
      sub.s32 %r99, %r99, 32; {store_words("%r", 10, 1, 0)}"""
    reversal = f"""{place} mov.b32 %r10, %r99; mov.b32 %r11, 0;
      L: st.shared.b32 [%r5], %r10; barrier.sync 0; sub.s32 %r7, 127, %r99; mad.lo.s32 %r7, %r7, 4, %r2;
      ld.shared.b32 %r8, [%r7]; barrier.sync 0; mad.lo.s32 %r10, %r8, 3, %r99; add.s32 %r11, %r11, 1;
      setp.lt.s32 %p4, %r11, 6; @%p4 bra L; {store_words("%r", 10, 1, 0)}"""
    reduction = f"""{place} and.b32 %r6, %r99, 5; setp.eq.s32 %p3, %r6, 1; bar.red.popc.u32 %r10, 0, %p3;
      bar.red.and.pred %p4, 0, %p3; selp.b32 %r11, 1, 0, %p4; bar.red.or.pred %p5, 0, %p3; selp.b32 %r12, 1, 0, %p5;
      {store_words("%r", 10, 3, 0)}"""
    return [
        Case("barrier", "bar.red", reduction, (), (np.zeros(384, np.uint32),), block=128, shared=SHARED),
        Case("barrier", "bar.sync.halves", halves, (), (np.zeros(128, np.uint32),), block=128, shared=SHARED),
        Case("barrier", "bar.arrive", handover, (), (np.zeros(32, np.uint32),), block=64, shared=SHARED),
        Case("barrier", "barrier.sync.loop", reversal, (), (np.zeros(128, np.uint32),), block=128, shared=SHARED),
    ]


def clusters() -> list[Case]:
    start = f"{INIT} mov.u32 %r3, %cluster_ctarank; mov.u32 %r98, %ctaid.x; mad.lo.s32 %r98, %r98, 32, %r99;"
    exchange = f"""{start} add.s32 %r4, %r3, 1; and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r2, %r4;
      mad.lo.s32 %r6, %r99, 4, %r5; mad.lo.s32 %r7, %r98, 13, 7; st.shared::cluster.b32 [%r6], %r7;
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mad.lo.s32 %r8, %r99, 4, %r2;
      ld.shared.b32 %r10, [%r8]; mov.b32 %r99, %r98; {store_words("%r", 10, 1, 0)}"""
    gather = f"""{start} mad.lo.s32 %r8, %r99, 4, %r2; mad.lo.s32 %r7, %r98, 11, 3; st.shared.b32 [%r8], %r7;
      barrier.cluster.arrive.release; barrier.cluster.wait.acquire; xor.b32 %r4, %r3, 2;
      mapa.shared::cluster.u32 %r5, %r8, %r4; ld.shared::cluster.b32 %r10, [%r5];
      getctarank.shared::cluster.u32 %r11, %r5; cvt.u64.u32 %rd5, %r5; barrier.cluster.arrive.relaxed;
      barrier.cluster.wait; mov.b32 %r99, %r98; {store_words("%r", 10, 2, 0)}"""
    total = f"""{start} mov.b32 %r4, 0; @%p1 st.shared.b32 [%r2], %r4; barrier.cluster.arrive.release;
      barrier.cluster.wait.acquire; mapa.shared::cluster.u32 %r5, %r2, %r4; mad.lo.s32 %r6, %r98, %r98, 1;
      red.relaxed.cluster.shared::cluster.add.u32 [%r5], %r6; barrier.cluster.arrive.release;
      barrier.cluster.wait.acquire; ld.shared.b32 %r10, [%r2]; setp.eq.s32 %p2, %r3, 0; selp.b32 %r10, %r10, 0, %p2;
      mov.b32 %r99, %r98; {store_words("%r", 10, 1, 0)}"""
    options = {"grid": 8, "cluster": 4, "shared": SHARED}
    return [
        Case("cluster", "st.neighbour", exchange, (), (np.zeros(256, np.uint32),), **options),  # type: ignore[arg-type]
        Case("cluster", "ld.getctarank", gather, (), (np.zeros(512, np.uint32),), **options),  # type: ignore[arg-type]
        Case("cluster", "red.block0", total, (), (np.zeros(256, np.uint32),), **options),  # type: ignore[arg-type]
    ]


def dependent() -> list[Case]:
    body = """griddepcontrol.wait; mul.wide.u32 %rd70, %r99, 4; add.s64 %rd71, %rd70, %rd0; ld.global.b32 %r1, [%rd71];
      griddepcontrol.launch_dependents; add.s32 %r1, %r1, 1; add.s64 %rd71, %rd70, %rd1; st.global.b32 [%rd71], %r1;"""
    return [Case("cluster", "griddepcontrol", body, (raw("grid", 32),), (np.zeros(32, np.uint32),))]


def cases() -> list[Case]:
    return mbarriers() + named() + clusters() + dependent()
