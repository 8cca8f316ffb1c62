"""GEMM + backward pass of the squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.fused.gemm import NARROW
from cudnn.fused.host import derived
from cudnn.fused.layouts import Column, Matrix, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm_srelu.api import SquaredReluGemm
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmDsrelu", "GemmDsreluSm100", "gemm_dsrelu_wrapper", "gemm_dsrelu_wrapper_sm100"]


class GemmDsrelu(SquaredReluGemm):
    """A GEMM, and the backward pass of a squared ReLU times a probability for each row.

        x     = alpha * (a * sfa) (b * sfb)^T        accumulated in float32
        d     = 2 relu(x) * c * prob[m]              rounded, or quantized where it has 8 bits
        dprob = dprob + sum over n of relu(x)^2 * c
        amax  = max(amax, max |d|)                   before d is rounded

    The sums of dprob are added up in no fixed order, so that their last bits vary; all else repeats bit by bit.
    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors. Options as those of :class:`cudnn.GemmSrelu`.
    """

    title = "GEMM + dsReLU"
    tensors = (
        *SquaredReluGemm.shared,
        TensorSpec("c", Matrix("m", "n", "mn"), (*NARROW, "float32")),
        TensorSpec("dprob", Column("m"), ("float32",), fill=0.0, written=True, about="the caller fills it with 0"),
    )
    returns = ("d", "dprob", "amax", "sfd")

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_c: Tensor,
        sample_d: Tensor,
        sample_dprob: Tensor,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_prob: Tensor,
        sample_sfd: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        alpha: float = 1.0,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        arch: str | None = None,
        accurate: bool = False,
        power_of_two_scales: bool = False,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        c_tensor: Tensor,
        d_tensor: Tensor,
        dprob_tensor: Tensor,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        prob_tensor: Tensor,
        sfd_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        alpha: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``d_tensor``, adds to ``dprob_tensor``, and writes what else the samples had.

        See :attr:`FusedAPI.run`.
        """

    def operations(self) -> tuple[Any, ...]:
        return (
            epilogue.Scale("alpha"),
            self.load("c"),
            epilogue.SquaredReluBackward(),
            epilogue.SumRow("dprob", "prob_gradient"),
            epilogue.MultiplyColumn("prob"),
            *self.result_epilogue("d"),
        )

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {"dprob": (torch.float32, ""), **cls.d_results(arguments, arguments["d_major"])}


class GemmDsreluSm100(GemmDsrelu):
    """:class:`GemmDsrelu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GemmDsreluSm100)
def gemm_dsrelu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    prob_tensor: Tensor,
    alpha: float = 1.0,
    d_major: str = "n",
    d_dtype: dtype = torch.bfloat16,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    stream: Any = None,
    accurate: bool = False,
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_tensor, dprob_tensor, amax_tensor, sfd_tensor``: amax comes with four-bit operands, sfd with a d of 8
    bits, which needs ``norm_const_tensor``; else they are None. Other arguments and errors as those of
    :class:`GemmDsrelu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. ``cudnn.ops.gemm_dsrelu`` is the operator for
    ``torch.compile``.
    """
    ...


gemm_dsrelu_wrapper_sm100 = gemm_dsrelu_wrapper
