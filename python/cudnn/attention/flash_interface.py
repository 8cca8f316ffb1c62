"""FlashAttention's functions on the kernels of ``cudnn.sdpa``: the same names, arguments and layouts."""

# No `from __future__ import annotations`, as for the operators.

from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.attention.flash_op import (
    BATCH_INVARIANT_SPLITS,
    check_cache,
    flash_attn,
    flash_attn_append,
    flash_attn_kvcache,
)
from cudnn.errors import checked_number, make_error
from cudnn.runtime.registration import autocast_type

Maybe = torch.Tensor | None
Window = tuple[int | None, int | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Maybe = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Maybe = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """FlashAttention's function of the same name: ``softmax(softmax_scale * q k^T, masked) v``. Differentiable.

    Row i of q stands at key i + s_k - s_q: masks are aligned to the bottom right corner. A row that sees no key gets 0.

    Args:
        q, k, v: (b, s_q, hq, d), (b, s_k, hk, d), (b, s_k, hk, dv), float16 or bfloat16; on the CPU, which computes the
            same in PyTorch, also float32 and float64. hq is a multiple of hk. (d, dv) is (64, 64), (96, 96),
            (128, 128), (192, 128), (192, 192) or (256, 256). Strides that the kernels do not read are copied.
        dropout_p: Only 0.
        softmax_scale: Positive. None: ``d ** -0.5``.
        causal: A right bound of 0.
        window_size: (left, right): a row sees keys from its own less ``left`` to its own plus ``right``, both included;
            -1 or None is no bound on that side.
        softcap: Scores s become ``softcap * tanh(s / softcap)`` before the mask; 0: they do not.
        alibi_slopes: Only None.
        deterministic: The same bits every time, also in the backward pass; as with
            ``torch.use_deterministic_algorithms(True)``.
        return_attn_probs: Returns ``(out, lse, None)``, as FlashAttention 2 does without dropout.
        learnable_sink: (hq,), any floating-point type: a logit of each head that joins the softmax of every row,
            without a value; differentiable.
        return_lse: Returns ``(out, lse)``, as FlashAttention 4.
        batch_invariant: A sequence's results and its gradients of q, k and v have the same bits whatever the other
            sequences are, their number, and its place among them; gradients are deterministic. That of the sinks is a
            sum over all sequences. On the CPU, PyTorch's own GEMMs decide.

    Returns:
        (b, s_q, hq, dv), contiguous. ``lse``, the logarithm of each row's sum of exponentials with the sink, is float32
        (b, hq, s_q), and differentiable.

    Raises:
        ValueError: shapes, a scale or softcap that is not positive, a window, sinks.
        TypeError: no tensors, or another type.
        NotImplementedError: dropout, ALiBi, and head sizes that no kernel has.
    """
    where = "flash_attn_func"
    _check_tensors(where, q=q, k=k, v=v)
    _check_missing(where, dropout_p, alibi_slopes=alibi_slopes)
    options = _options(where, q, softmax_scale, causal, window_size, softcap)
    switches = bool(deterministic), False, bool(batch_invariant)
    rows, keys = (x.shape[1] if x.ndim == 4 else 0 for x in (q, k))
    sinks = _sinks(where, learnable_sink, q)
    return _returned(
        *flash_attn(q, k, v, None, None, sinks, rows, keys, *options, *switches),
        return_attn_probs,
        return_lse,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Maybe = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Maybe = None,
    *,
    learnable_sink: Maybe = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Any:
    """:func:`flash_attn_func` for varlen batches: sequences of different lengths, one after the other.

    The host does not wait for the GPU: the offsets are read by the kernels alone, so a CUDA graph that captured a call
    computes whatever sequences the offsets name when it is replayed.

    Args:
        q, k, v: (total_q, hq, d), (total_k, hk, d), (total_k, hk, dv): the tokens of all sequences.
        cu_seqlens_q, cu_seqlens_k: int32, (sequences + 1,), on the tensors' device: 0, then where each sequence ends,
            up to the totals. Sequences may be empty. Tokens of no sequence, as padding, have to be a last sequence. The
            values are checked on the CPU; on a GPU, which the host would have to wait for, they are not.
        max_seqlen_q, max_seqlen_k: At least the lengths of the longest sequences. Bounds of the window that reach
            farther are left out, which is all they are for. None: the totals.
        block_table: Only None: :func:`flash_attn_with_kvcache` takes pages.
        others: As there.

    Returns:
        (total_q, hq, dv), contiguous; ``lse`` is (hq, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: As there, and offsets.
    """
    where = "flash_attn_varlen_func"
    _check_tensors(where, q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    hint = "call flash_attn_with_kvcache, which takes pages"
    if block_table is not None:
        raise make_error(NotImplementedError, where, "block_table", "a tensor", "None", hint)
    _check_missing(where, dropout_p, alibi_slopes=alibi_slopes)
    options = _options(where, q, softmax_scale, causal, window_size, softcap)
    switches = bool(deterministic), False, bool(batch_invariant)
    longest = _longest(where, "max_seqlen_q", max_seqlen_q, q), _longest(where, "max_seqlen_k", max_seqlen_k, k)
    sinks = _sinks(where, learnable_sink, q)
    return _returned(
        *flash_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks, *longest, *options, *switches),
        return_attn_probs,
        return_lse,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: Maybe = None,
    v: Maybe = None,
    rotary_cos: Maybe = None,
    rotary_sin: Maybe = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: Maybe = None,
    cache_leftpad: Maybe = None,
    block_table: Maybe = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Maybe = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Maybe = None,
    batch_invariant: bool = False,
) -> Any:
    """FlashAttention's function of the same name: attention to a cache of keys and values, for decoding. No gradient.

    Row i of q stands at the key ``length + i - s_q``, where ``length`` counts the new keys too.

    Args:
        q: (b, s_q, hq, d).
        k_cache, v_cache: (b, s_k, hk, d) and (.., dv), with room for more keys; or with ``block_table``, pages
            (pages, page, hk, d), where ``page`` is a power of two, 8 or more.
        k, v: (b, s_new, hk, d) and (.., dv): new keys and values, which are written into the caches behind those that
            are there, first. The caches must have room for them, which is checked on the CPU alone.
        cache_seqlens: int32, (b,), or a number for all: keys that are there, without the new ones. None: all of the
            cache, which has to have no room then.
        block_table: int32, (b, n): the pages of each sequence, in order.
        softmax_scale, causal, window_size, softcap, learnable_sink: As of :func:`flash_attn_func`.
        num_splits: CTAs that share a sequence's keys; 0: enough to fill the GPU.
        batch_invariant: A sequence's results have the same bits whatever the other sequences are, and their number:
            0 means 8 splits then.
        rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, alibi_slopes: Only None. rotary_interleaved: ignored.
        return_softmax_lse: Returns ``(out, lse)``.

    Returns:
        (b, s_q, hq, dv), contiguous; ``lse`` is float32 (b, hq, s_q).

    Raises:
        ValueError, TypeError, NotImplementedError: As of :func:`flash_attn_func`, and lengths, pages, k without v.
    """
    where = "flash_attn_with_kvcache"
    _check_tensors(where, q=q, k_cache=k_cache, v_cache=v_cache)
    hints = {
        "rotary_cos": "rotate q and k before the call",
        "rotary_sin": "rotate q and k before the call",
        "cache_batch_idx": "pass k_cache[cache_batch_idx], or pages with block_table",
        "cache_leftpad": "put the keys of each sequence at the start of its cache",
    }
    missing = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx}
    _check_missing(where, 0.0, hints, **missing, cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    if (k is None) != (v is None):
        got = "k alone" if v is None else "v alone"
        raise make_error(ValueError, where, "k and v", got, "both, or neither")
    options = _options(where, q, softmax_scale, causal, window_size, softcap)
    splits = checked_number(where, "num_splits", num_splits, integer=True)
    if batch_invariant and not splits:
        splits = BATCH_INVARIANT_SPLITS
    lengths = _lengths(where, q, k_cache, cache_seqlens, block_table)
    sinks = _sinks(where, learnable_sink, q)
    if k is not None and v is not None:
        _check_tensors(where, k=k, v=v)
        q, k, v = (x.to(autocast_type(x) or x.dtype) for x in (q, k, v))
        check_cache(q, k_cache, v_cache, lengths, block_table, sinks)
        _check_new(where, k, v, k_cache, v_cache, lengths, block_table)
        lengths = flash_attn_append(k_cache, v_cache, k.detach(), v.detach(), lengths, block_table)
    out, lse = flash_attn_kvcache(q.detach(), k_cache, v_cache, lengths, block_table, sinks, *options, splits)
    return (out, lse) if return_softmax_lse else out


def _check_tensors(where: str, **tensors: Any) -> None:
    for name, x in tensors.items():
        check_tensor(where, name, x)


def _check_missing(where: str, dropout_p: float, hints: dict[str, str] | None = None, **tensors: Maybe) -> None:
    """Refuses what FlashAttention has and the kernels have not."""
    if dropout_p != 0:
        raise make_error(NotImplementedError, where, "dropout_p", dropout_p, "0, no dropout", "pass 0 in evaluation")
    for name, x in tensors.items():
        if x is not None:
            hint = (hints or {}).get(name, "use cudnn.ops.scaled_dot_product_attention with an attn_mask")
            raise make_error(NotImplementedError, where, name, "a tensor", "None", hint)


def _options(
    where: str, q: torch.Tensor, scale: float | None, causal: bool, window: Any, softcap: float
) -> tuple[float, bool, int, int, float]:
    """The scale, causal, the window's bounds, -1 for none, and the softcap, checked."""
    factor: Any = q.shape[-1] ** -0.5 if scale is None else checked_number(where, "softmax_scale", scale)
    if not factor > 0:
        raise make_error(ValueError, where, "softmax_scale", scale, "a positive number, or None for d ** -0.5")
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise make_error(TypeError, where, "window_size", repr(window), "a pair (left, right)")
    left, right = (
        -1 if end is None else checked_number(where, "window_size", end, "a pair of ints, or None", integer=True)
        for end in window
    )
    if left < -1 or right < -1:
        raise make_error(ValueError, where, "window_size", (left, right), "0 and more, or -1 for no bound")
    if softcap is None:
        softcap = 0.0
    if not checked_number(where, "softcap", softcap) >= 0:
        raise make_error(ValueError, where, "softcap", softcap, "a positive number, or 0 for none")
    return float(factor), bool(causal), left, right, float(softcap)


def _longest(where: str, name: str, most: Any, x: torch.Tensor) -> Any:
    if most is None:
        return x.shape[0]
    if isinstance(most, torch.Tensor) and most.device.type != "cpu":
        hint = "pass an int, as .item() of it, taken once for all layers"
        raise make_error(TypeError, where, name, f"a tensor on {most.device}", "an int", hint)
    most = most.item() if isinstance(most, torch.Tensor) else most
    if type(most) is int or isinstance(most, torch.SymInt):
        return most
    return checked_number(where, name, most, "an int, or None", integer=True)


def _sinks(where: str, sinks: Any, q: torch.Tensor) -> Maybe:
    """The sinks in the type of LSE."""
    if sinks is None:
        return None
    check_tensor(where, "learnable_sink", sinks)
    if not sinks.is_floating_point():
        raise make_error(TypeError, where, "learnable_sink", sinks.dtype, "a floating-point type")
    return sinks.to(torch.float64 if q.dtype is torch.float64 else torch.float32)


def _returned(out: torch.Tensor, lse: torch.Tensor, with_probabilities: bool, with_lse: bool) -> Any:
    if with_probabilities:
        return out, lse, None
    return (out, lse) if with_lse else out


def _lengths(where: str, q: torch.Tensor, cache: torch.Tensor, given: Any, table: Maybe) -> torch.Tensor:
    """Keys in the cache of each sequence, int32."""
    if isinstance(given, torch.Tensor):
        return given
    if given is None:
        given = cache.shape[1] * (1 if table is None else table.shape[1])
    length = checked_number(where, "cache_seqlens", given, "an int, int32 numbers, or None", integer=True)
    return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)


def _check_new(
    where: str,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    table: Maybe,
) -> None:
    """Refuses new keys and values that the caches do not take, before one is written: types, and on the CPU room."""
    rows = k.shape[1] if k.ndim == 4 else "s_new"
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (lengths.shape[0], rows, *cache.shape[2:])
        if tuple(new.shape) != expected or new.dtype != cache.dtype or new.device != cache.device:
            got = f"{new.dtype} of the shape {tuple(new.shape)} on {new.device}"
            raise make_error(ValueError, where, name, got, f"{cache.dtype} of the shape {expected} on {cache.device}")
    if lengths.device.type != "cpu" or torch.compiler.is_compiling() or type(lengths) is not torch.Tensor:
        return  # a GPU would have to be waited for, and a fake tensor has no values
    before, page = lengths.tolist(), k_cache.shape[1]
    most = page * (1 if table is None else table.shape[1]) - k.shape[1]
    if not all(0 <= length <= most for length in before):
        allowed = f"numbers from 0 to {most}, which leave room in the caches for the {k.shape[1]} new keys"
        raise make_error(ValueError, where, "cache_seqlens", before, allowed, "None counts all keys of the cache")
    if table is None or not k.shape[1]:
        return
    for pages, length in zip(table.tolist(), before, strict=True):
        of_new = pages[length // page : -(-(length + k.shape[1]) // page)]
        if not all(0 <= number < k_cache.shape[0] for number in of_new):
            allowed = f"pages from 0 to {k_cache.shape[0] - 1}, up to the end of each sequence with its new keys"
            raise make_error(ValueError, where, "block_table", table.tolist(), allowed)
