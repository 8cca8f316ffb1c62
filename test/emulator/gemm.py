"""Builds operands, runs a GEMM of `emulator.kernels` in the emulator, compares with PyTorch bit for bit."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

import ptx_emulator
from support import oracle
from support.api_cases import case, check, execute, slack

BLOCK_SCALED = {
    "mxfp8": {"dtype": oracle.E4M3, "scale": oracle.E8M0, "vector": 32},
    "mxfp8 e5m2": {"dtype": oracle.E5M2, "scale": oracle.E8M0, "vector": 32},
    "mxfp4": {"dtype": oracle.FP4, "scale": oracle.E8M0, "vector": 32},
    "nvfp4": {"dtype": oracle.FP4, "scale": oracle.E4M3, "vector": 16},
}
FP8 = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}
_compiled: dict[str, Any] = {}  # the same kernel for all tests of a process


def dsl_tensor(x: torch.Tensor) -> Any:
    if x.dtype not in FP8:
        return from_dlpack(x, assumed_align=16)
    tensor = from_dlpack(x.view(torch.uint8), assumed_align=16)
    tensor.element_type = FP8[x.dtype]
    return tensor


def operand(rows: int, k: int, dtype: torch.dtype, k_major: bool = True) -> torch.Tensor:
    """Small integers: their products and sums are exact in every type."""
    shape = (rows, k) if k_major else (k, rows)
    x = torch.randint(-3, 4, shape).to(dtype)
    return x if k_major else x.t()


def run(
    kernel: Any,
    arch: str,
    mnk: tuple[int, int, int],
    dtype: torch.dtype,
    out: torch.dtype,
    majors: str = "kk",
    **options: Any,
) -> ptx_emulator.Report:
    m, n, k = mnk
    torch.manual_seed(0)
    a, b = operand(m, k, dtype, majors[0] == "k"), operand(n, k, dtype, majors[1] == "k")
    c = torch.zeros(m, n, dtype=out)
    arguments = [dsl_tensor(x) for x in (a, b, c)]
    key = repr((type(kernel), sorted(vars(kernel).items()), arch, mnk, dtype, out, majors))
    with ptx_emulator.emulate(arch, **options) as report:
        if key not in _compiled:
            _compiled[key] = cute.compile(kernel, *arguments)
        _compiled[key](*arguments)
    expected = (a.double() @ b.double().T).to(out)
    assert torch.equal(c, expected)
    return report


def block_scaled(kind: str) -> None:
    """A GEMM of the library on Blackwell, compared with a GEMM of its decoded operands."""
    problem = case("gemm_amax", 128, 128, 256, **BLOCK_SCALED[kind])
    execute(problem, "sm_100a")
    check(problem, slack=slack(problem))
