"""The kernels of a layer of experts in order, forward and backward.

No tensor of T K rows of the input outlives a pass, and the backward pass needs none: the gradient of a router's weight
is taken where the activation's is, from the intermediate width.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn.lazy import torch
from cudnn.moe.combining import combine, sum_into
from cudnn.moe.experts import GATED, Experts, Rows, execute, is_list, ones, operand, pointers, shape_of
from cudnn.moe.quantizing import quantized, quantized_weights

if TYPE_CHECKING:
    from torch import Tensor

BESIDE = 2**26  # elements of the rows of tokens' gradients from which on they are summed beside a product
MARGIN = 6  # clusters that it leaves to them


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    weights: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """Those that were asked for; weights' are (E, rows, columns), and None where they were added to others."""

    x: Tensor | None
    weights: Tensor | None
    up: Tensor | None
    down: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def forward(
    x: Tensor, weights: Tensor, rows: Rows, e: Experts, keeps: bool, summed: bool = True
) -> tuple[Tensor, Tensor]:
    """The result (T, H) and, where it ``keeps`` it, the product of the up projection (T K, N), else no elements.

    Not ``summed``, the result is that of each row, (T K, H), without weights.
    """
    (experts, wide, _), (_, columns, inner) = shape_of(e.up), shape_of(e.down)
    gated = e.activation in GATED
    hidden = x.new_empty(rows.count, wide) if keeps or not gated else None
    activated = x.new_empty(rows.count, inner)
    given: dict[str, Any] = {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device)}
    up, down = (_narrow(w, keeps) if e.fp8 else operand(w) for w in (e.up, e.down))
    tensors = {**given, **up[0], "bias": _vectors(e.up_bias), "c": hidden, "d": activated}
    if e.fp8:
        tensors |= _narrow_rows(*quantized(x, rows.of_choice, rows.count))
    else:
        tensors["a"], tensors["a_index"] = rows.read(x)
    if gated:
        execute("grouped_gemm_glu", tensors, **up[1], act_func=e.activation, **e.options)
    else:
        execute("grouped_gemm_srelu", {**tensors, "prob": weights.new_ones(rows.count)}, **up[1])
    del tensors  # and the tokens' copies, whose memory the result of the next product takes
    made = x.new_empty(rows.count, columns)
    tensors = {**given, **down[0], "a": activated, "bias": _vectors(e.down_bias), "d": made}
    if e.fp8:
        tensors |= _narrow_rows(*quantized(activated))
    execute("grouped_gemm_quant" if e.fp8 else "grouped_gemm", tensors, **down[1])
    y = combine(made, rows.of_choice, weights) if summed else made
    return y, hidden if keeps and hidden is not None else x.new_empty(0)


def backward(
    gradient: Tensor, x: Tensor, hidden: Tensor, indices: Tensor, weights: Tensor, rows: Rows, e: Experts,
    needed: Sequence[bool], sums: tuple[Sequence[Tensor], Sequence[Tensor]], summed: bool = True,
) -> Gradients:  # fmt: skip
    """The gradients that are ``needed``, in the order of :class:`Needs`.

    ``sums``: what those of up and down are added to instead, float32; empty: nothing. Not ``summed``, that of x
    is that of each row.
    """
    experts, _, inner = shape_of(e.down)
    needs = Needs(*needed)
    given: dict[str, Any] = {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device)}
    by_hidden, activated = torch.empty_like(hidden), hidden.new_empty(rows.count, inner)
    by_row = weights.new_zeros(rows.count + 1)  # the last one is that of choices that were dropped
    by_bias = hidden.new_empty(experts, hidden.shape[1], dtype=torch.bfloat16) if needs.up_bias else None
    down = operand(e.down, True)
    of_rows, index = rows.read(gradient, 2 * inner)
    tensors = {**given, **down[0], "a": of_rows, "a_index": index, "c": hidden, "prob": rows.scattered(weights)[:-1]}
    tensors |= {"dprob": by_row[:-1], "d_row": by_hidden, "dbias": by_bias}
    if e.activation in GATED:
        tensors["activation"] = activated
        options = {"act_func": f"d{e.activation}", "_deterministic": True, **e.options}
        execute("grouped_gemm_dglu", tensors, **down[1], **options)
    else:
        execute("grouped_gemm_dsrelu", {**tensors, "d_srelu": activated}, **down[1], deterministic=True)
    by_down = None
    if needs.down:
        tensors = {"offsets": rows.offsets, "a": of_rows.T, "a_index": index, "b": activated}
        by_down = _of_weights(tensors, e.down, sums[1])
    del tensors, of_rows, index, activated
    by_x, by_up = _of_x_and_up(x, by_hidden, rows, e.up, needs, sums[0], summed)
    by_weights = rows.of_choices(by_row) if needs.weights else None
    by_down_bias = None
    if e.down_bias is not None:  # what it added to a row was weighted too
        kept, chosen = rows.of_choice >= 0, indices.long().clamp(0, experts - 1)
        if by_weights is not None:
            by_weights += (gradient @ e.down_bias.T).gather(1, chosen).where(kept, 0.0)
        if needs.down_bias:
            shares = gradient.new_zeros(len(x), experts)
            by_down_bias = shares.scatter_add_(1, chosen, weights.where(kept, 0.0).to(shares.dtype)).T @ gradient
    by_bias = None if by_bias is None else by_bias.to(x.dtype)
    return Gradients(by_x, by_weights, by_up, by_down, by_bias, by_down_bias)


