"""Heuristics of Hopper's attention backward: splitting KV blocks over Q to fill the last wave, and ordered dQ."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol

from cudnn_kernels.attention import BackwardConfiguration
from cudnn_kernels.signature import Sizes

PROLOGUE, REDUCTION, SPLIT_COST = 2.0, 2.0, 0.012
"""In Q-block steps: a CTA's time before its first and after its last step, the dK/dV reduction, and one split."""
NUM_SPLITS = (2, 3, 4, 6, 8, 12, 16, 32)
MAX_WAVES = 8  # of split CTAs, which bounds the workspace
MAX_WAVES_EVEN, MAX_WAVES_UNEVEN = 13, 6  # waves from which on splitting gains nothing: blocks of equal length, or not
ORDERED_HEAD_DIMS = (64, 64), (192, 128), (192, 192), (256, 256)
ORDERED_VARLEN_HEAD_DIMS = ((192, 128),)  # causal varlen batches in longest-first order, whatever their lengths
LONG = 32  # steps


class Window(Protocol):
    """The keys that a row attends to, ``right`` and ``left`` of its diagonal; None: all on that side."""

    @property
    def right(self) -> int | None: ...

    @property
    def left(self) -> int | None: ...

    @property
    def top_left(self) -> bool: ...


def split_of(
    c: BackwardConfiguration, lengths: list[int], heads: int, num_sms: int, qhead_per_kvhead: int = 1
) -> dict[str, int]:
    """``split``: how many of the last KV blocks are split; ``parts``: into how many CTAs each, over Q blocks.

    Args:
        lengths: Steps (Q blocks) of each KV block of a head; every head has the same.
        heads: Heads of K times batches.
        num_sms: Of the GPU. CTAs, or pairs of them, process blocks in order.
        qhead_per_kvhead: Split CTAs with ordered dQ and a right bound process whole heads of Q.
    """
    slots, count = max(num_sms // (1 + c.pair), 1), heads * len(lengths)
    even = len(set(lengths)) < 2
    split = count % slots if even else count
    if not split or count >= (MAX_WAVES_EVEN if even else MAX_WAVES_UNEVEN) * slots:
        return {"split": 0, "parts": 1}
    blocks = [steps for steps in lengths for _ in range(heads)][count - split :]  # full waves before have no effect
    times = {(0, 1): makespan(blocks, slots)}
    for parts in NUM_SPLITS:
        if split * parts <= MAX_WAVES * slots and not (c.deterministic and c.right and qhead_per_kvhead % parts):
            work = [x * (i + 1) // parts - x * i // parts for x in blocks for i in range(parts)]
            times[split, parts] = makespan(work, slots) + REDUCTION + split * parts * SPLIT_COST
    return dict(zip(("split", "parts"), min(times, key=lambda key: times[key]), strict=True))


def split_of_window(c: BackwardConfiguration, sizes: Sizes, window: Window, num_sms: int) -> dict[str, int]:
    """:func:`split_of` for sequences of one length and a mask."""
    qhead_per_kvhead = sizes["hq"] // max(sizes["hk"], 1)
    return split_of(c, block_steps(c, sizes, window), sizes["b"] * sizes["hk"], num_sms, qhead_per_kvhead)


def block_steps(c: BackwardConfiguration, sizes: Sizes, window: Window) -> list[int]:
    """Steps (Q blocks of all Q heads) of each KV block of a head."""
    qhead_per_kvhead, right, left = sizes["hq"] // max(sizes["hk"], 1), window.right, window.left
    steps: list[int] = []
    first = 0 if window.top_left else sizes["sq"] - sizes["sk"]
    for key in range(first, first + sizes["sk"], c.cluster_tile_n):
        begin = 0 if right is None else max(key - right, 0)
        end = sizes["sq"] if left is None else min(key + c.cluster_tile_n + left, sizes["sq"])
        steps.append(qhead_per_kvhead * max(-(-end // c.tile[0]) - begin // c.tile[0], 0))
    return steps


def ordered_dq_is_faster(c: BackwardConfiguration, sizes: Sizes, window: Window, num_sms: int) -> bool:
    """Whether ordered additions to dQ (dQ_semaphore) are faster: many KV blocks which, without a mask, have many steps.

    Measured for ``ORDERED_HEAD_DIMS``: docs/dev/experiments.md. Other varlen sequences count as if all had the
    average length, because only the GPU knows their lengths.
    """
    if (c.head_dim, c.head_dim_v) not in ORDERED_HEAD_DIMS or c.softcap or (c.right and sizes["hq"] != sizes["hk"]):
        return False
    if c.varlen and c.right and (c.head_dim, c.head_dim_v) in ORDERED_VARLEN_HEAD_DIMS:
        return True
    batches = max(sizes["b"], 1) if c.varlen else 1
    steps = block_steps(c, {**sizes, **{x: sizes[x] // batches for x in ("sq", "sk")}}, window)
    many = sizes["b"] * sizes["hk"] * len(steps) >= MAX_WAVES_UNEVEN * (num_sms // (1 + c.pair))
    return many and (c.right or max(steps) >= LONG)


def makespan(blocks: Sequence[int], slots: int) -> float:
    """The time at which all blocks are done, in steps; each starts, in this order, on the first free slot."""
    ends = [0.0] * slots
    for steps in blocks:
        heapq.heapreplace(ends, ends[0] + steps + PROLOGUE)
    return max(ends)
