"""Attention by the kernels of ``cudnn.sdpa``, as an operator that autograd knows."""

# No `from __future__ import annotations`: PyTorch reads the types.

from typing import Any

import torch

from cudnn.attention.flash_op import flash_attn
from cudnn.attention.graphs import check, layouts, over_batches
from cudnn.fused.object_cache import run
from cudnn.runtime import flops, launch
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import SMALL, custom_op
from cudnn.sdpa import SdpaBackward, SdpaForward, heuristics
from cudnn.sdpa.base import MOST_SUMS

NAMES = "q", "k", "v"
Maybe = torch.Tensor | None


def has_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether autograd will ask for a backward pass."""
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)


def unsupported_reason(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: heuristics.Bounds,
    scale: float | None,
    other_inputs: str = "",
) -> str:
    """Why the kernels cannot compute this attention; "" if they can.

    ``other_inputs``: why not, if there are other inputs.
    """
    if other_inputs:
        return other_inputs
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return f"{q.ndim} dimensions: the kernels take (B, H, S, D)"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype}: the kernels take torch.float16 and torch.bfloat16"
    heads, differentiated = (q.shape[-1], v.shape[-1]), has_gradients(q, k, v)
    if differentiated and q.shape[0] * q.shape[1] * (q.shape[2] + 127) * q.shape[3] > MOST_SUMS:
        return f"a query of {q.numel()} elements: the kernels' gradients take up to 2^31"
    operations = [SdpaForward, SdpaBackward] if differentiated else [SdpaForward]
    return heuristics.unsupported_reason(heads, bounds, scale, operations)


def is_chosen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: heuristics.Bounds, has_sinks_or_lengths: bool = False
) -> bool:
    """Whether the kernels are used by default.

    They are where cuDNN has nothing; where :func:`is_faster` holds, without bounds or with a causal mask whose diagonal
    ends at the last row and key; and on Hopper for sinks, lengths and windows, which cost cuDNN's graphs further passes
    over the tensors.
    """
    rows, keys = q.shape[2], k.shape[2]
    if not has_sinks_or_lengths and is_needed(rows, keys, bounds):
        return True
    if has_sinks_or_lengths or bounds[2] != -1:
        return q.is_cuda and launch.device_architecture(q.device.index) == "sm_90a"
    return heuristics.is_timed(rows, keys, bounds) and is_faster(q, k, v)


def is_faster(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the kernels were measured faster than cuDNN's.

    They were on Hopper, for head sizes 64, 96, 128, 192, 192/128 and 256, from 131,072 rows of all heads and batches
    and 4,096 keys on, without PyTorch's deterministic algorithms.
    """
    if not q.is_cuda or torch.are_deterministic_algorithms_enabled():
        return False
    arch, rows = launch.device_architecture(q.device.index), q.shape[0] * q.shape[1] * q.shape[2]
    return heuristics.is_faster(arch, rows, k.shape[2], (q.shape[-1], v.shape[-1]))


def is_needed(rows: int, keys: int, bounds: heuristics.Bounds) -> bool:
    """Whether cuDNN has nothing for such sizes and bounds: more rows than keys where the diagonal ends at the last ones
    or there is a left bound.
    """
    is_causal, alignment, left, right = bounds
    if rows <= keys:
        return False
    return left != -1 or (alignment == 1 and (is_causal or right != -1))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool,
    alignment: int,
    left: int,
    right: int,
    *nothing: None,
    **neither: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE by the fused kernels, with the arguments of cuDNN's operator; needs no :func:`unsupported_reason`."""
    check(q, k, v, alignment, {"left_bound": left, "right_bound": right})
    top_left = not heuristics.is_level(q.shape[2], k.shape[2], alignment)
    if q.shape[2] == 1 and 0 < left < k.shape[2] and not top_left:  # these are the last keys
        k, v, left = k[:, :, -left:], v[:, :, -left:], -1
    return fused_sdpa(q, k, v, scale, is_causal, left, right, top_left)


