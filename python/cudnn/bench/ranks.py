"""Benchmark of the expert-parallel MoE layer over the GPUs of one host, compared with the same layer on one GPU.

A process runs on each GPU. Every time is that of the slowest rank: the median over single calls that all ranks start
together. The run also times a copy from each GPU to the next, and compares the exchange with a model.
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
from cudnn.bench import OURS_PACKAGE
from cudnn.bench.grouped import MODELS, ROUTINGS
from cudnn.bench.results import Result, Run, significant, version_of
from cudnn.lazy import torch

NAMES = ("Qwen3-30B-A3B", "DeepSeek-V3")
TOKENS = (2048, 4096, 8192, 16384)
QUICK = 8192
TIMEOUT = 30.0  # seconds to wait for another rank
SETTINGS = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""Turns NVLink multicast off; nothing here uses it."""


@dataclass(frozen=True)
class Case:
    """``tokens`` per rank, distributed over the experts by ``routing``; all GEMMs with ``fp8`` in e4m3, else bf16."""

    model: str
    tokens: int
    routing: str
    fp8: bool = False

    @property
    def recipe(self) -> str:
        """The layer's argument ``fp8``."""
        return "blockwise" if self.fp8 else ""

    @property
    def flops(self) -> float:
        """Operations of the forward GEMMs on one rank's tokens."""
        _, chosen, hidden, inner = MODELS[self.model]
        return 6.0 * self.tokens * hidden * inner * chosen


@dataclass(frozen=True)
class Line:
    """A measurement; times in microseconds, of the slowest rank.

    ``dispatch``, ``compute`` and ``combine`` are the steps of a forward pass; with ``fp8`` dispatch quantizes first.
    ``one_forward`` and ``one_backward`` are the times of one GPU that has all experts, with one rank's tokens.
    ``dispatch_bytes`` and ``combine_bytes``: what the busiest link carries one way. ``copy`` is the rate of a copy to
    another GPU in bytes per microsecond.
    ``modelled_dispatch`` and ``modelled_combine`` are the estimates of :func:`seconds`. ``a2a_forward`` and
    ``a2a_backward`` are the times of the same layer if ``all_to_all_single`` exchanges the tokens, over NCCL.
    """

    model: str
    routing: str
    fp8: bool
    tokens: int
    ranks: int
    dispatch: float
    compute: float
    combine: float
    forward: float
    backward: float
    one_forward: float
    one_backward: float
    dispatch_bytes: float
    combine_bytes: float
    copy: float
    modelled_dispatch: float
    modelled_combine: float
    flops: float
    a2a_forward: float
    a2a_backward: float

    def fraction_of_copy(self, step: str) -> float:
        """The speed of an exchange, ``dispatch`` or ``combine``, as a fraction of the copy's."""
        return self.rate(step) / self.copy

    def rate(self, step: str) -> float:
        """Bytes per microsecond of an exchange on the busiest link."""
        return getattr(self, f"{step}_bytes") / getattr(self, step)

    def teraflops(self, which: str) -> float:
        """TFLOP/s of one GPU in ``forward`` or ``backward``, also ``one_`` or ``a2a_``."""
        return self.flops * (2 if which.endswith("backward") else 1) / getattr(self, which) * 1e-6


@dataclass(frozen=True)
class Link:
    """Rates measured between two H200s of one host.

    ``writes`` and ``memory``: bytes per second that kernels write to a peer, and that they move in local memory.
    ``meeting``: seconds of the kernel launches and the barrier of the ranks.
    """

    writes: float = 366e9
    memory: float = 4.0e12
    meeting: float = 16e-6


def cases(quick: bool) -> list[Case]:
    """The cases, in order of priority."""
    sizes = [(model, tokens) for tokens in (QUICK, *(t for t in TOKENS if t != QUICK)) for model in NAMES]
    every = [Case(*size, routing, fp8) for size in sizes for fp8 in (False, True) for routing in ROUTINGS]
    return every[:3] if quick else every  # of the first size: bf16 with each routing, and fp8


def busiest(sent: Sequence[Sequence[float]]) -> float:
    """The maximum bytes that a rank sends or receives; ``sent[source][target]``. Links are full duplex."""
    ranks = range(len(sent))
    sent_bytes = (sum(sent[a][b] for b in ranks if b != a) for a in ranks)
    received = (sum(sent[a][b] for a in ranks if a != b) for b in ranks)
    return max(*sent_bytes, *received)


