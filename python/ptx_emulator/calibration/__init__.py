"""Microkernels that run in the emulator and on a GPU, and results of GPUs to hold the emulator to.

    python -m ptx_emulator.calibration                       # the emulator against the file of an H200's results
    python -m ptx_emulator.calibration --gpu --write FILE    # this machine's GPU; needs cuda-bindings

It depends on nothing but numpy.
"""

from ptx_emulator.calibration.case import Case, Tolerance
from ptx_emulator.calibration.cases import cases
from ptx_emulator.calibration.emulated import run_emulated
from ptx_emulator.calibration.golden import (
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
from ptx_emulator.calibration.gpu import Device, GPUError, run_all, run_on_gpu

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
