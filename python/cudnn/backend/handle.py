"""Handles, streams and devices."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Generator
from ctypes import c_int, c_void_p
from typing import Any

from cudnn.backend import library
from cudnn.errors import make_error

_log = logging.getLogger("cudnn")
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


class Handle:
    """A cuDNN handle: the device and the stream that graphs run on. ``int(handle)`` is the ``cudnnHandle_t``.

    Use a handle in one thread at a time, as cuDNN demands.

    Attributes:
        ptr: The ``cudnnHandle_t``; 0 once destroyed. A reference handle has a small integer.
        device: Ordinal of its device, -1 for a reference handle.
        is_reference: True without a GPU: graphs run on the reference executor.
        argument: ``ptr`` for calls on the hot path.
        stream: The stream that was last set in cuDNN.
        queue: ``stream`` for calls on the hot path. The object identifies handle and stream.
        capturing: The last result of ``cuStreamIsCapturing``, which writes through ``capture_result``.
        keeps_up: Whether the GPU had reached the previous marker at the last query.
        until_asked: Number of calls until the next query.
        marker: The ``CUevent`` of the last query, owned by the handle; None before the first.
        graphs: The executable CUDA graphs of this handle, by the call that they replay.
    """

    __slots__ = (
        "_queues",
        "argument",
        "capture_result",
        "capturing",
        "device",
        "graphs",
        "is_reference",
        "keeps_up",
        "marker",
        "ptr",
        "queue",
        "stream",
        "until_asked",
    )

    def __init__(self, ptr: int, device: int) -> None:
        self.ptr = ptr
        self.device = device
        self.is_reference = device < 0
        self.argument = library.pointer_argument(ptr)
        self.capturing = c_int()
        self.capture_result = ctypes.byref(self.capturing)
        self.keeps_up = False
        self.until_asked = 0
        self.marker: c_void_p | None = None
        self.graphs: dict[Any, Any] = {}
        self._queues: dict[int, Any] = {}
        self.put_on(0)

    def put_on(self, stream: int) -> None:
        """Sets the stream of later calls."""
        self.stream = stream
        if stream not in self._queues:
            self._queues[stream] = ctypes.byref(ctypes.c_char.from_address(stream))  # a distinct object, also for 0
        self.queue = self._queues[stream]

    def __int__(self) -> int:
        return resolve(self).ptr

    __index__ = __int__

    def __repr__(self) -> str:
        where = "reference" if self.is_reference else f"device {self.device}"
        return f"<cudnn.Handle {self.ptr:#x}, {where}>" if self.ptr else "<cudnn.Handle, destroyed>"


_live: dict[int, Handle] = {}
_reference_numbers = itertools.count(1)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The initialized CUDA driver; None without a driver or a device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return None
    return driver


def gpu_available() -> bool:
    """True when the CUDA driver is there and sees a device."""
    return _driver() is not None


def device_count() -> int:
    """How many devices the CUDA driver sees."""
    driver = _driver()
    count = c_int()
    if driver is not None:
        driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


def device_capability(device: int) -> tuple[int, int] | None:
    """Compute capability of a device, (9, 0) for an H200; None if the device does not exist."""
    driver = _driver()
    if driver is None:
        return None
    numbers = c_int(), c_int()
    for number, attribute in zip(numbers, (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR), strict=True):
        if driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device):
            return None
    return numbers[0].value, numbers[1].value


@functools.cache
def _log_reference() -> None:
    _log.info("no CUDA device: this handle runs graphs on the reference executor")


def create_handle() -> Handle:
    """Creates a handle on the current device. Without a GPU, one that selects the reference executor.

    Raises:
        CudnnLibraryError: there is a GPU but no usable libcudnn.
        CudnnError: ``cudnnCreate`` failed.
    """
    driver = _driver()
    if driver is None:
        _log_reference()
        handle = Handle(next(_reference_numbers), -1)
    else:
        lib = library.load()
        pointer = c_void_p()
        lib.check(lib.create_handle(pointer), "creating a handle (cudnnCreate)")
        device = c_int()
        driver.cuCtxGetDevice(ctypes.byref(device))  # cudnnCreate has made a context current
        handle = Handle(pointer.value or 0, device.value)
    _live[handle.ptr] = handle
    return handle


def resolve(handle: Handle | int) -> Handle:
    """The live handle that an argument names.

    Raises:
        ValueError: it was destroyed, or was not made by ``create_handle``.
        TypeError: it is no handle.
    """
    if isinstance(handle, Handle):
        if _live.get(handle.ptr) is handle:
            return handle
        got = "a destroyed handle"
    elif isinstance(handle, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        live = _live.get(handle)
        if live is not None:
            return live
        got = f"{handle:#x}, which is no live handle of this library"
    else:
        got = type(handle).__name__
        raise make_error(TypeError, "cudnn", "handle", got, "a cudnn.Handle", "pass what create_handle() returned")
    hint = "call create_handle() and keep the handle until its last use"
    raise make_error(ValueError, "cudnn", "handle", got, "a live handle", hint)


def destroy_handle(handle: Handle | int) -> None:
    """Destroys a handle, and the CUDA graphs that plans keep for it. Work already queued on its stream goes on."""
    live = resolve(handle)
    for pack in list(live.graphs):
        pack.drop_graph()
    del _live[live.ptr]
    pointer, live.ptr, live.argument = live.ptr, 0, None
    if not live.is_reference:
        live.marker = None
        lib = library.load()
        lib.check(lib.destroy_handle(pointer), "destroying a handle (cudnnDestroy)")


def set_stream(handle: Handle | int, stream: int) -> None:
    """Puts a handle on a CUDA stream, for example ``torch.cuda.current_stream().cuda_stream``."""
    live = resolve(handle)
    number = int(stream)
    if not live.is_reference:
        lib = library.load()
        lib.check(lib.set_stream(live.ptr, number), "setting the stream of a handle (cudnnSetStream)")
    live.put_on(number)


def get_stream(handle: Handle | int) -> int:
    """The stream a handle is on; 0 is the default stream."""
    live = resolve(handle)
    if live.is_reference:
        return live.stream
    lib = library.load()
    stream = c_void_p()
    lib.check(lib.get_stream(live.ptr, stream), "reading the stream of a handle (cudnnGetStream)")
    return stream.value or 0


class _ThreadHandles(threading.local):
    """The default handles of a thread, by device.

    A thread that ends returns them to a pool for later threads. Garbage collection never destroys a handle, because
    that would break a stream capture in progress.
    """

    def __init__(self) -> None:
        self.handles = _HandlePool()


class _HandlePool(dict[int, Handle]):
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            for device, handle in self.items():
                if handle.ptr:
                    _idle.setdefault(device, []).append(handle)


_idle: dict[int, list[Handle]] = {}
_thread_handles = _ThreadHandles()
_current_stream: Callable[[int], int] | None = None


def default_handle(device: int) -> Handle:
    """This thread's handle for a device, on PyTorch's current stream of that device if PyTorch is loaded."""
    handle = _thread_handles.handles.get(device)
    if handle is None or not handle.ptr:
        handle = _thread_handles.handles[device] = _take_handle(device)
    stream = (_current_stream or _find_current_stream())(device)
    if stream != handle.stream:
        set_stream(handle, stream)
    return handle


def _take_handle(device: int) -> Handle:
    with contextlib.suppress(KeyError, IndexError):
        return _idle[device].pop()
    if _driver() is None:
        return create_handle()
    with on_device(device):
        return create_handle()


@functools.cache
def _primary_context(device: int) -> tuple[ctypes.CDLL, c_void_p]:
    driver = _driver()
    context = c_void_p()
    if driver is None or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        raise make_error(ValueError, "cudnn", "device", device, f"0 to {device_count() - 1}")
    return driver, context


@contextlib.contextmanager
def on_device(device: int) -> Generator[c_void_p]:
    """Makes a device's primary context, which the CUDA runtime uses, current in this thread, and yields it."""
    driver, context = _primary_context(device)
    driver.cuCtxPushCurrent_v2(context)
    try:
        yield context
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(c_void_p()))


def _find_current_stream() -> Callable[[int], int]:
    """PyTorch's function for the current stream, once it is loaded; until then the default stream."""
    global _current_stream
    torch = sys.modules.get("torch")
    find: Callable[[int], int] | None = getattr(getattr(torch, "_C", None), "_cuda_getCurrentRawStream", None)
    if find is None or _driver() is None:
        return lambda device: 0
    _current_stream = find
    return find
