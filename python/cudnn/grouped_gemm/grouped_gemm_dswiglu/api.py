"""Grouped GEMM + dSwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.fused.gated_experts import GatedExpertsBackward
from cudnn.fused.grouped import indexed
from cudnn.fused.host import derived
from cudnn.fused.wrapper import call
from cudnn.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = [
    "GroupedGemmDswiglu",
    "GroupedGemmDswigluSm100",
    "grouped_gemm_dswiglu_wrapper",
    "grouped_gemm_dswiglu_wrapper_sm100",
]


class GroupedGemmDswiglu(GatedExpertsBackward):
    """:class:`cudnn.GroupedGemmDglu` with SwiGLU, as older programs call it.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get. ``sample_beta=None``: 1.
        others: as those of :class:`cudnn.GroupedGemmDglu`.
    """

    title = "Grouped GEMM + dSwiGLU"
    tensors = indexed(spec for spec in GatedExpertsBackward.tensors if spec.name not in ("b_ptrs", "sfb_ptrs"))
    returns = ("d_row", "d_col", "dprob", "amax", "sfd_row", "sfd_col")
    buffers = ("dprob_tensor_buf", "amax_tensor_buf")
    scalars = ()
    tile_n = (128, 256)

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_c: Tensor,
        sample_d_row: Tensor,
        sample_d_col: Tensor | None,
        sample_sfa: Tensor | None,
        sample_sfb: Tensor | None,
        sample_padded_offsets: Tensor,
        sample_alpha: Tensor,
        sample_beta: Tensor | None,
        sample_prob: Tensor | None,
        sample_dprob: Tensor | None,
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
        epilogue_op: str | None = None,
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
        c_tensor: Tensor,
        d_row_tensor: Tensor,
        d_col_tensor: Tensor | None,
        sfa_tensor: Tensor | None,
        sfb_tensor: Tensor | None,
        padded_offsets: Tensor,
        alpha_tensor: Tensor,
        beta_tensor: Tensor | None,
        prob_tensor: Tensor | None,
        dprob_tensor: Tensor | None,
        sfd_row_tensor: Tensor | None = None,
        sfd_col_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
        *,
        a_index: Tensor | None = None,
    ) -> None:
        """Writes ``d_row_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        return {**super().results(arguments), "dprob": (torch.float32, "")}


class GroupedGemmDswigluSm100(GroupedGemmDswiglu):
    """:class:`GroupedGemmDswiglu` by the name that existing programs use. The wrapper makes objects of it."""


def grouped_gemm_dswiglu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    c_tensor: Tensor,
    sfa_tensor: Tensor | None,
    sfb_tensor: Tensor | None,
    padded_offsets: Tensor,
    alpha_tensor: Tensor,
    beta_tensor: Tensor | None,
    prob_tensor: Tensor | None,
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
    epilogue_op: str | None = None,
    current_stream: Any = None,
    dprob_tensor_buf: Tensor | None = None,
    amax_tensor_buf: Tensor | None = None,
    *,
    a_index: Tensor | None = None,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_row_tensor, d_col_tensor, dprob_tensor, amax_tensor, sfd_row_tensor, sfd_col_tensor``, as
    :func:`cudnn.grouped_gemm_dglu_wrapper` does. ``dprob_tensor_buf`` and ``amax_tensor_buf``: dprob and amax, where
    the caller has them; else they are zeros, and -inf, of this call. Without tokens there are no scale factors.
    """
    dprob_tensor, amax_tensor = dprob_tensor_buf, amax_tensor_buf
    results = call(GroupedGemmDswigluSm100, locals())
    if not results["d_row_tensor"].shape[0]:
        results |= {"sfd_row_tensor": None, "sfd_col_tensor": None}
    return results


grouped_gemm_dswiglu_wrapper_sm100 = grouped_gemm_dswiglu_wrapper
