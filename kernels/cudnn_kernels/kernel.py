"""The base class of kernels: a configuration, and the arguments of a call by name. Thread and atomic helpers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cudnn_kernels.naming import set_kernel_name
from cudnn_kernels.signature import bind


class Kernel:
    """A kernel, or several that one call launches, for a configuration."""

    def __init__(self, configuration: Any) -> None:
        self.c = configuration

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """Takes the arguments that the configuration's signature lists."""
        self.launch(bind(self.c.slots(), arguments))

    def launch(self, arguments: Mapping[str, Any]) -> None:
        """Launches the kernels on arguments by name."""
        raise NotImplementedError

    def reset_tile_counter(self, counter: Any, stream: Any) -> cute.Tensor:
        """The tile counter (semaphore) of a dynamic persistent scheduler, zeroed by a preceding kernel."""
        semaphore = cute.make_tensor(cute.recast_ptr(counter, dtype=Int32), cute.make_layout(1))
        self.zero_tile_counter(semaphore).launch(grid=[1, 1, 1], block=[1, 1, 1], stream=stream)
        return semaphore

    @cute.kernel
    def zero_tile_counter(self, semaphore: cute.Tensor) -> None:
        """One thread: zeroes the counter."""
        semaphore[0] = Int32(0)

    set_kernel_name(zero_tile_counter, "cudnn_restart")


def atomic_inc(counter: cute.Tensor) -> Int32:
    """One thread: increments a counter in global memory. Returns its old value."""
    return cute.arch.inline_ptx(
        "atom.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[counter.iterator.toint()]
    )


def thread_block_idx() -> tuple[Int32, Int32]:
    """threadIdx.x and blockIdx.x."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    return thread, block
