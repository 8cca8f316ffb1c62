"""Microkernels that run in the emulator and on a GPU, and results of GPUs to hold the emulator to.

    PYTHONPATH=test python -m calibration                       # the emulator against the file of an H200's results
    PYTHONPATH=test python -m calibration --gpu --write FILE    # this machine's GPU; needs cuda-bindings

It depends on nothing but numpy.
"""

from calibration.case import Case, Tolerance
from calibration.cases import cases
from calibration.emulated import run_emulated
from calibration.golden import (
    Difference,
    Golden,
    Kept,
    collect,
    compare,
    difference,
    keep,
    load,
    path,
    save,
)
from calibration.gpu import Device, GPUError, run_all, run_on_gpu

__all__ = [
    "Case",
    "Device",
    "Difference",
    "GPUError",
    "Golden",
    "Kept",
    "Tolerance",
    "cases",
    "collect",
    "compare",
    "difference",
    "keep",
    "load",
    "path",
    "run_all",
    "run_emulated",
    "run_on_gpu",
    "save",
]
