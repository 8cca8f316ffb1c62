"""A layer whose experts are on several ranks: tokens travel to the ranks of their experts, once to each, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from cudnn.errors import refused
from cudnn.moe import layer
from cudnn.moe.exchange import Exchange, Sent, agree, size_of
from cudnn.moe.experts import Experts, Rows, is_list, products, shape_of
from cudnn.moe.routing import sort
from cudnn.runtime.registration import once

_WHERE = "moe_mlp"

Sizes = tuple[int, int, int, torch.dtype]
"""Experts of all ranks, those of a token, hidden size and type."""


@dataclass
class Known:
    """Layers that all ranks of a group have called; exchanges made for them, by sizes, device and time limit.

    Layers share the last one. Those before it had too little room, and stay: a CUDA graph may have their addresses.
    """

    layers: set[Any] = field(default_factory=set)
    exchanges: dict[Any, list[Exchange]] = field(default_factory=dict)


_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
"""By process group, as long as it is there."""


def _known(group: Any) -> Any:
    """What a group knows; an exchange knows its layers itself."""
    if isinstance(group, Exchange):
        return group
    found = _KNOWN.get(group)
    if found is None:
        for other in [each for each in _KNOWN if each not in distributed_c10d._world.pg_map]:
            del _KNOWN[other]  # destroyed, though functions of PyTorch may have it as an argument's default
        found = _KNOWN[group] = Known()
    return found


def ranks_of(where: str, group: Any) -> int:
    """How many ranks share the experts of a layer whose ``group`` this is: a process group or an exchange.

    Raises:
        TypeError: it is neither.
    """
    return group.ranks if isinstance(group, Exchange) else size_of(where, group)


def agreed(where: str, group: Any, words: str, sizes: Sizes, x: Tensor, time_limit: float) -> None:
    """Waits until all ranks have come with the same words, and sees to it that an exchange has room for their tokens.

    Raises:
        ValueError: the ranks' layers differ, or an exchange that was given is of other sizes or on another device.
        RuntimeError: a rank did not come within the limit.
    """
    if isinstance(group, Exchange):
        its, wanted = (group.experts, group.top_k, group.hidden, group.dtype, group.device), (*sizes, x.device)
        if its != wanted:
            allowed = f"one of {wanted}, as the layer has: experts, top_k, hidden size, type, device"
            raise refused(ValueError, where, "group, an Exchange", its, allowed)
        agree(group.group, words, 0, group.time_limit, where)
        return
    most = max(1, *agree(group, words, len(x), time_limit, where))
    made = _known(group).exchanges.setdefault((sizes, x.device, time_limit), [])
    if not made or (made[-1].max_tokens < most and made[-1].way.reuses):
        given: dict[str, Any] = {"max_tokens": most, "dtype": sizes[3], "device": x.device, "time_limit": time_limit}
        made.append(Exchange(group, *sizes[:3], **given))


def exchange_of(group: Any, words: str, sizes: Sizes, x: Tensor, time_limit: float) -> Exchange:
    """The exchange of a layer over a group, on which its ranks agree at the first call: see :func:`agreed`."""
    known = _known(group)
    if (words, x.device, time_limit) not in known.layers:
        agreed(_WHERE, group, words, sizes, x, time_limit)
        known.layers.add((words, x.device, time_limit))
    return known if isinstance(known, Exchange) else known.exchanges[sizes, x.device, time_limit][-1]


@dataclass(frozen=True)
class Kind:
    """What of a rank's experts is no tensor with a gradient."""

    lists: int  # tensors of up, and of down
    sums: tuple[list[Tensor], list[Tensor]]
    activation: str
    numbers: list[float]
    glu_layout: str
    fp8: bool
    keeps: bool  # what the backward pass needs

    def experts(self, up_bias: Tensor | None, down_bias: Tensor | None, matrices: Any) -> Experts:
        """Those of this rank."""
        up, down = list(matrices[: self.lists]), list(matrices[self.lists :])
        return Experts(up, down, up_bias, down_bias, self.activation, self.numbers, self.glu_layout, self.fp8)


