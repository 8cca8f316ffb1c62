"""Which blocks of keys the backward kernels for Hopper split, so that the last turn fills the chip."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from cudnn.fused.layouts import Sizes
from cudnn.sdpa.reference import Window
from cudnn_kernels.attention import BackwardConfiguration

STARTING, SUMMING, PART = 2.0, 2.0, 0.012
"""In steps: what a CTA takes before the first and after the last one, the kernel that adds up parts, and each part."""
PARTS = (2, 3, 4, 6, 8, 12, 16, 32)
MOST = 8  # turns of parts, which bounds the workspace
EVEN, UNEVEN = 13, 6  # turns from which on it gains nothing, where blocks take as long as each other or not
IN_TURNS = (64, 64), (192, 128), (192, 192), (256, 256)
LONG = 32  # steps


def chosen(
    c: BackwardConfiguration, lengths: list[int], heads: int, multiprocessors: int, share: int = 1
) -> dict[str, int]:
    """How many of the last blocks are ``split``, and in how many ``parts``, for a GPU of so many multiprocessors.

    Every head has blocks of these numbers of steps. CTAs, or pairs, take blocks as they come, first ones first. Where
    they take turns with a right end, parts have whole heads of Q, of which so many ``share`` one of K.
    """
    places, count = max(multiprocessors // (1 + c.pair), 1), heads * len(lengths)
    even = len(set(lengths)) < 2
    split = count % places if even else count
    if not split or count >= (EVEN if even else UNEVEN) * places:
        return {"split": 0, "parts": 1}
    blocks = [steps for steps in lengths for _ in range(heads)][count - split :]  # whole turns before change nothing
    took = {(0, 1): makespan(blocks, places)}
    for parts in PARTS:
        if split * parts <= MOST * places and not (c.deterministic and c.right and share % parts):
            work = [x * (i + 1) // parts - x * i // parts for x in blocks for i in range(parts)]
            took[split, parts] = makespan(work, places) + SUMMING + split * parts * PART
    return dict(zip(("split", "parts"), min(took, key=lambda key: took[key]), strict=True))


def of_window(c: BackwardConfiguration, sizes: Sizes, window: Window, multiprocessors: int) -> dict[str, int]:
    """:func:`chosen` for sequences of one length and the keys that their rows see."""
    share = sizes["hq"] // max(sizes["hk"], 1)
    return chosen(c, lengths(c, sizes, window), sizes["b"] * sizes["hk"], multiprocessors, share)


def lengths(c: BackwardConfiguration, sizes: Sizes, window: Window) -> list[int]:
    """Steps of a head's blocks of keys."""
    share, right, left = sizes["hq"] // max(sizes["hk"], 1), window.right, window.left
    found: list[int] = []
    first = 0 if window.top_left else sizes["sq"] - sizes["sk"]
    for key in range(first, first + sizes["sk"], c.cluster_tile_n):
        begin = 0 if right is None else max(key - right, 0)
        end = sizes["sq"] if left is None else min(key + c.cluster_tile_n + left, sizes["sq"])
        found.append(share * max(-(-end // c.tile[0]) - begin // c.tile[0], 0))
    return found


def faster_in_turns(c: BackwardConfiguration, sizes: Sizes, window: Window, multiprocessors: int) -> bool:
    """Whether CTAs add to dQ's sums faster in turns: with many blocks of keys which, without a mask, take many steps.

    So docs/performance.md has it for the head sizes ``IN_TURNS``. Packed sequences, whose lengths only the GPU knows,
    count as if all had the average.
    """
    if (c.head_dim, c.head_dim_v) not in IN_TURNS or c.softcap or (c.right and sizes["hq"] != sizes["hk"]):
        return False
    batches = max(sizes["b"], 1) if c.varlen else 1
    steps = lengths(c, {**sizes, **{x: sizes[x] // batches for x in ("sq", "sk")}}, window)
    many = sizes["b"] * sizes["hk"] * len(steps) >= UNEVEN * (multiprocessors // (1 + c.pair))
    return many and (c.right or max(steps) >= LONG)


def makespan(blocks: Sequence[int], places: int) -> float:
    """When all blocks of so many steps are done, which start in this order, wherever a place is free."""
    ends = [0.0] * places
    for steps in blocks:
        heapq.heapreplace(ends, ends[0] + steps + STARTING)
    return max(ends)
