"""Expert parallelism: tokens to the ranks that have their experts, and what these made of them back.

Both ways carry a row of a token once to a rank, however many of the token's experts are there: the sum over a rank's
experts is formed before it is sent.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from cudnn.errors import refusal
from cudnn.gemm.formats import name_of
from cudnn.moe._run import run
from cudnn.moe.combining import combine, moe_combine_bwd
from cudnn_kernels.moe.configuration import MOST_CHOICES, CombineConfiguration, ReceiveConfiguration

_WHERE = "Exchange"
_RECEIVE, _SEND = "cudnn_kernels.moe.exchange:Receive", "cudnn_kernels.moe.exchange:Send"
Tensor = torch.Tensor


class Received(NamedTuple):
    """The tokens that have experts here, from all ranks: R rows.

    ``tokens`` (R, hidden); ``indices`` int32 (R, K): experts of this rank, from 0 on, and -1 for those of others;
    ``weights`` float32 (R, K); ``sent``: which of this rank's tokens went where. A row all of whose indices are -1 was
    not received; what it holds is not defined.
    """

    tokens: Tensor
    indices: Tensor
    weights: Tensor
    sent: Any


class Exchange:
    """Sends tokens to the ranks of a group that have their experts, and results back. Both have gradients.

        received = exchange.dispatch(x, routing.indices, routing.weights)
        offsets, token_of_row, row_of_choice = moe.sort(received.indices, exchange.local_experts)
        rows = ...  # what the experts here make of received.tokens, sorted by expert
        y = exchange.combine(rows, row_of_choice, received)  # weighted

    Rank r has experts r * E / ranks to (r + 1) * E / ranks - 1. All ranks call the same methods in the same order.

    Where the group's GPUs are in one host, kernels read tokens from, and write sums to, memory of PyTorch's symmetric
    memory, which all of them see; nothing waits for the host. R is then ranks * max_tokens. Elsewhere it is
    ``all_to_all_single``, whose sizes the host must know, so it waits; R is the number of rows received.

    PyTorch sets NVLink multicast up, which nothing here uses, unless the environment variable
    ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` is 1.

    Args:
        group: A process group; None: the default one. At most 16 ranks.
        experts: E, of all ranks together, a multiple of their number.
        top_k: K, 1 to 16.
        hidden: Elements of a token, a multiple of 8.
        max_tokens: Tokens that a rank may dispatch at a time. Symmetric memory has room for as many tokens, and for
            ranks * max_tokens sums on their way back.
        dtype: Of the tokens: bfloat16, float16 or float32.
        device: None: the current CUDA device, or the CPU where there is none.
        symmetric: None: with CUDA where all ranks are in one host.

    Raises:
        ValueError: an argument, or a tensor of a call, that is not allowed; more tokens than ``max_tokens``.
    """

    def __init__(
        self, group: Any, experts: int, top_k: int, hidden: int, *, max_tokens: int,
        dtype: torch.dtype = torch.bfloat16, device: Any = None, symmetric: bool | None = None,
    ) -> None:  # fmt: skip
        group = dist.group.WORLD if group is None else group
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        here = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(here if device is None else device)
        self.experts, self.top_k, self.hidden, self.dtype = experts, top_k, hidden, dtype
        self.max_tokens = max_tokens
        for what, got, is_right, allowed in (
            ("group", f"{self.ranks} ranks", self.ranks <= MOST_CHOICES, f"at most {MOST_CHOICES} ranks"),
            ("experts", experts, experts > 0 and not experts % self.ranks, f"multiples of {self.ranks} ranks"),
            ("top_k", top_k, 0 < top_k <= MOST_CHOICES, f"1 to {MOST_CHOICES}"),
            ("hidden", hidden, hidden > 0 and not hidden % 8, "multiples of 8"),
            ("max_tokens", max_tokens, max_tokens > 0, "1 or more"),
        ):
            if not is_right:
                raise ValueError(refusal(_WHERE, what, got, allowed))
        self.local_experts = experts // self.ranks
        if symmetric is None:
            symmetric = self.device.type == "cuda" and self._is_one_host()
        self.way: Any = InHost(self) if symmetric else AllToAll(self)

    def _is_one_host(self) -> bool:
        hosts: list[Any] = [None] * self.ranks
        dist.all_gather_object(hosts, socket.gethostname(), self.group)
        return len(set(hosts)) == 1

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Sends each token to the ranks of its experts; a choice outside of 0 to E - 1 is dropped.

        Args:
            x: (T, hidden), T up to ``max_tokens``.
            indices: int32 (T, K), of experts of all ranks.
            weights: float32 (T, K).
        """
        self._check("x", x, self.hidden, self.dtype)
        self._check("indices", indices, self.top_k, torch.int32)
        self._check("weights", weights, self.top_k, torch.float32)
        if not len(x) == len(indices) == len(weights):
            got = f"{len(x)}, {len(indices)} and {len(weights)}"
            raise ValueError(refusal(_WHERE, "tokens of x, indices and weights", got, "the same number"))
        return Received(*_Dispatch.apply(x, weights, indices, self))

    def combine(self, rows: Tensor, row_of_choice: Tensor, received: Received) -> Tensor:
        """For each token of this rank the weighted sum of its experts' rows, of all ranks: (T, hidden).

        Sums are in float32. Each rank's is rounded to ``dtype``, and so is the sum of these, in the order of ranks.

        Args:
            rows: (rows, hidden), those of the experts here.
            row_of_choice: int32 (R, K), as :func:`cudnn.moe.sort` returns it for ``received.indices``.
            received: What :meth:`dispatch` returned.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden or rows.dtype != self.dtype:
            got = f"{rows.dtype} of the shape {tuple(rows.shape)}"
            raise ValueError(refusal(_WHERE, "rows", got, f"{self.dtype} of the shape (rows, {self.hidden})"))
        if row_of_choice.shape != received.indices.shape or row_of_choice.dtype != torch.int32:
            got = f"{row_of_choice.dtype} of the shape {tuple(row_of_choice.shape)}"
            allowed = f"torch.int32 of the shape {tuple(received.indices.shape)}"
            raise ValueError(refusal(_WHERE, "row_of_choice", got, allowed))
        return _Combine.apply(rows, received.weights, row_of_choice.contiguous(), received.sent, self)

    def _check(self, name: str, tensor: Tensor, columns: int, dtype: torch.dtype) -> None:
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype != dtype or tensor.device != self.device:
            got = f"{tensor.dtype} of the shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(refusal(_WHERE, name, got, f"{dtype} of the shape (T, {columns}) on {self.device}"))
        if len(tensor) > self.max_tokens:
            cure = "make the Exchange with a larger max_tokens"
            raise ValueError(refusal(_WHERE, f"tokens of {name}", len(tensor), f"max_tokens={self.max_tokens}", cure))

    def is_sent(self, indices: Tensor) -> Tensor:
        """Which tokens have experts on which ranks, bool (T, ranks)."""
        owner = indices.long().div(self.local_experts, rounding_mode="floor")
        owner = owner.where((owner >= 0) & (owner < self.ranks), self.ranks)
        found = torch.zeros(len(indices), self.ranks + 1, dtype=torch.bool, device=indices.device)
        return found.scatter_(1, owner, True)[:, :-1]

    def to_local(self, indices: Tensor) -> Tensor:
        """Experts of this rank from 0 on, -1 for those of others."""
        local = indices - self.rank * self.local_experts
        return local.where((local >= 0) & (local < self.local_experts), -1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, indices: Tensor, exchange: Exchange) -> tuple[Any, ...]:
        tokens, indices, weights, sent = exchange.way.dispatch(x.contiguous(), indices, weights)
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return tokens, indices, weights, sent

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor, _: Any, d_weights: Tensor, __: Any) -> tuple[Any, ...]:  # pyright: ignore
        (indices,) = ctx.saved_tensors
        itself = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
        itself = itself.where((indices >= 0).any(1), -1)[:, None].contiguous()
        count = indices.shape[1]
        padded = torch.nn.functional.pad(d_weights, (0, -count % 8))
        d_x = ctx.exchange.way.give_back(d_tokens.contiguous(), itself, None, ctx.sent)
        return d_x, ctx.exchange.way.give_back(padded, itself, None, ctx.sent)[:, :count], None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, row_of_choice: Tensor, sent: Any, exchange: Exchange
    ) -> Tensor:  # fmt: skip
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(rows, row_of_choice, weights)
        return exchange.way.give_back(rows.contiguous(), row_of_choice, weights, sent)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        sums = ctx.exchange.way.scatter(d_out.contiguous(), ctx.sent)
        d_rows, d_weights = moe_combine_bwd(sums, *ctx.saved_tensors)
        return d_rows, d_weights, None, None, None


@dataclass
class Sent:
    """Which tokens went where, for ``all_to_all_single``: tokens by rank, and how many rows go out and come in.

    ``row_of_rank`` int32 (T, ranks): the place of a token among those that went to a rank, -1 for none.
    """

    token: Tensor
    row_of_rank: Tensor
    out: list[int]
    come: list[int]


class AllToAll:
    """By ``all_to_all_single``, between any devices."""

    def __init__(self, exchange: Exchange) -> None:
        self.e = exchange

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """The fields of :class:`Received`."""
        is_sent = self.e.is_sent(indices)
        rank, token = is_sent.T.nonzero(as_tuple=True)
        row_of_rank = torch.full(is_sent.shape, -1, dtype=torch.int32, device=x.device)
        row_of_rank[token, rank] = torch.arange(len(token), dtype=torch.int32, device=x.device)
        out = is_sent.sum(0)
        come = torch.empty_like(out)
        dist.all_to_all_single(come, out, group=self.e.group)
        sent = Sent(token, row_of_rank, out.tolist(), come.tolist())
        both = self.scatter(torch.cat([indices, weights.view(torch.int32)], 1), sent)
        local, chosen = both.chunk(2, 1)
        return self.scatter(x, sent), self.e.to_local(local), chosen.contiguous().view(torch.float32), sent

    def scatter(self, values: Tensor, sent: Sent) -> Tensor:
        """The values of tokens, where they went."""
        return self._exchange(values[sent.token], sent.come, sent.out)

    def give_back(self, rows: Tensor, row_of_choice: Tensor, weights: Tensor | None, sent: Sent) -> Tensor:
        """Sums of rows, where the tokens came from, added up."""
        back = self._exchange(combine(rows, row_of_choice, weights), sent.out, sent.come)
        return combine(back, sent.row_of_rank)

    def _exchange(self, values: Tensor, come: list[int], out: list[int]) -> Tensor:
        found = values.new_empty(sum(come), values.shape[1])
        target, source = (x.view(torch.uint8) for x in (found, values.contiguous()))  # as bytes: any backend knows them
        dist.all_to_all_single(target, source, come, out, group=self.e.group)
        return found


class Shared:
    """Memory that all ranks of a group see: this rank's part, all parts, and their addresses.

    ``is_read``: since the ranks met, some may be reading it, so they must meet before it is written again.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.mine = symmetric.empty(*shape, dtype=dtype, device=exchange.device)
        self._handle = symmetric.rendezvous(self.mine, exchange.group)
        self.parts = [self._handle.get_buffer(rank, shape, dtype) for rank in range(exchange.ranks)]
        addresses = [part.data_ptr() for part in self.parts]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=exchange.device)
        self.is_read = False

    def meet(self) -> None:
        """All ranks wait for each other, on their streams."""
        self._handle.barrier()


@dataclass
class SentInHost:
    """Which tokens went where, in a host.

    ``indices``: those that this rank received. ``row_of_rank`` int32 (T, ranks): the sums for a token, -1 for none.
    """

    indices: Tensor
    row_of_rank: Tensor


class InHost:
    """By kernels on symmetric memory, between GPUs of a host."""

    def __init__(self, exchange: Exchange) -> None:
        e = self.e = exchange
        self.choices = Shared((e.max_tokens, 2 * e.top_k), torch.int32, e)
        self.tokens = Shared((e.max_tokens, e.hidden), e.dtype, e)
        self.sums = Shared((e.ranks, e.max_tokens, e.hidden), e.dtype, e)
        self.weights = Shared((e.ranks, e.max_tokens, -(-e.top_k // 8) * 8), torch.float32, e)  # their gradients

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """The fields of :class:`Received`."""
        e, count = self.e, len(x)
        self._free(self.choices, self.tokens)
        self.choices.mine[:count] = torch.cat([indices, weights.view(torch.int32)], 1)
        self.choices.mine[count:, : e.top_k] = -1
        self.tokens.mine[:count] = x
        self._meet(self.choices, self.tokens)
        local, chosen = torch.cat(self.choices.parts).chunk(2, 1)
        local, chosen = e.to_local(local).contiguous(), chosen.contiguous().view(torch.float32)
        place = torch.arange(e.ranks, device=x.device) * e.max_tokens + torch.arange(count, device=x.device)[:, None]
        sent = SentInHost(local, place.where(e.is_sent(indices), -1).int())
        return self._received(sent), local, chosen, sent

    def scatter(self, values: Tensor, sent: SentInHost) -> Tensor:
        """The values of tokens, where they went."""
        self._free(self.tokens)
        self.tokens.mine[: len(values)] = values
        self._meet(self.tokens)
        return self._received(sent)

    def give_back(self, rows: Tensor, row_of_choice: Tensor, weights: Tensor | None, sent: SentInHost) -> Tensor:
        """Sums of rows, where the tokens came from, added up."""
        e, shared = self.e, self.sums if rows.shape[1] == self.e.hidden and rows.dtype == self.e.dtype else self.weights
        self._free(shared)
        columns, is_weighted = rows.shape[1], weights is not None
        configuration = CombineConfiguration(
            name_of(rows.dtype), columns, row_of_choice.shape[1], is_weighted, sent=True
        )
        given = (rows, row_of_choice, *((weights,) if is_weighted else ()))
        if len(rows):
            run(_SEND, configuration, *given, shared.addresses, e.rank, e.max_tokens)
        self._meet(shared)
        return combine(shared.mine.view(-1, columns), sent.row_of_rank)

    def _received(self, sent: SentInHost) -> Tensor:
        e = self.e
        tokens = torch.empty(e.ranks * e.max_tokens, e.hidden, dtype=e.dtype, device=e.device)
        configuration = ReceiveConfiguration(name_of(e.dtype), e.hidden, e.top_k)
        run(_RECEIVE, configuration, self.tokens.addresses, sent.indices, tokens, e.max_tokens)
        return tokens

    def _free(self, *written: Shared) -> None:
        """Waits until nobody reads these any more."""
        if any(each.is_read for each in written):
            self._meet()

    def _meet(self, *read: Shared) -> None:
        """All ranks wait for each other; afterwards these are read."""
        self.tokens.meet()
        for each in (self.choices, self.tokens, self.sums, self.weights):
            each.is_read = each in read
