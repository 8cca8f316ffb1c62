"""Matrix operands in shared memory: descriptors, canonical layouts, sub-byte packing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ptx_emulator.errors import OutOfBounds, UnsupportedPTX
from ptx_emulator.memory import Memory
from ptx_emulator.numerics import ELEMENT_BYTES, UNSIGNED, Array, to_f32
from ptx_emulator.tensormap import NONE, SW32, SW64, SW128, SW128_ATOM32, swizzle

Touch = Callable[[Array], None]  # reports the numbers of 16-byte chunks to the race detector


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
    return read_all_rows(memory, [(block, descriptor)], rows, chunks, site, [touch], k_major)[0]


def read_all_rows(
    memory: Memory,
    sources: Sequence[tuple[int, Descriptor]],
    rows: int,
    chunks: int,
    site: int,
    touches: Sequence[Touch],
    k_major: bool,
) -> Array:
    """The same of several operands, (operands, rows, chunks); `sources`: the block and the descriptor of each."""
    first = sources[0][1]
    if any(d.leading != first.leading or d.stride != first.stride or d.mode != first.mode for _, d in sources):
        each = zip(sources, touches, strict=True)
        return np.concatenate([read_all_rows(memory, [s], rows, chunks, site, [t], k_major) for s, t in each])
    offsets = chunk_offsets(rows, chunks, k_major, first.mode, first.leading, first.stride)
    starts = np.array([descriptor.start for _, descriptor in sources])
    addresses = swizzle(starts[:, None, None] + offsets, first.mode)
    end = int(addresses.max()) + 16
    if end > memory.shared_end:
        raise OutOfBounds(f"matrix operand reaches shared +{end:#x} of {memory.shared_end:#x}", [], site)
    addresses += (np.array([block for block, _ in sources]) << 24)[:, None, None]
    addresses >>= 4
    for each, touch in zip(addresses, touches, strict=True):
        touch(each.reshape(-1))
    return memory.chunks[addresses]


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
    return read_all(memory, [(block, descriptor)], rows, k, ptx_type, k_major, site, [touch], packed_fp4)[0]


def read_all(
    memory: Memory,
    sources: Sequence[tuple[int, Descriptor]],
    rows: int,
    k: int,
    ptx_type: str,
    k_major: bool,
    site: int,
    touches: Sequence[Touch],
    packed_fp4: bool = False,
) -> Array:
    """The same of several operands: (operands, rows, k)."""
    element = ELEMENT_BYTES[ptx_type]
    rows, extent = (rows, k) if k_major else (k, rows)
    chunks = extent // 32 if packed_fp4 else extent * element // 16
    data = read_all_rows(memory, sources, rows, chunks, site, touches, k_major)
    memory.report._count_bytes("shared matrix operands", data.nbytes)
    if packed_fp4:
        raw = data.view(np.uint8)
        codes = np.stack([raw & 15, raw >> 4], -1)
    elif ptx_type in ("e2m1", "e2m3", "e3m2"):
        codes = unpack_padded(data.reshape(-1, chunks), 4 if ptx_type == "e2m1" else 6)
    else:
        codes = data.view(UNSIGNED[element])
    values = to_f32(codes, ptx_type).reshape(len(sources), rows, extent)
    return values if k_major else values.swapaxes(1, 2)
