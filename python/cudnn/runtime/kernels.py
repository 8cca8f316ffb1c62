"""A kernel for a configuration and an architecture: loaded once per process, compiled once per user."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import hashlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cudnn.errors import make_error
from cudnn.lazy import torch
from cudnn.runtime import cache, loader
from cudnn.runtime.compile_pool import Pool, jobs, log_compilation
from cudnn.runtime.recording import Key

_logger = logging.getLogger("cudnn.launch")
_lock = threading.Lock()  # the DSL compiles one kernel at a time
# The architecture that this context emulates: what the DSL compiles there calls the emulator, no GPU could run it.
emulated: contextvars.ContextVar[str] = contextvars.ContextVar("cudnn_emulation", default="")
_loaded: dict[tuple[str, Any, str], Callable[..., None]] = {}
_emulated: dict[tuple[str, Any, str], Callable[..., None]] = {}


def kernel(source: str, configuration: Any, arch: str) -> Callable[..., None]:
    """The kernel ``module:class`` for a configuration, compiled for ``arch``, callable on raw PyTorch tensors.

    The configuration lists the arguments of its call, by ``cudnn_kernels.signature``.
    """
    key = (source, configuration, arch)
    with _lock:
        if key not in _loaded:
            _loaded[key] = loader.load(_object_file(key))
        return _loaded[key]


def _object_file(key: Key) -> bytes:
    """A kernel's object file: from the cache, from a worker, or compiled here.

    A kernel that the cache lacks starts the compilation of all that the operation needs: see :class:`CompileAhead`.
    """
    content = cache.lookup(entry(*key))
    if content is not None:
        return content
    future = pool().pending(key)
    if future is None and not emulated.get():
        _compile_ahead(key[2])
        future = pool().pending(key)
    if future is not None:
        try:
            return pool().take(key, future)
        except Exception as error:
            _logger.warning("a worker did not compile %s: %s; this process compiles it", key[0], error)
    return cache.fetch(entry(*key), lambda: build(*key))


class _Operation(threading.local):
    """What lists the kernels that this thread's operation needs; None outside of one."""

    kernels: Callable[[str], Iterable[Key]] | None = None


_operation = _Operation()


class CompileAhead:
    """Within the block, the first kernel that the cache lacks starts the compilation of all that ``keys`` lists.

    ``keys`` takes the architecture. It is not called if the cache has every kernel of the block. An outer block has
    precedence.
    """

    __slots__ = ("_keys", "_outer")

    def __init__(self, keys: Callable[[str], Iterable[Key]]) -> None:
        self._keys = keys

    def __enter__(self) -> None:
        self._outer = _operation.kernels
        if self._outer is None:
            _operation.kernels = self._keys

    def __exit__(self, *_: object) -> None:
        _operation.kernels = self._outer


def compile_all(keys: Iterable[Key]) -> None:
    """Compiles the kernels that the cache lacks, in parallel, and waits for them.

    Raises:
        Exception: what the compiler raises.
    """
    missing = _missing(keys)
    if len(missing) > 1 and jobs():
        pool().submit(missing)
    for key in missing:
        _object_file(key)


@contextlib.contextmanager
def compile_in_background(keys: Callable[[], Iterable[Key]]) -> Iterator[None]:
    """Workers start at the beginning of the block; at its end, what the cache lacks of ``keys`` is submitted to them.

    Nothing waits for it, and nothing is raised but what the block raises: a call that needs a kernel which failed
    compiles it, and raises the error.
    """
    try:
        wanted = jobs() > 0
    except ValueError:  # of the variable, which a call raises
        wanted = False
    with pool().starting() if wanted else contextlib.nullcontext():
        yield
        if not wanted:
            return
        try:
            with ThreadPoolExecutor(1) as thread:  # which has none of the caller's modes of PyTorch
                pool().submit(thread.submit(lambda: _missing(keys())).result())
        except Exception as error:
            _logger.info("kernels are compiled at the first call: %s: %s", type(error).__name__, error)


def _missing(keys: Iterable[Key]) -> list[Key]:
    return [key for key in keys if key not in _loaded and cache.lookup(entry(*key)) is None]


def _compile_ahead(arch: str) -> None:
    """Submits the kernels of the thread's :class:`CompileAhead` that the cache lacks, if there are several; once."""
    keys, _operation.kernels = _operation.kernels, _nothing
    if keys is None:
        _operation.kernels = None
        return
    if not jobs():
        return
    with pool().starting():
        try:
            with torch.inference_mode(False):  # backward passes are recorded too
                missing = _missing(keys(arch))
        except Exception as error:  # the call goes on, and raises if the error is the caller's
            _logger.warning("kernels are compiled one after another: %s: %s", type(error).__name__, error)
            return
        if len(missing) > 1:
            pool().submit(missing)


def _nothing(arch: str) -> Iterable[Key]:
    return ()


_pool: Pool | None = None


def pool() -> Pool:
    """This process's pool of compile workers."""
    global _pool
    if _pool is None:
        _pool = Pool(entry)
    return _pool


def _end_pool() -> None:
    if _pool is not None:
        _pool.close()


def _forget_pool() -> None:
    """In a forked process, which has none of its parent's threads."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


atexit.register(_end_pool)
os.register_at_fork(after_in_child=_forget_pool)


def emulated_kernel(source: str, configuration: Any, arch: str) -> Callable[..., None]:
    """The same within ``cudnn.emulation``, of this process alone."""
    with _lock:
        if (source, configuration, arch) not in _emulated:
            _emulated[source, configuration, arch] = compile_kernel(source, configuration, arch)
        return _emulated[source, configuration, arch]


def prepared(source: str, configuration: Any, arch: str, store: cache.Store) -> bool:
    """Whether a kernel is in a cache."""
    return cache.find(store, entry(source, configuration, arch)) is not None


def prepare(source: str, configuration: Any, arch: str, store: cache.Store) -> None:
    """Compiles a kernel into a cache. Raises OSError."""
    with _lock:
        store.write(entry(source, configuration, arch), build(source, configuration, arch))


def entry(source: str, configuration: Any, arch: str) -> cache.Entry:
    name = source.rpartition(":")[2]
    return cache.Entry(name, arch, repr(configuration), source_digest(), loader.toolchain())


def compile_kernel(source: str, configuration: Any, arch: str, exports: bool = False) -> Any:
    """Compiles with the CuTe DSL, now and for this process, to be called or, with ``exports``, to be exported."""
    from cudnn_kernels import compiler

    start = time.perf_counter()
    compiled = compiler.compile_kernel(source, configuration, arch, exports)
    log_compilation((source, configuration, arch), time.perf_counter() - start)
    return compiled


def build(source: str, configuration: Any, arch: str) -> bytes:
    """Compiles a kernel in this process and returns its object file."""
    if emulated.get():
        name = source.rpartition(":")[2]
        got, hint = "a call within cudnn.emulation", "leave arch out, which is for GPUs, or compile before"
        raise make_error(RuntimeError, name, "compilation for a GPU", got, "calls outside of it", hint)
    compiled = compile_kernel(source, configuration, arch, exports=True)
    from cudnn_kernels import compiler

    return compiler.export(compiled)


@functools.cache
def source_digest() -> str:
    """SHA-256 of the source of all kernels: a change to any of them makes the compiled ones stale."""
    spec = importlib.util.find_spec("cudnn_kernels")
    if spec is None or spec.origin is None:
        raise ImportError("the package cudnn_kernels, a part of cudnn-fused, is missing")
    root = Path(spec.origin).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()
