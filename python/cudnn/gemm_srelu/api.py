"""GEMM + squared ReLU: the class, and the function that allocates the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cudnn.api_base import TupleDict
from cudnn.gemm.arguments import Argument, Column, Matrix, amax, operands, quantizer
from cudnn.gemm.base import FusedGemm, call, check_major, scale_type
from cudnn.gemm.formats import FLOAT4, FLOAT8, name_of
from cudnn.gemm.reference import product, store
from cudnn.gemm.usual import usual
from cudnn.gemm_srelu.reference import squared_relu
from cudnn.lazy import torch
from cudnn_kernels import epilogue

RESULT_TYPES = ("float16", "bfloat16", "float32", *FLOAT8)


class SquaredReluGemm(FusedGemm):
    """What the squared ReLU and its backward pass share: most arguments, the rules for c, d and the tile."""

    shared: ClassVar = (
        *operands(),
        Argument("d", Matrix("m", "n", "mn"), RESULT_TYPES, written=True),
        Argument("prob", Column("m"), ("float32",)),
        *quantizer("sfd", "n"),
        amax(dimensions=1),
    )
    quantized = ("d", "sfd")
    tile_n: ClassVar = (64, 128, 192, 256)
    largest_cluster = 4
    default_cluster = (2, 1)

    def check_options(self) -> None:
        if self.major("c") != self.major("d"):
            raise self._refuse("d tensor major", self.major("d"), f"{self.major('c')}, that of c")
        a, d = self.kind("a"), self.kind("d")
        if a == FLOAT4 and d in FLOAT8:
            raise self._error("d tensor dtype", d, f"float16, bfloat16, float32, for operands of {a}")


def quantized_results(a: Any, sfa: Any, d_dtype: Any, d_major: str) -> dict[str, tuple[Any, str]]:
    """What the wrappers allocate for d, by its type and that of A: sfd with 8 bits, amax with four-bit operands."""
    results = {"d": (d_dtype, d_major)}
    if name_of(d_dtype) in FLOAT8:
        results["sfd"] = (scale_type(sfa), "")
    elif name_of(a.dtype) == FLOAT4:
        results["amax"] = (torch.float32, "")
    return results


class GemmSrelu(SquaredReluGemm):
    """A GEMM, its result stored, and the squared ReLU of it times a probability for each row.

        z    = alpha * (a * sfa) (b * sfb)^T         accumulated in float32
        c    = z                                     rounded
        d    = relu(z)^2 * prob[m]                   of z unrounded; rounded, or quantised where it has 8 bits
        amax = max(amax, max |d|)                    before d is rounded

    ===========  ===============  ========================  ========================================================
    tensor       shape            strides                   type
    ===========  ===============  ========================  ========================================================
    a            (m, k, l)        (k, 1, mk), (1, m, mk)    float16, bfloat16, float32, float8_e4m3fn, float8_e5m2;
                                                            with sfa: float4_e2m1fn_x2 or uint8, float8
    b            (n, k, l)        (k, 1, nk), (1, n, nk)    that of a
    c, d         (m, n, l)        (n, 1, mn), (1, m, mn)    float16, bfloat16, float32, float8
    sfa, sfb     scales of a, b   atoms of 128 x 4          float8_e8m0fnu, float8_e4m3fn
    prob         (m, 1, l)        contiguous or (1, 1, m)   float32
    sfd          scales of d      atoms of 128 x 4          float8_e8m0fnu; with a d of 8 bits
    norm_const   (1,)             (1,)                      float32; with a d of 8 bits
    amax         (1,), (1, 1, 1)  any                       float32; the caller fills it with -inf
    ===========  ===============  ========================  ========================================================

    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get; sample_sfa and sample_sfb may be
            None.
        alpha: where ``execute`` is given none.
        acc_dtype: float32.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them, columns rounded up to multiples of 128 for
            operands with scale factors, at most 128 if c and d are float32; on sm_90a the library chooses tiles by
            itself.
        sf_vec_size: elements along k, or along n for sfd, that share a scale factor: 16 or 32.
        vector_f32: a hint of other architectures.
        arch: as for :class:`cudnn.GemmSwiglu`.
    """

    arguments = (*SquaredReluGemm.shared, Argument("c", Matrix("m", "n", "mn"), RESULT_TYPES, written=True))

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d: Any,
        sample_sfa: Any,
        sample_sfb: Any,
        sample_prob: Any,
        sample_sfd: Any = None,
        sample_amax: Any = None,
        sample_norm_const: Any = None,
        alpha: float = 1.0,
        acc_dtype: Any = torch.float32,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        arch: str | None = None,
    ) -> None:
        samples = {
            "a": sample_a, "b": sample_b, "c": sample_c, "d": sample_d, "sfa": sample_sfa, "sfb": sample_sfb,
            "prob": sample_prob, "sfd": sample_sfd, "amax": sample_amax, "norm_const": sample_norm_const,
        }  # fmt: skip
        super().__init__(
            samples, alpha=alpha, acc_dtype=acc_dtype, mma_tiler_mn=mma_tiler_mn, cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size, arch=arch, vector_f32=vector_f32,
        )  # fmt: skip

    def operations(self) -> tuple[Any, ...]:
        return (
            epilogue.Scale("alpha"),
            epilogue.StoreTile("c", self.kind("c"), self.major("c")),
            epilogue.SquaredRelu(),
            epilogue.MultiplyColumn("prob"),
            *self.result_epilogue("d"),
        )

    def reference(self, tensors: Mapping[str, Any]) -> None:
        z = tensors["alpha"] * product(tensors, self.sf_vec_size)
        store(tensors["c"], z)
        self.store_result(tensors, "d", squared_relu(z, tensors["prob"]))

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        sfa_tensor: Any,
        sfb_tensor: Any,
        prob_tensor: Any,
        sfd_tensor: Any = None,
        amax_tensor: Any = None,
        norm_const_tensor: Any = None,
        alpha: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Any = None,
    ) -> None:
        """Writes ``c_tensor``, ``d_tensor`` and what else the samples had. See :meth:`FusedGemm.run`."""
        tensors = {
            "a": a_tensor, "b": b_tensor, "c": c_tensor, "d": d_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor,
            "prob": prob_tensor, "sfd": sfd_tensor, "amax": amax_tensor, "norm_const": norm_const_tensor,
        }  # fmt: skip
        self.run(tensors, alpha, current_stream, workspace_tensor)


class GemmSreluSm100(GemmSrelu):
    """:class:`GemmSrelu` by the name that existing programs use. The wrapper makes objects of it."""


_cache_of_GemmSreluObjects: dict[Any, GemmSrelu] = {}  # noqa: N816  (part of the public contract)
_cache_of_GemmSreluSm100Objects = _cache_of_GemmSreluObjects  # noqa: N816


def gemm_srelu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: Any = torch.bfloat16,
    d_dtype: Any = torch.bfloat16,
    acc_dtype: Any = torch.float32,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    norm_const_tensor: Any = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles where that was not done yet, and executes.

    Returns ``c_tensor, d_tensor, amax_tensor, sfd_tensor``: amax comes with four-bit operands, sfd with a d of 8 bits,
    which needs ``norm_const_tensor``; else they are None. Other arguments and errors as those of :class:`GemmSrelu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_srelu`` is the operator for
    ``torch.compile``.
    """
    check_major("gemm_srelu_wrapper", "c_major", c_major)
    given = {
        "a": a_tensor, "b": b_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor, "prob": prob_tensor,
        "norm_const": norm_const_tensor,
    }  # fmt: skip
    results = {"c": (c_dtype, c_major), **quantized_results(a_tensor, sfa_tensor, d_dtype, c_major)}
    options = {
        "acc_dtype": acc_dtype, "mma_tiler_mn": mma_tiler_mn, "cluster_shape_mn": cluster_shape_mn,
        "sf_vec_size": sf_vec_size, "vector_f32": vector_f32,
    }  # fmt: skip
    order = ("c", "d", "amax", "sfd")
    return call(GemmSreluSm100, _cache_of_GemmSreluObjects, given, results, order, options, {"alpha": alpha}, stream)


USUAL = usual(GemmSrelu, lambda a, sfa, out: [{"c": (out, "n"), **quantized_results(a, sfa, out, "n")}])
gemm_srelu_wrapper_sm100 = gemm_srelu_wrapper
