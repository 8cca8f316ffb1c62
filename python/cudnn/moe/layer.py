"""The kernels of a layer of experts in order, forward and backward.

No tensor of T K rows of the input outlives a pass, and the backward pass needs none: the gradient of a router's weight
is taken where the activation's is, from the intermediate width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cudnn.lazy import torch
from cudnn.moe.combining import sum_into, sum_rows, values_of_choices, values_of_rows
from cudnn.moe.experts import (
    COPIED,
    COPIED_UP,
    GATED,
    WIDE,
    Experts,
    Products,
    Rows,
    is_list,
    matrix,
    ones,
    operand,
    pointers,
    shape_of,
    transposed,
)
from cudnn.moe.quantizing import quantized, quantized_weights, quantizes_results, results
from cudnn.runtime.streams import forked

if TYPE_CHECKING:
    from torch import Tensor

BESIDE = 2**26  # elements of the rows of tokens' gradients from which on they are summed beside a product
MARGIN = 3  # clusters of two CTAs that it leaves to them


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


class RouterBackward(Protocol):
    """The backward pass of a router, between the two halves of :func:`backward`."""

    def of_weights(self, by_weights: Tensor) -> tuple[Tensor, Tensor] | None:
        """Takes the gradient of the router's weights (T, K). What :func:`by_product` is to add to x's gradient, if it
        can.
        """
        ...

    def add_to(self, by_x: Tensor) -> None:
        """Adds the router's part to x's gradient, where :func:`by_product` could not."""
        ...


def forward(
    kind: Products, x: Tensor, weights: Tensor, rows: Rows, e: Experts, keeps: bool, summed: bool = True
) -> tuple[Tensor, Tensor]:
    """The result (T, H) and, where it ``keeps`` it, the product of the up projection (T K, N), else no elements.

    ``kind``: what :func:`cudnn.moe.experts.products` finds for x and the experts. Not ``summed``, the result is that of
    each row, (T K, H), without weights.
    """
    (experts, wide, _), (_, columns, inner), count = shape_of(e.up), shape_of(e.down), rows.count
    gated = e.activation in GATED
    hidden = x.new_empty(count, wide) if keeps or not gated else None
    saved = None if hidden is None else matrix(hidden)
    narrow = e.fp8 and quantizes_results(x)
    activated, factors = results(x, count, inner) if narrow else (x.new_empty(count, inner), None)
    given: dict[str, Any] = {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device)}
    up, down = (_narrow(w, keeps) if e.fp8 else operand(w) for w in (e.up, e.down))
    tensors = {**given, **up[0], "bias": _vectors(e.up_bias), "c": saved, "d": matrix(activated)}
    if e.fp8:
        by_number = rows.by_number(x)
        tensors["a_index"] = rows.token if by_number else None
        tensors |= _narrow_rows(*(quantized(x) if by_number else quantized(x, rows.of_choice, count)))
        tensors["sfd_row"] = None if factors is None else factors.unsqueeze(2)
    else:
        of_tokens, tensors["a_index"] = rows.read(x)
        tensors["a"] = matrix(of_tokens)
        del of_tokens
    if not gated:
        tensors["prob"] = weights.new_ones(count)
    place = ("up", keeps, tensors.get("a_index") is None, factors is None)
    kind.run(place, "grouped_gemm_glu" if gated else "grouped_gemm_srelu", tensors, up[1], kind.up)
    del tensors  # and the tokens' copies, whose memory the result of the next product takes
    made = x.new_empty(count, columns)
    tensors = {**given, **down[0], "a": matrix(activated), "bias": _vectors(e.down_bias), "d": matrix(made)}
    if e.fp8:
        tensors |= _narrow_rows(*(quantized(activated) if factors is None else (activated, factors)))
    kind.run("down", "grouped_gemm_quant" if e.fp8 else "grouped_gemm", tensors, down[1])
    del tensors, activated, factors  # whose memory the sums take
    y = sum_rows(made, rows.of_choice, weights) if summed else made
    return y, hidden if keeps and hidden is not None else x.new_empty(0)


def backward(
    kind: Products,
    gradient: Tensor,
    x: Tensor,
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    rows: Rows,
    e: Experts,
    needed: Sequence[bool],
    sums: tuple[Sequence[Tensor], Sequence[Tensor]],
    summed: bool = True,
    router: RouterBackward | None = None,
) -> Gradients:
    """The gradients that are ``needed``, in the order of :class:`Needs`: of operators, of ranks and of the module.

    ``sums``: what those of up and down are added to instead, float32; empty: nothing. Not ``summed``, that of x
    is that of each row. ``router``: its part of x's gradient is added.
    """
    needs, added = Needs(*needed), None
    found, by_hidden = by_activation(kind, gradient, x, hidden, indices, weights, rows, e, needs, sums[1])
    if router is not None and found.weights is not None:
        added = router.of_weights(found.weights)
    by_x, by_up = by_product(kind, x, by_hidden, rows, e.up, needs, sums[0], summed, added)
    if router is not None and found.weights is not None and by_x is not None and added is None:
        router.add_to(by_x)
    return found._replace(x=by_x, up=by_up)


def by_activation(
    kind: Products,
    gradient: Tensor,
    x: Tensor,
    hidden: Tensor,
    indices: Tensor,
    weights: Tensor,
    rows: Rows,
    e: Experts,
    needs: Needs,
    sums: Sequence[Tensor],
) -> tuple[Gradients, Tensor]:
    """The first half of :func:`backward`: all gradients but those of x and up, and that of the up projection's product.

    ``sums``: those of down.
    """
    (experts, _, inner), count = shape_of(e.down), rows.count
    by_hidden, activated = torch.empty_like(hidden), hidden.new_empty(count, inner)
    of_rows, index = rows.read(gradient, 2 * inner >= COPIED)
    weight_of_row, by_row = values_of_rows(weights, rows.of_choice, count)
    stored = x.dtype if x.dtype in WIDE else torch.bfloat16
    by_bias = hidden.new_empty(experts, hidden.shape[1], dtype=stored) if needs.up_bias else None
    gated, activation = e.activation in GATED, matrix(activated)
    tensors, options = operand(e.down, True)
    tensors |= {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device), "a": matrix(of_rows)}
    tensors |= {"a_index": index, "c": matrix(hidden), "prob": weight_of_row, "dprob": by_row}
    tensors |= {"d_row": matrix(by_hidden), "dbias": by_bias, "activation" if gated else "d_srelu": activation}
    place = ("hidden", needs.up_bias, index is None)
    kind.run(place, "grouped_gemm_dglu" if gated else "grouped_gemm_dsrelu", tensors, options, kind.by_hidden)
    by_down = None
    if needs.down:
        tensors = {"offsets": rows.offsets, "a": transposed(of_rows), "a_index": index, "b": transposed(activated)}
        by_down = _of_weights(kind, "down", tensors, e.down, sums)
    by_weights = values_of_choices(by_row, rows.of_choice) if needs.weights else None
    by_down_bias = None
    if e.down_bias is not None:  # what it added to a row was weighted too
        kept, chosen = rows.of_choice >= 0, indices.long().clamp(0, experts - 1)
        if by_weights is not None:
            by_weights += (gradient @ e.down_bias.T).gather(1, chosen).where(kept, 0.0)
        if needs.down_bias:
            shares = gradient.new_zeros(len(x), experts)
            by_down_bias = shares.scatter_add_(1, chosen, weights.where(kept, 0.0).to(shares.dtype)).T @ gradient
    by_bias = None if by_bias is None else by_bias.to(x.dtype)
    return Gradients(None, by_weights, None, by_down, by_bias, by_down_bias), by_hidden


def by_product(
    kind: Products,
    x: Tensor,
    by_hidden: Tensor,
    rows: Rows,
    up: Sequence[Tensor],
    needs: Needs,
    sums: Sequence[Tensor],
    summed: bool = True,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The second half of :func:`backward`: the gradients of x and up, from that of the up projection's product.

    ``added``: a number for each row (R, 1, 1), float32, and a vector for each expert (E, H), whose product the row of
    x's gradient gets besides: a router's part, where only chosen experts' logits have a gradient.

    A product for up that reads rows of x by number leaves bandwidth of the memory: the rows of x's gradient are summed
    beside it, on a second stream.
    """
    experts, wide, columns = shape_of(up)

    def of_up(margin: int = 0) -> Tensor | None:
        if not needs.up:
            return None
        of_x, index = rows.read(x, wide >= COPIED_UP)
        tensors = {"offsets": rows.offsets, "a": transposed(by_hidden), "b": transposed(of_x), "b_index": index}
        return _of_weights(kind, "up", tensors, up, sums, margin)

    if not needs.x:
        return None, of_up()
    made = x.new_empty(rows.count, columns)
    tensors, options = operand(up, True)
    tensors |= {"padded_offsets": rows.offsets, "alpha": ones(experts, x.device)}
    tensors |= {"a": matrix(by_hidden), "d": matrix(made)}
    if added is not None:
        tensors |= {"prob": added[0], "bias": _vectors(added[1])}
    kind.run(("x", added is None), "grouped_gemm", tensors, options)
    if not summed:
        return made, of_up()
    if not (x.is_cuda and needs.up and made.numel() >= BESIDE and rows.by_number(x, wide >= COPIED_UP)):
        by_x = sum_rows(made, rows.of_choice)
        del made, tensors  # before rows of x are copied
        return by_x, of_up()
    by_x = torch.empty_like(x)
    with forked(x.device) as beside:
        by_up = of_up(MARGIN)
        with beside:
            sum_into(by_x, made, rows.of_choice, None)
    return by_x, by_up


