"""Matrix operands in shared memory: descriptors, canonical layouts, sub-byte packing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx_emulator.errors import OutOfBounds, UnsupportedPTX
from ptx_emulator.memory import Memory
from ptx_emulator.numerics import ELEMENT_BYTES, UNSIGNED, Array, to_f32
from ptx_emulator.tensormap import NONE, SW32, SW64, SW128, SW128_ATOM32, swizzle

Touch = Callable[[Array], None]  # reports the addresses of 16-byte chunks to the race detector


@dataclass(frozen=True)
class Descriptor:
    start: int
    leading: int
    stride: int
    mode: int


_WGMMA_MODES = {0: NONE, 1: SW128, 2: SW64, 3: SW32}
_TCGEN05_MODES = {0: NONE, 1: SW128_ATOM32, 2: SW128, 4: SW64, 6: SW32}


def _fields(raw: int) -> tuple[int, int, int]:
    return (raw & 0x3FFF) << 4, (raw >> 16 & 0x3FFF) << 4, (raw >> 32 & 0x3FFF) << 4


def wgmma_descriptor(raw: int) -> Descriptor:
    unknown = raw & ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62)
    if unknown:
        raise UnsupportedPTX(f"wgmma descriptor {raw:#018x}: unknown bits {unknown:#x}")
    return Descriptor(*_fields(raw), _WGMMA_MODES[raw >> 62])


def tcgen05_descriptor(raw: int) -> Descriptor:
    unknown = raw & ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 1 << 46 | 7 << 61)
    if unknown or raw >> 61 not in _TCGEN05_MODES:
        raise UnsupportedPTX(f"tcgen05 descriptor {raw:#018x}: unknown bits {unknown:#x}, swizzle {raw >> 61}")
    return Descriptor(*_fields(raw), _TCGEN05_MODES[raw >> 61])


@lru_cache(maxsize=512)
def chunk_offsets(rows: int, chunks: int, k_major: bool, mode: int, leading: int, stride: int) -> Array:
    """Byte offsets of 16-byte chunks before the swizzle.

    K-major: (rows, chunks along K); MN-major: (K, chunks along MN), `rows` being the extent of K.
    """
    row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None, :]
    if k_major:
        if mode == NONE:
            return (row % 8) * 16 + (row // 8) * stride + chunk * leading
        if mode == SW128_ATOM32:
            raise UnsupportedPTX("K-major operand with 32-byte swizzle atoms")
        width = 16 << mode
        if chunks * 16 > width:
            raise UnsupportedPTX("operand wider than its swizzle")
        return (row % 8) * width + (row // 8) * stride + chunk * 16
    if mode == NONE:
        return (row % 8) * 16 + (row // 8) * leading + chunk * stride
    width, repeat = (128, 4) if mode == SW128_ATOM32 else (16 << mode, 8)
    per = width // 16
    return (chunk % per) * 16 + (chunk // per) * leading + (row % repeat) * width + (row // repeat) * stride


def unpack_padded(chunks: Array, bits: int) -> Array:
    """kind::f8f6f4: 16 elements of 4 or 6 bits in the first bytes of each 16-byte chunk."""
    raw = chunks.view(np.uint8).reshape(-1, 16)
    stream = np.unpackbits(raw[:, : 2 * bits], axis=1, bitorder="little").reshape(-1, 16, bits)
    return (stream << np.arange(bits, dtype=np.uint8)).sum(2).astype(np.uint8).reshape(chunks.shape[0], -1)


def read_rows(
    memory: Memory,
    block: int,
    descriptor: Descriptor,
    rows: int,
    chunks: int,
    site: int,
    touch: Touch,
    k_major: bool = True,
) -> Array:
    """(rows, chunks of 16 bytes); `touch` gets their addresses."""
    offsets = chunk_offsets(rows, chunks, k_major, descriptor.mode, descriptor.leading, descriptor.stride)
    addresses = swizzle(descriptor.start + offsets, descriptor.mode)
    if int(addresses.max()) + 16 > memory.shared_end:
        raise OutOfBounds(
            f"matrix operand reaches shared +{int(addresses.max()) + 16:#x} of {memory.shared_end:#x}", [], site
        )
    addresses = addresses + (block << 24)
    touch(addresses.reshape(-1))
    return np.ascontiguousarray(memory.chunks[addresses >> 4])


def read(
    memory: Memory,
    block: int,
    descriptor: Descriptor,
    rows: int,
    k: int,
    ptx_type: str,
    k_major: bool,
    site: int,
    touch: Touch,
    packed_fp4: bool = False,
) -> Array:
    """The (rows, k) operand as float32."""
    element = ELEMENT_BYTES[ptx_type]
    rows, extent = (rows, k) if k_major else (k, rows)
    chunks = extent // 32 if packed_fp4 else extent * element // 16
    data = read_rows(memory, block, descriptor, rows, chunks, site, touch, k_major)
    memory.report.count_bytes("shared matrix operands", data.nbytes)
    if packed_fp4:
        raw = data.view(np.uint8)
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(len(data), -1)
    elif ptx_type in ("e2m1", "e2m3", "e3m2"):
        codes = unpack_padded(data, 4 if ptx_type == "e2m1" else 6)
    else:
        codes = data.view(UNSIGNED[element])
    values = to_f32(codes, ptx_type)
    return values if k_major else values.T
