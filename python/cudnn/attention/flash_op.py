"""Attention in FlashAttention's layouts, as operators that autograd knows, by the kernels of ``cudnn.sdpa``.

Sequences of one length are (b, s, h, d), packed ones (t, h, d) with the offsets ``cu_seqlens``, which stay on the GPU.
"""

# No `from __future__ import annotations`: PyTorch reads the types.

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cudnn.errors import make_error
from cudnn.full_precision import full_precision
from cudnn.fused.object_cache import run
from cudnn.gemm.formats import name_of
from cudnn.runtime import flops, launch
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import SMALL, custom_op
from cudnn.runtime.run import has_kernel
from cudnn.runtime.run import run as run_kernel
from cudnn.runtime.vmap import in_front, one_by_one
from cudnn.sdpa import SdpaBackward, SdpaForward, heuristics, reference
from cudnn.sdpa.reference import Window
from cudnn_kernels.attention import AppendConfiguration

WHERE = "flash_attn"
BATCH_INVARIANT_SPLITS = 8
"""``num_splits`` of batch-invariant calls, whatever their sizes: enough CTAs for a few sequences, and at most 8 partial
results of a row to combine.
"""
FARTHEST = 2**30
"""A bound of a window that hides nothing, in the kernels' 32 bits."""
LONGEST = 2**31 - 1
"""``max_s`` of the kernels' class, which then does not read the offsets. The kernels need no lengths from the host."""
_WIDE = (torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
Maybe = torch.Tensor | None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Maybe, cu_k: Maybe, sinks: Maybe) -> None:
    """Refuses shapes, types and devices that no kernel takes."""
    packed, rank = cu_q is not None, 3 if cu_q is not None else 4
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
    if any(len(shape) != rank for shape in shapes.values()):
        dense, varlen = "(b, s, h, d) without cu_seqlens", "(t, h, d) with cu_seqlens"
        hint = "" if packed else "call flash_attn_varlen_func with cu_seqlens for packed sequences"
        raise make_error(ValueError, WHERE, "shapes", shapes, f"{varlen if packed else dense}", hint)
    if k.shape[:-1] != v.shape[:-1] or q.shape[-1] != k.shape[-1] or (not packed and q.shape[0] != k.shape[0]):
        allowed = "q (.., hq, d), k (.., hk, d) and v (.., hk, dv), k and v of the same tokens and heads"
        raise make_error(ValueError, WHERE, "shapes", shapes, allowed)
    hq, hk = q.shape[-2], k.shape[-2]
    if not hk or hq % hk:
        raise make_error(ValueError, WHERE, "heads of q", hq, f"multiples of the {hk} heads of k and v")
    heads = q.shape[-1], v.shape[-1]
    if heads not in SdpaForward.head_sizes:
        allowed = ", ".join(str(x) for x in SdpaForward.head_sizes)
        hint = "pad the heads with zeros and pass softmax_scale"
        raise make_error(NotImplementedError, WHERE, "head sizes of q and v", heads, allowed, hint)
    types = {"q": (q.dtype, q.device), "k": (k.dtype, k.device), "v": (v.dtype, v.device)}
    if len({*types.values()}) > 1:
        got = {name: f"{dtype} on {device}" for name, (dtype, device) in types.items()}
        raise make_error(ValueError, WHERE, "types and devices", got, "one type, and one device, for all three")
    if q.dtype not in _HALVES and (q.dtype not in _WIDE or q.device.type == "cuda"):
        allowed = "torch.float16 or torch.bfloat16; torch.float32 or torch.float64 on the CPU"
        raise make_error(TypeError, WHERE, "type of q", q.dtype, allowed, "convert all three")
    if sinks is not None and (
        sinks.shape != (hq,) or sinks.dtype not in (torch.float32, q.dtype) or sinks.device != q.device
    ):
        got = f"{sinks.dtype} of the shape {tuple(sinks.shape)} on {sinks.device}"
        raise make_error(ValueError, WHERE, "sinks", got, f"torch.float32 of the shape ({hq},) on {q.device}")
    for name, ends in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        _check_offsets(name, ends, q.device)
    if cu_q is not None and cu_k is not None and cu_q.shape != cu_k.shape:
        got = f"{cu_q.shape[0]} and {cu_k.shape[0]} offsets"
        raise make_error(ValueError, WHERE, "cu_seqlens_q and cu_seqlens_k", got, "as many in both")


