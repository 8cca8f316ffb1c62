"""Runs a case in the emulator."""

from __future__ import annotations

import numpy as np

import ptx_emulator
from calibration.case import Case
from calibration.maps import base, encode
from ptx_emulator.numerics import Array


def aligned(array: Array) -> Array:
    """A copy whose address is a multiple of 256, as those of the GPU's allocations are."""
    memory = np.zeros(array.nbytes + 256, np.uint8)
    start = -memory.ctypes.data % 256
    copy = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array.reshape(-1)
    return copy


def run_emulated(case: Case, arch: str, **options: object) -> list[Array]:
    """The outputs, by the emulator with race detection. `options` are those of `ptx_emulator.run_ptx`."""
    buffers = [aligned(x) for x in (*case.inputs, *case.outputs)]
    addresses = [x.ctypes.data for x in buffers]
    maps = [encode(m, base(m, addresses)) for m in case.maps]
    ptx_emulator.run_ptx(
        case.text(arch),
        "k",
        case.grid,
        case.block,
        [*buffers, *maps],
        cluster=case.cluster,
        **{"races": True, **options},  # type: ignore[arg-type]
    )
    return buffers[len(case.inputs) :]
