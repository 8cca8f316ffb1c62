"""Grouped GEMM + SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GatedExperts
from cudnn.fused.grouped import indexed
from cudnn.fused.host import derived
from cudnn.fused.wrapper import wrapper

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmSwiglu",
    "GroupedGemmSwigluSm100",
    "grouped_gemm_swiglu_wrapper",
    "grouped_gemm_swiglu_wrapper_sm100",
]


class GroupedGemmSwiglu(GatedExperts):
    """:class:`cudnn.GroupedGemmGlu` with SwiGLU and without a bias, as older programs call it.

        c = alpha[e] * (a * sfa) (b[e] * sfb[e])^T               accumulated in float32; rounded where it is stored
        d = up * gate * sigmoid(gate) * prob[m]                  of c unrounded: of every 64 columns 32 gates, 32 up

    With ``a_index``, token i is row ``a_index[i]`` of ``a``: tokens in any order, and each for several experts, are
    multiplied as they lie. A number that a has not stands for a row of zeros.

    Args:
        sample_a ... sample_prob: tensors like those that ``execute`` will get.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + SwiGLU"
    tensors = indexed(spec for spec in GatedExperts.tensors if spec.name not in ("bias", "b_ptrs", "sfb_ptrs"))
    scalars = ()

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_c: Tensor | None,
        sample_d: Tensor,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_d_col: Tensor | None,
        sample_sfd_row: Tensor | None = None,
        sample_sfd_col: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        sample_prob: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        *,
        sample_a_index: Tensor | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        c_tensor: Tensor | None,
        d_tensor: Tensor,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        d_col_tensor: Tensor | None = None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        prob_tensor: Tensor | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
        *,
        a_index: Tensor | None = None,
    ) -> None:
        """Writes ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""


class GroupedGemmSwigluSm100(GroupedGemmSwiglu):
    """:class:`GroupedGemmSwiglu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GroupedGemmSwigluSm100)
def grouped_gemm_swiglu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    norm_const_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    current_stream: Any = None,
    *,
    a_index: Tensor | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``, as
    :func:`cudnn.grouped_gemm_glu_wrapper` does, and c always.
    """
    ...


grouped_gemm_swiglu_wrapper_sm100 = grouped_gemm_swiglu_wrapper
