"""Selection attention, forward, with blocks of keys outermost: where few heads of q share one of k."""

from __future__ import annotations

import functools
from typing import Any

from cudnn import settings
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention.selection.inverse import choosing_rows
from cudnn.runtime.memory import placed
from cudnn.runtime.run import architecture, run
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import SelectionKVOuterConfiguration

ARCH, HEADS, BLOCK = "sm_90a", ((128, 128),), 64
"""Where it was timed: elements of heads, keys of a block."""
FROM = {1: 2048, 2: 4096, 4: 8192}
"""From how many rows on it was faster there, by the heads of q that share one of k, rounded up to a power of two."""
STEPS = 32
"""Products of 64 heads of rows that a CTA has of a block at most."""
MEMORY = 1 << 30
"""Bytes for what rows have of their blocks at a time, if there are so many for one head of k."""


def is_faster(q: Any, k: Any, v: Any, lists: Any, block_size: int) -> bool:
    """Whether blocks of keys outermost were faster for packed tensors like these, on this chip."""
    if any(getattr(x, "ndim", 0) != 3 for x in (q, k, v, lists)) or not (q.numel() and k.numel() and lists.numel()):
        return False
    least = FROM.get(_rounded(q.shape[1] // k.shape[1]))
    of_timed = least is not None and q.shape[0] >= least and (q.shape[2], v.shape[2]) in HEADS and block_size == BLOCK
    return of_timed and q.element_size() == 2 and architecture(q) == ARCH


def _rounded(group: int) -> int:
    """Rows of a product that a row of q takes: its heads, rounded up to a power of two."""
    return 1 << (group - 1).bit_length()


@functools.cache
def _say() -> None:
    settings.configure_logging().info(
        "selection attention: blocks of keys are outermost, since few heads of q share one of k"
    )


def attend(
    tensors: tuple[Any, Any, Any],
    results: tuple[Any, Any, Any],
    lists: tuple[Any, Any, Any],
    block_size: int,
    scale: float,
    is_causal: bool,
) -> None:
    """Writes o, sums of exponentials and largest scores, as :class:`SelectionAttention`, from q, k and v.

    ``lists``: blocks, counts, and where sequences end. Some heads of k are computed at a time, so that what rows have
    of their blocks takes no more than ``MEMORY``, unless one head does.
    """
    _say()
    q, k, v = map(placed, tensors)
    (rows, heads, d), (_, key_heads, dv), indices = q.shape, v.shape, lists[0]
    entries, group = rows * indices.shape[2], heads // key_heads
    part = STEPS * 64 // _rounded(group)
    c = SelectionKVOuterConfiguration(name_of(q.dtype), heads, key_heads, d, dv, block_size, is_causal, list_chunk=part)
    choosing, ends, places = choosing_rows(*lists, block_size, is_causal, part, tells=True)
    at_a_time = min(max(MEMORY // (entries * group * (dv * q.element_size() + 8)), 1), key_heads)
    of_chosen = q.new_empty(entries * at_a_time, group, dv)
    values = torch.empty(entries * at_a_time, group, 2, dtype=torch.float32, device=q.device)
    given = (q, k, v, *results, lists[2], choosing, ends, places, of_chosen, values, scale)
    for first in range(0, key_heads, at_a_time):
        run(ARCHITECTURES[ARCH].source(c), c, *given, first, min(at_a_time, key_heads - first))
