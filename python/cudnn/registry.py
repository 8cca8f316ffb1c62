"""The fused APIs: what serves all of them asks here.

``cudnn.<name>`` is an API's package. Its module ``api`` holds the class and ``USUAL``, what ``cudnn cache warm``
compiles for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FUSED_APIS: Mapping[str, str] = {
    "gemm_amax": "GemmAmax",
    "gemm_dsrelu": "GemmDsrelu",
    "gemm_srelu": "GemmSrelu",
    "gemm_swiglu": "GemmSwiglu",
    "rmsnorm_rht_amax": "RmsNormRhtAmax",
}
"""Names and classes."""


@dataclass(frozen=True)
class Usual:
    """What a fused API is compiled for ahead of time.

    ``dtypes`` are names of its operands' types, ``dimensions`` those of a shape's sizes; ``shapes`` has one for each
    kernel that sizes choose among. ``objects(dtype, shape, arch)`` makes objects of the API as calls usually do, not
    compiled; each tells its ``kernels()``.
    """

    dtypes: tuple[str, ...]
    dimensions: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    objects: Callable[[str, tuple[int, ...], str], Iterable[Any]]


def usual(name: str) -> Usual:
    """That of a fused API."""
    return importlib.import_module(f"cudnn.{name}.api").USUAL
