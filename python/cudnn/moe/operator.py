# No `from __future__ import annotations`: PyTorch reads the types.

import functools
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import refused
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.host import ALIGNMENT
from cudnn.moe import layer
from cudnn.moe.exchange import said
from cudnn.moe.experts import (
    ACTIVATIONS,
    GATED,
    NUMBERS,
    WIDE,
    Experts,
    Products,
    Rows,
    environment,
    is_list,
    products,
    shape_of,
)
from cudnn.moe.parallel import exchange_of, of_each, on_ranks, ranks_of, shapes_of
from cudnn.moe.routing import Routing, check_tensors, sort
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import autocast_type, custom_op, in_type
from cudnn.runtime.run import architecture
from cudnn.runtime.vmap import one_by_one

_WHERE = "moe_mlp"
_TYPES = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
Weights = torch.Tensor | Sequence[torch.Tensor]
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moe_mlp(
    x: torch.Tensor,
    routing: Routing | tuple[torch.Tensor, torch.Tensor],
    up: Weights,
    down: Weights,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    glu_layout: str = "interleaved",
    linear_offset: float = 1.0,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    fp8: bool = False,
    main_grads: tuple[Weights, Weights] | None = None,
    group: Any = None,
    time_limit: float = 600.0,
) -> torch.Tensor:
    """The experts of a layer: each token through K of E small networks, and their weighted sum. Differentiable.

        y[t] = sum over k of weights[t, k] * (down[e] act(up[e] x[t] + up_bias[e]) + down_bias[e]),  e = indices[t, k]

    On CUDA tensors our kernels run, on CPU tensors their reference or, within ``cudnn.emulation``, the kernels. Kept
    for the backward pass are x, the product of the up projection, (T K, N), and the routing. Works under
    ``torch.compile``, in CUDA graphs after a first call, and with activation checkpointing.

    Args:
        x: ``[..., H]``, T tokens in all, bfloat16 or float16; for the reference also float32 or float64, in which
            all is computed and stored then.
        routing: What :func:`cudnn.moe.route` returned; or ``indices``, integers ``[T, K]``, the experts of each token,
            and ``weights``, ``[T, K]``, differentiable: float32 or, for an x of float64, float64.
        up: ``[E, N, H]``, of the type of x, or a list of E tensors ``[N, H]``. N is 2 I for a gated activation: of
            every 64 rows, the first 32 are gates: ``cudnn.interleave_glu_weights`` brings an expert's halves into this
            order; else I.
        down: ``[E, H, I]``, or a list of E tensors ``[H, I]``.
        up_bias, down_bias: ``[E, N]`` and ``[E, H]``.
        activation: "swiglu", "geglu" or "srelu", as in :class:`cudnn.GroupedGemmGlu` and
            :class:`cudnn.GroupedGemmSrelu`.
        glu_layout: "interleaved", or "concatenated" where the gates are the first I rows of ``up``, one tensor, and the
            first I elements of ``up_bias``.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".
        fp8: The forward products are of e4m3: tokens and activations with a float32 factor for each 128 elements of a
            row, weights for each 128 x 128. Copies of weights in e4m3, half of their memory, are kept from one pass
            without gradients to the next, until weights change. Gradients are those of a layer without ``fp8`` that had
            the same pre-activation. For gated activations and interleaved weights; H and I are multiples of 128.
        main_grads: Float32 tensors like up and down, or lists of them, that the backward pass adds the gradients of up
            and down to; then these get none.
        group: A process group of ``torch.distributed``, or a :class:`cudnn.moe.Exchange`, which has settings: rank r
            has the experts from r E on, E of each rank, and routing is that of all experts. A token travels once to
            each rank that has experts of it, and the sum of what they make of it comes back. Every rank calls, with any
            number of tokens; with GPUs of one host no more than the rank with most had at the first call of a layer of
            these sizes, or than the exchange has memory for. Such layers share an exchange.
        time_limit: Seconds to wait for all ranks of a process group.

    Returns:
        ``[..., H]``, of the type of x. Sums are in float32.

    Raises:
        ValueError: shapes, types, devices or an activation; layers of the group's ranks that differ.
        TypeError: an argument of another Python type, such as a group that is none.
        RuntimeError: a rank of the group did not call within the time limit.
    """
    up, down, tokens = _listed("up", up), _listed("down", down), tokens_of(_WHERE, x)
    up_sums, down_sums = [], []
    if main_grads is not None:
        of_up, of_down = _pair("main_grads", main_grads, "those of up and of down")
        up_sums, down_sums = _listed("main_grads of up", of_up), _listed("main_grads of down", of_down)
    check_tensors(_WHERE, up_bias=up_bias, down_bias=down_bias)
    numbers = [linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min]
    if group is not None:
        here, sums = Experts(up, down, up_bias, down_bias, activation, numbers, glu_layout, fp8), (up_sums, down_sums)
        check_tensors(_WHERE, indices=routing[0], weights=routing[1])
        return _on_ranks(tokens, routing[0], routing[1], here, sums, group, time_limit).view(x.shape)
    if not isinstance(routing, Routing):
        indices, weights = _pair("routing", routing, "what cudnn.moe.route returned, or indices and weights")
        check_tensor(_WHERE, "indices", indices)
        check_tensor(_WHERE, "weights", weights)
        _check_choices(tokens, indices, weights)
        indices = _in_32_bits(indices).contiguous()
        routing = Routing(indices, weights, *sort(indices, shape_of(up)[0]))
    elif routing.offsets.shape[0] != shape_of(up)[0]:
        got, allowed = f"one of {routing.offsets.shape[0]} experts", f"one of {shape_of(up)[0]}, as many as up has"
        raise refused(ValueError, _WHERE, "routing", got, allowed)
    given = (up, down, up_bias, down_bias, up_sums, down_sums, activation, numbers, glu_layout, fp8)
    return _on_one_rank(tokens, routing, *given).view(x.shape)