def seconds(sent: Sequence[Sequence[float]], moved: float = 0.0, link: Link | None = None) -> float:
    """Models the time of an exchange: the busiest link at the write rate, and a barrier of the ranks.

    ``moved`` bytes move in a GPU's memory at the same time. Combine moves the experts' rows, the received sums and
    the result; dispatch moves next to nothing. The kernel that quantizes tokens is not part of the model.
    """
    link = link or Link()
    return max(busiest(sent) / link.writes, moved / link.memory) + link.meeting


def measure(ranks: int, wanted: Sequence[Case], limit: float = math.inf) -> Iterator[Line | str]:
    """Runs a process on each GPU and yields each line when it is ready, or an error message.

    No case starts after ``limit`` seconds.
    """
    from torch import multiprocessing

    settings.pass_on(SETTINGS)
    context = multiprocessing.get_context("spawn")
    queue_: Any = context.Queue()
    deadline = time.time() + limit
    port = 20000 + os.getpid() % 20000
    arguments = (ranks, port, list(wanted), deadline, queue_)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        running = ranks
        while running:
            try:
                line = queue_.get(timeout=1)
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


def _rank(rank: int, ranks: int, port: int, wanted: Sequence[Case], deadline: float, queue_: Any) -> None:
    """The process of one rank."""
    from torch import distributed as dist

    try:
        torch.cuda.set_device(rank)
        address, device = f"tcp://127.0.0.1:{port}", torch.device("cuda", rank)
        dist.init_process_group("nccl", init_method=address, rank=rank, world_size=ranks, device_id=device)
        for case in wanted:
            if worst(time.time() > deadline):
                break
            line = Measurement(case, rank, ranks).line()
            if rank == 0:
                queue_.put(line)
    except Exception:
        queue_.put(f"rank {rank}: {traceback.format_exc()}")
        raise
    queue_.put(None)
    torch.cuda.synchronize()
    dist.barrier()


