"""Expert parallelism: tokens to the ranks that have their experts, and what these made of them back.

Both ways carry a row of a token once to a rank, however many of the token's experts are there: the sum over a rank's
experts is formed before it is sent.
"""

from __future__ import annotations

import ctypes
import socket
import time
import zlib
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist

from cudnn.errors import checked_number, refused
from cudnn.gemm.formats import name_of
from cudnn.moe.combining import combine, moe_combine_bwd
from cudnn.runtime.memory import placed
from cudnn.runtime.run import run
from cudnn_kernels.moe.configuration import (
    MOST_CHOICES,
    CombineExchangeConfiguration,
    DispatchConfiguration,
)

_WHERE = "Exchange"
_DISPATCH, _GIVE_BACK = (f"cudnn_kernels.moe.exchange:{name}" for name in ("Dispatch", "CombineExchange"))
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
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

    :func:`cudnn.ops.moe_mlp` and :class:`cudnn.nn.MoE` take one as their group. For experts of another kind:

        received = exchange.dispatch(x, routing.indices, routing.weights)
        offsets, token_of_row, row_of_choice = moe.sort(received.indices, exchange.local_experts)
        rows = ...  # what the experts here make of received.tokens, sorted by expert
        y = exchange.combine(rows, row_of_choice, received)  # weighted

    Rank r has experts r * E / ranks to (r + 1) * E / ranks - 1. All ranks call the same methods in the same order.

    Where the group's GPUs are in one host, kernels write tokens and sums to PyTorch's symmetric memory, which all of
    them see; nothing waits for the host. R is then ranks * max_tokens. Elsewhere it is ``all_to_all_single``, whose
    sizes the host must know, so it waits; R is the number of rows received.

    PyTorch sets NVLink multicast up, which nothing here uses, unless the environment variable
    ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` is 1.

    Args:
        group: A process group; None: the default one. At most 16 ranks.
        experts: E, of all ranks together, a multiple of their number.
        top_k: K, 1 to 16.
        hidden: Elements of a token, a multiple of 8.
        max_tokens: Tokens that a rank may dispatch at a time in symmetric memory, which has room for ranks * max_tokens
            of them and as many sums on their way back; the same on all ranks. Without such memory there is no limit.
        max_rows: Choices of experts of one rank, of all tokens, that a layer has memory for between its products, where
            it does not wait for the host. None: as many as can come, ranks * max_tokens * top_k where a rank has so
            many experts. More of them than ``max_rows`` end the program, with an assertion on the device.
        dtype: Of the tokens: bfloat16, float16 or float32, with ``all_to_all_single`` on the CPU also float64, in which
            weights and sums are then.
        device: None: the current CUDA device, or the CPU where there is none.
        symmetric: None: with CUDA where all ranks are in one host.
        time_limit: Seconds to wait for the other ranks. After that a kernel that waits in symmetric memory stops the
            program with an error of CUDA, "unspecified launch failure".

    Raises:
        ValueError: an argument, or a tensor of a call, that is not allowed; more tokens than ``max_tokens``; ranks
            whose arguments differ.
        TypeError: a group that is none.
        RuntimeError: a rank did not come within the time limit.
    """

    def __init__(
        self,
        group: Any,
        experts: int,
        top_k: int,
        hidden: int,
        *,
        max_tokens: int,
        max_rows: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: Any = None,
        symmetric: bool | None = None,
        time_limit: float = 600.0,
    ) -> None:
        group = dist.group.WORLD if group is None else group
        self.ranks = size_of(_WHERE, group)
        self._group, self.rank = ref(group), dist.get_rank(group)
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.experts, self.top_k, self.hidden, self.dtype = experts, top_k, hidden, dtype
        types = _TYPES if symmetric or self.device.type != "cpu" else (*_TYPES, torch.float64)
        self.max_tokens, self.time_limit = max_tokens, checked_number(_WHERE, "time_limit", time_limit)
        for what, got, is_right, allowed in (
            ("group", f"{self.ranks} ranks", self.ranks <= MOST_CHOICES, f"at most {MOST_CHOICES} ranks"),
            ("experts", experts, experts > 0 and not experts % self.ranks, f"multiples of {self.ranks} ranks"),
            ("top_k", top_k, 0 < top_k <= MOST_CHOICES, f"1 to {MOST_CHOICES}"),
            ("hidden", hidden, hidden > 0 and not hidden % 8, "multiples of 8"),
            ("dtype", dtype, dtype in types, ", ".join(map(str, types))),
            ("max_tokens", max_tokens, max_tokens > 0, "1 or more"),
            ("max_rows", max_rows, max_rows is None or max_rows > 0, "1 or more, or None"),
        ):
            if not is_right:
                raise refused(ValueError, _WHERE, what, got, allowed)
        self.layers: set[Any] = set()  # those that all ranks have called
        self.milliseconds = min(max(1, int(1000 * time_limit)), 2**31 - 1)
        self.local_experts = experts // self.ranks
        self.max_rows = self.ranks * max_tokens * min(top_k, self.local_experts)
        self.max_rows = self.max_rows if max_rows is None else min(max_rows, self.max_rows)
        words = said(
            experts=experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype, symmetric=symmetric
        )
        hosts = agree(group, words, zlib.crc32(_host().encode()), time_limit, _WHERE)
        if symmetric is None:
            symmetric = self.device.type == "cuda" and len(set(hosts)) == 1
        self.way: Any = InHost(self) if symmetric else AllToAll(self)

    @property
    def group(self) -> Any:
        """The process group, which does not live longer for this."""
        group = self._group()
        if group is None:
            raise refused(RuntimeError, _WHERE, "group", "one that was destroyed", "a process group that is in use")
        return group

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Sends each token to the ranks of its experts; a choice outside of 0 to E - 1 is dropped.

        Args:
            x: (T, hidden), T up to ``max_tokens``.
            indices: int32 (T, K), of experts of all ranks.
            weights: float32 (T, K), or float64 beside tokens of float64.
        """
        self._check("x", x, self.hidden, self.dtype)
        self._check("indices", indices, self.top_k, torch.int32)
        self._check("weights", weights, self.top_k, self.dtype if self.dtype is torch.float64 else torch.float32)
        if not len(x) == len(indices) == len(weights):
            got = f"{len(x)}, {len(indices)} and {len(weights)}"
            raise refused(ValueError, _WHERE, "tokens of x, indices and weights", got, "the same number")
        return Received(*_Dispatch.apply(x, weights, indices, self))

    def combine(self, rows: Tensor, row_of_choice: Tensor, received: Received) -> Tensor:
        """For each token of this rank the weighted sum of its experts' rows, of all ranks: (T, hidden).

        Sums are in float32. Each rank's is rounded to ``dtype``, and so is the sum of these, in a fixed order.

        Args:
            rows: (rows, hidden), those of the experts here.
            row_of_choice: int32 (R, K), as :func:`cudnn.moe.sort` returns it for ``received.indices``.
            received: What :meth:`dispatch` returned.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden or rows.dtype != self.dtype:
            got = f"{rows.dtype} of the shape {tuple(rows.shape)}"
            raise refused(ValueError, _WHERE, "rows", got, f"{self.dtype} of the shape (rows, {self.hidden})")
        if row_of_choice.shape != received.indices.shape or row_of_choice.dtype != torch.int32:
            got = f"{row_of_choice.dtype} of the shape {tuple(row_of_choice.shape)}"
            allowed = f"torch.int32 of the shape {tuple(received.indices.shape)}"
            raise refused(ValueError, _WHERE, "row_of_choice", got, allowed)
        return _Combine.apply(rows, received.weights, row_of_choice.contiguous(), received.sent, self)

    def _check(self, name: str, tensor: Tensor, columns: int, dtype: torch.dtype) -> None:
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype != dtype or tensor.device != self.device:
            got = f"{tensor.dtype} of the shape {tuple(tensor.shape)} on {tensor.device}"
            raise refused(ValueError, _WHERE, name, got, f"{dtype} of the shape (T, {columns}) on {self.device}")

    def is_sent(self, indices: Tensor) -> Tensor:
        """Which tokens have experts on which ranks, bool (T, ranks)."""
        owner = indices.long().div(self.local_experts, rounding_mode="floor")
        owner = owner.where((owner >= 0) & (owner < self.ranks), self.ranks)
        found = torch.zeros(len(indices), self.ranks + 1, dtype=torch.bool, device=indices.device)
        return found.scatter_(1, owner, True)[:, :-1]

    def values_of(self, back: Tensor, sent: Sent) -> Tensor:
        """Values of choices (T, K) from what came back, rows (n, K) where ``sent.row_of_rank`` says; 0 if dropped."""
        indices = sent.indices.long()
        is_one = (indices >= 0) & (indices < self.experts)
        rank = indices.where(is_one, 0).div(self.local_experts, rounding_mode="floor")
        row = sent.row_of_rank.gather(1, rank).long()
        if not len(back):
            return back.new_zeros(indices.shape)
        return back[row, torch.arange(self.top_k, dtype=torch.int64, device=row.device)].where(is_one, 0.0)


def size_of(where: str, group: Any) -> int:
    """How many ranks a process group has.

    Raises:
        TypeError: it is none, or this rank does not belong to it.
    """
    if not isinstance(group, dist.ProcessGroup):
        got = "no initialised torch.distributed" if group is None else repr(group)
        allowed = "a process group of torch.distributed that this rank belongs to, or a cudnn.moe.Exchange"
        raise refused(TypeError, where, "group", got, allowed)
    return dist.get_world_size(group)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, indices: Tensor, exchange: Exchange) -> tuple[Any, ...]:
        tokens, indices, weights, sent = exchange.way.dispatch(x.contiguous(), indices, weights)
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return tokens.clone() if exchange.way.reuses else tokens, indices, weights, sent

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor, _: Any, d_weights: Tensor, __: Any) -> tuple[Any, ...]:  # pyright: ignore
        (indices,) = ctx.saved_tensors
        itself = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
        itself = itself.where((indices >= 0).any(1), -1)[:, None].contiguous()
        values = d_weights.masked_fill(indices < 0, 0.0).contiguous()
        return *ctx.exchange.way.give_back(d_tokens.contiguous(), itself, None, ctx.sent, values), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weights: Tensor, row_of_choice: Tensor, sent: Any, exchange: Exchange
    ) -> Tensor:
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(rows, row_of_choice, weights)
        return exchange.way.give_back(rows.contiguous(), row_of_choice, weights, sent)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        sums = ctx.exchange.way.scatter(d_out.contiguous(), ctx.sent)
        d_rows, d_weights = moe_combine_bwd(sums, *ctx.saved_tensors)
        return d_rows, d_weights, None, None, None


@dataclass
class Sent:
    """Which tokens went where.

    ``indices`` (T, K): their experts. ``row_of_rank`` int32 (T, ranks): where what a rank gives back of a token is
    found, -1 for none. ``max_rows``: choices of experts here, at most. With ``all_to_all_single`` also the tokens by
    rank, and how many go out and come in.
    """

    indices: Tensor
    row_of_rank: Tensor
    max_rows: int
    token: Tensor | None = None
    out: list[int] = field(default_factory=list)
    come: list[int] = field(default_factory=list)


def _host() -> str:
    """What the processes of one host have in common, also where hosts have the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


_TOLD: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The number of each group's last meeting over its store."""

_GONE = 1000
"""What a rank that gives up waiting adds to a meeting's count of ranks: more than there are."""


def said(**arguments: Any) -> str:
    """Arguments in the words in which ranks compare them."""
    return "; ".join(f"{name}={value}" for name, value in arguments.items())


def agree(group: Any, words: str, number: int, time_limit: float, where: str) -> list[int]:
    """The ranks' numbers, once all have come with the same words, which are of :func:`said`.

    If a rank gives up waiting, so do all that wait with it. A rank that comes later waits for their next call.

    Raises:
        ValueError: the ranks' words differ, or a limit that is not above 0.
        RuntimeError: a rank did not come within ``time_limit`` seconds.
    """
    limit = checked_number(where, "time_limit", time_limit)
    if limit <= 0:
        raise refused(ValueError, where, "time_limit", time_limit, "seconds, above 0")
    words = f"{words}; time_limit={limit:g}"
    rank = dist.get_rank(group)
    try:
        failure, told = _heard(group, rank, f"{number} {words}", limit)
    except RuntimeError as error:  # the process that holds the store is gone
        failure, told = f"an error of its store, {error}", []
    if failure:
        raise refused(RuntimeError, where, "group", failure, "every rank calls the layer")
    for other, (_, theirs) in enumerate(told):
        if theirs != words:
            got = f"{_only(words, theirs)} on rank {rank}, {_only(theirs, words)} on rank {other}"
            raise refused(ValueError, where, "layer", got, "the same layer and time_limit on all ranks")
    return [int(theirs) for theirs, _ in told]


def _heard(group: Any, rank: int, words: str, limit: float) -> tuple[str, list[list[str]]]:
    """Why the ranks did not meet, or nothing, and then what each one has said: its number, and the other words."""
    ranks, store = dist.get_world_size(group), store_of(group)
    count, end, heard, *keys = _met(group, rank, ranks, store, words)
    try:
        store.wait([end], timedelta(seconds=limit))
    except RuntimeError:
        absent = ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))
        if store.add(count, _GONE) < ranks + _GONE:  # else all have come, or another one has given up and says so
            store.set(end, f"no answer of ranks {absent} within {limit:g} s on rank {rank}")
    failure = store.get(end).decode()
    told = [] if failure else [store.get(key).decode().split(" ", 1) for key in keys]
    _forget(store, ranks, count, end, heard, *keys)
    return failure, told


def _only(words: str, others: str) -> str:
    """The words that others lack."""
    return "; ".join(each for each in words.split("; ") if each not in others.split("; ")) or words


def _met(group: Any, rank: int, ranks: int, store: Any, words: str) -> list[str]:
    """Says words in the next meeting that nobody has left, and the end of it where this is the last rank to come.

    Returns:
        The names in the store of a meeting's count, its end, how many have heard of that, and each rank's words.
    """
    while True:
        turn = _TOLD[group] = _TOLD.get(group, 0) + 1
        keys = [f"cudnn/{turn}/{name}" for name in ("count", "end", "heard", *range(ranks))]
        store.set(keys[3 + rank], words)
        come = store.add(keys[0], 1)
        if come == ranks:
            store.set(keys[1], "")
        if come <= ranks:
            return keys
        _forget(store, ranks, *keys)


def _forget(store: Any, ranks: int, count: str, end: str, heard: str, *keys: str) -> None:
    """Deletes a meeting that all ranks have heard of: a group that is made anew over this store finds nothing."""
    if store.add(heard, 1) == ranks:
        for key in (count, end, heard, *keys):
            store.delete_key(key)


def store_of(group: Any) -> Any:
    """The store by which the processes of a group found each other."""
    return dist.distributed_c10d._get_process_group_store(group)


_LATE: WeakSet[Any] = WeakSet()
"""Groups in which a message came too late: what is sent now could meet what is left of it."""


class AllToAll:
    """By ``all_to_all_single``, between any devices."""

    reuses = False  # memory of tokens

    def __init__(self, exchange: Exchange) -> None:
        self.e = exchange

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """The fields of :class:`Received`."""
        e = self.e
        is_sent = e.is_sent(indices)
        rank, token = is_sent.T.nonzero(as_tuple=True)
        row_of_rank = torch.full(is_sent.shape, -1, dtype=torch.int32, device=x.device)
        row_of_rank[token, rank] = torch.arange(len(token), dtype=torch.int32, device=x.device)
        owners = torch.arange(e.ranks, dtype=torch.int64, device=x.device) * e.local_experts
        mine = (indices[..., None] >= owners) & (indices[..., None] < owners + e.local_experts)
        out = torch.stack([is_sent.sum(0), mine.sum((0, 1))], 1)  # tokens and choices
        come = torch.empty_like(out)
        self._send(come, out, waits=True)
        (out, _), (come, choices) = out.T.tolist(), come.T.tolist()
        sent = Sent(indices, row_of_rank, sum(choices), token, out, come)
        both = self.scatter(torch.cat([indices, weights.view(torch.int32)], 1), sent)
        local, chosen = both.split([e.top_k, both.shape[1] - e.top_k], 1)
        local = local - e.rank * e.local_experts
        local = local.where((local >= 0) & (local < e.local_experts), -1)
        chosen = chosen.clone(memory_format=torch.contiguous_format)  # a view of one row may begin within a float64
        return self.scatter(x, sent), local, chosen.view(weights.dtype), sent

    def _send(self, *given: Any, waits: bool) -> None:
        """``all_to_all_single``, for which the host ``waits``; where it need not, the group's own limit counts."""
        group, limit = self.e.group, self.e.time_limit
        if group in _LATE:
            got = "one in which a rank did not answer in time"
            raise refused(RuntimeError, _WHERE, "group", got, "one whose ranks are in step", "make a new process group")
        work: Any = dist.all_to_all_single(*given, group=group, async_op=True)
        end = time.monotonic() + limit
        try:
            while waits and not work.is_completed():
                if time.monotonic() > end:
                    raise RuntimeError("too late")
                time.sleep(20e-6)
            work.wait()
        except RuntimeError as error:
            _LATE.add(group)
            got = f"no answer of all ranks within {limit:g} s, or an error of one"
            raise refused(RuntimeError, _WHERE, "group", got, "every rank calls the layer") from error

    def scatter(self, values: Tensor, sent: Sent) -> Tensor:
        """The values of tokens, where they went."""
        return self._exchange(values[sent.token], sent.come, sent.out)

    def give_back(
        self, rows: Tensor, row_of_choice: Tensor, weights: Tensor | None, sent: Sent, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of rows, where the tokens came from, added up there; and ``values`` of choices, float32 (R, K)."""
        back = self._exchange(combine(rows, row_of_choice, weights), sent.out, sent.come)
        sums = combine(back, sent.row_of_rank)
        if values is None:
            return sums, None
        return sums, self.e.values_of(self._exchange(values, sent.out, sent.come), sent)

    def _exchange(self, values: Tensor, come: list[int], out: list[int]) -> Tensor:
        found = values.new_empty(sum(come), values.shape[1])
        target, source = (x.view(torch.uint8) for x in (found, values.contiguous()))  # as bytes: any backend knows them
        self._send(target, source, come, out, waits=not values.is_cuda)
        return found


class Shared:
    """Memory that all ranks of a group see: this rank's part, and the addresses of all."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.mine = symmetric.empty(*shape, dtype=dtype, device=exchange.device).zero_()
        self._handle = symmetric.rendezvous(self.mine, exchange.group)
        addresses = [self.part(rank).data_ptr() for rank in range(exchange.ranks)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=exchange.device)
        self._milliseconds = exchange.milliseconds

    def meet(self) -> None:
        """All ranks wait for each other, on their streams."""
        self._handle.barrier(0, self._milliseconds)

    def part(self, rank: int) -> Tensor:
        """The memory of a rank."""
        return self._handle.get_buffer(rank, tuple(self.mine.shape), self.mine.dtype)


def capture_of(device: torch.device) -> int:
    """The number of the capture of a CUDA graph on the current stream; 0 without."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    found = ctypes.byref(status), ctypes.byref(number), None, None, None
    error = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(stream, *found)
    if error:
        raise refused(RuntimeError, _WHERE, "stream", f"error {error} of CUDA", "a stream in capture")
    return number.value


class InHost:
    """By kernels on symmetric memory, between GPUs of a host.

    ``read``: memory that ranks may be reading, so they must meet before it is written again. ``sums`` and ``words`` are
    read by the kernel that waits for what comes there, and leaves them as they were, with all bits set. The first words
    say that a rank has begun to send; behind them are the numbers that come with sums.

    When a CUDA graph runs nothing here knows. So ranks meet before the first write in a graph, which may be what it
    begins with, and since there is a graph before each write that is in none.
    """

    reuses = True

    def __init__(self, exchange: Exchange) -> None:
        e = self.e = exchange
        rows = e.ranks * e.max_tokens
        self.choices = Shared((2, rows, e.top_k), torch.int32, e)  # and their weights' bits
        self.tokens = Shared((rows, e.hidden), e.dtype, e)
        self.sums = Shared((rows, e.hidden), e.dtype, e)
        self.words = Shared((e.ranks + rows * e.top_k,), torch.int32, e)
        for each in (self.sums, self.words):
            each.mine.view(torch.uint8).fill_(255)
        self.capture, self.was_captured = 0, False
        self.meet()  # that is there before others write

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """The fields of :class:`Received`; the tokens are in memory that the next call writes to."""
        e, count = self.e, len(x)
        if count > e.max_tokens:
            cure = "make the Exchange, which a layer takes as its group, with a larger max_tokens"
            raise refused(ValueError, _WHERE, "tokens of x", count, f"max_tokens={e.max_tokens}", cure)
        self._free(self.choices, self.tokens)
        row_of_rank = indices.new_empty(max(1, count), e.ranks)
        x, sent = x.contiguous(), Sent(indices.contiguous(), row_of_rank[:count], e.max_rows)
        choices, bits = sent.indices, weights.contiguous().view(torch.int32)
        if not count:  # the others hear that nothing comes
            x, choices, bits = x.new_empty(1, e.hidden), indices.new_full((1, e.top_k), -1), bits.new_zeros(1, e.top_k)
        announced = (bits, self.choices.addresses, row_of_rank)
        self._send(x, choices, *announced)
        self.meet(self.choices, self.tokens)
        local, chosen = self.choices.mine.clone()
        return self.tokens.mine, local, chosen.view(torch.float32), sent

    def _send(self, x: Tensor, indices: Tensor, *announced: Tensor) -> None:
        e = self.e
        configuration = DispatchConfiguration(
            name_of(e.dtype), e.hidden, e.top_k, e.ranks, e.local_experts, bool(announced)
        )
        run(_DISPATCH, configuration, placed(x), indices, self.tokens.addresses, *announced, e.rank, e.max_tokens)

    def scatter(self, values: Tensor, sent: Sent) -> Tensor:
        """The values of tokens, where they went: in memory that the next call writes to."""
        self._free(self.tokens)
        if len(values):
            self._send(values, sent.indices)
        self.meet(self.tokens)
        return self.tokens.mine

    def give_back(
        self, rows: Tensor, row_of_choice: Tensor, weights: Tensor | None, sent: Sent, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of rows, where the tokens came from, added up there; and ``values`` of choices, float32 (R, K).

        Values are zeros at choices of other ranks' experts.
        """
        e, count = self.e, len(sent.row_of_rank)
        self._free(self.sums, self.words)
        configuration = CombineExchangeConfiguration(
            name_of(e.dtype),
            e.hidden,
            row_of_choice.shape[1],
            weights is not None,
            ranks=e.ranks,
            values=0 if values is None else e.top_k,
        )
        rows = placed(rows) if len(rows) else rows.new_zeros(1, e.hidden)
        row_of_rank = sent.row_of_rank if count else sent.row_of_rank.new_full((1, e.ranks), -1)
        sums = rows.new_empty(max(1, count), e.hidden)
        given = (rows, placed(row_of_choice), *(() if weights is None else (placed(weights),)), self.sums.addresses)
        given, own = (*given, row_of_rank, sums, self.words.addresses), None
        if values is not None:
            own = values.new_empty(max(1, count), e.top_k)
            given = (*given, values.view(torch.int32), own.view(torch.int32))
        run(_GIVE_BACK, configuration, *given, e.rank, e.max_tokens, e.milliseconds)
        self.read = {self.sums, self.words}  # all ranks have begun: they have read the rest
        return sums[:count], None if own is None else own[:count]

    def _free(self, *written: Shared) -> None:
        """Waits until nobody reads these any more."""
        capture, last = capture_of(self.e.device), self.capture
        self.capture, self.was_captured = capture, self.was_captured or bool(capture)
        is_known = capture == last and bool(capture) == self.was_captured
        if not (is_known and self.read.isdisjoint(written)):
            self.meet()

    def meet(self, *read: Shared) -> None:
        """All ranks wait for each other; afterwards these are read."""
        self.tokens.meet()
        self.read = set(read)
