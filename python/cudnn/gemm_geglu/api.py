"""GEMM + GeGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated import GatedGemm
from cudnn.fused.host import derived
from cudnn.fused.wrapper import wrapper
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmGeglu", "GemmGegluSm100", "gemm_geglu_wrapper", "gemm_geglu_wrapper_sm100"]


class GemmGeglu(GatedGemm):
    """A GEMM, and clamped GeGLU with a linear offset over pairs of blocks of 32 columns (up and gate).

        ab12 = alpha * (a * sfa) (b * sfb)^T                     accumulated in float32, rounded when stored
        g    = min(gate, glu_clamp_max)                          of every 64 columns of ab12, unrounded, the first 32
        u    = max(min(up, glu_clamp_max), glu_clamp_min)        are up, the others gate
        c    = (u + linear_offset) * g * sigmoid(geglu_alpha * g)
        amax = max(amax, max |c|), before c is rounded

    float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes, of the samples' types and
    majors, and all numbers.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get. ``sample_ab12=None``: not stored.
        alpha, linear_offset, geglu_alpha, glu_clamp_max, glu_clamp_min: where ``execute`` is given none.
        others: as those of :class:`cudnn.GemmSwiglu`.
    """

    title = "GEMM + GeGLU"
    scalars = ("alpha", "linear_offset", "geglu_alpha", "glu_clamp_max", "glu_clamp_min")
    limits = ("glu_clamp_max", "glu_clamp_min")

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_ab12: Tensor | None,
        sample_c: Tensor,
        alpha: float = 1.0,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = None,
        sample_sfa: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_sfc: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        sf_vec_size: int = 16,
        linear_offset: float = 1.0,
        geglu_alpha: float = 1.702,
        glu_clamp_max: float = 7.0,
        glu_clamp_min: float = -7.0,
        arch: str | None = None,
        accurate: bool = False,
        glu_layout: str = "interleaved",
        glu_order: str = "up_gate",
        power_of_two_scales: bool = False,
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        ab12_tensor: Tensor | None,
        c_tensor: Tensor,
        sfa_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        sfc_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        alpha: float | None = None,
        linear_offset: float | None = None,
        geglu_alpha: float | None = None,
        glu_clamp_max: float | None = None,
        glu_clamp_min: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``ab12_tensor``, ``c_tensor`` and what else the samples had. See :attr:`FusedAPI.run`."""

    def gate(self) -> epilogue.Gate:
        return epilogue.Gate("swish", "geglu_alpha", "glu_clamp_max", "glu_clamp_min", "linear_offset")


class GemmGegluSm100(GemmGeglu):
    """:class:`GemmGeglu` by the name that programs for Blackwell use. The wrapper makes objects of it."""


@wrapper(GemmGegluSm100)
def gemm_geglu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    linear_offset: float = 1.0,
    geglu_alpha: float = 1.702,
    glu_clamp_max: float = 7.0,
    glu_clamp_min: float = -7.0,
    stream: Any = None,
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``ab12_tensor, c_tensor, sfc_tensor, amax_tensor``: ab12 where it has an ``ab12_dtype``; c of ``c_dtype``,
    by default the type of ``a`` where that has 16 bits, else bfloat16; sfc with 8 bits; amax with four-bit operands and
    a bfloat16 result. Other arguments and errors as those of :class:`GemmGeglu`. Nothing is recorded for autograd: the
    results have no ``grad_fn``. ``cudnn.ops.gemm_geglu`` is the operator for ``torch.compile``.
    """
    ...


gemm_geglu_wrapper_sm100 = gemm_geglu_wrapper
