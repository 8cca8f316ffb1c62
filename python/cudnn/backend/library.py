"""Finds and loads libcudnn and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import glob
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from cudnn import settings
from cudnn.backend.enums import Status
from cudnn.backend.messages import root_causes
from cudnn.errors import CudnnError, CudnnLibraryError, cudnnGraphNotSupportedError

OLDEST = 91000
_CURE = (
    "install cuDNN for the CUDA version of your driver, `pip install '.[cu12]'` or `pip install '.[cu13]'` in a clone "
    "of cudnn-fused, or put the folder of libcudnn.so.9 on LD_LIBRARY_PATH"
)

_log = logging.getLogger("cudnn")


def format_version(version: int) -> str:
    """``92800`` as ``"9.28.0"``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def pointer_argument(address: int) -> Any:
    """An address as the argument that ctypes passes fastest: a reference to its memory, which is never read.

    Returns None, which is NULL, for 0. ctypes passes the result of ``byref`` without conversion: three of them cost
    0.13 us less than three ``c_void_p`` (Python 3.12).
    """
    return ctypes.byref(ctypes.c_char.from_address(address)) if address else None


class Library:
    """The loaded libcudnn. ``version`` is ``cudnnGetVersion()``, ``path`` its file.

    Functions that end in ``_unchecked`` have no declared argument types. The hot path passes them pointers of
    ``pointer_argument``, which saves the conversion at every call.
    """

    def __init__(self, path: str) -> None:
        try:
            cdll = ctypes.CDLL(path)
        except OSError as error:
            raise CudnnLibraryError(f"libcudnn at {path} cannot be loaded: {error}. To fix it, {_CURE}.") from error
        cdll.cudnnGetVersion.restype = c_size_t
        cdll.cudnnGetCudartVersion.restype = c_size_t
        self.path = path
        self.version: int = cdll.cudnnGetVersion()
        self.cuda_version: int = cdll.cudnnGetCudartVersion()
        if self.version < OLDEST:
            raise CudnnLibraryError(
                f"cuDNN {format_version(self.version)} at {path} is too old; needed: {format_version(OLDEST)} or "
                f"newer. To fix it, {_CURE}."
            )

        def declare(name: str, *arguments: type) -> Any:
            function = cdll[name]  # indexing returns a separate function object, attribute access a shared one
            if arguments:
                function.argtypes = arguments
            return function

        self.create_handle = declare("cudnnCreate", POINTER(c_void_p))
        self.destroy_handle = declare("cudnnDestroy", c_void_p)
        self.set_stream = declare("cudnnSetStream", c_void_p, c_void_p)
        self.get_stream = declare("cudnnGetStream", c_void_p, POINTER(c_void_p))
        self.create = declare("cudnnBackendCreateDescriptor", c_int, POINTER(c_void_p))
        self.destroy = declare("cudnnBackendDestroyDescriptor", c_void_p)
        self.finalize = declare("cudnnBackendFinalize", c_void_p)
        self.set_attribute = declare("cudnnBackendSetAttribute", c_void_p, c_int, c_int, c_int64, c_void_p)
        self.get_attribute = declare(
            "cudnnBackendGetAttribute", c_void_p, c_int, c_int, c_int64, POINTER(c_int64), c_void_p
        )
        self.populate_cuda_graph = declare("cudnnBackendPopulateCudaGraph", c_void_p, c_void_p, c_void_p, c_void_p)
        self.update_cuda_graph = declare("cudnnBackendUpdateCudaGraph", c_void_p, c_void_p, c_void_p, c_void_p)
        self.create_unchecked = declare("cudnnBackendCreateDescriptor")
        self.set_unchecked = declare("cudnnBackendSetAttribute")
        self.finalize_unchecked = declare("cudnnBackendFinalize")
        self.destroy_unchecked = declare("cudnnBackendDestroyDescriptor")
        # Resets a finalized descriptor, which is cheaper than a new one. Deprecated since 9.2; it may be removed.
        has_initialize = hasattr(cdll, "cudnnBackendInitialize")
        self.reopen_unchecked = declare("cudnnBackendInitialize") if has_initialize else None
        self._last_error = declare("cudnnGetLastErrorString", c_char_p, c_size_t)
        self._last_error.restype = None

    @functools.cached_property
    def execute_unchecked(self) -> Any:
        """``cudnnBackendExecute`` of libcudnn_graph, which is mapped once a plan exists; otherwise that of libcudnn.

        libcudnn's function only forwards the call, which takes 0.08 us.
        """
        mapped = mapped_libraries("libcudnn_graph.so")
        graph = [path for path in mapped if os.path.exists(path)]  # one that an upgrade replaced is "(deleted)"
        inner = ctypes.CDLL(graph[0] if len(graph) == 1 else self.path)
        cdll: Any = inner if hasattr(inner, "cudnnBackendExecute") else ctypes.CDLL(self.path)
        return cdll["cudnnBackendExecute"]

    def last_error(self) -> str:
        """cuDNN's message about the last failure in this thread, on one line."""
        buffer = ctypes.create_string_buffer(4096)
        self._last_error(buffer, len(buffer))
        return " ".join(buffer.value.decode(errors="replace").split())

    def check(self, status: int, what: str) -> None:
        """Raises ``CudnnError`` unless ``status`` is success. ``what`` describes the call."""
        if status:
            raise self.error(status, what)

    def error(self, status: int, what: str) -> CudnnError:
        """The exception for a failed call."""
        try:
            name = f"CUDNN_STATUS_{Status(status).name}"
        except ValueError:
            name = f"CUDNN_STATUS {status}"
        message = self.last_error()
        detail = root_causes(message)
        if detail != message:
            _log.debug("%s failed; cuDNN's whole text: %s", what, message)
        text = f"{what} failed: {name}" + (f"; cuDNN {format_version(self.version)} says: {detail}" if detail else "")
        if name.endswith("SUBLIBRARY_LOADING_FAILED") and not loads("libcuda.so.1"):
            text += ". To fix it, install the CUDA driver's library, libcuda.so.1, which this part of cuDNN needs."
        return CudnnError(text, status, name)

    def require(self, since: int, what: str) -> None:
        """Refuses ``what`` by name where the loaded cuDNN is older than ``since``."""
        if self.version < since:
            raise cudnnGraphNotSupportedError(
                f"{what} needs cuDNN {format_version(since)} or newer; loaded: {format_version(self.version)} from "
                f"{self.path}. To fix it, install a newer nvidia-cudnn package."
            )