def attend_with(
    sinks: Maybe,
    lengths: tuple[Maybe, Maybe, Maybe, Maybe],
    batch_invariant: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    is_causal: bool,
    alignment: int,
    left: int,
    right: int,
    *nothing: None,
    **neither: Any,
) -> tuple[torch.Tensor]:
    """O with sinks, lengths or both, by :func:`cudnn.attention.flash_op.flash_attn`, with each token contiguous.

    Tokens of no entry are separate sequences, without keys, or keys without rows: so their results are zeros.
    """
    check(q, k, v, alignment, {"left_bound": left, "right_bound": right})
    (batch, _, rows, _), keys = q.shape, k.shape[2]
    if sinks is not None:
        sinks = sinks.float()
    inputs, ends, longest = [x.transpose(1, 2) for x in (q, k, v)], (None, None), (rows, keys)
    if any(x is not None for x in lengths):
        inputs, longest = [x.flatten(0, 1) for x in inputs], (batch * rows, batch * keys)
        ends = _offsets(q, k, lengths)
    window = left - 1 if left != -1 else -1, 0 if is_causal and right == -1 else right
    switches = False, alignment == 0, batch_invariant
    arguments: tuple[Any, ...] = (*inputs, *ends, sinks, *longest, scale, False, *window, 0.0, *switches)
    o, _ = flash_attn(*arguments)
    return ((o if o.ndim == 4 else o.unflatten(0, (batch, rows))).transpose(1, 2),)


def _offsets(
    q: torch.Tensor, k: torch.Tensor, lengths: tuple[Maybe, Maybe, Maybe, Maybe]
) -> tuple[torch.Tensor, torch.Tensor]:
    """``cu_seqlens`` of rows and keys. Each entry is three sequences: its tokens, its rows beyond them without keys,
    and its keys beyond without rows. Two of the same kind come before the first entry.
    """
    (first_q, length_q), (first_k, length_k) = (side.spans() for side in layouts(q, k, lengths))
    end_q, end_k = first_q + length_q, first_k + length_k
    (total_q, total_k), zero = (
        [x.new_full((1,), x.shape[0] * x.shape[2], dtype=torch.int32) for x in (q, k)],
        first_q.new_zeros(1),
    )
    next_q = torch.cat([first_q[1:], total_q])
    of_q = torch.stack([first_q, end_q, next_q], 1).flatten()
    of_k = torch.stack([first_k, end_k, end_k], 1).flatten()
    return torch.cat([zero, first_q[:1], of_q, total_q]), torch.cat([zero, zero, of_k, total_k])


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the kernels take it; a copy where its memory is arranged otherwise."""
    sizes = dict(zip(("b", "h", "s", "d"), x.shape, strict=True))
    layout = SdpaForward.spec("q").layout
    readable = layout.accepts(x.shape, x.stride(), {**sizes, "packed": 0}, 8 * x.element_size(), False)
    return x if readable and x.data_ptr() % 16 == 0 else aligned(x)


def _options(
    q: torch.Tensor, k: torch.Tensor, scale: float, is_causal: bool, left: int, right: int, top_left: bool
) -> dict[str, Any]:
    """Of the classes, for an operator's bounds."""
    right = 0 if is_causal and right == -1 else right
    return heuristics.options(q.shape[2], k.shape[2], scale, left, right, top_left)


def _results(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32)


@custom_op("fused_sdpa", autocast=NAMES, flops=flops.attention, repeats=SMALL)
def fused_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_scale: float,
    is_causal: bool,
    left_bound: int,
    right_bound: int = -1,
    top_left: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, log-sum-exp ``[B, H_q, S_q]``). Row i stands at the key d(i) = i + S_k - S_q or, with ``top_left``, i. It
    sees the keys j with d(i) - ``left_bound`` < j <= d(i) + ``right_bound``, where -1 is no bound; ``is_causal`` is a
    right bound of 0, unless there is one.
    """
    o, lse = _results(q, v)
    if not q.numel() or not k.numel():
        return o.zero_(), lse.fill_(-torch.inf)
    q, k, v = map(_readable, (q, k, v))
    options = _options(q, k, attn_scale, is_causal, left_bound, right_bound, top_left)
    run(SdpaForward, {"q": q, "k": k, "v": v, "o": o, "lse": lse}, options)
    return o, lse


fused_sdpa.register_fake(lambda q, k, v, *_: _results(q, v))


def _gradients(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for those of Q, K and V, contiguous."""
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q, k, v


