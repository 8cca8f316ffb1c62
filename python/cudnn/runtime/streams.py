"""Concurrent kernels on two streams."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def forked(device: torch.device) -> Iterator[AbstractContextManager[object]]:
    """Yields a context whose launches run concurrently with those outside of it, on a second stream.

    The second stream waits for the current one at the start; at the end, also after an error, the current stream waits
    for the second one. So the work of both can be captured in one CUDA graph, and memory
    that was allocated before on the current stream needs no other care. Memory allocated in the inner context belongs
    to the second stream and must be freed in it. On the CPU nothing changes.
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
