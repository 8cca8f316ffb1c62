"""Peers of native sparse attention: fla-core's Triton kernels, and dense attention of FlashAttention-4.

Tensors are (1, T, H, D), lists (1, T, H_k, n).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from cudnn.lazy import torch
from cudnn_kernels.attention.sparse import ALWAYS

Functions = dict[str, Callable[..., Any]]
"""compression(q, k, v) gives the log-sum-exp too; top-k(q, k, log-sum-exp); selection(q, k, v, lists); and
whole(q, k, v, gates), whose compression is the mean of blocks.
"""


def ours(block: int, chosen: int, window: int) -> Functions:
    """This project's operators."""
    from cudnn.native_sparse_attention import operator as ops
    from cudnn.ops import nsa_attention

    @functools.cache  # a call would wait for its copy from the host
    def ends_of(rows: int, device: Any) -> Any:
        return torch.tensor([0, rows], dtype=torch.int32, device=device)

    def ends(x: Any) -> Any:
        return ends_of(x.shape[1], x.device)

    def compression(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        o, lse = ops.nsa_compression(q[0], k[0], v[0], ends(q), ends(k), q.shape[-1] ** -0.5)
        return o[None], lse[None]

    def top_k(q: Any, k: Any, lse: Any) -> Any:
        best = chosen - ALWAYS
        return ops.nsa_top_k(q[0], k[0], lse[0], ends(q), ends(k), q.shape[-1] ** -0.5, best, block, block)[None]

    def selection(q: Any, k: Any, v: Any, lists: Any) -> Any:
        o, _ = ops.nsa_selection(q[0], k[0], v[0], lists[0], ends(q), q.shape[-1] ** -0.5, block)
        return o[None]

    def whole(q: Any, k: Any, v: Any, gates: Any) -> Any:
        small = (x.unflatten(1, (-1, block)).mean(2) for x in (k, v))
        turned = (x.transpose(1, 2) for x in (q, k, v, *small, gates))
        options = {"selected_blocks": chosen, "window_size": window}
        return nsa_attention(*turned, block_size=block, compress_stride=block, **options).transpose(1, 2)

    return {"compression": compression, "top-k": top_k, "selection": selection, "whole": whole}


def near(q: Any, k: Any, v: Any, window: int) -> Any:
    """Attention to the newest keys, by cuDNN."""
    from cudnn.native_sparse_attention import operator as ops

    o, _ = ops.nsa_window(q[0], k[0], v[0], None, q.shape[-1] ** -0.5, window, q.shape[1])
    return o[None]


def has_flash_attention() -> bool:
    """Whether FlashAttention-4 is installed."""
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # no flash_attn, or an older one that does not import
        return False


def dense(q: Any, k: Any, v: Any) -> Any:
    """Causal attention of FlashAttention-4."""
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    found = flash_attn_func(q, k, v, causal=True)
    return found[0] if isinstance(found, tuple) else found


def fla(block: int, chosen: int, window: int) -> Functions:
    """fla-core's kernels; its window attention, for which it wants FlashAttention-2, is cuDNN's, as ours.

    For the gradients of compression it would try forms of one and two warps too, in which a call takes seconds. Here it
    has those of four warps, which are the fastest.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    from fla.ops.nsa import compression as compressing  # pyright: ignore[reportMissingImports]
    from fla.ops.nsa import parallel  # pyright: ignore[reportMissingImports]

    tuned = compressing.parallel_nsa_compression_bwd_kernel_dkv.fn
    tuned.configs = [x for x in tuned.configs if x.num_warps >= 4]
    parallel.flash_attn_func = lambda q, k, v, causal, window_size: near(q, k, v, window_size[0] + 1)

    def compression(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return compressing.parallel_nsa_compression(q, k, v, q.shape[1], block, q.shape[-1] ** -0.5)

    def top_k(q: Any, k: Any, lse: Any) -> Any:
        return parallel.parallel_nsa_topk(q, k, q.shape[1], lse, chosen, block, q.shape[-1] ** -0.5)

    def selection(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return parallel.ParallelNSAFunction.apply(q, k, v, lists, lists.shape[-1], block, q.shape[-1] ** -0.5, None)

    def whole(q: Any, k: Any, v: Any, gates: Any) -> Any:
        return parallel.parallel_nsa(
            q, k, v, *gates.unbind(-1), block_counts=chosen, block_size=block, window_size=window
        )

    return {"compression": compression, "top-k": top_k, "selection": selection, "whole": whole}
