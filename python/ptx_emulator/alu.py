"""Arithmetic of one lane, vectorised over lanes. `m` is True or a bool array; `d` is the destination register."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator import numerics as N
from ptx_emulator.numerics import Array, f32, u8, u16, u32, u64

i32, i64, f64 = np.int32, np.int64, np.float64
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: i32, 8: i64}
UINT: dict[int, Any] = {8: u8, 16: u16, 32: u32, 64: u64}


def mask(m: Any, predicate: Array) -> Any:
    """m & predicate, or None if no lane is left."""
    both = predicate.copy() if m is True else m & predicate
    return both if both.any() else None


def put(m: Any, d: Array, value: Any) -> None:
    np.copyto(d, value, where=m, casting="unsafe")


def low(x: Array, bits: int) -> Array:
    return x.astype(UINT[bits])


# -- integers
def wide(a: Array, b: Array, dtype: Any) -> Array:
    return np.multiply(np.asarray(a).astype(dtype), np.asarray(b).astype(dtype))


def mul_hi(a: Array, b: Array, signed: bool, bits: int) -> Array:
    if bits <= 32:
        product = wide(a, b, i64 if signed else u64)
        return product >> product.dtype.type(bits)
    a64, b64 = np.asarray(a).view(u64), np.asarray(b).view(u64)
    ml = u64(0xFFFFFFFF)
    a0, a1, b0, b1 = a64 & ml, a64 >> u64(32), b64 & ml, b64 >> u64(32)
    middle = a1 * b0 + ((a0 * b0) >> u64(32))
    other = a0 * b1 + (middle & ml)
    high = a1 * b1 + (middle >> u64(32)) + (other >> u64(32))
    if signed:
        high = high - np.where(a64.view(i64) < 0, b64, u64(0)) - np.where(b64.view(i64) < 0, a64, u64(0))
    return high


def div(a: Array, b: Array) -> Array:
    """Truncating division. Division by zero gives all ones, as NVIDIA GPUs do (PTX leaves it open)."""
    a, b = np.broadcast_arrays(a, b)
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & (quotient < 0))
    return np.where(b == 0, np.array(-1).astype(a.dtype), quotient)


def rem(a: Array, b: Array) -> Array:
    """Remainder of `div`; by zero it gives all ones too."""
    a, b = np.broadcast_arrays(a, b)
    return np.where(b == 0, np.array(-1).astype(a.dtype), np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def saturating(a: Array, b: Array, sign: int) -> Array:
    """add.sat.s32 and sub.sat.s32."""
    exact = np.asarray(a).astype(i64) + sign * np.asarray(b).astype(i64)
    return np.clip(exact, -(1 << 31), (1 << 31) - 1)


def shift_left(x: Array, n: Array, bits: int) -> Array:
    n = np.asarray(n)
    return np.where(n >= bits, x.dtype.type(0), x << np.minimum(n, bits - 1).astype(x.dtype))


def shift_right(x: Array, n: Array, bits: int) -> Array:
    n = np.asarray(n)
    shifted = x >> np.minimum(n, bits - 1).astype(x.dtype)
    return shifted if x.dtype.kind == "i" else np.where(n >= bits, x.dtype.type(0), shifted)


def funnel(lo: Array, hi: Array, n: Array, left: bool, wrap: bool) -> Array:
    pair = (np.asarray(hi).astype(u64) << u64(32)) | np.asarray(lo).astype(u64)
    n = np.asarray(n)
    count = (n & u32(31) if wrap else np.minimum(n, u32(32))).astype(u64)
    return ((pair << count) >> u64(32) if left else pair >> count) & u64(0xFFFFFFFF)


def permute(a: Array, b: Array, c: Array) -> Array:
    pair = (np.asarray(b).astype(u64) << u64(32)) | np.asarray(a).astype(u64)
    c = np.asarray(c)
    result: Any = u64(0)
    for index in range(4):
        selector = (c >> u32(4 * index)) & u32(15)
        byte = (pair >> ((selector & u32(7)).astype(u64) * u64(8))) & u64(255)
        sign = np.where(byte & u64(0x80), u64(255), u64(0))
        result = result | (np.where((selector & u32(8)) != 0, sign, byte) << u64(8 * index))
    return result


def lop3(a: Array, b: Array, c: Array, table: Any) -> Array:
    result: Any = u32(0)
    for index in range(8):
        if int(table) >> index & 1:
            result = result | ((a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c))
    return result


def bit_extract(a: Array, position: Array, length: Array, signed: bool, bits: int) -> Array:
    """bfe: beyond the top the field goes on with the sign, or with zeros."""
    a, p, n = np.broadcast_arrays(a, np.asarray(position) & u32(255), np.asarray(length) & u32(255))
    value = a.view(SIGNED[bits // 8]).astype(i64) if signed else a.astype(u64)
    shifted = np.where((p > 63) & (not signed), 0, value >> np.minimum(p, 63).astype(value.dtype)).astype(value.dtype)
    rest = np.clip(64 - n.astype(i64), 0, 63).astype(value.dtype)
    return np.where(n == 0, 0, shifted << rest >> rest)


def bit_insert(a: Array, b: Array, position: Array, length: Array, bits: int) -> Array:
    a, b, p, n = np.broadcast_arrays(a, b, np.asarray(position) & u32(255), np.asarray(length) & u32(255))
    p, n = np.minimum(p, bits).astype(u64), n.astype(u64)
    width = np.minimum(n, u64(bits) - p)
    ones = np.where(width >= 64, u64(0xFFFFFFFFFFFFFFFF), (u64(1) << np.minimum(width, u64(63))) - u64(1))
    place = np.minimum(p, u64(63))
    field = np.where(width == 0, u64(0), ones << place)
    return (b.astype(u64) & ~field) | ((a.astype(u64) << place) & field)


def leading_zeros(value: Array, bits: int) -> Array:
    value = value.astype(u64)
    for step in (1, 2, 4, 8, 16, 32):
        value = value | value >> u64(step)
    return bits - np.bitwise_count(value).astype(i64)


def bit_reverse(a: Array, bits: int) -> Array:
    value = np.asarray(a).astype(u64)
    result: Any = u64(0)
    for index in range(bits):
        result = result | (((value >> u64(index)) & u64(1)) << u64(bits - 1 - index))
    return result


def find_msb(a: Array, signed: bool, bits: int, shift: bool) -> Array:
    """bfind: position of the highest bit that differs from the sign; all ones without such a bit."""
    value = np.atleast_1d(np.asarray(a))
    if signed:
        value = np.where(value.view(SIGNED[value.dtype.itemsize]) < 0, ~value, value)
    leading = leading_zeros(value, bits)
    position = bits - 1 - leading
    return np.where(position < 0, 0xFFFFFFFF, leading if shift else position)


def dot4(a: Array, b: Array, c: Array, a_signed: bool, b_signed: bool) -> Array:
    shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))

    def split(x: Array, signed: bool) -> Array:
        return (
            np.ascontiguousarray(np.broadcast_to(x, shape)).view(np.int8 if signed else u8).reshape(-1, 4).astype(i32)
        )

    return (split(a, a_signed) * split(b, b_signed)).sum(1).astype(i32).view(u32) + np.asarray(c).view(u32)


# -- floats
def div_approx(a: Array, b: Array) -> Array:
    """a times the reciprocal of b, which is zero for |b| above 2^126."""
    a, b = np.asarray(a), np.asarray(b)
    return np.where((np.abs(b) > f32(2.0**126)) & ~np.isnan(a), a * np.copysign(f32(0), b), a / b)


def saturate(x: Array) -> Array:
    """To 0..1; NaN and -0 become +0."""
    return np.clip(np.nan_to_num(x, nan=0.0), 0, 1).astype(x.dtype) + x.dtype.type(0)


def maximum(x: Array, y: Array, nan: bool) -> Array:
    """PTX orders -0 below +0."""
    best = np.maximum(x, y) if nan else np.fmax(x, y)
    return np.where((x == 0) & (y == 0), np.copysign(best, np.where(np.signbit(x), y, x)), best)


def minimum(x: Array, y: Array, nan: bool) -> Array:
    best = np.minimum(x, y) if nan else np.fmin(x, y)
    return np.where((x == 0) & (y == 0), np.copysign(best, np.where(np.signbit(x), x, y)), best)


def xorsign(result: Array, x: Array, y: Array) -> Array:
    return np.copysign(result, np.where(np.signbit(x) ^ np.signbit(y), f32(-1), f32(1)))


def compare(op: str, x: Array, y: Array) -> Array:
    unordered = np.isnan(x) | np.isnan(y)
    if op == "num":
        return ~unordered
    if op == "nan":
        return unordered
    plain = {
        "eq": np.equal,
        "ne": np.not_equal,
        "lt": np.less,
        "le": np.less_equal,
        "gt": np.greater,
        "ge": np.greater_equal,
    }[op[:2]]
    return plain(x, y) | unordered if op.endswith("u") else plain(x, y) & ~unordered


def lanes_of(x: Any, count: int) -> Array:
    return np.ascontiguousarray(np.broadcast_to(x, count))


def at(x: Any, lanes: Array) -> Array:
    """A register or a constant in some lanes; of an address (base, offset) their sum as int64."""
    if isinstance(x, tuple):
        return at(x[0], lanes).astype(i64) + x[1]
    x = np.asarray(x)
    return x[lanes] if x.ndim else np.broadcast_to(x, lanes.shape)


def one(x: Any, lane: int) -> int:
    """The same in one lane."""
    base, offset = x if isinstance(x, tuple) else (x, 0)
    return int(base[lane] if np.ndim(base) else base) + offset


def halves(x: Any, ptx_type: str, count: int) -> Array:
    """(count, n) float32 of a scalar or packed half register."""
    x = lanes_of(x, count)
    if ptx_type == "f32x2":
        return x.view(f32).reshape(-1, 2)
    bits = x.view(u16).reshape(count, -1)
    return N.bf16_to_f32(bits) if ptx_type.startswith("bf16") else N.f16_to_f32(bits)


def half_op(
    m: Any, op: str, ptx_type: str, relu: bool, nan: bool, rounding: str, flush: bool, d: Array, *sources: Any
) -> None:
    """add, sub, mul, fma, min, max, neg, abs on f16, bf16, their pairs, and f32x2."""
    count = d.shape[0]
    v = [halves(x, ptx_type, count) for x in sources]
    flush = flush and ptx_type in (
        "f32x2",
        "bf16",
        "bf16x2",
    )  # exp2 of a subnormal half is 1, and no result is subnormal
    if flush:
        v = [N.flush(x) for x in v]
    if rounding:
        result = N.directed(op, rounding, *v)
    elif op == "fma" and ptx_type.startswith("f16"):  # float64 holds the sum exactly enough to be rounded to half once
        result = (v[0].astype(f64) * v[1] + v[2]).astype(np.float16).astype(f32)
    elif op == "fma":
        result = N.fma_f32(v[0], v[1], v[2])
    elif op in ("max", "min"):
        result = (maximum if op == "max" else minimum)(v[0], v[1], nan)
    else:
        result = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "neg": np.negative,
            "abs": np.abs,
            "ex2": np.exp2,
            "tanh": np.tanh,
        }[op](*v)
    if relu:
        result = np.where(np.isnan(result) | (result > 0), result, f32(0))
    where = m if m is True else m[:, None]
    if flush:
        result = N.flush(result)
    if ptx_type == "f32x2":
        put(where, d.view(f32).reshape(-1, 2), result)
        return
    bits = N.f32_to_bf16(result) if ptx_type.startswith("bf16") else N.f32_to_f16(result)
    put(where, d.view(u16).reshape(count, -1), bits)


def mixed(op: str, ptx_types: list[str], count: int, *sources: Any) -> Array:
    """add/sub/fma.rn.f32.{bf16,f16}: the narrow sources widen exactly, one rounding at the end."""
    v = [
        np.asarray(x).view(f32) if k == "f32" else halves(x, k, count)[:, 0]
        for x, k in zip(sources, ptx_types, strict=True)
    ]
    return {"fma": N.fma_f32, "add": np.add, "sub": np.subtract}[op](*v)


# -- moves
def part(x: Any, width: int, index: int) -> Any:
    """Bits [index*width, (index+1)*width) of every lane."""
    if isinstance(x, np.ndarray) and x.ndim:
        return x.view(UINT[width])[index :: x.dtype.itemsize * 8 // width]
    return (int(x) >> (width * index)) & ((1 << width) - 1)


def pack(m: Any, d: Array, width: int, items: list[Any]) -> None:
    view = d.view(UINT[width])
    for index, item in enumerate(items):
        np.copyto(view[index :: len(items)], item, where=m, casting="unsafe")


def unpack128(m: Any, x: Array, items: list[Array | None]) -> None:
    words = x.reshape(-1, 4).view(UINT[128 // len(items)])
    for index, item in enumerate(items):
        if item is not None:
            put(m, item, words[:, index])


def pack128(m: Any, d: Array, items: list[Any]) -> None:
    words = d.reshape(-1, 4).view(UINT[128 // len(items)])
    for index, item in enumerate(items):
        put(m, words[:, index], item)
