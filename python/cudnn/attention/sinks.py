"""Attention with a sink in each head: a logit that joins the softmax of every row, without a value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn.attention.graphs import sdpa, sdpa_bwd
from cudnn.errors import make_error

_WHERE = "scaled_dot_product_attention"


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    """Refuses sinks of another shape or device, and such as are no floating-point numbers."""
    if sinks is None:
        return
    heads = query.shape[1] if query.ndim == 4 else None
    if sinks.shape != (heads,) or not sinks.is_floating_point() or sinks.device != query.device:
        got = f"{sinks.dtype} of the shape {tuple(sinks.shape)} on {sinks.device}"
        raise make_error(
            ValueError, _WHERE, "sinks", got, f"floating-point numbers of the shape ({heads},), {query.device}"
        )


def check(sinks: Tensor, query: Tensor, bias: Tensor | None, lengths: tuple[Any, ...]) -> None:
    """Refuses what :func:`attend_with_sinks` cannot do."""
    check_sinks(sinks, query)
    if any(x is not None for x in lengths):
        raise make_error(ValueError, _WHERE, "sinks", "lengths with them", "none", "put the lengths into a mask")
    if bias is not None and bias.requires_grad:
        raise make_error(ValueError, _WHERE, "sinks", "a mask with a gradient", "a mask without one", "detach the mask")


class Attend(torch.autograd.Function):
    """Attention times ``sigmoid(lse - sink)``, the keys' share of a row's softmax (the sink has the rest).

    Attention backward subtracts delta = rowsum(dO * O) from each weight's gradient. With
    the result as the sink leaves it, and the gradient times the share, it is the gradient with a sink.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        sinks: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: tuple[Any, ...],
        bias: Tensor | None,
        dropout_p: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        arguments: tuple[Any, ...] = (q, k, v, *options, *[None] * 4, bias, dropout_p, seed)
        o, lse = sdpa(*arguments)
        return (o * _share(lse, sinks)).to(q.dtype), lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.options, bias, ctx.dropout_p, seed = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output, bias, seed)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (d_o, _), (sinks, q, k, v, o, lse, bias, seed) = gradients, ctx.saved_tensors
        keys_share = _share(lse, sinks)
        delta = (d_o.to(keys_share.dtype) * o).sum(-1, keepdim=True)
        d_sinks = ((keys_share - 1) * delta).sum((0, 2, 3)).to(sinks.dtype)
        deterministic = torch.are_deterministic_algorithms_enabled()
        first: tuple[Any, ...] = ((d_o * keys_share).to(q.dtype), q, k, v, o, lse, *ctx.options, *[None] * 4)
        last: tuple[Any, ...] = (deterministic, bias, ctx.dropout_p, seed)
        return d_sinks, *sdpa_bwd(*first, *last), None, None, None, None


def _share(lse: Tensor, sinks: Tensor) -> Tensor:
    return torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1, 1))


def attend_with_sinks(
    sinks: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    is_causal: bool,
    alignment: int,
    left: int,
    right: int,
    *lengths: Any,
    bias: Tensor | None,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor]:
    """The result of attention, in place of the operator's that has no sinks."""
    check(sinks, q, bias, lengths)
    return Attend.apply(sinks, q, k, v, (scale, is_causal, alignment, left, right), bias, dropout_p, seed)[:1]
