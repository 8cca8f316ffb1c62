"""Tensor copies (TMA): swizzles, element sizes, ranks, bounds, multicast, reductions, edits of the tensor map.

The innermost coordinate is a multiple of 16 bytes everywhere: any other is an illegal instruction on the chip.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from calibration.case import Case, Tolerance, floats, raw
from calibration.cases.copies import DRAIN, INIT, PLACE, REDUCTIONS, WAIT, dump, fill, values
from calibration.maps import TYPES, Map

TILE = 8192
SHARED = f".shared .align 1024 .b8 buffer[{TILE}]; .shared .align 8 .b64 bar;"
KIND_OF_SIZE = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}


def _coordinates(where: tuple[int, ...]) -> str:
    return ", ".join(str(c) for c in where)


def loads(name: str, m: Map, places: list[tuple[int, ...]], source: Any, step: int = 0, **options: Any) -> Case:
    """One box after another in shared memory, at steps of 1024 or `step` bytes; shared memory is then written out as it
    lies."""
    step = step or -(-m.box_bytes // 1024) * 1024
    size = -(-step * len(places) // 512) * 512
    assert size <= TILE
    old = raw(f"{name} old", size // 4)
    copies = "\n".join(
        f"cp.async.bulk.tensor.{len(p)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[%r{20 + i}], [%rd80, {{{_coordinates(p)}}}], [%r3];"
        for i, p in enumerate(places)
    )
    targets = " ".join(f"add.s32 %r{20 + i}, %r1, {i * step};" for i in range(len(places)))
    body = f"""{INIT} {fill(size, 0)} @!%p1 bra W; {targets}
      mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], {m.box_bytes * len(places)}; {copies}
      W: {WAIT} {dump(size, 2)}"""
    return Case(
        "tma.load", name, body, (old, source), (np.zeros(size // 4, np.uint32),), shared=SHARED, maps=(m,), **options
    )


def swizzles() -> list[Case]:
    cases_ = []
    for swizzle in (0, 32, 64, 128):
        for size, ptx_type in KIND_OF_SIZE.items():
            inner = (swizzle or 48) // size
            source = raw(f"tma {swizzle} {size}", 64 * 256 // 4)
            m = Map(1, ptx_type, (200 // size, 60), (256,), (inner, 20), swizzle, offset=512)
            far = ((200 - inner * size // 2) // 16 * 16 // size, 50)
            places = [(0, 0), (16 // size, 3), far] if m.box_bytes <= 2048 else [(16 // size, 3), far]
            cases_.append(loads(f"{ptx_type}.swizzle{swizzle}", m, places, source))
        if swizzle:  # tiles that do not begin where the pattern does
            m = Map(1, "u16", (64, 64), (256,), (swizzle // 2, 640 // swizzle), swizzle)
            cases_.append(loads(f"steps of 640.swizzle{swizzle}", m, [(0, 0), (8, 9), (16, 21), (24, 40)], source, 640))
        if swizzle:  # rows that do not fill the pattern's
            m = Map(1, "u16", (64, 64), (256,), (swizzle // 4, 24), swizzle)
            cases_.append(loads(f"narrow.swizzle{swizzle}", m, [(8, 1)], raw("narrow", 64 * 256 // 4), 24 * swizzle))
    return cases_


def ranks() -> list[Case]:
    source = raw("ranks", 4096)
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], list[tuple[int, ...]]]] = [
        ((1000,), (), (64,), [(0,), (104,), (-8,), (960,)]),
        ((30, 20), (64,), (16, 8), [(0, 0), (24, 16), (-8, -3), (40, 4)]),
        ((14, 7, 5), (32, 256), (8, 4, 3), [(0, 0, 0), (8, 4, 3), (-8, -1, -1), (0, 0, 7)]),
        ((14, 7, 5, 3), (32, 256, 1280), (16, 3, 2, 2), [(0, 0, 0, 0), (8, 5, 4, 2), (-8, -1, -1, -1)]),
        (
            (14, 5, 3, 3, 3),
            (32, 160, 480, 1440),
            (16, 2, 2, 2, 2),
            [(0, 0, 0, 0, 0), (8, 4, 2, 2, 2), (-8, -1, -1, -1, -1)],
        ),
    ]
    cases_ = [
        loads(f"rank{len(sizes)}", Map(1, "u16", sizes, strides, box), places, source)
        for sizes, strides, box, places in shapes
    ]
    # Strides need not be those of a packed tensor: rows that overlap, and a dimension that stands still.
    cases_.append(loads("overlap", Map(1, "f32", (16, 20, 4), (16, 16), (16, 8, 3)), [(0, 5, 1)], source))
    values_ = floats("tma floats", 4096, 100)
    for ptx_type in ("f32", "f32.ftz", "tf32", "tf32.ftz", "f16", "bf16", "f64", "s32"):
        size = TYPES[ptx_type][2]
        m = Map(1, ptx_type, (64 // size, 30), (64,), (64 // size, 16))
        cases_.append(loads(f"type.{ptx_type}", m, [(0, 0), (-32 // size, 20)], values_))
    starts = [0x3F800000, 0xC0000000, 0x7F7FE000, 0x7F7FC000, 0x00800000, 0, 0x80000000, 0x3FFFE000]
    steps = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x3000], np.uint32)
    ties = (np.array(starts, np.uint32)[:, None] + steps).reshape(-1)
    ties[:8] = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7FF000]
    m = Map(1, "tf32", (16, 4), (64,), (16, 4))
    cases_.append(loads("type.tf32.ties", m, [(0, 0)], ties))
    for ptx_type in ("f16", "bf16", "f32", "tf32", "f64"):
        size = TYPES[ptx_type][2]
        m = Map(1, ptx_type, (60 // size, 20), (64,), (32 // size, 8), nan_fill=True)
        name = "nan_fill" if ptx_type == "f16" else f"nan_fill.{ptx_type}"
        cases_.append(loads(name, m, [(48 // size, 16), (-16 // size, -3)], source, refused=True))
    m = Map(1, "u16", (30, 20), (64,), (16, 8), steps=(1, 2))
    cases_.append(loads("element_strides", m, [(8, 3)], source, refused=True))
    return cases_


def multicast() -> list[Case]:
    cases_ = []
    m = Map(0, "u16", (64, 64), (128,), (64, 8), 128)
    for name, mask, leader in (("all", 3, 0), ("peer", 2, 0), ("both", 3, -1)):
        # With `both`, each block loads its half of the rows for the two of them.
        start = f"{INIT} mov.u32 %r6, %cluster_ctarank; mul.wide.u32 %rd70, %r6, 2048; add.s64 %rd5, %rd1, %rd70;"
        joined = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
        total = 2048 if leader < 0 else 1024
        here = f"setp.ne.s32 %p3, %r6, {leader}; @%p3 bra W;" if leader >= 0 else ""
        wait = WAIT if mask == 3 else f"setp.eq.s32 %p4, %r6, 0; @%p4 bra D; {WAIT}"
        zero = f"mov.b32 %r85, 0; mad.lo.s32 %r80, %r99, 16, %r1; {_zeros(2048)} fence.proxy.async.shared::cta;"
        body = f"""{start} {zero} {joined} @!%p1 bra W;
          mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], {total}; {here} mov.b16 %h1, {mask};
          {"shl.b32 %r7, %r6, 3;" if leader < 0 else "mov.b32 %r7, 5;"} shl.b32 %r8, %r7, 7;
          {"" if leader < 0 else "mov.b32 %r8, 0;"} add.s32 %r9, %r1, %r8;
          cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [%r9], [%rd80, {{0, %r7}}], [%r3], %h1;
          W: {wait} {dump(2048, 5)} {joined}"""
        cases_.append(
            Case(
                "tma.load",
                f"multicast.{name}",
                body,
                (raw("cast", 2048),),
                (np.zeros(1024, np.uint32),),
                grid=2,
                cluster=2,
                shared=SHARED,
                maps=(m,),
            )
        )
    return cases_


def _zeros(size: int) -> str:
    return " ".join(f"st.shared.v4.b32 [%r80+{p}], {{%r85, %r85, %r85, %r85}};" for p in range(0, size, 512))


def stores() -> list[Case]:
    cases_ = []
    for swizzle in (0, 32, 64, 128):
        for size, ptx_type in ((1, "u8"), (2, "bf16"), (4, "f32")):
            inner = (swizzle or 64) // size
            m = Map(1, ptx_type, (96 // size, 28), (128,), (inner, 16), swizzle)
            places = [(0, 0), (96 // size - inner // 2, 20)]
            cases_.append(_store(f"{ptx_type}.swizzle{swizzle}", m, places, "", raw("tile", 1024), raw("under", 1024)))
        if swizzle:
            m = Map(1, "u16", (48, 28), (128,), (swizzle // 4, 16), swizzle)
            cases_.append(_store(f"narrow.swizzle{swizzle}", m, [(8, 2)], "", raw("tile", 1024), raw("under", 1024)))
    cases_.append(
        _store(
            "rank3",
            Map(1, "u16", (24, 7, 5), (64, 512), (16, 4, 3)),
            [(16, 5, 4), (0, 2, 1)],
            "",
            raw("tile", 1024),
            raw("under", 1024),
        )
    )
    for ptx_type, operations in REDUCTIONS.items():
        size = TYPES[ptx_type][2]
        for op in operations.split():
            if ptx_type == "s64":
                continue
            source, target, tolerance = values(ptx_type, 4096 // size, "tma")
            m = Map(1, ptx_type, (48 // size, 20), (64,), (32 // size, 16), 32)
            cases_.append(
                _store(f"{op}.{ptx_type}", m, [(0, 0), (32 // size, 10)], f".{op}", source, target, tolerance)
            )
    return cases_


def _store(
    name: str,
    m: Map,
    places: list[tuple[int, ...]],
    op: str,
    tile: Any,
    target: Any,
    tolerance: Tolerance | None = None,
) -> Case:
    """The boxes lie in shared memory at 1024-byte steps and are stored one after another."""
    step = -(-m.box_bytes // 1024) * 1024
    lines = []
    for i, place in enumerate(places):
        opcode = (
            f"cp.reduce.async.bulk.tensor.{len(place)}d.global.shared::cta{op}.tile"
            if op
            else (f"cp.async.bulk.tensor.{len(place)}d.global.shared::cta.tile")
        )
        lines.append(
            f"add.s32 %r20, %r1, {i * step}; {opcode}.bulk_group [%rd80, {{{_coordinates(place)}}}], [%r20]; {DRAIN}"
        )
    body = f"{PLACE} {fill(4096, 0)} @!%p1 bra E; {' '.join(lines)} E:"
    return Case(
        "tma.reduce" if op else "tma.store",
        name,
        body,
        (tile,),
        (target,),
        tolerance or Tolerance(),
        shared=SHARED,
        maps=(m,),
    )


def edits() -> list[Case]:
    """A tensor map copied to shared memory, edited there, released to global memory, and used."""
    cases_ = []
    size = 2048
    change: dict[str, list[str]] = {
        "global_address": ["tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r5], %rd6;"],
        "global_dim": [
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r5], 0, 10;",
            "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r5], 1, 5;",
        ],
        "global_stride": ["tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [%r5], 0, 96;"],
        "box_dim": ["tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [%r5], 1, 12;"],
        "rank": ["tensormap.replace.tile.rank.shared::cta.b1024.b32 [%r5], 1;"],
        "swizzle_mode": ["tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r5], 1;"],
        "elemtype": ["tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [%r5], 10;"],
        "fill_mode": ["tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [%r5], 1;"],
    }
    refused = {"rank", "swizzle_mode", "elemtype", "fill_mode"}
    for name, lines in change.items():
        rows = 12 if name == "box_dim" else 8
        m = Map(1, "f16", (16, 20), (64,), (16, 8))
        shared = f"{SHARED} .shared .align 128 .b8 spare[128];"
        # The map itself is overwritten at the end: it holds an address.
        body = f"""{INIT} {fill(size, 0)} mov.u32 %r5, spare; mad.lo.s32 %r6, %r99, 4, %r5; mul.wide.u32 %rd5, %r99, 4;
          add.s64 %rd7, %rd80, %rd5; ld.b32 %r7, [%rd7]; st.shared.b32 [%r6], %r7;
          bar.warp.sync -1; add.s64 %rd6, %rd1, 1056; @!%p1 bra C; {" ".join(lines)}
          C: bar.warp.sync -1;
          tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%rd3], [%r5], 128;
          fence.proxy.tensormap::generic.acquire.gpu [%rd3], 128; @!%p1 bra W;
          mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], {rows * 32};
          cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
            [%r1], [%rd3, {{8, 2}}], [%r3];
          W: {WAIT} {dump(size, 2)} mov.b32 %r7, 0; add.s64 %rd7, %rd3, %rd5; st.global.b32 [%rd7], %r7;"""
        cases_.append(
            Case(
                "tma.edit",
                name,
                body,
                (raw("edit old", size // 4), raw("edit", 1024)),
                (np.zeros(size // 4, np.uint32), np.zeros(32, np.uint32)),
                shared=shared,
                maps=(m,),
                refused=name in refused,
            )
        )
    cases_.append(in_global())
    return cases_


def in_global() -> Case:
    """The edit made on the map in global memory itself."""
    m = Map(0, "u32", (16, 20), (64,), (8, 8))
    body = f"""{INIT} mul.wide.u32 %rd5, %r99, 4; add.s64 %rd7, %rd80, %rd5; ld.b32 %r7, [%rd7];
      add.s64 %rd7, %rd2, %rd5; st.global.b32 [%rd7], %r7; bar.warp.sync -1; @!%p1 bra W;
      tensormap.replace.tile.global_dim.global.b1024.b32 [%rd2], 0, 9;
      tensormap.replace.tile.box_dim.global.b1024.b32 [%rd2], 1, 4;
      fence.proxy.tensormap::generic.release.gpu; fence.proxy.tensormap::generic.acquire.gpu [%rd2], 128;
      mbarrier.arrive.expect_tx.shared.b64 %rd20, [%r3], 128;
      cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd2, {{4, 2}}], [%r3];
      W: {WAIT} mad.lo.s32 %r80, %r99, 4, %r1; ld.shared.b32 %r81, [%r80]; add.s64 %rd7, %rd1, %rd5;
      st.global.b32 [%rd7], %r81; mov.b32 %r7, 0; add.s64 %rd7, %rd2, %rd5; st.global.b32 [%rd7], %r7;"""
    return Case(
        "tma.edit",
        "in global memory",
        body,
        (raw("global edit", 1024),),
        (np.zeros(32, np.uint32), np.zeros(32, np.uint32)),
        shared=SHARED,
        maps=(m,),
    )


def encodings() -> list[Case]:
    """The 128 bytes of tensor maps: the driver's against our own."""
    square: dict[str, Any] = {"sizes": (64, 96), "strides": (512,), "box": (16, 24)}
    maps = {f"type.{ptx_type}": Map(-1, ptx_type, (64, 96), (1024,), (16, 24)) for ptx_type in TYPES}
    maps |= {
        f"swizzle{s}": Map(-1, "bf16", **{**square, "box": (max(s, 32) // 2, 24)}, swizzle=s) for s in (32, 64, 128)
    }
    maps |= {f"promotion{p}": Map(-1, "f16", **square, promotion=p) for p in (64, 128, 256)}
    sizes, strides, box = (100, 90, 80, 70, 60), (1 << 9, 1 << 16, 1 << 23, 1 << 30), (8, 7, 6, 5, 4)
    maps |= {f"rank{r}": Map(-1, "f32", sizes[:r], strides[: r - 1], box[:r]) for r in (1, 3, 4, 5)}
    maps["large"] = Map(-1, "u8", (1 << 32, 1 << 31), ((1 << 36) - 16,), (256, 256))
    maps["huge"] = Map(-1, "u8", (1 << 32, 1 << 31, 7), ((1 << 40) - 16, 1 << 38), (256, 256, 1))
    maps["nan_fill"] = Map(-1, "bf16", **square, nan_fill=True)
    maps["element_strides"] = Map(-1, "bf16", **square, steps=(1, 2))
    body = """mul.wide.u32 %rd70, %r99, 4; add.s64 %rd71, %rd80, %rd70; ld.b32 %r1, [%rd71]; add.s64 %rd71, %rd0, %rd70;
      st.global.b32 [%rd71], %r1;"""
    return [
        Case("tensormap", name, body, (), (np.zeros(32, np.uint32),), maps=(replace(m, offset=0x7F5432100000),))
        for name, m in maps.items()
    ]


def cases() -> list[Case]:
    return encodings() + swizzles() + ranks() + multicast() + stores() + edits()
