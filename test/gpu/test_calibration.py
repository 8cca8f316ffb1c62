"""The GPU's own results against those kept of an H200: other chips of the architecture must do the same."""

from __future__ import annotations

import numpy as np
import pytest

import calibration
from calibration import Case
from emulator.golden.kernels import FILE, KERNELS, Kernel

ARCH = "sm_90a"
CASES = calibration.cases(ARCH)
Results = tuple[dict[str, list[np.ndarray]], dict[str, str]]


@pytest.fixture(scope="module")
def results() -> Results:
    """All cases, each in a separate process."""
    if calibration.Device().arch != ARCH:
        pytest.skip(f"results are kept for {ARCH} only")
    outputs, errors, _ = calibration.run_all(CASES, ARCH)
    return outputs, errors


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_the_chip_does_what_it_did(case: Case, results: Results) -> None:
    outputs, errors = results
    assert case.id not in errors, errors[case.id]
    _, kept = calibration.load(calibration.path(ARCH)).outputs[case.id]
    actual = calibration.compare(case, kept, outputs[case.id])
    assert not actual.unequal, str(actual)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.id)
def test_kernels_do_what_they_did(kernel: Kernel, results: Results) -> None:
    _, kept = calibration.load(FILE).outputs[kernel.id]
    assert not calibration.compare(kernel, kept, kernel.output("cuda")).unequal
