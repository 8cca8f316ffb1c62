"""``moe_experts``: the experts' MLPs for rows that a dispatcher has sorted by expert, as a PyTorch operator.

The kernels are those of :mod:`cudnn.moe.layer`, without permutation and combine: the up GEMM's epilogue multiplies
activations by the rows' weights.
"""

# No `from __future__ import annotations`: PyTorch reads the types.

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cudnn.api_base import check_tensor
from cudnn.errors import make_error
from cudnn.fused.host import ALIGNMENT
from cudnn.moe import layer
from cudnn.moe.compile_ahead import layer_ops
from cudnn.moe.experts import (
    Experts,
    GroupedGemmOps,
    SortedRows,
    environment,
    grouped_gemm_ops,
    recipe_of,
    up_shape,
)
from cudnn.moe.main_grads import dummy_grads
from cudnn.moe.operator import Weights, check_addresses, check_experts, gemm_flops, listed, listed_up, two
from cudnn.moe.parallel import gradient_shapes, unbind_experts
from cudnn.moe.routing import check_tensors
from cudnn.runtime.memory import aligned
from cudnn.runtime.registration import FEW, custom_op, may_overwrite, needs_dispatch
from cudnn.runtime.run import architecture, has_kernel, kernel
from cudnn.runtime.vmap import one_by_one
from cudnn_kernels.moe.configuration import MOST_EXPERTS, RowOffsetsConfiguration

_WHERE = "moe_experts"
_OFFSETS = "cudnn_kernels.moe.row_offsets:RowOffsets"
_COUNTS = (torch.int32, torch.int64)
_MOST_ROWS = 2**30  # the kernel adds two row numbers as int32
Tensor = torch.Tensor
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Six = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def moe_experts(
    x: torch.Tensor,
    counts: torch.Tensor | Sequence[int],
    up: Weights,
    down: Weights,
    probs: torch.Tensor | None = None,
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
    main_grads: tuple[Weights, Weights] | None = None,
) -> torch.Tensor:
    """The experts' MLPs of rows that are sorted by expert, as token dispatchers of training stacks return them.

        y[r] = down[e] (probs[r] * act(up[e] x[r] + up_bias[e])) + probs[r] * down_bias[e],    e: the expert of row r

    The first ``counts[0]`` rows are expert 0's, the next ``counts[1]`` expert 1's, and so on. Rows behind the sum of
    counts are padding: their outputs are zeros, and so are the gradients of x and of probs there; they add nothing to
    other gradients and may hold anything. Differentiable in x, probs, weights and biases, as one autograd node. Nothing
    sorts, permutes or combines rows, and counts on the device are not read by the host. A row's output, and its
    gradients of x and probs, have the same bits whatever the other rows and their number are. Use
    :func:`cudnn.ops.moe_mlp` for tokens that are not dispatched yet.

    Args:
        x: ``[R, H]``, bfloat16 or float16, contiguous in H; the reference on the CPU also takes float32 and float64.
        counts: The rows of each expert, E integers: int32 or int64, ``[E]``, on the device of x; or on the host, as a
            tensor or a list, which is copied to the device. Counts whose sum is more than R are refused on the host;
            on the device they end the program with a launch failure.
        up, down: of :func:`cudnn.ops.moe_mlp`.
        probs: The rows' weights, floating point, ``[R]`` or ``[R, 1]``. None: ones.
        up_bias, down_bias: of :func:`cudnn.ops.moe_mlp`.
        activation, glu_layout, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: of :func:`cudnn.ops.moe_mlp`.
        fp8: of :func:`cudnn.ops.moe_mlp`.
        main_grads: of :func:`cudnn.ops.moe_mlp`.

    Returns:
        ``[R, H]``, contiguous, of the dtype of x.

    Raises:
        ValueError: shapes, dtypes, devices or an activation; counts on the host that do not fit x.
        TypeError: an argument of another Python type.
    """
    check_tensor(_WHERE, "x", x)
    _check_rows(x)
    check_tensors(_WHERE, probs=probs, up_bias=up_bias, down_bias=down_bias)
    ups, downs = listed_up(_WHERE, "up", up, glu_layout), listed(_WHERE, "down", down)
    up_main_grad, down_main_grad = [], []
    if main_grads is not None:
        up_main_grad, down_main_grad = two(_WHERE, "main_grads", main_grads, "those of up and of down")
        up_main_grad = listed_up(_WHERE, "main_grads of up", up_main_grad, glu_layout)
        down_main_grad = listed(_WHERE, "main_grads of down", down_main_grad)
    counts, padded = device_counts(counts, x, up_shape(ups, glu_layout)[0])
    if probs is not None:
        probs = row_weights(probs, x)
    act_params = [linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min]
    tensors = (x, probs, *ups, *downs, up_bias, down_bias)
    save_preact = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    weights = (ups, downs, up_bias, down_bias, up_main_grad, down_main_grad)
    options = (activation, act_params, glu_layout, recipe_of(_WHERE, fp8), padded, save_preact)
    y, *_ = moe_experts_fwd_primitive(x, counts, probs, *weights, *options)
    return y


