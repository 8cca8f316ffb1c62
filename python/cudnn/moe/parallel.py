"""Expert parallelism: tokens travel to the ranks that have their experts, once to each, and results back."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cudnn.errors import refusal
from cudnn.moe.combining import combine
from cudnn.moe.routing import Routing, sort

_WHERE = "moe_mlp"


@dataclass(frozen=True)
class Ranks:
    """A group, and how many experts each of its ranks has; ``limit``: seconds to wait for the others."""

    group: Any
    local: int
    limit: float

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self.group)

    @property
    def experts(self) -> int:
        """Those of all ranks."""
        return self.size * self.local


def on_ranks(x: Tensor, routing: Routing, ranks: Ranks, layer: str, run: Callable[[Tensor, Routing], Tensor]) -> Tensor:
    """The sum over the ranks of what their experts, ``run``, make of the tokens (T, H).

    ``layer`` says what has to be the same on all ranks.

    Raises:
        ValueError: the ranks' layers differ.
        RuntimeError: a rank did not come within the limit.
    """
    of_choice = routing.indices.div(ranks.local, rounding_mode="floor")
    again = (of_choice[:, :, None] == of_choice[:, None, :]).tril(-1).any(2)  # a token travels once to a rank
    offsets, token, copy_of_choice = sort(of_choice.masked_fill(again, -1).int(), ranks.size)
    ends, choices = torch.stack([offsets, routing.offsets[ranks.local - 1 :: ranks.local]]).tolist()
    token = token[: ends[-1]]
    sent, rows_sent = ([b - a for a, b in zip([0, *each], each, strict=False)] for each in (ends, choices))
    received, rows = _sizes(sent, rows_sent, ranks, layer, x.device)
    there, back = (sent, received, ranks.group), (received, sent, ranks.group)

    first = torch.tensor(sent, device=x.device)
    first = torch.arange(ranks.size, device=x.device).repeat_interleave(first, output_size=len(token)) * ranks.local
    indices = routing.indices[token] - first[:, None]
    indices = indices.where((indices >= 0) & (indices < ranks.local), -1).int()
    indices = _AllToAll.apply(indices, *there)
    weights = _AllToAll.apply(routing.weights[token], *there)
    tokens = _AllToAll.apply(_Copies.apply(x, token, copy_of_choice), *there)
    ends_here, token_of_row, row_of_choice = sort(indices, ranks.local)
    y = run(tokens, Routing(indices, weights, ends_here, token_of_row[: sum(rows)], row_of_choice))
    return combine(_AllToAll.apply(y, *back), copy_of_choice)


def _sizes(
    sent: Sequence[int], rows: Sequence[int], ranks: Ranks, layer: str, device: Any
) -> tuple[list[int], list[int]]:
    """How many tokens, and rows of experts, come from each rank."""
    mark = zlib.crc32(layer.encode())
    mine = torch.tensor([[tokens, count, mark] for tokens, count in zip(sent, rows, strict=True)], device=device)
    theirs = torch.empty_like(mine)
    try:
        work: Any = dist.all_to_all_single(theirs, mine, group=ranks.group, async_op=True)
        work.wait(timedelta(seconds=ranks.limit))
    except RuntimeError as error:
        got = f"no answer of all ranks within {ranks.limit:g} s"
        raise RuntimeError(refusal(_WHERE, "group", got, "every rank calls the layer")) from error
    tokens, counts, marks = theirs.T.tolist()
    others = [rank for rank, other in enumerate(marks) if other != mark]
    if others:
        got = f"another one on the ranks {', '.join(map(str, others))} than here: {layer}"
        raise ValueError(refusal(_WHERE, "layer", got, "the same sizes, type and activation on all ranks"))
    return tokens, counts


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        made, x = x.new_empty(sum(received), *x.shape[1:]), x.contiguous()
        dist.all_to_all_single(made.view(torch.uint8), x.view(torch.uint8), received, sent, group=group)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _AllToAll.apply(gradients[0], *ctx.way), None, None, None


class _Copies(torch.autograd.Function):
    """Rows of tokens, as many as they travel to ranks; gradients are summed as results are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, copy_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(copy_of_choice)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return combine(gradients[0].contiguous(), *ctx.saved_tensors), None, None
