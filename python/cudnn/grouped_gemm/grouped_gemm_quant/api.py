"""Grouped GEMM + quantization."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.fused.grouped import BIAS, COUNTER, PROB, ExpertsGemm, operands, quantized
from cudnn.fused.host import derived
from cudnn.fused.layouts import Sizes, TensorSpec, TokenColumn
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import supports, wrapper
from cudnn.gemm.formats import FLOAT8, name_of

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmQuant",
    "GroupedGemmQuantSm100",
    "grouped_gemm_quant_wrapper",
    "grouped_gemm_quant_wrapper_sm100",
]


class GroupedGemmQuant(ExpertsGemm):
    """A grouped GEMM over experts, with an optional bias and row weights; the result is rounded or quantized.

        w    = alpha[e] * row_scale[m]                           row_scale, prob: 1 by default
        d    = w * acc * prob[m]                                 acc = (a * sfa) (b[e] * sfb[e])^T, in float32
        d    = w * acc + prob[m] * bias[n, e]                    with a bias: prob weights nothing else
        amax = max(amax, max |d|) of each expert                 before d is rounded

    With ``sfd_row``, ``sfd_col`` and ``norm_const``, ``d`` is quantized by 32 columns of a row, and ``d_col`` by 32
    tokens of a column. Expert e has the rows from ``padded_offsets[e - 1]`` to before ``padded_offsets[e]``.

    Args:
        sample_a ... sample_row_scale: tensors like those that ``execute`` will get.
        num_experts, b_shape, b_dtype: for pointer arrays of weights.
        acc_dtype: float32.
        mma_tiler_mn, cluster_shape_mn: checked; sm_100a follows them.
        sf_vec_size: elements that share a scale factor: 16 or 32.
        discrete_col_sfd: ``sfd_col`` has a separate matrix of scale factors for each expert.
        m_aligned: 256. vector_f32, use_dynamic_sched, sample_scheduler_counter: hints of other kernels.
        use_single_group_runtime_offsets: one expert has all rows; ``padded_offsets`` is not read.
        semantics: ``"1.32"`` or ``"1.23"``, where prob may not be left out; default: ``CUDNN_FRONTEND_SEMANTICS``.
        arch: as for :class:`cudnn.GemmSwiglu`.
    """

    title = "Grouped GEMM + quantization"
    tensors = (
        *operands(),
        *quantized("d", "n"),
        PROB,
        BIAS,
        TensorSpec("row_scale", TokenColumn("m"), ("float32",), optional=True, init="uniform"),
        COUNTER,
    )
    returns = ("d", "d_col", "amax", "sfd_row", "sfd_col")

    @older_order(
        "self sample_a sample_sfa sample_padded_offsets sample_alpha sample_d sample_d_col sample_b sample_sfb "
        "sample_bias num_experts b_shape b_dtype sample_sfd_row sample_sfd_col sample_amax sample_norm_const "
        "sample_prob acc_dtype mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 m_aligned discrete_col_sfd "
        "b_major use_dynamic_sched"
    )
    def __init__(
        self,
        sample_a: Tensor,
        sample_sfa: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_d: Tensor,
        sample_d_col: Tensor | None = None,
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
        sample_row_scale: Tensor | None = None,
        acc_dtype: dtype | None = None,
        mma_tiler_mn: tuple[int, int] = (256, 256),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        sf_fp8_dtype_override: str | None = None,
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        use_single_group_runtime_offsets: bool = False,
        *,
        sample_scheduler_counter: Tensor | None = None,
        semantics: str | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    @older_order(
        "self a_tensor sfa_tensor padded_offsets alpha_tensor d_tensor b_tensor sfb_tensor bias_tensor b_ptrs "
        "sfb_ptrs d_col_tensor sfd_row_tensor sfd_col_tensor amax_tensor norm_const_tensor prob_tensor current_stream"
    )
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        d_tensor: Tensor,
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
        row_scale_tensor: Tensor | None = None,
        current_stream: Any = None,
        *,
        scheduler_counter_tensor: Tensor | None = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        weighted = (*self.scaled_product(), *self.multiplied_by("row_scale"))
        rest = self.biased("prob") if self.has("bias") else self.multiplied_by("prob")
        return (*weighted, *rest, *self.result_epilogue("d"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        d_dtype = cls.dtype_or_default(arguments["d_dtype"])
        fp8 = cls.has_block_scales(arguments) and name_of(d_dtype) in FLOAT8
        types = cls.quantized_results(arguments, "d", d_dtype, fp8)
        return types if arguments["generate_amax"] else {name: spec for name, spec in types.items() if name != "amax"}

    def check_own_rules(self, sizes: Sizes) -> None:
        if self.semantics == "1.23" and not self.has("prob"):
            raise self.error("prob_tensor is required", "None", "a tensor, with the semantics 1.23")


class GroupedGemmQuantSm100(GroupedGemmQuant):
    """:class:`GroupedGemmQuant` by the name that existing programs use. The wrapper makes objects of it."""


@supports("canonical_layouts", "optional_amax", "external_scheduler_counter")
@wrapper(GroupedGemmQuantSm100)
@older_order(
    "a_tensor sfa_tensor padded_offsets alpha_tensor b_tensor sfb_tensor bias_tensor b_ptrs sfb_ptrs n b_dtype b_major "
    "norm_const_tensor prob_tensor acc_dtype d_dtype cd_major mma_tiler_mn cluster_shape_mn sf_vec_size vector_f32 "
    "m_aligned discrete_col_sfd use_dynamic_sched current_stream"
)
def grouped_gemm_quant_wrapper(
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
    row_scale_tensor: Tensor | None = None,
    acc_dtype: dtype | None = None,
    d_dtype: dtype | None = None,
    d_tensor: Tensor | None = None,
    cd_major: str = "n",
    mma_tiler_mn: tuple[int, int] = (256, 256),
    cluster_shape_mn: tuple[int, int] | None = None,
    sf_vec_size: int = 16,
    sf_fp8_dtype_override: str | None = None,
    vector_f32: bool = False,
    m_aligned: int = 256,
    discrete_col_sfd: bool = False,
    use_dynamic_sched: bool = False,
    use_single_group_runtime_offsets: bool = False,
    current_stream: Any = None,
    *,
    generate_amax: bool = True,
    scheduler_counter_tensor: Tensor | None = None,
    semantics: str | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``: the scale factors, and d_col, for
    8-bit operands and an 8-bit d, which need ``norm_const_tensor``; amax, which ``generate_amax=False`` leaves out,
    with 16 bits. ``d_tensor``: written and returned, where it is given. Other arguments and errors as those of the
    class.
    """
    ...


grouped_gemm_quant_wrapper_sm100 = grouped_gemm_quant_wrapper