def _narrow_rows(rows: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """Tensors of a product with rows in e4m3."""
    return {"a": matrix(rows), "sfa": factors.unsqueeze(2)}


def _narrow(weights: Sequence[Tensor], keeps: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and options of a product with weights in e4m3, in a pass that ``keeps`` what its gradients need."""
    narrow, factors = quantized_weights(weights, keeps)
    return {"b": narrow.permute(1, 2, 0), "sfb": factors.permute(1, 2, 0)}, {"sf_vec_size": 128}


def _vectors(bias: Tensor | None) -> Tensor | None:
    """Biases (E, n) as the grouped GEMMs take them."""
    return None if bias is None else bias.T


def _of_weights(
    kind: Products, name: str, tensors: dict[str, Any], like: Sequence[Tensor], sums: Sequence[Tensor], margin: int = 0
) -> Tensor | None:
    """The product of two operands over the rows of each expert, or None where it is added to ``sums``."""
    found, options = None, {}
    experts, m, n = shape_of(like)
    if not sums:
        found = like[0].new_empty(experts, m, n)
        tensors["wgrad"] = found.permute(1, 2, 0)
    elif is_list(sums):
        tensors["wgrad_ptrs"] = pointers(sums)
        options = {"num_experts": experts, "wgrad_shape": (m, n), "wgrad_dtype": sums[0].dtype}
    else:
        (tensors["wgrad"],) = sums
    rows, numbered = tensors["b"].shape[1], [x for x in ("a_index", "b_index") if tensors.get(x) is not None]
    # Rows of an expert, on average, as a power of two: other sizes have other tiles.
    place = (name, *numbered, "wgrad" in tensors, bool(sums), margin, (rows // experts).bit_length())
    kind.run(place, "grouped_gemm_wgrad", tensors, options, {"accumulate_on_output": bool(sums)}, margin=margin)
    return found
