"""The interface between compiled host code and the CUDA runtime, as ctypes callbacks.

A host function that the DSL compiled calls about a dozen runtime functions. Each module compiled under emulation gets
its own set of callbacks, which know that module's PTX; their addresses are written into the module before it is JITed.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from ptx_emulator.codegen import load

Dim3 = tuple[int, int, int]
Sink = Callable[[str, str, Dim3, Dim3, Dim3, int, list[bytes]], None]

# Answers of cudaDeviceGetAttribute: shared memory per block opt-in, multiprocessors, compute capability.
_OPTIN_SHARED, _MULTIPROCESSORS, _MAJOR, _MINOR = 97, 16, 75, 76
SHARED_LIMIT = 232448
_ATTRIBUTE_BYTES, _CLUSTER_DIMENSION = 72, 4

P, I32, L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


def read_config(config: int) -> tuple[Dim3, Dim3, Dim3, int]:
    """cudaLaunchConfig_t: u32 grid[3], block[3]; u64 shared bytes; stream; attributes; u32 their number."""
    words = (ctypes.c_uint32 * 14).from_address(config)
    quads = (ctypes.c_uint64 * 6).from_address(config)
    cluster: Dim3 = (1, 1, 1)
    for index in range(words[12]):
        attribute = (ctypes.c_uint32 * 5).from_address(quads[5] + _ATTRIBUTE_BYTES * index)
        if attribute[0] == _CLUSTER_DIMENSION:
            cluster = (attribute[2], attribute[3], attribute[4])
    return ((words[0], words[1], words[2]), (words[3], words[4], words[5]), cluster, int(quads[3]))


class Runtime:
    """The runtime functions of one compiled module. Handles are indices into its list of kernel names."""

    def __init__(
        self, ptx: str, sink: Sink, failed: Callable[[BaseException], None], device: tuple[int, int, int]
    ) -> None:
        self.ptx, self.sink, self.failed, self.device = ptx, sink, failed, device
        self.names: list[str] = []
        self.once: set[int] = set()
        self.loading = threading.RLock()
        signatures: dict[str, tuple[Any, list[Any], Callable[..., Any]]] = {
            "_cudaLibraryLoadData": (I32, [P, P, P, P, I32, P, P, I32], self.load),
            "_cudaLibraryGetKernel": (I32, [P, P, P], self.get_kernel),
            "_cudaLibraryUnload": (I32, [P], self.nothing),
            "_cudaGetDevice": (I32, [P], self.write_zero),
            "_cudaSetDevice": (I32, [I32], self.nothing),
            "_cudaGetDeviceCount": (I32, [P], self.write_one),
            "_cudaDeviceGetAttribute": (I32, [P, I32, I32], self.attribute),
            "_cuKernelGetAttribute": (I32, [P, I32, P, I32], self.write_zero),
            "_cudaFuncSetAttribute": (I32, [P, I32, I32], self.nothing),
            "_cudaKernelSetAttributeForDevice": (I32, [P, I32, I32, I32], self.nothing),
            "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": (I32, [P, P, I32, L], self.write_one),
            "_cudaLaunchKernelEx": (I32, [P, P, P], self.launch),
            "_cudaLaunchKernel": (I32, [P, I32, I32, I32, I32, I32, I32, P, L, P], self.launch_plain),
            "cuda_dialect_init_library_once": (I32, [P, P, P, P], self.init_once),
            "cuda_dialect_unload_library_once": (None, [P], self.nothing),
            "CuteDSLRT_TVMFFISetRaisedCudaError": (I32, [I32], self.nothing),
            "CuteDSLRT_TVMFFISetRaisedCudaLaunchError": (I32, [I32], self.nothing),
        }
        self.callbacks = {
            name: ctypes.CFUNCTYPE(result, *arguments)(function)
            for name, (result, arguments, function) in signatures.items()
        }

    def address(self, name: str) -> int | None:
        callback = self.callbacks.get(name)
        return None if callback is None else ctypes.cast(callback, P).value

    @staticmethod
    def nothing(*_: Any) -> int:
        return 0

    @staticmethod
    def write_zero(target: int, *_: Any) -> int:
        ctypes.c_int32.from_address(target).value = 0
        return 0

    @staticmethod
    def write_one(target: int, *_: Any) -> int:
        ctypes.c_int32.from_address(target).value = 1
        return 0

    def attribute(self, target: int, attribute: int, _: int) -> int:
        major, minor, multiprocessors = self.device
        known = {_OPTIN_SHARED: SHARED_LIMIT, _MULTIPROCESSORS: multiprocessors, _MAJOR: major, _MINOR: minor}
        ctypes.c_int32.from_address(target).value = known.get(attribute, 1)
        return 0

    def load(self, library: int, *_: Any) -> int:
        ctypes.c_uint64.from_address(library).value = 1
        return 0

    def get_kernel(self, kernel: int, _: int, name: int) -> int:
        text = ctypes.string_at(name).decode()
        if text not in self.names:
            self.names.append(text)
        ctypes.c_uint64.from_address(kernel).value = self.names.index(text) + 1
        return 0

    def init_once(self, state: int, init: int, load: int, _: int) -> int:
        with self.loading:  # a thread that comes second launches as soon as this returns
            if state not in self.once:
                result = ctypes.CFUNCTYPE(I32, P)(init)(state) or ctypes.CFUNCTYPE(I32, P, I32)(load)(state, 0)
                if result:
                    return result
                self.once.add(state)
        return 0

    def launch(self, config: int, kernel: int, arguments: int) -> int:
        return self._launch(kernel, arguments, lambda: read_config(config))

    def launch_plain(
        self, kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, arguments: int, shared: int, _: int
    ) -> int:
        return self._launch(kernel, arguments, lambda: ((gx, gy, gz), (bx, by, bz), (1, 1, 1), shared))

    def _launch(self, kernel: int, arguments: int, configuration: Callable[[], tuple[Dim3, Dim3, Dim3, int]]) -> int:
        # An exception cannot cross the compiled frame, and an error code would send it to the real CUDA runtime.
        try:
            entry = self.names[kernel - 1]
            sizes = [p.size for p in load(self.ptx, entry).kernel.parameters.values()]
            pointers = (ctypes.c_void_p * max(len(sizes), 1)).from_address(arguments) if sizes else []
            values = [ctypes.string_at(p, size) for p, size in zip(pointers, sizes, strict=False)]
            self.sink(self.ptx, entry, *configuration(), values)
        except BaseException as error:
            self.failed(error)
        return 0
