"""The kernels that attention needs for any number of tokens, found by recording calls on meta tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from cudnn.attention.fused import fused_sdpa
from cudnn.runtime.recording import Key, record


def attention_kernels(
    heads: tuple[int, int], head_dims: tuple[int, int], dtype: torch.dtype, max_tokens: int, arch: str, num_sms: int
) -> list[Key]:
    """The kernels of attention of a sequence to itself, full and causal, forward and backward, and of its last token.

    Args:
        heads: The numbers of query heads and of key and value heads.
        head_dims: The sizes of a query's and key's head, and of a value's.
    """
    (q_heads, kv_heads), (d, d_v) = heads, head_dims

    def forward(is_causal: bool, is_decode: bool, count: int, saves: bool) -> Callable[[], Any]:
        sizes = ((q_heads, 1 if is_decode else count, d), (kv_heads, count, d), (kv_heads, count, d_v))
        q, k, v = (torch.empty(1, *size, dtype=dtype, device="meta", requires_grad=saves) for size in sizes)
        with torch.set_grad_enabled(saves):
            o, _ = fused_sdpa(q, k, v, d**-0.5, is_causal, -1, -1, False)
        return lambda: o.backward(torch.empty_like(o))

    keys: dict[Key, None] = {}
    for is_causal, is_decode in ((True, False), (False, False), (True, True)):
        call = functools.partial(forward, is_causal, is_decode)
        keys |= dict.fromkeys(record(call, max_tokens, arch, num_sms, not is_decode))
    return list(keys)
