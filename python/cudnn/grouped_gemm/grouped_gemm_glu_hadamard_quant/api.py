"""Grouped GEMM + GLU + Hadamard transform + quantization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.host import derived
from cudnn.fused.transformed_experts import TransformedExperts
from cudnn.fused.wrapper import wrapper

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmGluHadamardQuant",
    "GroupedGemmGluHadamardQuantSm100",
    "grouped_gemm_glu_hadamard_quant_wrapper",
    "grouped_gemm_glu_hadamard_quant_wrapper_sm100",
]


class GroupedGemmGluHadamardQuant(TransformedExperts):
    """A grouped GEMM over experts, a gated activation, and its Hadamard transform along rows or columns; both are
    rounded, or quantized to four bits.

        c = alpha[e] * acc + bias[n, e]                          acc = (a * sfa) (b[e] * sfb[e])^T, in float32
        v = bfloat16(glu_alpha * y * prob[m])                    y of c unrounded and clamped, as that of GroupedGemmGlu
        d = v                                                    or quantized by 16 columns of a row, with sfd
        rht_rowwise = bfloat16(H v / 4)                          of 16 columns of a row; or quantized likewise
        rht_colwise = bfloat16(H v / 4)                          of 16 tokens of a column, quantized by these

    H is that of :class:`cudnn.GroupedGemmGluHadamard`. A scale factor is s = max |v| / 6 * norm_const, rounded,
    and its elements are v norm_const / s, rounded; transforms have rht_norm_const instead. Experts have multiples of
    256 rows.

    ``rht_colwise`` holds the tokens of each expert for one column after the other: row j of column i of an expert with
    the rows from o to before o + t is element columns * o + i * t + j. Its scale factors in ``sfrht_colwise`` begin
    with number columns / 16 * o, and that of rows 16 j ... of column i is number ((i % 32 * 4 + i // 32 % 4) * columns
    / 128 + i // 128) * t / 16 + j % 4 * t / 64 + j // 4 of the expert.

    Args:
        sample_a ... sample_bias: tensors like those that ``execute`` will get. ``prob`` may not be left out.
        act_func: ``"swiglu"``, ``"geglu"`` with offset 1 and slope 1.702, or ``"srelu"``: y = relu(c)^2.
        glu_alpha: a factor of y, None for 1. glu_limit: gates and others are clamped to both sides of 0; None: not at
            all. Neither is for srelu.
        sf_vec_size: 16.
        others: as those of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + GLU + Hadamard + quantization"

    def __init__(
        self,
        sample_a: Tensor,
        sample_c: Tensor,
        sample_d: Tensor,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_prob: Tensor,
        sample_b: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        num_experts: int | None = None,
        b_shape: tuple[int, int] | None = None,
        b_dtype: dtype | None = None,
        b_major: str = "k",
        sample_sfd: Tensor | None = None,
        sample_rht_rowwise: Tensor | None = None,
        sample_sfrht_rowwise: Tensor | None = None,
        sample_rht_colwise: Tensor | None = None,
        sample_sfrht_colwise: Tensor | None = None,
        sample_bias: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: str | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        act_func: str = "swiglu",
        use_dynamic_sched: bool = False,
        glu_alpha: float | None = None,
        glu_limit: float | None = None,
        *,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        c_tensor: Tensor,
        d_tensor: Tensor,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        prob_tensor: Tensor,
        b_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        b_ptrs: Tensor | None = None,
        sfb_ptrs: Tensor | None = None,
        sfd_tensor: Tensor | None = None,
        rht_rowwise_tensor: Tensor | None = None,
        sfrht_rowwise_tensor: Tensor | None = None,
        rht_colwise_tensor: Tensor | None = None,
        sfrht_colwise_tensor: Tensor | None = None,
        bias_tensor: Tensor | None = None,
        norm_const: float = 1.0,
        rht_norm_const: float = 1.0,
        current_stream: Any = None,
        *,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor``, ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""


class GroupedGemmGluHadamardQuantSm100(GroupedGemmGluHadamardQuant):
    """:class:`GroupedGemmGluHadamardQuant` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GroupedGemmGluHadamardQuantSm100)
def grouped_gemm_glu_hadamard_quant_wrapper(
    a_tensor: Tensor,
    sfa_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    prob_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    b_ptrs: Tensor | None = None,
    sfb_ptrs: Tensor | None = None,
    n: int | None = None,
    b_dtype: dtype | None = None,
    b_major: str = "k",
    bias_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    cd_major: str = "n",
    rht_rowwise_dtype: dtype | None = None,
    rht_colwise_dtype: dtype | None = None,
    glu_alpha: float | None = None,
    glu_limit: float | None = None,
    norm_const: float = 1.0,
    rht_norm_const: float = 1.0,
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    act_func: str = "swiglu",
    use_dynamic_sched: bool = False,
    current_stream: Any = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, sfd_tensor, rht_rowwise_tensor, sfrht_rowwise_tensor, rht_colwise_tensor,
    sfrht_colwise_tensor``; None where no type asks for it. ``d_dtype``, ``rht_rowwise_dtype``: bfloat16, or
    float4_e2m1fn_x2 with scale factors. ``rht_colwise_dtype``: None or float4_e2m1fn_x2. Other arguments and errors as
    those of :class:`GroupedGemmGluHadamardQuant`.
    """
    ...


grouped_gemm_glu_hadamard_quant_wrapper_sm100 = grouped_gemm_glu_hadamard_quant_wrapper
