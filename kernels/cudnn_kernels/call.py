"""What a GEMM kernel is called with, on any architecture."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32
from cutlass.runtime import make_fake_stream

from cudnn_kernels.configuration import SHARED_MEMORY, GemmConfiguration
from cudnn_kernels.epilogue.operation import Epilogue, Sizes
from cudnn_kernels.types import fake_operand, fake_scales

BARRIERS = 2048  # bytes set aside for them and for alignment


def stand_ins(configuration: GemmConfiguration, epilogue: Epilogue) -> tuple[Any, ...]:
    """For A, B, their factors where the configuration has some, the schedule's arguments, the epilogue's, the number of
    multiprocessors to use and the stream. Sizes and strides are known when the kernel is called.
    """
    c = configuration
    m, n, k, batch = (cute.sym_int() for _ in range(4))
    experts = batch if c.schedule.count == 0 else cute.sym_int()
    return (
        fake_operand(c.a, m, k, batch, c.a_major),
        fake_operand(c.b, n, k, experts, c.b_major),
        *((fake_scales(c.scale), fake_scales(c.scale)) if c.scale else ()),
        *c.schedule.arguments(),
        *epilogue.arguments(Sizes(m, n, batch)),
        Int32(0),
        make_fake_stream(),
    )


def ring_stages(taken: int, stage: int) -> int:
    """Buffers of ``stage`` bytes that fit beside the epilogue, which has ``taken`` bytes, at most eight.

    Raises:
        ValueError: not even two do, and a mainloop holds one while it waits for the next.
    """
    free = SHARED_MEMORY - taken - BARRIERS
    if free < 2 * stage:
        raise ValueError(f"two k tiles of {stage} bytes do not fit into {free} beside the epilogue: take smaller parts")
    return min(8, free // stage)
