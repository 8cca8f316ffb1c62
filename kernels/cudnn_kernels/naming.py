"""Kernel names in profilers and disassemblies."""

from __future__ import annotations

from typing import Any


def set_kernel_name(kernel: Any, text: str) -> None:
    """Names a ``cute.kernel``: ``text``, "cutlass" and an index, not 200 characters of mangled argument types.

    "cutlass" must be part of the name: ptxas compiles kernels with that word in their names differently. Without it,
    Blackwell's GEMMs use other numbers of registers, and the measurements on Hopper were made with it.
    """
    kernel.set_name_prefix(text, keep_mangled_name=False)