def _check_offsets(name: str, ends: Maybe, device: torch.device) -> None:
    if ends is not None and (
        ends.ndim != 1 or ends.shape[0] < 2 or ends.dtype is not torch.int32 or ends.device != device
    ):
        got = f"{ends.dtype} of the shape {tuple(ends.shape)} on {ends.device}"
        allowed = f"torch.int32 of the shape (sequences + 1,), one sequence or more, on {device}"
        raise make_error(ValueError, WHERE, name, got, allowed, f"pass {name}.to({str(device)!r}, torch.int32)")


def check_values(q: torch.Tensor, k: torch.Tensor, cu_q: Maybe, cu_k: Maybe, longest: tuple[int, int]) -> None:
    """On the CPU, refuses offsets that do not cover the tokens, and too small lengths. A GPU would have to be waited
    for.
    """
    for side, x, ends, most in (("q", q, cu_q, longest[0]), ("k", k, cu_k, longest[1])):
        if ends is None or ends.device.type != "cpu":
            continue
        values, total = ends.tolist(), x.shape[0]
        lengths = ends.diff()
        if values[0] or values[-1] != total or bool((lengths < 0).any()):
            allowed = f"0, then where each sequence ends, up to the {total} tokens of {side}"
            hint = "make tokens of no sequence, as padding, a last sequence"
            raise make_error(ValueError, WHERE, f"cu_seqlens_{side}", values, allowed, hint)
        if most < int(lengths.max()):
            allowed = f"at least {int(lengths.max())}, the longest sequence"
            raise make_error(ValueError, WHERE, f"max_seqlen_{side}", most, allowed)


def _options(
    q: torch.Tensor,
    k: torch.Tensor,
    packed: bool,
    longest: tuple[int, int],
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    top_left: bool,
    batch_invariant: bool,
) -> dict[str, Any]:
    """Of the kernels' classes. Bounds of the window that hide no key are left out, unless that would depend on other
    sequences.
    """
    left, right = window[0], 0 if causal else window[1]
    if not packed:
        options = heuristics.options(q.shape[1], k.shape[1], scale, left + 1 if left >= 0 else -1, right, top_left)
    else:
        rows, keys = longest
        left, right = (min(end, FARTHEST) for end in (left, right))
        if not batch_invariant:
            left = left if left < (rows if top_left else keys) - 1 else -1
            right = right if right < (keys if top_left else rows) - 1 else -1
        window = left, right if right > 0 else -1
        options = {"is_causal": right == 0, "window_size": window, "scale_softmax": scale}
        options |= {"top_left": top_left and max(left, right) >= 0}
        options |= {"max_s_q": LONGEST, "max_s_k": LONGEST}
    return options | {"softcap": softcap}


