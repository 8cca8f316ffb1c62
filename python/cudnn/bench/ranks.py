"""Benchmark of a layer of experts over the GPUs of one host, beside the same layer on one of them.

A process runs on each GPU. Every time is that of the slowest rank, the median of single calls that all ranks begin
together. A copy from each GPU to the next one is timed in the same run, and the exchange compared with a model of it.
"""

from __future__ import annotations

import csv
import math
import os
import queue
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cudnn import settings
from cudnn.bench.grouped import MODELS, ROUTINGS
from cudnn.lazy import torch

NAMES = ("Qwen3-30B-A3B", "DeepSeek-V3")
TOKENS = (2048, 4096, 8192, 16384)
QUICK = 8192
SECONDS = 30.0  # to wait for another rank
SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast, which nothing here uses, stays off."""


@dataclass(frozen=True)
class Case:
    """``tokens`` of each rank, spread over the experts by ``routing``."""

    model: str
    tokens: int
    routing: str

    @property
    def flops(self) -> float:
        """Of the products of one rank's tokens, forward."""
        _, chosen, hidden, inner = MODELS[self.model]
        return 6.0 * self.tokens * hidden * inner * chosen


@dataclass(frozen=True)
class Line:
    """A measurement; times in microseconds, of the slowest rank.

    ``dispatch``, ``compute`` and ``combine`` are the parts of a forward pass, ``one_forward`` and ``one_backward`` the
    times of one GPU that has all experts, with one rank's tokens. ``bytes``: what the busiest link carries one way, in
    each of dispatch and combine. ``copy``: bytes per microsecond of a copy to another GPU. ``modelled_dispatch`` and
    ``modelled_combine``: what :func:`seconds` says.
    """

    model: str
    routing: str
    tokens: int
    ranks: int
    dispatch: float
    compute: float
    combine: float
    forward: float
    backward: float
    one_forward: float
    one_backward: float
    bytes: float
    copy: float
    modelled_dispatch: float
    modelled_combine: float
    flops: float

    def share(self, part: str) -> float:
        """The speed of an exchange, ``dispatch`` or ``combine``, as a share of the copy's."""
        return self.bytes / getattr(self, part) / self.copy

    def teraflops(self, which: str) -> float:
        """TFLOP/s of one GPU in ``forward``, ``backward``, ``one_forward`` or ``one_backward``."""
        return self.flops * (2 if which.endswith("backward") else 1) / getattr(self, which) * 1e-6


@dataclass(frozen=True)
class Link:
    """Measured between two H200s of one host: bytes per second that kernels write to another GPU, and those that they
    move in the GPU's own memory; seconds until the kernels run and the ranks have met.
    """

    writes: float = 366e9
    memory: float = 4.0e12
    meeting: float = 16e-6


def cases(quick: bool) -> list[Case]:
    """What is measured, the most wanted first."""
    sizes = [(model, tokens) for tokens in (QUICK, *(t for t in TOKENS if t != QUICK)) for model in NAMES]
    return [Case(*size, routing) for size in (sizes[:1] if quick else sizes) for routing in ROUTINGS]


def busiest(sent: Sequence[Sequence[float]]) -> float:
    """The most that a rank sends or receives, of bytes ``sent[source][target]``: links carry both ways at once."""
    ranks = range(len(sent))
    out = (sum(sent[a][b] for b in ranks if b != a) for a in ranks)
    come = (sum(sent[a][b] for a in ranks if a != b) for b in ranks)
    return max(*out, *come)


def seconds(sent: Sequence[Sequence[float]], moved: float = 0.0, link: Link | None = None) -> float:
    """A model of an exchange, not a measurement: the busiest link at the speed of writing, and a meeting of the ranks.

    Meanwhile ``moved`` bytes move in a GPU's memory: to combine, the rows of the experts, and sums that come and those
    of all ranks. Dispatch has none to speak of.
    """
    link = link or Link()
    return max(busiest(sent) / link.writes, moved / link.memory) + link.meeting


