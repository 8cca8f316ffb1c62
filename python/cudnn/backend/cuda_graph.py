"""Nodes of a CUDA graph, added through the driver one after the other: copies, and a graph inside the graph."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from cudnn.backend.handle import Handle, on_device
from cudnn.errors import refusal

_HOST, _DEVICE = 1, 2  # CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE


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


def _driver(name: str, *arguments: Any) -> None:
    status = ctypes.CDLL("libcuda.so.1")[name](*arguments)
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