@torch.compiler.disable(reason="ranks exchange tokens: compile what is before and behind it")
def _on_ranks(
    x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, e: Experts, sums: Any, group: Any, time_limit: float
) -> torch.Tensor:
    """The layer whose experts on this rank are ``e``."""
    if dtype := autocast_type(x):
        cast = functools.partial(in_type, dtype=dtype)
        e = e._replace(**{name: cast(getattr(e, name)) for name in ("up", "down", "up_bias", "down_bias")})
        with torch.autocast(x.device.type, enabled=False):
            return _on_ranks(cast(x), indices, weights, e, sums, group, time_limit)
    _check(x, indices, weights, e, sums)
    experts, top_k = shape_of(e.up)[0] * ranks_of(_WHERE, group), indices.shape[1]
    biases = {"up_bias": e.up_bias is not None, "down_bias": e.down_bias is not None}
    words = said(
        experts=experts,
        top_k=top_k,
        up=shape_of(e.up),
        down=shape_of(e.down),
        **biases,
        dtype=x.dtype,
        activation=e.activation,
        glu_layout=e.glu_layout,
        fp8=e.fp8,
        **dict(zip(NUMBERS, e.numbers, strict=True)),
    )
    exchange = exchange_of(group, words, (experts, top_k, x.shape[1], x.dtype), x, time_limit)
    return on_ranks(x, _in_32_bits(indices), weights, e, sums, exchange)


def _in_32_bits(indices: torch.Tensor) -> torch.Tensor:
    """Indices of experts. Those that do not fit stay what they are: no expert's."""
    wide = indices.dtype is torch.int64
    return (indices.clamp(-1, torch.iinfo(torch.int32).max) if wide else indices).int()