def on_ranks(
    x: Tensor, indices: Tensor, weights: Tensor, e: Experts, sums: tuple[list[Tensor], list[Tensor]], exchange: Exchange
) -> Tensor:
    """The sum over the ranks of what their experts, of which ``e`` are this rank's, make of the tokens (T, H)."""
    tensors = (x, weights, *e.up, *e.down, e.up_bias, e.down_bias)
    keeps = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    kind = Kind(len(e.up), sums, e.activation, list(e.numbers), e.glu_layout, e.fp8, keeps)
    return _OverRanks.apply(x, weights, indices, exchange, kind, e.up_bias, e.down_bias, *e.up, *e.down)


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weights: Tensor,
        indices: Tensor,
        exchange: Exchange,
        kind: Kind,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        *matrices: Tensor,
    ) -> Tensor:
        way, e = exchange.way, kind.experts(up_bias, down_bias, matrices)
        tokens, local, weights, sent = way.dispatch(x.contiguous(), indices, weights)
        rows = sorted_rows(local, exchange, sent)
        made, hidden = x.new_empty(0, x.shape[1]), x.new_empty(0)
        if rows.count:
            made, hidden = layer.forward(products(x, e), tokens, weights, rows, e, kind.keeps, summed=False)
        if kind.keeps:
            tokens = tokens.clone() if way.reuses else tokens
            ctx.save_for_backward(
                tokens, hidden, local, weights, rows.offsets, rows.token, rows.of_choice, up_bias, down_bias, *matrices
            )
            ctx.exchange, ctx.kind, ctx.sent = exchange, kind, sent
        return way.give_back(made, rows.of_choice, weights, sent)[0]

    @staticmethod
    @once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tokens, hidden, local, weights, offsets, token, of_choice, up_bias, down_bias, *matrices = ctx.saved_tensors
        way, kind, sent = ctx.exchange.way, ctx.kind, ctx.sent
        e, rows = kind.experts(up_bias, down_bias, matrices), Rows(offsets, token, of_choice)
        gradient = way.scatter(gradients[0].contiguous(), sent)
        if down_bias is not None:  # its gradient is a product with all rows, also those that nobody wrote
            gradient = gradient.where((local >= 0).any(1, keepdim=True), 0.0)
        by_matrices = ctx.needs_input_grad[7:]
        needs_up, needs_down = any(by_matrices[: kind.lists]), any(by_matrices[kind.lists :])
        needed = (True, True, needs_up, needs_down, *ctx.needs_input_grad[5:7])
        if rows.count:
            given = (gradient, tokens, hidden, local, weights, rows, e, needed, kind.sums)
            found = layer.backward(products(tokens, e), *given, summed=False)
        else:
            found = _none(tokens, weights, e, needed, kind.sums)
        by_x, by_weights = way.give_back(found.x, of_choice, None, sent, found.weights)
        by_up, by_down = (of_each(y, w) for y, w in ((found.up, e.up), (found.down, e.down)))
        return by_x, by_weights, None, None, None, found.up_bias, found.down_bias, *by_up, *by_down


def sorted_rows(local: Tensor, exchange: Exchange, sent: Sent) -> Rows:
    """The choices of experts here, sorted; no more than there is memory for."""
    offsets, token, of_choice = sort(local.contiguous(), exchange.local_experts)
    if sent.max_rows < token.numel() and exchange.way.reuses:
        words = f"Exchange: max_rows={sent.max_rows} is less than the choices of experts here"
        torch.ops.aten._assert_async.msg(offsets[-1] <= sent.max_rows, words)
        offsets = offsets.clamp(max=sent.max_rows)  # no kernel writes elsewhere before the program ends
        of_choice = of_choice.where(of_choice < sent.max_rows, -1)
    return Rows(offsets, token[: sent.max_rows], of_choice)


def _none(
    tokens: Tensor, weights: Tensor, e: Experts, needed: Any, sums: tuple[list[Tensor], list[Tensor]]
) -> layer.Gradients:
    """Where no choice is of an expert here."""
    shapes, likes = shapes_of(tokens[:0], weights, e, needed, sums), (tokens, weights, *[tokens] * 4)
    return layer.Gradients(*(None if s is None else x.new_zeros(s) for s, x in zip(shapes, likes, strict=True)))


def shapes_of(x: Tensor, weights: Tensor, e: Experts, needed: Sequence[bool], sums: Sequence[Any]) -> list[Any]:
    """The shapes of gradients of x, weights, up, down and the biases: None of those that are not ``needed``, and of up
    and down where they are added to ``sums``.
    """
    up, down = shape_of(e.up), shape_of(e.down)
    wanted = [*needed[:2], *(need and not s for need, s in zip(needed[2:4], sums, strict=True)), *needed[4:]]
    shapes = [x.shape, weights.shape, up, down, up[:2], down[:2]]
    return [shape if want else None for shape, want in zip(shapes, wanted, strict=True)]


def of_each(gradient: Tensor | None, like: Any) -> list[Tensor | None]:
    """The gradients of a list of weights."""
    if gradient is None:
        return [None] * len(like)
    return list(gradient.unbind(0)) if is_list(like) else [gradient]
