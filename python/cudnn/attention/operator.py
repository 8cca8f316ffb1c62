# No `from __future__ import annotations`, as for the operators.

import functools
from typing import Any

import torch

from cudnn.attention import fused
from cudnn.attention.graphs import attend, check_tensors, integers, sdpa
from cudnn.attention.sinks import attend_with_sinks, check_sinks
from cudnn.enums import diagonal_alignment as alignments
from cudnn.errors import checked_number, make_error
from cudnn.runtime.call import warn_once
from cudnn.runtime.registration import autocast_type, in_type

_WHERE = "scaled_dot_product_attention"
_SEEDS = 2**63 - 1
Maybe = torch.Tensor | None


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Maybe = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    diagonal_alignment: int = alignments.TOP_LEFT,
    left_bound: int = -1,
    right_bound: int = -1,
    seq_len_q: Maybe = None,
    seq_len_kv: Maybe = None,
    cumulative_seq_len_q: Maybe = None,
    cumulative_seq_len_kv: Maybe = None,
    sinks: Maybe = None,
    backend: str | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``dropout(softmax(scale * Q K^T, masked)) V``: PyTorch's arguments, and windows and lengths. Differentiable.

    Where a row sees no key, its result and its gradients are 0. So are those of rows beyond an entry's length.

    Args:
        query, key, value: ``[B, H_q, S_q, D]``, ``[B, H_kv, S_kv, D]``, ``[B, H_kv, S_kv, D_v]`` in one type, in any
            strides; copied where cuDNN cannot read them in place. float16 or bfloat16 on CUDA; on the CPU also float32
            and float64.
        attn_mask: Broadcasts to ``[B, H_q, S_q, S_kv]``. bool: True where a row sees a key. Else, float32 or the type
            of query, added to the scores; differentiable. Excludes bands and lengths: put all into the mask.
        dropout_p: The probability with which a weight is dropped; the others are divided by ``1 - dropout_p``. As in
            PyTorch, this holds in evaluation too: pass 0 there. The seed comes from PyTorch's generator.
        is_causal: ``right_bound=0``, unless a right bound is given.
        scale: None: ``D ** -0.5``.
        enable_gqa: Lets H_q be a multiple of H_kv.
        diagonal_alignment: 0: the diagonal starts at the first row and key. 1: it ends at the last ones, of each entry
            where lengths are given.
        left_bound: A row sees keys greater than its diagonal less this; -1: no bound.
        right_bound: A row sees keys up to its diagonal plus this; -1: no bound.
        seq_len_q, seq_len_kv: Integers, B of them: the rows and keys of each entry. One alone: the other is full.
        cumulative_seq_len_q, cumulative_seq_len_kv: Integers, B + 1 of them, from 0 up; both or none. All tensors are
            packed: entry b has the tokens ``cumulative[b]`` to ``cumulative[b + 1] - 1`` of the B * S tokens that
            ``x.transpose(1, 2).flatten(0, 1)`` shows. Lengths follow unless they are given as well.
        sinks: ``[H_q]``: a logit of each head that joins the softmax of every row without a value (gpt-oss);
            differentiable. Excludes a gradient of the mask; lengths only by cuDNN's graphs.
        backend: "cudnn": graphs of cuDNN. "fused": the kernels of :mod:`cudnn.sdpa`, for their head sizes, with bounds,
            lengths and sinks, without masks and dropout. None: the latter on Hopper for sinks, lengths and left bounds,
            and without them from 4,096 keys and 131,072 rows of all heads and batches on, for head sizes 64, 96, 128,
            192, 192/128 and 256, without a right bound or with one of 0 whose diagonal ends at the last row and key,
            unless PyTorch's deterministic algorithms are enabled; and where cuDNN has nothing for such numbers of rows
            and keys. The log says so once.
        batch_invariant: An entry's results and its gradients of query, key and value have the same bits whatever the
            other entries are, and their number. By the fused backend, whatever the sizes.

    Returns:
        ``[B, H_q, S_q, D_v]``, contiguous; with each token contiguous where query is packed, or by our kernels with
        sinks or lengths.

    Raises:
        ValueError: shapes, bounds, lengths, a mask with other masks, a probability below 0 or not below 1, sinks with
            lengths or a mask that has a gradient, a backend.
        NotImplementedError: what the fused backend does not have, if it or batch_invariant is asked for.
        TypeError: no tensor where one is needed; a bound that is no integer; the type of the mask.
        cudnnGraphNotSupportedError: what cuDNN does not support.
    """
    lengths = seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv
    check_tensors(query, key, value, lengths, attn_mask=attn_mask, sinks=sinks)
    bounds = integers(is_causal, diagonal_alignment, left_bound, right_bound)
    if not 0 <= checked_number(_WHERE, "dropout_p", dropout_p) < 1:
        raise make_error(ValueError, _WHERE, "dropout_p", dropout_p, "0 and more, less than 1")
    if scale is not None:
        scale = checked_number(_WHERE, "scale", scale)
    if backend not in (None, "cudnn", "fused"):
        raise make_error(ValueError, _WHERE, "backend", backend, 'None, "cudnn" or "fused"')
    if batch_invariant:
        if backend == "cudnn":
            hint = 'leave backend out, or pass "fused"'
            raise make_error(ValueError, _WHERE, "backend with batch_invariant", backend, '"fused"', hint)
        backend = "fused"
    if dtype := autocast_type(query):  # before anything is chosen by type, or kept
        cast = functools.partial(in_type, dtype=dtype)
        query, key, value, attn_mask = map(cast, (query, key, value, attn_mask))
    if _is_fused(backend, query, key, value, bounds, scale, dropout_p, attn_mask, sinks, lengths):
        operator: Any = fused.attend
        if batch_invariant or sinks is not None or any(x is not None for x in lengths):
            check_sinks(sinks, query)
            operator = functools.partial(fused.attend_with, sinks, lengths, batch_invariant)
        return attend(query, key, value, scale, enable_gqa, bounds, operator=operator)
    seed = torch.randint(_SEEDS, (1,), dtype=torch.int64, device=query.device) if dropout_p else None
    operator = sdpa if sinks is None else functools.partial(attend_with_sinks, sinks)
    if attn_mask is None:
        return attend(query, key, value, scale, enable_gqa, bounds, lengths, None, dropout_p, seed, operator)
    if bounds != (False, 0, -1, -1) or any(x is not None for x in lengths):
        got, hint = "a tensor with bounds or lengths", "put all of them into the mask"
        raise make_error(ValueError, _WHERE, "attn_mask", got, "a mask without other masks", hint)
    bias, seen = _bias(query, key, attn_mask)
    out = attend(query, key, value, scale, enable_gqa, bounds, lengths, bias, dropout_p, seed, operator)
    return out.masked_fill(~seen, 0)


def _is_fused(
    backend: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: tuple[bool, int, int, int],
    scale: float | None,
    dropout_p: float,
    attn_mask: Maybe,
    sinks: Maybe,
    lengths: tuple[Maybe, ...],
) -> bool:
    """The rule: whether our kernels compute it, which the log says once. Raises where they are asked for and cannot."""
    if backend == "cudnn":
        return False
    other = (
        "a mask or dropout: the kernels take bounds, lengths and sinks" if dropout_p or attn_mask is not None else ""
    )
    reason = fused.unsupported_reason(query, key, value, bounds, scale, other)
    if backend and reason:
        raise NotImplementedError(f'{_WHERE}: backend="fused": got {reason}. To fix it, leave backend out.')
    has_more = sinks is not None or any(x is not None for x in lengths)
    chosen = bool(backend) or (not reason and fused.is_chosen(query, key, value, bounds, has_more))
    if chosen and query.is_cuda:
        warn_once(_WHERE, "the kernels of cudnn.sdpa compute it")
    return chosen


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to the scores, ``[B or 1, H_q or 1, S_q, S_kv]``, and the rows that see a key.

    Rows that see none get a bias of 0: the softmax of scores of -inf alone is NaN, and so are its gradients.
    """
    full = (*query.shape[:3], key.shape[2]) if query.ndim == key.ndim == 4 else ()
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if mask.ndim > len(full) or any(size not in (1, wanted) for size, wanted in pairs):
        raise make_error(ValueError, _WHERE, "shape of attn_mask", tuple(mask.shape), f"what broadcasts to {full}")
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        allowed = f"torch.bool, torch.float32 or {query.dtype}, the type of query"
        raise make_error(TypeError, _WHERE, "type of attn_mask", mask.dtype, allowed, "call .to(query.dtype)")
    if mask.device != query.device:
        hint = f"call .to({str(query.device)!r})"
        raise make_error(ValueError, _WHERE, "device of attn_mask", mask.device, f"{query.device}, that of query", hint)
    mask = mask.view(*[1] * (4 - mask.ndim), *mask.shape)
    mask = mask.expand(-1, -1, *full[2:])
    if mask.dtype is torch.bool:
        seen = mask.any(-1, keepdim=True)
        bias = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask & seen, -torch.inf)
    else:
        seen = (mask != -torch.inf).any(-1, keepdim=True)
        bias = mask.masked_fill(~seen, 0)
    return bias, seen
