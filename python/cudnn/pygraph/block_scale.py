"""Microscaling formats: one scale for a block of elements (MXFP8, NVFP4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import stride_order, strides_in_order
from cudnn.backend import enums as be
from cudnn.datatypes import _cudnn_to_torch_data_type  # pyright: ignore[reportPrivateUsage]
from cudnn.enums import data_type, tensor_reordering
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.gemm.scales import compute_block_scales, scale_values
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering

# Largest finite values: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.
LARGEST = {data_type.FP8_E4M3: 448.0, data_type.FP8_E5M2: 57344.0, data_type.FP4_E2M1: 6.0, data_type.INT8: 127.0}
SCALES = (data_type.FP8_E8M0, data_type.FP8_E4M3, data_type.FP8_E5M2)  # that scales are rounded up to


def blocks(extents: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """How many blocks cover each dimension."""
    return [math.ceil(extent / size) for extent, size in zip(extents, sizes, strict=True)]


def _fits(scale: Tensor, needed: Sequence[int]) -> bool:
    """Whether a scale tensor has an entry for every block; in the layout F8_128x4 it may have more, as padding."""
    padded = scale.reordering_type is tensor_reordering.F8_128x4
    return len(scale.dim) == len(needed) and all(
        got >= extent if padded and axis >= len(needed) - 2 else got == extent
        for axis, (got, extent) in enumerate(zip(scale.dim, needed, strict=True))
    )


@dataclasses.dataclass(eq=False, kw_only=True)
class BlockScaleDequantize(Node):
    """Y = X times the scale of the block that each element lies in; ``block_size`` counts the last dimensions."""

    tag = "BLOCK_SCALE_DEQUANTIZE"
    method = "block_scale_dequantize"

    block_size: list[int]
    is_negative_scale: bool = False

    def _sizes(self) -> list[int]:
        """Extents of a block along every dimension of X."""
        x, scale, block_size = self.inputs["X"], self.inputs["scale"], self.block_size
        rank = len(x.dim)
        if len(block_size) > 1:
            return [1] * (rank - len(block_size)) + block_size
        candidates = [[block_size[0] if at == axis else 1 for at in range(rank)] for axis in reversed(range(rank))]
        return next((sizes for sizes in candidates if _fits(scale, blocks(x.dim, sizes))), candidates[0])

    def infer(self, context: Context) -> None:
        x, scale = self.inputs["X"], self.inputs["scale"]
        if not 0 < len(self.block_size) <= len(x.dim) or any(size < 1 for size in self.block_size):
            raise make_error(
                ValueError,
                self.where,
                "block_size",
                self.block_size,
                f"1 to {len(x.dim)} positive numbers, for the last dimensions of the input",
                "pass [1, 32] for blocks of 32 along the last of them",
            )
        needed = blocks(x.dim, self._sizes())
        if not _fits(scale, needed):
            more = "" if scale.reordering_type is tensor_reordering.NONE else ", or more in the last two as padding"
            raise make_error(
                ValueError,
                self.where,
                f"descale (tensor {scale.name!r})",
                f"dim={scale.dim}",
                f"dim={needed}{more}: one scale for a block of {self.block_size} of dim={x.dim}",
                "correct block_size, or the shape of the scales",
            )
        self.fill_output("Y", x.dim, lambda _: [*x.stride])

    def lower(self, lowering: Lowering) -> None:
        a = be.Attribute
        if self.is_negative_scale and lowering.version < 91400:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "is_negative_scale",
                "True",
                "cuDNN 9.14 or newer",
                "install a newer cuDNN",
            )
        lowering.operation(
            be.DescriptorType.OPERATION_BLOCK_SCALE_DEQUANTIZE,
            {
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_XDESC: self.inputs["X"],
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_SCALE_DESC: self.inputs["scale"],
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_YDESC: self.outputs["Y"],
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_MATH_PREC: lowering.data_type(self.compute_data_type),
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_BLOCK_SIZE: self.block_size,
                a.OPERATION_BLOCK_SCALE_DEQUANTIZE_NEG_SCALE: (
                    self.is_negative_scale if lowering.version >= 91400 else None
                ),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x, scale = values["X"], values["scale"]
        for axis, size in enumerate(self._sizes()):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, x.shape[axis])
        return {"Y": x * (-scale if self.is_negative_scale else scale)}


@dataclasses.dataclass(eq=False, kw_only=True)
class BlockScaleQuantize(Node):
    """scale = the largest absolute value of a block over the largest of Y's type, rounded up; Y = X / scale."""

    tag = "BLOCK_SCALE_QUANTIZE"
    method = "block_scale_quantize"

    block_size: int
    axis: int | None = None
    transpose: bool = False

    @property
    def _axis(self) -> int:
        return len(self.inputs["X"].dim) - 1 if self.axis is None else self.axis

    def infer(self, context: Context) -> None:
        x, scale = self.inputs["X"], self.outputs["scale"]
        if not 0 <= self._axis < len(x.dim):
            raise make_error(ValueError, self.where, "axis", self.axis, f"0 to {len(x.dim) - 1}", "count from 0")
        if self.block_size < 1 or x.dim[self._axis] % self.block_size:
            raise make_error(
                ValueError,
                self.where,
                "block_size",
                self.block_size,
                f"a divisor of {x.dim[self._axis]}, the extent of the input along dimension {self._axis}",
                "pad the input, or take another axis",
            )
        order = stride_order(x.dim, x.stride)
        if self.transpose:
            first = order.index(self._axis)
            order = order[first:] + order[:first]
        self.fill_output("Y", x.dim, lambda dims: strides_in_order(dims, order) if self.transpose else [*x.stride])
        needed = [*x.dim]
        needed[self._axis] //= self.block_size
        padded = [*needed]
        if scale.reordering_type is tensor_reordering.F8_128x4:
            # cuDNN requires whole tiles, and the blocks of a row side by side.
            order = sorted(stride_order(x.dim, x.stride), key=lambda axis: axis != self._axis)
            for axis in range(max(len(padded) - 2, 0), len(padded)):
                tile = 4 if axis == self._axis else 128
                padded[axis] = math.ceil(padded[axis] / tile) * tile
        scale.fill(padded, lambda dims: strides_in_order(dims, order))
        if not _fits(scale, needed):
            allowed = f"dim={needed}, or more in the last two dimensions as padding of the layout F8_128x4"
            raise self.make_error(
                ValueError, "scale", f"dim={scale.dim}", allowed, "leave set_dim() out: it is inferred"
            )

    def lower(self, lowering: Lowering) -> None:
        a, scale = be.Attribute, self.outputs["scale"]
        tiled = scale.reordering_type is tensor_reordering.F8_128x4
        if tiled != (len(scale.dim) == 3):
            hint = "call set_reordering_type(cudnn.tensor_reordering.F8_128x4) on it"
            raise self.make_error(
                RuntimeError,
                "scale",
                f"the layout {scale.reordering_type.name} and rank {len(scale.dim)}",
                "F8_128x4 and rank 3, or another layout and rank",
                "reshape the input to [batch, rows, columns]" if tiled else hint,
            )
        lowering.operation(
            be.DescriptorType.OPERATION_BLOCK_SCALE_QUANTIZE,
            {
                a.OPERATION_BLOCK_SCALE_QUANTIZE_XDESC: self.inputs["X"],
                a.OPERATION_BLOCK_SCALE_QUANTIZE_YDESC: self.outputs["Y"],
                a.OPERATION_BLOCK_SCALE_QUANTIZE_SCALE_DESC: scale,
                a.OPERATION_BLOCK_SCALE_QUANTIZE_MATH_PREC: lowering.data_type(self.compute_data_type),
                a.OPERATION_BLOCK_SCALE_QUANTIZE_BLOCK_SIZE: self.block_size,
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x, y, scale = values["X"], self.outputs["Y"], self.outputs["scale"]
        if y.data_type not in LARGEST:
            raise make_error(
                NotImplementedError,
                self.where,
                "output Y",
                y.data_type.name,
                ", ".join(dtype.name for dtype in LARGEST),
                "call set_data_type() on it",
            )
        grouped = x.unflatten(self._axis, (-1, self.block_size))
        amax = grouped.abs().amax(self._axis + 1, keepdim=True) / LARGEST[y.data_type]
        dtype = scale.data_type if scale.data_type in SCALES else data_type.FLOAT
        factor, _ = compute_block_scales(amax, 1.0, _cudnn_to_torch_data_type(dtype), up=True)
        factor = scale_values(factor).to(grouped.dtype)
        # A block of zeros may have the scale 0.
        quotient = torch.where(factor == 0, 0, grouped / factor).flatten(self._axis, self._axis + 1)
        factor = factor.squeeze(self._axis + 1)
        padding = [(0, got - extent) for got, extent in zip(scale.dim, factor.shape, strict=True)]
        return {"Y": quotient, "scale": torch.nn.functional.pad(factor, [p for pair in padding[::-1] for p in pair])}


class BlockScaleMethods(NodeList[Operand]):
    """The methods that convert to and from microscaling formats."""

    def block_scale_quantize(
        self,
        input: Operand,
        block_size: int,
        axis: int | None = None,
        transpose: bool = False,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> list[Tensor]:
        """``input`` quantized to a narrow type, with one scale for each ``block_size`` elements along ``axis``.

        ``scale = round_up(amax(block) / largest(Y))`` and ``Y = round(input / scale)``, which saturates: the formula of
        cuDNN's documentation. Set the types on the results: Y FP8_E4M3, FP8_E5M2 or FP4_E2M1, the scale FP8_E8M0
        (MXFP8, blocks of 32) or FP8_E4M3 (NVFP4, blocks of 16); set the scale's layout with
        ``set_reordering_type(cudnn.tensor_reordering.F8_128x4)`` where a matmul reads it.

        Args:
            axis: The dimension that is divided into blocks; the last one by default.
            transpose: Y is stored with ``axis`` fastest and the other dimensions in their order after it.

        Returns:
            ``[Y, scale]``: Y has the shape of ``input``; the scale has it with the extent along ``axis`` divided by
            ``block_size``, in the layout F8_128x4 padded to 128 rows and 4 blocks.
        """
        node = self._add(
            BlockScaleQuantize,
            name,
            compute_data_type,
            {"X": input},
            ["Y", "scale"],
            block_size=int(block_size),
            axis=axis,
            transpose=transpose,
        )
        return [node.outputs["Y"], node.outputs["scale"]]

    def block_scale_dequantize(
        self,
        input: Operand,
        descale: Operand,
        block_size: Sequence[int],
        is_negative_scale: bool = False,
        compute_data_type: object = NOT_SET,
        name: str = "",
    ) -> Tensor:
        """``input`` times the scale of each element's block: the operand of a matmul in a microscaling format.

        Args:
            descale: One scale a block, in any stride order. In the layout F8_128x4 it may be padded.
            block_size: Extents of a block along the last dimensions: ``[1, 32]`` for rows of 32, ``[32, 1]`` for
                columns. A single number applies to the dimension that the shape of ``descale`` implies.
            is_negative_scale: The scales stand for their negatives (cuDNN 9.14).

        Returns:
            Y, shaped and laid out as ``input``. cuDNN wants it virtual, read by a matmul.
        """
        sizes = [int(block_size)] if isinstance(block_size, int) else [int(size) for size in block_size]
        node = self._add(
            BlockScaleDequantize,
            name,
            compute_data_type,
            {"X": input, "scale": descale},
            ["Y"],
            block_size=sizes,
            is_negative_scale=is_negative_scale,
        )
        return node.outputs["Y"]
