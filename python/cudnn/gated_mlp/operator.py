"""``gated_mlp``: the dense feed-forward layer as a PyTorch operator with autograd, vmap, FLOPs and fake
implementations. The kernels' order is in :mod:`cudnn.gated_mlp.layer`.
"""

# No `from __future__ import annotations`: PyTorch reads the types.

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import make_error
from cudnn.fused.gated import LAYOUTS
from cudnn.fused.host import ALIGNMENT
from cudnn.gated_mlp import layer
from cudnn.gated_mlp.layer import ACTIVATIONS, Weights
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import custom_op, may_overwrite, needs_dispatch
from cudnn.runtime.run import architecture
from cudnn.runtime.vmap import one_by_one

_WHERE = "gated_mlp"
_NARROW = (torch.bfloat16, torch.float16)
_WIDE = (torch.float32, torch.float64)  # of the reference
Pair = torch.Tensor | Sequence[torch.Tensor]
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def gated_mlp(
    x: torch.Tensor,
    gate_up: Pair,
    down: torch.Tensor,
    gate_up_bias: Pair | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str = "swiglu",
    glu_layout: str = "concatenated",
    linear_offset: float = 1.0,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    main_grads: tuple[Pair, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The feed-forward layer of Llama, Qwen3 and others: y = (f(x gate^T) * (x up^T)) down^T. Differentiable.

    CUDA tensors run the fused kernels: (1) one GEMM with gate and up, with the activation in its epilogue, (2) the down
    GEMM. CPU tensors run the reference or, within ``cudnn.emulation``, the kernels. Saved for backward: x and the
    preactivation (T, 2 I); the activation is recomputed. One node of the autograd graph. Works under ``torch.compile``,
    in CUDA graphs after a first call, and with activation checkpointing.

    Args:
        x: ``[..., H]``, T tokens in all, contiguous in H, bfloat16 or float16; the reference also takes float32 and
            float64. H is a multiple of 8.
        gate_up: ``[2 I, H]``, contiguous, of the dtype of x: the first I rows are gates. Or a pair, gate and up,
            ``[I, H]`` each: where up follows gate in the same memory both are read in place, otherwise each forward
            pass copies them into one tensor, which is logged once. I is a multiple of 32.
        down: ``[H, I]``, contiguous.
        gate_up_bias: ``[2 I]`` in the order of the rows of gate_up, or a pair of ``[I]``.
        down_bias: ``[H]``.
        activation: "swiglu", or "geglu": see :class:`cudnn.GemmSwiglu` and :class:`cudnn.GemmGeglu`.
        glu_layout: of a gate_up that is one tensor: "concatenated", or "interleaved", of every 64 rows the first 32 are
            gates, as ``cudnn.interleave_glu_weights(w, order="gate_up", gate_first=True)`` makes them.
        linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of "geglu".
        main_grads: Contiguous float32 tensors of the shapes of gate_up (a pair, where that is one) and down, to which
            the backward pass adds their gradients; autograd then gets none.

    Returns:
        ``[..., H]``, contiguous, of the dtype of x. Sums are in float32.

    Raises:
        ValueError: shapes, dtypes, devices, strides, or an activation.
        TypeError: an argument of another Python type.
    """
    check_tensor(_WHERE, "x", x)
    if not x.ndim:
        raise make_error(ValueError, _WHERE, "x", "a tensor of no dimension", "a tensor [..., H]")
    weights, bias = _listed("gate_up", gate_up), None
    if gate_up_bias is not None:
        biases = _listed("gate_up_bias", gate_up_bias)
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
    gate_up_main_grad: list[torch.Tensor] = []
    down_main_grad: list[torch.Tensor] = []
    if main_grads is not None:
        if not isinstance(main_grads, (tuple, list)) or len(main_grads) != 2:
            raise make_error(
                ValueError, _WHERE, "main_grads", type(main_grads).__name__, "those of gate_up and of down"
            )
        gate_up_main_grad = _listed("main_grads of gate_up", main_grads[0])
        down_main_grad = _listed("main_grads of down", main_grads[1])
    tokens = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    tensors = (tokens, *weights, down, bias, down_bias)
    save_preact = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    act_params = [linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min]
    options = (activation, act_params, glu_layout, save_preact)
    y, _ = gated_mlp_fwd_primitive(tokens, weights, down, bias, down_bias, gate_up_main_grad, down_main_grad, *options)
    return y if x.ndim == 2 else y.view(x.shape)


def _listed(name: str, value: Any) -> list[torch.Tensor]:
    tensors = [value] if isinstance(value, torch.Tensor) else list(value) if isinstance(value, (tuple, list)) else []
    if not 1 <= len(tensors) <= 2:
        got = f"{len(tensors)} tensors" if isinstance(value, (tuple, list)) else type(value).__name__
        raise make_error(ValueError, _WHERE, name, got, "a tensor, or a pair of gate and up")
    for tensor in tensors:
        check_tensor(_WHERE, name, tensor)
    return tensors


def _check(x: torch.Tensor, w: Weights, main_grad: Sequence[Sequence[torch.Tensor]]) -> None:
    if w.activation not in ACTIVATIONS:
        allowed = " or ".join(map(repr, ACTIVATIONS))
        raise make_error(ValueError, _WHERE, "activation", repr(w.activation), allowed)
    if w.glu_layout not in LAYOUTS:
        raise make_error(ValueError, _WHERE, "glu_layout", repr(w.glu_layout), " or ".join(map(repr, LAYOUTS)))
    if len(w.gate_up) == 2 and w.glu_layout != "concatenated":
        raise make_error(ValueError, _WHERE, "glu_layout", repr(w.glu_layout), "'concatenated', for a pair of weights")
    _check_shapes(x, w)
    _check_sizes(x, w)
    named = {"x": x, "down": w.down, "gate_up_bias": w.gate_up_bias, "down_bias": w.down_bias}
    named |= {f"gate_up[{i}]" if len(w.gate_up) > 1 else "gate_up": each for i, each in enumerate(w.gate_up)}
    present = {name: t for name, t in named.items() if t is not None}
    types, wide = {t.dtype for t in present.values()}, x.dtype in _WIDE
    if len(types) > 1 or (x.dtype not in _NARROW and (not wide or architecture(x))):
        got, allowed = ", ".join(sorted(map(str, types))), f"one of {', '.join(map(str, _NARROW))} for all"
        hint = "use that, or torch.autocast; wider types are for the reference, on the CPU" if wide else ""
        raise make_error(ValueError, _WHERE, "types", got, allowed, hint)
    devices = {str(t.device) for t in (*present.values(), *main_grad[0], *main_grad[1])}
    if len(devices) > 1:
        raise make_error(ValueError, _WHERE, "devices", sorted(devices), "one device", "move them to one")
    for name, t in present.items():
        if name != "x" and not t.is_contiguous():
            raise make_error(ValueError, _WHERE, f"strides of {name}", t.stride(), "contiguous", "pass a copy")
    for name, buffers, like in (("gate_up", main_grad[0], w.gate_up), ("down", main_grad[1], [w.down])):
        fits = [(b.dtype, b.shape, b.is_contiguous()) for b in buffers]
        if buffers and fits != [(torch.float32, each.shape, True) for each in like]:
            got = ", ".join(f"{b.dtype} {tuple(b.shape)}, strides {b.stride()}" for b in buffers)
            allowed = ", ".join(f"contiguous float32 {tuple(each.shape)}" for each in like)
            raise make_error(ValueError, _WHERE, f"main_grads of {name}", got, allowed)


def _check_shapes(x: torch.Tensor, w: Weights) -> None:
    got = {"x": tuple(x.shape), "gate_up": [tuple(each.shape) for each in w.gate_up], "down": tuple(w.down.shape)}
    got |= {name: tuple(b.shape) for name in ("gate_up_bias", "down_bias") if (b := getattr(w, name)) is not None}
    if w.down.ndim == 2:
        h, i = w.down.shape
        rows = 2 * i // len(w.gate_up)
        expected = {"x": (x.shape[0], h), "gate_up": [(rows, h)] * len(w.gate_up), "down": (h, i)}
        expected |= {"gate_up_bias": (2 * i,)} if w.gate_up_bias is not None else {}
        expected |= {"down_bias": (h,)} if w.down_bias is not None else {}
        if got == expected:
            return
    allowed = "x [..., H], gate_up [2 I, H] or a pair of [I, H], down [H, I], gate_up_bias [2 I], down_bias [H]"
    raise make_error(ValueError, _WHERE, "shapes", got, allowed)


def _check_sizes(x: torch.Tensor, w: Weights) -> None:
    """Gates and up alternate in blocks of 32 columns; rows of 16-bit tensors are loaded 16 bytes at a time."""
    h, i = w.down.shape
    of_h = 1 if x.dtype in _WIDE else 8
    if i < 1 or i % 32:
        hint = "pad the rows of gate and of up, and the columns of down, with zeros, which changes no result"
        raise make_error(ValueError, _WHERE, "intermediate size, I of down [H, I]", i, "a multiple of 32", hint)
    if h < 1 or h % of_h:
        hint = "pad x, the columns of gate_up and the rows of down with zeros"
        raise make_error(ValueError, _WHERE, "hidden size, H of x [..., H]", h, f"a multiple of {of_h}", hint)


def _check_addresses(w: Weights, main_grad: Sequence[Sequence[torch.Tensor]]) -> None:
    for name, tensors in (("gate_up", w.gate_up), ("down", [w.down]), ("main_grads", [*main_grad[0], *main_grad[1]])):
        if address := next((t.data_ptr() for t in tensors if t.data_ptr() % ALIGNMENT), 0):
            allowed = f"multiples of {ALIGNMENT} bytes"
            raise make_error(ValueError, _WHERE, f"address of {name}", f"{address:#x}", allowed, "pass a copy")


_CHECKED: set[Any] = set()


def _check_once(x: torch.Tensor, w: Weights, main_grad: Sequence[Sequence[torch.Tensor]]) -> None:
    """Checks the arguments, unless those of an earlier call were like them, addresses and T aside."""
    tensors = (*w.gate_up, w.down, w.gate_up_bias, w.down_bias, *main_grad[0], *main_grad[1])
    described = [None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in tensors]
    counts = (len(w.gate_up), len(main_grad[0]), len(main_grad[1]))
    tokens = (x.ndim, x.shape[1:], x.dtype, x.device, None if x.is_cuda else architecture(x))
    key = (*described, counts, tokens, w.activation, *w.act_params, w.glu_layout)
    if key not in _CHECKED:
        _check(x, w, main_grad)
        _CHECKED.add(key)
    _check_addresses(w, main_grad)


def _flops_forward(x: Sequence[int], down: Sequence[int]) -> int:
    return 6 * x[0] * prod(down)


def _flops_backward(x: Sequence[int], down: Sequence[int], needs_grad: Sequence[bool]) -> int:
    """The GEMMs of the gradients that are needed; all but those of down begin with that of the activation."""
    dx, dgate_up, ddown, dgate_up_bias, _ = needs_grad
    gemm = 2 * x[0] * prod(down)
    return gemm * (2 * (dx + dgate_up) + ddown + (dx or dgate_up or ddown or dgate_up_bias))


@custom_op(
    "gated_mlp_fwd_primitive",
    autocast=("x", "gate_up", "down", "gate_up_bias", "down_bias"),
    flops=_flops_forward,
)
def gated_mlp_fwd_primitive(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_main_grad: Sequence[torch.Tensor],
    down_main_grad: Sequence[torch.Tensor],
    activation: str,
    act_params: Sequence[float],
    glu_layout: str,
    save_preact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (T, H), and the preactivation (T, 2 I), without elements unless ``save_preact``."""
    w = Weights(gate_up, down, gate_up_bias, down_bias, activation, act_params, glu_layout)
    _check_once(x, w, (gate_up_main_grad, down_main_grad))
    if not x.shape[0]:
        return _empty(x, down, save_preact)
    y, preact = layer.forward(aligned(x), w, save_preact)
    return y, x.new_empty(0) if preact is None else preact


def _empty(x: torch.Tensor, down: torch.Tensor, save_preact: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for y and the preactivation."""
    preact = (x.shape[0], 2 * down.shape[1]) if save_preact else (0,)
    return x.new_empty(x.shape), x.new_empty(preact)


@gated_mlp_fwd_primitive.register_fake
def _(
    x: Any,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Any,
    gate_up_main_grad: Any,
    down_main_grad: Any,
    activation: str,
    act_params: Any,
    glu_layout: str,
    save_preact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    w = Weights(gate_up, down, gate_up_bias, down_bias, activation, act_params, glu_layout)
    _check(x, w, (gate_up_main_grad, down_main_grad))
    return _empty(x, down, save_preact)


@custom_op("gated_mlp_bwd_primitive", mutates=("gate_up_main_grad", "down_main_grad"), flops=_flops_backward)
def gated_mlp_bwd_primitive(
    gradient: torch.Tensor,
    x: torch.Tensor,
    preact: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: torch.Tensor,
    gate_up_main_grad: Sequence[torch.Tensor],
    down_main_grad: Sequence[torch.Tensor],
    activation: str,
    act_params: Sequence[float],
    glu_layout: str,
    needs_grad: Sequence[bool],
) -> Five:
    """The gradients of x, gate_up (one tensor), down and the biases; without elements for those not needed.

    Those of gate_up and down are added to ``gate_up_main_grad`` and ``down_main_grad`` if these are not empty.
    """
    main_grad = (gate_up_main_grad, down_main_grad)
    if not x.shape[0]:
        zeros = _gradients_like(x, down, needs_grad, main_grad)
        return tuple(each.zero_() for each in zeros)  # pyright: ignore[reportReturnType]
    w = Weights(gate_up, down, None, None, activation, act_params, glu_layout)
    grads = layer.backward(aligned(gradient), aligned(x), preact, w, needs_grad, main_grad)
    return tuple(x.new_empty(0) if each is None else each for each in grads)  # pyright: ignore[reportReturnType]


def _gradients_like(x: torch.Tensor, down: torch.Tensor, needs_grad: Sequence[bool], main_grad: Sequence[Any]) -> Five:
    """Memory of the gradients."""
    h, i = down.shape
    shapes = [x.shape, (2 * i, h), (h, i), (2 * i,), (h,)]
    kept = zip(needs_grad, (False, bool(main_grad[0]), bool(main_grad[1]), False, False), strict=True)
    empty = (x.new_empty(s if need and not added else (0,)) for s, (need, added) in zip(shapes, kept, strict=True))
    return tuple(empty)  # pyright: ignore[reportReturnType]


@gated_mlp_bwd_primitive.register_fake
def _(
    gradient: Any,
    x: Any,
    preact: Any,
    gate_up: Any,
    down: Any,
    gate_up_main_grad: Any,
    down_main_grad: Any,
    activation: str,
    act_params: Any,
    glu_layout: str,
    needs_grad: Any,
) -> Five:
    return _gradients_like(x, down, needs_grad, (gate_up_main_grad, down_main_grad))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, gate_up, down, _, _, *ctx.main_grad, ctx.activation, ctx.act_params, ctx.glu_layout, _ = inputs
    ctx.save_for_backward(x, output[1], down, *gate_up)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    x, preact, down, *gate_up = ctx.saved_tensors
    main_grad = tuple(ctx.main_grad)
    none = [[None] * len(buffers) for buffers in main_grad]
    if gradient is None:
        return None, [None] * len(gate_up), None, None, None, *none, *[None] * 4
    needs_x, needs_gate_up, *needs_rest = ctx.needs_input_grad[:5]
    needs_grad = [needs_x, any(needs_gate_up), *needs_rest]
    options = (ctx.activation, ctx.act_params, ctx.glu_layout)
    arguments: tuple[Any, ...] = (preact, gate_up, down, *main_grad, *options, needs_grad)
    is_plain = x.shape[0] and not needs_dispatch((gradient, x, preact, down, *gate_up), False)
    if is_plain and may_overwrite(preact):  # nothing observes the call
        for buffer in (*main_grad[0], *main_grad[1]):
            torch.autograd.graph.increment_version(buffer)
        w = Weights(gate_up, down, None, None, *options)
        grads: Any = layer.backward(aligned(gradient), aligned(x), preact, w, needs_grad, main_grad, into_preact=True)
    else:
        grads = gated_mlp_bwd_primitive(gradient, x, *arguments)
        grads = [y if need else None for y, need in zip(grads, needs_grad, strict=True)]
    dx, dgate_up, ddown, *dbiases = grads
    dgate_up = None if main_grad[0] or not needs_grad[1] else dgate_up.split([len(each) for each in gate_up])
    dgate_up = [None] * len(gate_up) if dgate_up is None else list(dgate_up)
    return dx, dgate_up, None if main_grad[1] else ddown, *dbiases, *none, *[None] * 4


gated_mlp_fwd_primitive.register_autograd(_backward, setup_context=_setup)


def _sequential_vmap(operator: Any) -> Any:
    """The rule for ``torch.vmap``, whose own loop takes no lists of tensors."""
    return lambda info, dims, *arguments: one_by_one(operator, info.batch_size, dims, arguments)


for _operator in (gated_mlp_fwd_primitive, gated_mlp_bwd_primitive):
    _operator.register_vmap(_sequential_vmap(_operator))
