"""Expert parallelism: dispatch of tokens to the ranks of their experts, and combine of the results.

Dispatch sends a token once to a rank, however many of its experts are there; combine sends one row back, the sum over
that rank's experts.
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

from cudnn.deprecation import renamed_arguments
from cudnn.errors import checked_number, make_error
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
_DISPATCH, _COMBINE = (f"cudnn_kernels.moe.exchange:{name}" for name in ("Dispatch", "CombineExchange"))
_TYPES = (torch.bfloat16, torch.float16, torch.float32)
Tensor = torch.Tensor


class Received(NamedTuple):
    """The tokens of all ranks that have experts on this rank: R rows.

    - ``tokens`` (R, hidden).
    - ``indices`` int32 (R, K): experts of this rank, from 0 on, and -1 for those of other ranks.
    - ``weights`` float32 (R, K).
    - ``sent``: to which ranks this rank's tokens were sent.

    A row whose indices are all -1 was not received and is not initialized.
    """

    tokens: Tensor
    indices: Tensor
    weights: Tensor
    sent: Any


class Exchange:
    """Dispatches tokens to the ranks of their experts and combines the results. Both are differentiable.

    :func:`cudnn.ops.moe_mlp` and :class:`cudnn.nn.MoE` take one as their group. For other experts:

        received = exchange.dispatch(x, routing.indices, routing.weights)
        offsets, gather_idx, scatter_idx = moe.sort(received.indices, exchange.local_experts)
        rows = ...  # the outputs of the local experts for received.tokens, sorted by expert
        y = exchange.combine(rows, scatter_idx, received)  # weighted

    Rank r has experts r * E / ranks to (r + 1) * E / ranks - 1. All ranks call the same methods in the same order.

    With all GPUs of the group in one host, kernels write tokens and sums to PyTorch's symmetric memory without host
    synchronization; R is then ranks * max_tokens. Otherwise ``all_to_all_single`` sends them, whose sizes the host must
    know, so it synchronizes; R is the number of rows received.

    PyTorch sets up NVLink multicast, which the exchange does not use, unless the environment variable
    ``TORCH_SYMM_MEM_DISABLE_MULTICAST`` is 1.

    Args:
        group: A process group; None: the default one. At most 16 ranks.
        experts: E, of all ranks together, a multiple of their number.
        top_k: K, 1 to 16.
        hidden: Elements of a token, a multiple of 8.
        max_tokens: Tokens that a rank may dispatch at a time in symmetric memory, which has buffers for ranks *
            max_tokens tokens and the same number of sums; the same on all ranks. ``all_to_all_single`` has no limit.
        max_rows: With symmetric memory: rows that a layer allocates for the (token, k) slots of one rank's experts.
            None: the most that can come, ranks * max_tokens * min(top_k, local experts). More slots than ``max_rows``
            end the program with a device assertion.
        dtype: Of the tokens: bfloat16, float16 or float32, with ``all_to_all_single`` on the CPU also float64; weights
            and sums are then float64 too.
        device: None: the current CUDA device, or the CPU without CUDA.
        symmetric: Whether to use symmetric memory. None: with CUDA and all ranks in one host.
        time_limit: Seconds to wait for the other ranks. After that a kernel that waits in symmetric memory traps: the
            CUDA error "unspecified launch failure".

    Raises:
        ValueError: an argument, or a tensor of a call, that is not allowed; more tokens than ``max_tokens``; ranks
            whose arguments differ.
        TypeError: a group that is no process group.
        RuntimeError: a rank did not call within the time limit.
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
                raise make_error(ValueError, _WHERE, what, got, allowed)
        self.layers: set[Any] = set()  # those that all ranks have called
        self.milliseconds = min(max(1, int(1000 * time_limit)), 2**31 - 1)
        self.local_experts = experts // self.ranks
        self.max_rows = self.ranks * max_tokens * min(top_k, self.local_experts)
        self.max_rows = self.max_rows if max_rows is None else min(max_rows, self.max_rows)
        config = describe_config(
            experts=experts, top_k=top_k, hidden=hidden, max_tokens=max_tokens, dtype=dtype, symmetric=symmetric
        )
        hosts = check_all_ranks(group, config, zlib.crc32(_host().encode()), time_limit, _WHERE)
        if symmetric is None:
            symmetric = self.device.type == "cuda" and len(set(hosts)) == 1
        self.transport: Any = SymmetricMemory(self) if symmetric else AllToAll(self)

    @property
    def group(self) -> Any:
        """The process group; the exchange holds a weak reference."""
        group = self._group()
        if group is None:
            raise make_error(RuntimeError, _WHERE, "group", "one that was destroyed", "a process group that is in use")
        return group

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> Received:
        """Sends each token to the ranks of its experts; a slot whose index is not in 0 to E - 1 is dropped.

        Args:
            x: (T, hidden), T up to ``max_tokens``.
            indices: int32 (T, K), of experts of all ranks.
            weights: float32 (T, K), or float64 with float64 tokens.
        """
        self._check("x", x, self.hidden, self.dtype)
        self._check("indices", indices, self.top_k, torch.int32)
        self._check("weights", weights, self.top_k, self.dtype if self.dtype is torch.float64 else torch.float32)
        if not len(x) == len(indices) == len(weights):
            got = f"{len(x)}, {len(indices)} and {len(weights)}"
            raise make_error(ValueError, _WHERE, "tokens of x, indices and weights", got, "the same number")
        return Received(*_Dispatch.apply(x, weights, indices, self))

    @renamed_arguments(row_of_choice="scatter_idx")
    def combine(self, rows: Tensor, scatter_idx: Tensor, received: Received) -> Tensor:
        """Each token's weighted sum of its experts' rows, over all ranks: (T, hidden), T tokens of this rank.

        Sums are in float32. Each rank's sum is rounded to ``dtype``; their sum, in a fixed order, is too.

        Args:
            rows: (rows, hidden), outputs of the local experts.
            scatter_idx: int32 (R, K), that of :func:`cudnn.moe.sort` for ``received.indices``.
            received: The result of :meth:`dispatch`.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden or rows.dtype != self.dtype:
            got = f"{rows.dtype} of the shape {tuple(rows.shape)}"
            raise make_error(ValueError, _WHERE, "rows", got, f"{self.dtype} of the shape (rows, {self.hidden})")
        if scatter_idx.shape != received.indices.shape or scatter_idx.dtype != torch.int32:
            got = f"{scatter_idx.dtype} of the shape {tuple(scatter_idx.shape)}"
            allowed = f"torch.int32 of the shape {tuple(received.indices.shape)}"
            raise make_error(ValueError, _WHERE, "scatter_idx", got, allowed)
        return _Combine.apply(rows, received.weights, scatter_idx.contiguous(), received.sent, self)

    def _check(self, name: str, tensor: Tensor, columns: int, dtype: torch.dtype) -> None:
        if tensor.ndim != 2 or tensor.shape[1] != columns or tensor.dtype != dtype or tensor.device != self.device:
            got = f"{tensor.dtype} of the shape {tuple(tensor.shape)} on {tensor.device}"
            raise make_error(ValueError, _WHERE, name, got, f"{dtype} of the shape (T, {columns}) on {self.device}")

    def is_sent(self, indices: Tensor) -> Tensor:
        """Whether each token has an expert on each rank, bool (T, ranks)."""
        owner = indices.long().div(self.local_experts, rounding_mode="floor")
        owner = owner.where((owner >= 0) & (owner < self.ranks), self.ranks)
        is_sent = torch.zeros(len(indices), self.ranks + 1, dtype=torch.bool, device=indices.device)
        return is_sent.scatter_(1, owner, True)[:, :-1]

    def unpermute_values(self, back: Tensor, sent: Sent) -> Tensor:
        """Values by slot (T, K) from the received rows (n, K), by ``sent.row_of_rank``; 0 for dropped slots."""
        indices = sent.indices.long()
        is_routed = (indices >= 0) & (indices < self.experts)
        rank = indices.where(is_routed, 0).div(self.local_experts, rounding_mode="floor")
        row = sent.row_of_rank.gather(1, rank).long()
        if not len(back):
            return back.new_zeros(indices.shape)
        return back[row, torch.arange(self.top_k, dtype=torch.int64, device=row.device)].where(is_routed, 0.0)


def size_of(where: str, group: Any) -> int:
    """The number of ranks of a process group.

    Raises:
        TypeError: it is no process group, or this rank does not belong to it.
    """
    if not isinstance(group, dist.ProcessGroup):
        got = "no initialised torch.distributed" if group is None else repr(group)
        allowed = "a process group of torch.distributed that this rank belongs to, or a cudnn.moe.Exchange"
        raise make_error(TypeError, where, "group", got, allowed)
    return dist.get_world_size(group)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, indices: Tensor, exchange: Exchange) -> tuple[Any, ...]:
        tokens, indices, weights, sent = exchange.transport.dispatch(x.contiguous(), indices, weights)
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return tokens.clone() if exchange.transport.reuses_buffers else tokens, indices, weights, sent

    @staticmethod
    def backward(ctx: Any, d_tokens: Tensor, _: Any, d_weights: Tensor, __: Any) -> tuple[Any, ...]:  # pyright: ignore
        (indices,) = ctx.saved_tensors
        identity = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
        identity = identity.where((indices >= 0).any(1), -1)[:, None].contiguous()
        values = d_weights.masked_fill(indices < 0, 0.0).contiguous()
        return *ctx.exchange.transport.combine(d_tokens.contiguous(), identity, None, ctx.sent, values), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, scatter_idx: Tensor, sent: Any, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.sent = exchange, sent
        ctx.save_for_backward(rows, scatter_idx, weights)
        return exchange.transport.combine(rows.contiguous(), scatter_idx, weights, sent)[0]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        dy = ctx.exchange.transport.scatter(d_out.contiguous(), ctx.sent)
        d_rows, d_weights = moe_combine_bwd(dy, *ctx.saved_tensors)
        return d_rows, d_weights, None, None, None


@dataclass
class Sent:
    """To which ranks the tokens of a dispatch were sent.

    - ``indices`` (T, K): their experts.
    - ``row_of_rank`` int32 (T, ranks): the row in the combine buffer for each token and rank, -1 if not sent.
    - ``max_rows``: the most slots of local experts.
    - With ``all_to_all_single``: ``token``, the tokens sorted by rank, and the rows sent to and received from each.
    """

    indices: Tensor
    row_of_rank: Tensor
    max_rows: int
    token: Tensor | None = None
    send_counts: list[int] = field(default_factory=list)
    receive_counts: list[int] = field(default_factory=list)


def _host() -> str:
    """Identifies the host, also among hosts of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text() if boot.exists() else "")


