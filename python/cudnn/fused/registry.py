"""The fused APIs, found by their folders: what serves all of them asks here.

An API is a folder of the package with an ``api.py``, or one below a folder of a family. Its name is the folder's, its
public names are the ``__all__`` of its ``api.py``, or of its ``__init__.py`` where that has more. The file is read and
not run: nothing is loaded before it is used.
A folder that exports no wrapper of its own name, such as the parts of ``cudnn.NSA``, is not found here.
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


_PARTS: Mapping[str, tuple[str, str]] = {
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
    found = {}
    for root in map(Path, roots):
        for pattern in ("*/api.py", "*/*/api.py"):
            for path in root.glob(pattern):
                package = ".".join(["cudnn", *path.parent.relative_to(root).parts])
                if f"{path.parent.name}_wrapper" in _exported(roots, package):
                    found[path.parent.name] = package
    return dict(sorted(found.items()))


def public_names() -> Mapping[str, str]:
    """The public names of all fused APIs, and the packages that have them."""
    return _public_names(tuple(cudnn.__path__))


@functools.cache
def _public_names(roots: tuple[str, ...]) -> Mapping[str, str]:
    found = {*_packages(roots).values(), *(package for package, _ in _PARTS.values())}
    return {name: package for package in sorted(found) for name in _exported(roots, package)}


def of_family(family: str, name: str) -> Any:
    """What a folder of fused APIs has by a name: one of its packages, or a public name of theirs.

    Raises:
        AttributeError: there is none of that name.
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
        KeyError: there is none of that name.
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
class Usual:
    """What a fused API is compiled for ahead of time.

    ``dtypes`` are names of its operands' types, ``dimensions`` those of a shape's sizes; ``shapes`` has one for each
    kernel that sizes choose among. ``objects(dtype, shape, arch)`` makes objects of the API as calls usually do, not
    compiled; each tells its ``kernels()``. ``architectures`` are those that it has kernels for.
    """

    dtypes: tuple[str, ...]
    dimensions: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    objects: Callable[[str, tuple[int, ...], str], Iterable[Any]]
    architectures: tuple[str, ...]


def compiled() -> tuple[str, ...]:
    """The names of all fused APIs as ``cudnn cache warm`` takes them: those of folders, and those that share one."""
    return (*packages(), *_PARTS)


def usual(name: str) -> Usual:
    """That of a fused API, by a name in :func:`compiled`."""
    if name in _PARTS:
        package, part = _PARTS[name]
        api = getattr(importlib.import_module(package), part)
    else:
        api = find(name)
    return Usual(tuple(api.usual_types), api.example[0], tuple(api.usual_shapes), api.usual, tuple(api.architectures))


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
