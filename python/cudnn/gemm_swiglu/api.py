"""GEMM + SwiGLU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn.fused.gated import GatedGemm
from cudnn.fused.host import derived
from cudnn.fused.wrapper import wrapper
from cudnn.gemm_swiglu import gradients
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict


class GemmSwiglu(GatedGemm):
    """A GEMM, and SwiGLU over pairs of blocks of 32 columns (up and gate).

        ab12 = alpha * (a * sfa) (b * sfb)^T                     accumulated in float32, rounded when stored
        c    = up * gate * sigmoid(gate)                         of every 64 columns of ab12, unrounded, the first 32
                                                                 are up, the others gate
        amax = max(amax, max |c|), before c is rounded

    "Scaled" below: with any of sfa, sfb, amax, sfc, norm_const. float32 operands are multiplied in TF32. A compiled
    object serves tensors of all sizes, of the samples' types and majors.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get. ``sample_ab12=None``: not stored.
        alpha: for ``execute(alpha=None)``.
        acc_dtype: float32, or float16 where the result would bear it; the sums in registers are float32 then too.
        mma_tiler_mn, cluster_shape_mn: checked. sm_100a follows them, columns rounded up to multiples of 64, or of 128
            for operands with scale factors; on sm_90a the library chooses tiles automatically.
        sf_vec_size: elements along k, or along n for sfc, that share a scale factor: 16, 32 or 128.
        vector_f32, ab12_stages: hints of other architectures.
        arch: ``"sm_90a"`` or ``"sm_100a"``, to check and compile for a chip that is not here; default: that of the
            tensors' device. On CPU tensors ``execute`` runs the reference in PyTorch, or, within ``cudnn.emulation``,
            the kernel itself.
        accurate: for operands of 8 bits without scale factors on sm_90a: they are multiplied as bfloat16, since the
            tensor cores accumulate 8-bit MMAs with 13 bits, 16-bit MMAs with 25. Takes longer, and a
            workspace. For other operands and on sm_100a it changes nothing.
        glu_layout: of b's rows and ab12's columns. ``"interleaved"``: alternating blocks of 32 of up and gate;
            ``"concatenated"``: in two halves, as most checkpoints have them, for a K-major b; on sm_100a n is a
            multiple of 256 where operands have scale factors that are not float32.
        glu_order: ``"up_gate"``, or ``"gate_up"`` where gate comes first.
        power_of_two_scales: float32 scale factors of a result are rounded up to powers of two.
    """

    title = "GEMM + SwiGLU"
    peers = {"Triton, fused": "benchmarks/triton_gemm_swiglu.py:gemm_swiglu"}  # noqa: RUF012
    gradients = (gradients.setup, gradients.backward)

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
        vector_f32: bool = False,
        ab12_stages: int = 4,
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
        alpha: float | None = 1.0,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``ab12_tensor``, ``c_tensor`` and what else the samples had. See :attr:`FusedAPI.run`.

        ``alpha`` is 1.0 where it is not given, whatever the constructor got; None: that of the constructor.
        """

    def gate(self) -> epilogue.Gate:
        return epilogue.SWIGLU


class GemmSwigluSm100(GemmSwiglu):
    """:class:`GemmSwiglu` by the name that existing programs use. The wrapper makes objects of it."""


@wrapper(GemmSwigluSm100)
def gemm_swiglu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    alpha: float = 1.0,
    c_major: str = "n",
    ab12_dtype: dtype | None = torch.float32,
    c_dtype: dtype | None = torch.float16,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    vector_f32: bool = False,
    ab12_stages: int = 4,
    stream: Any = None,
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``ab12_tensor, c_tensor, sfc_tensor, amax_tensor``: ab12, of ``ab12_dtype`` (default float32), is None for
    ``ab12_dtype=None``; c is of ``c_dtype``, float16 unless told otherwise, whatever the type of ``a``, as existing
    programs expect; ``c_dtype=None``: the type of ``a`` where that has 16 bits, else bfloat16. sfc comes with 8 bits;
    amax, of the shape (1, 1, 1), with four-bit operands and a bfloat16 result. Other arguments and errors as those of
    :class:`GemmSwiglu`.

    Nothing is recorded for autograd: the results have no ``grad_fn``. Gradients flow through ``cudnn.ops.gemm_swiglu``.
    """
    ...


gemm_swiglu_wrapper_sm100 = gemm_swiglu_wrapper
