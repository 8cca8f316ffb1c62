"""Scaled dot-product attention on PyTorch tensors: graphs of one attention node, forward and backward."""

# No `from __future__ import annotations`: PyTorch reads the types.

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.enums import diagonal_alignment as alignments
from cudnn.errors import checked_number, make_error
from cudnn.gemm.formats import wide
from cudnn.pygraph.graph import pygraph
from cudnn.pygraph.operator_graphs import GraphCache, Tensors, run
from cudnn.runtime import flops
from cudnn.runtime.memory import aligned, is_readable
from cudnn.runtime.registration import SMALL, custom_op
from cudnn.runtime.vmap import in_front, one_by_one

_WHERE = "scaled_dot_product_attention"
_LENGTHS = ("seq_len_q", "seq_len_kv", "cumulative_seq_len_q", "cumulative_seq_len_kv")
_fprop_cache: GraphCache = {}
_bprop_cache: GraphCache = {}
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
) -> torch.Tensor:
    """``softmax(scale * Q K^T, masked) V``: the earlier signature of
    :func:`cudnn.ops.scaled_dot_product_attention`.

    On Blackwell, our kernels of head size 256 compute what existing programs expect of them; all else is cuDNN's.

    Args:
        attn_mask, dropout_p: Only None and 0.
        others: As there.

    Raises:
        NotImplementedError: attn_mask or dropout_p.
        TypeError, ValueError, cudnnGraphNotSupportedError: As there.
    """
    hint = "use cudnn.ops.scaled_dot_product_attention, which takes it"
    if attn_mask is not None:
        raise make_error(
            NotImplementedError, _WHERE, "attn_mask", "a tensor", "None: existing programs rely on it", hint
        )
    if dropout_p != 0:
        raise make_error(NotImplementedError, _WHERE, "dropout_p", dropout_p, "0, no dropout", hint)
    lengths = seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv
    check_tensors(query, key, value, lengths)
    bounds = integers(is_causal, diagonal_alignment, left_bound, right_bound)
    positive = scale is None or checked_number(_WHERE, "scale", scale) > 0
    operator = _of_d256 if positive and _has_d256(query, key, value, bounds, lengths) else sdpa
    return attend(query, key, value, scale, enable_gqa, bounds, lengths, operator=operator)


