"""``moe_mlp``: the experts of a layer as a PyTorch operator with autograd, vmap, FLOPs and fake implementations.

The kernels' order is in :mod:`cudnn.moe.layer`; layers over several ranks are in :mod:`cudnn.moe.parallel`.
"""

# No `from __future__ import annotations`: PyTorch reads the types.

import functools
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import make_error
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.host import ALIGNMENT
from cudnn.moe import layer
from cudnn.moe.compile_ahead import layer_ops
from cudnn.moe.exchange import describe_config
from cudnn.moe.experts import (
    ACT_PARAMS,
    ACTIVATIONS,
    GATED,
    GLU_LAYOUTS,
    SEPARATE,
    WIDE,
    Experts,
    GroupedGemmOps,
    Permutation,
    environment,
    grouped_gemm_ops,
    recipe_of,
    shape_of,
    up_shape,
)
from cudnn.moe.gathered import GatheredWeight
from cudnn.moe.main_grads import dummy_grads
from cudnn.moe.parallel import (
    exchange_of,
    expert_parallel,
    gradient_shapes,
    needs_backward,
    ranks_of,
    unbind_experts,
)
from cudnn.moe.routing import Routing, check_tensors, sort
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import FEW, autocast_type, custom_op, in_type, may_overwrite, needs_dispatch
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
    fp8: bool | str = False,
    batch_invariant: bool = False,
    main_grads: tuple[Weights, Weights] | None = None,
    group: Any = None,
    time_limit: float = 600.0,
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer: each token's weighted sum of K of E MLPs. Differentiable.

        y[t] = sum over k of weights[t, k] * (down[e] act(up[e] x[t] + up_bias[e]) + down_bias[e]),  e = indices[t, k]

    CUDA tensors run the fused kernels: (1) permute or gather, (2) up GEMM + activation, (3) down GEMM, (4) combine. CPU
    tensors run the reference or, within ``cudnn.emulation``, the kernels. Saved for backward: x, the pre-activation
    (T K, N) of the up GEMM, and the routing. Works under ``torch.compile``, in CUDA graphs after a first call, and with
    activation checkpointing.

    Args:
        x: ``[..., H]``, T tokens in all, contiguous in H, bfloat16 or float16; the reference also takes float32 and
            float64 and computes and stores in them.
        routing: What :func:`cudnn.moe.route` returned; or ``indices``, integers ``[T, K]``, the experts of each token,
            and ``weights``, ``[T, K]``, differentiable: float32 or, for an x of float64, float64.
        up: ``[E, N, H]``, contiguous, of the dtype of x, or a list of E tensors ``[N, H]``. N is I, or 2 I for a gated
            activation, see ``glu_layout``; then also ``[E, 2, I, H]``, gates first, which is concatenated, or a pair of
            weights, gates and up projections, each ``[E, I, H]`` or a list of E tensors ``[I, H]``.
        down: ``[E, H, I]``, contiguous, or a list of E tensors ``[H, I]``.
        up_bias, down_bias: ``[E, N]`` and ``[E, H]``.
        activation: "swiglu", "geglu" or "srelu", as in :class:`cudnn.GroupedGemmGlu` and
            :class:`cudnn.GroupedGemmSrelu`.
        glu_layout: The order of up's rows. "interleaved": of every 64 rows the first 32 are gates;
            ``cudnn.interleave_glu_weights`` makes such weights. "concatenated": the gates are the first I rows of each
            expert, and the first I elements of ``up_bias``. "separate": ``up`` is a pair, ``up_bias`` is concatenated,
            I is a multiple of 64. All are read in place, and gradients have the same layout.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".
        fp8: GEMMs that take e4m3, with float32 scales: for 1 x 128 blocks of tokens, activations and gradients, along
            the dimension that the GEMM sums over, and for 128 x 128 blocks of weights. For gated activations and
            interleaved weights; H and I are multiples of 128.

            - True or "forward": those of the forward pass. Gradients are those of a layer without ``fp8`` with the same
              pre-activation. Copies of weights are cached between passes without gradients.
            - "blockwise": those of both passes, as DeepSeek-V3 is trained. The pre-activation is saved in e4m3, except
              on Blackwell. Copies of weights, transposed ones too, are cached until a ``torch.optim.Optimizer`` steps,
              a weight has a new version, or :func:`cudnn.moe.weights_changed`.
            - "blockwise_save16": the same, with the pre-activation saved in the dtype of x.
        batch_invariant: A token's output, and the gradients of its x and weights, have the same bits whatever the other
            tokens and their number are, on one kind of GPU. Hopper's kernels then always read a permuted copy of the
            tokens instead of gathering many rows, which takes up to 0.6 ps per element of the (T K, H) copy. The router
            is the caller's: its GEMM has to be batch-invariant too.
        main_grads: Float32 tensors of the shapes of up and down, or lists of them, that the backward pass accumulates
            the gradients of up and down into; autograd then gets none. Of separate weights, a pair for up.
        group: A process group of ``torch.distributed``, or a :class:`cudnn.moe.Exchange`, which has settings: rank r
            has the experts from r E on, E on each rank, and routing is over all experts. A token is sent once to each
            rank that has one of its experts, and the sum over that rank's experts is sent back. Tokens are sent in e4m3
            with ``fp8``, unless a backward pass reads them in 16 bits; gradients of outputs too with "blockwise" and
            without ``down_bias``. Every rank calls, with any number of tokens; with GPUs of one host at most the
            largest number of any rank at the first call of a layer of these sizes, or the exchange's ``max_tokens``.
            Such layers share an exchange.
        time_limit: Seconds to wait for all ranks of a process group.

    Returns:
        ``[..., H]``, contiguous, of the dtype of x. Sums are in float32.

    Raises:
        ValueError: shapes, dtypes, devices or an activation; the ranks' layers differ.
        TypeError: an argument of another Python type, such as a group that is no process group.
        RuntimeError: a rank of the group did not call within the time limit.
    """
    up, down, tokens = listed_up(_WHERE, "up", up, glu_layout), listed(_WHERE, "down", down), tokens_of(_WHERE, x)
    recipe = recipe_of(_WHERE, fp8)
    up_main_grad, down_main_grad = [], []
    if main_grads is not None:
        up_main_grad, down_main_grad = two(_WHERE, "main_grads", main_grads, "those of up and of down")
        up_main_grad = listed_up(_WHERE, "main_grads of up", up_main_grad, glu_layout)
        down_main_grad = listed(_WHERE, "main_grads of down", down_main_grad)
    check_tensors(_WHERE, up_bias=up_bias, down_bias=down_bias)
    act_params = [linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min]
    if group is not None:
        local, main_grad = (
            Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, recipe, batch_invariant),
            (up_main_grad, down_main_grad),
        )
        check_tensors(_WHERE, indices=routing[0], weights=routing[1])
        return in_shape_of(x, _expert_parallel(tokens, routing[0], routing[1], local, main_grad, group, time_limit))
    if not isinstance(routing, Routing):
        indices, weights = two(_WHERE, "routing", routing, "what cudnn.moe.route returned, or indices and weights")
        check_tensor(_WHERE, "indices", indices)
        check_tensor(_WHERE, "weights", weights)
        _check_slots(tokens, indices, weights)
        indices = _to_int32(indices).contiguous()
        routing = Routing(indices, weights, *sort(indices, up_shape(up, glu_layout)[0]))
    elif routing.offsets.shape[0] != (experts := up_shape(up, glu_layout)[0]):
        got, allowed = f"one of {routing.offsets.shape[0]} experts", f"one of {experts}, the experts of up"
        raise make_error(ValueError, _WHERE, "routing", got, allowed)
    experts = (up, down, up_bias, down_bias, up_main_grad, down_main_grad, activation, act_params, glu_layout, recipe)
    return in_shape_of(x, _single_rank(tokens, routing, *experts, batch_invariant))


@torch.compiler.disable(reason="ranks exchange tokens: compile the code before and after it")
def _expert_parallel(
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    e: Experts,
    main_grad: Any,
    group: Any,
    time_limit: float,
) -> torch.Tensor:
    """The layer over several ranks; ``e`` are the experts of this rank."""
    if dtype := autocast_type(x):
        cast = functools.partial(in_type, dtype=dtype)
        e = e._replace(**{name: cast(getattr(e, name)) for name in ("up", "down", "up_bias", "down_bias")})
        with torch.autocast(x.device.type, enabled=False):
            return _expert_parallel(cast(x), indices, weights, e, main_grad, group, time_limit)
    _check(x, indices, weights, e, main_grad)
    experts, top_k = e.up_shape[0] * ranks_of(_WHERE, group), indices.shape[1]
    biases = {"up_bias": e.up_bias is not None, "down_bias": e.down_bias is not None}
    config = describe_config(
        experts=experts,
        top_k=top_k,
        up=e.up_shape,
        down=shape_of(e.down),
        **biases,
        dtype=x.dtype,
        activation=e.activation,
        glu_layout=e.glu_layout,
        fp8=e.fp8,
        dispatch="e4m3" if e.receives_fp8(needs_backward(x, weights, e)) else "16 bits",
        batch_invariant=e.batch_invariant,
        **dict(zip(ACT_PARAMS, e.act_params, strict=True)),
    )
    exchange = exchange_of(group, config, (experts, top_k, x.shape[1], x.dtype), x, time_limit)
    return expert_parallel(x, _to_int32(indices), weights, e, main_grad, exchange)


def _to_int32(indices: torch.Tensor) -> torch.Tensor:
    """Expert indices as int32. Those out of range stay out of range, which drops their slots."""
    wide = indices.dtype is torch.int64
    return (indices.clamp(-1, torch.iinfo(torch.int32).max) if wide else indices).int()


def _single_rank(
    tokens: torch.Tensor,
    routing: Routing,
    up: list[torch.Tensor],
    down: list[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_main_grad: list[torch.Tensor],
    down_main_grad: list[torch.Tensor],
    activation: str,
    act_params: list[float],
    glu_layout: str,
    fp8: str,
    batch_invariant: bool,
) -> torch.Tensor:
    """The layer on one rank."""
    tensors = (tokens, routing.weights, *up, *down, up_bias, down_bias)
    save_preact = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
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
        up_main_grad,
        down_main_grad,
        activation,
        act_params,
        glu_layout,
        fp8,
        batch_invariant,
        save_preact,
    )
    return y


def tokens_of(where: str, x: torch.Tensor) -> torch.Tensor:
    """``[..., H]`` as ``[T, H]``.

    Raises:
        ValueError: x is no tensor, or has no dimension.
    """
    if not isinstance(x, torch.Tensor) or not x.ndim:
        got = "a tensor of no dimension" if isinstance(x, torch.Tensor) else type(x).__name__
        raise make_error(ValueError, where, "x", got, "a tensor [..., H]")
    check_tensor(where, "x", x)
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def in_shape_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``[T, H]`` in the shape of x. For autograd it is no view, of which hooks of FSDP2 warn."""
    return y if x.ndim == 2 else torch.ops.aten._unsafe_view(y, x.shape)


