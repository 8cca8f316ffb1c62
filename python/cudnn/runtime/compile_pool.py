"""Compiles kernels in parallel worker processes while the program goes on.

:meth:`Pool.submit` queues kernels; :func:`cudnn.runtime.kernels.kernel` waits for those that it needs. Each thread of
the pool has one worker process, which ends with the queue. The calling process reads and writes the cache: of several
processes that need the same kernel, such as the ranks of ``torchrun`` on one host, one compiles it and the others read
its file.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from cudnn import settings
from cudnn.runtime import cache
from cudnn.runtime.recording import Key

MOST_WORKERS = 8  # each takes 0.5 GB; on 16 hyper-threads 8 workers are faster than 16
SHOW_AFTER = 2.0  # seconds after which a terminal shows the progress
_logger = logging.getLogger("cudnn.launch")


class WorkerError(Exception):
    """A worker process could not start, died, or failed to compile."""


class Worker:
    """A running worker process, from the side that gives it work."""

    def __init__(self, connection: socket.socket, group: subprocess.Popen[Any]) -> None:
        self._connection, self._stream, self.group = connection, connection.makefile("rwb"), group

    def build(self, key: Key) -> tuple[bytes, float]:
        """The object file of a kernel, and the seconds that it took to compile."""
        try:
            pickle.dump(key, self._stream)
            self._stream.flush()
            content, seconds, error = pickle.load(self._stream)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerError(f"the process ended: {error}") from None
        if error:
            raise WorkerError(error)
        return content, seconds

    def close(self) -> None:
        """Ends the process, after the kernel that it compiles, also if a forked process still has the connection."""
        with contextlib.suppress(OSError):  # the rest of the input cannot be written
            self._stream.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def kill(self) -> None:
        """Ends the processes of all workers that started together."""
        self.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group.pid, signal.SIGKILL)
        self.group.wait()


def start_workers(count: int) -> list[Worker]:
    """Starts worker processes: one imports the compiler, which takes seconds, and the others are forked from it.

    Raises:
        WorkerError: Python cannot be started.
    """
    pairs = [socket.socketpair() for _ in range(count)]
    descriptors = [theirs.fileno() for _, theirs in pairs]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    # Without an architecture the DSL asks the CUDA driver, whose initialization takes seconds a process.
    variables = {"CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cudnn_kernels.compile_worker", *map(str, descriptors)]
    options: dict[str, Any] = {"pass_fds": descriptors, "stdin": subprocess.DEVNULL, "start_new_session": True}
    try:
        group = subprocess.Popen(command, env=settings.environment_of_child(**variables), stdout=2, **options)
    except (OSError, ValueError, TypeError) as error:  # also where sys.executable is empty
        for ours, _ in pairs:
            ours.close()
        raise WorkerError(f"{command[0]!r} cannot be started: {error}") from None
    finally:
        for _, theirs in pairs:
            theirs.close()
    return [Worker(ours, group) for ours, _ in pairs]


class Pool:
    """Kernels that are being compiled, and the threads that do it.

    Args:
        entry_of: The cache's entry of a kernel.
    """

    def __init__(self, entry_of: Callable[..., cache.Entry]) -> None:
        self._entry_of = entry_of
        self._lock = threading.Lock()
        self._queue: collections.deque[Key] = collections.deque()
        self._futures: dict[Key, Future[bytes]] = {}
        self._busy: set[Key] = set()  # compiled by another process: waited for once nothing else is left
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._threads = 0
        self._progress = _Progress()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Starts workers, which import the compiler while the block finds out what it submits to them.

        Those that are not needed end with the block.
        """
        with self._lock:
            if not self._threads and not self._idle:
                with contextlib.suppress(WorkerError):  # ``submit`` tries again, and logs it
                    self._idle = start_workers(jobs())
        try:
            yield
        finally:
            with self._lock:
                idle, self._idle = self._idle, []
            for worker in idle:
                if any(other.group is worker.group for other in list(self._workers)):
                    worker.close()
                else:
                    worker.kill()

    def submit(self, keys: Iterable[Key]) -> list[Future[bytes]]:
        """Queues kernels, the first ones first, unless they are queued; returns the futures of their object files."""
        keys = list(keys)
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._futures]
            self._futures.update({key: Future() for key in new})
            start = _local_rank() * len(new) // _local_ranks()  # ranks of a host begin with different kernels
            self._queue.extend(new[start:] + new[:start])
            self._progress.add(len(new))
            self._start(min(jobs(), len(self._queue)) - self._threads)
            return [self._futures[key] for key in keys]

    def pending(self, key: Key) -> Future[bytes] | None:
        """The future of a kernel, which becomes the next one if it is still queued; None if it was not submitted."""
        with self._lock:
            if key in self._queue:
                self._queue.remove(key)
                self._queue.appendleft(key)
            return self._futures.get(key)

    def take(self, key: Key, future: Future[bytes]) -> bytes:
        """Waits for a kernel's object file, which the pool then forgets."""
        try:
            return future.result()
        finally:
            with self._lock:
                self._futures.pop(key, None)

    def _start(self, count: int) -> None:
        """Starts threads, each with a worker."""
        if count < 1:
            return
        workers: list[Worker | None] = [*self._idle[:count]]
        del self._idle[:count]
        try:
            workers += start_workers(count - len(workers)) if count > len(workers) else []
        except WorkerError as error:
            _logger.warning("kernels are compiled one after another: %s", error)
            workers = workers or [None]
        self._workers.update(worker for worker in workers if worker is not None)
        for worker in workers:
            self._threads += 1
            threading.Thread(target=self._work, args=(worker,), name="cudnn-compile", daemon=True).start()

    def _work(self, worker: Worker | None) -> None:
        """A thread of the pool: compiles until the queue is empty. Without a worker, it fails the futures."""
        while (key := self._next()) is not None:
            future = self._futures[key]
            try:
                future.set_result(self._compile(key, worker))
            except cache.BusyError:
                with self._lock:
                    self._busy.add(key)
                    self._queue.append(key)
                continue
            except BaseException as error:  # the caller compiles it itself and sees its error
                future.set_exception(error)
            self._progress.advance()
        if worker is not None:
            self._workers.discard(worker)
            worker.close()
            if all(other.group is not worker.group for other in (*self._workers, *self._idle)):
                worker.group.wait()  # reaps the process

    def _next(self) -> Key | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._threads -= 1
            return None

    def _compile(self, key: Key, worker: Worker | None) -> bytes:
        if worker is None:
            raise WorkerError("no process")

        def build() -> bytes:
            content, seconds = worker.build(key)
            log_compilation(key, seconds)
            return content

        return cache.fetch(self._entry_of(*key), build, wait=key in self._busy)

    def close(self) -> None:
        """Drops the queue and ends the workers."""
        with self._lock:
            self._queue.clear()
        for worker in list(self._workers):
            worker.kill()


