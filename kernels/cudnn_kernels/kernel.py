"""What the classes of kernels share: a configuration, and the arguments of a call by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.naming import name
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

    def begin_drawing(self, counter: Any, stream: Any) -> cute.Tensor:
        """A counter of what CTAs draw, in memory at a pointer, set to 0 by a kernel of its own."""
        drawn = cute.make_tensor(cute.recast_ptr(counter, dtype=Int32), cute.make_layout(1))
        self.restart(drawn).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)
        return drawn

    @cute.kernel
    def restart(self, drawn: cute.Tensor) -> None:
        """One thread: nothing was drawn."""
        drawn[0] = Int32(0)

    name(restart, "cudnn_restart")


def count_up(drawn: cute.Tensor) -> Int32:
    """One thread: how much was drawn before."""
    return cute.arch.inline_ptx(
        "atom.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[drawn.iterator.toint()]
    )


def here() -> tuple[Int32, Int32]:
    """The number of the thread in its CTA, and of the CTA, along the first dimension."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    return thread, block