def listed(where: str, name: str, weights: Weights) -> list[torch.Tensor]:
    """Weights, one tensor or a list of the experts', as a list."""
    tensors = [weights] if isinstance(weights, torch.Tensor) else list(weights) if isinstance(weights, Iterable) else []
    if not tensors:
        raise make_error(ValueError, where, name, weights, "a tensor, or a list of the experts'")
    for tensor in tensors:
        check_tensor(where, name, tensor)
    return tensors


def listed_up(where: str, name: str, up: Any, glu_layout: str) -> list[torch.Tensor]:
    """Up weights as a list; separate ones: gates, then up projections. ``[E, 2, I, H]`` is concatenated."""
    if glu_layout == SEPARATE:
        gates, ups = (
            listed(where, name, each) for each in two(where, name, up, "a pair: the gates, the up projections")
        )
        if len(gates) != len(ups):
            got, allowed = f"{len(gates)} and {len(ups)} tensors", "as many gates as up projections"
            raise make_error(ValueError, where, name, got, allowed)
        return [*gates, *ups]
    if isinstance(up, torch.Tensor) and up.ndim == 4 and up.shape[1] == 2:
        if glu_layout != LAYOUTS[1]:
            got, hint = f"{tuple(up.shape)} with glu_layout={glu_layout!r}", "pass glu_layout='concatenated'"
            raise make_error(ValueError, where, name, got, "[E, 2 I, H] for this layout", hint)
        return listed(where, name, up.flatten(1, 2))
    return listed(where, name, up)


