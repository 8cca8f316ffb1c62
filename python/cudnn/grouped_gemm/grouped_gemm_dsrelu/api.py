"""Grouped GEMM + dsReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.grouped import ExpertsGemm
from cudnn.fused.positional import older_order
from cudnn.fused.squared_relu_experts import SquaredReluExpertsBackward
from cudnn.fused.wrapper import call
from cudnn.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmDsrelu",
    "GroupedGemmDsreluSm100",
    "grouped_gemm_dsrelu_wrapper",
    "grouped_gemm_dsrelu_wrapper_sm100",
]


class GroupedGemmDsrelu(SquaredReluExpertsBackward):
    """A grouped GEMM over experts and the backward pass of squared ReLU.

        x       = alpha[e] * (a * sfa) (b[e] * sfb[e])^T         accumulated in float32: the gradient of y * prob
        d_row   = 2 x relu(c) * prob[m]                          the gradient of c; rounded or quantized
        dprob   = dprob + sum over n of x relu(c)^2
        dbias   = sum over the rows of each expert of d_row, before rounding
        d_srelu = relu(c)^2 * prob[m]                            what the forward pass made of c
        amax    = max(amax, max |d_row|) of each expert          before d_row is rounded

    With ``semantics="1.23"``: ``d_row = 2 relu(x) c * prob[m]``, ``dprob`` adds ``relu(x)^2 c``, and there is no
    ``d_srelu``. The sums of dprob are added up in no fixed order, unless ``deterministic`` is True. With ``sfd_row``,
    ``sfd_col`` and ``norm_const``, ``d_row`` and ``d_col`` are quantized, as those of :class:`cudnn.GroupedGemmQuant`,
    and ``d_srelu`` by 32 tokens of a column, with ``sfd_col_d_srelu``.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get.
        use_dsrelu_reuse: a hint of other kernels.
        sample_dbias: (experts, n), bfloat16, overwritten; added up in an order that does not vary.
        tanh_clamp_scale: s, as the forward pass had it: r = s * tanh(relu(c) / s) stands for relu(c), and d_row has the
            factor 1 - (r / s)^2.
        deterministic: dprob, too, is added up in an order that does not vary, by a second kernel in the call's own
            workspace.
        sample_dprob_workspace, sample_dbias_workspace: for existing programs, with ``deterministic`` only.
        sample_a_index, others: as those of :class:`cudnn.GroupedGemmGlu` and of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + dsReLU"
    hints = (*ExpertsGemm.hints, "use_dsrelu_reuse")

    @older_order(
        "self sample_a sample_b sample_c sample_d_row sample_d_col sample_sfa sample_sfb sample_padded_offsets "
        "sample_alpha sample_prob sample_dprob sample_dbias num_experts b_shape b_dtype sample_sfd_row sample_sfd_col "
        "sample_amax sample_norm_const acc_dtype mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 m_aligned "
        "discrete_col_sfd b_major use_dynamic_sched"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor | None = None,
        sample_c: Tensor | None = None,
        sample_d_row: Tensor | None = None,
        sample_d_col: Tensor | None = None,
        sample_d_srelu: Tensor | None = None,
        sample_sfa: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_padded_offsets: Tensor | None = None,
        sample_alpha: Tensor | None = None,
        sample_prob: Tensor | None = None,
        sample_dprob: Tensor | None = None,
        sample_dbias: Tensor | None = None,
        sample_dprob_workspace: Tensor | None = None,
        sample_dbias_workspace: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        sample_sfd_row: Tensor | None = None,
        sample_sfd_col: Tensor | None = None,
        sample_sfd_col_d_srelu: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        use_dsrelu_reuse: bool = False,
        deterministic: bool = False,
        tanh_clamp_scale: float | None = None,
        *,
        semantics: str | None = None,
        sample_a_index: Tensor | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @older_order(
        "self a_tensor c_tensor d_row_tensor d_col_tensor sfa_tensor padded_offsets alpha_tensor prob_tensor "
        "dprob_tensor b_tensor sfb_tensor dbias_tensor b_ptrs sfb_ptrs sfd_row_tensor sfd_col_tensor amax_tensor "
        "norm_const_tensor current_stream"
    )
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor,
        d_row_tensor: Tensor,
        d_col_tensor: Tensor | None,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        prob_tensor: Tensor,
        dprob_tensor: Tensor | None,
        b_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        dbias_tensor: Tensor | None = None,
        dprob_workspace_tensor: Tensor | None = None,
        dbias_workspace_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        sfb_ptrs: Tensor | None = None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        d_srelu_tensor: Tensor | None = None,
        sfd_col_d_srelu_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
        *,
        a_index: Tensor | None = None,
    ) -> None:
        """Writes ``d_row_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""
        self.run(
            (
                a_tensor,
                c_tensor,
                d_row_tensor,
                d_col_tensor,
                sfa_tensor,
                padded_offsets,
                alpha_tensor,
                prob_tensor,
                dprob_tensor,
                b_tensor,
                sfb_tensor,
                dbias_tensor,
                dprob_workspace_tensor,
                dbias_workspace_tensor,
                b_ptrs,
                sfb_ptrs,
                sfd_row_tensor,
                sfd_col_tensor,
                d_srelu_tensor,
                sfd_col_d_srelu_tensor,
                amax_tensor,
                norm_const_tensor,
                a_index,
            ),
            (),
            current_stream,
            workspace_tensor,
        )


class GroupedGemmDsreluSm100(GroupedGemmDsrelu):
    """:class:`GroupedGemmDsrelu` by the name that existing programs use. The wrapper makes objects of it."""


@older_order(
    "a_tensor b_tensor c_tensor sfa_tensor sfb_tensor padded_offsets alpha_tensor prob_tensor dprob_tensor "
    "generate_dbias b_ptrs sfb_ptrs n b_dtype b_major norm_const_tensor acc_dtype d_dtype cd_major mma_tiler_mn "
    "cluster_shape_mn sf_vec_size vector_f32 m_aligned discrete_col_sfd use_dynamic_sched current_stream"
)
def grouped_gemm_dsrelu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor | None = None,
    c_tensor: Tensor | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha_tensor: Tensor | None = None,
    prob_tensor: Tensor | None = None,
    dprob_tensor: Tensor | None = None,
    generate_dbias: bool = False,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
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
    use_dynamic_sched: bool = False,
    use_dsrelu_reuse: bool = False,
    deterministic: bool | None = None,
    tanh_clamp_scale: float | None = None,
    current_stream: Any = None,
    *,
    semantics: str | None = None,
    a_index: Tensor | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_row_tensor, d_col_tensor, d_srelu_tensor, dprob_tensor, dbias_tensor, amax_tensor, sfd_row_tensor,
    sfd_col_tensor, sfd_col_d_srelu_tensor``: the scale factors, and d_col, for 8-bit operands and an 8-bit d, which
    need ``norm_const_tensor``; amax for a d of 16 bits; dbias with ``generate_dbias``. ``dprob_tensor`` is added to and
    returned, where it is given. With ``semantics="1.23"`` the two of d_srelu are not among them.
    ``deterministic=None``: what ``torch.use_deterministic_algorithms`` said. Other arguments and errors as those of
    :class:`GroupedGemmDsrelu`.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    results = call(GroupedGemmDsreluSm100, locals())
    if GroupedGemmDsrelu.older_semantics(locals()):
        for name in ("d_srelu_tensor", "sfd_col_d_srelu_tensor"):
            results.pop(name)
    return results


grouped_gemm_dsrelu_wrapper_sm100 = grouped_gemm_dsrelu_wrapper
