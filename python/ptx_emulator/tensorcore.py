"""Accumulation in Hopper's tensor cores. An H200 computes the same bits in every case of `calibration`.

An instruction computes the elementwise products exactly, truncates them and the addend to a number of bits below their
largest exponent, and adds them without error. It truncates the sum to float32 or rounds it to f16. The exponent of a
product is the sum of its operands' exponents; a subnormal operand has the exponent of the smallest normal number.
"""

from __future__ import annotations

import numpy as np

from ptx_emulator.numerics import Array, f32, u64

f64 = np.float64
FP8 = ("e4m3", "e5m2")
ALIGNED, ALIGNED_FP8 = 25, 13  # bits kept below the largest exponent
LOWEST = {"f16": -14, "bf16": -126, "tf32": -126, "e4m3": -6, "e5m2": -14}  # exponents of the smallest normal numbers
# Multiply-adds in a cycle of an SM, of data sheets: TFLOP/s by SMs and clock. A pair of blocks has two SMs.
WGMMA_RATE = {"tf32": 1024, "f16": 2048, "bf16": 2048} | dict.fromkeys((*FP8, "s8", "u8"), 4096)
TCGEN05_RATE = {
    "tf32": 2048,
    "f16": 4096,
    "i8": 8192,
    "f8f6f4": 8192,
    "mxf8f6f4": 8192,
    "mxf4": 16384,
    "mxf4nvf4": 16384,
}
_ANY = -1022, -1022
_NOTHING = -5000  # exponent of zero, below that of any product


def _exponents(x: Array, lowest: int) -> Array:
    """int16, at least `lowest` but for zeros."""
    exponents = np.maximum((x.view(np.int64) >> 52 & 0x7FF) - 1023, lowest).astype(np.int16)
    return np.where(x == 0, np.int16(_NOTHING), exponents)


def _power(exponents: Array) -> Array:
    """2 to exponents above -1023."""
    return (exponents.astype(np.int64) + 1023 << 52).view(f64)


def cut(x: Array, bits: int) -> Array:
    """float64 with all but `bits` bits of its fraction zero."""
    return (x.view(u64) >> u64(52 - bits) << u64(52 - bits)).view(f64)


def _sum(a: Array, b: Array, c: Array, bits: int, lowest: tuple[int, int] = _ANY) -> Array:
    a, b = (np.ascontiguousarray(np.moveaxis(x, -1, 0)) for x in (a, b))
    ea, eb, top = _exponents(a, lowest[0]), _exponents(b, lowest[1]), _exponents(c, _ANY[0])
    exponent = np.empty_like(top)
    for row, column in zip(ea, eb, strict=True):
        np.add(row[..., :, None], column[..., None, :], out=exponent)
        np.maximum(top, exponent, out=top)
    top = np.maximum(top, -900)
    # Single precision holds every product and its scaled value, if no exponent is extreme.
    dtype = f32 if top.min() > -60 and top.max() < 60 else f64
    scale = _power(bits - top).astype(dtype)
    total = (c * scale).astype(np.int64)
    product, integers, part = (np.zeros(c.shape, t) for t in (dtype, np.int32, np.int32))
    for k, (row, column) in enumerate(zip(a.astype(dtype), b.astype(dtype), strict=True)):
        np.multiply(row[..., :, None], column[..., None, :], out=product)
        np.multiply(product, scale, out=product)
        integers[...] = product
        part += integers
        if k % 8 == 7:  # a product is below 2^27
            total += part
            part[...] = 0
    total += part
    return total * _power(top - bits)


def _loses_nothing(a: Array, b: Array, c: Array, bits: int) -> bool:
    """Whether operands are so small multiples of 1 or of 1/8 that no product and no sum has bits to be cut off."""
    largest = np.abs(a).max(initial=0) * np.abs(b).max(initial=0) * a.shape[-1] + np.abs(c).max(initial=0)
    return any(
        largest * scale * scale < 2.0 ** min(bits, 24)
        and all((x == np.rint(x)).all() for x in (a * scale, b * scale, c * (scale * scale)))
        for scale in (1.0, 8.0)
    )


def aligned_sum(a: Array, b: Array, c: Array, bits: int, lowest: tuple[int, int] = _ANY) -> Array:
    """a (..., m, k) times b (..., n, k) transposed plus c (..., m, n): float64, before it takes the result's format.
    `lowest`: the least exponents of elements of a and of b."""
    if _loses_nothing(a, b, c, bits):
        return a @ b.swapaxes(-1, -2) + c
    if all(np.isfinite(x).all() for x in (a, b, c)):
        return _sum(a, b, c, bits, lowest)
    with np.errstate(invalid="ignore", over="ignore"):
        x, y, z = (np.where(np.isfinite(v), v, 0.0) for v in (a, b, c))
        plain = np.einsum("...mk,...nk->...mn", a, b) + c
        return np.where(np.isfinite(plain), _sum(x, y, z, bits, lowest), plain)


def multiply_add(a: Array, b: Array, c: Array, ptx_types: tuple[str, str], warpgroup: bool) -> Array:
    """a (..., m, k) b (..., n, k)^T + c (..., m, n), of c's type, float32 or f16; a and b hold values of types
    `ptx_types`. By wgmma or by mma.sync."""
    to = c.dtype
    a, b, c = (np.ascontiguousarray(x, f64) for x in (a, b, c))
    with np.errstate(over="ignore"):
        if ptx_types[0] not in FP8 or warpgroup:
            bits, fraction = (ALIGNED_FP8, ALIGNED_FP8) if ptx_types[0] in FP8 else (ALIGNED, 23)
            total = aligned_sum(a, b, c, bits, (LOWEST[ptx_types[0]], LOWEST[ptx_types[1]]))
            return (cut(total, fraction) if to == f32 else total).astype(to)
        # Two consecutive f16 MMAs, then an ordinary addition of the addend.
        total = np.zeros_like(c)
        for half in (0, 2):
            chosen = np.flatnonzero(np.arange(a.shape[-1]) & 2 == half)
            lowest = (LOWEST["f16"], LOWEST["f16"])
            total = cut(aligned_sum(a[..., chosen], b[..., chosen], total, ALIGNED, lowest), 23)
        return (total.astype(f32) + c.astype(f32)).astype(to)
