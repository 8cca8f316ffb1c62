"""Runs kernels for operators: on CUDA tensors, or emulated on CPU tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from cudnn.gemm.formats import name_of
from cudnn.runtime import launch
from cudnn.runtime.launch_capture import captures, record
from cudnn_kernels.architecture import ARCHITECTURES

T = TypeVar("T")
DEFAULT_STREAM = 0


def has_kernel(tensor: torch.Tensor, where: str) -> bool:
    """Whether a kernel runs: on CUDA tensors, and within ``cudnn.emulation``. The reference runs on other CPU tensors.

    Raises:
        RuntimeError: no kernel for the device.
    """
    if tensor.is_cuda or launch.emulated_architecture():
        return True
    launch.log_reference_runs(where)
    return False


def architecture(tensor: torch.Tensor) -> str | None:
    """The architecture whose kernels run on a tensor's device; None for the reference."""
    return launch.device_architecture(tensor.get_device()) if tensor.is_cuda else launch.emulated_architecture()


class Kernel:
    """A kernel for a configuration, loaded at its first call on each device."""

    def __init__(self, source: str, configuration: Any) -> None:
        self.source, self.configuration = source, configuration
        self.loaded: dict[int, Callable[..., None]] = {}

    def __call__(self, first: torch.Tensor, *rest: Any) -> None:
        """Runs on PyTorch's current stream, with the arguments that the configuration lists before the stream."""
        index = first.get_device()
        if index < 0:
            launch.emulate(self.source, self.configuration, launch.emulated_architecture(), first, *rest, 0)
            return
        loaded = self.loaded.get(index) or self._load(index)
        stream = launch.raw_stream(None, index)
        loaded(first, *rest, stream)
        if captures:
            record(loaded, self.configuration.slots(), (first, *rest, stream))

    def _load(self, index: int) -> Callable[..., None]:
        arch = launch.device_architecture(index)
        launch.pick(dict.fromkeys(ARCHITECTURES, ""), arch, self.source)
        self.loaded[index] = launch.kernel(self.source, self.configuration, arch)
        return self.loaded[index]


@functools.cache
def kernel(source: str, config_type: Callable[..., Any], *fields: Any) -> Kernel:
    """The kernel for a configuration of a kind with these fields, of which types may be PyTorch's."""
    return Kernel(source, config_type(*(name_of(x) if isinstance(x, torch.dtype) else x for x in fields)))


def persistent(make: Callable[[], T]) -> T:
    """The result of ``make``, with memory that outlives CUDA graphs.

    It runs in a separate thread, on the default stream: PyTorch may allocate in the calling thread from the private
    pool of a CUDA graph, as ``torch.compile(mode="reduce-overhead")`` does, whose memory is reused at a replay.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


_CONSTANTS: dict[int, torch.Tensor] = {}  # never freed: any stream may still read them


def constant(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """A :func:`persistent` tensor that is never freed and never changes."""
    x = persistent(make)
    _CONSTANTS[x.untyped_storage().data_ptr()] = x
    return x


def is_constant(x: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of a :func:`constant`."""
    return x.untyped_storage().data_ptr() in _CONSTANTS


def run(source: str, configuration: Any, *arguments: Any) -> None:
    """Runs a kernel, on PyTorch's current stream, with the arguments that its configuration lists before the stream."""
    _of(source, configuration)(*arguments)


_of = functools.cache(Kernel)
