"""Runs PTX, and kernels of the CuTe DSL, on NumPy: every thread of the grid, with faults and races reported.

    import ptx_emulator

    with ptx_emulator.emulate("sm_100a", races=True) as report:
        compiled = cute.compile(kernel, a, b)   # CPU tensors
        compiled(a, b)
    print(report)

It knows PTX and the DSL's runtime interface, and needs neither a GPU nor a CUDA driver. It counts, it does not time.
"""

from ptx_emulator.api import emulate, run
from ptx_emulator.errors import (
    BarrierError,
    CollectiveError,
    Deadlock,
    EmulatorError,
    Fault,
    Misaligned,
    OutOfBounds,
    RaceError,
    TensorMemoryError,
    UninitializedRead,
    UnsupportedPTX,
)
from ptx_emulator.report import Launch, Report

__all__ = [
    "BarrierError",
    "CollectiveError",
    "Deadlock",
    "EmulatorError",
    "Fault",
    "Launch",
    "Misaligned",
    "OutOfBounds",
    "RaceError",
    "Report",
    "TensorMemoryError",
    "UninitializedRead",
    "UnsupportedPTX",
    "emulate",
    "run",
]
