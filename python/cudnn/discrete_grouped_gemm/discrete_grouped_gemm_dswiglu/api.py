"""Grouped GEMM with pointers to weights (ptr-array) + backward pass of a gated activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GatedExpertsBackward
from cudnn.fused.grouped import ExpertsGemm, bias_gradient, with_pointers
from cudnn.fused.host import derived
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import wrapper

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "DiscreteGroupedGemmDswiglu",
    "DiscreteGroupedGemmDswigluSm100",
    "discrete_grouped_gemm_dswiglu_wrapper",
    "discrete_grouped_gemm_dswiglu_wrapper_sm100",
]


class DiscreteGroupedGemmDswiglu(GatedExpertsBackward):
    """:class:`cudnn.GroupedGemmDglu` for weights passed as device pointers only, with another order of arguments.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get.
        num_experts, b_shape, b_dtype: of the weights: how many, (n, k) in elements, type.
        act_func: ``"dswiglu"`` or ``"dgeglu"``. The numbers of dgeglu are arguments of calls: None there is 1.0 for
            linear_offset, with ``semantics="1.23"`` 0.0.
        others: as those of :class:`cudnn.GroupedGemmDglu`.
    """

    title = "Discrete grouped GEMM + dSwiGLU"
    tensors = (*with_pointers(GatedExpertsBackward.tensors), bias_gradient("columns"))
    returns = ("d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col")
    hints = tuple(name for name in ExpertsGemm.hints if not name.endswith("_ptrs"))
    autocast_inputs = ()  # b_dtype is the type of the weights
    older_offset = 0.0

    def __init__(
        self,
        sample_a: Tensor,
        num_experts: int,
        b_shape: tuple[int, int],
        b_dtype: dtype,
        sample_c: Tensor,
        sample_d_row: Tensor,
        sample_d_col: Tensor | None,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_beta: Tensor,
        sample_prob: Tensor | None,
        sample_dprob: Tensor | None,
        sample_dbias: Tensor | None = None,
        sample_sfd_row: Tensor | None = None,
        sample_sfd_col: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "dswiglu",
        b_major: str = "k",
        epilogue_op: str | None = None,
        use_dynamic_sched: bool = False,
        *,
        semantics: str | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    @older_order(
        "self a_tensor b_ptrs c_tensor d_row_tensor d_col_tensor sfa_tensor sfb_ptrs padded_offsets alpha_tensor "
        "beta_tensor prob_tensor dprob_tensor dbias_tensor sfd_row_tensor sfd_col_tensor amax_tensor "
        "norm_const_tensor current_stream"
    )
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_ptrs: Tensor,
        c_tensor: Tensor,
        d_row_tensor: Tensor,
        d_col_tensor: Tensor | None,
        sfa_tensor: Tensor | None,
        sfb_ptrs: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        beta_tensor: Tensor,
        prob_tensor: Tensor | None,
        dprob_tensor: Tensor | None,
        dbias_tensor: Tensor | None = None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        linear_offset: float | None = None,
        geglu_alpha: float | None = None,
        glu_clamp_max: float | None = None,
        glu_clamp_min: float | None = None,
        current_stream: Any = None,
        *,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``d_row_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""


class DiscreteGroupedGemmDswigluSm100(DiscreteGroupedGemmDswiglu):
    """:class:`DiscreteGroupedGemmDswiglu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(DiscreteGroupedGemmDswigluSm100)
@older_order(
    "a_tensor b_ptrs c_tensor sfa_tensor sfb_ptrs padded_offsets alpha_tensor beta_tensor prob_tensor "
    "dprob_tensor n b_dtype generate_dbias norm_const_tensor acc_dtype d_dtype cd_major mma_tiler_mn "
    "cluster_shape_mn sf_vec_size vector_f32 m_aligned discrete_col_sfd act_func b_major epilogue_op "
    "use_dynamic_sched current_stream"
)
def discrete_grouped_gemm_dswiglu_wrapper(
    a_tensor: Tensor,
    b_ptrs: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_ptrs: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    beta_tensor: Tensor,
    prob_tensor: Tensor | None,
    dprob_tensor: Tensor | None,
    n: int,
    b_dtype: dtype,
    generate_dbias: bool = False,
    norm_const_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    b_major: str = "k",
    epilogue_op: str | None = None,
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
    *,
    semantics: str | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_row_tensor, d_col_tensor, dprob_tensor, dbias_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``, as
    :func:`cudnn.grouped_gemm_dglu_wrapper` does. ``n``: columns of the GEMM; k is that of a.
    """
    ...


discrete_grouped_gemm_dswiglu_wrapper_sm100 = discrete_grouped_gemm_dswiglu_wrapper
