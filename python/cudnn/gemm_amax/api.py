"""GEMM + amax: the class, and the function that allocates the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.errors import refusal
from cudnn.gemm.arguments import Argument, Matrix, amax, operands
from cudnn.gemm.base import FusedGemm, call, check_major
from cudnn.gemm.formats import FLOAT4, FLOAT8, SCALES, name_of
from cudnn.gemm.reference import product
from cudnn.gemm.usual import usual
from cudnn.lazy import torch


class GemmAmax(FusedGemm):
    """A GEMM, and the largest magnitude of its result.

        acc  = (a * sfa) (b * sfb)^T                 in float32
        amax = max(amax, max |acc|)                  before rounding, over everything
        c    = acc                                   rounded

    ===========  ===============  ========================  ========================================================
    tensor       shape            strides                   type
    ===========  ===============  ========================  ========================================================
    a            (m, k, l)        (k, 1, mk), (1, m, mk)    float16, bfloat16, float32, float8_e4m3fn, float8_e5m2;
                                                            with sfa: float4_e2m1fn_x2 or uint8, float8
    b            (n, k, l)        (k, 1, nk), (1, n, nk)    that of a
    sfa, sfb     scales of a, b   atoms of 128 x 4          float8_e8m0fnu, float8_e4m3fn, or int8: bytes of e8m0
    c            (m, n, l)        (n, 1, mn), (1, m, mn)    float32, float16, bfloat16, float8; float4 of float4
    amax         (1, 1, 1), (1,)  any                       float32; the caller fills it with -inf
    ===========  ===============  ========================  ========================================================

    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors.

    Args:
        sample_a ... sample_amax: tensors like those that ``execute`` will get; sample_sfa, sample_sfb may be None.
        acc_dtype: float32.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them; on sm_90a the library chooses tiles by itself.
        sf_vec_size: elements along k that share a scale factor: 16 or 32.
        arch: as for :class:`cudnn.GemmSwiglu`.
    """

    tile_n = (128, 256)
    largest_cluster = 4
    arguments = (
        *operands((*SCALES, "int8")),
        Argument(
            "c",
            Matrix("m", "n", "mn"),
            ("float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn", FLOAT4, "uint8"),
            written=True,
        ),
        amax(dimensions=3, optional=False),
    )

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_c: Any,
        sample_amax: Any,
        acc_dtype: Any = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] = (1, 1),
        sf_vec_size: int = 32,
        arch: str | None = None,
    ) -> None:
        samples = {
            "a": sample_a, "b": sample_b, "sfa": sample_sfa, "sfb": sample_sfb, "c": sample_c, "amax": sample_amax
        }  # fmt: skip
        super().__init__(
            samples, alpha=1.0, acc_dtype=acc_dtype, mma_tiler_mn=mma_tiler_mn, cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size, arch=arch,
        )  # fmt: skip

    def check_options(self) -> None:
        a, c, (rows, columns) = self.kind("a"), self.kind("c"), self.mma_tiler_mn
        if c == FLOAT4 and a != FLOAT4:
            raise self._error("c tensor dtype", c, f"other types, for operands of {a}")
        if a in FLOAT8 and c in FLOAT8:
            raise self._unsupported("c tensor dtype", c, f"float32, float16, bfloat16, for operands of {a}")
        if rows == 256:
            raise self._unsupported("mma_tiler_mn", self.mma_tiler_mn, "128 rows")
        if a == FLOAT4 and columns == 256 and self.sizes(self.descs)["k"] <= 128:
            raise self._error("mma_tiler_mn", self.mma_tiler_mn, f"128 columns, for operands of {a} with k up to 128")
        wide = c not in (FLOAT4, *FLOAT8)
        if self.scaled and columns == 256 and self.sf_vec_size == 16 and wide:
            raise self._unsupported("mma_tiler_mn", self.mma_tiler_mn, f"128 columns, for sf_vec_size=16 and c of {c}")

    def operations(self) -> tuple[Any, ...]:
        return self.result_epilogue("c")

    def reference(self, tensors: Mapping[str, Any]) -> None:
        self.store_result(tensors, "c", product(tensors, self.sf_vec_size))

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Any,
        b_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        c_tensor: Any,
        amax_tensor: Any,
        current_stream: Any = None,
        workspace_tensor: Any = None,
    ) -> None:
        """Writes ``c_tensor`` and raises ``amax_tensor``. See :meth:`FusedGemm.run`."""
        tensors = {
            "a": a_tensor, "b": b_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor, "c": c_tensor, "amax": amax_tensor
        }  # fmt: skip
        self.run(tensors, None, current_stream, workspace_tensor)


class GemmAmaxSm100(GemmAmax):
    """:class:`GemmAmax` by the name that existing programs use. The wrapper makes objects of it."""


_cache_of_GemmAmaxObjects: dict[Any, GemmAmax] = {}  # noqa: N816  (part of the public contract)
_cache_of_GemmAmaxSm100Objects = _cache_of_GemmAmaxObjects  # noqa: N816


def gemm_amax_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    c_major: str = "n",
    c_dtype: Any = torch.float32,
    acc_dtype: Any = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] = (1, 1),
    sf_vec_size: int = 32,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles where that was not done yet, and executes: ``c_tensor, amax_tensor``.

    ``amax_tensor`` has the shape (1, 1, 1). Arguments and errors as those of :class:`GemmAmax`; a four-bit ``c`` is the
    class's alone. Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_amax`` is the
    operator for ``torch.compile``.
    """
    check_major("gemm_amax_wrapper", "c_major", c_major)
    if name_of(c_dtype) == FLOAT4:
        allowed = "torch.float32, float16, bfloat16, float8_e4m3fn, float8_e5m2"
        raise ValueError(refusal("gemm_amax_wrapper", "c_dtype", c_dtype, allowed, "use the class GemmAmax"))
    given = {"a": a_tensor, "b": b_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor}
    options = {
        "acc_dtype": acc_dtype, "mma_tiler_mn": mma_tiler_mn, "cluster_shape_mn": cluster_shape_mn,
        "sf_vec_size": sf_vec_size,
    }  # fmt: skip
    results = {"c": (c_dtype, c_major), "amax": (torch.float32, "")}
    return call(GemmAmaxSm100, _cache_of_GemmAmaxObjects, given, results, ("c", "amax"), options, {}, stream)


USUAL = usual(GemmAmax, lambda a, sfa, out: [{"c": (kind, "n")} for kind in (torch.float32, out)])
gemm_amax_wrapper_sm100 = gemm_amax_wrapper
