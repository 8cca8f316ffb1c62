"""The registry of the fused APIs, which are discovered by their folders.

An API is a folder of the package with an ``api.py``, or one below a folder of a family. Its name is the folder's, its
public names are the ``__all__`` of its ``api.py``, or of its ``__init__.py`` where that has more. The file is read and
not run: nothing is loaded before it is used.
A folder that exports no wrapper of the folder's name, such as those of ``cudnn.NSA``, is not registered.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cudnn

if TYPE_CHECKING:
    from cudnn.fused.host import FusedAPI


_SHARED_FOLDERS: Mapping[str, tuple[str, str]] = {
    "gemm_proj_rope_mxfp8_from_bf16": ("cudnn.gemm_proj_rope_mxfp8", "GemmProjRopeMxfp8Bf16InSm100"),
    "gemm_proj_rope_mxfp8_from_mxfp8": ("cudnn.gemm_proj_rope_mxfp8", "GemmProjRopeMxfp8Mxfp8InSm100"),
    "nsa_compression": ("cudnn.native_sparse_attention", "CompressionAttention"),
    "nsa_compression_backward": ("cudnn.native_sparse_attention", "CompressionAttentionBackward"),
    "nsa_compression_top_k": ("cudnn.native_sparse_attention", "CompressionTopK"),
    "nsa_selection": ("cudnn.native_sparse_attention", "SelectionAttention"),
    "nsa_selection_backward": ("cudnn.native_sparse_attention", "SelectionAttentionBackward"),
    "nsa_top_k": ("cudnn.native_sparse_attention", "TopKReduction"),
    "sdpa_forward": ("cudnn.sdpa", "SdpaForward"),
    "sdpa_backward": ("cudnn.sdpa", "SdpaBackward"),
}
"""Fused APIs that share a folder: names, packages and classes."""


def packages() -> Mapping[str, str]:
    """Names of all fused APIs and their packages."""
    return _packages(tuple(cudnn.__path__))


@functools.cache
def _packages(roots: tuple[str, ...]) -> Mapping[str, str]:
    packages_by_name = {}
    for root in map(Path, roots):
        for pattern in ("*/api.py", "*/*/api.py"):
            for path in root.glob(pattern):
                package = ".".join(["cudnn", *path.parent.relative_to(root).parts])
                if f"{path.parent.name}_wrapper" in _exported(roots, package):
                    packages_by_name[path.parent.name] = package
    return dict(sorted(packages_by_name.items()))


def public_names() -> Mapping[str, str]:
    """The public names of all fused APIs, and the packages that have them."""
    return _public_names(tuple(cudnn.__path__))


@functools.cache
def _public_names(roots: tuple[str, ...]) -> Mapping[str, str]:
    package_names = {*_packages(roots).values(), *(package for package, _ in _SHARED_FOLDERS.values())}
    return {name: package for package in sorted(package_names) for name in _exported(roots, package)}


def of_family(family: str, name: str) -> Any:
    """What a folder of fused APIs has by a name: one of its packages, or a public name of theirs.

    Raises:
        AttributeError: unknown name.
    """
    package = f"{family}.{name}"
    if package in packages().values():
        return importlib.import_module(package)
    package = public_names().get(name, "")
    if not package.startswith(f"{family}."):
        raise AttributeError(f"module {family!r} has no attribute {name!r}")
    return getattr(importlib.import_module(package), name)


@functools.cache
def find(name: str) -> type[FusedAPI]:
    """The class of a fused API, under the name without an architecture.

    Raises:
        KeyError: unknown name.
    """
    from cudnn.fused.host import FusedAPI

    package = packages()[name]
    module = importlib.import_module(package)
    classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, FusedAPI)]
    return next(cls for cls in classes if "execute" in vars(cls) and cls.__module__.startswith(package))


def wrapper(name: str) -> Callable[..., Any]:
    """The function that allocates the results of a fused API."""
    return getattr(importlib.import_module(packages()[name]), f"{name}_wrapper")


@dataclass(frozen=True)
class AotPreset:
    """The presets of ahead-of-time compilation of a fused API.

    ``dtypes`` are names of its operands' types, ``dimensions`` those of a shape's sizes; ``shapes`` has one for each
    kernel that sizes choose among. ``objects(dtype, shape, arch)`` creates objects of the API with the wrapper's
    defaults, not compiled; each has its ``kernels()``. ``architectures`` are those that it has kernels for.
    """

    dtypes: tuple[str, ...]
    dimensions: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    objects: Callable[[str, tuple[int, ...], str], Iterable[Any]]
    architectures: tuple[str, ...]


def compiled() -> tuple[str, ...]:
    """The names of all fused APIs as ``cudnn cache warm`` takes them: those of folders, and those that share one."""
    return (*packages(), *_SHARED_FOLDERS)


def aot_preset(name: str) -> AotPreset:
    """The preset of a fused API, by a name in :func:`compiled`."""
    if name in _SHARED_FOLDERS:
        package, class_name = _SHARED_FOLDERS[name]
        api = getattr(importlib.import_module(package), class_name)
    else:
        api = find(name)
    return AotPreset(
        tuple(api.aot_dtypes), api.example[0], tuple(api.aot_shapes), api.aot_preset, tuple(api.architectures)
    )


def gemms() -> list[str]:
    """The names of the dense fused GEMMs."""
    from cudnn.fused.dense import DenseGemm

    return [name for name in packages() if issubclass(find(name), DenseGemm)]


def _exported(roots: tuple[str, ...], package: str) -> tuple[str, ...]:
    """The ``__all__`` of a package."""
    parts = package.split(".")[1:]
    for path in (Path(root, *parts, file) for root in roots for file in ("__init__.py", "api.py")):
        for node in ast.parse(path.read_text()).body if path.is_file() else ():
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                return tuple(ast.literal_eval(node.value))
    return ()