_ROUNDS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""The number of each group's last round over its store."""

_TIMED_OUT = 1000
"""A rank that gives up waiting adds this to a round's count of ranks: more than the number of ranks."""


def describe_config(**arguments: Any) -> str:
    """Arguments as text, which the ranks compare."""
    return "; ".join(f"{name}={value}" for name, value in arguments.items())


def check_all_ranks(group: Any, config: str, value: int, time_limit: float, where: str) -> list[int]:
    """All-gathers ``value`` over the group's store, and checks that the ranks' ``config`` is the same.

    If a rank gives up waiting, all ranks that wait with it do too. A rank that comes later waits for their next call.

    Returns:
        The value of each rank.

    Raises:
        ValueError: the ranks' configurations differ, or a limit that is not above 0.
        RuntimeError: a rank did not call within ``time_limit`` seconds.
    """
    limit = checked_number(where, "time_limit", time_limit)
    if limit <= 0:
        raise make_error(ValueError, where, "time_limit", time_limit, "seconds, above 0")
    config = f"{config}; time_limit={limit:g}"
    rank = dist.get_rank(group)
    try:
        failure, messages = _all_gather(group, rank, f"{value} {config}", limit)
    except RuntimeError as error:  # the process that holds the store has exited
        failure, messages = f"an error of its store, {error}", []
    if failure:
        raise make_error(RuntimeError, where, "group", failure, "every rank calls the layer")
    for other, (_, other_config) in enumerate(messages):
        if other_config != config:
            here, there = _difference(config, other_config), _difference(other_config, config)
            got = f"{here} on rank {rank}, {there} on rank {other}"
            raise make_error(ValueError, where, "layer", got, "the same layer and time_limit on all ranks")
    return [int(value) for value, _ in messages]


