"""Object files of the CuTe DSL as functions, without importing the DSL."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudnn.lazy import tvm_ffi
from cudnn.runtime.elf import LoadedObject

ENTRY = "__tvm_ffi_kernel"


@functools.cache
def toolchain() -> str:
    """What compiles kernels, and for which host. ptxas comes in the DSL's packages: their versions are its version."""
    library = _runtime_library()
    installed = {path.name for path in library.parents[3].glob("nvidia_cutlass_dsl*.dist-info")}
    # Unpacked without its packages' records, the DSL is known by its runtime library.
    dsl = sorted(installed) or [f"{library.stat().st_size} bytes of {library.stat().st_mtime_ns}"]
    return " ".join([platform.machine(), f"tvm_ffi-{tvm_ffi.__version__}", *dsl])


def load(content: bytes) -> Callable[..., None]:
    """The function in an object file that ``cudnn_kernels.compiler`` exported."""
    if platform.machine() != "x86_64":  # the loader reads x86-64 objects only; the DSL's engine reads any
        from cudnn_kernels import compiler

        return compiler.load(content)
    loaded = LoadedObject(content, _symbol)
    function: Any = tvm_ffi.Function
    return function.__from_extern_c__(loaded.symbols[ENTRY], keep_alive_object=loaded)


def _symbol(name: str) -> int:
    for library in _libraries():
        function = getattr(library, name, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    raise ImportError(f"the CuTe DSL's runtime library lacks {name}; versions: {toolchain()}")


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    return ctypes.CDLL(str(_runtime_library())), ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())


def _runtime_library() -> Path:
    """The DSL's runtime library. Of two, the one for the older CUDA, which newer drivers run too."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    paths = sorted(path for folder in folders for path in Path(folder).glob("cu*/lib/libcute_dsl_runtime.so"))
    if not paths:
        raise ImportError("the CuTe DSL is not installed: pip install 'nvidia-cutlass-dsl>=4.8,<4.9'")
    return paths[0]
