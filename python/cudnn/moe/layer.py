"""The expert MLPs of a mixture-of-experts layer: forward and backward as sequences of kernels.

T tokens of size H, K experts per token of E, intermediate size I, R = T K rows sorted by expert (see
:class:`cudnn.moe.experts.Permutation`). ``cudnn.moe.route`` runs before :func:`forward`: it computes the router's
weights, the experts, and the permutation.

Forward, for the slot (t, k) at row r with expert e = indices[t, k] (numbered in :func:`forward`):

    (1) permute / gather   a[r]   = x[t]                     rows gathered by the GEMM, or a permuted copy of x
    (2) up GEMM + GLU      h[r]   = up[e] a[r] + up_bias[e]  preact, (R, N), saved for backward
                           act[r] = glu(h[r])                (R, I), in the epilogue
    (3) down GEMM          o[r]   = down[e] act[r] + down_bias[e]                                    (R, H)
    (4) combine            y[t]   = sum over k of weights[t, k] o[scatter_idx[t, k]]    in float32, (T, H)

Backward saves x and h alone, no (R, H) tensor: the gradient of a router's weight is taken from the intermediate width,
dweights[t, k] = <down[e]^T dy[t], act[r]>, not from o (as SonicMoE does).

    (1) permute / gather   g[r] = dy[t]
    (2) down GEMM^T + dGLU dact[r] = weights[t, k] down[e]^T g[r];  dh = dglu(dact, h);  act recomputed, times weights;
                           dup_bias, and dprob[r], the gradient of the router's weight; dh overwrites h if autograd
                           frees the graph (:func:`cudnn.runtime.registration.may_overwrite`)
    (3) down wgrad         ddown[e] = sum over rows of e of g[r] act[r]^T
    (4) up GEMM^T          dx_row[r] = up[e]^T dh[r] (+ dlogit[r] router[e])
    (5) up wgrad           dup[e] = sum over rows of e of dh[r] x[t]^T
    (6) combine            dx[t] = sum over k of dx_row[scatter_idx[t, k]], concurrent with (5) if that gathers
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cudnn.lazy import torch
from cudnn.moe import blockwise
from cudnn.moe.combining import combine_into, combine_rows
from cudnn.moe.experts import (
    GATED,
    PERMUTE_COLUMNS,
    PERMUTE_COLUMNS_DW_UP,
    WIDE,
    Experts,
    GroupedGemmOps,
    Permutation,
    SortedRows,
    is_list,
    matrix,
    ones,
    pointers,
    shape_of,
    transposed,
    up_operand,
    weight_operand,
)
from cudnn.moe.gathered import is_gathered
from cudnn.moe.quantized_rows import QuantizedRows, Rows
from cudnn.moe.quantizing import (
    empty_quantized,
    gemm_quantizes,
    quantized,
    quantized_both_ways,
    quantized_weights,
)
from cudnn.runtime.streams import forked

if TYPE_CHECKING:
    from torch import Tensor

OVERLAP_ELEMENTS = 2**26  # elements of dx_row from which on its combine runs concurrently with the wgrad of up
OVERLAP_MARGIN = 3  # clusters of two CTAs that the wgrad leaves free for the combine


class NeedsGrad(NamedTuple):
    """Which gradients autograd needs."""

    x: bool
    weights: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """The gradients that are needed, else None.

    Those of up and down are (E, rows, columns), or None if they were accumulated into ``main_grad``. Of separate gate
    and up weights: (2, E, I, H).
    """

    x: Tensor | None
    weights: Tensor | None
    up: Tensor | None
    down: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


class RouterBackward(Protocol):
    """The backward pass of a router, called between the two halves of :func:`backward`."""

    def backward_weights(self, dweights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Takes the gradient of the router's weights (T, K).

        Returns:
            The gradient of each row's logit (R, 1, 1) and the router's weight (E, H), whose product
            :func:`backward_up` adds to dx_row; None if other logits than those of the chosen experts have a gradient:
            then the caller adds the router's contribution to dx.
        """
        ...