def check_tensors(query: Any, key: Any, value: Any, lengths: Sequence[Any], **others: Any) -> None:
    """Raises TypeError for arguments that are no tensors; ``lengths`` and ``others`` may be None."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(_WHERE, name, x)
    for name, x in (*zip(_LENGTHS, lengths, strict=True), *others.items()):
        if x is not None:
            check_tensor(_WHERE, name, x)


def integers(is_causal: bool, alignment: Any, left: Any, right: Any) -> tuple[bool, int, int, int]:
    """The bounds, of which the last three may be any integers. TypeError for others."""
    found = {"diagonal_alignment": alignment, "left_bound": left, "right_bound": right}
    for name, value in found.items():
        if not isinstance(value, int | torch.SymInt):  # nearly never, so that torch.compile traces this
            found[name] = checked_number(_WHERE, name, value, integer=True)
    return is_causal, int(found["diagonal_alignment"]), found["left_bound"], found["right_bound"]


def _has_d256(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: tuple[bool, int, int, int], lengths: tuple[Maybe, ...]
) -> bool:
    """Whether this is what existing programs expect of the kernels of head size 256: on Blackwell alone."""
    if any(x.ndim != 4 or x.shape[3] != 256 for x in (q, k, v)) or any(x is not None for x in lengths):
        return False
    is_causal, alignment, left, right = bounds
    if alignment or left != -1 or right not in ((-1, 0) if is_causal else (-1,)):
        return False
    square = q.shape[2] == k.shape[2]  # the kernels' diagonal ends at the last row and key
    halves = all(x.dtype in (torch.float16, torch.bfloat16) for x in (q, k, v))
    return halves and (square or not is_causal) and _on_blackwell(q)


def _on_blackwell(x: torch.Tensor) -> bool:
    if not x.is_cuda:
        return False
    found = torch.cuda.get_device_properties(x.device)
    return (found.major, found.minor) == (10, 0)


def _of_d256(*arguments: Any, **nothing: Any) -> Any:
    return torch.ops.cudnn.sdpa_fwd_d256(*arguments)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    enable_gqa: bool,
    bounds: tuple[bool, int, int, int],
    lengths: tuple[Maybe, Maybe, Maybe, Maybe] = (None, None, None, None),
    bias: Maybe = None,
    dropout_p: float = 0.0,
    seed: Maybe = None,
    operator: Any = None,
) -> torch.Tensor:
    """O of :func:`sdpa`, or of another operator, with a default scale, and with the same number of heads unless
    ``enable_gqa``.
    """
    heads = [x.shape[1] for x in (query, key, value) if x.ndim == 4]
    if not enable_gqa and len(set(heads)) > 1:
        got = f"{', '.join(map(str, heads))} of query, key and value"
        raise make_error(ValueError, _WHERE, "heads", got, "the same number", "pass enable_gqa=True")
    factor = query.shape[-1] ** -0.5 if scale is None else checked_number(_WHERE, "scale", scale)
    operator = sdpa if operator is None else operator
    return operator(query, key, value, factor, *bounds, *lengths, bias=bias, dropout_p=dropout_p, seed=seed)[0]


class Layout:
    """Where the tokens of each entry lie, of query (with the result) or of key and value."""

    def __init__(self, side: str, x: torch.Tensor, lengths: Maybe, starts: Maybe, varying: bool) -> None:
        """
        Args:
            side: "q" or "kv".
            x: ``[B, H, S, D]``.
            lengths, starts: ``seq_len`` and ``cumulative_seq_len``.
            varying: Whether any lengths are given, for this side or the other.
        """
        self._batch, self._longest = x.shape[0], x.shape[2]
        self._starts = self._integers(f"cumulative_seq_len_{side}", starts, self._batch + 1)
        self._lengths = self._integers(f"seq_len_{side}", lengths, self._batch)
        if x.device.type == "cpu":
            self._check_values(side)
        self._starts, self._lengths = (None if n is None else aligned(n.int()) for n in (self._starts, self._lengths))
        if self._lengths is None and self._starts is not None:
            self._lengths = self._starts.diff()
        self._is_full = self._lengths is None
        if self._is_full and varying:
            self._lengths = x.new_full((self._batch,), self._longest, dtype=torch.int32)

    @staticmethod
    def _integers(name: str, given: Maybe, count: int) -> Maybe:
        if given is None:
            return None
        if given.numel() != count or given.is_floating_point():
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise make_error(ValueError, _WHERE, name, got, f"{count} integers")
        return given.flatten()

    def _check_values(self, side: str) -> None:
        """Raises for lengths and places outside the tensors. Not on a GPU, which the host would have to wait for."""
        lengths, starts = (None if x is None else x.tolist() for x in (self._lengths, self._starts))
        tokens = self._batch * self._longest
        if starts is not None and (starts[0] < 0 or any(a > b for a, b in pairwise([*starts, tokens]))):
            allowed = f"numbers that do not decrease, from 0 to {tokens}"
            raise make_error(ValueError, _WHERE, f"cumulative_seq_len_{side}", starts, allowed)
        if lengths is not None and any(not 0 <= length <= self._longest for length in lengths):
            raise make_error(ValueError, _WHERE, f"seq_len_{side}", lengths, f"numbers from 0 to {self._longest}")

    def spans(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first token of each entry among the B * S, and its number of tokens: int32, (B,)."""
        assert self._lengths is not None
        if self._starts is not None:
            return self._starts[:-1], self._lengths
        first = torch.arange(self._batch, dtype=torch.int32, device=self._lengths.device) * self._longest
        return first, self._lengths

    def readable(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor as the graph can read it; a copy where it lies otherwise."""
        packed = self._starts is not None
        even = not packed or x.shape[0] == 1 or x.stride(0) == x.shape[2] * x.stride(2)
        return x if even and is_readable(x) else _new(x, x.shape, packed).copy_(x)

    def inputs(self, side: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the graph reads besides the tensors: lengths, and the first element of each entry of each tensor."""
        found: dict[str, torch.Tensor] = {}
        if self._lengths is not None:
            found[f"seq_len_{side}"] = self._lengths.view(-1, 1, 1, 1)
        if self._starts is not None:
            steps = {x.stride(2) for x in tensors.values()}
            offsets = {step: (self._starts.long() * step).view(-1, 1, 1, 1) for step in steps}
            found |= {f"offset_{name}": offsets[x.stride(2)] for name, x in tensors.items()}
        return found

    def clear(self, *tensors: torch.Tensor) -> None:
        """Zeros in the tokens that belong to no entry: cuDNN may leave anything there."""
        if self._is_full or self._lengths is None:
            return
        places = torch.arange(self._batch * self._longest, dtype=torch.int64, device=self._lengths.device)
        if self._starts is None:
            unused = places[: self._longest].view(1, 1, -1, 1) >= self._lengths.view(-1, 1, 1, 1)
        else:
            entry = torch.searchsorted(self._starts, places, right=True) - 1
            some = entry.clamp(0, self._batch - 1)
            used = (entry == some) & (places - self._starts[some] < self._lengths[some])
            unused = ~used.view(self._batch, 1, self._longest, 1)
        for x in tensors:
            x.masked_fill_(unused, 0)


def layouts(q: torch.Tensor, k: torch.Tensor, lengths: tuple[Maybe, ...]) -> tuple[Layout, Layout]:
    if (lengths[2] is None) != (lengths[3] is None):
        missing = "cumulative_seq_len_q" if lengths[2] is None else "cumulative_seq_len_kv"
        raise make_error(ValueError, _WHERE, missing, "None with the other one set", "both or neither", "pass both")
    varying = any(x is not None for x in lengths)
    return Layout("q", q, lengths[0], lengths[2], varying), Layout("kv", k, lengths[1], lengths[3], varying)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alignment: int, bounds: Mapping[str, int]) -> None:
    shapes = {"query": tuple(q.shape), "key": tuple(k.shape), "value": tuple(v.shape)}
    ranks = [x.ndim == 4 for x in (q, k, v)]
    if not all(ranks) or q.shape[0] != k.shape[0] or k.shape[3] != q.shape[3] or k.shape[:3] != v.shape[:3]:
        allowed = "[B, H_q, S_q, D], [B, H_kv, S_kv, D] and [B, H_kv, S_kv, D_v]"
        raise make_error(ValueError, _WHERE, "shapes", shapes, allowed)
    kinds = {"query": (q.dtype, q.device), "key": (k.dtype, k.device), "value": (v.dtype, v.device)}
    if len(set(kinds.values())) > 1:
        got = {name: f"{dtype} on {device}" for name, (dtype, device) in kinds.items()}
        raise make_error(ValueError, _WHERE, "types and devices", got, "one type, and one device, for all three")
    if not q.is_floating_point() or q.element_size() < 2:
        allowed = "torch.float16 or torch.bfloat16; torch.float32 or torch.float64 on the CPU"
        raise make_error(TypeError, _WHERE, "type of query", q.dtype, allowed, "convert all three")
    hq, hk = q.shape[1], k.shape[1]
    if hq % max(hk, 1):
        raise make_error(ValueError, _WHERE, "heads of query", hq, f"multiples of the {hk} heads of key and value")
    if alignment not in (0, 1):
        raise make_error(ValueError, _WHERE, "diagonal_alignment", alignment, "0 (top left) or 1 (bottom right)")
    for name, bound in bounds.items():
        if bound < -1:
            raise make_error(ValueError, _WHERE, name, bound, "-1 for none, or 0 and more")


