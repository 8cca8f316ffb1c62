"""Where kernels are launched, the launch is shown to the captures of :mod:`cudnn.runtime.launch_sequence`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class LaunchCapture(Protocol):
    """Records the launches of one thread."""

    thread: int

    def record(self, function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Takes a kernel, its signature and the arguments of a launch."""
        ...


captures: list[LaunchCapture] = []
"""The active captures of all threads. Code that launches a kernel calls :func:`record` if there is any."""


def record(function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Shows a launch to the captures of this thread."""
    for capture in captures:
        if capture.thread == threading.get_ident():
            capture.record(function, slots, arguments)
