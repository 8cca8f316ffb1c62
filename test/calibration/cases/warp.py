"""Instructions across the lanes of a warp, and predication."""

from __future__ import annotations

import numpy as np

from calibration.case import Case, Tolerance, elementwise, floats, integers, raw, words

COUNT = 128


def shuffles() -> list[Case]:
    cases_ = []
    values = words("shfl", COUNT)
    for mode in ("up", "down", "bfly", "idx"):
        lane = integers(f"shfl {mode}", COUNT, 0, 40).astype(np.uint32)
        for control in (0x1F, 0, 0x181F, 0x1C03, 0x100F):
            code = f"shfl.sync.{mode}.b32 %d|%p1, %a, %b, {control}, -1; @%p1 xor.b32 %d, %d, 0x55555555;"
            cases_.append(elementwise("warp", f"shfl.{mode}.{control:#x}", code, [values, lane], np.uint32))
    return cases_


def votes() -> list[Case]:
    test = "and.b32 %r1, %a, 1; setp.ne.s32 %p1, %r1, 0;"
    values = raw("vote", COUNT)
    values[:32] |= np.uint32(1)
    values[32:64] &= np.uint32(0xFFFFFFFE)
    cases_ = [elementwise("warp", "vote.ballot", f"{test} vote.sync.ballot.b32 %d, %p1, -1;", [values], np.uint32)]
    for mode in ("all", "any", "uni"):
        code = f"{test} vote.sync.{mode}.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;"
        cases_.append(elementwise("warp", f"vote.{mode}", code, [values], np.uint32))
    few = values % np.uint32(5)
    few[:32] = 7
    cases_.append(elementwise("warp", "match.any.b32", "match.any.sync.b32 %d, %a, -1;", [few], np.uint32))
    cases_.append(
        elementwise("warp", "match.any.b64", "match.any.sync.b64 %d, %a, -1;", [few.astype(np.uint64) << 33], np.uint32)
    )
    code = "match.all.sync.b32 %d|%p1, %a, -1; @%p1 xor.b32 %d, %d, 0x0F0F0F0F;"
    cases_.append(elementwise("warp", "match.all.b32", code, [few], np.uint32))
    cases_ += [
        elementwise("warp", f"redux.{op}", f"redux.sync.{op} %d, %a, -1;", [words(op, COUNT)], np.uint32)
        for op in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32")
    ]
    for op in ("min", "max.abs", "max.NaN"):
        code = f"redux.sync.{op}.f32 %d, %a, -1;"
        cases_.append(
            elementwise(
                "warp", f"redux.{op}.f32", code, [floats(op, COUNT, 8)], np.uint32, Tolerance("f32"), archs=("sm_100a",)
            )
        )
    return cases_


def divergence() -> list[Case]:
    """Collectives of a part of the warp: the member mask names it."""
    part = "and.b32 %r1, %r98, 3; setp.eq.s32 %p1, %r1, 2; mov.b32 %d, %a;"
    elect = "mov.b32 %d, 0; elect.sync %r2|%p3, -1; @%p3 mov.b32 %d, 64; or.b32 %d, %d, %r2;"
    codes = {
        "elect": elect,
        "elect.some": f"{part} @!%p1 bra E; {elect.replace('-1', '0x44444444')} E:",
        "activemask": f"{part} @!%p1 bra E; activemask.b32 %d; E: bar.warp.sync -1;",
        "shfl.some": f"{part} @!%p1 bra E; shfl.sync.bfly.b32 %d, %a, 4, 31, 0x44444444; E:",
        "vote.some": f"{part} @!%p1 bra E; vote.sync.ballot.b32 %d, %p1, 0x44444444; E:",
        "redux.some": f"{part} @!%p1 bra E; redux.sync.add.u32 %d, %a, 0x44444444; E:",
        "match.some": f"{part} @!%p1 bra E; match.any.sync.b32 %d, %a, 0x44444444; E:",
    }
    values = words("some", COUNT) % np.uint32(3)
    return [elementwise("warp", name, code, [values], np.uint32) for name, code in codes.items()]


def loops() -> list[Case]:
    code = """mov.b32 %d, 0; and.b32 %r1, %a, 31;
      L: setp.eq.s32 %p1, %r1, 0; @%p1 bra D; add.s32 %d, %d, %r1; sub.s32 %r1, %r1, 1; bra L;
      D: bar.warp.sync -1; shfl.sync.bfly.b32 %r2, %d, 1, 31, -1; add.s32 %d, %d, %r2;"""
    return [elementwise("warp", "loop.divergent", code, [raw("loop", COUNT)], np.uint32)]


def cases() -> list[Case]:
    return shuffles() + votes() + divergence() + loops()
