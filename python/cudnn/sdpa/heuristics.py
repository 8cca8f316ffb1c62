"""Heuristics of the fused attention kernels: what they support, and where they are faster than cuDNN's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn.sdpa.base import Attention

FASTER = {"sm_90a": frozenset({(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)})}
"""Head sizes whose kernels were measured faster than cuDNN's in both passes, with a causal mask and without."""
_LARGE = 4096 * 32, 4096
"""The least numbers of rows of all heads, and of keys, that were measured."""

Bounds = tuple[bool, int, int, int]
"""Whether causal; 1 where the diagonal ends at the last row and key; how far left and right of it, -1: no bound."""


def unsupported_reason(
    heads: tuple[int, int], bounds: Bounds, scale: float | None, operations: Sequence[type[Attention]]
) -> str:
    """Why the kernels of these passes cannot compute this attention; "" if they can. A scale of None is positive."""
    left = bounds[2]
    if scale is not None and not scale > 0:  # they find the largest score before they scale, and 0 means their default
        return f"the scale {scale}: the kernels take positive ones"
    sizes = [x for x in operations[0].head_sizes if all(x in operation.head_sizes for operation in operations)]
    if heads not in sizes:
        has = f"{', '.join(map(str, sizes))}{' with gradients' * (len(operations) > 1)}"
        return f"head sizes {heads}: the kernels take {has}"
    if left != -1 and left < 1:
        return f"left_bound={left}: the kernels take left ones from 1 up"
    return ""


def is_faster(arch: str, rows: int, keys: int, heads: tuple[int, int]) -> bool:
    """Whether the kernels were measured faster than cuDNN's, on this architecture.

    ``rows`` are those of all heads and batches.
    """
    return rows >= _LARGE[0] and keys >= _LARGE[1] and heads in FASTER.get(arch, ())


def is_timed(rows: int, keys: int, bounds: Bounds) -> bool:
    """Whether such a mask was measured: none, or a causal one from the lower right corner."""
    is_causal, alignment, left, right = bounds
    return left == -1 and right <= 0 and (is_level(rows, keys, alignment) or not (is_causal or right == 0))


def is_level(rows: int, keys: int, alignment: int) -> bool:
    """Whether the diagonal ends in the lower right corner."""
    return alignment == 1 or rows == keys


def options(rows: int, keys: int, scale: float, left: int, right: int, top_left: bool) -> dict[str, Any]:
    """Of both classes. The left bound is exclusive, -1 is no bound, and neither are those that hide no key."""
    first = 0 if top_left else keys - rows  # where row 0 stands
    left = left - 1 if 0 < left < first + rows else -1
    right = right if 0 <= right < keys - 1 - first else -1
    return {
        "is_causal": right == 0,
        "window_size": (left, right if right > 0 else -1),
        "scale_softmax": scale,
        "top_left": top_left and max(left, right) >= 0,
    }