def _options(
    attn_scale: float, is_causal: bool, diagonal_alignment: int, left_bound: int, right_bound: int, dropout_p: float
) -> dict[str, Any]:
    """The arguments of the attention node."""
    right = 0 if is_causal and right_bound == -1 else right_bound
    return {
        "attn_scale": attn_scale,
        "diagonal_alignment": alignments(diagonal_alignment),
        "diagonal_band_left_bound": None if left_bound == -1 else left_bound,
        "diagonal_band_right_bound": None if right == -1 else right,
        "dropout_p": dropout_p,
    }


def _ragged(t: Tensors, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Sets the ragged offsets of the tensors, if any."""
    for name, tensor in tensors.items():
        if f"offset_{name}" in t:
            tensor.set_ragged_offset(t[f"offset_{name}"])
    return dict(tensors)


def _arguments(t: Tensors, dropout_p: float) -> dict[str, Any]:
    """The arguments of the attention node that are tensors, if any."""
    found: dict[str, Any] = {}
    if "seq_len_q" in t:
        found |= {"use_padding_mask": True, "seq_len_q": t["seq_len_q"], "seq_len_kv": t["seq_len_kv"]}
    if "bias" in t:
        found["bias"] = t["bias"]
    if dropout_p:
        found["dropout"] = (dropout_p, t["seed"], t["offset"])
    return found


def describe_forward(
    graph: pygraph, t: Tensors, dropout_p: float = 0.0, generate_stats: bool = True, **options: Any
) -> Tensors:
    """The graph of the forward pass."""
    _ragged(t, t)
    arguments = {**_arguments(t, dropout_p), **options, "generate_stats": generate_stats}
    o, stats = graph.sdpa(t["q"], t["k"], t["v"], **arguments)
    return _ragged(t, {"o": o, "stats": stats} if generate_stats else {"o": o})


def describe_backward(
    graph: pygraph, t: Tensors, dropout_p: float = 0.0, with_bias: bool = False, **options: Any
) -> Tensors:
    """The graph of the backward pass, ``with_bias`` with the gradient of the bias."""
    _ragged(t, t)
    arguments = _arguments(t, dropout_p)
    if with_bias:
        arguments["dBias"] = graph.tensor(t["bias"].get_dim(), t["bias"].get_stride(), t["q"].get_data_type())
    gradients = graph.sdpa_backward(t["q"], t["k"], t["v"], t["o"], t["do"], t["stats"], **arguments, **options)
    found = _ragged(t, dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    return {**found, "dbias": arguments["dBias"]} if with_bias else found


def _new(x: torch.Tensor, shape: Sequence[int], packed: bool) -> torch.Tensor:
    """Memory of x's type for ``[B, H, S, D]``: contiguous, or, packed, with tokens contiguous."""
    batch, heads, longest, size = shape
    return x.new_empty(batch, longest, heads, size).transpose(1, 2) if packed else x.new_empty(shape)


def _results(q: torch.Tensor, v: torch.Tensor, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return _new(q, (*q.shape[:3], v.shape[3]), packed), q.new_empty((*q.shape[:3], 1), dtype=dtype)


def _gradient(x: torch.Tensor, packed: bool) -> torch.Tensor:
    """Memory for the gradient, in x's order of strides where cuDNN can write it."""
    return _new(x, x.shape, packed) if packed or x.stride(3) != 1 else torch.empty_like(x)


def _check_scores(q: torch.Tensor, k: torch.Tensor, bias: Maybe, dropout_p: float, seed: Maybe) -> None:
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if bias is not None:
        allowed = [(full[0], 1), (full[1], 1), (full[2],), (full[3],)]
        if bias.ndim != 4 or any(size not in sizes for size, sizes in zip(bias.shape, allowed, strict=True)):
            raise make_error(ValueError, _WHERE, "shape of bias", tuple(bias.shape), f"{full}, the first two or 1")
        if bias.device != q.device or not bias.is_floating_point():
            got, allowed = f"{bias.dtype} on {bias.device}", f"floating-point numbers on {q.device}"
            raise make_error(ValueError, _WHERE, "bias", got, allowed)
    if not 0 <= dropout_p < 1:
        raise make_error(ValueError, _WHERE, "dropout_p", dropout_p, "0 and more, less than 1")
    if (seed is not None) != (dropout_p > 0):
        got = "None" if seed is None else "a tensor"
        raise make_error(ValueError, _WHERE, "seed", got, "a tensor with dropout, None without")


def _scores(bias: Maybe, seed: Maybe) -> dict[str, torch.Tensor]:
    """What the graph reads of them."""
    found = {} if bias is None else {"bias": aligned(bias)}
    if seed is not None:
        found["seed"] = aligned(seed).view(1, 1, 1, 1)
        found["offset"] = torch.zeros_like(found["seed"])
    return found


@custom_op("sdpa", autocast=("q", "k", "v", "bias"), flops=flops.attention, repeats=SMALL)
def sdpa(
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
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, Stats) of :func:`scaled_dot_product_attention`. Stats ``[B, H_q, S_q, 1]``, in float32 (float64 for float64),
    is ``log(sum(exp(scores)))`` of each row, for the backward pass.

    bias ``[B or 1, H_q or 1, S_q, S_kv]`` is added to the scores. Each weight is dropped with probability dropout_p;
    seed, one int64, chooses which.
    """
    check(q, k, v, diagonal_alignment, {"left_bound": left_bound, "right_bound": right_bound})
    _check_scores(q, k, bias, dropout_p, seed)
    rows, keys = layouts(q, k, (seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv))
    o, stats = _results(q, v, cumulative_seq_len_q is not None)
    if not q.numel() or not k.numel():
        return o.zero_(), stats.fill_(-torch.inf)
    q, k, v = rows.readable(q), keys.readable(k), keys.readable(v)
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        **rows.inputs("q", q=q, o=o),
        **keys.inputs("kv", k=k, v=v),
        **_scores(bias, seed),
    }
    options = _options(attn_scale, is_causal, diagonal_alignment, left_bound, right_bound, dropout_p)
    run(_fprop_cache, describe_forward, inputs, {"o": o, "stats": stats}, options)
    rows.clear(o)
    return o, stats


@sdpa.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _results(q, v, others[7] is not None)


def _gradients(
    do: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    options: dict[str, Any],
    lengths: tuple[Maybe, Maybe, Maybe, Maybe],
    bias: Maybe,
    seed: Maybe,
    dbias: Maybe = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ, dK, dV from q, k, v, o and stats; fills ``dbias``, where it is given."""
    q, k, v, o, stats = tensors
    rows, keys = layouts(q, k, lengths)
    packed = lengths[2] is not None
    dq, dk, dv = (_gradient(x, packed) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    if q.shape[2] == k.shape[2] == 1 and not packed and seed is None:
        *found, of_score = _of_one_key(do, tensors, options["attn_scale"], bias)
        for gradient, x in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(x)
        if dbias is not None:
            dbias.copy_(of_score.sum_to_size(dbias.shape))
        rows.clear(dq)
        keys.clear(dk, dv)
        return dq, dk, dv
    q, k, v, o = rows.readable(q), keys.readable(k), keys.readable(v), rows.readable(o)
    do = rows.readable(do) if do.stride() == o.stride() else _new(o, o.shape, packed).copy_(do)
    inputs = {
        "q": q,
        "k": k,
        "v": v,
        "o": o,
        "do": do,
        "stats": stats,
        **rows.inputs("q", q=q, o=o, do=do, dq=dq),
        **keys.inputs("kv", k=k, v=v, dk=dk, dv=dv),
        **_scores(bias, seed),
    }
    outputs = {"dq": dq, "dk": dk, "dv": dv} | ({} if dbias is None else {"dbias": dbias})
    run(_bprop_cache, describe_backward, inputs, outputs, options)
    rows.clear(dq)
    keys.clear(dk, dv)
    return dq, dk, dv


def _of_one_key(do: torch.Tensor, tensors: Sequence[torch.Tensor], scale: float, bias: Maybe) -> list[torch.Tensor]:
    """The gradients of q, k and v of one row and one key each, and of the score, which cuDNN has no engine for."""
    q, k, v, o, stats = map(wide, tensors)
    heads = (k.shape[1], -1)
    q, o, do, stats = (x.unflatten(1, heads) for x in (q, o, wide(do), stats))  # of the heads that share one of k
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    score = scale * (q * k).sum(-1, keepdim=True)
    if bias is not None:
        score = score + bias.expand(-1, q.shape[1] * q.shape[2], -1, -1).unflatten(1, heads)
    p = (score - stats).exp().where(stats > -torch.inf, 0)
    of_score = p * (do * (v - o)).sum(-1, keepdim=True)
    d_q, d_k, d_v = scale * of_score * k, scale * of_score * q, p * do
    return [d_q.flatten(1, 2), d_k.sum(2), d_v.sum(2), of_score.flatten(1, 2)]


@custom_op("sdpa_bwd", flops=flops.attention_backward, repeats=SMALL)
def sdpa_bwd(
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
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV) from what :func:`sdpa` got and gave, and the gradient of O.

    ``is_deterministic`` asks cuDNN for the same bits every time.
    """
    check(q, k, v, diagonal_alignment, {"left_bound": left_bound, "right_bound": right_bound})
    _check_scores(q, k, bias, dropout_p, seed)
    options = _options(attn_scale, is_causal, diagonal_alignment, left_bound, right_bound, dropout_p)
    options["use_deterministic_algorithm"] = is_deterministic
    lengths = (seq_len_q, seq_len_kv, cumulative_seq_len_q, cumulative_seq_len_kv)
    return _gradients(dO, (q, k, v, o, stats), options, lengths, bias, seed)


@sdpa_bwd.register_fake
def _(
    dO: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = others[9] is not None
    return _gradient(q, packed), _gradient(k, packed), _gradient(v, packed)


@custom_op("sdpa_bias_bwd", flops=flops.attention_backward)
def sdpa_bias_bwd(
    dO: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    bias: torch.Tensor,
    attn_scale: float,
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    is_deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dQ, dK, dV, dBias) as of :func:`sdpa_bwd`, where nothing but the bias masks scores.

    cuDNN writes dBias in the type of q; it is converted to that of bias.
    """
    check(q, k, v, 0, {})
    _check_scores(q, k, bias, dropout_p, seed)
    options = _options(attn_scale, False, 0, -1, -1, dropout_p)
    options |= {"use_deterministic_algorithm": is_deterministic, "with_bias": True}
    dbias = q.new_empty(bias.shape)
    if not q.numel() or not k.numel():
        dbias.zero_()
    gradients = _gradients(dO, (q, k, v, o, stats), options, (None, None, None, None), bias, seed, dbias)
    return *gradients, dbias.to(bias.dtype)


@sdpa_bias_bwd.register_fake
def _(
    dO: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    stats: torch.Tensor,
    bias: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format)
    return _gradient(q, False), _gradient(k, False), _gradient(v, False), dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    bias, ctx.dropout_p, seed = inputs[12:]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[8:12], bias, seed)
    ctx.options = inputs[3:8]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, d_o: torch.Tensor, d_stats: Any) -> tuple[Any, ...]:
    q, k, v, o, stats, *lengths, bias, seed = ctx.saved_tensors
    deterministic = torch.are_deterministic_algorithms_enabled()
    if bias is not None and ctx.needs_input_grad[12]:
        others = [*ctx.options[1:], *(x is not None for x in lengths)]
        if others != [False, 0, -1, -1, *[False] * 4]:
            raise make_error(NotImplementedError, _WHERE, "gradient of bias", "other masks with it", "none")
        scale, p = ctx.options[0], ctx.dropout_p
        *gradients, d_bias = sdpa_bias_bwd(d_o, q, k, v, o, stats, bias, scale, p, seed, deterministic)
        return *gradients, *[None] * 9, d_bias, None, None
    gradients = sdpa_bwd(
        d_o,
        q,
        k,
        v,
        o,
        stats,
        *ctx.options,
        *lengths,
        is_deterministic=deterministic,
        bias=bias,
        dropout_p=ctx.dropout_p,
        seed=seed,
    )
    return *gradients, *[None] * 12


sdpa.register_autograd(_backward, setup_context=_setup)


def over_batches(operator: Any) -> Any:
    """The rule for ``torch.vmap``: the dimension becomes a part of the batch. With dropout, one call after the other.

    With one seed, a larger batch gets other random numbers than each of its elements.
    """
    names = [argument.name for argument in operator._opoverload._schema.arguments]

    def rule(info: Any, dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        given, places = dict(zip(names, arguments, strict=False)), dict(zip(names, dims, strict=False))
        if given.get("dropout_p"):
            return one_by_one(operator, info.batch_size, dims, arguments)
        front = {
            name: in_front(x, places[name], info.batch_size) for name, x in given.items() if isinstance(x, torch.Tensor)
        }
        batch, rows, keys = front["q"].shape[1], front["q"].shape[3], front["k"].shape[3]
        for side, longest in (("q", rows), ("kv", keys)):
            if f"cumulative_seq_len_{side}" in front:
                starts = front.pop(f"cumulative_seq_len_{side}").flatten(1)
                front.setdefault(f"seq_len_{side}", starts.diff())
                number = torch.arange(info.batch_size, dtype=torch.int64, device=starts.device).view(-1, 1)
                starts = starts + batch * longest * number
                given[f"cumulative_seq_len_{side}"] = torch.cat([starts[:, :-1].flatten(), starts[-1, -1:]])
        one_bias = "bias" in front and front["bias"].shape[1] == 1
        if one_bias:
            front["bias"] = front["bias"].expand(-1, batch, -1, -1, -1)
        given |= {name: x.flatten(0, 1) for name, x in front.items()}
        results = [x.unflatten(0, (info.batch_size, batch)) for x in operator(**given)]
        if operator is sdpa_bias_bwd and one_bias:
            results[3] = results[3].sum(1, keepdim=True)
        return tuple(results), (0,) * len(results)

    return rule


for _operator in (sdpa, sdpa_bwd, sdpa_bias_bwd):
    _operator.register_vmap(over_batches(_operator))
