"""Runs PTX, and kernels of the CuTe DSL, on NumPy: every thread of the grid, with faults and races reported.

    import ptx_emulator

    with ptx_emulator.emulate("sm_100a", races=True) as report:
        compiled = cute.compile(kernel, a, b)   # CPU tensors
        compiled(a, b)
    print(report)

It knows PTX and the DSL's runtime interface, and needs neither a GPU nor a CUDA driver. It counts, it does not time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptx_emulator.api import emulate as emulate
    from ptx_emulator.api import run as run
    from ptx_emulator.api import run_ptx as run_ptx
    from ptx_emulator.api import run_triton as run_triton
    from ptx_emulator.errors import BarrierError as BarrierError
    from ptx_emulator.errors import CollectiveError as CollectiveError
    from ptx_emulator.errors import Deadlock as Deadlock
    from ptx_emulator.errors import EmulatorError as EmulatorError
    from ptx_emulator.errors import Fault as Fault
    from ptx_emulator.errors import Misaligned as Misaligned
    from ptx_emulator.errors import OutOfBounds as OutOfBounds
    from ptx_emulator.errors import RaceError as RaceError
    from ptx_emulator.errors import TensorMemoryError as TensorMemoryError
    from ptx_emulator.errors import UninitializedRead as UninitializedRead
    from ptx_emulator.errors import UnsupportedPTX as UnsupportedPTX
    from ptx_emulator.report import Finding as Finding
    from ptx_emulator.report import Instruction as Instruction
    from ptx_emulator.report import Launch as Launch
    from ptx_emulator.report import Report as Report
    from ptx_emulator.timeline import Timeline as Timeline

# Modules are loaded on first use: pytest imports this package at each start, for the plugin `ptx_emulator.testing`.
_MODULES = {
    "ptx_emulator.api": ("emulate", "run", "run_ptx", "run_triton"),
    "ptx_emulator.errors": (
        "BarrierError",
        "CollectiveError",
        "Deadlock",
        "EmulatorError",
        "Fault",
        "Misaligned",
        "OutOfBounds",
        "RaceError",
        "TensorMemoryError",
        "UninitializedRead",
        "UnsupportedPTX",
    ),
    "ptx_emulator.report": ("Finding", "Instruction", "Launch", "Report"),
    "ptx_emulator.timeline": ("Timeline",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)

if not TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'ptx_emulator' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
