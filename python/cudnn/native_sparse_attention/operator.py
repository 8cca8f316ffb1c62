# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.attention.graphs import describe_backward, describe_forward
from cudnn.errors import checked_number, make_error
from cudnn.fused.object_cache import run
from cudnn.native_sparse_attention import NSA, flops, reference
from cudnn.native_sparse_attention.branch_gradients import branch_gradients, has_one_call
from cudnn.native_sparse_attention.compression import top_k as one_pass
from cudnn.native_sparse_attention.gates import (
    gated_selection,
    log_once,
    nsa_gates,
    nsa_gates_bwd,
    selection,
    selection_takes_gates,
)
from cudnn.native_sparse_attention.gates import like as _like
from cudnn.native_sparse_attention.selection import kv_outer
from cudnn.native_sparse_attention.selection.backward import csr_transpose
from cudnn.native_sparse_attention.top_k.api import MOST, check_choice
from cudnn.pygraph import operator_graphs
from cudnn.runtime.memory import aligned, placed
from cudnn.runtime.registration import autocast_type, custom_op, in_type
from cudnn.runtime.streams import forked
from cudnn_kernels.attention.sparse import ALWAYS

_WHERE = "nsa_attention"
_NARROW = (torch.float16, torch.bfloat16)
_window_cache: operator_graphs.GraphCache = {}
_window_backward_cache: operator_graphs.GraphCache = {}
Maybe = torch.Tensor | None


