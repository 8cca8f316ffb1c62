"""Ranks for tests: processes over gloo, or threads with shared memory."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cudnn.moe import exchange, sort


def _child(rank: int, ranks: int, path: str, function: Callable[[int], None], failures: Any) -> None:
    gc.freeze()  # a gloo group of the parent, among its garbage, would be freed here and wait for threads of the parent
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks)
        function(rank)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        failures.put(traceback.format_exc())
        sys.exit(1)


def run_processes(ranks: int, path: Path, function: Callable[[int], None]) -> None:
    """Runs a function in ``ranks`` processes that form a group."""
    sort(torch.zeros(1, 1, dtype=torch.int32), 1)  # what the first call of an operator imports, once for all
    context = multiprocessing.get_context("fork")
    failures = context.SimpleQueue()
    arguments = (ranks, str(path / "store"), function, failures)
    processes = [context.Process(target=_child, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        process.kill()
    assert failures.empty(), failures.get()
    assert [process.exitcode for process in processes] == [0] * ranks


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(eq=False)
class SharedBuffer:
    """Replaces :class:`cudnn.moe.exchange.Shared`."""

    local: torch.Tensor
    addresses: torch.Tensor
    barrier: Callable[[], Any]


class Rank:
    """Replaces a process group, on one rank."""

    def __init__(self, number: int) -> None:
        self.number = number


class Threads:
    """Threads in place of processes."""

    def __init__(self, ranks: int, monkeypatch: pytest.MonkeyPatch, store: Any = None) -> None:
        self.ranks, self.failures = ranks, list[str]()
        self.barrier = threading.Barrier(ranks, timeout=120)
        self.memory: defaultdict[int, list[Any]] = defaultdict(lambda: [None] * ranks)
        self.num_buffers = [0] * ranks
        self.groups = [Rank(number) for number in range(ranks)]
        self.store = store or dist.HashStore()
        group = SimpleNamespace(
            ProcessGroup=Rank,
            group=SimpleNamespace(WORLD=None),
            get_rank=lambda rank: rank.number,
            get_world_size=lambda _: ranks,
        )
        monkeypatch.setattr(exchange, "dist", group)
        monkeypatch.setattr(exchange, "store_of", lambda _: self.store)
        monkeypatch.setattr(exchange, "Shared", self.shared)

    def shared(self, shape: tuple[int, ...], dtype: torch.dtype, parallel: exchange.Exchange) -> Any:
        """Allocates a rank's next buffer."""
        rank, number = parallel.rank, self.num_buffers[parallel.rank]
        self.num_buffers[rank] += 1
        local = self.memory[number][rank] = torch.full(shape, -99).to(dtype)
        self.barrier.wait()
        addresses = torch.tensor([buffer.data_ptr() for buffer in self.memory[number]])
        return SharedBuffer(local, addresses, self.barrier.wait)

    def run(self, function: Callable[[Rank], Any]) -> None:
        """Runs a function for each rank."""
        threads = [threading.Thread(target=self._rank, args=(group, function)) for group in self.groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.failures, "\n".join(self.failures)

    def _rank(self, rank: Rank, function: Callable[[Rank], Any]) -> None:
        try:
            function(rank)
        except BaseException:
            self.failures.append(traceback.format_exc())
            self.barrier.abort()
