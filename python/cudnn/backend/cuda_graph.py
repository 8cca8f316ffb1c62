"""CUDA graphs through the driver: chains of copies and a child graph, and graphs that replay repeated calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Generator
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from cudnn.backend import library
from cudnn.backend.handle import Handle, on_device
from cudnn.errors import CudnnError, make_error

_log = logging.getLogger("cudnn")
_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
CALLS_UNTIL_ASKED = 32  # a GPU that lags this many calls is not waiting for the host; a query takes a few us


class _MemcpyEndpoint(ctypes.Structure):
    """Half of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x_bytes", c_size_t),
        ("y", c_size_t),
        ("z", c_size_t),
        ("level", c_size_t),
        ("memory_type", c_int),
        ("host", c_void_p),
        ("device", c_uint64),
        ("array", c_void_p),
        ("reserved", c_void_p),
        ("pitch", c_size_t),
        ("height", c_size_t),
    )


class Copy(ctypes.Structure):
    """CUDA_MEMCPY3D of cuda.h."""

    _fields_ = (
        ("source", _MemcpyEndpoint),
        ("target", _MemcpyEndpoint),
        ("width_bytes", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
    )


def words_to_device(target: int, words: ctypes.Array[Any]) -> Copy:
    """A copy from host memory, which must outlive the graph."""
    size = ctypes.sizeof(words)
    source = _MemcpyEndpoint(memory_type=_HOST, host=ctypes.addressof(words), pitch=size)
    return Copy(source, _MemcpyEndpoint(memory_type=_DEVICE, device=target, pitch=size), size, 1, 1)


def upper_halves(target: int, source: int, count: int) -> Copy:
    """Converts ``count`` FLOAT numbers to BFLOAT16 by copying the upper half of each, which rounds towards zero."""
    fp32 = _MemcpyEndpoint(x_bytes=2, memory_type=_DEVICE, device=source, pitch=4)
    return Copy(fp32, _MemcpyEndpoint(memory_type=_DEVICE, device=target, pitch=2), 2, count, 1)


@functools.cache
def unchecked(name: str) -> Any:
    """A driver function without conversion and checks, for the hot path."""
    return ctypes.CDLL("libcuda.so.1")[name]


def _driver(name: str, *arguments: Any) -> None:
    try:
        function = unchecked(name)
    except AttributeError as error:
        raise RuntimeError(f"{name} failed: the CUDA driver is too old for it.") from error
    status = function(*arguments)
    if status:
        raise RuntimeError(f"{name} failed: CUDA driver error {status}.")


def _is_empty(graph: int) -> bool:
    count = c_size_t()
    _driver("cuGraphGetNodes", c_void_p(graph), None, ctypes.byref(count))
    return not count.value


class Chain:
    """Adds a chain of nodes to an empty ``cudaGraph_t``: copies, the plan as a child graph, and copies.

    Args:
        handle: The copies run on its device.
        graph: Address of the ``cudaGraph_t``.
        fill: Adds the plan's nodes to an empty graph.

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
            raise make_error(
                ValueError,
                "populate_cuda_graph",
                "graph",
                "a CUDA graph with nodes",
                "an empty one",
                "make another with cudaGraphCreate, and add it to yours as a child graph",
            )
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
        """Sets new addresses in the nodes; ``fill`` updates the plan's nodes."""
        with on_device(handle.device):
            for node, copy in zip([*self._before, *self._after], [*before, *after], strict=True):
                _driver("cuGraphMemcpyNodeSetParams", node, ctypes.byref(copy))
            inner = c_void_p()
            _driver("cuGraphChildGraphNodeGetGraph", self._plan, ctypes.byref(inner))
            fill(inner.value or 0)


class Event(c_void_p):
    """A ``CUevent``, destroyed with the handle that holds it: neither at the end of the process nor in a fork."""

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self.value and not is_finalizing():
            with contextlib.suppress(RuntimeError, OSError), _outside_captures():
                _driver("cuEventDestroy_v2", self)


@contextlib.contextmanager
def _outside_captures() -> Generator[None]:
    """Driver calls of this thread in the block neither invalidate nor join a stream capture of any thread."""
    mode = c_int(_RELAXED)
    _driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _driver("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def is_capturing(handle: Handle) -> bool:
    """Whether the handle's stream is being captured, or cannot be queried because another stream is."""
    return bool(unchecked("cuStreamIsCapturing")(handle.queue, handle.capture_result) or handle.capturing.value)


def ask_whether_it_keeps_up(handle: Handle) -> None:
    """Sets ``handle.keeps_up`` for the next calls; False at the first query and during a stream capture.

    A GPU that has passed the event of the previous query is about to wait for the host. Whether the stream is empty is
    no criterion: the launch just before is always in flight.
    """
    handle.until_asked = CALLS_UNTIL_ASKED
    handle.keeps_up = passed = False
    if is_capturing(handle):
        return
    with contextlib.suppress(RuntimeError), on_device(handle.device), _outside_captures():
        if handle.marker is None:
            marker = Event()
            _driver("cuEventCreate", ctypes.byref(marker), c_uint(_DISABLE_TIMING))
            handle.marker = marker
        else:
            passed = not unchecked("cuEventQuery")(handle.marker)
        _driver("cuEventRecord", handle.marker, handle.queue)
        handle.keeps_up = passed


def executable(handle: Handle, fill: Callable[[int], None]) -> Any:
    """Fills an empty CUDA graph and instantiates it; returns the argument of ``cuGraphLaunch``.

    Raises:
        RuntimeError: the driver refuses, or the handle's stream does not belong to the device's primary context. The
            nodes would ignore the SM partition of a green context.
    """
    graph, executable_, stream_context = c_void_p(), c_void_p(), c_void_p()
    with on_device(handle.device) as context, _outside_captures():
        _driver("cuStreamGetCtx", handle.queue, ctypes.byref(stream_context))
        if stream_context.value != context.value:
            raise RuntimeError("its stream does not belong to the primary context of the device")
        _driver("cuGraphCreate", ctypes.byref(graph), c_uint(0))
        try:
            fill(graph.value or 0)
            _driver("cuGraphInstantiateWithFlags", ctypes.byref(executable_), graph, c_uint64(0))
        finally:
            _driver("cuGraphDestroy", graph)
    return library.pointer_argument(executable_.value or 0)


def destroy_executable(graph: Any) -> None:
    """Destroys an executable graph after its launches have completed."""
    with contextlib.suppress(RuntimeError), _outside_captures():  # the device may have been reset
        _driver("cuGraphExecDestroy", graph)


class GraphReplay:
    """A call that repeats with the same addresses, and the CUDA graph that replays it.

    Attributes:
        calls: Number of calls on a stream for which it has no CUDA graph.
        queue: The stream of its CUDA graph, as ``Handle.queue``; None without a graph.
        graph: The executable CUDA graph, as an argument of ``cuGraphLaunch``.
        used: Whether a call used it since the last eviction.
        graphs: The ``graphs`` of the handle that it has one for.
    """

    CALLS_BEFORE_GRAPH = 256  # a CUDA graph saves 2 to 6 us per call; creating one takes 0.1 to 0.8 ms
    CALLS_BEFORE_NEXT_GRAPH = 4096  # for the same call on another stream, or after its graph was evicted
    MAX_GRAPHS = 256  # per handle, whose thread creates and destroys them; about 128 KiB each

    __slots__ = ("calls", "graph", "graphs", "queue", "used")

    def __init__(self) -> None:
        self.calls = 0
        self.queue: Any = None
        self.graph: Any = None
        self.used = False
        self.graphs: dict[GraphReplay, Any] = {}

    def keep_graph(self, handle: Handle, name: str, fill: Callable[[int], None]) -> bool:
        """Creates the CUDA graph that later calls launch on the handle's stream; ``fill`` adds its nodes.

        Returns whether it did: not while the GPU lags behind the host, and not during a stream capture.
        """
        self.calls = max(0, self.CALLS_BEFORE_GRAPH - CALLS_UNTIL_ASKED)
        ask_whether_it_keeps_up(handle)
        if not handle.keeps_up:
            return False
        self.calls = self.CALLS_BEFORE_GRAPH - self.CALLS_BEFORE_NEXT_GRAPH
        self.drop_graph()
        self._make_room(handle.graphs)
        try:
            self.graph = executable(handle, fill)
        except (CudnnError, RuntimeError) as error:
            self.calls = -sys.maxsize
            _log.info("%s runs as before at every call, since its CUDA graph failed: %s", name, error)
            return False
        self.graphs, self.used = handle.graphs, True
        self.graphs[self] = self.graph
        self.queue = handle.queue
        return True

    def lose_graph(self, name: str, status: int) -> None:
        """Drops the CUDA graph for good after the driver refused to launch it."""
        _log.warning("%s: cuGraphLaunch failed, CUDA driver error %d; it runs as before", name, status)
        self.drop_graph()
        self.calls = -sys.maxsize

    def drop_graph(self) -> None:
        """Destroys the CUDA graph, if any; exactly once, even if another thread frees its owner at the same time."""
        self.queue = self.graph = None
        graph = self.graphs.pop(self, None)
        if graph is not None:
            destroy_executable(graph)

    def _make_room(self, graphs: dict[GraphReplay, Any]) -> None:
        """Evicts graphs of the handle by the clock algorithm: a used graph gets a second chance."""
        while len(graphs) >= self.MAX_GRAPHS:
            for other in list(graphs):
                if not other.used:
                    other.calls = self.CALLS_BEFORE_GRAPH - self.CALLS_BEFORE_NEXT_GRAPH
                    other.drop_graph()
                    break
                other.used = False
                graph = graphs.pop(other, None)
                if graph is not None:  # another thread may have freed its owner
                    graphs[other] = graph