def measure(ranks: int, wanted: Sequence[Case], limit: float = math.inf) -> Iterator[Line | str]:
    """Lines as they come, or what went wrong, by a process for each GPU. No case starts after ``limit`` seconds."""
    from torch import multiprocessing

    settings.pass_on(SETTINGS)
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    until = time.time() + limit
    port = 20000 + os.getpid() % 20000
    given = (ranks, port, list(wanted), until, found)
    processes = [context.Process(target=_rank, args=(rank, *given)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        running = ranks
        while running:
            try:
                line = found.get(timeout=1)
            except queue.Empty:
                if any(process.exitcode for process in processes):
                    yield "a rank ended: " + ", ".join(f"exit code {process.exitcode}" for process in processes)
                    return
                continue
            if line is None:
                running -= 1
                continue
            yield line
            if isinstance(line, str):
                return
    finally:
        for process in processes:
            process.kill()


def _rank(rank: int, ranks: int, port: int, wanted: Sequence[Case], until: float, found: Any) -> None:
    """One process."""
    from torch import distributed as dist

    try:
        torch.cuda.set_device(rank)
        address, device = f"tcp://127.0.0.1:{port}", torch.device("cuda", rank)
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks, device_id=device)
        for case in wanted:
            if worst(time.time() > until):
                break
            line = Measurement(case, rank, ranks).line()
            if rank == 0:
                found.put(line)
    except Exception:
        found.put(f"rank {rank}: {traceback.format_exc()}")
        raise
    found.put(None)
    torch.cuda.synchronize()
    dist.barrier()


def worst(value: float) -> float:
    """The greatest of the ranks' values."""
    from torch import distributed as dist

    mine = torch.tensor(float(value), dtype=torch.float32, device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.item()


class Measurement:
    """One case on one rank."""

    def __init__(self, case: Case, rank: int, ranks: int) -> None:
        from cudnn.moe import Exchange, route

        self.case, self.rank, self.ranks = case, rank, ranks
        self.experts, self.chosen, self.hidden, self.inner = MODELS[case.model]
        torch.manual_seed(7)  # the same on all ranks
        order = torch.randperm(self.experts, dtype=torch.float32, device="cuda")
        popular = -(order + 1).log() if case.routing == "zipf" else 0.0
        torch.manual_seed(100 + rank)
        self.x = torch.randn(case.tokens, self.hidden, dtype=torch.float32, device="cuda").bfloat16().requires_grad_()
        noise = -torch.empty(case.tokens, self.experts, dtype=torch.float32, device="cuda").exponential_().log()
        self.routing = route(noise + popular, self.chosen)  # without replacement, by these probabilities
        self.exchange = Exchange(
            None, self.experts, self.chosen, self.hidden, max_tokens=case.tokens, time_limit=SECONDS
        )

    def line(self) -> Line:
        """All that is measured of it."""
        one = self._passes(None)
        torch.cuda.empty_cache()
        many = self._passes(self.exchange)
        parts = self._parts()
        sent = self._sent()
        come = self.exchange.is_sent(self.routing.indices).sum().item() - sent[self.rank][self.rank] / (2 * self.hidden)
        moved = worst(self.rows + come + self.case.tokens) * 2 * self.hidden
        modelled = seconds(sent), seconds(sent, moved)
        times = (*parts, *many, *one, busiest(sent), self._copy(), *(each * 1e6 for each in modelled), self.case.flops)
        names = [field.name for field in fields(Line)][4:]
        case = self.case
        return Line(case.model, case.routing, case.tokens, self.ranks, **dict(zip(names, times, strict=True)))

    def _median(self, call: Callable[[], Any], times: int = 9) -> float:
        """Microseconds of a call that all ranks begin together, after which they wait for each other."""
        transport = self.exchange.transport
        found = []
        for _ in range(times + 2):
            torch.cuda._sleep(3_000_000)  # until the host has handed it over
            transport.meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) * 1000)
        return worst(sorted(found[2:])[times // 2])

    def _weights(self, count: int) -> Iterator[Any]:
        """Up and down of so many experts."""
        shapes = ((count, 2 * self.inner, self.hidden), (count, self.hidden, self.inner))
        return (torch.empty(s, device="cuda", dtype=torch.bfloat16).normal_(0, s[2] ** -0.5) for s in shapes)

    def _passes(self, group: Any) -> tuple[float, float]:
        """Microseconds of a forward and a backward pass."""
        from cudnn.ops import moe_mlp

        up, down = self._weights(self.experts // (self.ranks if group is not None else 1))
        inputs = [self.x, *(t.requires_grad_() for t in (up, down))]
        weights = self.routing.weights.detach().requires_grad_()
        routing = self.routing._replace(weights=weights)
        gradient = torch.randn_like(self.x)

        def forward() -> Any:
            return moe_mlp(self.x, routing, up, down, group=group)

        def backward() -> None:
            torch.autograd.grad(kept[0], [*inputs, weights], gradient, retain_graph=True)

        first = self._median(forward)
        kept = [forward()]
        return first, self._median(backward)

    def _parts(self) -> tuple[float, float, float]:
        """Microseconds of dispatch, of what is between, and of combine."""
        from cudnn.moe import layer, parallel
        from cudnn.moe.experts import Experts, grouped_gemm_ops

        transport = self.exchange.transport
        up, down = self._weights(self.exchange.local_experts)
        experts = Experts([up], [down], None, None, "swiglu", [1.0, 1.702, 7.0, -7.0], "interleaved")
        given = (self.x.detach(), self.routing.indices, self.routing.weights.detach())
        with torch.no_grad():
            tokens, local, weights, sent = transport.dispatch(*given)
            rows = parallel.permutation_of(local, self.exchange, sent)
            self.rows = int(rows.offsets[-1])
            made, _ = layer.forward(grouped_gemm_ops(tokens, experts), tokens, weights, rows, experts, False, combine=False)
            dispatch = self._median(lambda: transport.dispatch(*given))

            def compute() -> None:
                each = parallel.permutation_of(local, self.exchange, sent)
                layer.forward(grouped_gemm_ops(tokens, experts), tokens, weights, each, experts, False, combine=False)

            between = self._median(compute)
            return dispatch, between, self._median(lambda: transport.combine(made, rows.scatter_idx, weights, sent))

    def _sent(self) -> list[list[float]]:
        """Bytes from each rank to each."""
        from torch import distributed as dist

        mine = self.exchange.is_sent(self.routing.indices).sum(0) * (2 * self.hidden)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine)
        return [[float(size) for size in each.tolist()] for each in every]

    def _copy(self) -> float:
        """Bytes per microsecond of a copy to the next GPU; all GPUs copy at once."""
        target = self.exchange.transport.tokens.part((self.rank + 1) % self.ranks)
        source = torch.empty_like(target)
        return source.nbytes / self._median(lambda: target.copy_(source))


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """One line for each measurement, with the names of the fields above."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
