"""GEMM + SwiGLU: the class, and the function that allocates the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.gemm.arguments import Argument, Matrix, amax, operands, quantizer
from cudnn.gemm.base import FusedGemm, call, check_major, scale_type
from cudnn.gemm.formats import FLOAT4, FLOAT8, name_of
from cudnn.gemm.reference import product, store
from cudnn.gemm.usual import usual
from cudnn.gemm_swiglu.reference import swiglu
from cudnn.lazy import torch
from cudnn_kernels import epilogue

_NARROW = ("float16", "bfloat16")


class GemmSwiglu(FusedGemm):
    """A GEMM, and SwiGLU over pairs of 32 columns of its result.

        ab12 = alpha * (a * sfa) (b * sfb)^T                     accumulated in float32, rounded when stored
        c    = up * gate * sigmoid(gate)                         of every 64 columns of ab12, unrounded, the first 32
                                                                 are up, the others gate
        amax = max(amax, max |c|), before c is rounded

    ===========  ====================  ========================  ===================================================
    tensor       shape                 strides                   type
    ===========  ====================  ========================  ===================================================
    a            (m, k, l)             (k, 1, mk), (1, m, mk)    float16, bfloat16, float32, float8_e4m3fn, _e5m2;
                                                                 with sfa: float4_e2m1fn_x2 or uint8, float8
    b            (n, k, l)             (k, 1, nk), (1, n, nk)    that of a
    ab12         (m, n, l)             (n, 1, mn), (1, m, mn)    float32, float16, bfloat16; scaled: float8 too
    c            (m, n / 2, l)         those of ab12             float16, bfloat16; scaled: float32; with sfc: float8
    sfa, sfb     scales of a, b        atoms of 128 x 4          float8_e8m0fnu, float8_e4m3fn
    sfc          scales of c           atoms of 128 x 4          that of sfa
    amax         (1,) or (1, 1, 1)     any                       float32; the caller fills it with -inf
    norm_const   (1,)                  (1,)                      float32; what the largest element of a block becomes,
                                                                 as a share of its type's limit
    ===========  ====================  ========================  ===================================================

    "Scaled": with any of sfa, sfb, amax, sfc, norm_const. float32 operands are multiplied in TF32. A compiled object
    serves tensors of all sizes, of the samples' types and majors.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get. ``sample_ab12=None``: not stored.
        alpha: for ``execute(alpha=None)``.
        acc_dtype: float32, or float16 where the result would bear it. It is float32 in any case.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them, columns rounded up to multiples of 64, or of 128
            for operands with scale factors; on sm_90a the library chooses tiles by itself.
        sf_vec_size: elements along k, or along n for sfc, that share a scale factor: 16 or 32.
        vector_f32, ab12_stages: hints of other architectures.
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile for a chip that is not here; default: that of the
            tensors' device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``,
            the kernel itself.
    """

    pairs = 2
    quantized = ("c", "sfc")
    tile_n = range(32, 257, 32)
    default_cluster = (2, 2)
    arguments = (
        *operands(),
        Argument("ab12", Matrix("m", "n", "mn"), ("float32", *_NARROW, *FLOAT8), optional=True, written=True),
        Argument("c", Matrix("m", "columns", "mn"), ("float32", *_NARROW, *FLOAT8), written=True),
        amax(dimensions=3),
        *quantizer("sfc", "columns"),
    )

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_ab12: Any,
        sample_c: Any,
        alpha: float = 1.0,
        acc_dtype: Any = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = None,
        sample_sfa: Any = None,
        sample_sfb: Any = None,
        sample_amax: Any = None,
        sample_sfc: Any = None,
        sample_norm_const: Any = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        ab12_stages: int = 4,
        arch: str | None = None,
    ) -> None:
        samples = {
            "a": sample_a, "b": sample_b, "ab12": sample_ab12, "c": sample_c, "sfa": sample_sfa, "sfb": sample_sfb,
            "amax": sample_amax, "sfc": sample_sfc, "norm_const": sample_norm_const,
        }  # fmt: skip
        super().__init__(
            samples, alpha=alpha, acc_dtype=acc_dtype, mma_tiler_mn=mma_tiler_mn, cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size, arch=arch, vector_f32=vector_f32,
        )  # fmt: skip
        self.ab12_stages = ab12_stages

    @property
    def _plain(self) -> bool:
        return not any(self.given(name) for name in ("sfa", "sfb", "amax", "sfc", "norm_const"))

    def check_accumulator(self) -> None:
        wide = [name for name in ("a", "ab12") if self.kind(name) == "float32"]
        if self.acc_dtype != torch.float16 or not self._plain:
            super().check_accumulator()
        if wide or self.kind("a") == "bfloat16":
            raise self._error("acc_dtype", self.acc_dtype, "torch.float32, for operands or ab12 with more range")

    def check_options(self) -> None:
        a, ab12, c = self.kind("a"), self.kind("ab12"), self.kind("c")
        n = self.sizes(self.descs)["n"]
        if n % 64:
            raise self._error("columns of the product", n, "multiples of 64, pairs of 32")
        if self.given("ab12") and self.major("ab12") != self.major("c"):
            raise self._refuse("c tensor major", self.major("c"), f"{self.major('ab12')}, that of ab12")
        if self._plain:
            self._check_plain(ab12, c)
        else:
            self._check_scaled(a, ab12, c)

    def _check_plain(self, ab12: str, c: str) -> None:
        if ab12 in FLOAT8:
            raise self._unsupported("ab12 tensor dtype", ab12, "float32, float16, bfloat16")
        if c not in _NARROW:
            raise self._error("c tensor dtype", c, "float16, bfloat16, without scale factors, amax or norm_const")
        if self.mma_tiler_mn[0] == 128 and self.cluster_shape_mn != (1, 1):
            raise self._error("cluster_shape_mn", self.cluster_shape_mn, "(1, 1), for a tile of 128 rows")

    def _check_scaled(self, a: str, ab12: str, c: str) -> None:
        if (ab12, c) == ("float32", "float32"):
            raise self._unsupported("c tensor dtype", c, "float16, bfloat16, with ab12 of float32")
        if a in FLOAT8 and ab12 in ("float32", *FLOAT8):
            raise self._error("ab12 tensor dtype", ab12, f"float16, bfloat16, for operands of {a}")
        if self.scaled and c in FLOAT8:
            raise self._error("c tensor dtype", c, "float32, float16, bfloat16, for operands with scale factors")
        if not self.scaled:
            return
        sizes, (rows, columns) = self.sizes(self.descs), self.mma_tiler_mn
        if a == FLOAT4:
            if self.major("c") != "n":
                raise self._error("c tensor major", self.major("c"), f"n, for operands of {a}")
            if columns % 64:
                raise self._error("mma_tiler_mn", self.mma_tiler_mn, f"multiples of 64 columns, for operands of {a}")
            if c == "bfloat16" and not self.given("amax"):
                raise self._error("amax tensor", "None", f"a tensor, for operands of {a} and c of {c}")
        for size, tile in (("m", rows), ("n", columns)):
            if sizes[size] % tile:
                raise self._error(size, sizes[size], f"multiples of {tile}, the tile, with scale factors")

    def operations(self) -> tuple[Any, ...]:
        operations: list[Any] = [epilogue.Scale("alpha")]
        if self.given("ab12"):
            operations.append(epilogue.StoreTile("ab12", self.kind("ab12"), self.major("ab12")))
        operations.append(epilogue.Gated())
        return (*operations, *self.result_epilogue("c"))

    def reference(self, tensors: Mapping[str, Any]) -> None:
        ab12 = tensors["alpha"] * product(tensors, self.sf_vec_size)
        if self.given("ab12"):
            store(tensors["ab12"], ab12)
        self.store_result(tensors, "c", swiglu(ab12))

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Any,
        b_tensor: Any,
        ab12_tensor: Any,
        c_tensor: Any,
        sfa_tensor: Any = None,
        sfb_tensor: Any = None,
        amax_tensor: Any = None,
        sfc_tensor: Any = None,
        norm_const_tensor: Any = None,
        alpha: float | None = 1.0,
        current_stream: Any = None,
        workspace_tensor: Any = None,
    ) -> None:
        """Writes ``ab12_tensor``, ``c_tensor`` and what else the samples had. See :meth:`FusedGemm.run`.

        ``alpha`` is 1.0 where it is not given, whatever the constructor got; None: that of the constructor.
        """
        tensors = {
            "a": a_tensor, "b": b_tensor, "ab12": ab12_tensor, "c": c_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor,
            "amax": amax_tensor, "sfc": sfc_tensor, "norm_const": norm_const_tensor,
        }  # fmt: skip
        self.run(tensors, alpha, current_stream, workspace_tensor)


def wrapper_results(a: Any, sfa: Any, c_major: str, ab12_dtype: Any, c_dtype: Any) -> dict[str, tuple[Any, str]]:
    """Types and majors of what the wrapper allocates."""
    if c_dtype is None:
        c_dtype = a.dtype
    results = {"c": (c_dtype, c_major)}
    if ab12_dtype is not None:
        results["ab12"] = (ab12_dtype, c_major)
    if name_of(c_dtype) in FLOAT8:
        results["sfc"] = (scale_type(sfa), "")
    if name_of(a.dtype) == FLOAT4 and c_dtype == torch.bfloat16:
        results["amax"] = (torch.float32, "")
    return results


class GemmSwigluSm100(GemmSwiglu):
    """:class:`GemmSwiglu` by the name that existing programs use. The wrapper makes objects of it."""


_cache_of_GemmSwigluObjects: dict[Any, GemmSwiglu] = {}  # noqa: N816  (part of the public contract)
_cache_of_GemmSwigluSm100Objects = _cache_of_GemmSwigluObjects  # noqa: N816


def gemm_swiglu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: Any = torch.float32,
    c_dtype: Any | None = torch.float16,
    acc_dtype: Any = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Any = None,
    sfb_tensor: Any = None,
    norm_const_tensor: Any = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    ab12_stages: int = 4,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles where that was not done yet, and executes.

    Returns ``ab12_tensor, c_tensor, sfc_tensor, amax_tensor``: ab12, of ``ab12_dtype`` (default float32), is None for
    ``ab12_dtype=None``; c is of ``c_dtype``, float16 unless told otherwise, whatever the type of ``a``, as existing
    programs expect; ``c_dtype=None``: the type of ``a``. sfc comes with 8 bits; amax, of the shape (1, 1, 1), with
    four-bit operands and a bfloat16 result. Other arguments and errors as those of :class:`GemmSwiglu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. Gradients flow through ``cudnn.ops.gemm_swiglu``.
    """
    check_major("gemm_swiglu_wrapper", "c_major", c_major)
    given = {
        "a": a_tensor, "b": b_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor, "norm_const": norm_const_tensor,
    }  # fmt: skip
    results = wrapper_results(a_tensor, sfa_tensor, c_major, ab12_dtype, c_dtype)
    options = {
        "acc_dtype": acc_dtype, "mma_tiler_mn": mma_tiler_mn, "cluster_shape_mn": cluster_shape_mn,
        "sf_vec_size": sf_vec_size, "vector_f32": vector_f32, "ab12_stages": ab12_stages,
    }  # fmt: skip
    order = ("ab12", "c", "sfc", "amax")
    return call(GemmSwigluSm100, _cache_of_GemmSwigluObjects, given, results, order, options, {"alpha": alpha}, stream)


def _usual(a: Any, sfa: Any, out: Any) -> list[dict[str, tuple[Any, str]]]:
    types = [(out, out), (None, out)]
    if sfa is None or name_of(a.dtype) not in FLOAT8:
        types.append((torch.float32, torch.float16))  # unless told otherwise; not for 8 bits with scale factors
    return [wrapper_results(a, sfa, "n", ab12, c) for ab12, c in types]


USUAL = usual(GemmSwiglu, _usual)
gemm_swiglu_wrapper_sm100 = gemm_swiglu_wrapper