def nsa_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    compressed_key: torch.Tensor,
    compressed_value: torch.Tensor,
    gates: torch.Tensor,
    cu_seqlens: Maybe = None,
    cu_seqlens_compressed: Maybe = None,
    *,
    block_size: int = 64,
    compress_stride: int = 32,
    selected_blocks: int = 16,
    window_size: int = 512,
    block_indices: Maybe = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Native sparse attention (J. Yuan et al., 2025), causal: the sum of three attentions, each times its gate.

        out = gates[..., 0] * compression + gates[..., 1] * selection + gates[..., 2] * window

    Compression attends to keys and values that stand for ``compress_stride`` rows each, and are given: a mean, or what
    a model learned. Row i sees the compressed keys ``j < (i + 1) // r``, where r is the ratio of a sequence's lengths;
    key j must come from rows before ``(j + 1) * r``. Selection attends to the rows up to i in the blocks of the row's
    list: the first one, the newest, which are those from ``(i + 1) // block_size - 2`` on, and of the rest those with
    the largest probabilities of compressed keys, summed over the heads that share a head of key. Window attends to the
    newest ``window_size`` rows. Differentiable in all tensors but the lists; the choice of blocks is not
    differentiated.

    Args:
        query: ``[B, H_q, S, D]``, or packed ``[T, H_q, D]`` with cu_seqlens. float16 or bfloat16; on the CPU also
            float32 and float64. Memory in the order ``[B, S, H, D]`` is not copied.
        key, value: ``[B, H_kv, S, D]`` and ``[B, H_kv, S, D_v]``, or ``[T, H_kv, D]`` and ``[T, H_kv, D_v]``.
        compressed_key, compressed_value: the same with S_c or T_c rows.
        gates: ``[B, H_q, S, 3]`` or ``[T, H_q, 3]``.
        cu_seqlens, cu_seqlens_compressed: int32, 0 and where each sequence ends, of all rows, and of compressed ones.
            Results and gradients of rows behind the last end are 0.
        block_size: rows of a block of the lists, a multiple of compress_stride.
        selected_blocks: blocks in a row's list, 5 to 68; all blocks if the sequence has fewer.
        window_size: 1 and more.
        block_indices: ``[B, H_kv, S, n]`` or ``[T, H_kv, n]``, int32: lists to use in place of the computed ones;
            -1 for none.
        scale: None: ``D ** -0.5``.
        max_seqlen: at least the length of the longest sequence; None: T. It changes what gradients cost.
            On a GPU nothing checks it, since the host would have to wait: results of a longer one are undefined.

    Returns:
        ``[B, H_q, S, D_v]`` or ``[T, H_q, D_v]``, in the type of query.

    Raises:
        TypeError: an argument that is no tensor, or no number.
        ValueError: shapes, types or sizes.
        NotImplementedError, RuntimeError: what the kernels do not have, or an architecture without them.
    """
    for name, x in (
        ("query", query),
        ("key", key),
        ("value", value),
        ("compressed_key", compressed_key),
        ("compressed_value", compressed_value),
        ("gates", gates),
    ):
        check_tensor(_WHERE, name, x)
    if dtype := autocast_type(query):
        given = [query, key, value, compressed_key, compressed_value]
        query, key, value, compressed_key, compressed_value = in_type(given, dtype)
    packed = query.ndim == 3
    _check(query, key, value, compressed_key, compressed_value, gates, (cu_seqlens, cu_seqlens_compressed))
    if scale is not None and checked_number(_WHERE, "scale", scale) <= 0:
        raise make_error(ValueError, _WHERE, "scale", scale, "a number above 0, or None")
    for name, given in (
        ("cu_seqlens", cu_seqlens),
        ("cu_seqlens_compressed", cu_seqlens_compressed),
        ("block_indices", block_indices),
    ):
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            raise make_error(ValueError, _WHERE, f"type of {name}", given.dtype, "torch.int32 or torch.int64")
    most = ALWAYS + MOST if query.dtype in _NARROW else None
    sizes = (block_size, compress_stride)
    check_choice(_WHERE, *sizes, selected_blocks, window_size, most, block_indices is not None)
    if max_seqlen is not None and (isinstance(max_seqlen, bool) or not isinstance(max_seqlen, int | torch.SymInt)):
        checked_number(_WHERE, "max_seqlen", max_seqlen, integer=True)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    q, k, v, ck, cv, g = (
        x if packed else x.transpose(1, 2).flatten(0, 1)
        for x in (query, key, value, compressed_key, compressed_value, gates)
    )
    if cu_seqlens is None or cu_seqlens_compressed is None:
        ends, ends_compressed, longest = _ends(query), _ends(compressed_key), query.shape[2]
    else:
        ends, ends_compressed = cu_seqlens.int(), cu_seqlens_compressed.int()
        longest = q.shape[0] if max_seqlen is None else max_seqlen
    best = selected_blocks - ALWAYS
    most_keys = ck.shape[0] if packed else compressed_key.shape[2]  # of a sequence
    lists = block_indices
    if lists is not None:
        expected = (*key.shape[:-1], max(lists.shape[-1], 1) if lists.ndim else 1)
        if lists.shape != expected:
            allowed = f"({', '.join(map(str, key.shape[:-1]))}, n), n of 1 and more"
            raise make_error(ValueError, _WHERE, "shape of block_indices", tuple(lists.shape), allowed)
        lists = (lists if packed else lists.transpose(1, 2).flatten(0, 1)).int().contiguous()
    g = g if g.element_size() <= q.element_size() else g.float()
    differentiated = torch.is_grad_enabled() and any(
        x.requires_grad for x in (query, key, value, compressed_key, compressed_value, gates)
    )
    if not differentiated and selection_takes_gates(q, v, block_size):
        compressed, _, lists = _compressed(q, ck, cv, lists, ends, ends_compressed, factor, best, *sizes, most_keys)
        rest = (factor, block_size, window_size, longest)
        out = nsa_gated_selection(q, k, v, compressed, g, lists, ends, ends if packed else None, *rest)
        if packed:
            _clear_rest(out, ends)
    else:
        rest = (factor, best, *sizes, most_keys, window_size, longest)
        out, *_ = nsa_branches(q, k, v, ck, cv, g, lists, ends, ends_compressed, ends if packed else None, *rest)
    return out if packed else out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _clear_rest(x: torch.Tensor, ends: torch.Tensor) -> None:
    """Sets rows outside all sequences, which no kernel writes, to 0."""
    x.masked_fill_((torch.arange(len(x), dtype=torch.int64, device=x.device) >= ends[-1]).view(-1, 1, 1), 0)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    ends: tuple[Maybe, Maybe],
) -> None:
    """Raises for tensors that do not fit together."""
    packed = q.ndim == 3
    if packed != (ends[0] is not None) or packed != (ends[1] is not None):
        got = tuple(None if x is None else tuple(x.shape) for x in ends)
        allowed = "both, for [T, H, D]" if packed else "None, for [B, H, S, D]"
        raise make_error(ValueError, _WHERE, "cu_seqlens, cu_seqlens_compressed", got, allowed)
    if ends[0] is not None and ends[1] is not None and (ends[0].ndim != 1 or ends[0].shape != ends[1].shape):
        got = [tuple(x.shape) for x in (ends[0], ends[1])]
        raise make_error(
            ValueError, _WHERE, "shapes of cu_seqlens, cu_seqlens_compressed", got, "(sequences + 1,), both"
        )
    if any(x.ndim != q.ndim for x in (k, v, ck, cv, gates)) or q.ndim not in (3, 4):
        got = [tuple(x.shape) for x in (q, k, v, ck, cv, gates)]
        raise make_error(ValueError, _WHERE, "shapes", got, "[B, H, S, D], or [T, H, D], for all tensors")
    row, head = (0, 1) if packed else (2, 1)
    hq, hk, d, dv = q.shape[head], k.shape[head], q.shape[-1], v.shape[-1]
    if hk == 0 or hq % hk:
        raise make_error(ValueError, _WHERE, "heads of query", hq, f"multiples of the {hk} heads of key")
    first = q.shape[:1] if not packed else ()
    wanted = {
        "key": (k, q.shape[row], hk, d),
        "value": (v, q.shape[row], hk, dv),
        "gates": (gates, q.shape[row], hq, 3),
        "compressed_key": (ck, ck.shape[row], hk, d),
        "compressed_value": (cv, ck.shape[row], hk, dv),
    }
    for name, (x, rows, heads, width) in wanted.items():
        shape = (rows, heads, width) if packed else (*first, heads, rows, width)
        if x.shape != shape:
            raise make_error(ValueError, _WHERE, f"shape of {name}", tuple(x.shape), str(shape))
    dtypes = {"query": q.dtype} | {name: x.dtype for name, (x, *_) in wanted.items() if name != "gates"}
    if len(set(dtypes.values())) > 1:
        raise make_error(ValueError, _WHERE, "types", dtypes, "one type for all but gates", "call .to(query.dtype)")


def _ends(x: torch.Tensor) -> torch.Tensor:
    """Where the sequences of ``[B, H, S, D]`` end."""
    batch, rows = x.shape[0], x.shape[2]
    if not rows:
        return torch.zeros(batch + 1, dtype=torch.int32, device=x.device)
    return torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=x.device)


def _by_kernels(q: torch.Tensor) -> bool:
    """Whether the classes of ``cudnn.NSA`` compute it; wider types are for tests on the CPU."""
    return q.is_cuda or q.dtype in _NARROW


def _row_values(q: torch.Tensor) -> torch.Tensor:
    """Memory for a value for every row of every head."""
    return q.new_empty(q.shape[:2], dtype=torch.float64 if q.dtype is torch.float64 else torch.float32)


def _results(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for O and the log-sum-exp."""
    return q.new_empty((*q.shape[:2], v.shape[2])), _row_values(q)


