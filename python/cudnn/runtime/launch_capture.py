"""Where kernels are launched, the launch is shown to the captures of :mod:`cudnn.runtime.launch_sequence`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class LaunchCapture(Protocol):
    """Records the launches of one thread."""

    thread: int

    def record(self, function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Takes a kernel, its signature and the arguments of a launch."""
        ...

    def record_graph(self, graph: Any, data: Mapping[Any, Any], workspace: Any) -> None:
        """Takes a graph of cuDNN and the arguments of its ``execute``."""
        ...

    def call_outside(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """The result of ``function(*tensors)``, of which nothing else is recorded than that it was called."""
        ...


captures: list[LaunchCapture] = []
"""The active captures of all threads. Code that launched a kernel calls :func:`record` if there is any, code that
executed a graph :func:`record_graph`: after it, because what raised is not repeated.
"""


def record(function: Callable[..., None], slots: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Shows a launch to the captures of this thread."""
    for capture in tuple(captures):  # other threads change the list meanwhile, and a loop over it would skip one
        if capture.thread == threading.get_ident():
            capture.record(function, slots, arguments)


def record_graph(graph: Any, data: Mapping[Any, Any], workspace: Any) -> None:
    """Shows an execution of a graph to the captures of this thread."""
    for capture in tuple(captures):
        if capture.thread == threading.get_ident():
            capture.record_graph(graph, data, workspace)


def outside(function: Callable[..., T], *tensors: Any) -> T:
    """``function(*tensors)``, a tuple of tensors that depend on more than tensors, such as a cache.

    Captures of this thread do not record what it does: a repeated sequence calls it again, before all launches, and
    reads the new results.
    """
    for capture in tuple(captures):
        if capture.thread == threading.get_ident():
            return capture.call_outside(function, tensors)
    return function(*tensors)