def _on_one_rank(
    tokens: torch.Tensor,
    routing: Routing,
    up: list[torch.Tensor],
    down: list[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_sums: list[torch.Tensor],
    down_sums: list[torch.Tensor],
    activation: str,
    numbers: list[float],
    glu_layout: str,
    fp8: bool,
) -> torch.Tensor:
    """The layer of these experts alone."""
    tensors = (tokens, routing.weights, *up, *down, up_bias, down_bias)
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    y, _ = moe_mlp_fwd_primitive(
        tokens,
        routing.weights,
        routing.indices,
        routing.offsets,
        routing.gather_idx,
        routing.scatter_idx,
        up,
        down,
        up_bias,
        down_bias,
        up_sums,
        down_sums,
        activation,
        numbers,
        glu_layout,
        fp8,
        keeps,
    )
    return y


def tokens_of(where: str, x: torch.Tensor) -> torch.Tensor:
    """``[..., H]`` as ``[T, H]``.

    Raises:
        ValueError: x is no tensor, or has no dimension.
    """
    if not isinstance(x, torch.Tensor) or not x.ndim:
        got = "a tensor of no dimension" if isinstance(x, torch.Tensor) else type(x).__name__
        raise refused(ValueError, where, "x", got, "a tensor [..., H]")
    check_tensor(where, "x", x)
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _listed(name: str, weights: Weights) -> list[torch.Tensor]:
    found = [weights] if isinstance(weights, torch.Tensor) else list(weights) if isinstance(weights, Iterable) else []
    if not found:
        raise refused(ValueError, _WHERE, name, weights, "a tensor, or a list of the experts'")
    for each in found:
        check_tensor(_WHERE, name, each)
    return found


def _pair(name: str, given: Any, allowed: str) -> tuple[Any, Any]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        got = f"{len(given)} of them" if isinstance(given, (tuple, list)) else type(given).__name__
        raise refused(ValueError, _WHERE, name, got, allowed)
    return given[0], given[1]


def _check_choices(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> None:
    shapes = {"x": tuple(x.shape), "indices": tuple(indices.shape), "weights": tuple(weights.shape)}
    if indices.ndim != 2 or indices.shape != weights.shape or indices.shape[0] != x.shape[0]:
        raise refused(ValueError, _WHERE, "shapes of a routing", shapes, "x [T, H], indices and weights [T, K]")
    kind = torch.float64 if x.dtype is torch.float64 else torch.float32
    if indices.dtype not in _INTEGERS or weights.dtype is not kind:
        name, got = str(kind).removeprefix("torch."), f"{indices.dtype} and {weights.dtype}"
        fits = weights.is_floating_point() and indices.dtype in _INTEGERS
        cure = f"pass weights.{'float' if kind is torch.float32 else 'double'}()" if fits else ""
        raise refused(ValueError, _WHERE, "types of indices and weights", got, f"integers and {name}", cure)


def _check(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, e: Experts, sums: Sequence[Any]) -> None:
    if e.activation not in ACTIVATIONS:
        allowed = " or ".join(map(repr, ACTIVATIONS))
        raise refused(ValueError, _WHERE, "activation", repr(e.activation), allowed)
    if e.glu_layout not in LAYOUTS:
        allowed = " or ".join(map(repr, LAYOUTS))
        raise refused(ValueError, _WHERE, "glu_layout", repr(e.glu_layout), allowed)
    if e.glu_layout == LAYOUTS[1] and (is_list(e.up) or e.activation not in GATED):
        gated = e.activation in GATED
        got = "a list of tensors" if gated else f"the activation {e.activation!r}"
        cure = "interleave the weights once, by cudnn.interleave_glu_weights" if gated else "leave glu_layout out"
        raise refused(ValueError, _WHERE, "glu_layout 'concatenated'", got, "one tensor, and gates", cure)
    _check_choices(x, indices, weights)
    for name, given in (("up", e.up), ("down", e.down)):
        shapes = {tuple(w.shape) for w in given}
        if len(shapes) != 1 or given[0].ndim not in (2, 3) or (given[0].ndim == 3 and len(given) > 1):
            raise refused(ValueError, _WHERE, f"shape of {name}", shapes, "[E, n, k], or a list of E tensors [n, k]")
        if any(not w.is_contiguous() for w in given):
            cure = f"pass {name}.contiguous(), made once"
            raise refused(ValueError, _WHERE, f"strides of {name}", given[0].stride(), "contiguous tensors", cure)
    up, down, h = shape_of(e.up), shape_of(e.down), x.shape[1]
    wide = down[2] * (2 if e.activation in GATED else 1)
    if up != (down[0], wide, h) or down[1] != h:
        got, pairs = {"x": tuple(x.shape), "up": up, "down": down}, "N = 2 I" if wide > down[2] else "N = I"
        raise refused(ValueError, _WHERE, "shapes", got, f"x [T, H], up [E, N, H] and down [E, H, I], {pairs}")
    _check_multiples(h, down[2], e, x.dtype)
    if e.fp8 and (e.activation not in GATED or e.glu_layout != LAYOUTS[0] or h % 128 or down[2] % 128):
        got, allowed = f"{e.activation!r}, {e.glu_layout!r}, H {h}, I {down[2]}", "gates, interleaved, multiples of 128"
        raise refused(ValueError, _WHERE, "fp8", got, allowed, "leave fp8 out, or interleave the weights once")
    for name, bias, shape in (("up_bias", e.up_bias, up[:2]), ("down_bias", e.down_bias, down[:2])):
        if bias is not None and tuple(bias.shape) != shape:
            raise refused(ValueError, _WHERE, f"shape of {name}", tuple(bias.shape), str(shape))
        if bias is not None and not bias.is_contiguous():
            cure = f"pass {name}.contiguous()"
            raise refused(ValueError, _WHERE, f"strides of {name}", bias.stride(), "a contiguous tensor", cure)
    biases = [bias for bias in (e.up_bias, e.down_bias) if bias is not None]
    types = {tensor.dtype for tensor in (x, *e.up, *e.down, *biases)}
    is_wide = x.dtype in WIDE
    if len(types) > 1 or (x.dtype not in _TYPES and (not is_wide or e.fp8 or architecture(x))):
        got, allowed = sorted(map(str, types)), f"one of {', '.join(map(str, _TYPES))} for all but weights"
        cure = "use that, or torch.autocast; others are for the reference, on the CPU, without fp8" if is_wide else ""
        raise refused(ValueError, _WHERE, "types", ", ".join(got), allowed, cure)
    devices = {tensor.device for tensor in (x, weights, indices, *e.up, *e.down, *biases, *sums[0], *sums[1])}
    if len(devices) > 1:
        raise refused(ValueError, _WHERE, "devices", sorted(map(str, devices)), "one device", "move them to one")
    for name, given, like in (("up", sums[0], e.up), ("down", sums[1], e.down)):
        wrong = [w for w in given if w.dtype is not torch.float32 or not w.is_contiguous()]
        if wrong or (given and (shape_of(given) != shape_of(like))):
            got = f"{given[0].dtype} {shape_of(given)}"
            raise refused(ValueError, _WHERE, f"main_grads of {name}", got, f"contiguous float32 {shape_of(like)}")


def _check_multiples(hidden: int, inner: int, e: Experts, dtype: torch.dtype) -> None:
    """Gates come in blocks of 32 rows of ``up``; rows of 16-bit tensors are read 16 bytes at a time."""
    of_rows = 1 if dtype in WIDE else 8
    of_inner = 32 if e.activation in GATED else of_rows
    why = f"for {e.activation!r} and {dtype}"
    if inner < 1 or inner % of_inner:
        cure = "pad up's rows, gates and others alike, and down's columns with zeros, which changes no result"
        allowed = f"a multiple of {of_inner} {why}"
        raise refused(ValueError, _WHERE, "intermediate size, I of down [E, H, I]", inner, allowed, cure)
    if hidden < 1 or hidden % of_rows:
        cure = "pad x, up's columns and down's rows with zeros"
        raise refused(
            ValueError, _WHERE, "hidden size, H of x [..., H]", hidden, f"a multiple of {of_rows} {why}", cure
        )


def _check_addresses(e: Experts, sums: Sequence[Sequence[torch.Tensor]]) -> None:
    names = ("up", "down", "main_grads of up", "main_grads of down")
    for name, given in zip(names, (e.up, e.down, *sums), strict=True):
        if address := next((w.data_ptr() for w in given if w.data_ptr() % ALIGNMENT), 0):
            allowed, cure = f"multiples of {ALIGNMENT} bytes", "pass copies, made once"
            raise refused(ValueError, _WHERE, f"address of {name}", f"{address:#x}", allowed, cure)


_KINDS: dict[Any, Products] = {}


def checked(
    x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, e: Experts, sums: Sequence[Sequence[torch.Tensor]]
) -> Products:
    """The products of a layer whose arguments are right. Those like earlier ones are not looked at again, except lists.

    Raises:
        ValueError: as :func:`moe_mlp`.
    """
    every = (e.up, e.down, *sums)
    firsts = [
        (t.shape, t.dtype, t.device, t.is_contiguous(), t.data_ptr() % ALIGNMENT) for part in every for t in part[:1]
    ]
    biases = [None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in (e.up_bias, e.down_bias)]
    lengths = tuple(map(len, every))
    routed = (
        indices.shape == weights.shape,
        indices.ndim,
        indices.dtype,
        indices.device,
        weights.dtype,
        weights.device,
    )
    tokens = (x.shape[0] == indices.shape[0], x.shape[1:], x.dtype, x.device)
    options = (e.activation, *e.numbers, e.glu_layout, e.fp8, None if x.is_cuda else architecture(x))
    key = (*firsts, *biases, lengths, routed, tokens, options, environment())
    found = _KINDS.get(key)
    if found is None or max(lengths) > 1:
        _check(x, indices, weights, e, sums)
        _check_addresses(e, sums)
        found = _KINDS[key] = products(x, e)
    return found


def _flops_forward(token_of_row: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]]) -> int:
    """Both products of every row: the ends of the experts are on the device."""
    return sum(2 * token_of_row[0] * prod(weight[0][-2:]) for weight in (up, down))


