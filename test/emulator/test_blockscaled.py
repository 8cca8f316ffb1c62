"""Block-scaled GEMMs; operands and factors are decoded by ml_dtypes and PyTorch, not by the emulator's tables."""

from __future__ import annotations

from typing import Any

import cutlass
import ml_dtypes
import numpy as np
import pytest
from cutlass import cute
from cutlass.cute.runtime import make_ptr

import ptx_emulator
from emulator.kernels.blockscaled_gemm import BlockScaledGemm

KINDS = {
    "mxfp8": (cutlass.Float8E4M3FN, ml_dtypes.float8_e4m3fn, cutlass.Float8E8M0FNU, ml_dtypes.float8_e8m0fnu, 32),
    "mxfp8 e5m2": (cutlass.Float8E5M2, ml_dtypes.float8_e5m2, cutlass.Float8E8M0FNU, ml_dtypes.float8_e8m0fnu, 32),
    "mxfp4": (cutlass.Float4E2M1FN, ml_dtypes.float4_e2m1fn, cutlass.Float8E8M0FNU, ml_dtypes.float8_e8m0fnu, 32),
    "nvfp4": (cutlass.Float4E2M1FN, ml_dtypes.float4_e2m1fn, cutlass.Float8E4M3FN, ml_dtypes.float8_e4m3fn, 16),
}


def interleaved(factors: np.ndarray) -> np.ndarray:
    """(rows, columns) factors in 128 x 4 blocks of 32 x 4 x 4."""
    rows, columns = factors.shape
    return np.ascontiguousarray(factors.reshape(rows // 128, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)).reshape(
        -1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_blockscaled(kind: str) -> None:
    element, dtype, scale, scale_dtype, vector = KINDS[kind]
    four_bit = element is cutlass.Float4E2M1FN
    m, n, k = 128, 256, 512 if four_bit else 256
    generator = np.random.default_rng(5)

    def operand(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        grid = np.array([0.5, -0.5, 1, -1, 2, 0, 1.5, -3], np.float32)
        values = generator.choice(grid, (rows, k)).astype(dtype)
        factors = np.exp2(generator.integers(-2, 3, (rows, k // vector))).astype(scale_dtype)
        codes = values.view(np.uint8)
        memory = codes[:, 0::2] | codes[:, 1::2] << 4 if four_bit else codes
        wide = values.astype(np.float64) * np.repeat(factors.astype(np.float64), vector, 1)
        return np.ascontiguousarray(memory), interleaved(factors.view(np.uint8)), wide, factors

    a, sfa, wide_a, _ = operand(m)
    b, sfb, wide_b, _ = operand(n)
    expected = (wide_a @ wide_b.T).astype(np.float32)
    c = np.zeros((m, n), np.float32)
    space = cute.AddressSpace.gmem
    arrays = [aligned(x) for x in (a, b, sfa, sfb)] + [c]
    kinds = (element, element, scale, scale, cutlass.Float32)
    pointers = [make_ptr(t, x.ctypes.data, space, assumed_align=16) for t, x in zip(kinds, arrays, strict=True)]
    with ptx_emulator.emulate("sm_100a"):
        kernel = compiled(BlockScaledGemm(element, scale, vector), kind, *pointers, (m, n, k))
    for options in ({"races": True}, {"scheduler": "lazy", "seed": 3}):
        c.fill(np.nan)
        with ptx_emulator.emulate("sm_100a", memory=arrays, **options):
            kernel(*pointers)
        np.testing.assert_array_equal(c, expected)


_kernels: dict[str, Any] = {}


def compiled(function: Any, kind: str, *arguments: Any) -> Any:
    """Once in a process: pointers are arguments of its calls."""
    if kind not in _kernels:
        _kernels[kind] = cute.compile(function, *arguments)
    return _kernels[kind]


def aligned(x: np.ndarray) -> np.ndarray:
    """A copy at an address that is a multiple of 128."""
    raw = np.zeros(x.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 128
    view = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view
