"""How many operand stages fit into shared memory."""

from __future__ import annotations

from cudnn_kernels.configuration import SHARED_MEMORY

BARRIERS = 2048  # bytes set aside for mbarriers and alignment


def num_stages(used: int, stage_bytes: int, overhead: int = BARRIERS) -> int:
    """Stages of ``stage_bytes`` that fit next to the epilogue's ``used`` bytes and the overhead; at most eight.

    Raises:
        ValueError: fewer than two fit: the mainloop holds one stage while it waits for the next.
    """
    free = SHARED_MEMORY - used - overhead
    if free < 2 * stage_bytes:
        raise ValueError(
            f"two k tiles of {stage_bytes} bytes do not fit into {free} beyond the epilogue: reduce epi_tile_n"
        )
    return min(8, free // stage_bytes)
