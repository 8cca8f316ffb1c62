"""Compiles a CuTe DSL function for an architecture, with or without a GPU, into an object file."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import cutlass.cute as cute

from cudnn_kernels import fakes

ENTRY = "kernel"  # the object's function is __tvm_ffi_kernel


def preload() -> None:
    """Imports what the first compilation would import."""
    from cutlass.cutlass_dsl import tvm_ffi_provider  # noqa: F401


def compile_kernel(source: str, configuration: Any, arch: str, exports: bool = False) -> Any:
    """The kernel ``module:class`` for a configuration, compiled for fake arguments: see :func:`compile_for`."""
    module_name, _, class_name = source.partition(":")
    kernel = getattr(importlib.import_module(module_name), class_name)(configuration)
    return compile_for(arch, kernel, *fakes.arguments(configuration), exports=exports)


def compile_for(arch: str, function: Any, *arguments: Any, options: str = "", exports: bool = False) -> Any:
    """The function compiled for fake ``arguments``, callable by the apache-tvm-ffi convention on PyTorch's tensors.

    ``arch`` is explicit: left out, a machine without a GPU would compile for another chip than one with it. ``options``
    are further ones of the DSL, such as ``--keep-ptx``. With ``exports``, the result can be exported but not called,
    which saves the host code's second compilation.
    """
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    return cute.compile(function, *arguments, options=options, no_jit_engine=exports)


def export(compiled: Any) -> bytes:
    """The object file of a compiled function."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        compiled.export_to_c(str(path), ENTRY)
        return path.read_bytes()


def load(content: bytes) -> Any:
    """The function in an object file that :func:`export` returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.o")
        path.write_bytes(content)
        return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[ENTRY]