def two(where: str, name: str, pair: Any, allowed: str) -> tuple[Any, Any]:
    """Two values.

    Raises:
        ValueError: it is no pair.
    """
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} of them" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise make_error(ValueError, where, name, got, allowed)
    return pair[0], pair[1]


def _check_slots(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> None:
    shapes = {"x": tuple(x.shape), "indices": tuple(indices.shape), "weights": tuple(weights.shape)}
    if indices.ndim != 2 or indices.shape != weights.shape or indices.shape[0] != x.shape[0]:
        raise make_error(ValueError, _WHERE, "shapes of a routing", shapes, "x [T, H], indices and weights [T, K]")
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    if indices.dtype not in _INTEGERS or weights.dtype is not dtype:
        name, got = str(dtype).removeprefix("torch."), f"{indices.dtype} and {weights.dtype}"
        fits = weights.is_floating_point() and indices.dtype in _INTEGERS
        hint = f"pass weights.{'float' if dtype is torch.float32 else 'double'}()" if fits else ""
        raise make_error(ValueError, _WHERE, "types of indices and weights", got, f"integers and {name}", hint)


def _check(x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, e: Experts, main_grad: Sequence[Any]) -> None:
    check_experts(_WHERE, x, e, main_grad, (weights, indices))
    _check_slots(x, indices, weights)


def check_experts(
    where: str, x: torch.Tensor, e: Experts, main_grad: Sequence[Any], routed: Sequence[torch.Tensor]
) -> None:
    """Raises a ``ValueError`` for experts that do not fit each other or x; ``routed`` are on the same device."""
    if e.activation not in ACTIVATIONS:
        allowed = " or ".join(map(repr, ACTIVATIONS))
        raise make_error(ValueError, where, "activation", repr(e.activation), allowed)
    if e.glu_layout not in GLU_LAYOUTS:
        allowed = " or ".join(map(repr, GLU_LAYOUTS))
        raise make_error(ValueError, where, "glu_layout", repr(e.glu_layout), allowed)
    if e.glu_layout != LAYOUTS[0] and e.activation not in GATED:
        got, name = f"the activation {e.activation!r}", f"glu_layout {e.glu_layout!r}"
        raise make_error(ValueError, where, name, got, " or ".join(map(repr, GATED)), "leave glu_layout out")
    for name, tensors, most in (("up", e.up, e.halves), ("down", e.down, 1)):
        first = tensors[0]
        differ = any(w.shape != first.shape for w in tensors)  # no set: sizes may be symbolic, which have no hash
        if differ or first.ndim not in (2, 3) or (first.ndim == 3 and len(tensors) > most):
            shapes = sorted({tuple(w.shape) for w in tensors})
            allowed = "[E, n, k], or a list of E tensors [n, k]" + ", and those of gates and up projections alike" * (
                most - 1
            )
            hint = (
                f"pass glu_layout={SEPARATE!r} for gates and up projections" if first.ndim == 3 and name == "up" else ""
            )
            raise make_error(ValueError, where, f"shape of {name}", shapes, allowed, hint)
        if any(not w.is_contiguous() for w in tensors):
            hint = f"pass {name}.contiguous(), made once"
            raise make_error(ValueError, where, f"strides of {name}", tensors[0].stride(), "contiguous tensors", hint)
    up, down, h = e.up_shape, shape_of(e.down), x.shape[1]
    n = down[2] * (2 if e.activation in GATED else 1)
    if up != (down[0], n, h) or down[1] != h:
        got, pairs = {"x": tuple(x.shape), "up": up, "down": down}, "N = 2 I" if n > down[2] else "N = I"
        raise make_error(ValueError, where, "shapes", got, f"x [T, H], up [E, N, H] and down [E, H, I], {pairs}")
    _check_multiples(where, h, down[2], e, x.dtype)
    if e.fp8 and (e.activation not in GATED or e.glu_layout != LAYOUTS[0] or h % 128 or down[2] % 128):
        got, allowed = f"{e.activation!r}, {e.glu_layout!r}, H {h}, I {down[2]}", "gates, interleaved, multiples of 128"
        raise make_error(ValueError, where, "fp8", got, allowed, "leave fp8 out, or interleave the weights once")
    for name, bias, shape in (("up_bias", e.up_bias, up[:2]), ("down_bias", e.down_bias, down[:2])):
        if bias is not None and tuple(bias.shape) != shape:
            raise make_error(ValueError, where, f"shape of {name}", tuple(bias.shape), str(shape))
        if bias is not None and not bias.is_contiguous():
            hint = f"pass {name}.contiguous()"
            raise make_error(ValueError, where, f"strides of {name}", bias.stride(), "a contiguous tensor", hint)
    biases = [bias for bias in (e.up_bias, e.down_bias) if bias is not None]
    types = {tensor.dtype for tensor in (x, *e.up, *e.down, *biases)}
    is_wide = x.dtype in WIDE
    if len(types) > 1 or (x.dtype not in _TYPES and (not is_wide or e.fp8 or architecture(x))):
        got, allowed = sorted(map(str, types)), f"one of {', '.join(map(str, _TYPES))} for all but weights"
        hint = "use that, or torch.autocast; others are for the reference, on the CPU, without fp8" if is_wide else ""
        raise make_error(ValueError, where, "types", ", ".join(got), allowed, hint)
    devices = {tensor.device for tensor in (x, *routed, *e.up, *e.down, *biases, *main_grad[0], *main_grad[1])}
    if len(devices) > 1:
        raise make_error(ValueError, where, "devices", sorted(map(str, devices)), "one device", "move them to one")
    up = (up[0], up[1] // e.halves, up[2])
    for name, tensors, shape, count in (("up", main_grad[0], up, e.halves), ("down", main_grad[1], down, 1)):
        of_one = len(tensors) == count and all(w.shape == shape for w in tensors)
        of_each = len(tensors) == count * shape[0] and all(w.shape == shape[1:] for w in tensors)
        typed = all(w.dtype is torch.float32 and w.is_contiguous() for w in tensors)
        if tensors and not (typed and (of_one or of_each)):
            got = sorted({f"{w.dtype} {tuple(w.shape)} with strides {w.stride()}" for w in tensors})
            allowed = f"contiguous float32 {shape}, or {shape[0]} of {shape[1:]}" + ", for each half" * (count - 1)
            raise make_error(ValueError, where, f"main_grads of {name}", " and ".join(got), allowed)


def _check_multiples(where: str, h: int, intermediate: int, e: Experts, dtype: torch.dtype) -> None:
    """Gates come in blocks of 32 rows of ``up``, separate ones in k tiles of 64; rows of 16-bit tensors are loaded 16
    bytes at a time.
    """
    of_h = 1 if dtype in WIDE else 8
    of_i = (64 if e.glu_layout == SEPARATE else 32) if e.activation in GATED else of_h
    why = f"for {e.activation!r} and {dtype}"
    if intermediate < 1 or intermediate % of_i:
        hint = "pad up's rows, gates and others alike, and down's columns with zeros, which changes no result"
        allowed = f"a multiple of {of_i} {why}"
        raise make_error(ValueError, where, "intermediate size, I of down [E, H, I]", intermediate, allowed, hint)
    if h < 1 or h % of_h:
        hint = "pad x, up's columns and down's rows with zeros"
        raise make_error(ValueError, where, "hidden size, H of x [..., H]", h, f"a multiple of {of_h} {why}", hint)


def check_addresses(where: str, e: Experts, main_grad: Sequence[Sequence[torch.Tensor]]) -> None:
    """Raises a ``ValueError`` for weights that kernels cannot read in place."""
    names = ("up", "down", "main_grads of up", "main_grads of down")
    for name, tensors in zip(names, (e.up, e.down, *main_grad), strict=True):
        if address := next((w.data_ptr() for w in tensors if w.data_ptr() % ALIGNMENT), 0):
            allowed, hint = f"multiples of {ALIGNMENT} bytes", "pass copies, made once"
            raise make_error(ValueError, where, f"address of {name}", f"{address:#x}", allowed, hint)


_CHECKED: dict[Any, GroupedGemmOps] = {}


def checked(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    e: Experts,
    main_grad: Sequence[Sequence[torch.Tensor]],
) -> GroupedGemmOps:
    """Checks a layer's arguments and returns its GEMMs. Calls like earlier ones skip the check, but for longer lists.

    Raises:
        ValueError: as :func:`moe_mlp`.
    """
    lists = (e.up, e.down, *main_grad)
    firsts = [
        (t.shape, t.dtype, t.device, t.is_contiguous(), t.data_ptr() % ALIGNMENT)
        for tensors in lists
        for t in tensors[:2]
    ]
    biases = [None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in (e.up_bias, e.down_bias)]
    lengths = tuple(map(len, lists))
    routed = (
        indices.shape == weights.shape,
        indices.ndim,
        indices.dtype,
        indices.device,
        weights.dtype,
        weights.device,
    )
    tokens = (x.shape[0] == indices.shape[0], x.shape[1:], x.dtype, x.device)
    options = (e.activation, *e.act_params, e.glu_layout, e.fp8, None if x.is_cuda else architecture(x))
    key = (*firsts, *biases, lengths, routed, tokens, options, environment())
    ops = _CHECKED.get(key)
    if ops is None or max(lengths) > 2:
        _check(x, indices, weights, e, main_grad)
        check_addresses(_WHERE, e, main_grad)
        ops = _CHECKED[key] = layer_ops(x, e, bool(main_grad[0]), indices.shape[1])
    return ops


def gemm_flops(
    rows: int, up: Sequence[Sequence[int]], down: Sequence[Sequence[int]], glu_layout: str
) -> tuple[int, int]:
    """FLOPs of the up GEMM and of the down GEMM, from the shapes of their weights."""
    halves = 1 + (glu_layout == SEPARATE)
    return 2 * rows * prod(up[0][-2:]) * halves, 2 * rows * prod(down[0][-2:])


def _flops_forward(
    gather_idx: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]], glu_layout: str
) -> int:
    """Both GEMMs over all T K rows: how many are dropped is known on the device alone."""
    return sum(gemm_flops(gather_idx[0], up, down, glu_layout))