def _readable(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Q, K or V as the kernels take it, (b, h, s, d) or (t, h, d); a copy where its memory is arranged otherwise."""
    if x.is_contiguous() and x.data_ptr() % 16 == 0:  # head sizes are multiples of 16 bytes
        return x if packed else x.transpose(1, 2)
    x = x if packed else x.transpose(1, 2)
    layout, names = SdpaForward.spec("q").layout, ("sq", "hq", "d") if packed else ("b", "hq", "sq", "d")
    sizes = {**dict(zip(names, x.shape, strict=True)), "packed": packed}
    if layout.accepts(x.shape, x.stride(), sizes, 8 * x.element_size(), False) and x.data_ptr() % 16 == 0:
        return x
    return aligned(x) if packed else aligned(x.transpose(1, 2)).transpose(1, 2)


def _results(q: torch.Tensor, v: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty(shape, dtype=dtype)


def _kernel_tensors(packed: bool, **tensors: Maybe) -> dict[str, torch.Tensor]:
    """The tensors by the names of the kernels' classes, as views in their dimensions; without those that are None."""
    found: dict[str, torch.Tensor] = {}
    for name, x in tensors.items():
        if x is None:
            continue
        if name in ("lse", "dlse"):
            x = x.t() if packed else x
        elif name in ("o", "dq", "dk", "dv"):
            x = x if packed else x.transpose(1, 2)
        elif name in ("q", "k", "v", "do"):
            x = _readable(x, packed)
        else:
            x = x.contiguous()
        found[name] = x
    return found


def _key(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """Of the object that computes packed sequences. It takes any number of tokens: the choice of ordered sums in the
    backward pass depends on the sizes, which count up to a factor of two.
    """
    q, k, v, ends = tensors["q"], tensors["k"], tensors["v"], tensors["cum_seqlen_q"]
    sizes = tuple(x.bit_length() for x in (ends.shape[0], q.shape[0], k.shape[0]))
    return ("packed", q.dtype, q.device, *q.shape[1:], *v.shape[1:], *sizes, *tensors)


def _run(api: Any, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> None:
    """By the kernels; by the reference for the CPU's wide types, which no kernel has."""
    packed, q = "cum_seqlen_q" in tensors, tensors["q"]
    if q.dtype in _HALVES:
        run(api, tensors, options, key=_key(tensors) if packed else ())
        return
    left, right = options["window_size"]
    right = 0 if options["is_causal"] else right
    window = Window(right if right >= 0 else None, left if left >= 0 else None, options.get("top_left", False))
    scale, softcap = options["scale_softmax"], options["softcap"]
    launch.log_reference_runs(api._title())
    with torch.no_grad(), full_precision():
        if api is SdpaForward:
            reference.forward(tensors, window, scale, 1.0, softcap, packed)
        else:
            reference.backward(tensors, window, scale, packed, softcap)


@custom_op("flash_attn", autocast=("q", "k", "v"), flops=flops.flash_attention, repeats=SMALL)
def flash_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    top_left: bool = False,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE), both differentiable: LSE is (b, h, s), or (h, t) of packed sequences, in float32 (float64 for float64).

    ``deterministic`` concerns the backward pass, ``batch_invariant`` both. The arguments are those of
    :func:`cudnn.ops.flash_attn_varlen_func`, all of them given; -1 is no bound of the window. ``top_left``: row i of a
    sequence stands at key i.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, sinks)
    packed, longest = cu_seqlens_q is not None, (max_seqlen_q, max_seqlen_k)
    check_values(q, k, cu_seqlens_q, cu_seqlens_k, longest)
    o, lse = _results(q, v, packed)
    if not q.numel():
        return o, lse
    if not k.numel():
        lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None].expand(lse.shape))
        return o.zero_(), lse
    window = window_left, window_right
    options = _options(q, k, packed, longest, softmax_scale, causal, window, softcap, top_left, batch_invariant)
    options |= {"num_splits": BATCH_INVARIANT_SPLITS} if batch_invariant else {}
    ends = {"cum_seqlen_q": cu_seqlens_q, "cum_seqlen_k": cu_seqlens_k}
    _run(SdpaForward, _kernel_tensors(packed, q=q, k=k, v=v, o=o, lse=lse, **ends, sink=sinks), options)
    return o, lse


@flash_attn.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Maybe, cu_k: Maybe, sinks: Maybe, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(q, k, v, cu_q, cu_k, sinks)
    return _results(q, v, cu_q is not None)


def _gradients(
    dout: torch.Tensor,
    dlse: Maybe,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: Maybe,
    cu_seqlens_k: Maybe,
    sinks: Maybe,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for those of Q, K, V and the sinks, contiguous; that of no sinks has no elements."""
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, lse.new_empty(0) if sinks is None else torch.empty_like(sinks)


@custom_op("flash_attn_bwd", flops=flops.flash_attention_backward, repeats=SMALL)
def flash_attn_bwd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    sinks: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    deterministic: bool,
    top_left: bool = False,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV, the gradient of the sinks), contiguous, from what :func:`flash_attn` got and gave, and the gradients
    of O and, if there is one, of LSE. Without sinks, the last has no elements.
    """
    inputs = (dout, dlse, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, sinks)
    gradients = dq, dk, dv, dsinks = _gradients(*inputs)
    if not q.numel() or not k.numel():
        for x in gradients[:3]:
            x.zero_()
        if sinks is not None:  # without keys, LSE is the sink
            dsinks.zero_() if dlse is None or not q.numel() else dsinks.copy_(dlse.movedim(-2, 0).flatten(1).sum(1))
        return gradients
    packed, longest, window = cu_seqlens_q is not None, (max_seqlen_q, max_seqlen_k), (window_left, window_right)
    options = _options(q, k, packed, longest, softmax_scale, causal, window, softcap, top_left, batch_invariant)
    options |= {"deterministic": deterministic, "batch_invariant": batch_invariant}
    ends = {"cum_seqlen_q": cu_seqlens_q, "cum_seqlen_k": cu_seqlens_k}
    of_sinks = {"sink": sinks, "dsink": None if sinks is None else dsinks}
    of_rows = {"do": dout, "lse": lse, "dlse": None if dlse is None else dlse.contiguous()}
    results = {"dq": dq, "dk": dk, "dv": dv}
    tensors = _kernel_tensors(packed, q=q, k=k, v=v, o=o, **of_rows, **results, **ends, **of_sinks)
    _run(SdpaBackward, tensors, options)
    return gradients


flash_attn_bwd.register_fake(_gradients)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:6])
    ctx.options = inputs[6:]