@custom_op("fused_sdpa_bwd", flops=flops.attention_backward, repeats=SMALL)
def fused_sdpa_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    attn_scale: float,
    is_causal: bool,
    left_bound: int,
    is_deterministic: bool = False,
    right_bound: int = -1,
    top_left: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV), contiguous, from what :func:`fused_sdpa` got and gave, and the gradient of O."""
    gradients = dq, dk, dv = _gradients(do, q, k, v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    q, k, v, o, do = map(_readable, (q, k, v, o, do))
    options = _options(q, k, attn_scale, is_causal, left_bound, right_bound, top_left)
    tensors = {"q": q, "k": k, "v": v, "o": o, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    run(SdpaBackward, tensors, options | {"deterministic": is_deterministic})
    return gradients


fused_sdpa_bwd.register_fake(_gradients)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_o: torch.Tensor, d_lse: Any) -> tuple[Any, ...]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, o, lse = ctx.saved_tensors
    scale, causal, left, *rest = ctx.options
    grads = fused_sdpa_bwd(d_o, q, k, v, o, lse, scale, causal, left, deterministic, *rest)
    return *grads, *[None] * len(ctx.options)


fused_sdpa.register_autograd(_backward, setup_context=_setup)


def _bounds_of_d256(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bounds: heuristics.Bounds,
    lengths: tuple[Maybe, ...],
) -> None:
    """Raises for what the operators of head size 256 do not take."""
    check(q, k, v, bounds[1], {"left_bound": bounds[2], "right_bound": bounds[3]})
    other = "lengths: the kernels take bounds alone" if any(x is not None for x in lengths) else ""
    reason = unsupported_reason(q, k, v, bounds, scale, other)
    if not reason and (q.shape[3], v.shape[3]) != (256, 256):
        reason = f"head sizes {(q.shape[3], v.shape[3])}: the kernels take 256"
    if not reason and bounds[2] != -1:
        reason = f"left_bound={bounds[2]}: the kernels take -1"
    if reason:
        raise NotImplementedError(f"sdpa_d256: got {reason}. To fix it, use torch.ops.cudnn.sdpa.")


@custom_op("sdpa_fwd_d256", autocast=NAMES, flops=flops.attention)
def sdpa_fwd_d256(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_scale: float,
    is_causal: bool,
    diagonal_alignment: int,
    left_bound: int,
    right_bound: int,
    seq_len_q: torch.Tensor | None,
    seq_len_kv: torch.Tensor | None,
    cumulative_seq_len_q: torch.Tensor | None,
    cumulative_seq_len_kv: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, Stats) of ``cudnn::sdpa``, by the kernels of ``cudnn.sdpa`` for heads of 256 elements.

    Raises:
        NotImplementedError: lengths, a left bound, a scale not above 0, or what else these kernels do not have.
    """
    bounds = is_causal, diagonal_alignment, left_bound, right_bound
    _bounds_of_d256(q, k, v, attn_scale, bounds, (seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv))
    top_left = not heuristics.is_level(q.shape[2], k.shape[2], diagonal_alignment)
    o, lse = fused_sdpa(q, k, v, attn_scale, is_causal, left_bound, right_bound, top_left)
    return o, lse.unsqueeze(-1)


@sdpa_fwd_d256.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _results(q, v)
    return o, lse.unsqueeze(-1)


@custom_op("sdpa_bwd_d256", flops=flops.attention_backward)
def sdpa_bwd_d256(
    dO: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    attn_scale: float,
    is_causal: bool,
    diagonal_alignment: int,
    left_bound: int,
    right_bound: int,
    seq_len_q: torch.Tensor | None,
    seq_len_kv: torch.Tensor | None,
    cumulative_seq_len_q: torch.Tensor | None,
    cumulative_seq_len_kv: torch.Tensor | None,
    is_deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV), contiguous, from what :func:`sdpa_fwd_d256` got and gave, and the gradient of O."""
    bounds = is_causal, diagonal_alignment, left_bound, right_bound
    _bounds_of_d256(q, k, v, attn_scale, bounds, (seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv))
    lse, top_left = stats.squeeze(-1).contiguous(), not heuristics.is_level(q.shape[2], k.shape[2], diagonal_alignment)
    arguments = (dO, q, k, v, o, lse, attn_scale, is_causal, left_bound, is_deterministic)
    return fused_sdpa_bwd(*arguments, right_bound, top_left)


sdpa_bwd_d256.register_fake(_gradients)


def _backward_of_d256(ctx: Any, d_o: torch.Tensor, d_stats: Any) -> tuple[Any, ...]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    gradients = sdpa_bwd_d256(d_o, *ctx.saved_tensors, *ctx.options, is_deterministic=deterministic)
    return *gradients, *[None] * len(ctx.options)


sdpa_fwd_d256.register_autograd(_backward_of_d256, setup_context=_setup)
for _operator in (fused_sdpa, fused_sdpa_bwd, sdpa_fwd_d256, sdpa_bwd_d256):
    _operator.register_vmap(over_batches(_operator))