def _flops_backward(
    gather_idx: Sequence[int],
    up: Sequence[Sequence[int]],
    down: Sequence[Sequence[int]],
    glu_layout: str,
    needs_grad: Sequence[bool],
) -> int:
    """The GEMMs of the gradients that are needed; all but that of down begin with dpreact."""
    dx, dweights, dw_up, dw_down, dup_bias, _ = needs_grad
    up_gemm, down_gemm = gemm_flops(gather_idx[0], up, down, glu_layout)
    dpreact = dx or dweights or dw_up or dup_bias
    return up_gemm * (dx + dw_up) + down_gemm * (dpreact + dw_down)


@custom_op(
    "moe_mlp_fwd_primitive", autocast=("x", "up", "down", "up_bias", "down_bias"), flops=_flops_forward, repeats=FEW
)
def moe_mlp_fwd_primitive(
    x: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    gather_idx: torch.Tensor,
    scatter_idx: torch.Tensor,
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_main_grad: Sequence[torch.Tensor],
    down_main_grad: Sequence[torch.Tensor],
    activation: str,
    act_params: Sequence[float],
    glu_layout: str,
    fp8: str,
    batch_invariant: bool,
    save_preact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y of :func:`moe_mlp` (T, H), and the pre-activation, as :func:`cudnn.moe.layer.forward` returns it."""
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    ops = checked(x, weights, indices, experts, (up_main_grad, down_main_grad))
    if not gather_idx.numel():
        y, preact = _empty(x, gather_idx, experts, save_preact)
        return y.zero_(), preact
    permutation = Permutation(offsets, gather_idx, scatter_idx, batch_invariant=batch_invariant)
    return layer.forward(ops, aligned(x), weights.contiguous(), permutation, experts, save_preact)


def _empty(
    x: torch.Tensor, gather_idx: torch.Tensor, e: Experts, save_preact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for y and the pre-activation."""
    return x.new_empty(x.shape), layer.empty_preact(x, gather_idx.shape[0], e, save_preact)


@moe_mlp_fwd_primitive.register_fake
def _(
    x: Any,
    weights: Any,
    indices: Any,
    offsets: Any,
    gather_idx: Any,
    scatter_idx: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    up_main_grad: Any,
    down_main_grad: Any,
    activation: str,
    act_params: Any,
    glu_layout: str,
    fp8: str,
    batch_invariant: bool,
    save_preact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    _check(x, indices, weights, experts, (up_main_grad, down_main_grad))
    return _empty(x, gather_idx, experts, save_preact)


@custom_op("moe_mlp_bwd_primitive", mutates=("up_main_grad", "down_main_grad"), flops=_flops_backward, repeats=FEW)
def moe_mlp_bwd_primitive(
    gradient: torch.Tensor,
    x: torch.Tensor,
    preact: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    gather_idx: torch.Tensor,
    scatter_idx: torch.Tensor,
    up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    up_main_grad: Sequence[torch.Tensor],
    down_main_grad: Sequence[torch.Tensor],
    activation: str,
    act_params: Sequence[float],
    glu_layout: str,
    fp8: str,
    batch_invariant: bool,
    needs_grad: Sequence[bool],
) -> Six:
    """The gradients of x, weights, up, down and the biases; tensors without elements for those not in ``needs_grad``.

    Those of up and down are accumulated into ``up_main_grad`` and ``down_main_grad`` if these are not empty.
    """
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    main_grad = (up_main_grad, down_main_grad)
    if not gather_idx.numel():
        zeros = _gradients_like(x, weights, experts, needs_grad, main_grad)
        return tuple(each.zero_() for each in zeros)  # pyright: ignore[reportReturnType]
    permutation = Permutation(offsets, gather_idx, scatter_idx, batch_invariant=batch_invariant)
    grads = _gradients(gradient, x, preact, indices, weights, permutation, experts, needs_grad, main_grad)
    return tuple(x.new_empty(0) if each is None else each for each in grads)  # pyright: ignore[reportReturnType]


def _gradients(
    gradient: torch.Tensor,
    x: torch.Tensor,
    preact: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    permutation: Permutation,
    e: Experts,
    needs_grad: Sequence[bool],
    main_grad: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    into_preact: bool = False,
) -> layer.Gradients:
    """The gradients of one slot or more; ``into_preact`` as of :func:`cudnn.moe.layer.backward`."""
    gradient, x, weights = aligned(gradient), aligned(x), weights.contiguous()
    arguments = (gradient, x, preact, indices, weights, permutation, e, needs_grad, main_grad)
    return layer.backward(grouped_gemm_ops(x, e), *arguments, into_preact=into_preact)


def _gradients_like(
    x: torch.Tensor, weights: torch.Tensor, e: Experts, needs_grad: Sequence[bool], main_grad: Sequence[Any]
) -> Six:
    """Memory of the gradients."""
    shapes, likes = gradient_shapes(x, weights, e, needs_grad, main_grad), [x, weights, x, x, x, x]
    empty = (like.new_empty((0,) if s is None else s) for like, s in zip(likes, shapes, strict=True))
    return tuple(empty)  # pyright: ignore[reportReturnType]


@moe_mlp_bwd_primitive.register_fake
def _(
    gradient: Any,
    x: Any,
    preact: Any,
    weights: Any,
    indices: Any,
    offsets: Any,
    gather_idx: Any,
    scatter_idx: Any,
    up: Any,
    down: Any,
    up_bias: Any,
    down_bias: Any,
    up_main_grad: Any,
    down_main_grad: Any,
    activation: str,
    act_params: Any,
    glu_layout: str,
    fp8: str,
    batch_invariant: bool,
    needs_grad: Any,
) -> Six:
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    return _gradients_like(x, weights, experts, needs_grad, (up_main_grad, down_main_grad))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weights, indices, offsets, gather_idx, scatter_idx, up, down, up_bias, down_bias, *rest = inputs
    ctx.save_for_backward(
        x, output[1], weights, indices, offsets, gather_idx, scatter_idx, up_bias, down_bias, *up, *down
    )
    *ctx.main_grad, ctx.activation, ctx.act_params, ctx.glu_layout, ctx.fp8, ctx.batch_invariant, _ = rest
    ctx.num_tensors = len(up)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    saved, none = ctx.saved_tensors, [[None] * len(buffers) for buffers in ctx.main_grad]
    *tensors, up_bias, down_bias = saved[:9]
    up, down = (list(weights) for weights in (saved[9 : 9 + ctx.num_tensors], saved[9 + ctx.num_tensors :]))
    if gradient is None:
        return *[None] * 6, [None] * len(up), [None] * len(down), None, None, *none, *[None] * 6
    needs_x, needs_weights, *_, needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:10]
    needs_grad = [needs_x, needs_weights, any(needs_up), any(needs_down), needs_up_bias, needs_down_bias]
    experts = (up, down, up_bias, down_bias)
    options = (ctx.activation, ctx.act_params, ctx.glu_layout, ctx.fp8)
    x, preact, weights, indices, *sorted_by_expert = tensors
    is_large = x.numel() > FEW and not needs_dispatch((gradient, x, *up, *down), False)
    if is_large and may_overwrite(preact):  # launches of smaller ones are repeated
        for buffer in (*ctx.main_grad[0], *ctx.main_grad[1]):
            torch.autograd.graph.increment_version(buffer)
        permutation = Permutation(*sorted_by_expert, batch_invariant=ctx.batch_invariant)
        e, main_grad = Experts(*experts, *options), (ctx.main_grad[0], ctx.main_grad[1])
        arguments = (x, preact, indices, weights, permutation, e, needs_grad, main_grad)
        grads: Any = _gradients(gradient, *arguments, into_preact=True)
    else:
        arguments: Any = (*tensors, *experts, *ctx.main_grad, *options, ctx.batch_invariant, needs_grad)
        grads = moe_mlp_bwd_primitive(gradient, *arguments)
    dx, dweights, dw_up, dw_down, *biases = (y if need else None for y, need in zip(grads, needs_grad, strict=True))
    matrices = zip((dw_up, dw_down), (up, down), ctx.main_grad, (needs_up, needs_down), strict=True)
    dw_lists = [
        dummy_grads(like, needed) if buffers else unbind_experts(dw, like) for dw, like, buffers, needed in matrices
    ]
    return dx, dweights, *[None] * 4, *dw_lists, *biases, *none, *[None] * 6


moe_mlp_fwd_primitive.register_autograd(_backward, setup_context=_setup)


def _gathered_rule(operator: Any) -> Callable[..., Any]:
    """The rule of ``torch_dispatch`` for weights that FSDP2 gathered in e4m3: the operator's function reads them."""
    return lambda mode, func, types, args, kwargs: operator._init_fn(*args, **kwargs)


def _sequential_vmap(operator: Any) -> Any:
    """The rule for ``torch.vmap``, whose own loop takes no lists of tensors."""
    return lambda info, dims, *arguments: one_by_one(operator, info.batch_size, dims, arguments)


for _operator in (moe_mlp_fwd_primitive, moe_mlp_bwd_primitive):
    _operator.register_vmap(_sequential_vmap(_operator))
    _operator.register_torch_dispatch(GatheredWeight, _gathered_rule(_operator))
