"""Instructions across a warp, against loops over 32 lanes."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import elementwise, ints, random_words, run, signed


def over_lanes(code: str, values: np.ndarray) -> list[int]:
    return ints(elementwise(code, "b32", values))


@pytest.mark.parametrize(
    ("mode", "operand", "source"),
    [
        ("bfly", 5, lambda t: t ^ 5),
        ("idx", 7, lambda t: 7),
        ("up", 3, lambda t: t - 3 if t >= 3 else t),
        ("down", 9, lambda t: t + 9 if t + 9 < 32 else t),
    ],
)
def test_shuffle(mode: str, operand: int, source: object) -> None:
    a = random_words(64, 1)
    clamp = 0 if mode == "up" else 31
    got = over_lanes(f"shfl.sync.{mode}.b32 %d, %a, {operand}, {clamp}, -1;", a)
    assert got == [int(a[t // 32 * 32 + source(t % 32)]) for t in range(64)]  # type: ignore[operator]


def test_shuffle_in_segments_of_eight() -> None:
    a = random_words(32, 2)
    got = over_lanes(f"shfl.sync.bfly.b32 %d, %a, 4, {(24 << 8) | 31}, -1;", a)
    assert got == [int(a[t ^ 4]) for t in range(32)]
    got = over_lanes(f"shfl.sync.down.b32 %d|%p1, %a, 3, {(24 << 8) | 31}, -1; @!%p1 mov.b32 %d, 0;", a)
    assert got == [int(a[t + 3]) if t % 8 < 5 else 0 for t in range(32)]


def test_vote_and_elect() -> None:
    a = random_words(64, 3)
    odd = [int(x) & 1 for x in a]
    test = "and.b32 %r5, %a, 1; setp.ne.s32 %p1, %r5, 0;"
    ballot = [sum(odd[w * 32 + i] << i for i in range(32)) for w in (0, 1)]
    assert over_lanes(f"{test} vote.sync.ballot.b32 %d, %p1, -1;", a) == [ballot[t // 32] for t in range(64)]
    got = over_lanes(f"{test} vote.sync.all.pred %p2, %p1, -1; selp.b32 %d, 1, 0, %p2;", a)
    assert got == [int(all(odd[t // 32 * 32 : t // 32 * 32 + 32])) for t in range(64)]
    got = over_lanes("mov.b32 %d, 0; elect.sync %r6|%p3, -1; @%p3 mov.b32 %d, 1; add.s32 %d, %d, %r6;", a)
    assert got == [1 if t % 32 == 0 else 0 for t in range(64)]


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor"])
def test_integer_reduction(op: str) -> None:
    a = random_words(32, 4)
    kind = "b32" if op in ("and", "or", "xor") else "s32"
    got = over_lanes(f"redux.sync.{op}.{kind} %d, %a, -1;", a)
    values = ints(a)
    fold = {"add": sum, "min": lambda v: min(v, key=signed), "max": lambda v: max(v, key=signed)}
    if op in fold:
        expected = fold[op](values) & 0xFFFFFFFF
    else:
        expected = values[0]
        for v in values[1:]:
            expected = {"and": expected & v, "or": expected | v, "xor": expected ^ v}[op]
    assert got == [expected] * 32


def test_float_reduction_and_nan() -> None:
    a = np.random.default_rng(5).standard_normal(32).astype(np.float32)
    got = elementwise("redux.sync.max.abs.f32 %d, %a, -1;", "b32", a).view(np.float32)
    assert (got == np.abs(a).max()).all()
    a[3] = np.nan
    got = elementwise("redux.sync.max.f32 %d, %a, -1;", "b32", a).view(np.float32)
    assert (got == np.nanmax(a)).all()
    assert np.isnan(elementwise("redux.sync.max.NaN.f32 %d, %a, -1;", "b32", a).view(np.float32)).all()


def test_match_finds_equal_lanes() -> None:
    a = (np.arange(32) % 3).astype(np.uint32)
    got = over_lanes("match.any.sync.b32 %d, %a, -1;", a)
    assert got == [sum(1 << i for i in range(32) if i % 3 == t % 3) for t in range(32)]


def test_special_registers_of_a_cluster() -> None:
    out = np.zeros((8, 4), np.uint32)
    code = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %clusterid.x; mov.u32 %r4, %nctaid.x;
      mul.wide.u32 %rd1, %r1, 16; add.s64 %rd1, %rd1, %rd90; st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};"""
    run(code, out, block=1, grid=8, cluster=4)
    assert out.tolist() == [[i, i % 4, i // 4, 8] for i in range(8)]


def test_registers_are_handed_over_by_whole_warps_in_steps_of_eight() -> None:
    code = """setp.lt.u32 %p1, %r99, LIMIT; @%p1 bra P; setmaxnreg.inc.sync.aligned.u32 COUNT; ret;
      P: setmaxnreg.dec.sync.aligned.u32 40;"""
    run(code.replace("LIMIT", "128").replace("COUNT", "240"), block=256, races=True)
    with pytest.raises(ptx_emulator.CollectiveError, match="setmaxnreg executed by 16 of 32 threads"):
        run(code.replace("LIMIT", "112").replace("COUNT", "240"), block=256)
    for count in ("16", "44", "264"):
        with pytest.raises(ptx_emulator.UnsupportedPTX, match="a multiple of 8 from 24 to 256"):
            run(code.replace("LIMIT", "128").replace("COUNT", count), block=256)


def test_dependent_launches_wait_for_nothing() -> None:
    out = np.zeros(32, np.uint32)
    run("""griddepcontrol.wait; mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r99;
      griddepcontrol.launch_dependents;""", out, races=True)  # fmt: skip
    assert out.tolist() == list(range(32))