def device_counts(counts: Tensor | Sequence[int], x: Tensor, experts: int) -> tuple[Tensor, bool]:
    """Counts on the device of x, and whether there may be padding rows. Checks counts that are on the host."""
    if not isinstance(counts, Tensor):
        if not isinstance(counts, (list, tuple)) or any(type(count) is not int for count in counts):
            raise make_error(TypeError, _WHERE, "counts", type(counts).__name__, "a tensor, or a list of integers")
        if any(abs(count) > _MOST_ROWS for count in counts):
            raise make_error(ValueError, _WHERE, "counts", list(counts), f"at most {_MOST_ROWS}")
        counts = torch.tensor(counts, dtype=torch.int32, device="cpu")
    if counts.shape != (experts,) or counts.dtype not in _COUNTS:
        got, allowed = (
            f"{counts.dtype} {tuple(counts.shape)}",
            f"torch.int32 or torch.int64 ({experts},), for E experts",
        )
        raise make_error(ValueError, _WHERE, "counts", got, allowed)
    if counts.device.type != "cpu" or torch.compiler.is_compiling() or x.is_meta:
        return (counts if counts.device == x.device else counts.to(x.device)), True
    _check_host_counts(counts, x)
    padded = int(counts.sum()) < x.shape[0]
    if x.is_cuda:
        counts = counts.pin_memory().to(x.device, non_blocking=True)
    return counts, padded


def _check_host_counts(counts: Tensor, x: Tensor) -> None:
    total = sum(counts.tolist())  # of Python's integers, which do not wrap around
    if total > x.shape[0] or bool((counts < 0).any()):
        got = f"{counts.tolist()}, {total} in all" if len(counts) <= 16 else f"{total} in all"
        raise make_error(ValueError, _WHERE, "counts", got, f"0 or more, at most {x.shape[0]} in all, the rows of x")


def row_weights(probs: Tensor, x: Tensor) -> Tensor:
    """Weights of rows as (R, 1), float32 or, for an x of float64, float64."""
    if probs.shape not in ((x.shape[0],), (x.shape[0], 1)) or not probs.is_floating_point():
        got, allowed = f"{probs.dtype} {tuple(probs.shape)}", f"floating point ({x.shape[0]},), for each row of x"
        raise make_error(ValueError, _WHERE, "probs", got, allowed)
    return probs.to(torch.float64 if x.dtype is torch.float64 else torch.float32).view(-1, 1)


class _Rows(NamedTuple):
    """The tensors of a call that have a value for each row or expert."""

    x: Tensor
    counts: Tensor
    probs: Tensor | None

    @property
    def routed(self) -> list[Tensor]:
        """Tensors that have to be on the device of x."""
        return [self.counts] if self.probs is None else [self.counts, self.probs]