def forward(
    ops: GroupedGemmOps,
    x: Rows,
    weights: Tensor | None,
    permutation: Permutation | SortedRows,
    e: Experts,
    save_preact: bool,
    combine: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The forward pass: see the steps in the module's docstring.

    Args:
        ops: :func:`cudnn.moe.experts.grouped_gemm_ops` for x and e.
        x: (T, H); with ``e.fp8`` they may be quantized already.
        weights: The router's weights, float32 (T, K).
        permutation: The slots sorted by expert; or rows that are sorted already, which are not combined.
        save_preact: Whether the up GEMM stores its pre-activation for :func:`backward`.
        combine: False: returns each row's output (R, H), not weighted (expert parallelism combines it with NVLink).
        out: Memory (R, H) for the outputs of rows.

    Returns:
        y (T, H), and preact, of :func:`empty_preact`.
    """
    (experts, n, _), (_, h, intermediate), count = e.up_shape, shape_of(e.down), permutation.rows
    gated, like = e.activation in GATED, e.down[0]
    saved = empty_preact(like, count, e, save_preact)
    preact, preact_scales = blockwise.preact_of(saved, count, n) if save_preact else (None, None)
    preact = like.new_empty(count, n) if preact is None and not gated else preact
    quantize_act = e.fp8 and gemm_quantizes(like)
    act, act_scales = (
        empty_quantized(like, count, intermediate) if quantize_act else (like.new_empty(count, intermediate), None)
    )
    common: dict[str, Any] = {"padded_offsets": permutation.offsets, "alpha": ones(experts, like.device)}
    up = _fp8_weight(e.up, e, save_preact) if e.fp8 else up_operand(e)
    down = _fp8_weight(e.down, e, save_preact) if e.fp8 else weight_operand(e.down)

    # (1) Permute: the up GEMM gathers rows of x by ``a_index``, or reads a copy that is sorted by expert.
    tensors = {**common, **up[0], "bias": _bias(e.up_bias)}
    if e.fp8:
        gathers = permutation.gathers(like)
        tensors["a_index"] = permutation.gather_idx if gathers else None
        tensors |= blockwise.rows_operand(*(quantized(x) if gathers else quantized(x, permutation.scatter_idx, count)))
    else:
        assert not isinstance(x, QuantizedRows)
        a, tensors["a_index"] = permutation.operand(x)
        tensors["a"] = matrix(a)
        del a

    # (2) Up GEMM; its epilogue applies the activation, and for fp8 quantizes the result.
    tensors |= {"c": None if preact is None else matrix(preact), "d": matrix(act)}
    if e.fp8:
        tensors["sfd_row"] = None if act_scales is None else act_scales.unsqueeze(2)
        tensors["sfc"] = None if preact_scales is None else preact_scales.unsqueeze(2)
    prob = permutation.gemm_weights(weights, not gated)
    tensors["prob"] = prob
    key = ("up", save_preact, tensors.get("a_index") is None, act_scales is None, prob is None, permutation.is_sorted)
    key = (*key, isinstance(x, QuantizedRows))
    ops.run(key, "grouped_gemm_glu" if gated else "grouped_gemm_srelu", tensors, up[1], ops.act_options)
    del tensors  # and the permuted copy of x: the next output reuses its memory

    # (3) Down GEMM.
    down_out = like.new_empty(count, h) if out is None else out
    tensors = {**common, **down[0], "a": matrix(act), "bias": _bias(e.down_bias), "d": matrix(down_out)}
    weighs_bias = permutation.is_sorted and prob is not None and e.down_bias is not None
    tensors["prob"] = prob if weighs_bias else None
    if e.fp8:
        tensors |= blockwise.rows_operand(*(quantized(act) if act_scales is None else (act, act_scales)))
    ops.run(
        "down, weighted bias" if weighs_bias else "down",
        _gemm_of(e.fp8),
        tensors,
        down[1],
    )
    del tensors, act, act_scales, prob  # y reuses their memory

    # (4) Combine: the weighted sum of each token's rows, in float32.
    y = down_out
    if combine and isinstance(permutation, Permutation):
        y = combine_rows(down_out, permutation.scatter_idx, weights)
    return y, saved


def backward(
    ops: GroupedGemmOps,
    dy: Rows,
    x: Rows,
    preact: Tensor,
    indices: Tensor | None,
    weights: Tensor | None,
    permutation: Permutation | SortedRows,
    e: Experts,
    needs_grad: Sequence[bool],
    main_grad: tuple[Sequence[Tensor], Sequence[Tensor]],
    combine: bool = True,
    router: RouterBackward | None = None,
    delayed: list[Callable[[], Tensor | None]] | None = None,
    into_preact: bool = False,
) -> Gradients:
    """The gradients that ``needs_grad`` names, in the order of :class:`NeedsGrad`.

    Args:
        dy: (T, H); with ``e.trains_fp8`` it may be quantized already if there is no ``down_bias``, and x too.
        preact: of :func:`forward`.
        indices: Experts of each token, (T, K); None for sorted rows.
        weights: The router's weights (T, K); of sorted rows (R, 1) or None.
        main_grad: float32 buffers of up and of down that their gradients are added to; empty: none.
        combine: False: x's gradient is each row's, (R, H).
        router: Gets the gradient of ``weights`` before x's, to which it may add.
        delayed: Gets functions that compute the weight gradients of down and of up, whose results are then None.
        into_preact: The gradient of the pre-activation overwrites it, which saves memory of its size.
    """
    needs, router_dx = NeedsGrad(*needs_grad), None
    arguments = (indices, weights, permutation, e, needs, main_grad[1], delayed, into_preact)
    grads, dpreact = backward_down(ops, dy, x, preact, *arguments)
    if router is not None and grads.weights is not None:
        router_dx = router.backward_weights(grads.weights)
    dx, dw_up = backward_up(ops, x, dpreact, permutation, e, needs, main_grad[0], combine, router_dx, delayed)
    return grads._replace(x=dx, up=dw_up)


def backward_down(
    ops: GroupedGemmOps,
    dy: Rows,
    x: Rows,
    preact: Tensor,
    indices: Tensor | None,
    weights: Tensor | None,
    permutation: Permutation | SortedRows,
    e: Experts,
    needs: NeedsGrad,
    main_grad: Sequence[Tensor],
    delayed: list[Callable[[], Tensor | None]] | None = None,
    into_preact: bool = False,
) -> tuple[Gradients, Any]:
    """The first half of :func:`backward`: all gradients but those of x and up, and dpreact, for :func:`backward_up`.

    ``main_grad``: that of down. ``delayed`` and ``into_preact`` as there.
    """
    run: Callable[..., Any] = blockwise.backward_down if e.trains_fp8 else _backward_down
    shape, like = shape_of(e.down), e.down[0]
    wgrad = functools.partial(_wgrad, ops, "down", like=like, shape=shape, main_grad=main_grad, delayed=delayed)
    wgrad = wgrad if needs.down else None
    gemms = run(ops, dy, preact, weights, permutation, e, needs.up_bias, wgrad, into_preact)
    dpreact, dprob, dw_down, dup_bias = gemms
    dweights = permutation.weights_of_slots(dprob) if needs.weights and dprob is not None else None
    ddown_bias = None
    if e.down_bias is not None:  # the router's weight multiplies down_bias too
        assert not isinstance(dy, QuantizedRows)
        slots = _weighted_slots(indices, weights, permutation, shape_of(e.down)[0])
        ddown_bias, of_weights = _down_bias_gradients(dy, *slots, e.down_bias, needs)
        if dweights is not None and of_weights is not None:
            dweights = dweights + of_weights
    dup_bias = None if dup_bias is None else dup_bias.to(like.dtype)
    return Gradients(None, dweights, None, dw_down, dup_bias, ddown_bias), dpreact


def _backward_down(
    ops: GroupedGemmOps,
    dy: Tensor,
    preact: Tensor,
    weights: Tensor | None,
    permutation: Permutation | SortedRows,
    e: Experts,
    needs_up_bias: bool,
    wgrad: Callable[[Callable[[], dict[str, Any]]], Tensor | None] | None,
    into_preact: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Steps (1) to (3).

    Args:
        wgrad: :func:`_wgrad` of down, or None if its gradient is not needed.

    Returns:
        dpreact (R, N); the gradients of the rows' weights, of down, and of up_bias, or None.
    """
    (experts, _, intermediate), count = shape_of(e.down), permutation.rows
    # A CTA reads its tile of the pre-activation before it stores its tile of the gradient; rows of other experts in a
    # tile are neither read nor stored.
    dpreact = preact if into_preact else torch.empty_like(preact)
    act = preact.new_empty(count, intermediate)
    # (1) Permute dy, as forward permutes x.
    dy_rows, gather_idx = permutation.operand(dy, 2 * intermediate >= PERMUTE_COLUMNS)
    # (2) down GEMM^T; the epilogue applies the router's weight and the activation's derivative at preact.
    prob, dprob = permutation.weights_of_rows(weights)
    bias_dtype = dy.dtype if dy.dtype in WIDE else torch.bfloat16
    dup_bias = preact.new_empty(experts, preact.shape[1], dtype=bias_dtype) if needs_up_bias else None
    gated = e.activation in GATED
    tensors, options = weight_operand(e.down, transpose=True)
    tensors |= {"padded_offsets": permutation.offsets, "alpha": ones(experts, dy.device), "a": matrix(dy_rows)}
    gemm_prob = permutation.gemm_weights(None, True) if prob is None and not gated else prob
    tensors |= {"a_index": gather_idx, "c": matrix(preact), "prob": gemm_prob, "dprob": dprob}
    tensors |= {"d_row": matrix(dpreact), "dbias": dup_bias, "activation" if gated else "d_srelu": matrix(act)}
    key = ("dact", needs_up_bias, gather_idx is None, prob is None)
    ops.run(key, "grouped_gemm_dglu" if gated else "grouped_gemm_dsrelu", tensors, options, ops.dact_options)
    # (3) Weight gradient of down.
    operands = {"offsets": permutation.offsets, "a": transposed(dy_rows), "a_index": gather_idx, "b": transposed(act)}
    return dpreact, dprob, None if wgrad is None else wgrad(lambda: operands), dup_bias


def _weighted_slots(
    indices: Tensor | None, weights: Tensor | None, permutation: Permutation | SortedRows, experts: int
) -> tuple[Tensor, Tensor]:
    """The expert of each slot, int64 (T, K), ``experts`` for a dropped slot, and its weight."""
    if isinstance(permutation, Permutation):
        assert indices is not None
        assert weights is not None
        return indices.long().where(permutation.scatter_idx >= 0, experts), weights
    expert = permutation.expert
    return expert, torch.ones_like(expert, dtype=torch.float32) if weights is None else weights


def _down_bias_gradients(
    dy: Tensor, expert: Tensor, weights: Tensor, bias: Tensor, needs: NeedsGrad
) -> tuple[Tensor | None, Tensor | None]:
    """The gradient of down_bias (E, H), and what it adds to that of the weights (T, K)."""
    experts, is_routed = bias.shape[0], expert < bias.shape[0]
    chosen, ddown_bias, dweights = expert.clamp(max=experts - 1), None, None
    if needs.weights:
        dweights = (dy @ bias.T).gather(1, chosen).where(is_routed, 0.0)
    if needs.down_bias:
        weight_of_expert = dy.new_zeros(len(dy), experts)
        slot_weights = weights.where(is_routed, 0.0).to(weight_of_expert.dtype)
        ddown_bias = weight_of_expert.scatter_add_(1, chosen, slot_weights).T @ dy
    return ddown_bias, dweights


def backward_up(
    ops: GroupedGemmOps,
    x: Rows,
    dpreact: Any,
    permutation: Permutation | SortedRows,
    e: Experts,
    needs: NeedsGrad,
    main_grad: Sequence[Tensor],
    combine: bool = True,
    router_dx: tuple[Tensor, Tensor] | None = None,
    delayed: list[Callable[[], Tensor | None]] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The second half of :func:`backward`: the gradients of x and up, from dpreact of :func:`backward_down`.

    ``router_dx``: a row's dlogit, float32 (R, 1, 1), and the router's weight (E, H): dx_row gets dlogit[r] router[e].

    A weight gradient that gathers rows of x leaves memory bandwidth unused: the combine of dx_row then runs
    concurrently, on a second stream.
    """
    experts, n, h = e.up_shape
    large, like = n >= PERMUTE_COLUMNS_DW_UP, e.up[0]

    # (5) Weight gradient of up.
    def operands() -> dict[str, Any]:
        if e.trains_fp8:
            return blockwise.wgrad_up_operands(x, dpreact, permutation)
        assert not isinstance(x, QuantizedRows)
        x_rows, gather_idx = permutation.operand(x, large)
        rows = {"a": transposed(dpreact), "b": transposed(x_rows), "b_index": gather_idx}
        return {"offsets": permutation.offsets, **rows}

    def wgrad_up(margin: int = 0) -> Tensor | None:
        if not needs.up:
            return None
        return _wgrad(ops, "up", operands, e.up[0], e.up_shape, main_grad, margin, delayed, e.halves)

    if not needs.x:
        return None, wgrad_up()
    # (4) up GEMM^T.
    dx_rows = like.new_empty(permutation.rows, h)
    if e.trains_fp8:
        tensors, options = blockwise.dx_operands(e.up, dpreact)
    else:
        tensors, options = up_operand(e, transpose=True)
        tensors["a"] = matrix(dpreact)
    tensors |= {"padded_offsets": permutation.offsets, "alpha": ones(experts, like.device), "d": matrix(dx_rows)}
    if router_dx is not None:
        tensors |= {"prob": router_dx[0], "bias": _bias(router_dx[1])}
    ops.run(("dx", router_dx is None), _gemm_of(e.trains_fp8), tensors, options)
    if not combine or not isinstance(permutation, Permutation):
        return dx_rows, wgrad_up()
    # (6) Combine, before the weight gradient or concurrently.
    overlaps = like.is_cuda and needs.up and dx_rows.numel() >= OVERLAP_ELEMENTS and not e.trains_fp8
    if not (overlaps and permutation.gathers(like, large)):
        dx = combine_rows(dx_rows, permutation.scatter_idx)
        del dx_rows, tensors  # before x is permuted into a copy
        return dx, wgrad_up()
    dx = like.new_empty(len(permutation.scatter_idx), h)
    with forked(like.device) as second_stream:
        dw_up = wgrad_up(OVERLAP_MARGIN)
        with second_stream:
            combine_into(dx, dx_rows, permutation.scatter_idx, None)
    return dx, dw_up


def _gemm_of(fp8: Any) -> str:
    """The grouped GEMM without an activation."""
    return "grouped_gemm_quant" if fp8 else "grouped_gemm"


def _fp8_weight(weights: Sequence[Tensor], e: Experts, trains: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The B operand in e4m3 with its scales, and the GEMM's options. ``trains``: a backward pass follows."""
    if trains and e.trains_fp8 and not is_gathered(weights):
        return blockwise.weight_operand(*quantized_both_ways(weights)[:2])
    return blockwise.weight_operand(*quantized_weights(weights, trains))


def _bias(bias: Tensor | None) -> Tensor | None:
    """Biases (E, n) in the layout of the grouped GEMMs, (n, E)."""
    return None if bias is None else bias.T


def _wgrad(
    ops: GroupedGemmOps,
    name: str,
    operands: Callable[[], dict[str, Any]],
    like: Tensor,
    shape: tuple[int, int, int],
    main_grad: Sequence[Tensor],
    margin: int = 0,
    delayed: list[Callable[[], Tensor | None]] | None = None,
    halves: int = 1,
) -> Tensor | None:
    """The weight gradient (E, m, n), a K-grouped GEMM; None if it is accumulated into ``main_grad``, or delayed.

    With 2 ``halves``, the gradients of two separate weights, one GEMM each: (2, E, m / 2, n).
    """
    if delayed is not None:
        delayed.append(functools.partial(_wgrad, ops, name, operands, like, shape, main_grad, halves=halves))
        return None
    tensors, (experts, m, n), count = operands(), shape, len(main_grad) // halves
    dw = None if main_grad else like.new_empty(shape if halves == 1 else (halves, experts, m // halves, n))
    for half, a in enumerate(tensors["a"].chunk(halves) if halves > 1 else [tensors["a"]]):
        buffers = main_grad[half * count : (half + 1) * count]
        dw_of_half = dw if dw is None or halves == 1 else dw[half]
        _wgrad_into(ops, name, {**tensors, "a": a}, dw_of_half, buffers, margin)
    return dw


def _wgrad_into(
    ops: GroupedGemmOps,
    name: str,
    tensors: dict[str, Any],
    dw: Tensor | None,
    main_grad: Sequence[Tensor],
    margin: int,
) -> None:
    """The K-grouped GEMM that writes ``dw`` (E, m, n), or accumulates into ``main_grad``."""
    experts, fp8 = tensors["offsets"].shape[0], "sfa" in tensors
    options: dict[str, Any] = {"sf_vec_size": 128} if fp8 else {}
    if dw is not None:
        tensors["wgrad"] = dw.permute(1, 2, 0)
    elif is_list(main_grad):
        tensors["wgrad_ptrs"] = pointers(main_grad)
        shape, dtype = tuple(main_grad[0].shape), main_grad[0].dtype
        options |= {"num_experts": experts, "wgrad_shape": shape, "wgrad_dtype": dtype}
    else:
        (tensors["wgrad"],) = main_grad
    rows = len(tensors["b"]) * 128 if fp8 else tensors["b"].shape[1]
    gathered = [x for x in ("a_index", "b_index") if tensors.get(x) is not None]
    # Rows per expert, on average, rounded to a power of two: the tile heuristic depends on it.
    key = (name, *gathered, "wgrad" in tensors, bool(main_grad), margin, (rows // experts).bit_length())
    ops.run(key, "grouped_gemm_wgrad", tensors, options, {"accumulate_on_output": bool(main_grad)}, margin=margin)


def empty_preact(x: Tensor, rows: int, e: Experts, saves: bool) -> Tensor:
    """Memory for the pre-activation (R, N) that is saved for :func:`backward`; no elements unless ``saves``.

    In e4m3 it is bytes: R N values, and float32 scales (R, N / 128).
    """
    n = e.up_shape[1]
    if not saves:
        return x.new_empty(0)
    if e.fp8 == "blockwise" and gemm_quantizes(x):
        return x.new_empty(rows * (n + n // 32), dtype=torch.uint8)
    return x.new_empty(rows, n)
