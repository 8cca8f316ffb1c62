"""What profilers and disassemblers call a kernel."""

from __future__ import annotations

from typing import Any


def name(kernel: Any, text: str) -> None:
    """Names a ``cute.kernel``: ``text``, "cutlass" and its number in the module, not 200 characters on its arguments.

    "cutlass" has to be there: ptxas compiles kernels with that word in their names in another way. Without it,
    Blackwell's GEMMs take other numbers of registers, and what was measured on Hopper was measured with it.
    """
    kernel.set_name_prefix(text, keep_mangled_name=False)
