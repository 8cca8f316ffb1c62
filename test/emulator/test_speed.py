"""Processor time of whole GEMMs, at three times what is aimed at on one core; with races, the ratio itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cutlass import cute

import ptx_emulator
from emulator import gemm
from emulator.kernels.blackwell_gemm import BlackwellGemm
from emulator.kernels.hopper_gemm import HopperGemm
from support.selection import brief

GEMMS = [("sm_90a", HopperGemm, (64, 128, 64), torch.bfloat16), ("sm_100a", BlackwellGemm, (128, 128), torch.float32)]
SLACK = 3


def timed(arch: str, kernel: Any, size: int, tile: Any, out: torch.dtype) -> Callable[[bool, int], float]:
    """Seconds of a GEMM of bf16 small integers: the fastest of some runs."""
    a, b = (gemm.operand(size, size, torch.bfloat16) for _ in range(2))
    arguments = [gemm.dsl_tensor(x) for x in (a, b, torch.zeros(size, size, dtype=out))]
    with ptx_emulator.emulate(arch):
        compiled = cute.compile(kernel(tile), *arguments)

    def seconds(races: bool, runs: int) -> float:
        found = []
        for _ in range(runs):
            start = time.process_time()
            with ptx_emulator.emulate(arch, races=races):
                compiled(*arguments)
            found.append(time.process_time() - start)
        return min(found)

    return seconds


@pytest.mark.parametrize(("arch", "kernel", "tile", "out"), GEMMS, ids=["hopper", "blackwell"])
def test_256_cubed_takes_a_fifth_of_a_second_and_five_times_that_with_races(
    arch: str, kernel: Any, tile: Any, out: torch.dtype
) -> None:
    seconds = timed(arch, kernel, 256, tile, out)
    plain = seconds(False, 3)
    assert plain < SLACK * 0.2
    assert seconds(True, 3) < 5 * plain


@pytest.mark.parametrize(("arch", "kernel", "tile", "out"), brief(GEMMS, 1))
def test_1024_cubed_takes_five_seconds(arch: str, kernel: Any, tile: Any, out: torch.dtype) -> None:
    assert timed(arch, kernel, 1024, tile, out)(False, 1) < SLACK * 5
