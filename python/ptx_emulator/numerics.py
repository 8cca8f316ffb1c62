"""Number formats of PTX. Kernel references must not import this module: a wrong table would agree with itself."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ptx_emulator.errors import UnsupportedPTX

Array = NDArray[Any]
f32, u8, u16, u32, u64 = np.float32, np.uint8, np.uint16, np.uint32, np.uint64

SMALL: dict[str, tuple[Any, float]] = {
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 7.5),
    "e3m2": (ml_dtypes.float6_e3m2fn, 28.0),
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0),
}
_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}


def _table(ptx_type: str) -> Array:
    codes = np.arange(256, dtype=u8) & u8((1 << _BITS[ptx_type]) - 1)
    return codes.view(SMALL[ptx_type][0]).astype(f32)


TABLES: dict[str, Array] = {ptx_type: _table(ptx_type) for ptx_type in SMALL}
TABLES["ue8m0"] = np.arange(256, dtype=u8).view(ml_dtypes.float8_e8m0fnu).astype(f32)
# ue4m3: scale factors of nvfp4; the sign bit is not part of the format.
TABLES["ue4m3"] = TABLES["e4m3"][np.arange(256) & 127]

# Bytes per element in memory (4-bit elements: see `matrix`), the unsigned numpy type of one element.
ELEMENT_BYTES = {
    "bf16": 2,
    "f16": 2,
    "tf32": 4,
    "f32": 4,
    "s8": 1,
    "u8": 1,
    "e4m3": 1,
    "e5m2": 1,
    "e2m3": 1,
    "e3m2": 1,
    "e2m1": 1,
}
UNSIGNED: dict[int, Any] = {1: u8, 2: u16, 4: u32, 8: u64}


def bf16_to_f32(bits: Array) -> Array:
    return (np.asarray(bits).astype(u32) << u32(16)).view(f32)


def f16_to_f32(bits: Array) -> Array:
    return np.asarray(bits).astype(u16).view(np.float16).astype(f32)


def f32_to_bf16(values: Array, rounding: str = "rn") -> Array:
    """Bits of bf16 in the low half of uint32. NaN becomes the canonical 0x7fff."""
    values = np.ascontiguousarray(values, dtype=f32)
    bits = values.view(u32)
    if rounding == "rn":
        rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    elif rounding == "rz":
        rounded = bits >> u32(16)
    else:
        raise UnsupportedPTX(f"cvt.{rounding} to bf16")
    return np.where(np.isnan(values), u32(0x7FFF), rounded)


def narrow(values: Array, dtype: Any, rounding: str) -> Array:
    """float64 to a narrower float: to nearest (`rn`), toward zero (`rz`), down (`rm`) or up (`rp`)."""
    near = values.astype(dtype)
    if rounding not in ("rz", "rm", "rp"):
        return near
    back = near.astype(np.float64)
    down = (back > values) & ((values > 0) if rounding == "rz" else rounding == "rm")
    up = (back < values) & ((values < 0) if rounding == "rz" else rounding == "rp")
    return np.where(down | up, np.nextafter(near, np.where(down, dtype(-np.inf), dtype(np.inf))), near)


def integer_to_f64(values: Array) -> Array:
    """An integer as the float64 that rounds to every narrower float as the integer does: its last bit is sticky, set if
    lower bits were truncated."""
    size = np.abs(values.astype(np.int64) if values.dtype.kind == "i" else values).astype(u64)
    cut = size & u64(0x7FF)
    odd = (size ^ cut) | ((cut != 0).astype(u64) << u64(11))
    wide = np.where(size < u64(1 << 53), size, odd).astype(np.float64)
    return np.where(values < 0, -wide, wide)


def f32_to_f16(values: Array, rounding: str = "rn") -> Array:
    """Bits of fp16 in the low half of uint32. NaN becomes the canonical 0x7fff."""
    values = np.ascontiguousarray(values, dtype=f32)
    half = narrow(values.astype(np.float64), np.float16, rounding)
    return np.where(np.isnan(values), u32(0x7FFF), half.view(u16).astype(u32))


def f32_to_tf32(values: Array, rounding: str) -> Array:
    """tf32 as the float32 bits with the low 13 zero; `rna` rounds half away from zero, `rn` to even."""
    bits = np.ascontiguousarray(values, dtype=f32).view(u32)
    if rounding == "rna":
        rounded = bits + u32(0x1000)
    elif rounding == "rn":
        rounded = bits + u32(0xFFF) + ((bits >> u32(13)) & u32(1))
    elif rounding == "rz":
        rounded = bits
    else:
        raise UnsupportedPTX(f"cvt.{rounding}.tf32.f32")
    return np.where(np.isfinite(values), rounded, bits) & u32(0xFFFFE000)


def f32_to_small(values: Array, ptx_type: str) -> Array:
    """cvt.rn.satfinite to an 8-, 6- or 4-bit float: codes as uint32. NaN: 0x7f in fp8, the largest value elsewhere."""
    values = np.ascontiguousarray(values, dtype=f32)
    dtype, largest = SMALL[ptx_type]
    codes = np.clip(np.nan_to_num(values, nan=0.0), -largest, largest).astype(dtype).view(u8).astype(u32)
    nan_code = u32(0x7F) if _BITS[ptx_type] == 8 else np.array(largest, f32).astype(dtype).view(u8).astype(u32)
    return np.where(np.isnan(values), nan_code, codes & u32((1 << _BITS[ptx_type]) - 1))


def f32_to_ue8m0(values: Array, rounding: str) -> Array:
    """Exponent of |value|, `rp` rounds up to the next power of two, `rz` down; saturates at 254; NaN is 255."""
    values = np.ascontiguousarray(values, dtype=f32)
    bits = values.view(u32) & u32(0x7FFFFFFF)
    exponent, fraction = bits >> u32(23), bits & u32(0x7FFFFF)
    if rounding == "rp":
        # Below 2^-127 (the smallest code, fraction 0x400000 of exponent 0) everything rounds up to code 0.
        up = (fraction != 0) & ((exponent > 0) | (fraction > u32(0x400000)))
        exponent = exponent + up
    elif rounding != "rz":
        raise UnsupportedPTX(f"cvt.{rounding}.ue8m0x2.f32")
    return np.where(np.isnan(values), u32(255), np.minimum(exponent, u32(254))).astype(u32)


def to_f32(raw: Array, ptx_type: str) -> Array:
    """Matrix operands of type `ptx_type` as float32; tf32 drops the low 13 bits."""
    if ptx_type in TABLES:
        return TABLES[ptx_type][raw]
    if ptx_type == "tf32":
        return (raw & u32(0xFFFFE000)).view(f32)
    if ptx_type == "bf16":
        return bf16_to_f32(raw)
    if ptx_type not in ("f16", "s8", "u8"):
        raise UnsupportedPTX(f"matrix element type {ptx_type}")
    return raw.view({"f16": np.float16, "s8": np.int8, "u8": u8}[ptx_type]).astype(f32)


def flush(values: Array) -> Array:
    """.ftz: subnormal inputs and results become zero of the same sign."""
    return np.where(np.abs(values) < f32(1.17549435e-38), np.copysign(f32(0), values), values)


def _sum_error(a: Array, b: Array, total: Array) -> Array:
    """a + b - total, exactly, if `total` is the rounded sum."""
    back = total - a
    return (a - (total - back)) + (b - back)


def fma_f32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c rounded once: the float64 sum's own rounding matters only where it lies between two float32."""
    product = np.multiply(a, b, dtype=np.float64)
    total = np.atleast_1d(product + c)
    halfway = (total.view(u64) & u64(0x1FFFFFFF)) == u64(0x10000000)
    if halfway.any():
        p, t = np.broadcast_to(product, total.shape)[halfway], total[halfway]
        error = _sum_error(p, np.broadcast_to(np.asarray(c, np.float64), total.shape)[halfway], t)
        toward = np.where(error > 0, np.inf, -np.inf)
        total[halfway] = np.where(error != 0, np.nextafter(t, toward), t)
    return total.astype(f32)


