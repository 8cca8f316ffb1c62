"""Threads that begin at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def together(work: Callable[[int], object], count: int = 2) -> None:
    """Runs ``work(0)``, ``work(1)`` ... at once; raises what one of them raised."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait(60)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, number) for number in range(count)]:
            done.result(120)
