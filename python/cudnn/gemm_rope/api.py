"""GEMM + rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cudnn.fused.dense import DenseGemm, operands, quantizer
from cudnn.fused.gemm import NARROW, scale_type
from cudnn.fused.host import derived
from cudnn.fused.layouts import Contiguous, Matrix, Sizes, TensorSpec
from cudnn.fused.wrapper import wrapper
from cudnn.gemm.formats import BLOCKWISE_SIZE, FLOAT8, name_of
from cudnn.gemm_rope import gradients
from cudnn.lazy import torch
from cudnn_kernels import epilogue

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from cudnn.api_base import TupleDict

__all__ = ["GemmRope", "GemmRopeSm100", "gemm_rope_wrapper", "gemm_rope_wrapper_sm100"]


class GemmRope(DenseGemm):
    """A GEMM whose columns are heads, and rotary embeddings of some of them.

        x = alpha * (a * sfa) (b * sfb)^T                   accumulated in float32
        c[m, left]  = x[m, left] * cos[p, i] - x[m, right] * sin[p, i]      p = positions[m], or m without positions
        c[m, right] = x[m, right] * cos[p, i] + x[m, left] * sin[p, i]      rounded, or quantized where it has 8 bits

    Pair i is columns i and i + rotary_size / 2 of a head or, ``interleaved``, 2 i and 2 i + 1. Others are those of x.
    Without positions, cos and sin have a row for each row of a; with them, an out-of-range position makes the row of c
    NaN.

    Args:
        head_size: columns of a head, a multiple of 16; n is one of it.
        rotary_size: columns of a head that are rotated, its first ones: a multiple of 16, up to 256; default: all.
        rotated_begin, rotated_end: columns whose heads are rotated, such as Q and K but not V; default: all.
        interleaved: pairs are neighboring columns. Default: columns of the two halves.
        inverse: rotates back, as the gradient is: with -sin. Others are those of :class:`cudnn.GemmSwiglu`.
    """

    title = "GEMM + RoPE"
    tensors = (
        *operands(),
        TensorSpec("cos", Contiguous("positions", "half"), ("float32", *NARROW), about="half = rotary_size / 2"),
        TensorSpec("sin", Contiguous("positions", "half"), ("float32", *NARROW), same_dtype="cos"),
        TensorSpec("c", Matrix("m", "n", "mn"), ("float32", *NARROW, *FLOAT8), written=True, about="8 bits with sfc"),
        TensorSpec("positions", Contiguous("m", alignment=4), ("int32",), optional=True),
        *quantizer("sfc", "n"),
    )
    returns = ("c", "sfc")
    scalars = ("alpha",)
    result = ("c", "sfc")
    sized_by = ("a", "b", "cos")
    gradients = (gradients.setup, gradients.backward)

    head_size: int
    rotated_begin: int
    rotated_end: int | None
    interleaved: bool
    inverse: bool

    def __init__(
        self,
        sample_a: Tensor,
        sample_b: Tensor,
        sample_cos: Tensor,
        sample_sin: Tensor,
        sample_c: Tensor,
        sample_positions: Tensor | None = None,
        sample_sfa: Tensor | None = None,
        sample_sfb: Tensor | None = None,
        sample_sfc: Tensor | None = None,
        sample_norm_const: Tensor | None = None,
        head_size: int = 128,
        rotary_size: int | None = None,
        rotated_begin: int = 0,
        rotated_end: int | None = None,
        interleaved: bool = False,
        inverse: bool = False,
        alpha: float = 1.0,
        acc_dtype: dtype = torch.float32,
        mma_tiler_mn: tuple[int, int] = (128, 128),
        cluster_shape_mn: tuple[int, int] | None = None,
        sf_vec_size: int = 16,
        arch: str | None = None,
        accurate: bool = False,
        power_of_two_scales: bool = False,
    ) -> None:
        super().__init__(locals())
        self.rotary_size = head_size if rotary_size is None else rotary_size
        self.columns_in = head_size, f"head_size, {head_size}"

    @derived
    def execute(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        a_tensor: Tensor,
        b_tensor: Tensor,
        cos_tensor: Tensor,
        sin_tensor: Tensor,
        c_tensor: Tensor,
        positions_tensor: Tensor | None = None,
        sfa_tensor: Tensor | None = None,
        sfb_tensor: Tensor | None = None,
        sfc_tensor: Tensor | None = None,
        norm_const_tensor: Tensor | None = None,
        alpha: float | None = None,
        current_stream: Any = None,
        workspace_tensor: Tensor | None = None,
    ) -> None:
        """Writes ``c_tensor`` and ``sfc_tensor``. See :attr:`FusedAPI.run`."""

    def operations(self) -> tuple[Any, ...]:
        rotate = epilogue.Rotate(
            self.head_size,
            self.rotary_size,
            self.dtype_name("cos"),
            self.interleaved,
            self.inverse,
            self.rotated_begin,
            self.rotated_end,
            positions="positions" if self.has("positions") else "",
        )
        return (epilogue.Scale("alpha"), rotate, *self.result_epilogue("c"))

    @classmethod
    def sizes_of(cls, shapes: Mapping[str, Sequence[int]], options: Mapping[str, Any]) -> dict[str, int]:
        sizes = super().sizes_of(shapes, options)
        rows = shapes["cos"][0] if shapes.get("cos") else sizes["m"]
        return {**sizes, "positions": rows, "half": (options["rotary_size"] or options["head_size"]) // 2}

    @classmethod
    def results(cls, arguments: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
        c_dtype = arguments["c_dtype"] or (
            arguments["a"].dtype if name_of(arguments["a"].dtype) in NARROW else torch.bfloat16
        )
        scales = {"sfc": (scale_type(arguments), "")} if name_of(c_dtype) in FLOAT8 else {}
        return {"c": (c_dtype, arguments["c_major"]), **scales}

    def check_options(self) -> None:
        super().check_options()
        sizes = head, rotary = self.head_size, self.rotary_size
        if head % 16 or not 16 <= rotary <= min(head, 256) or rotary % 16:
            raise self.error("head_size and rotary_size", sizes, "multiples of 16, rotary_size up to 256 and head_size")

    def check_own_rules(self, sizes: Sizes) -> None:
        n, head = sizes["n"], self.head_size
        begin, end = self.rotated_begin, n if self.rotated_end is None else self.rotated_end
        if not 0 <= begin <= end <= n or begin % head or end % head:
            raise self.error("rotated_begin and rotated_end", (begin, end), f"multiples of {head}, in order, up to {n}")
        if not self.has("positions") and sizes["positions"] != sizes["m"]:
            raise self.error("rows of cos and sin", sizes["positions"], f"{sizes['m']}, those of a", "pass positions")
        columns, sums = epilogue.traits_of(self.operations()).column_multiple, self.sf_vec_size == BLOCKWISE_SIZE
        together = columns if columns % 32 == 0 else 2 * columns
        most = 256 if not sums and (self.scaled or self.accurate or self.dtype_name("a") not in FLOAT8) else 128
        if together > most or (self.scaled and not sums and 256 % together):
            got = f"{self.rotary_size} of {head}, so {together} columns in one tile"
            raise self.unsupported("rotary_size", got, f"at most {most}, a power of two for block-scaled operands")


class GemmRopeSm100(GemmRope):
    """:class:`GemmRope` by the name that programs for Blackwell use. The wrapper makes objects of it."""


@wrapper(GemmRopeSm100)
def gemm_rope_wrapper(
    a_tensor: Tensor,
    b_tensor: Tensor,
    cos_tensor: Tensor,
    sin_tensor: Tensor,
    positions_tensor: Tensor | None = None,
    head_size: int = 128,
    rotary_size: int | None = None,
    rotated_begin: int = 0,
    rotated_end: int | None = None,
    interleaved: bool = False,
    inverse: bool = False,
    alpha: float = 1.0,
    c_major: str = "n",
    c_dtype: dtype | None = None,
    mma_tiler_mn: tuple[int, int] = (128, 128),
    cluster_shape_mn: tuple[int, int] | None = None,
    sfa_tensor: Tensor | None = None,
    sfb_tensor: Tensor | None = None,
    norm_const_tensor: Tensor | None = None,
    sf_vec_size: int = 16,
    stream: Any = None,
    accurate: bool = False,
    power_of_two_scales: bool = False,
) -> TupleDict:
    """Allocates the results, compiles if needed, and executes: ``c_tensor, sfc_tensor``.

    c is of ``c_dtype``, by default the type of ``a`` if that has 16 bits, else bfloat16; sfc comes with 8 bits. Nothing
    is recorded for autograd: gradients flow through ``cudnn.ops.gemm_rope``. See :class:`GemmRope` for the rest.
    """
    ...


gemm_rope_wrapper_sm100 = gemm_rope_wrapper