def _of_x_and_up(
    x: Tensor, by_hidden: Tensor, rows: Rows, up: Sequence[Tensor], needs: Needs, sums: Sequence[Tensor], summed: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of up, from that of the up projection's product.

    A product for up that reads rows of x by number leaves bandwidth of the memory: the rows of x's gradient are summed
    beside it, on a second stream.
    """
    experts, wide, columns = shape_of(up)

    def of_up(margin: int = 0) -> Tensor | None:
        if not needs.up:
            return None
        of_x, index = rows.read(x, wide)
        tensors = {"offsets": rows.offsets, "a": by_hidden.T, "b": of_x, "b_index": index}
        return _of_weights(tensors, up, sums, margin)

    if not needs.x:
        return None, of_up()
    made = x.new_empty(rows.count, columns)
    tensors, options = operand(up, True)
    tensors |= {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device), "a": by_hidden, "d": made}
    execute("grouped_gemm", tensors, **options)
    if not summed:
        return made, of_up()
    if not (x.is_cuda and needs.up and made.numel() >= BESIDE and rows.by_number(x, wide)):
        by_x = combine(made, rows.of_choice)
        del made, tensors  # before rows of x are copied
        return by_x, of_up()
    by_x, main, second = torch.empty_like(x), torch.cuda.current_stream(x.device), _second_stream(x.device)
    second.wait_stream(main)
    by_up = of_up(MARGIN)
    with torch.cuda.stream(second):
        sum_into(by_x, made, rows.of_choice, None)
    main.wait_stream(second)
    return by_x, by_up


@functools.cache
def _second_stream(device: Any) -> Any:
    return torch.cuda.Stream(device)


def _narrow_rows(rows: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """Tensors of a product with rows in e4m3."""
    return {"a": rows, "sfa": factors.unsqueeze(2)}


def _narrow(weights: Sequence[Tensor], keeps: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of a product with weights in e4m3, in a pass that ``keeps`` what its gradients need."""
    narrow, factors = quantized_weights(weights, keeps)
    return {"b": narrow.permute(1, 2, 0), "sfb": factors.permute(1, 2, 0)}, {"sf_vec_size": 128}


def _vectors(bias: Tensor | None) -> Tensor | None:
    """Biases (E, n) as the grouped GEMMs take them."""
    return None if bias is None else bias.T


def _of_weights(
    tensors: dict[str, Any], like: Sequence[Tensor], sums: Sequence[Tensor], margin: int = 0
) -> Tensor | None:
    """The product of two operands over the rows of each expert, or None where it is added to ``sums``."""
    if not sums:
        found = like[0].new_empty(shape_of(like))
        execute("grouped_gemm_wgrad", {**tensors, "wgrad": found}, margin)
        return found
    options: dict[str, Any] = {}
    if is_list(sums):
        experts, m, n = shape_of(sums)
        tensors["wgrad_ptrs"] = pointers(sums)
        options = {"num_experts": experts, "wgrad_shape": (m, n), "wgrad_dtype": sums[0].dtype}
    else:
        (tensors["wgrad"],) = sums
    execute("grouped_gemm_wgrad", tensors, margin, accumulate_on_output=True, **options)
    return None
