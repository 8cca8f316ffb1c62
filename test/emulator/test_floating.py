"""Floating point and conversions against PyTorch, ml_dtypes and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from emulator.harness import elementwise, random_words

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


@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "div"])
def test_arithmetic_is_correctly_rounded(opcode: str) -> None:
    a, b = floats(1), floats(2)
    b[:2] = 7
    name = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}[opcode]
    rounding = ".rn" if opcode != "sub" else ""
    got = f32(elementwise(f"{opcode}{rounding}.f32 %d, %a, %b;", "b32", a, b))
    same(got, name(torch.from_numpy(a), torch.from_numpy(b)).numpy())


def nearest(value: Fraction) -> np.float32:
    """float32 nearest to an exact value, ties to even, decided on fractions."""
    guess = np.float32(float(value))
    around = [np.nextafter(guess, np.float32(-np.inf)), guess, np.nextafter(guess, np.float32(np.inf))]
    best = min(abs(Fraction(float(x)) - value) for x in around)
    close = [x for x in around if abs(Fraction(float(x)) - value) == best]
    return close[0] if len(close) == 1 else next(x for x in close if not x.view(np.uint32) & 1)


def test_fma_rounds_once() -> None:
    a, b, c = floats(3, 3), floats(4, 3), floats(5, 20)
    # A product just above half an ulp of the addend: rounding it to float64 first would lose the tie.
    a[:3], b[:3], c[:3] = 1 + 2.0**-23, 2.0**-24, 1.0
    a[1], b[1], c[1] = 1 + 2.0**-12, 2.0**-24 * (1 + 2.0**-20), 1.0
    a[2], b[2], c[2] = 2.0**-60, 2.0**-60, 1 + 2.0**-23
    got = f32(elementwise("fma.rn.f32 %d, %a, %b, %c;", "b32", a, b, c))
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    same(got, np.array([nearest(v) for v in exact], np.float32))


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


def test_min_max_and_nan() -> None:
    a, b = floats(6), floats(7)
    a[10:20], b[15:25] = np.nan, np.nan
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    same(f32(elementwise("max.f32 %d, %a, %b;", "b32", a, b)), torch.fmax(ta, tb).numpy())
    same(f32(elementwise("min.NaN.f32 %d, %a, %b;", "b32", a, b)), torch.minimum(ta, tb).numpy())
    got = f32(elementwise("max.f32 %d, %a, %b;", "b32", np.float32([-0.0, 0.0]), np.float32([0.0, -0.0])))
    assert not np.signbit(got).any()


def test_flush_to_zero_and_saturate() -> None:
    a = np.float32([1e-39, -1e-39, 0.25, 3.0, -2.0, np.nan])
    got = f32(elementwise("mul.ftz.f32 %d, %a, %b;", "b32", a, np.ones(6, np.float32)))
    same(got[:5], np.float32([0.0, -0.0, 0.25, 3.0, -2.0]))
    assert np.signbit(got[1])
    same(f32(elementwise("add.sat.f32 %d, %a, %b;", "b32", a, np.zeros(6, np.float32)))[2:], [0.25, 1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    ("opcode", "function"),
    [("ex2.approx.f32", torch.exp2), ("rcp.approx.f32", torch.reciprocal), ("rsqrt.approx.f32", torch.rsqrt),
     ("sqrt.rn.f32", torch.sqrt), ("lg2.approx.f32", torch.log2), ("tanh.approx.f32", torch.tanh)],
)  # fmt: skip
def test_functions(opcode: str, function: object) -> None:
    a = np.abs(floats(8, 3)) + np.float32(0.01)
    got = f32(elementwise(f"{opcode} %d, %a;", "b32", a))
    np.testing.assert_allclose(got, function(torch.from_numpy(a)).numpy(), rtol=3e-7)  # type: ignore[operator]


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


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("opcode", ["add.rn", "mul.rn", "max"])
def test_packed_halves(kind: str, opcode: str) -> None:
    dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
    values = [torch.from_numpy(floats(seed, 2)).to(dtype) for seed in (9, 10)]
    raw = [v.view(torch.int16).numpy().view(np.uint32).copy() for v in values]
    name = opcode.split(".")[0]
    got = elementwise(f"{opcode}.{kind} %d, %a, %b;" if name == "max" else f"{name}.rn.{kind} %d, %a, %b;", "b32", *raw)
    expected = {"add": torch.add, "mul": torch.mul, "max": torch.maximum}[name](*values)
    assert torch.equal(torch.from_numpy(got.view(np.int16).copy()).view(dtype), expected)


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


# -- conversions
@pytest.mark.parametrize(("kind", "dtype"), [("bf16x2", torch.bfloat16), ("f16x2", torch.float16)])
def test_convert_to_halves(kind: str, dtype: torch.dtype) -> None:
    a, b = floats(20, 12), floats(21, 12)
    got = elementwise(f"cvt.rn.{kind}.f32 %d, %a, %b;", "b32", a, b).view(np.int16).reshape(-1, 2)
    high, low = (torch.from_numpy(x).to(dtype).view(torch.int16).numpy() for x in (a, b))
    same(got, np.stack([low, high], 1))


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"),
    [("e4m3x2", ml_dtypes.float8_e4m3fn, 448.0), ("e5m2x2", ml_dtypes.float8_e5m2, 57344.0)],
)
def test_convert_to_fp8(kind: str, dtype: type, largest: float) -> None:
    a, b = floats(22, 10), floats(23, 10)
    a[7:10] = [1e9, -1e9, np.nan]
    got = elementwise(f"cvt.rn.satfinite.{kind}.f32 %h1, %a, %b; cvt.u32.u16 %d, %h1;", "b32", a, b)
    codes = [np.clip(x, -largest, largest).astype(dtype).view(np.uint8).astype(np.uint32) for x in (a, b)]
    codes[0][9] = 0x7F
    same(got, codes[0] << 8 | codes[1])


def test_every_fp8_code_widens() -> None:
    codes = np.arange(256, dtype=np.uint32)
    for kind, dtype in (("e4m3x2", torch.float8_e4m3fn), ("e5m2x2", torch.float8_e5m2)):
        got = elementwise(f"cvt.u16.u32 %h1, %a; cvt.rn.f16x2.{kind} %d, %h1;", "b32", codes)
        expected = torch.from_numpy(codes.astype(np.uint8)).view(dtype).to(torch.float16).numpy()
        same(got.view(np.float16)[0::2], expected)


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


@pytest.mark.parametrize("rounding", ["rni", "rzi", "rmi", "rpi"])
def test_float_to_integer_saturates(rounding: str) -> None:
    a = np.concatenate([floats(24, 10), np.float32([2.5, -2.5, 3e9, -3e9, np.nan])])
    got = elementwise(f"cvt.{rounding}.s32.f32 %d, %a;", "b32", a).view(np.int32)
    function = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding]
    same(got, np.clip(np.nan_to_num(function(a.astype(np.float64))), -(2**31), 2**31 - 1).astype(np.int32))


def test_integer_to_float_and_sign_extension() -> None:
    a = random_words(COUNT, 25)
    same(f32(elementwise("cvt.rn.f32.s32 %d, %a;", "b32", a)), a.view(np.int32).astype(np.float32))
    same(f32(elementwise("cvt.rn.f32.u32 %d, %a;", "b32", a)), a.astype(np.float32))
    got = elementwise("cvt.s64.s32 %d, %a;", "b32", a, out="b64").view(np.int64)
    same(got, a.view(np.int32).astype(np.int64))
    got = elementwise("cvt.sat.s8.s32 %d, %a;", "b32", a).view(np.int32)
    same(got, np.clip(a.view(np.int32), -128, 127))


def test_tf32_rounding() -> None:
    a = floats(26)
    got = elementwise("cvt.rna.tf32.f32 %d, %a;", "b32", a)
    bits = a.view(np.uint32)
    same(got, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000))
