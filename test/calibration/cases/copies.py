"""cp.async, bulk copies without a tensor map, and bulk reductions."""

from __future__ import annotations

from typing import Any

import numpy as np

from calibration.case import Case, Tolerance, floats, raw, words

SHARED = ".shared .align 1024 .b8 buffer[4096]; .shared .align 8 .b64 bar;"
PLACE = "mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0;"
INIT = f"{PLACE} @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;"
WAIT = "L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @%p2 bra D; bra L; D:"
DRAIN = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def dump(bytes_: int, buffer: int, threads: int = 32, source: str = "%r1") -> str:
    """All threads of a warp copy shared memory from `source` on to a buffer."""
    lines = [f"mad.lo.s32 %r80, %r99, 16, {source}; mul.wide.u32 %rd78, %r99, 16; add.s64 %rd78, %rd78, %rd{buffer};"]
    for place in range(0, bytes_, 16 * threads):
        lines.append(f"ld.shared.v4.b32 {{%r81, %r82, %r83, %r84}}, [%r80+{place}];")
        lines.append(f"st.global.v4.b32 [%rd78+{place}], {{%r81, %r82, %r83, %r84}};")
    return "\n".join(lines)


def fill(bytes_: int, buffer: int, threads: int = 32, target: str = "%r1") -> str:
    """The reverse, with the fence that lets bulk copies read it."""
    lines = [f"mad.lo.s32 %r80, %r99, 16, {target}; mul.wide.u32 %rd78, %r99, 16; add.s64 %rd78, %rd78, %rd{buffer};"]
    for place in range(0, bytes_, 16 * threads):
        lines.append(f"ld.global.v4.b32 {{%r81, %r82, %r83, %r84}}, [%rd78+{place}];")
        lines.append(f"st.shared.v4.b32 [%r80+{place}], {{%r81, %r82, %r83, %r84}};")
    return "\n".join([*lines, "fence.proxy.async.shared::cta; bar.sync 0;"])


def cp_async() -> list[Case]:
    cases_ = []
    for form, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for zero in (False, True):
            amount = f"and.b32 %r6, %r99, {size - 1};" if zero else ""
            body = f"""{PLACE} {fill(512, 0)} mad.lo.s32 %r4, %r99, {size}, %r1; xor.b32 %r5, %r99, 3;
              mul.wide.u32 %rd70, %r5, {size}; add.s64 %rd70, %rd70, %rd1; {amount}
              cp.async.{form}.shared.global [%r4], [%rd70], {size}{", %r6" if zero else ""};
              cp.async.commit_group; cp.async.wait_group 0; bar.sync 0; {dump(512, 2)}"""
            name = f"cp.async.{form}.{size}{'.zfill' if zero else ''}"
            cases_.append(
                Case(
                    "copies", name, body, (raw("old", 128), raw("new", 128)), (np.zeros(128, np.uint32),), shared=SHARED
                )
            )
    body = f"""{PLACE} @%p1 mbarrier.init.shared.b64 [%r3], 32; bar.sync 0; mad.lo.s32 %r4, %r99, 16, %r1;
      mul.wide.u32 %rd70, %r99, 16; add.s64 %rd70, %rd70, %rd0; cp.async.cg.shared.global [%r4], [%rd70], 16;
      cp.async.mbarrier.arrive.noinc.shared.b64 [%r3]; {WAIT} xor.b32 %r5, %r99, 9; mad.lo.s32 %r5, %r5, 16, %r1;
      sub.s32 %r5, %r5, %r4; add.s32 %r5, %r5, %r1; sub.s32 %r5, %r5, %r1; add.s32 %r4, %r4, %r5;
      ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r4]; mul.wide.u32 %rd70, %r99, 16; add.s64 %rd70, %rd70, %rd1;
      st.global.v4.b32 [%rd70], {{%r10, %r11, %r12, %r13}};"""
    cases_.append(
        Case("copies", "cp.async.mbarrier", body, (raw("noinc", 128),), (np.zeros(128, np.uint32),), shared=SHARED)
    )
    return cases_


