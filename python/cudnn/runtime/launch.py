"""Compiled kernels: for which architecture, from where, and how they are called."""

from cudnn.runtime.architecture import device_architecture, pick, raw_stream
from cudnn.runtime.emulation import compile_for_emulation, emulate, emulated_architecture, emulation, log_reference_runs
from cudnn.runtime.kernels import kernel

__all__ = [
    "compile_for_emulation",
    "device_architecture",
    "emulate",
    "emulated_architecture",
    "emulation",
    "kernel",
    "log_reference_runs",
    "pick",
    "raw_stream",
]