def _flops_backward(
    token_of_row: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]], needed: Sequence[bool]
) -> int:
    """Those of the gradients that are needed; all but those of down begin with that of the hidden rows."""
    of_x, of_weights, of_up, of_down, of_up_bias, _ = needed
    first, second = (2 * token_of_row[0] * prod(weight[0][-2:]) for weight in (up, down))
    of_hidden = of_x or of_weights or of_up or of_up_bias
    return first * (of_x + of_up) + second * (of_hidden + of_down)


@custom_op("moe_mlp_fwd_primitive", autocast=("x", "up", "down", "up_bias", "down_bias"), flops=_flops_forward)
def moe_mlp_fwd_primitive(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    token_of_row: torch.Tensor,
    row_of_choice: torch.Tensor,
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_sums: Sequence[torch.Tensor],
    down_sums: Sequence[torch.Tensor],
    activation: str,
    numbers: Sequence[float],
    glu_layout: str,
    fp8: bool,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y of :func:`moe_mlp`, and what the backward pass needs where it ``keeps`` it, else no elements."""
    experts = Experts(up, down, up_bias, down_bias, activation, numbers, glu_layout, fp8)
    kind = checked(x, weights, indices, experts, (up_sums, down_sums))
    if not token_of_row.numel():
        y, kept = _empty(x, token_of_row, experts, keeps)
        return y.zero_(), kept
    rows = Rows(offsets, token_of_row, row_of_choice)
    return layer.forward(kind, aligned(x), weights.contiguous(), rows, experts, keeps)


def _empty(x: torch.Tensor, token_of_row: torch.Tensor, e: Experts, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory of the results."""
    kept = (token_of_row.shape[0], shape_of(e.up)[1]) if keeps else (0,)
    return x.new_empty(x.shape), x.new_empty(kept)


@moe_mlp_fwd_primitive.register_fake
def _(
    x: Any,
    weights: Any,
    indices: Any,
    offsets: Any,
    token_of_row: Any,
    row_of_choice: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    up_sums: Any,
    down_sums: Any,
    activation: str,
    numbers: Any,
    glu_layout: str,
    fp8: bool,
    keeps: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    experts = Experts(up, down, up_bias, down_bias, activation, numbers, glu_layout, fp8)
    _check(x, indices, weights, experts, (up_sums, down_sums))
    return _empty(x, token_of_row, experts, keeps)


@custom_op("moe_mlp_bwd_primitive", mutates=("up_sums", "down_sums"), flops=_flops_backward)
def moe_mlp_bwd_primitive(
    gradient: torch.Tensor,
    x: torch.Tensor,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    token_of_row: torch.Tensor,
    row_of_choice: torch.Tensor,
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_sums: Sequence[torch.Tensor],
    down_sums: Sequence[torch.Tensor],
    activation: str,
    numbers: Sequence[float],
    glu_layout: str,
    needed: Sequence[bool],
) -> Six:
    """The gradients that are ``needed``, of x, weights, up, down and the biases: for others tensors without elements.

    Those of up and down are added to ``up_sums`` and ``down_sums`` where there are some.
    """
    experts = Experts(up, down, up_bias, down_bias, activation, numbers, glu_layout)
    if not token_of_row.numel():
        made = _gradients_like(x, weights, experts, needed, (up_sums, down_sums))
        return tuple(gradient.zero_() for gradient in made)  # pyright: ignore[reportReturnType]
    rows, sums = Rows(offsets, token_of_row, row_of_choice), (up_sums, down_sums)
    gradient, x, weights = aligned(gradient), aligned(x), weights.contiguous()
    kind = products(x, experts)
    found = layer.backward(kind, gradient, x, hidden, indices, weights, rows, experts, needed, sums)
    return tuple(x.new_empty(0) if each is None else each for each in found)  # pyright: ignore[reportReturnType]


def _gradients_like(
    x: torch.Tensor, weights: torch.Tensor, e: Experts, needed: Sequence[bool], sums: Sequence[Any]
) -> Six:
    """Memory of the gradients."""
    shapes, likes = shapes_of(x, weights, e, needed, sums), [x, weights, x, x, x, x]
    made = (like.new_empty((0,) if s is None else s) for like, s in zip(likes, shapes, strict=True))
    return tuple(made)  # pyright: ignore[reportReturnType]


@moe_mlp_bwd_primitive.register_fake
def _(
    gradient: Any,
    x: Any,
    hidden: Any,
    weights: Any,
    indices: Any,
    offsets: Any,
    token_of_row: Any,
    row_of_choice: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    up_sums: Any,
    down_sums: Any,
    activation: str,
    numbers: Any,
    glu_layout: str,
    needed: Any,
) -> Six:
    experts = Experts(up, down, up_bias, down_bias, activation, numbers, glu_layout)
    return _gradients_like(x, weights, experts, needed, (up_sums, down_sums))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weights, indices, offsets, token_of_row, row_of_choice, up, down, up_bias, down_bias, *rest = inputs
    ctx.save_for_backward(
        x, output[1], weights, indices, offsets, token_of_row, row_of_choice, up_bias, down_bias, *up, *down
    )
    ctx.count, (*ctx.sums, ctx.activation, ctx.numbers, ctx.glu_layout, _, _) = len(up), rest
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    saved, none = ctx.saved_tensors, [[None] * len(s) for s in ctx.sums]
    *tensors, up_bias, down_bias = saved[:9]
    up, down = (list(part) for part in (saved[9 : 9 + ctx.count], saved[9 + ctx.count :]))
    if gradient is None:
        return *[None] * 6, [None] * len(up), [None] * len(down), None, None, *none, *[None] * 5
    x, weights, *_, ups, downs, of_up_bias, of_down_bias = ctx.needs_input_grad[:10]
    needed = [x, weights, any(ups), any(downs), of_up_bias, of_down_bias]
    rest = (*ctx.sums, ctx.activation, ctx.numbers, ctx.glu_layout, needed)
    given: tuple[Any, ...] = (*tensors, up, down, up_bias, down_bias, *rest)
    found = moe_mlp_bwd_primitive(gradient, *given)
    by_x, by_weights, by_up, by_down, *biases = (y if need else None for y, need in zip(found, needed, strict=True))
    matrices = zip((by_up, by_down), (up, down), ctx.sums, strict=True)
    by_each = [of_each(None if s else y, like) for y, like, s in matrices]
    return by_x, by_weights, *[None] * 4, *by_each, *biases, *none, *[None] * 5


moe_mlp_fwd_primitive.register_autograd(_backward, setup_context=_setup)


def _in_turn(operator: Any) -> Any:
    """The rule for ``torch.vmap``, whose own loop takes no lists of tensors."""
    return lambda info, dims, *arguments: one_by_one(operator, info.batch_size, dims, arguments)


for _operator in (moe_mlp_fwd_primitive, moe_mlp_bwd_primitive):
    _operator.register_vmap(_in_turn(_operator))
