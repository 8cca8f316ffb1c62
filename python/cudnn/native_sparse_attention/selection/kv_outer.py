"""Selection attention, forward, KV-block stationary (KV blocks in the outer loop), for a small qhead_per_kvhead."""

from __future__ import annotations

import functools
from typing import Any

from cudnn import settings
from cudnn.gemm.formats import name_of
from cudnn.lazy import torch
from cudnn.native_sparse_attention.selection.csr_transpose import transpose_selection
from cudnn.runtime.memory import placed
from cudnn.runtime.run import architecture, run
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.attention.sparse import SelectionKVOuterConfiguration
from cudnn_kernels.sm90.heuristics import attention as heuristics

ARCH = "sm_90a"
MEMORY = 1 << 30
"""Bytes of workspace for partial outputs by (row, block), unless one head of k takes more."""


def is_faster(q: Any, k: Any, v: Any, lists: Any, block_size: int) -> bool:
    """Whether the KV-outer kernel is faster for varlen tensors like these on this chip."""
    if any(getattr(x, "ndim", 0) != 3 for x in (q, k, v, lists)) or not (q.numel() and k.numel() and lists.numel()):
        return False
    heads, qhead_per_kvhead = (q.shape[2], v.shape[2]), q.shape[1] // k.shape[1]
    faster = heuristics.kv_outer_is_faster(q.shape[0], qhead_per_kvhead, heads, block_size)
    return faster and q.element_size() == 2 and architecture(q) == ARCH


@functools.cache
def _log_once() -> None:
    settings.configure_logging().info(
        "selection attention: KV blocks are in the outer loop, because few heads of q share one of k"
    )


def attend(
    tensors: tuple[Any, Any, Any],
    results: tuple[Any, Any, Any],
    lists: tuple[Any, Any, Any],
    block_size: int,
    scale: float,
    is_causal: bool,
) -> None:
    """Writes o, row sums and row maxima, as :class:`SelectionAttention`, from q, k and v.

    ``lists``: block_indices, block_counts and cum_seqlen. Each launch computes the heads of k whose partial
    outputs fit into ``MEMORY`` bytes, at least one.
    """
    _log_once()
    q, k, v = map(placed, tensors)
    (rows, heads, d), (_, key_heads, dv), indices = q.shape, v.shape, lists[0]
    entries, qhead_per_kvhead = rows * indices.shape[2], heads // key_heads
    problem = SelectionKVOuterConfiguration(name_of(q.dtype), heads, key_heads, d, dv, block_size, is_causal)
    c = heuristics.configure_selection_kv_outer(problem)
    query_indices, ends, positions = transpose_selection(
        *lists, block_size, is_causal, c.list_chunk, return_positions=True
    )
    heads_per_launch = min(max(MEMORY // (entries * qhead_per_kvhead * (dv * q.element_size() + 8)), 1), key_heads)
    partial_o = q.new_empty(entries * heads_per_launch, qhead_per_kvhead, dv)
    partial_stats = torch.empty(entries * heads_per_launch, qhead_per_kvhead, 2, dtype=torch.float32, device=q.device)
    arguments = (q, k, v, *results, lists[2], query_indices, ends, positions, partial_o, partial_stats, scale)
    for first in range(0, key_heads, heads_per_launch):
        run(ARCHITECTURES[ARCH].source(c), c, *arguments, first, min(heads_per_launch, key_heads - first))
