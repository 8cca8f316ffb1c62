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
"""compression(q, k, v), which also returns the LSE; top-k(q, k, lse); selection(q, k, v, lists); and
whole(q, k, v, gates), which compresses blocks by their mean.
"""


def ours(block: int, num_blocks: int, window: int) -> Functions:
    """This project's operators."""
    from cudnn.native_sparse_attention import operator as ops
    from cudnn.ops import nsa_attention

    @functools.cache  # otherwise each call waits for the copy from the host
    def ends_of(rows: int, device: Any) -> Any:
        return torch.tensor([0, rows], dtype=torch.int32, device=device)

    def ends(x: Any) -> Any:
        return ends_of(x.shape[1], x.device)

    def compression(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        o, lse = ops.nsa_compression(q[0], k[0], v[0], ends(q), ends(k), q.shape[-1] ** -0.5)
        return o[None], lse[None]

    def top_k(q: Any, k: Any, lse: Any) -> Any:
        top_k = num_blocks - ALWAYS
        return ops.nsa_top_k(q[0], k[0], lse[0], ends(q), ends(k), q.shape[-1] ** -0.5, top_k, block, block)[None]

    def selection(q: Any, k: Any, v: Any, lists: Any) -> Any:
        o, _ = ops.nsa_selection(q[0], k[0], v[0], lists[0], ends(q), q.shape[-1] ** -0.5, block)
        return o[None]

    def whole(q: Any, k: Any, v: Any, gates: Any) -> Any:
        compressed = (x.unflatten(1, (-1, block)).mean(2) for x in (k, v))
        transposed = (x.transpose(1, 2) for x in (q, k, v, *compressed, gates))
        options = {"selected_blocks": num_blocks, "window_size": window}
        return nsa_attention(*transposed, block_size=block, compress_stride=block, **options).transpose(1, 2)

    return {"compression": compression, "top-k": top_k, "selection": selection, "whole": whole}


def sliding_window(q: Any, k: Any, v: Any, window: int) -> Any:
    """Sliding-window attention by cuDNN."""
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

    output = flash_attn_func(q, k, v, causal=True)
    return output[0] if isinstance(output, tuple) else output


def fla(block: int, num_blocks: int, window: int) -> Functions:
    """fla-core's kernels. The sliding window runs in cuDNN, as ours does, because fla-core needs FlashAttention-2.

    The backward pass of compression is autotuned over configurations with at least four warps: those with fewer take
    seconds per call, and four is the fastest.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    from fla.ops.nsa import compression as compressing  # pyright: ignore[reportMissingImports]
    from fla.ops.nsa import parallel  # pyright: ignore[reportMissingImports]

    tuned = compressing.parallel_nsa_compression_bwd_kernel_dkv.fn
    tuned.configs = [x for x in tuned.configs if x.num_warps >= 4]
    parallel.flash_attn_func = lambda q, k, v, causal, window_size: sliding_window(q, k, v, window_size[0] + 1)

    def compression(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return compressing.parallel_nsa_compression(q, k, v, q.shape[1], block, q.shape[-1] ** -0.5)

    def top_k(q: Any, k: Any, lse: Any) -> Any:
        return parallel.parallel_nsa_topk(q, k, q.shape[1], lse, num_blocks, block, q.shape[-1] ** -0.5)

    def selection(q: Any, k: Any, v: Any, lists: Any) -> Any:
        return parallel.ParallelNSAFunction.apply(q, k, v, lists, lists.shape[-1], block, q.shape[-1] ** -0.5, None)

    def whole(q: Any, k: Any, v: Any, gates: Any) -> Any:
        return parallel.parallel_nsa(
            q, k, v, *gates.unbind(-1), block_counts=num_blocks, block_size=block, window_size=window
        )

    return {"compression": compression, "top-k": top_k, "selection": selection, "whole": whole}
