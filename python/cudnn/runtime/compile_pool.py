"""Compiles kernels in parallel worker processes while the program goes on.

:func:`submit` queues kernels; :func:`kernels.kernel` waits for those that it needs. Each thread of the pool has one
worker process, which ends with the queue. The calling process reads and writes the cache: of several processes that
need the same kernel, such as the ranks of ``torchrun`` on one host, one compiles it and the others read its file.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from cudnn import settings
from cudnn.runtime import cache
from cudnn.runtime.recording import Key

MOST_WORKERS = 16  # each takes 0.5 GB
SHOW_AFTER = 2.0  # seconds after which a terminal shows the progress
_logger = logging.getLogger("cudnn.launch")


class WorkerError(Exception):
    """A worker process could not start, died, or failed to compile."""


class Worker:
    """A running worker process, from the side that gives it work."""

    def __init__(self) -> None:
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Without an architecture the DSL asks the CUDA driver, whose initialization takes seconds a process.
        env = {"CUTE_DSL_ARCH": "sm_90a", **os.environ, "PYTHONPATH": paths}
        command = [sys.executable, "-m", "cudnn.runtime.compile_worker"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        except (OSError, ValueError, TypeError) as error:  # also where sys.executable is empty
            raise WorkerError(f"{command[0]!r} cannot be started: {error}") from None

    def build(self, key: Key) -> tuple[bytes, float]:
        """The object file of a kernel, and the seconds that it took to compile."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump(key, stdin)
            stdin.flush()
            content, seconds, error = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerError(f"the process ended with status {self._process.poll()}: {error}") from None
        if error:
            raise WorkerError(error)
        return content, seconds

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # the rest of the input cannot be written
                stream.close()
        self._process.wait()


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
        self._threads = 0
        self._progress = _Progress()

    def submit(self, keys: Iterable[Key]) -> list[Future[bytes]]:
        """Queues kernels, the first ones first, unless they are queued; returns the futures of their object files."""
        keys = list(keys)
        with self._lock:
            new = [key for key in dict.fromkeys(keys) if key not in self._futures]
            self._futures.update({key: Future() for key in new})
            start = _local_rank() * len(new) // _local_ranks()  # ranks of a host begin with different kernels
            self._queue.extend(new[start:] + new[:start])
            self._progress.add(len(new))
            for _ in range(min(jobs(), len(self._queue)) - self._threads):
                self._threads += 1
                threading.Thread(target=self._work, name="cudnn-compile", daemon=True).start()
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

    def _work(self) -> None:
        """A thread of the pool: compiles until the queue is empty."""
        worker: Worker | None = None
        try:
            while (key := self._next()) is not None:
                future = self._futures[key]
                try:
                    worker = worker or self._start_worker()
                    future.set_result(self._compile(key, worker))
                except cache.BusyError:
                    with self._lock:
                        self._busy.add(key)
                        self._queue.append(key)
                    continue
                except BaseException as error:  # the caller compiles it itself and sees its error
                    future.set_exception(error)
                    if isinstance(error, WorkerError):
                        self._end_worker(worker)
                        worker = None
                self._progress.advance()
        finally:
            self._end_worker(worker)

    def _next(self) -> Key | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._threads -= 1
            return None

    def _compile(self, key: Key, worker: Worker) -> bytes:
        return cache.fetch(self._entry_of(*key), lambda: worker.build(key)[0], wait=key in self._busy)

    def _start_worker(self) -> Worker:
        worker = Worker()
        self._workers.add(worker)
        return worker

    def _end_worker(self, worker: Worker | None) -> None:
        if worker is not None:
            self._workers.discard(worker)
            worker.close()

    def close(self) -> None:
        """Drops the queue and ends the workers."""
        with self._lock:
            self._queue.clear()
        for worker in list(self._workers):
            with contextlib.suppress(OSError):
                worker.close()


def jobs() -> int:
    """How many workers this process may have: the CPUs that it may use, shared with the other ranks of its host."""
    if (chosen := settings.COMPILE_JOBS.get()) is not None:
        return chosen
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cpus // _local_ranks()))


def _local_ranks() -> int:
    """The number of ranks that ``torchrun`` started on this host."""
    return max(1, _variable("LOCAL_WORLD_SIZE", 1))


def _local_rank() -> int:
    return min(max(0, _variable("LOCAL_RANK", 0)), _local_ranks() - 1)


def _variable(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else default


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
