"""The 128-byte tensor map (CUtensorMap). Its bits are undocumented; these were recovered from what the CuTe DSL and the
driver write.

Little-endian 64-bit words w0..w15; a bit that is not in this table is an error:
  w0 address
  w1 4:7 rank - 1, 7:11 element type, 13:15 swizzle, 15 NaN fill, 16 tf32 rounding, 17:19 L2 promotion, 19 swizzle
     atoms of 32 bytes, 21:23 hints
  w1 32:64, w2, w3 low: strides of dimensions 1..4 in 16 bytes; their upper four bits in w3 32:48
  w4, w5, w6 low: sizes - 1
  w6 32:47: element strides - 1, three bits each
  bytes 55..59: box sizes - 1
The other half is the driver's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ptx_emulator.errors import UnsupportedPTX
from ptx_emulator.numerics import Array

# Code: (bytes per element, PTX type used by reductions)
ELEMENTS = {
    0: (1, "u8"),
    1: (2, "u16"),
    2: (4, "u32"),
    3: (4, "s32"),
    4: (8, "u64"),
    5: (8, "s64"),
    6: (2, "f16"),
    7: (4, "f32"),
    8: (4, "f32"),
    9: (8, "f64"),
    10: (2, "bf16"),
}
PACKED_FP4 = 11
ADDRESSES = (1 << 63) - 1  # of the host's
_KNOWN_FLAGS = 0x70 | 0x780 | 0x6000 | 1 << 16 | 3 << 17 | 1 << 19 | 3 << 21 | 1 << 1
# What tensormap.replace can change: byte offset, bytes of each ordinal, encoding of the value.
FIELDS: dict[str, tuple[int, int, Callable[[int], int]]] = {
    "global_address": (0, 8, lambda v: v),
    "global_dim": (32, 4, lambda v: (v - 1) & 0xFFFFFFFF),
    "global_stride": (12, 4, lambda v: v >> 4),
    "box_dim": (55, 1, lambda v: (v - 1) & 0xFF),
}

# Swizzle modes: XOR of address bits with higher ones.
NONE, SW32, SW64, SW128, SW128_ATOM32 = 0, 1, 2, 3, 4
SPAN = {SW32: 32, SW64: 64, SW128: 128, SW128_ATOM32: 128}  # bytes from one row of a tile to the next


def swizzle(address: Array, mode: int) -> Array:
    """The swizzled address of the byte at `address` of an unswizzled tile."""
    if mode == NONE:
        return address
    if mode == SW128_ATOM32:
        return address ^ (((address >> 7) & 3) << 5)
    return address ^ (((address >> 7) & ((1 << mode) - 1)) << 4)


@dataclass(frozen=True)
class TensorMap:
    address: int
    element: int
    element_type: str
    swizzle: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    packed: bool
    tf32: bool

    @property
    def box_bytes(self) -> int:
        return int(np.prod(self.box)) * self.element

    def at(self, coordinates: Sequence[int]) -> int:
        """The address of an element. Addresses wrap around, so that strides can be negative."""
        return (self.address + sum(c * s for c, s in zip(coordinates, self.strides, strict=True))) & ADDRESSES

    @cached_property
    def tile_offsets(self) -> Array:
        """Offsets of a box's 16-byte chunks in its tile, before the swizzle: a row takes its whole span."""
        row = self.box[0] * self.element
        rows = np.arange(self.box_bytes // row)[:, None] * SPAN.get(self.swizzle, row)
        return (rows + np.arange(0, row, 16)).reshape(-1)


@lru_cache(maxsize=256)
def decode(raw: bytes) -> TensorMap:
    words = np.frombuffer(raw, np.uint64)
    halves, low = np.frombuffer(raw, np.uint32), int(words[1]) & 0xFFFFFFFF
    if low & ~_KNOWN_FLAGS:
        raise UnsupportedPTX(f"tensor map flags {low:#010x}: unknown bits {low & ~_KNOWN_FLAGS:#x}")
    if halves[13] & 0x7FFF:
        raise UnsupportedPTX("tensor map with element strides")
    rank, code, mode = (low >> 4 & 7) + 1, low >> 7 & 15, low >> 13 & 3
    if code not in ELEMENTS and code != PACKED_FP4:
        raise UnsupportedPTX(f"tensor map element type {code}")
    if low >> 19 & 1:
        if mode != SW128:
            raise UnsupportedPTX(f"tensor map with 32-byte atoms and swizzle {mode}")
        mode = SW128_ATOM32
    packed = code == PACKED_FP4
    element, element_type = (1, "u8") if packed else ELEMENTS[code]
    dims = [int(x) + 1 for x in halves[8 : 8 + rank]]
    box = [raw[55 + i] + 1 for i in range(rank)]
    if packed:  # sizes and boxes count 4-bit elements, strides count bytes
        dims[0], box[0] = (dims[0] + 1) // 2, box[0] // 2
    strides = [
        element,
        *((int(x) | (int(halves[7]) >> 4 * i & 15) << 32) * 16 for i, x in enumerate(halves[3 : 2 + rank])),
    ]
    if box[0] * element > SPAN.get(mode, 1 << 30) or box[0] * element % 16:
        raise UnsupportedPTX(f"tensor map box row of {box[0] * element} bytes with swizzle mode {mode}")
    return TensorMap(
        int(words[0]), element, element_type, mode, tuple(dims), tuple(strides), tuple(box), packed, bool(low >> 16 & 1)
    )


def last_element(raw: bytes) -> int | None:
    """The address of the last element that a tensor map reaches; None if the bytes are no valid map."""
    try:
        found = decode(raw) if len(raw) == 128 else None
    except UnsupportedPTX:
        return None
    return found and found.at([d - 1 for d in found.dims])