def _check_rows(x: Tensor) -> None:
    if x.ndim != 2 or (x.stride(1) != 1 and x.shape[1] > 1) or x.shape[0] > _MOST_ROWS:
        got, allowed = f"{tuple(x.shape)} with strides {x.stride()}", f"[R, H], contiguous in H, R at most {_MOST_ROWS}"
        raise make_error(ValueError, _WHERE, "x", got, allowed)


def _check(rows: _Rows, e: Experts, main_grad: Sequence[Any]) -> None:
    _check_rows(rows.x)
    check_experts(_WHERE, rows.x, e, main_grad, rows.routed)
    experts = e.up_shape[0]
    if not 0 < experts <= MOST_EXPERTS:
        raise make_error(ValueError, _WHERE, "experts of up", experts, f"1 to {MOST_EXPERTS}")


_CHECKED: dict[Any, GroupedGemmOps] = {}


def _checked(rows: _Rows, e: Experts, main_grad: Sequence[Sequence[Tensor]]) -> GroupedGemmOps:
    """Checks the arguments and returns the GEMMs. Calls like earlier ones, except of longer lists, skip the check."""
    x, lists = rows.x, (e.up, e.down, *main_grad)
    firsts = [(t.shape, t.dtype, t.device, t.is_contiguous(), t.data_ptr() % ALIGNMENT) for w in lists for t in w[:2]]
    biases = [None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in (e.up_bias, e.down_bias)]
    options = (e.activation, *e.act_params, e.glu_layout, e.fp8, None if x.is_cuda else architecture(x))
    described = (x.ndim, x.shape[1:], x.stride()[1:], x.dtype, x.device, *(t.device for t in rows.routed))
    key = (*firsts, *biases, tuple(map(len, lists)), described, options, environment())
    ops = _CHECKED.get(key)
    if ops is None or max(map(len, lists)) > 2:
        _check(rows, e, main_grad)
        check_addresses(_WHERE, e, main_grad)
        ops = _CHECKED[key] = layer_ops(x, e, bool(main_grad[0]), None)
    return ops


def _row_offsets(counts: Tensor, out: Tensor) -> Tensor:
    """The end offsets int32 (E,) of the experts' rows; zeros in the padding rows of ``out`` (R, H)."""
    if has_kernel(out, "moe_experts"):
        if not (out.is_cuda or out.is_meta):
            _check_host_counts(counts, out)
        counts, offsets = counts.contiguous(), torch.empty_like(counts, dtype=torch.int32)
        options = (len(counts), out.dtype, out.shape[1], str(counts.dtype).removeprefix("torch."))
        kernel(_OFFSETS, RowOffsetsConfiguration, *options)(counts, offsets, out)
        return offsets
    _check_host_counts(counts, out)
    offsets = counts.cumsum(0).int()
    out[int(offsets[-1]) :] = 0
    return offsets


def _clear_padding(offsets: Tensor, out: Tensor) -> None:
    """Zeros in the rows of ``out`` (R, H) behind the last expert's."""
    if has_kernel(out, "moe_experts"):
        kernel(_OFFSETS, RowOffsetsConfiguration, len(offsets), out.dtype, out.shape[1])(offsets, out)
    else:
        out[int(offsets[-1]) :] = 0


def _flops_forward(
    x: Sequence[int], up: Sequence[Sequence[int]], down: Sequence[Sequence[int]], glu_layout: str
) -> int:
    """Both GEMMs over all R rows: how many are padding is known on the device alone."""
    return sum(gemm_flops(x[0], up, down, glu_layout))


def _flops_backward(
    x: Sequence[int],
    up: Sequence[Sequence[int]],
    down: Sequence[Sequence[int]],
    glu_layout: str,
    needs_grad: Sequence[bool],
) -> int:
    """The GEMMs of the gradients that are needed; all but that of down begin with dpreact."""
    dx, dprobs, dw_up, dw_down, dup_bias, _ = needs_grad
    up_gemm, down_gemm = gemm_flops(x[0], up, down, glu_layout)
    return up_gemm * (dx + dw_up) + down_gemm * ((dx or dprobs or dw_up or dup_bias) + dw_down)


