"""Products of tiles are too small to be shared among threads: NumPy's BLAS would spend its time in handing them out."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from threadpoolctl import ThreadpoolController

_lock = threading.Lock()
_inside: list[Any] = []  # a limit for each thread that is within the block


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextlib.contextmanager
def single_threaded() -> Iterator[None]:
    """Within the block, and as long as another thread is within one, NumPy's BLAS runs on the thread that calls it."""
    with _lock:
        _inside.append(_inside[0] if _inside else _controller().limit(limits=1, user_api="blas"))
    try:
        yield
    finally:
        with _lock:
            limit = _inside.pop()
            if not _inside:
                limit.restore_original_limits()
