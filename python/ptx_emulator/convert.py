"""cvt between every pair of types. Returns the raw bits of the destination, which the caller writes under the mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptx_emulator import numerics as N
from ptx_emulator.alu import SIGNED, UINT, lanes_of
from ptx_emulator.alu import saturate as saturated
from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.numerics import Array, f32, u32, u64

_ROUND_TO_INTEGER = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
_PAIR_OF = {
    "f16x2": "f16",
    "bf16x2": "bf16",
    "e4m3x2": "e4m3",
    "e5m2x2": "e5m2",
    "e2m3x2": "e2m3",
    "e3m2x2": "e3m2",
    "e2m1x2": "e2m1",
    "ue8m0x2": "ue8m0",
}


_LARGEST = {"bf16": np.array(0x7F7F0000, u32).view(f32), "f16": f32(65504), "tf32": np.array(0x7F7FE000, u32).view(f32)}


def _integer(raw: Array, ptx_type: str) -> Array:
    value = np.asarray(raw).astype(UINT[int(ptx_type[1:])])
    return value.view(SIGNED[value.dtype.itemsize]) if ptx_type[0] == "s" else value


def _float_source(raw: Array, ptx_type: str) -> Array:
    if ptx_type in ("f32", "f64"):
        return np.asarray(raw).view(f32 if ptx_type == "f32" else np.float64)
    return (N.bf16_to_f32 if ptx_type == "bf16" else N.f16_to_f32)(raw)


def _narrow(value: Array, ptx_type: str, rounding: str, relu: bool, saturate: bool) -> Array:
    """float32 -> the bits of one element."""
    if ptx_type == "f32":
        return N.narrow(np.asarray(value, np.float64), f32, rounding).view(u32)
    if ptx_type == "f16" and value.dtype == np.float64:
        return N.narrow(value, np.float16, rounding).view(N.u16).astype(u32)
    value = np.ascontiguousarray(value, dtype=f32)
    if relu:
        value = np.where(np.isnan(value) | (value > 0), value, f32(0))
    if saturate and ptx_type in _LARGEST:
        value = np.where(np.isnan(value), value, np.clip(value, -_LARGEST[ptx_type], _LARGEST[ptx_type]))
    to = {"bf16": N.f32_to_bf16, "f16": N.f32_to_f16, "tf32": N.f32_to_tf32, "ue8m0": N.f32_to_ue8m0}.get(ptx_type)
    if to is not None:
        return to(value, rounding)
    if rounding != "rn" or not saturate:
        raise UnsupportedPTX(f"cvt to {ptx_type} without .rn.satfinite")
    return N.f32_to_small(value, ptx_type)


def _limits(ptx_type: str) -> tuple[int, int]:
    bits = int(ptx_type[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if ptx_type[0] == "s" else (0, (1 << bits) - 1)


def _to_integer(value: Array, ptx_type: str, rounding: str, source: str) -> Array:
    """Clamps values out of range. NaN becomes 0, or only the highest bit set if either type has 64 bits."""
    rounded = _ROUND_TO_INTEGER[rounding](np.asarray(value, np.float64))
    bits, (low, high) = int(ptx_type[1:]), _limits(ptx_type)
    clamped = np.clip(np.nan_to_num(rounded, nan=0.0, posinf=float(high), neginf=float(low)), low, high)
    if bits == 64 or source == "f64":
        clamped = np.where(np.isnan(rounded), low or 1 << (bits - 1), clamped)
    if bits == 64:
        top = clamped >= float(high)
        wide = np.where(top, 0.0, clamped).astype(np.int64 if ptx_type[0] == "s" else u64).view(u64)
        return np.where(top, u64(high), wide)
    return clamped.astype(np.int64).view(u64)


def _integer_to_integer(source: Array, to: str, saturate: bool) -> Array:
    if saturate:
        low, high = _limits(to)
        ptx_type = np.iinfo(source.dtype)
        source = np.clip(source, max(low, int(ptx_type.min)), min(high, int(ptx_type.max)))
    return source.astype(np.int64).view(u64) if source.dtype.kind == "i" else source.astype(u64)


def convert(
    to: str, source_kind: str, rounding: str, flags: Sequence[str], count: int, bits: int, sources: list[Any]
) -> Array:
    """`bits`: width of the destination register, to which a signed integer result is extended."""
    relu, saturate, satfinite, ftz = (x in flags for x in ("relu", "sat", "satfinite", "ftz"))
    raw = [lanes_of(x, count) for x in sources]
    if to in _PAIR_OF and source_kind == "f32":
        ptx_type = _PAIR_OF[to]
        # The first source goes to the upper half; four-bit pairs share one byte.
        high, lo = (_narrow(_float_source(x, "f32"), ptx_type, rounding, relu, satfinite) for x in raw)
        return (high << u32({"f16": 16, "bf16": 16, "e2m1": 4}.get(ptx_type, 8))) | lo
    if source_kind in _PAIR_OF and to in ("f16x2", "bf16x2"):
        ptx_type, value = _PAIR_OF[source_kind], raw[0].astype(u32)
        step, element_mask = (4, 15) if ptx_type == "e2m1" else (8, 255)
        if ptx_type in ("f16", "bf16"):
            raise UnsupportedPTX(f"cvt.{to}.{source_kind}")
        pair = [N.TABLES[ptx_type][(value >> u32(step * i)) & u32(element_mask)] for i in (0, 1)]
        narrow = [_narrow(x, _PAIR_OF[to], "rn", relu, False) for x in pair]
        return (narrow[1] << u32(16)) | narrow[0]
    if to in _PAIR_OF and source_kind == "f16x2":
        ptx_type = _PAIR_OF[to]
        pair = [N.f16_to_f32(raw[0] >> u32(16 * i)) for i in (0, 1)]
        low, high = (_narrow(x, ptx_type, rounding, relu, satfinite) for x in pair)
        return (high << u32(8)) | low
    floats = ("f16", "bf16", "f32", "f64")
    if to in (*floats, "tf32") and source_kind in floats:
        value = _float_source(raw[0], source_kind)
        if rounding in _ROUND_TO_INTEGER:
            value = _ROUND_TO_INTEGER[rounding](value)
        if ftz:
            value = N.flush(value)
        if saturate:
            value = saturated(value)
        if to == "f64":
            return value.astype(np.float64).view(u64)
        integral = rounding in _ROUND_TO_INTEGER
        return _narrow(value, to, "rn" if integral or not rounding else rounding, relu, satfinite)
    if source_kind in floats:
        value = _float_source(raw[0], source_kind)
        return _to_integer(N.flush(value) if ftz else value, to, rounding, source_kind)
    source = _integer(raw[0], source_kind)
    if to in floats:
        if to == "f64":
            return source.astype(np.float64).view(u64)
        return _narrow(N.integer_to_f64(source), to, rounding, relu, False)
    result = _integer_to_integer(source, to, saturate)
    width = int(to[1:])
    if width < bits:
        narrow = result.astype(UINT[width])
        result = narrow.view(SIGNED[width // 8]).astype(np.int64).view(u64) if to[0] == "s" else narrow.astype(u64)
    return result
