"""CUDA graphs through the driver: nodes added one after the other, copies and a graph inside the graph; and graphs that
plans keep, to launch them again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Generator
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from cudnn.backend import library
from cudnn.backend.handle import Handle, on_device
from cudnn.errors import refusal

_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
CALLS_UNTIL_ASKED = 32  # a GPU that is as many calls behind does not wait for the host; to ask takes a few us


class _Side(ctypes.Structure):
    """Half of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x_bytes", c_size_t), ("y", c_size_t), ("z", c_size_t), ("level", c_size_t), ("memory_type", c_int),
        ("host", c_void_p), ("device", c_uint64), ("array", c_void_p), ("reserved", c_void_p), ("pitch", c_size_t),
        ("height", c_size_t),
    )  # fmt: skip


class Copy(ctypes.Structure):
    """A copy as a node wants it: CUDA_MEMCPY3D of cuda.h."""

    _fields_ = (
        ("source", _Side), ("target", _Side), ("width_bytes", c_size_t), ("height", c_size_t), ("depth", c_size_t)
    )  # fmt: skip


def words_to_device(target: int, words: ctypes.Array[Any]) -> Copy:
    """A copy from host memory, which must outlive the graph."""
    size = ctypes.sizeof(words)
    source = _Side(memory_type=_HOST, host=ctypes.addressof(words), pitch=size)
    return Copy(source, _Side(memory_type=_DEVICE, device=target, pitch=size), size, 1, 1)


def upper_halves(target: int, source: int, count: int) -> Copy:
    """``count`` FLOAT numbers to BFLOAT16, as ``memory.copy_upper_halves`` does it."""
    wide = _Side(x_bytes=2, memory_type=_DEVICE, device=source, pitch=4)
    return Copy(wide, _Side(memory_type=_DEVICE, device=target, pitch=2), 2, count, 1)


@functools.cache
def unchecked(name: str) -> Any:
    """A function of the driver that converts nothing and checks nothing, for the hot path."""
    return ctypes.CDLL("libcuda.so.1")[name]


def _driver(name: str, *arguments: Any) -> None:
    status = unchecked(name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed: CUDA driver error {status}.")


def _is_empty(graph: int) -> bool:
    count = c_size_t()
    _driver("cuGraphGetNodes", c_void_p(graph), None, ctypes.byref(count))
    return not count.value


class Chain:
    """Copies, a plan and copies again, each node after the one before, in a ``cudaGraph_t`` that was empty.

    Args:
        handle: Its device is where the copies run.
        graph: Address of the ``cudaGraph_t``.
        fill: Puts the plan's own nodes into an empty graph.

    Raises:
        ValueError: the graph has nodes.
        RuntimeError: the driver refuses a node.
    """

    def __init__(
        self, handle: Handle, graph: int, before: list[Copy], fill: Callable[[int], None], after: list[Copy]
    ) -> None:
        self._graph = graph
        self._last: list[c_void_p] = []
        if not _is_empty(graph):
            raise ValueError(
                refusal("populate_cuda_graph", "graph", "a CUDA graph with nodes", "an empty one",
                        "make another with cudaGraphCreate, and add it to yours as a child graph")
            )  # fmt: skip
        with on_device(handle.device) as context:
            self._before = [self._add_copy(copy, context) for copy in before]
            inner = c_void_p()
            _driver("cuGraphCreate", ctypes.byref(inner), c_uint(0))
            try:
                fill(inner.value or 0)
                self._plan = self._add("cuGraphAddChildGraphNode", inner)
            finally:
                _driver("cuGraphDestroy", inner)  # the node holds a clone
            self._after = [self._add_copy(copy, context) for copy in after]

    def _add_copy(self, copy: Copy, context: c_void_p) -> c_void_p:
        return self._add("cuGraphAddMemcpyNode", ctypes.byref(copy), context)

    def _add(self, function: str, *arguments: Any) -> c_void_p:
        node = c_void_p()
        previous = (c_void_p * len(self._last))(*[last.value for last in self._last])
        _driver(function, ctypes.byref(node), c_void_p(self._graph), previous, c_size_t(len(previous)), *arguments)
        self._last = [node]
        return node

    def update(self, handle: Handle, before: list[Copy], fill: Callable[[int], None], after: list[Copy]) -> None:
        """Gives the nodes new addresses; ``fill`` updates the plan's own."""
        with on_device(handle.device):
            for node, copy in zip([*self._before, *self._after], [*before, *after], strict=True):
                _driver("cuGraphMemcpyNodeSetParams", node, ctypes.byref(copy))
            inner = c_void_p()
            _driver("cuGraphChildGraphNodeGetGraph", self._plan, ctypes.byref(inner))
            fill(inner.value or 0)


@contextlib.contextmanager
def _apart_from_captures() -> Generator[None]:
    """What this thread calls here neither breaks nor joins a capture, be it of another thread."""
    mode = c_int(_RELAXED)
    _driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def is_capturing(handle: Handle) -> bool:
    """Whether the handle's stream is being captured, or cannot be asked while another one is."""
    return bool(unchecked("cuStreamIsCapturing")(handle.queue, handle.capture_result) or handle.capturing.value)


def ask_whether_it_keeps_up(handle: Handle) -> None:
    """Sets the handle's ``keeps_up``, for the next calls too; False at first, and for a stream that is being captured.

    A GPU that has passed the place in the stream where it was asked before waits for the host, or nearly so. Whether
    the stream is empty would say too little: the launch just before is always on its way.
    """
    handle.until_asked = CALLS_UNTIL_ASKED
    handle.keeps_up = passed = False
    if is_capturing(handle):
        return
    with contextlib.suppress(RuntimeError), on_device(handle.device), _apart_from_captures():
        if handle.marker is None:
            marker = c_void_p()
            _driver("cuEventCreate", ctypes.byref(marker), c_uint(_DISABLE_TIMING))
            handle.marker = marker
        else:
            passed = not unchecked("cuEventQuery")(handle.marker)
        _driver("cuEventRecord", handle.marker, handle.queue)
        handle.keeps_up = passed


def executable(handle: Handle, fill: Callable[[int], None]) -> Any:
    """An executable CUDA graph of what ``fill`` puts into an empty one, as an argument of ``cuGraphLaunch``.

    Raises:
        RuntimeError: the driver refuses, or the handle's stream is of another context than the device's primary one,
            such as a green context, whose SMs the nodes would not keep to.
    """
    graph, made, home = c_void_p(), c_void_p(), c_void_p()
    with on_device(handle.device) as context, _apart_from_captures():
        _driver("cuStreamGetCtx", handle.queue, ctypes.byref(home))
        if home.value != context.value:
            raise RuntimeError("its stream does not belong to the primary context of the device")
        _driver("cuGraphCreate", ctypes.byref(graph), c_uint(0))
        try:
            fill(graph.value or 0)
            _driver("cuGraphInstantiateWithFlags", ctypes.byref(made), graph, c_uint64(0))
        finally:
            _driver("cuGraphDestroy", graph)
    return library.pointer_argument(made.value or 0)


def destroy_executable(made: Any) -> None:
    """Destroys an executable graph, once what it has launched is done."""
    with contextlib.suppress(RuntimeError), _apart_from_captures():  # the device may have been reset
        _driver("cuGraphExecDestroy", made)
