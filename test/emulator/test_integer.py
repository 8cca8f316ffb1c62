"""Integer, logic and bit instructions against Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from emulator.harness import elementwise, ints, random_words, signed, words

COUNT = 96


def truncate(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


BINARY: list[tuple[str, int, Callable[[int, int], int]]] = [
    ("add.s32", 32, lambda a, b: a + b),
    ("sub.s64", 64, lambda a, b: a - b),
    ("add.sat.s32", 32, lambda a, b: max(-(2**31), min(2**31 - 1, signed(a) + signed(b)))),
    ("mul.lo.s32", 32, lambda a, b: a * b),
    ("mul.lo.s64", 64, lambda a, b: a * b),
    ("mul.hi.u32", 32, lambda a, b: a * b >> 32),
    ("mul.hi.s32", 32, lambda a, b: signed(a) * signed(b) >> 32),
    ("mul.hi.u64", 64, lambda a, b: a * b >> 64),
    ("mul.hi.s64", 64, lambda a, b: signed(a, 64) * signed(b, 64) >> 64),
    ("div.u32", 32, lambda a, b: a // b if b else -1),
    ("div.s32", 32, lambda a, b: truncate(signed(a), signed(b)) if b else -1),
    ("rem.u32", 32, lambda a, b: a % b if b else -1),
    ("rem.s32", 32, lambda a, b: signed(a) - truncate(signed(a), signed(b)) * signed(b) if b else -1),
    ("min.s32", 32, lambda a, b: min(signed(a), signed(b))),
    ("max.u32", 32, max),
    ("max.s64", 64, lambda a, b: max(signed(a, 64), signed(b, 64))),
    ("min.relu.s32", 32, lambda a, b: max(0, min(signed(a), signed(b)))),
    ("and.b32", 32, lambda a, b: a & b),
    ("or.b64", 64, lambda a, b: a | b),
    ("xor.b32", 32, lambda a, b: a ^ b),
    ("add.s16", 16, lambda a, b: a + b),
]


@pytest.mark.parametrize(("opcode", "bits", "expected"), BINARY, ids=[b[0] for b in BINARY])
def test_binary(opcode: str, bits: int, expected: Callable[[int, int], int]) -> None:
    a, b = random_words(COUNT, 1, bits), random_words(COUNT, 2, bits)[::-1].copy()
    if "div" in opcode or "rem" in opcode:
        b[5:] &= b.dtype.type(0x3FF)
    got = elementwise(f"{opcode} %d, %a, %b;", f"b{bits}", a, b)
    assert ints(got) == ints(words([expected(x, y) for x, y in zip(ints(a), ints(b), strict=True)], bits))


UNARY: list[tuple[str, int, Callable[[int], int]]] = [
    ("not.b32", 32, lambda a: ~a),
    ("neg.s32", 32, lambda a: -a),
    ("abs.s32", 32, lambda a: abs(signed(a))),
    ("popc.b32", 32, lambda a: bin(a).count("1")),
    ("clz.b32", 32, lambda a: 32 - a.bit_length()),
    ("brev.b32", 32, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32", 32, lambda a: a.bit_length() - 1),
    ("bfind.s32", 32, lambda a: (~a & 0xFFFFFFFF if a >> 31 else a).bit_length() - 1),
    ("cnot.b32", 32, lambda a: int(a == 0)),
]


@pytest.mark.parametrize(("opcode", "bits", "expected"), UNARY, ids=[u[0] for u in UNARY])
def test_unary(opcode: str, bits: int, expected: Callable[[int], int]) -> None:
    a = random_words(COUNT, 3, bits)
    got = elementwise(f"{opcode} %d, %a;", f"b{bits}", a)
    assert ints(got) == ints(words([expected(x) for x in ints(a)], bits))


def test_wide_and_multiply_add() -> None:
    a, b, c = (random_words(COUNT, seed) for seed in (4, 5, 6))
    rows = list(zip(ints(a), ints(b), ints(c), strict=True))
    got = elementwise("mul.wide.s32 %d, %a, %b;", "b32", a, b, out="b64")
    assert ints(got) == ints(words([signed(x) * signed(y) for x, y, _ in rows], 64))
    got = elementwise("mul.wide.u32 %d, %a, %b;", "b32", a, b, out="b64")
    assert ints(got) == [x * y for x, y, _ in rows]
    got = elementwise("mad.lo.s32 %d, %a, %b, %c;", "b32", a, b, c)
    assert ints(got) == ints(words([x * y + z for x, y, z in rows]))


@pytest.mark.parametrize("amount", [0, 1, 31, 32, 33, 200])
def test_shifts_clamp(amount: int) -> None:
    a, n = random_words(COUNT, 7), np.full(COUNT, amount, np.uint32)
    assert ints(elementwise("shl.b32 %d, %a, %b;", "b32", a, n)) == ints(words([x << amount for x in ints(a)]))
    assert ints(elementwise("shr.u32 %d, %a, %b;", "b32", a, n)) == [x >> amount for x in ints(a)]
    got = elementwise("shr.s32 %d, %a, %b;", "b32", a, n)
    assert ints(got) == ints(words([signed(x) >> amount for x in ints(a)]))
    assert ints(elementwise(f"shl.b32 %d, %a, {amount};", "b32", a)) == ints(words([x << amount for x in ints(a)]))


def test_funnel_shift_wraps_or_clamps() -> None:
    a, b, n = random_words(COUNT, 8), random_words(COUNT, 9), random_words(COUNT, 10) % np.uint32(40)
    rows = list(zip(ints(a), ints(b), ints(n), strict=True))
    got = elementwise("shf.l.wrap.b32 %d, %a, %b, %c;", "b32", a, b, n)
    assert ints(got) == [(((y << 32 | x) << (s & 31)) >> 32) & 0xFFFFFFFF for x, y, s in rows]
    got = elementwise("shf.r.clamp.b32 %d, %a, %b, %c;", "b32", a, b, n)
    assert ints(got) == [((y << 32 | x) >> min(s, 32)) & 0xFFFFFFFF for x, y, s in rows]


def test_permute_and_lop3() -> None:
    a, b, c = (random_words(COUNT, seed) for seed in (11, 12, 13))

    def permute(x: int, y: int, selector: int) -> int:
        source, result = x | y << 32, 0
        for i in range(4):
            nibble = selector >> 4 * i & 15
            byte = source >> 8 * (nibble & 7) & 255
            result |= (255 if nibble & 8 and byte & 128 else 0 if nibble & 8 else byte) << 8 * i
        return result

    rows = list(zip(ints(a), ints(b), ints(c), strict=True))
    assert ints(elementwise("prmt.b32 %d, %a, %b, %c;", "b32", a, b, c)) == [permute(*row) for row in rows]
    got = elementwise("lop3.b32 %d, %a, %b, %c, 0x96;", "b32", a, b, c)
    assert ints(got) == [x ^ y ^ z for x, y, z in rows]
    got = elementwise("lop3.b32 %d, %a, %b, %c, 0xCA;", "b32", a, b, c)
    assert ints(got) == [(x & y) | (~x & 0xFFFFFFFF & z) for x, y, z in rows]


@pytest.mark.parametrize(("position", "length"), [(0, 8), (4, 0), (5, 27), (28, 20), (0, 32), (40, 3)])
def test_bit_fields(position: int, length: int) -> None:
    a, b = random_words(COUNT, 14), random_words(COUNT, 15)

    def extract(x: int, sign: bool) -> int:
        if not length:
            return 0
        top = min(position + length - 1, 31)
        fill = x >> top & 1 if sign else 0
        return sum((x >> position + i & 1 if position + i <= 31 else fill) << i if i < length else fill << i
                   for i in range(32))  # fmt: skip

    got = elementwise(f"bfe.u32 %d, %a, {position}, {length};", "b32", a)
    assert ints(got) == [extract(x, False) for x in ints(a)]
    got = elementwise(f"bfe.s32 %d, %a, {position}, {length};", "b32", a)
    assert ints(got) == [extract(x, True) for x in ints(a)]
    field = ((1 << length) - 1) << position & 0xFFFFFFFF
    got = elementwise(f"bfi.b32 %d, %a, %b, {position}, {length};", "b32", a, b)
    assert ints(got) == [y & ~field | x << position & field for x, y in zip(ints(a), ints(b), strict=True)]


def test_dot_product_of_bytes() -> None:
    a, b, c = (random_words(COUNT, seed) for seed in (16, 17, 18))

    def dot(x: int, y: int, z: int) -> int:
        return z + sum(signed(x >> 8 * i, 8) * signed(y >> 8 * i, 8) for i in range(4))

    got = elementwise("dp4a.s32.s32 %d, %a, %b, %c;", "b32", a, b, c)
    rows = zip(ints(a), ints(b), ints(c), strict=True)
    assert ints(got) == ints(words([dot(*row) for row in rows]))


def test_predicates_combine() -> None:
    a, b = random_words(COUNT, 19), random_words(COUNT, 20)
    b[10:20] = a[10:20]
    code = (
        "setp.lt.s32 %p1, %a, %b; setp.ne.and.b32 %p2|%p3, %a, %b, %p1; selp.b32 %d, 2, 4, %p2;"
        "@%p3 add.s32 %d, %d, 8; @!%p1 add.s32 %d, %d, 16;"
    )
    got = elementwise(code, "b32", a, b)

    def expected(x: int, y: int) -> int:
        p1 = signed(x) < signed(y)
        p2, p3 = x != y and p1, x == y and p1
        return (2 if p2 else 4) + (8 if p3 else 0) + (0 if p1 else 16)

    assert ints(got) == [expected(x, y) for x, y in zip(ints(a), ints(b), strict=True)]


def test_pack_and_unpack() -> None:
    a, b = random_words(COUNT, 21), random_words(COUNT, 22)
    got = elementwise("mov.b64 %d, {%a, %b};", "b32", a, b, out="b64")
    assert ints(got) == [y << 32 | x for x, y in zip(ints(a), ints(b), strict=True)]
    code = "mov.b32 {%h1, %h2}, %a; mov.b32 %d, {%h2, %h1};"
    assert ints(elementwise(code, "b32", a)) == [(x >> 16) | (x & 0xFFFF) << 16 for x in ints(a)]
