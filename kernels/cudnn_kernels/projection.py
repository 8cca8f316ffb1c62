"""The projection of MLA's queries: a GEMM on matrices in Transformer Engine's layout, quantized along rows and columns.

Tensors have two and three dimensions, and scale factors are row-major. The kernel views them as the GEMM's slots; the
scale factors of operands are first packed into atoms, in the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.epilogue import Deinterleave, QuantizeColumns, QuantizeRows, Rotate, Round, StoreTile
from cudnn_kernels.problem import BlockScale, GemmProblem, Operand
from cudnn_kernels.schedule import Dense
from cudnn_kernels.signature import NUM_SMS, Region, Sizes, Slot, Stream, Tensor, Workspace

HEAD, ROTARY, BLOCK = 192, 64, 32
"""Columns of a head, those at its end that are rotated, and elements that share a scale factor."""
E4M3, E8M0 = "float8_e4m3fn", "float8_e8m0fnu"
ROTATION = (
    Deinterleave(HEAD, HEAD - ROTARY, ROTARY),
    Rotate(HEAD, ROTARY, "bfloat16", first=HEAD - ROTARY, full_tables=True),
)
EPILOGUE = (
    Round("bfloat16"),
    *ROTATION,
    QuantizeColumns("out_scales_col", E4M3, E8M0, norm_const="", atoms=False),
    StoreTile("out_fp8_col", E4M3, value="columns"),
    QuantizeRows("out_scales_row", E4M3, E8M0, BLOCK, norm_const="", atoms=False),
    StoreTile("out_fp8_row", E4M3),
)


def problem(dtype: str, w_out_in: bool, n: int, k: int) -> GemmProblem:
    """The GEMM: x (tokens, k), and w (n, k) or (k, n), of bfloat16, or of e4m3 with scale factors."""
    scale = BlockScale(E8M0, BLOCK) if dtype == E4M3 else None
    a, b = Operand(dtype, "k", scale), Operand(dtype, "k" if w_out_in else "mn", scale)
    return GemmProblem(a, b, EPILOGUE, Dense(), n, k)


def atoms(rows: str, sizes: Sizes) -> Any:
    """Bytes of an operand's scale factors in atoms of 128 x 4; ``rows`` is the name of the size."""
    return (sizes[rows] + 127) // 128 * ((sizes["k"] + 127) // 128) * 512


@dataclass(frozen=True)
class ProjectionConfiguration:
    """``gemm`` is the configuration of the GEMM. Its tiles hold whole heads, unless they must hold whole atoms of scale
    factors: then it is known at compile time which columns are rotated, which saves registers.
    """

    kernel: ClassVar[str] = "gemm:Projection"

    gemm: GemmConfiguration

    @staticmethod
    def of(gemm: GemmConfiguration) -> ProjectionConfiguration:
        """The configuration for that of the GEMM."""
        m, _, k = gemm.tile
        return ProjectionConfiguration(gemm if gemm.a.scale else replace(gemm, tile=(m, HEAD, k)))

    @property
    def dtype(self) -> str:
        """The dtype of x and w."""
        return self.gemm.source_operand("a").dtype

    @property
    def w_out_in(self) -> bool:
        """Whether w is (n, k), else (k, n)."""
        return self.gemm.source_operand("b").major == "k"

    @property
    def operands(self) -> tuple[str, str]:
        """The slots of x and w."""
        return ("x_code", "w_code") if self.dtype == E4M3 else ("x", "w")

    @property
    def scales(self) -> Mapping[str, str]:
        """Slots of scale factors in atoms, and of the row-major scale factors that the caller passes."""
        return {"sfa": "x_scale", "sfb": "w_scale"} if self.dtype == E4M3 else {}

    @property
    def regions(self) -> tuple[Region, ...]:
        """Regions of the workspace: first those of the GEMM, which so keep their offsets."""
        scale_regions = (Region(name, partial(atoms, rows)) for name, rows in zip(self.scales, "mn", strict=False))
        return (*self.gemm.regions, *scale_regions)

    def slots(self) -> tuple[Slot, ...]:
        """The arguments of the kernel."""
        w = ("n", "k") if self.w_out_in else ("k", "n")
        x_name, w_name = self.operands
        slots = [Tensor(x_name, self.dtype, ("m", "k"), (None, 1)), Tensor(w_name, self.dtype, w, (None, 1))]
        for name, rows in zip(self.scales.values(), "mn", strict=False):
            slots.append(Tensor(name, "uint8", (rows, "blocks"), (None, 1), align=1))
        slots += [Tensor(name, "bfloat16", ("m", ROTARY), (ROTARY, 1)) for name in ("cos", "sin")]
        for direction, rows, columns in (("row", "m", HEAD // BLOCK), ("col", "groups", HEAD)):
            slots.append(Tensor(f"out_fp8_{direction}", E4M3, ("m", "heads", HEAD), (None, HEAD, 1)))
            shape, strides = (rows, "heads", columns), (None, columns, 1)
            slots.append(Tensor(f"out_scales_{direction}", "uint8", shape, strides, align=1))
        workspace = [Workspace(self.regions)] if self.regions else []
        return (*slots, *workspace, NUM_SMS, Stream())
