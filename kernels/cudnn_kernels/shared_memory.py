"""How many buffers of operands fit into shared memory."""

from __future__ import annotations

from cudnn_kernels.configuration import SHARED_MEMORY

BARRIERS = 2048  # bytes set aside for them and for alignment


def ring_stages(taken: int, stage: int, overhead: int = BARRIERS) -> int:
    """Buffers of ``stage`` bytes that fit beside the epilogue, which has ``taken`` bytes, and others; at most eight.

    Raises:
        ValueError: not even two do, and a mainloop holds one while it waits for the next.
    """
    free = SHARED_MEMORY - taken - overhead
    if free < 2 * stage:
        raise ValueError(f"two k tiles of {stage} bytes do not fit into {free} beside the epilogue: take smaller parts")
    return min(8, free // stage)