def bulk() -> list[Case]:
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    load = f"""{INIT} {fill(1024, 0)} @!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], 592;
      add.s64 %rd21, %rd1, 16; add.s32 %r5, %r1, 48; {copy} [%r1], [%rd21], 32, [%r3]; add.s64 %rd21, %rd1, 256;
      {copy} [%r5], [%rd21], 560, [%r3]; W: {WAIT} {dump(1024, 2)}"""
    store = f"""{PLACE} {fill(1024, 0)} @!%p1 bra E; add.s32 %r5, %r1, 16; add.s64 %rd20, %rd1, 64;
      cp.async.bulk.global.shared::cta.bulk_group [%rd20], [%r5], 400;
      cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16; {DRAIN} E:"""
    cluster = f"""{INIT} mov.u32 %r6, %cluster_ctarank; mov.u32 %r7, %cluster_nctarank;"""
    joined = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    own = "mul.wide.u32 %rd70, %r6, 1024; add.s64 %rd5, %rd0, %rd70; add.s64 %rd6, %rd1, %rd70;"
    across = f"""{cluster} {own} {fill(1024, 5)} {joined} @!%p1 bra W; xor.b32 %r8, %r6, 1;
      mapa.shared::cluster.u32 %r9, %r1, %r8; mapa.shared::cluster.u32 %r10, %r3, %r8; add.s32 %r9, %r9, 2048;
      add.s32 %r11, %r1, 32; mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], 512;
      cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r9], [%r11], 512, [%r10];
      W: {WAIT} add.s32 %r12, %r1, 2048; {dump(512, 6, source="%r12")} {joined}"""
    multicast = f"""{cluster} {own} {joined} @!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], 1024;
      setp.ne.s32 %p3, %r6, 1; @%p3 bra W; mov.b16 %h1, 15;
      {copy}.multicast::cluster [%r1], [%rd0], 1024, [%r3], %h1;
      W: {WAIT} {dump(1024, 6)} {joined}"""
    one, four = (np.zeros(n * 256, np.uint32) for n in (1, 4))
    return [
        Case("copies", "bulk.load", load, (raw("bulk old", 256), raw("bulk new", 256)), (one,), shared=SHARED),
        Case("copies", "bulk.store", store, (raw("bulk from", 256),), (one,), shared=SHARED),
        Case(
            "copies",
            "bulk.cluster",
            across,
            (raw("bulk pair", 512),),
            (np.zeros(512, np.uint32),),
            grid=2,
            cluster=2,
            shared=SHARED,
        ),
        Case("copies", "bulk.multicast", multicast, (raw("bulk all", 256),), (four,), grid=4, cluster=4, shared=SHARED),
    ]


REDUCTIONS = {
    "u32": "add min max inc dec and or xor",
    "s32": "add min max",
    "u64": "add min max and or xor",
    "s64": "min max",
    "f16": "add min max",
    "bf16": "add min max",
    "f32": "add",
    "f64": "add",
}


def values(ptx_type: str, count: int, name: str) -> tuple[Any, Any, Tolerance]:
    """Two operands of a reduction and how its result is compared."""
    if ptx_type in ("f16", "bf16", "f32", "f64"):
        a, b = (floats(f"{name} {ptx_type}", count, 3, i, ptx_type) for i in (0, 1))
        return a, b, Tolerance(ptx_type)
    a, b = (words(f"{name} {ptx_type}", count, int(ptx_type[1:]), i) for i in (0, 1))
    return a, b, Tolerance()


def reductions() -> list[Case]:
    cases_ = []
    for ptx_type, operations in REDUCTIONS.items():
        for op in operations.split():
            size = int(ptx_type.lstrip("usbf")) // 8
            source, target, tolerance = values(ptx_type, 1024 // size, "bulk")
            noftz = ".noftz" if op == "add" and ptx_type in ("f16", "bf16") else ""
            wire = f"b{8 * size}" if op in ("and", "or", "xor") else ptx_type
            body = f"""{PLACE} {fill(1024, 0)} @!%p1 bra E;
              cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}{noftz}.{wire} [%rd1], [%r1], 1024; {DRAIN} E:"""
            cases_.append(
                Case(
                    "copies",
                    f"bulk.reduce.{op}{noftz}.{ptx_type}",
                    body,
                    (source,),
                    (target,),
                    tolerance,
                    shared=SHARED,
                )
            )
    return cases_


def cases() -> list[Case]:
    return cp_async() + bulk() + reductions()
