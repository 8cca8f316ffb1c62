"""Grouped GEMM + squared ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.fused.grouped import BIAS, PROB, ExpertsGemm, indexed, operands, output, quantized
from cudnn.fused.host import derived
from cudnn.fused.layouts import Sizes
from cudnn.fused.positional import older_order
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import FLOAT8, name_of
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmSrelu",
    "GroupedGemmSreluSm100",
    "grouped_gemm_srelu_wrapper",
    "grouped_gemm_srelu_wrapper_sm100",
]


class GroupedGemmSrelu(ExpertsGemm):
    """A grouped GEMM over experts and squared ReLU, with row weights.

        c    = alpha[e] * acc + bias[n, e]                       acc = (a * sfa) (b[e] * sfb[e])^T, in float32
        d    = relu(c)^2 * prob[m]                               of c unrounded
        amax = max(amax, max |d|) of each expert                 before d is rounded

    With ``sfd_row``, ``sfd_col`` and ``norm_const``, ``d`` is quantized by 32 columns of a row, and ``d_col`` by 32
    tokens of a column. ``prob`` may not be left out.

    Args:
        sample_a ... sample_prob: tensors like those that ``execute`` will get.
        tanh_clamp_scale: s, positive: d is that of s * tanh(relu(c) / s) instead of relu(c).
        sample_a_index, others: as those of :class:`cudnn.GroupedGemmGlu` and of :class:`cudnn.GroupedGemmQuant`.
    """

    title = "Grouped GEMM + squared ReLU"
    tensors = indexed((*operands(), output("c", "n"), *quantized("d", "n"), PROB, BIAS))
    returns = ("c", "d", "d_col", "amax", "sfd_row", "sfd_col")
    unpacked_fp4 = True
    tanh_clamp_scale: float | None

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor | None = None,
        sample_c: Tensor | None = None,
        sample_d: Tensor | None = None,
        sample_sfa: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_padded_offsets: Tensor | None = None,
        sample_alpha: Tensor | None = None,
        sample_d_col: Tensor | None = None,
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
        vector_f32: bool = False,
        m_aligned: int = 256,
        discrete_col_sfd: bool = False,
        b_major: str = "k",
        use_dynamic_sched: bool = False,
        tanh_clamp_scale: float | None = None,
        *,
        sample_a_index: Tensor | None = None,
        arch: str | None = None,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        sfa_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        c_tensor: Tensor,
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
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
        *,
        a_index: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor``, ``d_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        activation = (epilogue.SquaredRelu(self.tanh_clamp_scale), *self.multiplied_by("prob"))
        return (*self.scaled_product(), *self.biased(), self.store("c"), *activation, *self.result_epilogue("d"))

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        d_dtype = cls.dtype_or_default(arguments["d_dtype"])
        fp8 = cls.has_block_scales(arguments) and name_of(d_dtype) in FLOAT8
        return {
            "c": (cls.dtype_or_default(arguments["c_dtype"]), "n"),
            **cls.quantized_results(arguments, "d", d_dtype, fp8),
        }

    def check_options(self) -> None:
        super().check_options()
        self.check_clamp(self.tanh_clamp_scale)

    def check_own_rules(self, sizes: Sizes) -> None:
        if not self.has("prob"):
            raise self.error("prob_tensor is required", "None", "a tensor (m, 1, 1)")


class GroupedGemmSreluSm100(GroupedGemmSrelu):
    """:class:`GroupedGemmSrelu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GroupedGemmSreluSm100)
@older_order(
    "a_tensor b_tensor sfa_tensor sfb_tensor padded_offsets alpha_tensor bias_tensor b_ptrs sfb_ptrs n b_dtype "
    "b_major norm_const_tensor prob_tensor acc_dtype c_dtype d_dtype cd_major mma_tiler_mn cluster_shape_mn "
    "sf_vec_size vector_f32 m_aligned discrete_col_sfd use_dynamic_sched current_stream"
)
def grouped_gemm_srelu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    padded_offsets: Tensor | None = None,
    alpha_tensor: Tensor | None = None,
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
    use_dynamic_sched: bool = False,
    tanh_clamp_scale: float | None = None,
    current_stream: Any = None,
    *,
    a_index: Tensor | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``c_tensor, d_tensor, d_col_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``: the scale factors, and
    d_col, for 8-bit operands and an 8-bit d, which need ``norm_const_tensor``; amax for a d of 16 bits. Other arguments
    and errors as those of :class:`GroupedGemmSrelu`.
    """
    ...


grouped_gemm_srelu_wrapper_sm100 = grouped_gemm_srelu_wrapper