@partial(np.vectorize, otypes=[np.float64])
def fma_f64(a: float, b: float, c: float) -> float:
    """a * b + c rounded once."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:  # nothing was rounded: the sign of zero follows
        return a * b + c
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def directed(op: str, rounding: str, a: Array, b: Array, c: Array | float = 0) -> Array:
    """add, sub, mul or fma of float32, rounded toward zero (`rz`), down (`rm`) or up (`rp`)."""
    x, y, z = (np.asarray(v, np.float64) for v in (a, b, c))
    x, y = {"add": (x, y), "sub": (x, -y), "mul": (x * y, np.float64(0)), "fma": (x * y, z)}[op]
    total = x + y if op != "mul" else x
    near = np.atleast_1d(total).astype(f32)
    rest = np.where(total != near, total - near, _sum_error(x, y, total) if op != "mul" else 0.0)
    down = (rest < 0) & ((near > 0) if rounding == "rz" else rounding == "rm")
    up = (rest > 0) & ((near < 0) if rounding == "rz" else rounding == "rp")
    result = np.where(down | up, np.nextafter(near, np.where(down, f32(-np.inf), f32(np.inf))), near)
    if rounding == "rm" and op != "mul":  # an exact zero is negative, but for 0 + 0
        result = np.where((near == 0) & (rest == 0) & (np.signbit(x) | np.signbit(y)), f32(-0.0), result)
    return result
