"""Kernels beside each other, on two streams."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def forked(device: torch.device) -> Iterator[AbstractContextManager[object]]:
    """Within it, what is launched in the context that it gives runs beside the rest.

    That goes to a second stream, which follows what the current stream has so far; when this context ends, also by an
    error, the current stream follows the second one. So the work of both can be captured in one CUDA graph, and memory
    that was allocated before on the current stream needs no other care. What is allocated in the inner context belongs
    to the second stream, and must be given back in it. On the CPU nothing is moved.
    """
    if device.type != "cuda":
        yield nullcontext()
        return
    first = torch.cuda.current_stream(device)
    second = _second(device, first.cuda_stream)
    second.wait_stream(first)
    try:
        yield torch.cuda.stream(second)
    finally:
        first.wait_stream(second)


@functools.cache
def _second(device: torch.device, first: int) -> torch.cuda.Stream:
    """The second stream of a stream: a thread that captures one must not take in what another one launches."""
    return torch.cuda.Stream(device)
