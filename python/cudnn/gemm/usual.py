"""What the fused GEMMs are compiled for ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cudnn.gemm.base import FusedGemm, allocate
from cudnn.gemm.formats import FLOAT4
from cudnn.lazy import torch
from cudnn.registry import Usual

Results = Mapping[str, tuple[Any, str]]

_OPERANDS: Mapping[str, tuple[str, str, int]] = {
    "bf16": ("bfloat16", "", 0),
    "fp16": ("float16", "", 0),
    "fp8": ("float8_e4m3fn", "", 0),
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu", 32),
    "nvfp4": (FLOAT4, "float8_e4m3fn", 16),
}
"""By name: the type of the elements, that of their scale factors, and how many elements share one."""
_SHAPES = ((4096, 128, 4096), (4096, 4096, 4096), (8192, 28672, 4096))
"""Narrow, usual, wide: the number of columns chooses among kernels, the other sizes do not."""


def usual(api: type[FusedGemm], results: Callable[[Any, Any, Any], Sequence[Results]]) -> Usual:
    """Operands that are K-major, as wrappers get them from row-major matrices, and the class's default tile.

    ``results(a, sfa, out)``: types and majors of the other matrices, for calls that want results in the 16-bit type
    ``out``, and for calls that leave the types to the wrapper.
    """

    def objects(dtype: str, shape: tuple[int, ...], arch: str) -> Iterator[FusedGemm]:
        m, n, k = shape
        kind, scales, vector = _OPERANDS[dtype]
        sizes = {"m": m, "n": n, "k": k, "l": 1, "vector": vector or 1}
        types = {"a": kind, "b": kind, **({"sfa": scales, "sfb": scales} if scales else {})}
        given = {
            name: api.argument(name).layout.allocate(sizes, "k", getattr(torch, element), "meta")
            for name, element in types.items()
        }
        rest = {x.name: (torch.float32, "") for x in api.arguments if not x.optional and x.types == ("float32",)}
        options: dict[str, Any] = {"sf_vec_size": vector} if vector else {}
        for others in results(given["a"], given.get("sfa"), torch.float16 if dtype == "fp16" else torch.bfloat16):
            tensors = {**given, **allocate(api, given["a"], given["b"], {**rest, **others}, vector or 1)}
            samples = {f"sample_{x.name}": tensors.get(x.name) for x in api.arguments}
            yield api(**samples, **options, arch=arch)

    return Usual(tuple(_OPERANDS), ("m", "n", "k"), _SHAPES, objects)
