"""What profilers and disassemblers call a kernel."""

from __future__ import annotations

from typing import Any


def name(kernel: Any, text: str) -> None:
    """Names a ``cute.kernel``: ``text`` and its number in the module, instead of 200 characters on its arguments."""
    kernel.set_name_prefix(text, remove_cutlass_symbol=True, keep_mangled_name=False)