def _all_gather(group: Any, rank: int, message: str, limit: float) -> tuple[str, list[list[str]]]:
    """The reason of a failure, or "", and each rank's value and configuration."""
    ranks, store = dist.get_world_size(group), store_of(group)
    count, end, done, *keys = _join_round(group, rank, ranks, store, message)
    try:
        store.wait([end], timedelta(seconds=limit))
    except RuntimeError:
        absent = ", ".join(str(each) for each, key in enumerate(keys) if not store.check([key]))
        # Otherwise all ranks have come, or another rank has timed out and sets the end.
        if store.add(count, _TIMED_OUT) < ranks + _TIMED_OUT:
            store.set(end, f"no answer of ranks {absent} within {limit:g} s on rank {rank}")
    failure = store.get(end).decode()
    messages = [] if failure else [store.get(key).decode().split(" ", 1) for key in keys]
    _leave_round(store, ranks, count, end, done, *keys)
    return failure, messages


def _difference(config: str, other: str) -> str:
    """The arguments of a configuration that the other one lacks."""
    return "; ".join(each for each in config.split("; ") if each not in other.split("; ")) or config


def _join_round(group: Any, rank: int, ranks: int, store: Any, message: str) -> list[str]:
    """Posts a message in the next round that no rank has given up; the last rank sets the end of the round.

    Returns:
        The keys of a round in the store: its count of ranks, its end, its count of ranks that are done, and each rank's
        message.
    """
    while True:
        index = _ROUNDS[group] = _ROUNDS.get(group, 0) + 1
        keys = [f"cudnn/{index}/{name}" for name in ("count", "end", "heard", *range(ranks))]
        store.set(keys[3 + rank], message)
        joined = store.add(keys[0], 1)
        if joined == ranks:
            store.set(keys[1], "")
        if joined <= ranks:
            return keys
        _leave_round(store, ranks, *keys)