def log_compilation(key: Key, seconds: float) -> None:
    """Logs that this process, or a worker, has compiled a kernel."""
    source, configuration, arch = key
    _logger.info("compiled %s for %s in %.2f s: %r", source.rpartition(":")[2], arch, seconds, configuration)


def jobs() -> int:
    """How many workers this process may have: the CPUs that it may use, shared with the other ranks of its host."""
    if (chosen := settings.COMPILE_JOBS.get()) is not None:
        return chosen
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cpus // _local_ranks()))


def _local_ranks() -> int:
    """The number of ranks that ``torchrun`` started on this host."""
    return max(1, settings.LOCAL_WORLD_SIZE.get())


def _local_rank() -> int:
    return min(settings.LOCAL_RANK.get(), _local_ranks() - 1)


class _Progress:
    """A line on the terminal while kernels are compiled; a line of the log when they are."""

    def __init__(self) -> None:
        self._lock, self._total, self._done, self._start = threading.Lock(), 0, 0, 0.0

    def add(self, count: int) -> None:
        with self._lock:
            if self._total == self._done:
                self._total, self._done, self._start = 0, 0, time.monotonic()
            self._total += count

    def advance(self) -> None:
        with self._lock:
            self._done += 1
            elapsed, is_last = time.monotonic() - self._start, self._done == self._total
            if sys.stderr is not None and sys.stderr.isatty() and elapsed > SHOW_AFTER:
                text = f"\rcudnn: compiling kernels, {self._done} of {self._total}, {elapsed:.0f} s"
                sys.stderr.write(text + "\n" * is_last)
                sys.stderr.flush()
            if is_last:
                _logger.info("compiled %d kernels in %.1f s", self._total, elapsed)