def _backward(ctx: Any, d_o: Maybe, d_lse: Maybe) -> tuple[Any, ...]:
    q, k, v, o, lse, cu_q, cu_k, sinks = ctx.saved_tensors
    nothing = (None,) * (2 + 1 + len(ctx.options))
    if d_o is None and d_lse is None:
        return None, None, None, *nothing
    *options, deterministic, top_left, batch_invariant = ctx.options
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    d_o = torch.zeros_like(o) if d_o is None else d_o
    inputs = (d_o, d_lse, q, k, v, o, lse, cu_q, cu_k, sinks)
    arguments: tuple[Any, ...] = (*inputs, *options, deterministic, top_left, batch_invariant)
    dq, dk, dv, dsinks = flash_attn_bwd(*arguments)
    return dq, dk, dv, None, None, None if sinks is None else dsinks, *nothing[3:]


flash_attn.register_autograd(_backward, setup_context=_setup)


@custom_op("flash_attn_append", mutates=("k_cache", "v_cache"), flops=flops.none)
def flash_attn_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
) -> torch.Tensor:
    """Writes new keys and values (b, s_new, hk, d) behind those of each sequence, and returns the lengths with them.

    The kernel writes nothing of a sequence without room, whose length becomes -1, nor into a page that does not exist.
    On the CPU the values were checked.
    """
    if not k.numel():
        return cache_seqlens + k.shape[1]
    if k.dtype in _HALVES and has_kernel(k, "flash_attn_append"):
        for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
            if x.stride(-1) != 1 or any(n % 8 for n in x.stride()[:-1]) or x.data_ptr() % 16:
                got, allowed = f"the strides {x.stride()}", "a last stride of 1, others and the address of 16 bytes"
                raise make_error(ValueError, "flash_attn_with_kvcache", name, got, allowed, "call .contiguous()")
        tensors = [aligned(k), aligned(v), k_cache, v_cache, cache_seqlens.contiguous()]
        lengths = torch.empty_like(tensors[-1])
        configuration = AppendConfiguration(name_of(k.dtype), k.shape[-1], v.shape[-1], block_table is not None)
        tables = [] if block_table is None else [block_table.contiguous()]
        run_kernel("cudnn_kernels.attention.append_kv:AppendKV", configuration, *tensors, lengths, *tables)
        return lengths
    position = cache_seqlens.long()[:, None] + torch.arange(k.shape[1], dtype=torch.int64, device=k.device)
    page = torch.arange(k.shape[0], dtype=torch.int64, device=k.device)[:, None]
    if block_table is not None:
        page = block_table.long().gather(1, position // k_cache.shape[1])
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[page, position % cache.shape[1]] = new
    return cache_seqlens + k.shape[1]


flash_attn_append.register_fake(lambda k_cache, v_cache, k, v, lengths, table: torch.empty_like(lengths))


@custom_op("flash_attn_kvcache", autocast=("q",), flops=flops.flash_attention_cached, repeats=SMALL)
def flash_attn_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    block_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    num_splits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE ``(b, h, s)``) of q (b, s, hq, d) and caches (b, s_k, hk, d), or pages (pages, page, hk, d) with a table
    (b, n). No gradient. The arguments are those of :func:`cudnn.ops.flash_attn_with_kvcache`.
    """
    check_cache(q, k_cache, v_cache, cache_seqlens, block_table, sinks)
    o, lse = _results(q, v_cache, False)
    if not q.numel():
        return o, lse
    if not k_cache.numel():
        lse = lse.fill_(-torch.inf) if sinks is None else lse.copy_(sinks[:, None].expand(lse.shape))
        return o.zero_(), lse
    tensors = _kernel_tensors(False, q=q, k=k_cache, v=v_cache, o=o, lse=lse, sink=sinks)
    tensors |= {"seqlen_k": cache_seqlens.contiguous()}
    if block_table is not None:
        tensors |= {"page_table": block_table.contiguous()}
    left, right = window_left, 0 if causal else window_right
    options = {"is_causal": right == 0, "window_size": (left, right if right > 0 else -1), "softcap": softcap}
    _run(SdpaForward, tensors, options | {"scale_softmax": softmax_scale, "num_splits": num_splits})
    return o, lse


def check_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, table: Maybe, sinks: Maybe
) -> None:
    """Refuses shapes, types and devices of a cache that no kernel takes."""
    where = "flash_attn_with_kvcache"
    one_batch = k if table is None or k.ndim != 4 else k[:1].expand(q.shape[0], -1, -1, -1)
    _check(
        q,
        one_batch,
        one_batch if v.shape == k.shape else v[:1].expand(one_batch.shape[0], -1, -1, -1),
        None,
        None,
        sinks,
    )
    if v.shape[:3] != k.shape[:3] or v.dtype != k.dtype or v.device != k.device:
        got = f"{v.dtype} of the shape {tuple(v.shape)}"
        raise make_error(ValueError, where, "v_cache", got, f"{k.dtype} of the shape {(*k.shape[:3], 'dv')}")
    for name, x, rank in (("cache_seqlens", lengths, 1), ("block_table", table, 2)):
        if x is not None and (
            x.ndim != rank or x.shape[0] != q.shape[0] or x.dtype is not torch.int32 or x.device != q.device
        ):
            got = f"{x.dtype} of the shape {tuple(x.shape)} on {x.device}"
            allowed = f"torch.int32 of {rank} dimensions, the first of size {q.shape[0]}, on {q.device}"
            raise make_error(ValueError, where, name, got, allowed)


@flash_attn_kvcache.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    table: Maybe,
    sinks: Maybe,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cache(q, k, v, lengths, table, sinks)
    return _results(q, v, False)


def over_batches(operator: Callable[..., Any]) -> Any:
    """The rule for ``torch.vmap``: the dimension becomes a part of the batch; packed sequences, and sinks that are
    mapped over, go one call after the other.
    """
    names = [argument.name for argument in operator._opoverload._schema.arguments]  # pyright: ignore[reportFunctionMemberAccess]

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        given, places = dict(zip(names, arguments, strict=False)), dict(zip(names, dims, strict=False))
        has_sink_gradient = operator is flash_attn_bwd and given["sinks"] is not None
        if given["cu_seqlens_q"] is not None or places["sinks"] is not None or has_sink_gradient:
            return one_by_one(operator, info.batch_size, dims, arguments)
        front = {
            name: in_front(x, places[name], info.batch_size)
            for name, x in given.items()
            if isinstance(x, torch.Tensor) and name != "sinks"
        }
        batch = front["q"].shape[1]
        results = operator(**given | {name: x.flatten(0, 1) for name, x in front.items()})
        split = [x.unflatten(0, (info.batch_size, batch)) for x in results if x.ndim > 1]
        rest = [x.expand(info.batch_size, 0) for x in results if x.ndim == 1]
        return (*split, *rest), (0,) * len(results)

    return rule


for _operator in (flash_attn, flash_attn_bwd):
    _operator.register_vmap(over_batches(_operator))
flash_attn_kvcache.register_vmap(lambda info, dims, *x: one_by_one(flash_attn_kvcache, info.batch_size, dims, x))


@flash_attn_append.register_vmap
def _(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    if dims[0] is None or dims[1] is None:
        hint = "map over k_cache and v_cache too"
        raise make_error(ValueError, "flash_attn_with_kvcache", "k_cache", "one for all", "one for each call", hint)
    return one_by_one(flash_attn_append, info.batch_size, dims, arguments)
