"""GEMM + backward pass of the squared ReLU: the class, and the function that allocates the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.gemm.arguments import Argument, Column, Matrix
from cudnn.gemm.base import call, check_major
from cudnn.gemm.reference import product
from cudnn.gemm.usual import usual
from cudnn.gemm_srelu.api import SquaredReluGemm, quantized_results
from cudnn.gemm_srelu.reference import squared_relu_backward
from cudnn.lazy import torch
from cudnn_kernels import epilogue


class GemmDsrelu(SquaredReluGemm):
    """A GEMM, and the backward pass of a squared ReLU times a probability for each row.

        x     = alpha * (a * sfa) (b * sfb)^T        accumulated in float32
        d     = 2 relu(x) * c * prob[m]              rounded, or quantised where it has 8 bits
        dprob = dprob + sum over n of relu(x)^2 * c
        amax  = max(amax, max |d|)                   before d is rounded

    ===========  ===============  ========================  ========================================================
    tensor       shape            strides                   type
    ===========  ===============  ========================  ========================================================
    a            (m, k, l)        (k, 1, mk), (1, m, mk)    float16, bfloat16, float32, float8_e4m3fn, float8_e5m2;
                                                            with sfa: float4_e2m1fn_x2 or uint8, float8
    b            (n, k, l)        (k, 1, nk), (1, n, nk)    that of a
    c            (m, n, l)        (n, 1, mn), (1, m, mn)    float16, bfloat16, float32
    d            (m, n, l)        those of c                float16, bfloat16, float32, float8
    prob, dprob  (m, 1, l)        contiguous or (1, 1, m)   float32; the caller fills dprob with 0
    sfa, sfb     scales of a, b   atoms of 128 x 4          float8_e8m0fnu, float8_e4m3fn
    sfd          scales of d      atoms of 128 x 4          float8_e8m0fnu; with a d of 8 bits
    norm_const   (1,)             (1,)                      float32; with a d of 8 bits
    amax         (1,), (1, 1, 1)  any                       float32; the caller fills it with -inf
    ===========  ===============  ========================  ========================================================

    The sums of dprob are added up in no fixed order, so that their last bits vary; all else repeats bit by bit.
    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors. Options as those of :class:`cudnn.GemmSrelu`.
    """

    arguments = (
        *SquaredReluGemm.shared,
        Argument("c", Matrix("m", "n", "mn"), ("float16", "bfloat16", "float32")),
        Argument("dprob", Column("m"), ("float32",), fill=0.0, written=True),
    )

    def __init__(
        self,
        sample_a: Any,
        sample_b: Any,
        sample_c: Any,
        sample_d: Any,
        sample_dprob: Any,
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
            "a": sample_a, "b": sample_b, "c": sample_c, "d": sample_d, "dprob": sample_dprob, "sfa": sample_sfa,
            "sfb": sample_sfb, "prob": sample_prob, "sfd": sample_sfd, "amax": sample_amax,
            "norm_const": sample_norm_const,
        }  # fmt: skip
        super().__init__(
            samples, alpha=alpha, acc_dtype=acc_dtype, mma_tiler_mn=mma_tiler_mn, cluster_shape_mn=cluster_shape_mn,
            sf_vec_size=sf_vec_size, arch=arch, vector_f32=vector_f32,
        )  # fmt: skip

    def operations(self) -> tuple[Any, ...]:
        return (
            epilogue.Scale("alpha"),
            epilogue.LoadTile("c", self.kind("c"), self.major("c")),
            epilogue.SquaredReluBackward(),
            epilogue.SumRow("dprob", "prob_gradient"),
            epilogue.MultiplyColumn("prob"),
            *self.result_epilogue("d"),
        )

    def reference(self, tensors: Mapping[str, Any]) -> None:
        x = tensors["alpha"] * product(tensors, self.sf_vec_size)
        d, dprob = squared_relu_backward(x, tensors["c"].float(), tensors["prob"])
        tensors["dprob"].add_(dprob)
        self.store_result(tensors, "d", d)

    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Any,
        b_tensor: Any,
        c_tensor: Any,
        d_tensor: Any,
        dprob_tensor: Any,
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
        """Writes ``d_tensor``, adds to ``dprob_tensor``, and writes what else the samples had.

        See :meth:`FusedGemm.run`.
        """
        tensors = {
            "a": a_tensor, "b": b_tensor, "c": c_tensor, "d": d_tensor, "dprob": dprob_tensor, "sfa": sfa_tensor,
            "sfb": sfb_tensor, "prob": prob_tensor, "sfd": sfd_tensor, "amax": amax_tensor,
            "norm_const": norm_const_tensor,
        }  # fmt: skip
        self.run(tensors, alpha, current_stream, workspace_tensor)


class GemmDsreluSm100(GemmDsrelu):
    """:class:`GemmDsrelu` by the name that existing programs use. The wrapper makes objects of it."""


_cache_of_GemmDsreluObjects: dict[Any, GemmDsrelu] = {}  # noqa: N816  (part of the public contract)
_cache_of_GemmDsreluSm100Objects = _cache_of_GemmDsreluObjects  # noqa: N816


def gemm_dsrelu_wrapper(
    a_tensor: Any,
    b_tensor: Any,
    c_tensor: Any,
    sfa_tensor: Any,
    sfb_tensor: Any,
    prob_tensor: Any,
    alpha: float = 1.0,
    d_major: str = "n",
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

    Returns ``d_tensor, dprob_tensor, amax_tensor, sfd_tensor``: amax comes with four-bit operands, sfd with a d of 8
    bits, which needs ``norm_const_tensor``; else they are None. Other arguments and errors as those of
    :class:`GemmDsrelu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_dsrelu`` is the operator for
    ``torch.compile``.
    """
    check_major("gemm_dsrelu_wrapper", "d_major", d_major)
    given = {
        "a": a_tensor, "b": b_tensor, "c": c_tensor, "sfa": sfa_tensor, "sfb": sfb_tensor, "prob": prob_tensor,
        "norm_const": norm_const_tensor,
    }  # fmt: skip
    results = {"dprob": (torch.float32, ""), **quantized_results(a_tensor, sfa_tensor, d_dtype, d_major)}
    options = {
        "acc_dtype": acc_dtype, "mma_tiler_mn": mma_tiler_mn, "cluster_shape_mn": cluster_shape_mn,
        "sf_vec_size": sf_vec_size, "vector_f32": vector_f32,
    }  # fmt: skip
    order = ("d", "dprob", "amax", "sfd")
    return call(GemmDsreluSm100, _cache_of_GemmDsreluObjects, given, results, order, options, {"alpha": alpha}, stream)


USUAL = usual(GemmDsrelu, lambda a, sfa, out: [{"c": (out, "n"), **quantized_results(a, sfa, out, "n")}])
gemm_dsrelu_wrapper_sm100 = gemm_dsrelu_wrapper