@custom_op(
    "moe_experts_fwd_primitive", autocast=("x", "up", "down", "up_bias", "down_bias"), flops=_flops_forward, repeats=FEW
)
def moe_experts_fwd_primitive(
    x: torch.Tensor,
    counts: torch.Tensor,
    probs: torch.Tensor | None,
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
    padded: bool,
    save_preact: bool,
) -> Three:
    """y of :func:`moe_experts` (R, H), the experts' end offsets (E,), and the pre-activation, as
    :func:`cudnn.moe.layer.forward` returns it. ``padded``: there may be padding rows.
    """
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    rows = _Rows(x, counts, probs)
    ops = _checked(rows, experts, (up_main_grad, down_main_grad))
    y, offsets, preact = _empty(rows, experts, save_preact)
    if not x.shape[0]:
        return y, offsets.zero_(), preact
    offsets = _row_offsets(counts, y)
    probs = None if probs is None else probs.contiguous()
    arguments = (aligned(x), probs, SortedRows(offsets, x.shape[0]), experts, save_preact)
    _, preact = layer.forward(ops, *arguments, out=y)
    return y, offsets, preact


def _empty(rows: _Rows, e: Experts, save_preact: bool) -> Three:
    """Memory for y, the offsets and the pre-activation."""
    x, counts = rows.x, rows.counts
    preact = layer.empty_preact(x, x.shape[0], e, save_preact)
    return x.new_empty(x.shape), counts.new_empty(counts.shape, dtype=torch.int32), preact


@moe_experts_fwd_primitive.register_fake
def _(
    x: Any,
    counts: Any,
    probs: Any,
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
    padded: bool,
    save_preact: bool,
) -> Three:
    experts, rows = (
        Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8),
        _Rows(x, counts, probs),
    )
    _check(rows, experts, (up_main_grad, down_main_grad))
    return _empty(rows, experts, save_preact)


@custom_op("moe_experts_bwd_primitive", mutates=("up_main_grad", "down_main_grad"), flops=_flops_backward, repeats=FEW)
def moe_experts_bwd_primitive(
    gradient: torch.Tensor,
    x: torch.Tensor,
    offsets: torch.Tensor,
    preact: torch.Tensor,
    probs: torch.Tensor | None,
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
    padded: bool,
    needs_grad: Sequence[bool],
) -> Six:
    """The gradients of x, probs, up, down and the biases; tensors without elements for those not in ``needs_grad``.

    Those of up and down are accumulated into ``up_main_grad`` and ``down_main_grad`` if these are not empty.
    """
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    main_grad = (up_main_grad, down_main_grad)
    if not x.shape[0]:
        zeros = _gradients_like(x, probs, experts, needs_grad, main_grad)
        return tuple(each.zero_() for each in zeros)  # pyright: ignore[reportReturnType]
    grads = _gradients(gradient, x, offsets, preact, probs, experts, main_grad, padded, needs_grad)
    return tuple(x.new_empty(0) if each is None else each for each in grads)  # pyright: ignore[reportReturnType]


def _gradients(
    gradient: Tensor,
    x: Tensor,
    offsets: Tensor,
    preact: Tensor,
    probs: Tensor | None,
    e: Experts,
    main_grad: tuple[Sequence[Tensor], Sequence[Tensor]],
    padded: bool,
    needs_grad: Sequence[bool],
    into_preact: bool = False,
) -> layer.Gradients:
    """The gradients of one row or more; ``into_preact`` as of :func:`cudnn.moe.layer.backward`."""
    gradient, x, probs = aligned(gradient), aligned(x), None if probs is None else probs.contiguous()
    rows = SortedRows(offsets, x.shape[0])
    if e.down_bias is not None and padded:  # its gradient is a GEMM over all rows
        gradient = gradient.where(rows.expert < len(offsets), 0.0)
    arguments = (gradient, x, preact, None, probs, rows, e, needs_grad, main_grad)
    grads = layer.backward(grouped_gemm_ops(x, e), *arguments, into_preact=into_preact)
    if grads.x is not None and padded:
        _clear_padding(offsets, grads.x)
    return grads


