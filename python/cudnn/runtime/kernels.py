"""A kernel for a configuration and an architecture: loaded once per process, compiled once per user."""

from __future__ import annotations

import contextvars
import functools
import hashlib
import importlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudnn.errors import make_error
from cudnn.runtime import cache, loader

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
            entry = _entry(source, configuration, arch)
            _loaded[key] = loader.load(cache.fetch(entry, lambda: _build(source, configuration, arch)))
        return _loaded[key]


def emulated_kernel(source: str, configuration: Any, arch: str) -> Callable[..., None]:
    """The same within ``cudnn.emulation``, of this process alone."""
    with _lock:
        if (source, configuration, arch) not in _emulated:
            _emulated[source, configuration, arch] = compile_kernel(source, configuration, arch)
        return _emulated[source, configuration, arch]


def prepared(source: str, configuration: Any, arch: str, store: cache.Store) -> bool:
    """Whether a kernel is in a cache."""
    return cache.find(store, _entry(source, configuration, arch)) is not None


def prepare(source: str, configuration: Any, arch: str, store: cache.Store) -> None:
    """Compiles a kernel into a cache. Raises OSError."""
    with _lock:
        store.write(_entry(source, configuration, arch), _build(source, configuration, arch))


def _entry(source: str, configuration: Any, arch: str) -> cache.Entry:
    name = source.rpartition(":")[2]
    return cache.Entry(name, arch, repr(configuration), source_digest(), loader.toolchain())


def compile_kernel(source: str, configuration: Any, arch: str) -> Any:
    """Compiles with the CuTe DSL, now and for this process."""
    from cudnn_kernels import compiler, fakes

    module_name, _, class_name = source.partition(":")
    module = importlib.import_module(module_name)
    start = time.perf_counter()
    kernel = getattr(module, class_name)(configuration)
    compiled = compiler.compile_for(arch, kernel, *fakes.arguments(configuration))
    _logger.info("compiled %s for %s in %.2f s: %r", class_name, arch, time.perf_counter() - start, configuration)
    return compiled


def _build(source: str, configuration: Any, arch: str) -> bytes:
    if emulated.get():
        name = source.rpartition(":")[2]
        got, hint = "a call within cudnn.emulation", "leave arch out, which is for GPUs, or compile before"
        raise make_error(RuntimeError, name, "compilation for a GPU", got, "calls outside of it", hint)
    compiled = compile_kernel(source, configuration, arch)
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