_lock = threading.Lock()
_library: Library | None = None


def load() -> Library:
    """The loaded library; loads it at the first call.

    Raises:
        CudnnLibraryError: libcudnn is missing, cannot be loaded, or is older than 9.10.
    """
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                library = Library(_find())
                _preload(library)
                _log.debug("cuDNN %s from %s", format_version(library.version), library.path)
                _library = library
    return _library


def is_available() -> bool:
    """True when libcudnn can be loaded and is new enough."""
    try:
        load()
    except CudnnLibraryError:
        return False
    return True


def version() -> int:
    """``cudnnGetVersion()``: 92800 for 9.28.0."""
    return load().version


def version_string() -> str:
    """The version as ``"9.28.0"``."""
    return format_version(load().version)


def last_error() -> str:
    """cuDNN's message about the last failure in this thread."""
    return load().last_error()


def require(since: int, what: str) -> None:
    """Refuses ``what`` by name where the loaded cuDNN is older than ``since``."""
    load().require(since, what)


def mapped_libraries(name: str) -> list[str]:
    """Files mapped into this process whose name starts with ``name``, each once."""
    try:
        with open("/proc/self/maps") as maps:
            files = {line.split(maxsplit=5)[5].strip() for line in maps if f"/{name}" in line}
    except OSError:
        return []
    return sorted(file for file in files if os.path.basename(file).startswith(name))


def loads(name: str) -> bool:
    """Whether the dynamic linker can load a library."""
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _find() -> str:
    """The path of libcudnn. One that the process has mapped comes first: sub-libraries of two versions conflict."""
    for path in _candidates():
        return path
    raise CudnnLibraryError(f"libcudnn.so.9 is not installed. To fix it, {_CURE}.")


def _candidates() -> Iterator[str]:
    yield from mapped_libraries("libcudnn.so")
    for folder in settings.LIBRARY_FOLDERS.get():
        yield from sorted(glob.glob(os.path.join(glob.escape(folder), "libcudnn.so.9*")))[:1]
    path = _ask_pathfinder()
    if path:
        yield path
    for root in dict.fromkeys([sysconfig.get_path("purelib"), *sys.path]):
        yield from sorted(glob.glob(os.path.join(glob.escape(root), "nvidia", "cudnn", "lib", "libcudnn.so.9*")))[:1]
    try:
        ctypes.CDLL("libcudnn.so.9")
    except OSError:
        return
    yield from mapped_libraries("libcudnn.so")


def _ask_pathfinder() -> str | None:
    try:
        from cuda import pathfinder  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        return None
    try:
        return pathfinder.load_nvidia_dynamic_lib("cudnn").abs_path
    except Exception as error:  # error classes differ between versions; the search continues without it
        _log.debug("cuda-pathfinder does not find cuDNN: %s", error)
        return None


def _preload(library: Library) -> None:
    """Loads NVRTC and cuBLAS of the pip packages next to cuDNN's, if installed: cuDNN's engines need them."""
    packages = Path(library.path).resolve().parents[2]
    major = library.cuda_version // 1000  # packages for CUDA 12 and 13 can be installed together
    for name in ("libnvrtc.so", "libcublasLt.so", "libcublas.so"):
        candidates = sorted(packages.glob(f"*/lib/{name}.{major}"))
        if packages.name == "nvidia" and candidates and not mapped_libraries(name):
            ctypes.CDLL(str(candidates[0]), mode=ctypes.RTLD_GLOBAL)
