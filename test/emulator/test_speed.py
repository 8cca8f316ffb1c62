"""Cost of emulating whole GEMMs: Python calls, whose number is the same on any machine; with ``--full`` CPU time,
with a limit of three times the target on one core.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest

import ptx_emulator
from cudnn_kernels.epilogue import StoreTile
from support import kernel_inputs

SLACK = 3
CALLS = 100_000


def timed(arch: str, size: int) -> Callable[[bool, int], float]:
    """Seconds of a GEMM of bf16: the fastest of some runs."""
    c = kernel_inputs.configuration((StoreTile("d", "bfloat16"),))
    kernel = kernel_inputs.compiled(arch, c)
    tensors = kernel_inputs.operands(c, size, size, size, 1) | kernel_inputs.arguments(c.epilogue, size, size, 1)

    def seconds(races: bool, runs: int) -> float:
        found = []
        for _ in range(runs):
            start = time.process_time()
            with ptx_emulator.emulate(arch, races=races):
                kernel_inputs.call(kernel, c, tensors, 132)
            found.append(time.process_time() - start)
        return min(found)

    return seconds


@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
def test_256_cubed_makes_few_calls_and_with_races_not_twice_as_many(arch: str) -> None:
    c = kernel_inputs.configuration((StoreTile("d", "bfloat16"),))
    kernel = kernel_inputs.compiled(arch, c)
    tensors = kernel_inputs.operands(c, 256, 256, 256, 1) | kernel_inputs.arguments(c.epilogue, 256, 256, 1)

    def calls(races: bool) -> int:
        count, before = 0, sys.getprofile()

        def profile(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        with ptx_emulator.emulate(arch, races=races):
            kernel_inputs.call(kernel, c, tensors, 132)  # what the first launch prepares
            sys.setprofile(profile)
            try:
                kernel_inputs.call(kernel, c, tensors, 132)
            finally:
                sys.setprofile(before)
        return count

    plain = calls(False)
    assert plain < CALLS
    assert calls(True) < 2 * plain


@pytest.mark.full
@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
def test_256_cubed_takes_a_fifth_of_a_second_and_five_times_that_with_races(arch: str) -> None:
    seconds = timed(arch, 256)
    plain = seconds(False, 3)
    assert plain < SLACK * 0.2
    assert seconds(True, 3) < 5 * plain


@pytest.mark.full
@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
def test_1024_cubed_takes_five_seconds(arch: str) -> None:
    assert timed(arch, 1024)(False, 1) < SLACK * 5