def _gradients_like(
    x: Tensor, probs: Tensor | None, e: Experts, needs_grad: Sequence[bool], main_grad: Sequence[Any]
) -> Six:
    """Memory of the gradients."""
    weights = x.new_empty(0) if probs is None else probs
    shapes, likes = gradient_shapes(x, weights, e, needs_grad, main_grad), [x, weights, x, x, x, x]
    empty = (like.new_empty((0,) if s is None else s) for like, s in zip(likes, shapes, strict=True))
    return tuple(empty)  # pyright: ignore[reportReturnType]


@moe_experts_bwd_primitive.register_fake
def _(
    gradient: Any,
    x: Any,
    offsets: Any,
    preact: Any,
    probs: Any,
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
    padded: bool,
    needs_grad: Any,
) -> Six:
    experts = Experts(up, down, up_bias, down_bias, activation, act_params, glu_layout, fp8)
    return _gradients_like(x, probs, experts, needs_grad, (up_main_grad, down_main_grad))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Three) -> None:
    x, _, probs, up, down, up_bias, down_bias, *rest = inputs
    _, offsets, preact = output
    ctx.mark_non_differentiable(offsets)
    ctx.save_for_backward(x, offsets, preact, probs, up_bias, down_bias, *up, *down)
    *ctx.main_grad, ctx.activation, ctx.act_params, ctx.glu_layout, ctx.fp8, ctx.padded, _ = rest
    ctx.num_tensors = len(up)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, offsets, preact, probs, up_bias, down_bias, *matrices = ctx.saved_tensors  # once: a checkpoint unpacks it once
    up, down = list(matrices[: ctx.num_tensors]), list(matrices[ctx.num_tensors :])
    none = [[None] * len(buffers) for buffers in ctx.main_grad]
    if gradient is None:
        return None, None, None, [None] * len(up), [None] * len(down), None, None, *none, *[None] * 6
    needs_x, _, needs_probs, needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[:7]
    needs_grad = [needs_x, needs_probs, any(needs_up), any(needs_down), needs_up_bias, needs_down_bias]
    weights, options = (up, down, up_bias, down_bias), (ctx.activation, ctx.act_params, ctx.glu_layout, ctx.fp8)
    arguments: tuple[Any, ...] = (x, offsets, preact, probs)
    is_large = x.numel() > FEW and not needs_dispatch((gradient, x, *matrices), False)
    if is_large and may_overwrite(preact):  # launches of smaller ones are repeated
        for buffer in (*ctx.main_grad[0], *ctx.main_grad[1]):
            torch.autograd.graph.increment_version(buffer)
        arguments += (Experts(*weights, *options), tuple(ctx.main_grad), ctx.padded, needs_grad)
        grads: Any = _gradients(gradient, *arguments, into_preact=True)
    else:
        arguments += (*weights, *ctx.main_grad, *options, ctx.padded, needs_grad)
        grads = moe_experts_bwd_primitive(gradient, *arguments)
    dx, dprobs, dw_up, dw_down, *biases = (y if need else None for y, need in zip(grads, needs_grad, strict=True))
    matrices = zip((dw_up, dw_down), (up, down), ctx.main_grad, (needs_up, needs_down), strict=True)
    dw_lists = [
        dummy_grads(like, needed) if buffers else unbind_experts(dw, like) for dw, like, buffers, needed in matrices
    ]
    return dx, None, dprobs, *dw_lists, *biases, *none, *[None] * 6


moe_experts_fwd_primitive.register_autograd(_backward, setup_context=_setup)


def _sequential_vmap(operator: Any) -> Any:
    """The rule for ``torch.vmap``, whose own loop takes no lists of tensors."""
    return lambda info, dims, *arguments: one_by_one(operator, info.batch_size, dims, arguments)


for _operator in (moe_experts_fwd_primitive, moe_experts_bwd_primitive):
    _operator.register_vmap(_sequential_vmap(_operator))
