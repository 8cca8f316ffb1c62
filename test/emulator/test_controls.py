"""Faults planted in the emulator itself: products must notice each, or their passing would mean little."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cudnn_kernels.epilogue import StoreTile
from emulator.gemm import block_scaled
from ptx_emulator import EmulatorError, matrix, mma, tcgen05, tensormap, tma
from ptx_emulator.sync import Sync
from support import kernel_inputs


def product(arch: str, cluster: int, **options: Any) -> None:
    c = kernel_inputs.configuration((StoreTile("d", "bfloat16"),), cluster=(cluster, 1), epi_tile_n=32, **options)
    given, expected, _ = kernel_inputs.run(arch, c, 256, 64, 128)
    assert torch.equal(given["d"], expected["d"])


def hopper(cluster: int = 1) -> None:
    product(kernel_inputs.HOPPER, cluster, tile=(64, 64), pingpong=True)


def blackwell() -> None:
    product(kernel_inputs.BLACKWELL, 2, tile=(256, 64))


def unswizzled(address: Any, mode: int) -> Any:
    return address


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    if fault in ("TMA without swizzle", "no swizzle at all"):
        patch.setattr(tma.tensormap, "swizzle", unswizzled)
        patch.setattr(matrix, "swizzle", matrix.swizzle if fault.startswith("TMA") else unswizzled)
    elif fault == "descriptors without swizzle":
        patch.setattr(matrix, "swizzle", unswizzled)
    elif fault == "TMEM lane flipped":
        fragment = tcgen05.fragment
        patch.setattr(tcgen05, "fragment", lambda *a: (fragment(*a)[0] ^ 1, fragment(*a)[1]))
    elif fault == "scale factor id ignored":
        scale = tcgen05.TensorMemory.scale
        patch.setattr(tcgen05.TensorMemory, "scale", lambda s, op, b, a, r, number, per: scale(s, op, b, a, r, 0, per))
    elif fault == "E4M3 scales wrong":
        table = tcgen05.N.TABLES["ue4m3"].copy()
        table[56] *= 2
        patch.setitem(tcgen05.N.TABLES, "ue4m3", table)
    elif fault == "stmatrix transposed":
        store = mma.WarpMatrices.stmatrix
        patch.setattr(
            mma.WarpMatrices,
            "stmatrix",
            lambda s, site, m, form, bits, t, *rest: store(s, site, m, form, bits, not t, *rest),
        )
    elif fault == "multicast ignored":
        targets = tma.TMA._targets
        patch.setattr(tma.TMA, "_targets", lambda s, lane, place, mask: targets(s, lane, place, None))
    elif fault == "TMA completes no bytes":
        patch.setattr(Sync, "complete", lambda *a: None)
    elif fault == "accumulator rows swapped":
        patch.setitem(mma.ACCUMULATORS, 1, (3, 5, 1, 0, 2, 4))
    else:
        raise AssertionError(fault)


CONTROLS = [
    ("TMA without swizzle", hopper),
    ("TMA without swizzle", blackwell),
    ("descriptors without swizzle", hopper),
    ("descriptors without swizzle", blackwell),
    ("no swizzle at all", hopper),
    ("TMEM lane flipped", blackwell),
    ("scale factor id ignored", lambda: block_scaled("mxfp8")),
    ("E4M3 scales wrong", lambda: block_scaled("nvfp4")),
    ("stmatrix transposed", hopper),
    ("multicast ignored", lambda: hopper(2)),
    ("TMA completes no bytes", hopper),
    ("TMA completes no bytes", blackwell),
    ("accumulator rows swapped", hopper),
]


@pytest.mark.parametrize(("fault", "run"), CONTROLS, ids=[f"{i} {f}" for i, (f, _) in enumerate(CONTROLS)])
def test_planted_fault_is_noticed(fault: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    plant(monkeypatch, fault)
    with pytest.raises((AssertionError, EmulatorError)):
        run()


def test_swizzles_against_their_definition() -> None:
    """128-byte rows of eight: chunk c of row r lies at c ^ r (128B), at c ^ (r // 2) (64B), at c ^ (r // 4) (32B)."""
    for mode, width in ((tensormap.SW128, 128), (tensormap.SW64, 64), (tensormap.SW32, 32)):
        address = np.arange(0, 2048, 16)
        row, chunk = address // width, address % width // 16
        group = {128: 1, 64: 2, 32: 4}[width]
        expected = row * width + (chunk ^ (row // group % (width // 16))) * 16
        assert tensormap.swizzle(address, mode).tolist() == expected.tolist()
