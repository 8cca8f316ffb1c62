"""Floating point and conversions that ``test_calibration.py``, whose results are the chip's, has not, or not so near
the edges; those of Blackwell.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from emulator.harness import elementwise

COUNT = 512


def floats(seed: int, scale: float = 8.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    x = (generator.standard_normal(COUNT) * np.exp2(generator.uniform(-scale, scale, COUNT))).astype(np.float32)
    x[:6] = [0.0, -0.0, 1.0, -1.5, 3.0e-39, -65504.0]
    return x


def f32(words: np.ndarray) -> np.ndarray:
    return words.view(np.float32)


def same(got: np.ndarray, expected: torch.Tensor | np.ndarray) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


def nearest(value: Fraction) -> np.float32:
    """float32 nearest to an exact value, ties to even, decided on fractions."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    best = min(abs(Fraction(float(x)) - value) for x in around)
    close = [x for x in around if abs(Fraction(float(x)) - value) == best]
    return close[0] if len(close) == 1 else next(x for x in close if not x.view(np.uint32) & 1)


def between(value: Fraction, rounding: str) -> float:
    """The float32 next to an exact value in the direction of `rounding`."""
    x = nearest(value)
    down = rounding == "rm" or (rounding == "rz" and value > 0)
    if (Fraction(float(x)) > value) if down else (Fraction(float(x)) < value):
        x = np.nextafter(x, np.float32(-np.inf if down else np.inf))
    return float(x)


@pytest.mark.parametrize("rounding", ["rz", "rm", "rp"])
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma"])
def test_directed_rounding(opcode: str, rounding: str) -> None:
    a, b, c = floats(6, 2), floats(7, 12), floats(8, 3)
    a[:2], b[:2] = [1.0, 2.0**-40], [2.0**-60, 1.0]
    operands = (a, b, c) if opcode == "fma" else (a, b)
    got = f32(elementwise(f"{opcode}.{rounding}.f32 %d, %a, %b{', %c' if opcode == 'fma' else ''};", "b32", *operands))
    exact = []
    for i in range(COUNT):
        x, y, z = (Fraction(float(v[i])) for v in (a, b, c))
        exact.append({"add": x + y, "sub": x - y, "mul": x * y, "fma": x * y + z}[opcode])
    same(got, [between(v, rounding) for v in exact])
    pair = [np.repeat(x, 2).view(np.uint64) for x in operands]
    text = f"{opcode}.{rounding}.ftz.f32x2 %d, %a, %b{', %c' if opcode == 'fma' else ''};"
    normal = np.array([abs(v) >= Fraction(2) ** -126 for v in exact]) & (np.abs([*operands]).min(0) > 1e-37)
    same(f32(elementwise(text, "b64", *pair).view(np.uint32)[::2])[normal], got[normal])


def test_sign_of_an_exact_zero() -> None:
    a, b = np.array([1.5, 0, -0.0], np.float32), np.array([-1.5, 0, 0], np.float32)
    for rounding, negative in (("rn", [False, False, False]), ("rp", [False] * 3), ("rm", [True, False, True])):
        got = f32(elementwise(f"add.{rounding}.f32 %d, %a, %b;", "b32", a, b))
        assert np.signbit(got).tolist() == negative


def test_exponential_flushes_subnormals() -> None:
    """Of its argument, whose power is 1, and of its result."""
    a = np.float32([1e-40, -1e-40, 0, -126, -126.5, -127, -149, -200, 3, 128, np.inf, -np.inf, np.nan])
    got = f32(elementwise("ex2.approx.ftz.f32 %d, %a;", "b32", a))
    expected = np.float32([1, 1, 1, 2.0**-126, 0, 0, 0, 0, 8, np.inf, np.inf, 0, np.nan])
    same(got, expected)
    kept = f32(elementwise("ex2.approx.f32 %d, %a;", "b32", a))
    assert kept[5] == np.float32(2.0**-127)


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_functions_of_packed_halves(kind: str, name: str) -> None:
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    values = torch.from_numpy(floats(11, 2)).to(dtype)
    raw = values.view(torch.int16).numpy().view(np.uint32).copy()
    flush = ".ftz" if (name, kind) == ("ex2", "bf16x2") else ""
    got = elementwise(f"{name}.approx{flush}.{kind} %d, %a;", "b32", raw)
    expected = (torch.exp2 if name == "ex2" else torch.tanh)(values.double()).to(dtype)
    found = torch.from_numpy(got.view(np.int16).copy()).view(dtype)
    torch.testing.assert_close(found.float(), expected.float(), rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_packed_single_and_mixed_precision() -> None:
    a, b, c = (np.stack([floats(s, 2), floats(s + 1, 2)], 1).copy().view(np.uint64)[:, 0] for s in (11, 13, 15))
    got = elementwise("mul.rn.f32x2 %d, %a, %b;", "b64", a, b).view(np.float32)
    same(got, a.view(np.float32) * b.view(np.float32))
    got = elementwise("add.rn.f32x2 %d, %a, %c;".replace("%c", "%b"), "b64", a, c).view(np.float32)
    same(got, a.view(np.float32) + c.view(np.float32))
    half = torch.from_numpy(floats(17, 2)).bfloat16()
    raw = half.view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    x, y = floats(18, 2), floats(19, 2)
    code = "cvt.u16.u32 %h1, %a; cvt.u16.u32 %h2, %b; fma.rn.f32.bf16 %d, %h1, %h2, %c;"
    other = torch.from_numpy(x).bfloat16()
    got = f32(elementwise(code, "b32", raw, other.view(torch.int16).numpy().view(np.uint16).astype(np.uint32), y))
    exact = half.double() * other.double() + torch.from_numpy(y).double()
    np.testing.assert_allclose(got, exact.float().numpy(), rtol=1.2e-7)


def test_convert_to_fp4_and_back() -> None:
    a = np.float32([0, 0.2, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 7.0, -0.75, -1.3, -9.0, np.nan])
    b = a[::-1].copy()
    code = "{.reg .b8 %e; cvt.rn.satfinite.e2m1x2.f32 %e, %a, %b; mov.b32 %d, {%e, %z, %z, %z};}".replace("%z", "0")
    got = elementwise(code, "b32", a, b)
    grid = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def nearest_code(x: float) -> int:
        if np.isnan(x):
            return 7
        distance = np.abs(grid - min(abs(x), 6.0))
        close = np.flatnonzero(distance == distance.min())
        return int(next((c for c in close if c % 2 == 0), close[0])) | (8 if x < 0 else 0)

    assert got.tolist() == [nearest_code(x) << 4 | nearest_code(y) for x, y in zip(a, b, strict=True)]


def test_convert_to_ue8m0() -> None:
    a = np.float32([1.0, 1.5, 2.0, 0.3, 0.0, 1e-45, 3e38, np.inf, np.nan, 2.0**-126])
    code = "cvt.rp.satfinite.ue8m0x2.f32 %h1, %a, %b; cvt.u32.u16 %d, %h1;"
    got = elementwise(code, "b32", a, np.ones(10, np.float32))
    expected = [127, 128, 128, 126, 0, 0, 254, 254, 255, 1]
    assert [x >> 8 for x in got.tolist()] == expected
    assert {x & 255 for x in got.tolist()} == {127}