def _gradients(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for the gradients of q, k and v, which come after that of O."""
    return _like(inputs[1]), _like(inputs[2]), _like(inputs[3])


def _differentiable(operator: Any, backward: Any, tensors: int, count: int) -> None:
    """Makes O differentiable in q, k and v, the first inputs of an operator, whose first results are O and log-sum-exp.

    ``backward`` takes them, and the first ``tensors`` inputs after v, some of which may be None, then further ones.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:3], *output[:2], *inputs[3 : 3 + tensors])
        ctx.rest, ctx.none = inputs[3 + tensors : 3 + count], (None,) * (len(inputs) - 3)
        ctx.mark_non_differentiable(*output[1:])

    def differentiate(ctx: Any, d_o: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        return *backward(d_o.contiguous(), *ctx.saved_tensors, *ctx.rest), *ctx.none

    operator.register_autograd(differentiate, setup_context=setup)


def _run(api: Any, tensors: dict[str, Any], options: dict[str, Any]) -> None:
    """Executes a class of ``cudnn.NSA`` on tensors by name."""
    run(api, {name: placed(x) for name, x in tensors.items()}, options)  # results are where they were


@custom_op("nsa_compression", autocast=("q", "k", "v"), flops=flops.compression)
def nsa_compression(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed (O, log-sum-exp ``[T, H_q]``) of attention to compressed keys."""
    o, lse = _results(q, k, v)
    tensors = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "cum_seqlen_q": ends_q, "cum_seqlen_k": ends_k}
    if _by_kernels(q):
        _run(NSA.CompressionAttention, tensors, {"scale_softmax": scale})
    else:
        reference.compression(tensors, scale, 1.0, packed=True)
    return o, lse


@custom_op("nsa_compression_bwd", flops=flops.compression_backward)
def nsa_compression_bwd(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    if _by_kernels(q):
        q, k, v, o, d_o = map(placed, (q, k, v, o, d_o))
        grads = NSA.compression_attention_backward_wrapper(q, k, v, o, d_o, lse, ends_q, ends_k, scale)
        return _contiguous(*grads.values())
    dq, dk, dv = _gradients(d_o, q, k, v)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "do": d_o,
        "lse": lse,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "cum_seqlen_q": ends_q,
        "cum_seqlen_k": ends_k,
    }
    reference.compression_backward(tensors, scale, packed=True)
    return dq, dk, dv


def _contiguous(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients as compilers are told that they lie; wrappers of ``cudnn.NSA`` give them the order of Q, K and V."""
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


nsa_compression.register_fake(_results)
nsa_compression_bwd.register_fake(_gradients)
_differentiable(nsa_compression, nsa_compression_bwd, 2, 3)


@custom_op("nsa_top_k", flops=flops.top_k)
def nsa_top_k(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    scale: float,
    count: int,
    block_size: int,
    compress_stride: int,
) -> torch.Tensor:
    """Packed lists ``[T, H_kv, 4 + count]``: the first block, the newest ones, and those with the largest probabilities
    of compressed keys, from their log-sum-exp; -1 for none.
    """
    scores, indices = lse.new_empty((q.shape[0], k.shape[1], count)), _full_lists(q, k, count)
    tensors = {
        "q": q,
        "k": k,
        "lse": lse,
        "topk_scores": scores,
        "topk_indices": indices,
        "cum_seqlen_q": ends_q,
        "cum_seqlen_k": ends_k,
    }
    if _by_kernels(q):
        options = {"k_value": count, "selection_block_size": block_size, "compress_stride": compress_stride}
        _run(NSA.TopKReduction, tensors, {**options, "scale_softmax": scale, "include_fixed_blocks": True})
    else:
        reference.top_k(tensors, scale, block_size, compress_stride, count, packed=True, fixed=True)
    return indices


def _full_lists(q: torch.Tensor, k: torch.Tensor, count: int) -> torch.Tensor:
    return q.new_empty((q.shape[0], k.shape[1], ALWAYS + count), dtype=torch.int32)


nsa_top_k.register_fake(lambda q, k, lse, ends_q, ends_k, scale, count, *_: _full_lists(q, k, count))


def _compressed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: Maybe,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    scale: float,
    count: int,
    block_size: int,
    compress_stride: int,
    most_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """O and LSE of compression, and the lists unless the caller passes them, by one kernel or two."""
    rest, sizes = (ends_q, ends_k, scale), (count, block_size, compress_stride)
    if lists is None and _in_one_pass(q, k, v, most_keys, count):
        return nsa_compression_top_k(q, k, v, *rest, *sizes, most_keys)
    o, lse = nsa_compression(q, k, v, *rest)
    return o, lse, nsa_top_k(q.detach(), k.detach(), lse, *rest, *sizes) if lists is None else lists


def _in_one_pass(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, most_keys: int, best: int) -> bool:
    """Whether one kernel computes compression and top-k: where the compressed keys of every sequence fit one tile."""
    heads, group = (q.shape[-1], v.shape[-1]), q.shape[1] // k.shape[1]
    fits = (
        0 < most_keys <= one_pass.COMPRESSION_TOP_K_KEYS[-1]
        and heads in one_pass.HEADS
        and group <= one_pass.MOST_HEADS
    )
    return q.dtype in _NARROW and fits and best <= MOST


@custom_op("nsa_compression_top_k", autocast=("q", "k", "v"), flops=flops.compression_top_k)
def nsa_compression_top_k(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    scale: float,
    count: int,
    block_size: int,
    compress_stride: int,
    most_keys: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What nsa_compression and nsa_top_k compute, in one kernel. ``most_keys``: compressed ones of a sequence."""
    log_once("one kernel computes compression and top-k, since the compressed keys of a sequence fit one tile")
    (o, lse), lists = _results(q, k, v), _full_lists(q, k, count)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "lse": lse,
        "topk_indices": lists,
        "cum_seqlen_q": ends_q,
        "cum_seqlen_k": ends_k,
    }
    options = {"k_value": count, "selection_block_size": block_size, "compress_stride": compress_stride}
    _run(NSA.CompressionTopK, tensors, {**options, "max_s_k": most_keys, "scale_softmax": scale})
    return o, lse, lists


nsa_compression_top_k.register_fake(
    lambda q, k, v, ends_q, ends_k, scale, count, *_: (*_results(q, k, v), _full_lists(q, k, count))
)
_differentiable(nsa_compression_top_k, nsa_compression_bwd, 2, 3)


def _lists(lists: torch.Tensor, ends: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of the block lists."""
    counts = torch.full(lists.shape[:2], lists.shape[2], dtype=torch.int32, device=lists.device)
    return {"block_indices": lists, "block_counts": counts, "cum_seqlen_q": ends}


@custom_op("nsa_selection", autocast=("q", "k", "v"), flops=flops.selection)
def nsa_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed (O, log-sum-exp ``[T, H_q]``) of causal attention to the blocks of lists ``[T, H_kv, n]``."""
    (o, sums), by_block = _results(q, k, v), kv_outer.is_faster(q, k, v, lists, block_size)
    if selection_takes_gates(q, v, block_size) and not by_block:
        selection(q, k, v, o, sums, lists, ends, scale, block_size)
        return o, sums
    maxima = _row_values(q)
    tensors = {"q": q, "k": k, "v": v, "o": o, "l": sums, "m": maxima, **_lists(lists, ends)}
    if by_block:
        block_lists = (lists, tensors["block_counts"], ends)
        kv_outer.attend((q, k, v), (o, sums, maxima), block_lists, block_size, scale, True)
    elif _by_kernels(q):
        options = {"block_size": block_size, "scale_softmax": scale, "is_causal": True}
        _run(NSA.SelectionAttention, tensors, options)
    else:
        reference.selection(tensors, scale, block_size, causal=True)
    return o, maxima + sums.log()


@custom_op("nsa_selection_bwd", flops=flops.selection_backward)
def nsa_selection_bwd(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    scale: float,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    block_lists = _lists(lists, ends)
    if _by_kernels(q):
        q, k, v, o, d_o = map(placed, (q, k, v, o, d_o))
        given = (q, k, v, o, d_o, lse, lists, block_lists["block_counts"], ends)
        grads = NSA.selection_attention_backward_wrapper(*given, block_size, scale, True)
        return _contiguous(*grads.values())
    dq, dk, dv = _gradients(d_o, q, k, v)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": d_o, "lse": lse, "dq": dq, "dk": dk, "dv": dv, **block_lists}
    reference.selection_backward(tensors, scale, block_size, causal=True)
    return dq, dk, dv


nsa_selection.register_fake(_results)
nsa_selection_bwd.register_fake(_gradients)
_differentiable(nsa_selection, nsa_selection_bwd, 2, 4)


def _described(x: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    """Rows, packed or of one length, as the graph has them: (b, h, longest, d)."""
    row, head, one = x.stride()
    strides = (longest * row, head, row, one)
    return torch.empty_strided((batch, x.shape[1], longest, x.shape[2]), strides, dtype=x.dtype, device="meta")


def _window(
    cache: operator_graphs.GraphCache,
    describe: Any,
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    ends: Maybe,
    scale: float,
    window: int,
    longest: int,
) -> None:
    """Runs a graph of attention to the newest rows of sequences, with tensors by name. No ``ends``: of one length."""
    rows = {name: x for name, x in {**inputs, **outputs}.items() if x.ndim == 3}
    q = next(iter(rows.values()))
    if not q.numel():
        return
    batch = _batch(q, ends, longest)
    described = {name: _described(x, batch, longest) for name, x in rows.items()}
    if ends is None:
        shapes = {name: (x.shape, x.stride()) for name, x in described.items()}
        inputs, outputs = (
            {name: x.as_strided(*shapes[name]) if name in shapes else x for name, x in given.items()}
            for given in (inputs, outputs)
        )
    else:
        if ends.device.type == "cpu" and int(ends.diff().max()) > longest:  # on a GPU the host would have to wait
            got, allowed = longest, f"at least {int(ends.diff().max())}, the longest sequence"
            raise make_error(ValueError, _WHERE, "max_seqlen", got, allowed, "leave it out")
        lengths, starts = ends.diff().view(-1, 1, 1, 1), ends.long().view(-1, 1, 1, 1)
        first = {step: starts * step for step in {x.stride(0) for x in rows.values()}}
        inputs = {**inputs, "seq_len_q": lengths, "seq_len_kv": lengths}
        inputs |= {f"offset_{name}": first[x.stride(0)] for name, x in rows.items()}
    options = {"attn_scale": scale, "diagonal_band_left_bound": window, "diagonal_band_right_bound": 0}
    operator_graphs.run(cache, describe, inputs, outputs, options, described)


def _batch(x: torch.Tensor, ends: Maybe, longest: int) -> int:
    """How many sequences there are."""
    return x.shape[0] // max(longest, 1) if ends is None else ends.shape[0] - 1


@custom_op("nsa_window", autocast=("q", "k", "v"), flops=flops.sliding_window)
def nsa_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: Maybe, scale: float, window: int, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and, ``[B, H_q, longest, 1]``, the log-sum-exp of causal attention to the newest rows, by cuDNN.

    Sequences are packed, or, without ``ends``, have ``longest`` rows each.
    """
    results = _window_results(q, v, ends, longest)
    inputs = {name: aligned(x) for name, x in (("q", q), ("k", k), ("v", v))}
    outputs = {"o": results[0], "stats": results[1]}
    _window(_window_cache, describe_forward, inputs, outputs, ends, scale, window, longest)
    return results


def _window_results(q: torch.Tensor, v: torch.Tensor, ends: Maybe, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    stats = (_batch(q, ends, longest), q.shape[1], longest, 1)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(stats, dtype=_row_values(q).dtype)


@custom_op("nsa_window_bwd", flops=flops.sliding_window_backward)
def nsa_window_bwd(
    d_o: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    ends: Maybe,
    scale: float,
    window: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k and v."""
    rows = {"q": q, "k": k, "v": v, "o": o, "do": d_o}
    inputs = {**{name: aligned(x) for name, x in rows.items()}, "stats": stats}
    gradients = _gradients(d_o, q, k, v)
    if longest == 1:  # a row's one weight is 1, whatever its score; cuDNN has no gradients of one row and one key
        dq, dk, dv = gradients
        return dq.zero_(), dk.zero_(), torch.sum(d_o.unflatten(1, (k.shape[1], -1)), 2, out=dv)
    outputs = {f"d{x}": out for x, out in zip("qkv", gradients, strict=True)}
    _window(_window_backward_cache, describe_backward, inputs, outputs, ends, scale, window, longest)
    return gradients


nsa_window.register_fake(lambda q, k, v, ends, scale, window, longest: _window_results(q, v, ends, longest))
nsa_window_bwd.register_fake(_gradients)
_differentiable(nsa_window, nsa_window_bwd, 1, 4)


def _in_one_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lists: torch.Tensor, block_size: int) -> bool:
    """Whether selection's kernel computes the window too, and adds up the branches."""
    return selection_takes_gates(q, v, block_size) and not kv_outer.is_faster(q, k, v, lists, block_size)


@custom_op("nsa_gated_selection", autocast=("q", "k", "v", "compressed"), flops=flops.gated_selection)
def nsa_gated_selection(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    compressed: torch.Tensor,
    gates: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    ends_window: Maybe,
    scale: float,
    block_size: int,
    window: int,
    longest: int,
) -> torch.Tensor:
    """What nsa_gates makes of nsa_selection, nsa_window and compression, in one kernel where that is fastest. It has no
    gradient.
    """
    if _in_one_kernel(q, k, v, lists, block_size):
        windowed = torch.empty_like(compressed)
        return gated_selection(q, k, v, lists, ends, scale, block_size, window, compressed, windowed, gates)
    windowed, _ = nsa_window(q, k, v, ends_window, scale, window, longest)
    selected, _ = nsa_selection(q, k, v, lists, ends, scale, block_size)
    return nsa_gates(compressed, selected, windowed, gates)


nsa_gated_selection.register_fake(lambda q, k, v, compressed, *_: _like(compressed))


@custom_op("nsa_branches", autocast=("q", "k", "v", "ck", "cv"), flops=flops.branches)
def nsa_branches(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    given_lists: Maybe,
    ends: torch.Tensor,
    ends_compressed: torch.Tensor,
    ends_window: Maybe,
    scale: float,
    count: int,
    block_size: int,
    compress_stride: int,
    most_keys: int,
    window: int,
    longest: int,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """The sum of the branches, each times its gate, then O and log-sum-exp of each branch, and the lists, if none are
    given.
    """
    sizes = (count, block_size, compress_stride, most_keys)
    o, lse, lists = _compressed(q, ck, cv, given_lists, ends, ends_compressed, scale, *sizes)
    if _in_one_kernel(q, k, v, lists, block_size):
        windowed, stats = _window_results(q, v, ends_window, longest)
        selected, selected_lse = torch.empty_like(o), _row_values(q)
        saved = (stats.squeeze(-1), selected, selected_lse)
        out = gated_selection(q, k, v, lists, ends, scale, block_size, window, o, windowed, gates, *saved)
    else:
        windowed, stats = nsa_window(q, k, v, ends_window, scale, window, longest)
        selected, selected_lse = nsa_selection(q, k, v, lists, ends, scale, block_size)
        out = nsa_gates(o, selected, windowed, gates)
    if ends_window is not None:
        _clear_rest(out, ends)
    own_lists = lists if given_lists is None else lists.new_empty(0)
    return out, o, lse, selected, selected_lse, windowed, stats, own_lists


@nsa_branches.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    given_lists: Maybe,
    ends: torch.Tensor,
    ends_compressed: torch.Tensor,
    ends_window: Maybe,
    scale: float,
    count: int,
    *sizes: int,
) -> tuple[torch.Tensor, ...]:
    own_lists = _full_lists(q, k, count) if given_lists is None else given_lists.new_empty(0)
    window = _window_results(q, v, ends_window, sizes[-1])
    return _results(q, k, v)[0], *_results(q, k, v), *_results(q, k, v), *window, own_lists


@custom_op("nsa_branches_bwd", flops=flops.branches_backward)
def nsa_branches_bwd(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ck: torch.Tensor,
    cv: torch.Tensor,
    gates: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    selected: torch.Tensor,
    selected_lse: torch.Tensor,
    windowed: torch.Tensor,
    stats: torch.Tensor,
    lists: torch.Tensor,
    ends: torch.Tensor,
    ends_compressed: torch.Tensor,
    ends_window: Maybe,
    scale: float,
    block_size: int,
    window: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of q, k, v, ck, cv and gates."""
    branches, transposed_lists = (o, selected, windowed), None
    block_counts = _lists(lists, ends)["block_counts"]
    if has_one_call(q, v, ck):
        inputs = {"q": q, "k": k, "v": v, "compressed_k": ck, "compressed_v": cv, "gates": gates, "out": d_out}
        packed = None if ends_window is None else (ends, ends_compressed)
        with forked(q.device) as beside:  # many small kernels; their memory is not used again before the next call here
            with beside:
                transposed_lists = csr_transpose(lists, block_counts, ends, block_size, True)
            grads = branch_gradients(inputs, branches, (lse, stats), packed, scale, window, longest)
        sums = grads["dq"], grads["dk"], grads["dv"]
        d_selected, d_gates = grads["d_selected"], grads["d_gates"]
        d_ck, d_cv = grads["compressed_dk"], grads["compressed_dv"]
    else:
        d_o, d_selected, d_windowed, d_gates = nsa_gates_bwd(d_out, *branches, gates)
        sums = nsa_window_bwd(d_windowed, q, k, v, windowed, stats, ends_window, scale, window, longest)
        dq, d_ck, d_cv = nsa_compression_bwd(d_o, q, ck, cv, o, lse, ends, ends_compressed, scale)
        sums[0].add_(dq)
    if _by_kernels(q):
        q, k, v = map(placed, (q, k, v))
        given = (q, k, v, selected, d_selected, selected_lse, lists, block_counts, ends)
        added = {"accumulate_into": sums, "transposed_lists": transposed_lists}
        NSA.selection_attention_backward_wrapper(*given, block_size, scale, True, **added)
    else:
        more = nsa_selection_bwd(d_selected, q, k, v, selected, selected_lse, lists, ends, scale, block_size)
        for x, y in zip(sums, more, strict=True):
            x.add_(y)
    if ends_window is not None:
        for x, its in ((d_ck, ends_compressed), (d_cv, ends_compressed), *((x, ends) for x in (*sums, d_gates))):
            _clear_rest(x, its)
    return *sums, d_ck, d_cv, d_gates


nsa_branches_bwd.register_fake(
    lambda d_out, q, k, v, ck, cv, gates, *_: tuple(_like(x) for x in (q, k, v, ck, cv, gates))
)


def _setup_branches(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *branches, lists = output[1:]
    given = inputs[6]
    ctx.save_for_backward(*inputs[:6], *branches, lists if given is None else given, *inputs[7:10])
    scale, _, block_size, _, _, window, longest = inputs[10:]
    ctx.options = (scale, block_size, window, longest)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # zeros for the branches take time


def _differentiate_branches(ctx: Any, d_out: Maybe, *_: Any) -> tuple[Any, ...]:
    if d_out is None:
        return (None,) * 17
    return *nsa_branches_bwd(d_out.contiguous(), *ctx.saved_tensors, *ctx.options), *[None] * 11


nsa_branches.register_autograd(_differentiate_branches, setup_context=_setup_branches)
