"""Grouped GEMM + gated activation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GATES, SITU, GatedExperts
from cudnn.fused.grouped import COUNTER, indexed
from cudnn.fused.host import derived
from cudnn.fused.layouts import BlockScales, TensorSpec
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import supports, wrapper
from cudnn.gemm.formats import BLOCKWISE_DTYPE

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GroupedGemmGlu", "GroupedGemmGluSm100", "grouped_gemm_glu_wrapper", "grouped_gemm_glu_wrapper_sm100"]


class GroupedGemmGlu(GatedExperts):
    """A grouped GEMM over experts and a gated activation (GLU), with row weights.

        c    = alpha[e] * acc + bias[n, e]                       acc = (a * sfa) (b[e] * sfb[e])^T, in float32
        d    = y * prob[m]                                       of c unrounded; prob: 1 by default
        amax = max(amax, max |d|) of each expert                 before d is rounded

    Of every 64 columns of c, the first 32 are gates g, the others u:

        swiglu   y = u * g * sigmoid(g)
        geglu    y = (u' + linear_offset) * g' * sigmoid(geglu_alpha * g'),    g' = min(g, glu_clamp_max),
                                                               u' = max(min(u, glu_clamp_max), glu_clamp_min)
        situglu  y = situ_beta2 tanh(u / situ_beta2) * situ_beta1 tanh(g / situ_beta1) * sigmoid(g)

    With ``sfd_row``, ``sfd_col`` and ``norm_const``, ``d`` is quantized by 32 columns of a row, and ``d_col`` by 32
    tokens of a column; else ``d_col`` is not written. ``c`` may be left out. With ``sfd_row`` of float32, (m, n / 256,
    1), and ``sf_vec_size=128``, ``d`` alone is quantized, by 128 columns of a row; ``norm_const`` is 1 where it is not
    given. Operands have 16 bits then, or float32 scale factors on sm_90a. With ``sfc``, c is quantized by 128 columns
    of a row too, on sm_90a.

    With ``a_index``, token i is row ``a_index[i]`` of ``a``: tokens in any order, and each for several experts, are
    multiplied as they lie. Out-of-range indices read as zero. Float32 ``sfa`` has the scales of a's
    rows, (rows of a, k / 128, 1); other scale factors cannot be combined with ``a_index``.

    Args:
        sample_a ... sample_prob: tensors like those that ``execute`` will get.
        act_func: ``"swiglu"``, ``"geglu"`` or, for operands with scale factors, ``"situglu"``. Their numbers are
            arguments of calls: None there is 1.0 for linear_offset, 1.702 for geglu_alpha, 7.0 and -7.0 for the clamps,
            4.0 and 25.0 for those of situglu, which are positive.
        situ_beta1: what None is for it in calls.
        glu_layout: ``"interleaved"``: alternating blocks of 32 gates and 32 ups in columns of c, rows of b and elements
            of bias, as above. ``"concatenated"``: the gates are the first half, the others the second one; b is
            k-major, without scale factors. ``b_ptrs`` has two addresses for each expert then, of matrices (n / 2, k) of
            16 bits: first those of all experts' gates, then those of the others, which may lie anywhere.
        power_of_two_scales: float32 ``sfd_row`` are rounded up to powers of two.
        generate_c: for the wrapper, whether c is stored for operands without scale factors.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + GLU"
    tensors = (
        *indexed(GatedExperts.tensors),
        COUNTER,
        TensorSpec(
            "sfc",
            BlockScales("m", "n"),
            (BLOCKWISE_DTYPE,),
            optional=True,
            written=True,
            about="of c of 8 bits, for 128 columns, with sf_vec_size=128",
        ),
    )
    activations = tuple(GATES)
    scalars = (*GatedExperts.scalars, *SITU)

    @older_order(
        "self sample_a sample_c sample_d sample_sfa sample_padded_offsets sample_alpha sample_d_col sample_b "
        "sample_sfb sample_bias num_experts b_shape b_dtype sample_sfd_row sample_sfd_col sample_amax "
        "sample_norm_const sample_prob acc_dtype mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 m_aligned "
        "discrete_col_sfd act_func b_major use_dynamic_sched"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_c: Tensor | None,
        sample_d: Tensor,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_d_col: Tensor | None,
        sample_b: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_bias: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        sample_sfd_row: Tensor | None = None,
        sample_sfd_col: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        sample_prob: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: str | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        act_func: str = "swiglu",
        situ_beta1: float = 4.0,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        generate_c: bool = False,
        *,
        sample_scheduler_counter: Tensor | None = None,
        semantics: str | None = None,
        sample_a_index: Tensor | None = None,
        glu_layout: str = "interleaved",
        sample_sfc: Tensor | None = None,
        power_of_two_scales: bool = False,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    @older_order(
        "self a_tensor c_tensor d_tensor sfa_tensor padded_offsets alpha_tensor b_tensor sfb_tensor bias_tensor "
        "b_ptrs sfb_ptrs d_col_tensor sfd_row_tensor sfd_col_tensor amax_tensor norm_const_tensor prob_tensor "
        "current_stream"
    )
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor | None,
        d_tensor: Tensor,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        b_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        bias_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        sfb_ptrs: Tensor | None = None,
        d_col_tensor: Tensor | None = None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        prob_tensor: Tensor | None = None,
        linear_offset: float | None = None,
        geglu_alpha: float | None = None,
        glu_clamp_max: float | None = None,
        glu_clamp_min: float | None = None,
        situ_beta1: float | None = None,
        situ_beta2: float | None = None,
        current_stream: Any = None,
        *,
        scheduler_counter_tensor: Tensor | None = None,
        workspace_tensor: Tensor | None = None,
        a_index: Tensor | None = None,
        sfc_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""


class GroupedGemmGluSm100(GroupedGemmGlu):
    """:class:`GroupedGemmGlu` by the name that existing programs use. The wrapper makes objects of it."""


@supports("canonical_layouts", "bf16_canonical_layouts", "external_scheduler_counter")
@wrapper(GroupedGemmGluSm100)
@older_order(
    "a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor sfb_tensor bias_tensor b_ptrs sfb_ptrs n b_dtype b_major "
    "norm_const_tensor prob_tensor acc_dtype c_dtype d_dtype cd_major mma_tiler_mn cluster_shape_mn sf_vec_size "
    "vector_f32 m_aligned discrete_col_sfd act_func use_dynamic_sched current_stream"
)
def grouped_gemm_glu_wrapper(
    a_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    bias_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
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
    act_func: str = "swiglu",
    linear_offset: float | None = None,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    situ_beta1: float = 4.0,
    situ_beta2: float = 25.0,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    generate_c: bool = False,
    sf_fp8_dtype_override: str | None = None,
    *,
    scheduler_counter_tensor: Tensor | None = None,
    semantics: str | None = None,
    a_index: Tensor | None = None,
    glu_layout: str = "interleaved",
    sfc_tensor: Tensor | None = None,
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``. For operands without
    scale factors: c with ``generate_c`` only, and d. For others: c, d, d_col; amax for a d of 16 bits; scale factors
    for operands of 8 bits, which need ``norm_const_tensor``. Other arguments and errors as those of the class.
    """
    ...


grouped_gemm_glu_wrapper_sm100 = grouped_gemm_glu_wrapper