def worst(value: float) -> float:
    """The maximum over the ranks."""
    from torch import distributed as dist

    local = torch.tensor(float(value), dtype=torch.float32, device="cuda")
    dist.all_reduce(local, dist.ReduceOp.MAX)
    return local.item()


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
        sizes, limits = (self.experts, self.chosen, self.hidden), {"max_tokens": case.tokens, "time_limit": TIMEOUT}
        self.exchange = Exchange(None, *sizes, **limits)
        self.over_nccl = Exchange(None, *sizes, **limits, symmetric=False)

    def line(self) -> Line:
        """Measures the case."""
        single_gpu = self._pass_times(None)
        torch.cuda.empty_cache()
        over_nccl = self._pass_times(self.over_nccl)
        torch.cuda.empty_cache()
        all_gpus = self._pass_times(self.exchange)
        steps = self._steps()
        sent = self._sent_tokens()
        received = self.exchange.is_sent(self.routing.indices).sum().item() - sent[self.rank][self.rank]
        moved_bytes = worst(self.rows + received + self.case.tokens) * 2 * self.hidden
        to_experts, to_ranks = ([[n * size for n in row] for row in sent] for size in (self.row_bytes, 2 * self.hidden))
        modelled = seconds(to_experts), seconds(to_ranks, moved_bytes)
        times = (
            *steps,
            *all_gpus,
            *single_gpu,
            busiest(to_experts),
            busiest(to_ranks),
            self._copy(),
            *(each * 1e6 for each in modelled),
            self.case.flops,
            *over_nccl,
        )
        names = [field.name for field in fields(Line)][5:]
        case = self.case
        return Line(case.model, case.routing, case.fp8, case.tokens, self.ranks, **dict(zip(names, times, strict=True)))

    def _median(self, call: Callable[[], Any], repetitions: int = 9) -> float:
        """Median microseconds of a call that all ranks start together after a barrier."""
        transport = self.exchange.transport
        times_us = []
        for _ in range(repetitions + 2):
            torch.cuda._sleep(3_000_000)  # the GPU sleeps until the host has enqueued the call
            transport.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times_us.append(start.elapsed_time(end) * 1000)
        return worst(sorted(times_us[2:])[repetitions // 2])

    def _weights(self, count: int) -> Iterator[Any]:
        """Up and down weights of ``count`` experts."""
        shapes = ((count, 2 * self.inner, self.hidden), (count, self.hidden, self.inner))
        return (torch.empty(s, device="cuda", dtype=torch.bfloat16).normal_(0, s[2] ** -0.5) for s in shapes)

    def _pass_times(self, group: Any) -> tuple[float, float]:
        """Microseconds of a forward and a backward pass."""
        from cudnn.ops import moe_mlp

        up, down = self._weights(self.experts // (self.ranks if group is not None else 1))
        inputs = [self.x, *(t.requires_grad_() for t in (up, down))]
        weights = self.routing.weights.detach().requires_grad_()
        routing = self.routing._replace(weights=weights)
        gradient = torch.randn_like(self.x)

        def forward() -> Any:
            return moe_mlp(self.x, routing, up, down, group=group, fp8=self.case.recipe or False)

        def backward() -> None:
            torch.autograd.grad(output[0], [*inputs, weights], gradient, retain_graph=True)

        forward_us = self._median(forward)
        output = [forward()]
        return forward_us, self._median(backward)

    def _steps(self) -> tuple[float, float, float]:
        """Microseconds of dispatch, of the experts' computation, and of combine."""
        from cudnn.moe import layer, parallel
        from cudnn.moe.experts import Experts, grouped_gemm_ops

        transport = self.exchange.transport
        up, down = self._weights(self.exchange.local_experts)
        act_params = [1.0, 1.702, 7.0, -7.0]
        experts = Experts([up], [down], None, None, "swiglu", act_params, "interleaved", self.case.recipe)
        x, fp8 = self.x.detach(), self.case.fp8

        def dispatch() -> Any:
            rows = parallel.sent_rows(x, fp8)
            return transport.dispatch(rows, self.routing.indices, self.routing.weights.detach())

        def compute() -> Any:
            permutation = parallel.permutation_of(local, self.exchange, sent)
            arguments = (parallel.received_rows(tokens, fp8), weights, permutation, experts, False)
            rows, _ = layer.forward(grouped_gemm_ops(x, experts), *arguments, combine=False)
            return permutation, rows

        with torch.no_grad():
            tokens, local, weights, sent = dispatch()
            permutation, rows = compute()
            self.rows, self.row_bytes = int(permutation.offsets[-1]), tokens.shape[1] * tokens.element_size()
            return (
                self._median(dispatch),
                self._median(compute),
                self._median(lambda: transport.combine(rows, permutation.scatter_idx, weights, sent)),
            )

    def _sent_tokens(self) -> list[list[float]]:
        """Tokens that each rank sends to each rank."""
        from torch import distributed as dist

        local = self.exchange.is_sent(self.routing.indices).sum(0)
        gathered = [torch.empty_like(local) for _ in range(self.ranks)]
        dist.all_gather(gathered, local)
        return [[float(count) for count in counts.tolist()] for counts in gathered]

    def _copy(self) -> float:
        """Bytes per microsecond of a copy to the next GPU; all GPUs copy at once."""
        target = self.exchange.transport.tokens.buffer((self.rank + 1) % self.ranks)
        source = torch.empty_like(target)
        return source.nbytes / self._median(lambda: target.copy_(source))


def results(run: Run, lines: Sequence[Line]) -> Iterator[Result]:
    """The lines of a result file: a shape is tokens of a rank, hidden and intermediate size, experts, top-k, ranks.

    Layers in bf16 and in fp8 are candidates for the same case.
    """
    for line in lines:
        experts, chosen, hidden, inner = MODELS[line.model]
        shape = "x".join(map(str, (line.tokens, hidden, inner, experts, chosen, line.ranks)))
        start = (run.hardware, run.driver, run.cuda, run.torch, run.commit, run.date, "moe_ranks", "bf16", shape)
        fp8 = " fp8" if line.fp8 else ""
        for which in ("forward", "backward"):
            case = f"{line.model} {line.routing} {which}"
            candidates = {f"MoE{fp8}, {line.ranks} GPUs": "", f"MoE{fp8}, 1 GPU": "one_"}
            for name, prefix in (candidates | {f"all_to_all_single{fp8}, {line.ranks} GPUs": "a2a_"}).items():
                time, rate = getattr(line, prefix + which), line.teraflops(prefix + which)
                common = (*start, case, name, version_of(OURS_PACKAGE), 1)
                yield Result(*common, "time", significant(time), "us", 0.0)
                yield Result(*common, "rate", significant(rate), "TFLOP/s", 0.0)
        for which in ("dispatch", "combine"):
            case, name = f"{line.model} {line.routing} {which}", f"MoE{fp8}, exchange"
            common = (*start, case, name, version_of(OURS_PACKAGE), 1)
            yield Result(*common, "time", significant(getattr(line, which)), "us", 0.0)
            yield Result(*common, "rate", significant(line.rate(which) * 1e-3), "GB/s", 0.0)
            yield Result(*common, "bytes", significant(getattr(line, f"{which}_bytes") * 1e-6), "MB", 0.0)


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """Writes one row for each measurement; the columns are the fields of :class:`Line`."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)])
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
