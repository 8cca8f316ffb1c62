"""Tensor maps of test cases, and their 128 bytes as the driver encodes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Element types: name -> (number in the driver's interface, code in the map, bytes).
TYPES = {
    "u8": (0, 0, 1),
    "u16": (1, 1, 2),
    "u32": (2, 2, 4),
    "s32": (3, 3, 4),
    "u64": (4, 4, 8),
    "s64": (5, 5, 8),
    "f16": (6, 6, 2),
    "f32": (7, 7, 4),
    "f64": (8, 9, 8),
    "bf16": (9, 10, 2),
    "f32.ftz": (10, 8, 4),
    "tf32": (11, 7, 4),
    "tf32.ftz": (12, 8, 4),
}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}
NAN_FILL, ROUND_TO_TF32 = 1 << 15, 1 << 16


@dataclass(frozen=True)
class Map:
    """A tiled tensor map. `sizes` and `box` in elements, innermost first; `strides` in bytes, of dimension 1 on; the
    tensor begins `offset` bytes into the case's buffer number `buffer` (inputs come first), or, if that is negative, at
    the address `offset`."""

    buffer: int
    kind: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0
    promotion: int = 0
    nan_fill: bool = False
    steps: tuple[int, ...] = ()

    @property
    def element_strides(self) -> tuple[int, ...]:
        return self.steps or (1,) * len(self.sizes)

    @property
    def box_bytes(self) -> int:
        """What a copy moves: with element strides, the elements that are hit."""
        hit = [-(-b // s) for b, s in zip(self.box, self.element_strides, strict=True)]
        return int(np.prod(hit)) * TYPES[self.kind][2]


def base(m: Map, buffers: Sequence[int]) -> int:
    """The tensor's address, given those of the buffers."""
    return m.offset if m.buffer < 0 else buffers[m.buffer] + m.offset


def encode(m: Map, address: int) -> bytes:
    """The 128 bytes for a tensor at `address`. The second half is the driver's own: the bytes of the box and the
    period of the swizzle."""
    raw = np.zeros(32, np.uint32)
    code, rank = TYPES[m.kind][1], len(m.sizes)
    raw[0:2] = address & 0xFFFFFFFF, address >> 32
    raw[2] = (
        (rank - 1) << 4
        | code << 7
        | SWIZZLES[m.swizzle] << 13
        | NAN_FILL * m.nan_fill
        | ROUND_TO_TF32 * m.kind.startswith("tf32")
        | PROMOTIONS[m.promotion] << 17
    )
    raw[3 : 2 + rank] = [s // 16 & 0xFFFFFFFF for s in m.strides]
    raw[7] = sum((s >> 36) << 4 * i for i, s in enumerate(m.strides))
    raw[8 : 8 + rank] = [(s - 1) & 0xFFFFFFFF for s in m.sizes]
    raw[13] = sum((s - 1) << 3 * i for i, s in enumerate(m.element_strides))
    raw.view(np.uint8)[55 : 55 + rank] = [b - 1 for b in m.box]
    raw[16], raw[18] = m.box_bytes, 8 * m.swizzle or 16
    return raw.tobytes()
