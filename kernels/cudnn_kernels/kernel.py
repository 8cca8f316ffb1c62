"""What the classes of kernels share: a configuration, and the arguments of a call by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.signature import bind


class Kernel:
    """The kernels of one call, for a configuration."""

    def __init__(self, configuration: Any) -> None:
        self.c = configuration

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        self.launch(bind(self.c.slots(), arguments))

    def launch(self, given: Mapping[str, Any]) -> None:
        """Launches the kernels on arguments by name."""
        raise NotImplementedError


def here() -> tuple[Int32, Int32]:
    """The number of the thread in its CTA, and of the CTA, along the first dimension."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    return thread, block
