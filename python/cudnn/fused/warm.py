"""Compiles configurations of the fused APIs ahead of time."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from cudnn.errors import make_error
from cudnn.fused.registry import AotPreset, aot_preset, compiled
from cudnn.runtime import kernels
from cudnn.runtime.architecture import ARCHITECTURES
from cudnn.runtime.cache import Store


@dataclass(frozen=True)
class Kernel:
    """A kernel to compile; ``label`` names its API, dtype and architecture."""

    label: str
    source: str
    configuration: Any
    arch: str


def architectures() -> tuple[str, ...]:
    """Those that kernels are written for."""
    return tuple(ARCHITECTURES.values())


def wanted(
    archs: Iterable[str],
    apis: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    shapes: Sequence[tuple[int, ...]] = (),
) -> list[Kernel]:
    """The kernels that the fused APIs need, each once: those of ``apis``, or all; for ``dtypes`` and ``shapes``, or for
    each API's presets.

    Raises:
        ValueError: no API has such a type, one of ``apis`` has no kernels for an architecture, or a shape is none.
        NotImplementedError: a shape that an API does not support.
    """
    chosen = {name: aot_preset(name) for name in apis or compiled()}
    dtype_names = list(dict.fromkeys(dtype for api in chosen.values() for dtype in api.dtypes))
    for dtype in dtypes:
        if dtype not in dtype_names:
            raise make_error(ValueError, "warm", "dtype", repr(dtype), ", ".join(dtype_names))
    kernels_by_key: dict[tuple[str, Any, str], Kernel] = {}
    for arch in archs:
        for name in apis:
            if arch not in chosen[name].architectures:
                raise make_error(ValueError, name, "architecture", arch, ", ".join(chosen[name].architectures))
        for name, api in ((name, api) for name, api in chosen.items() if arch in api.architectures):
            for shape in shapes or api.shapes:
                _check(name, api, shape)
                for dtype in [each for each in dtypes or api.dtypes if each in api.dtypes]:
                    for operation in api.objects(dtype, shape, arch):
                        operation.check_support()
                        for key in operation.kernels():
                            kernels_by_key.setdefault(key, Kernel(f"{name}, {dtype}, {arch}", *key))
    return list(kernels_by_key.values())


def _check(name: str, api: AotPreset, shape: Sequence[int]) -> None:
    if len(shape) != len(api.dimensions):
        got, allowed = "x".join(map(str, shape)), " x ".join(api.dimensions)
        raise make_error(ValueError, name, "shape", got, allowed, "choose the APIs that the shape is for")


def warm(chosen: Sequence[Kernel], store: Store, jobs: int = 1) -> Iterator[tuple[Kernel, float]]:
    """Compiles kernels that the cache does not have; yields each kernel and its compile time in seconds, 0 if cached.

    ``jobs`` processes compile at the same time, if there is so much to do.

    Raises:
        OSError, UntrustedFileError: the cache cannot be written.
    """
    store.make()
    missing = []
    for kernel in chosen:
        if kernels.prepared(kernel.source, kernel.configuration, kernel.arch, store):
            yield kernel, 0.0
        else:
            missing.append(kernel)
    jobs = min(jobs, len(missing))
    if jobs < 2:
        for kernel in missing:
            yield kernel, _prepare(kernel, store)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = {pool.submit(_prepare, kernel, store): kernel for kernel in missing}
        try:
            for task in as_completed(tasks):
                yield tasks[task], task.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare(kernel: Kernel, store: Store) -> float:
    start = time.perf_counter()
    kernels.prepare(kernel.source, kernel.configuration, kernel.arch, store)
    return time.perf_counter() - start