def _leave_round(store: Any, ranks: int, count: str, end: str, done: str, *keys: str) -> None:
    """The last rank to leave deletes the round's keys: a later group over this store must not find them."""
    if store.add(done, 1) == ranks:
        for key in (count, end, done, *keys):
            store.delete_key(key)


def store_of(group: Any) -> Any:
    """The store by which the processes of a group found each other."""
    return dist.distributed_c10d._get_process_group_store(group)


_LATE: WeakSet[Any] = WeakSet()
"""Groups in which a message timed out: a later message could be matched with it."""


class AllToAll:
    """Dispatch and combine by ``all_to_all_single``, between any devices."""

    reuses_buffers = False  # the next call does not overwrite the tokens

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
        is_owned = (indices[..., None] >= owners) & (indices[..., None] < owners + e.local_experts)
        send_counts = torch.stack([is_sent.sum(0), is_owned.sum((0, 1))], 1)  # tokens and slots for each rank
        receive_counts = torch.empty_like(send_counts)
        self._send(receive_counts, send_counts, waits=True)
        (send_tokens, _), (receive_tokens, slots) = send_counts.T.tolist(), receive_counts.T.tolist()
        sent = Sent(indices, row_of_rank, sum(slots), token, send_tokens, receive_tokens)
        routing = self.scatter(torch.cat([indices, weights.view(torch.int32)], 1), sent)
        local, local_weights = routing.split([e.top_k, routing.shape[1] - e.top_k], 1)
        local = local - e.rank * e.local_experts
        local = local.where((local >= 0) & (local < e.local_experts), -1)
        # Cloned: a view of one row need not be aligned to float64.
        local_weights = local_weights.clone(memory_format=torch.contiguous_format)
        return self.scatter(x, sent), local, local_weights.view(weights.dtype), sent

    def _send(self, *arguments: Any, waits: bool) -> None:
        """``all_to_all_single``. ``waits``: the host waits, for the exchange's limit; else the group's limit holds."""
        group, limit = self.e.group, self.e.time_limit
        if group in _LATE:
            got = "one in which a rank did not answer in time"
            raise make_error(
                RuntimeError, _WHERE, "group", got, "one whose ranks are in step", "make a new process group"
            )
        work: Any = dist.all_to_all_single(*arguments, group=group, async_op=True)
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
            raise make_error(RuntimeError, _WHERE, "group", got, "every rank calls the layer") from error

    def scatter(self, values: Tensor, sent: Sent) -> Tensor:
        """Sends values of tokens (T, n) as their tokens were sent: (R, n)."""
        return self._exchange(values[sent.token], sent.receive_counts, sent.send_counts)

    def combine(
        self, rows: Tensor, scatter_idx: Tensor, weights: Tensor | None, sent: Sent, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sends each received token's sum of rows back and adds up the ranks' sums: (T, hidden).

        ``values``, float32 (R, K) by slot, are sent back too: (T, K).
        """
        back = self._exchange(combine(rows, scatter_idx, weights), sent.send_counts, sent.receive_counts)
        sums = combine(back, sent.row_of_rank)
        if values is None:
            return sums, None
        back = self._exchange(values, sent.send_counts, sent.receive_counts)
        return sums, self.e.unpermute_values(back, sent)

    def _exchange(self, values: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        received = values.new_empty(sum(receive_counts), values.shape[1])
        target, source = (x.view(torch.uint8) for x in (received, values.contiguous()))  # bytes: for any backend
        self._send(target, source, receive_counts, send_counts, waits=not values.is_cuda)
        return received


class Shared:
    """A symmetric memory buffer: this rank's, and the addresses of all ranks'."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.local = symmetric.empty(*shape, dtype=dtype, device=exchange.device).zero_()
        self._handle = symmetric.rendezvous(self.local, exchange.group)
        addresses = [self.buffer(rank).data_ptr() for rank in range(exchange.ranks)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=exchange.device)
        self._milliseconds = exchange.milliseconds

    def barrier(self) -> None:
        """A barrier of all ranks on the current stream."""
        self._handle.barrier(0, self._milliseconds)

    def buffer(self, rank: int) -> Tensor:
        """The buffer of a rank."""
        return self._handle.get_buffer(rank, tuple(self.local.shape), self.local.dtype)


def capture_of(device: torch.device) -> int:
    """The ID of the CUDA graph capture on the current stream; 0 without a capture."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return 0
    status, capture_id = ctypes.c_int(), ctypes.c_uint64()
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    outputs = ctypes.byref(status), ctypes.byref(capture_id), None, None, None
    error = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2(stream, *outputs)
    if error:
        raise make_error(RuntimeError, _WHERE, "stream", f"error {error} of CUDA", "a stream in capture")
    return capture_id.value


class SymmetricMemory:
    """Dispatch and combine by kernels on symmetric memory, between GPUs of a host.

    ``in_use``: buffers that ranks may be reading; writing them needs a barrier first. The combine kernel polls ``sums``
    and ``flags`` for data that arrives and resets them to all bits set. ``flags``: one word per rank, set when that
    rank has begun to send, then the values that are sent back with the sums.

    The host does not see replays of a CUDA graph. So a captured graph begins its first write with a barrier, and after
    any capture each eager write does too.
    """

    reuses_buffers = True

    def __init__(self, exchange: Exchange) -> None:
        e = self.e = exchange
        rows = e.ranks * e.max_tokens
        self.slots = Shared((2, rows, e.top_k), torch.int32, e)  # indices, and the bits of weights
        self.tokens = Shared((rows, e.hidden), e.dtype, e)
        self.sums = Shared((rows, e.hidden), e.dtype, e)
        self.flags = Shared((e.ranks + rows * e.top_k,), torch.int32, e)
        for each in (self.sums, self.flags):
            each.local.view(torch.uint8).fill_(255)
        self.capture, self.was_captured = 0, False
        self.barrier()  # before other ranks write

    def dispatch(self, x: Tensor, indices: Tensor, weights: Tensor) -> tuple[Any, ...]:
        """The fields of :class:`Received`; the next call overwrites the tokens.

        A token's row may have fewer bytes than ``hidden`` elements, a multiple of 16, and another dtype; the same on
        all ranks.
        """
        e, count = self.e, len(x)
        if count > e.max_tokens:
            hint = "make the Exchange, which a layer takes as its group, with a larger max_tokens"
            raise make_error(ValueError, _WHERE, "tokens of x", count, f"max_tokens={e.max_tokens}", hint)
        self._free(self.slots, self.tokens)
        row_of_rank = indices.new_empty(max(1, count), e.ranks)
        x, sent = x.contiguous(), Sent(indices.contiguous(), row_of_rank[:count], e.max_rows)
        indices, bits = sent.indices, weights.contiguous().view(torch.int32)
        if not count:  # other ranks wait for a message also if this rank has no tokens
            x, indices, bits = (
                x.new_empty(1, x.shape[1]),
                indices.new_full((1, e.top_k), -1),
                bits.new_zeros(1, e.top_k),
            )
        routing = (bits, self.slots.addresses, row_of_rank)
        self._send(x, indices, *routing)
        self.barrier(self.slots, self.tokens)
        local, local_weights = self.slots.local.clone()
        return self._received(x), local, local_weights.view(torch.float32), sent

    def _send(self, x: Tensor, indices: Tensor, *routing: Tensor) -> None:
        e = self.e
        configuration = DispatchConfiguration(
            name_of(x.dtype), x.shape[1], e.top_k, e.ranks, e.local_experts, bool(routing)
        )
        run(_DISPATCH, configuration, placed(x), indices, self.tokens.addresses, *routing, e.rank, e.max_tokens)

    def _received(self, x: Tensor) -> Tensor:
        """The rows (R, n) that ranks sent, of the dtype and width of x."""
        rows, width = self.e.ranks * self.e.max_tokens, x.shape[1]
        return self.tokens.local.view(-1).view(x.dtype)[: rows * width].view(rows, width)

    def scatter(self, values: Tensor, sent: Sent) -> Tensor:
        """Sends values of tokens (T, n) as :meth:`dispatch` sends tokens: (R, n), which the next call overwrites."""
        self._free(self.tokens)
        if len(values):
            self._send(values, sent.indices)
        self.barrier(self.tokens)
        return self._received(values)

    def combine(
        self, rows: Tensor, scatter_idx: Tensor, weights: Tensor | None, sent: Sent, values: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Sends each received token's sum of rows back and adds up the ranks' sums: (T, hidden).

        ``values``, float32 (R, K) by slot, 0 for slots of other ranks' experts, are sent back too: (T, K).
        """
        e, count = self.e, len(sent.row_of_rank)
        self._free(self.sums, self.flags)
        configuration = CombineExchangeConfiguration(
            name_of(e.dtype),
            e.hidden,
            scatter_idx.shape[1],
            weights is not None,
            ranks=e.ranks,
            values=0 if values is None else e.top_k,
        )
        rows = placed(rows) if len(rows) else rows.new_zeros(1, e.hidden)
        row_of_rank = sent.row_of_rank if count else sent.row_of_rank.new_full((1, e.ranks), -1)
        sums = rows.new_empty(max(1, count), e.hidden)
        arguments = (rows, placed(scatter_idx), *(() if weights is None else (placed(weights),)), self.sums.addresses)
        arguments, own_values = (*arguments, row_of_rank, sums, self.flags.addresses), None
        if values is not None:
            own_values = values.new_empty(max(1, count), e.top_k)
            arguments = (*arguments, values.view(torch.int32), own_values.view(torch.int32))
        run(_COMBINE, configuration, *arguments, e.rank, e.max_tokens, e.milliseconds)
        self.in_use = {self.sums, self.flags}  # every rank has begun its combine: it no longer reads other buffers
        return sums[:count], None if own_values is None else own_values[:count]

    def _free(self, *written: Shared) -> None:
        """Waits until no rank reads these buffers."""
        capture, last = capture_of(self.e.device), self.capture
        self.capture, self.was_captured = capture, self.was_captured or bool(capture)
        is_tracked = capture == last and bool(capture) == self.was_captured
        if not (is_tracked and self.in_use.isdisjoint(written)):
            self.barrier()

    def barrier(self, *in_use: Shared) -> None:
        """A barrier of all ranks; afterwards they read these buffers."""
        self.tokens.barrier()
        self.in_use = set(in_use)
