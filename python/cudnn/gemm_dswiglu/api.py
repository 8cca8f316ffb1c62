"""GEMM + backward pass of SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cudnn.api_base import check_rank
from cudnn.fused.dense import amax, operands, quantizer
from cudnn.fused.gated import GluLayout
from cudnn.fused.gemm import NARROW, scale_type
from cudnn.fused.host import derived
from cudnn.fused.layouts import Column, Contiguous, Matrix, Sizes, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import FLOAT4, FLOAT8, name_of
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmDswiglu", "GemmDswigluSm100", "gemm_dswiglu_wrapper", "gemm_dswiglu_wrapper_sm100"]

WIDE = Matrix("m", "columns", "mn")


class GemmDswiglu(GluLayout):
    """A GEMM, and the backward pass of the SwiGLU that :class:`cudnn.GemmSwiglu` computed.

        dc     = alpha * (a * sfa) (b * sfb)^T                   (m, n), accumulated in float32
        d_up   = dc * gate * s * prob[m]                         s = sigmoid(gate); ab12 and d_ab12, (m, 2 n), have up
        d_gate = dc * up * s * (1 + gate * (1 - s)) * prob[m]    and gate in the places that glu_layout says
        c      = up * gate * sigmoid(gate) * prob[m]             once more, where it is wanted
        dprob  = dprob + sum over n of dc * up * gate * sigmoid(gate)
        amax   = max(amax, [max |d_up|, max |d_gate|])           in glu_order, before d_ab12 is rounded

    prob defaults to 1. The sums of dprob are added up in no fixed order, so that their last bits vary; all
    else repeats bit by bit. float32 operands are multiplied in TF32. A compiled object serves tensors of all sizes.

    Args:
        sample_a ... sample_norm_const: tensors like those that ``execute`` will get.
        others: as those of :class:`cudnn.GemmSwiglu`, for clusters of at most 4 x 4; alpha where ``execute`` gets none.
    """

    title = "GEMM + dSwiGLU"
    tensors = (
        *operands(),
        TensorSpec("ab12", WIDE, (*NARROW, "float32", *FLOAT8), about="columns = 2 n, as GEMM + SwiGLU stores them"),
        TensorSpec(
            "d_ab12",
            WIDE,
            (*NARROW, "float32", *FLOAT8),
            written=True,
            may_alias="ab12",
            about="the major of ab12; may be ab12 itself",
        ),
        TensorSpec("c", Matrix("m", "n", "mn"), (*NARROW, "float32"), True, written=True, about="the major of ab12"),
        TensorSpec("prob", Column("m"), ("float32",), True, init="uniform"),
        TensorSpec("dprob", Column("m"), ("float32",), True, fill=0.0, written=True, about="the caller makes it 0"),
        replace(amax(dimensions=1), layout=Contiguous(2, alignment=4)),
        *quantizer("sfd", "columns"),
    )
    returns = ("d_ab12", "c", "dprob", "amax", "sfd")
    scalars = ("alpha",)
    result = ("d_ab12", "sfd")
    largest_cluster = 4
    default_cluster = (2, 1)
    columns_in = 32, "32, the blocks of ab12"

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_ab12: Tensor,
        sample_d_ab12: Tensor,
        sample_c: Tensor | None = None,
        sample_prob: Tensor | None = None,
        sample_dprob: Tensor | None = None,
        sample_sfa: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_amax: Tensor | None = None,
        sample_sfd: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        alpha: float = 1.0,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        arch: str | None = None,
        accurate: bool = False,
        glu_layout: str = "interleaved",
        glu_order: str = "up_gate",
    ) -> None:
        super().__init__(locals())

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        ab12_tensor: Tensor,
        d_ab12_tensor: Tensor,
        c_tensor: Tensor | None = None,
        prob_tensor: Tensor | None = None,
        dprob_tensor: Tensor | None = None,
        sfa_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        amax_tensor: Tensor | None = None,
        sfd_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        alpha: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes what the samples had of d_ab12, c, amax and sfd, and adds to dprob. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        saved = epilogue.LoadTile(
            "ab12", self.dtype_name("ab12"), self.major("ab12"), "ab12", times=2, concat_glu=self.concat_glu
        )
        back = epilogue.GatedBackward(epilogue.SWIGLU, self.gate_first, "ab12")
        sums = (epilogue.SumRow("dprob", "prob_gradient"),) if self.has("dprob") else ()
        values = ("x", "activation") if self.has("c") else ("x",)
        factors = [epilogue.MultiplyColumn("prob", value=value) for value in values if self.has("prob")]
        stored = (self.store("c", "activation"),) if self.has("c") else ()
        changes = {epilogue.Amax: {"roles": 2}, epilogue.StoreTile: {"concat_glu": self.concat_glu}}
        ends = (replace(o, **changes.get(type(o), {})) for o in self.result_epilogue("d_ab12"))
        return (epilogue.Scale("alpha"), saved, back, *sums, *factors, *stored, *ends)

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        return {**(sizes := super().sizes_of(shapes, options)), "columns": 2 * sizes["n"]}

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        check_rank(cls._title(), "ab12", ab12 := arguments["ab12"], (2, 3), "(m, 2 n, l)")
        major = WIDE.major(ab12.shape, ab12.stride())
        default = ab12.dtype if name_of(ab12.dtype) not in FLOAT8 else torch.bfloat16
        types = {"d_ab12": (arguments["d_ab12_dtype"] or default, major)}
        if arguments["c_dtype"] is not None:
            types["c"] = (arguments["c_dtype"], major)
        if arguments["prob"] is not None:
            types["dprob"] = (torch.float32, "")
        if name_of(types["d_ab12"][0]) in FLOAT8:
            types["sfd"] = (scale_type(arguments), "")
        elif name_of(arguments["a"].dtype) == FLOAT4:
            types["amax"] = (torch.float32, "")
        return types

    def check_own_rules(self, sizes: Sizes) -> None:
        for name in ("d_ab12", "c"):
            if self.has(name) and self.major(name) != self.major("ab12"):
                raise self._refuse(f"{name} tensor major", self.major(name), f"{self.major('ab12')}, that of ab12")
        if self.dtype_name("d_ab12") in FLOAT8 and (self.dtype_name("a") == FLOAT4 or self.concat_glu):
            where = "glu_layout='concatenated'" if self.concat_glu else f"operands of {FLOAT4}"
            raise self.error(
                "d_ab12 tensor dtype", self.dtype_name("d_ab12"), f"float16, bfloat16, float32, for {where}"
            )


class GemmDswigluSm100(GemmDswiglu):
    """:class:`GemmDswiglu` by the name that programs for Blackwell use. The wrapper makes objects of it."""


@wrapper(GemmDswigluSm100)
def gemm_dswiglu_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    ab12_tensor: Tensor,
    alpha: float = 1.0,
    prob_tensor: Tensor | None = None,
    d_ab12_dtype: dtype | None = None,
    c_dtype: dtype | None = None,
    acc_dtype: dtype = torch.float32,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    stream: Any = None,
    accurate: bool = False,
    glu_layout: str = "interleaved",
    glu_order: str = "up_gate",
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes.

    Returns ``d_ab12_tensor, c_tensor, dprob_tensor, amax_tensor, sfd_tensor``: d_ab12 of ``d_ab12_dtype``, by default
    the type of ``ab12_tensor`` unless that has 8 bits, bfloat16 then; c where it has a ``c_dtype``; dprob, from 0, with
    ``prob_tensor``; amax with four-bit operands; sfd with a d_ab12 of 8 bits, which needs ``norm_const_tensor``. Other
    arguments and errors as those of :class:`GemmDswiglu`. Nothing is recorded for autograd.
    """
    ...


gemm_dswiglu_wrapper_sm100 = gemm_dswiglu_wrapper
