"""Grouped GEMM + dGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GATES, SITU, GatedExpertsBackward, token_blocks
from cudnn.fused.grouped import FLOATS, bias_gradient, indexed
from cudnn.fused.host import derived
from cudnn.fused.layouts import BlockScales, OneMatrix, TensorSpec
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import call, supports
from cudnn.gemm.formats import BLOCKWISE_DTYPE

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GroupedGemmDglu", "GroupedGemmDgluSm100", "grouped_gemm_dglu_wrapper", "grouped_gemm_dglu_wrapper_sm100"]


class GroupedGemmDglu(GatedExpertsBackward):
    """A grouped GEMM over experts and the backward pass of a gated activation (GLU).

        x     = alpha[e]^2 * (a * sfa) (b[e] * sfb[e])^T         accumulated in float32: the gradient of y * prob
        d_row = x * prob[m] * dy/dc                              the gradient of c, in its order; rounded or quantized
        dprob = dprob + sum over n of x * y
        dbias = sum over the rows of each expert of d_row, before rounding
        amax  = max(amax, max |d_row|) of each expert, of gates and of others, before rounding

    y is what :class:`cudnn.GroupedGemmGlu` makes of ``c``, (m, 2 n): dswiglu and dsituglu of beta[e] * c; dgeglu of c,
    times beta[e] for operands without scale factors. With ``semantics="1.23"``, dgeglu knows neither alpha nor beta.
    The sums of dprob are added up in no fixed order, unless ``_deterministic`` is True. With ``sfd_row``, ``sfd_col``
    and ``norm_const``, ``d_row`` and ``d_col`` are quantized, as those of :class:`cudnn.GroupedGemmQuant`.
    ``a_index`` as of :class:`cudnn.GroupedGemmGlu`.

    For fp8 training with float32 scale factors of 128 elements, the results are those that later GEMMs read: ``d_row``
    of 8 bits with float32 ``sfd_row``, by 128 columns; ``d_blocks`` and ``activation_blocks`` (y * prob[m]), by 128
    tokens of a column, as operands of :class:`cudnn.GroupedGemmWgrad`. They need no ``norm_const``. Blocks that belong
    to no expert are not written. ``c`` of 8 bits may have scale factors too, ``sfc``.

    Args:
        sample_a ... sample_activation: tensors like those that ``execute`` will get. ``sample_dprob=None``: no sums.
        act_func: ``"dswiglu"``, ``"dgeglu"`` or, for operands with scale factors, ``"dsituglu"``. linear_offset (None:
            1.0), geglu_alpha, glu_clamp_max, glu_clamp_min: of dgeglu. situ_beta1, situ_beta2: of dsituglu, positive.
        epilogue_op: None, ``"none"``, ``"identity"``, ``"relu"`` or ``"srelu"``, without effect.
        sample_dbias: (experts, 2 n), bfloat16, overwritten; added up in an order that does not vary.
        round_dgrad_to_input_dtype: x is rounded to the operands' type first, which has 16 bits and no scale factors.
        glu_layout: that of c, d_row and dbias, as of :class:`cudnn.GroupedGemmGlu`.
        sample_activation: (m, n), y * prob[m], which the weights' gradient needs; None: not stored.
        power_of_two_scales: float32 scale factors of results are rounded up to powers of two.
        _deterministic: the sums of dprob are added up in an order that does not vary, by a second kernel.
        others: as those of :class:`cudnn.GroupedGemmGlu`.
    """

    title = "Grouped GEMM + dGLU"
    tensors = (
        *indexed(GatedExpertsBackward.tensors),
        bias_gradient("columns"),
        TensorSpec("activation", OneMatrix("m", "n", "mn"), FLOATS, optional=True, written=True, about="y * prob"),
        TensorSpec(
            "sfc",
            BlockScales("m", "columns"),
            (BLOCKWISE_DTYPE,),
            optional=True,
            about="of c of 8 bits, for 128 columns, with sf_vec_size=128",
        ),
        *token_blocks("d", "columns", "d_row"),
        *token_blocks("activation", "n", "activation"),
    )
    returns = ("d_row", "d_col", "dprob", "dbias", "amax", "sfd_row", "sfd_col")
    buffers = (
        *GatedExpertsBackward.buffers,
        "activation_tensor",
        *(f"{prefix}{name}_blocks_tensor" for name in ("d", "activation") for prefix in ("", "sf")),
    )
    activations = tuple(GATES)
    scalars = (*GatedExpertsBackward.scalars, *SITU)

    @older_order(
        "self sample_a sample_c sample_d_row sample_d_col sample_sfa sample_padded_offsets sample_alpha sample_beta "
        "sample_prob sample_dprob sample_b sample_sfb sample_dbias num_experts b_shape b_dtype sample_sfd_row "
        "sample_sfd_col sample_amax sample_norm_const acc_dtype mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 "
        "m_aligned discrete_col_sfd act_func b_major epilogue_op use_dynamic_sched"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_c: Tensor,
        sample_d_row: Tensor,
        sample_d_col: Tensor | None,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_beta: Tensor,
        sample_prob: Tensor | None,
        sample_dprob: Tensor | None,
        sample_b: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_dbias: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        sample_sfd_row: Tensor | None = None,
        sample_sfd_col: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: str | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "dswiglu",
        b_major: str = "k",
        epilogue_op: str | None = None,
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        linear_offset: float | None = None,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        situ_beta1: float = 4.0,
        situ_beta2: float = 25.0,
        round_dgrad_to_input_dtype: bool = False,
        sample_activation: Tensor | None = None,
        _deterministic: bool = False,
        *,
        semantics: str | None = None,
        sample_a_index: Tensor | None = None,
        glu_layout: str = "interleaved",
        sample_sfc: Tensor | None = None,
        sample_d_blocks: Tensor | None = None,
        sample_sfd_blocks: Tensor | None = None,
        sample_activation_blocks: Tensor | None = None,
        sample_sfactivation_blocks: Tensor | None = None,
        power_of_two_scales: bool = False,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor,
        d_row_tensor: Tensor,
        d_col_tensor: Tensor | None,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        beta_tensor: Tensor,
        prob_tensor: Tensor | None,
        dprob_tensor: Tensor | None,
        b_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        dbias_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        sfb_ptrs: Tensor | None = None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        current_stream: Any = None,
        activation_tensor: Tensor | None = None,
        *,
        workspace: Tensor | None = None,
        a_index: Tensor | None = None,
        sfc_tensor: Tensor | None = None,
        d_blocks_tensor: Tensor | None = None,
        sfd_blocks_tensor: Tensor | None = None,
        activation_blocks_tensor: Tensor | None = None,
        sfactivation_blocks_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``d_row_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    def scratch_workspace_bytes(self) -> int:
        """:meth:`workspace_size` by another name, at least 1."""
        return max(1, self.workspace_size())


class GroupedGemmDgluSm100(GroupedGemmDglu):
    """:class:`GroupedGemmDglu` by the name that existing programs use. The wrapper makes objects of it."""


@supports("canonical_layouts", "bf16_canonical_layouts")
@older_order(
    "a_tensor c_tensor sfa_tensor padded_offsets alpha_tensor beta_tensor prob_tensor dprob_tensor b_tensor sfb_tensor "
    "generate_dbias b_ptrs sfb_ptrs n b_dtype b_major norm_const_tensor acc_dtype d_dtype cd_major mma_tiler_mn "
    "cluster_shape_mn sf_vec_size vector_f32 m_aligned discrete_col_sfd act_func epilogue_op use_dynamic_sched "
    "current_stream"
)
def grouped_gemm_dglu_wrapper(
    a_tensor: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    beta_tensor: Tensor,
    prob_tensor: Tensor | None,
    dprob_tensor: Tensor | None = None,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
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
    sf_fp8_dtype_override: str | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    act_func: str = "dswiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    epilogue_op: str | None = None,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    round_dgrad_to_input_dtype: bool = False,
    activation_tensor: Tensor | None = None,
    deterministic: bool = False,
    *,
    semantics: str | None = None,
    a_index: Tensor | None = None,
    glu_layout: str = "interleaved",
    sfc_tensor: Tensor | None = None,
    d_blocks_tensor: Tensor | None = None,
    sfd_blocks_tensor: Tensor | None = None,
    activation_blocks_tensor: Tensor | None = None,
    sfactivation_blocks_tensor: Tensor | None = None,
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_row_tensor, d_col_tensor, dprob_tensor, dbias_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``.
    ``dprob_tensor`` is added to and returned as it was given. For operands without scale factors: d_row and dprob. For
    others: d_col; amax for a d of 16 bits; scale factors for operands of 8 bits, which need ``norm_const_tensor``.
    ``dbias_tensor``, (experts, 2 n, 1), with ``generate_dbias``. ``activation_tensor``: written and returned, last,
    where it is given; likewise ``d_blocks_tensor``, ``activation_blocks_tensor`` and their scale factors, which are not
    returned. Operands with float32 scale factors: d_row and, for a ``d_dtype`` of 8 bits, sfd_row. Other arguments and
    errors as those of :class:`GroupedGemmDglu`, ``deterministic`` as its ``_deterministic``.
    """
    _deterministic = deterministic
    results = call(GroupedGemmDgluSm100, locals())
    if activation_tensor is not None:
        results["activation_tensor"] = activation_tensor
    return results


grouped_gemm_dglu_wrapper_sm100 = grouped_gemm_dglu_wrapper
