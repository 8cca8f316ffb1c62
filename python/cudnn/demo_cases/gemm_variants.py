"""Variants of the dense fused GEMMs that the tests and ``cudnn selftest`` run: all that ``check_support`` accepts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cudnn.fused import registry

BF16, F16, F32 = "bfloat16", "float16", "float32"
E4M3, E5M2, E8M0, FP4, BYTES = "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint8"

Tiling = tuple[tuple[int, int], tuple[int, int]]
_ONE: Tiling = ((128, 128), (1, 1))
_PAIRS: Tiling = ((256, 256), (2, 2))
_TILINGS: Sequence[Tiling] = (
    *(((128, columns), cluster) for columns in (128, 256) for cluster in ((1, 1), (2, 1), (2, 2))),
    ((256, 256), (2, 1)),
    _PAIRS,
)
_CLUSTERS = ((1, 1), (2, 2))
_STORED = ((F32, BF16), (BF16, F32), (E4M3, F32), (E4M3, BF16))
_SCALES = ((E8M0, 16), (E8M0, 32), (E4M3, 16))
_MAJORS = tuple("".join(majors) for majors in itertools.product("mk", "nk", "mn"))


@dataclass(frozen=True)
class Variant:
    """One variant. Types are PyTorch's names; ``uint8`` holds packed pairs of four-bit elements.

    ``shape`` is (m, n, k, l). ``majors`` has the major modes of A, B and the results. ``out`` is the type of the last
    result, ``side`` that of ab12 or c. ``scale`` is the type of the scale factors, ``""`` without; ``vector`` is the
    number of elements per scale factor.
    """

    api: str
    shape: tuple[int, int, int, int]
    dtype: str = BF16
    majors: str = "kkn"
    out: str = BF16
    side: str = BF16
    scale: str = ""
    vector: int = 16
    tile: tuple[int, int] = (128, 128)
    cluster: tuple[int, int] = (1, 1)

    @property
    def quantizes(self) -> bool:
        """Whether the last result has scale factors, if the API supports them."""
        return self.out in (E4M3, E5M2)

    def __str__(self) -> str:
        scale = f" x {self.scale} of {self.vector}" if self.scale else ""
        tile, cluster = ("x".join(map(str, sizes)) for sizes in (self.tile, self.cluster))
        results = self.out if self.api == "gemm_amax" else f"{self.side}, {self.out}"
        return f"{self.api} {self.dtype}{scale} to {results}, {self.majors}, tile {tile}, cluster {cluster}"


@functools.cache
def variants(arch: str) -> list[Variant]:
    """All variants. On sm_90a tile and cluster have no effect, so variants that differ only in them count once."""
    from cudnn.demo_cases.dense import supported
    from cudnn.fused.layouts import Matrix

    if arch == "sm_90a":
        distinct: dict[Variant, Variant] = {}
        for variant in variants("sm_100a"):
            distinct.setdefault(replace(variant, tile=(0, 0), cluster=(0, 0), shape=(0, 0, 0, 0)), variant)
        return list(distinct.values())
    allowed: dict[Variant, None] = {}
    for name in registry.gemms():
        api: Any = registry.find(name)
        further = [x for x in api.tensors if isinstance(x.layout, Matrix) and x.name not in ("a", "b", api.result[0])]
        for v in _candidates(name):
            if (further or v.side == BF16) and v not in allowed and supported(v):
                allowed[v] = None
    return list(allowed)


def sample(arch: str, count: int) -> list[Variant]:
    """About ``count`` variants, evenly spaced and always the same."""
    all_variants = variants(arch)
    return all_variants[3 :: max(1, len(all_variants) // count)]


def _variant(api: str, tiling: Tiling, dtype: str, **fields: object) -> Variant:
    """A variant with one wave of a cluster (four tiles if that is a single tile) and a few k tiles."""
    (rows, columns), (across, down) = tile, cluster = tiling
    batch = 2 if cluster == (1, 1) else 1
    k = {FP4: 512, BYTES: 512, E4M3: 256, E5M2: 256, F32: 96}.get(dtype, 160)
    shape = (128 * across, columns * down, k, batch)
    assert shape[0] % rows == 0
    return Variant(api, shape, dtype, tile=tile, cluster=cluster, **fields)  # type: ignore[arg-type]


def _candidates(api: str) -> Iterator[Variant]:
    """Candidates for any dense GEMM: block-scaled and plain operands, quantized results, all tilings and majors."""
    for (scale, vector), tiling in itertools.product(_SCALES, _TILINGS):
        yield _variant(api, tiling, FP4, scale=scale, vector=vector)
    for (scale, vector), (side, out), tiling in itertools.product(_SCALES, _STORED, (_ONE, _PAIRS)):
        yield _variant(api, tiling, FP4, side=side, out=out, scale=scale, vector=vector)
    for (scale, vector), out, major, cluster in itertools.product(_SCALES, (F32, E4M3, FP4), "mn", _CLUSTERS):
        yield _variant(api, ((128, 128), cluster), FP4, out=out, majors=f"kk{major}", scale=scale, vector=vector)
    for scale, vector in _SCALES:
        yield _variant(api, _ONE, BYTES, scale=scale, vector=vector)
    for dtype, tiling in itertools.product((E4M3, E5M2), _TILINGS):
        yield _variant(api, tiling, dtype, out=E4M3, scale=E8M0, vector=32)
    for majors, out, tiling in itertools.product(_MAJORS, (F32, BF16), (_ONE, _PAIRS)):
        yield _variant(api, tiling, E4M3, majors=majors, out=out, scale=E8M0, vector=32)
    for (dtype, majors), out, tiling in itertools.product(((E4M3, "kkn"), (E5M2, "mnm")), (F32, BF16), (_ONE, _PAIRS)):
        yield _variant(api, tiling, dtype, majors=majors, out=out, scale=F32, vector=128)
    for dtype, majors, tiling in itertools.product((BF16, F32, E4M3), _MAJORS, (_ONE, _PAIRS)):
        yield _variant(api, tiling, dtype, majors=majors, side=F32 if majors[2] == "m" else BF16)
    for dtype, out, cluster in itertools.product((BF16, F16, F32, E4M3, E5M2), (F32, BF16), [(1, 1), (2, 1)]):
        yield _variant(api, ((128, 128), cluster), dtype, out=out)
    for out, tiling in itertools.product((E4M3, E5M2), _TILINGS):
        yield _variant(api, tiling, BF16, out=out, vector=32)
