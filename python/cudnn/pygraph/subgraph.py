"""A list of nodes with the methods that may appear inside composite operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn.enums import data_type as types
from cudnn.enums import scalar_type, tensor_reordering
from cudnn.pygraph.block_scale import BlockScaleMethods
from cudnn.pygraph.convolution import ConvolutionMethods
from cudnn.pygraph.matmul import MatmulMethods
from cudnn.pygraph.moe import MoeMethods
from cudnn.pygraph.node import NOT_SET, Operand
from cudnn.pygraph.pointwise import PointwiseMethods
from cudnn.pygraph.reduction import ReductionMethods
from cudnn.pygraph.resample import ResampleMethods
from cudnn.pygraph.rope import RopeMethods
from cudnn.pygraph.structure import StructureMethods
from cudnn.pygraph.tensor import Tensor


class SubGraph(
    PointwiseMethods[Operand],
    MatmulMethods[Operand],
    MoeMethods[Operand],
    BlockScaleMethods[Operand],
    ReductionMethods[Operand],
    ConvolutionMethods[Operand],
    ResampleMethods[Operand],
    RopeMethods[Operand],
    StructureMethods[Operand],
):
    """Tensors, and every operation that is not composite itself. ``pygraph`` adds the others and the life cycle."""

    def tensor(
        self,
        dim: Sequence[int],
        stride: Sequence[int],
        data_type: object = NOT_SET,
        is_virtual: bool = False,
        is_pass_by_value: bool = False,
        ragged_offset: Tensor | None = None,
        reordering_type: tensor_reordering = tensor_reordering.NONE,
        name: str = "",
        uid: int = -1,
        ragged_offset_multiplier: int = 1,
    ) -> Tensor:
        """A tensor described by shape and strides in elements. A ``uid`` of -1 leaves the choice to the library."""
        tensor = Tensor(
            dim,
            stride,
            data_type,
            is_virtual,
            is_pass_by_value,
            ragged_offset,
            reordering_type,
            name,
            None if uid == -1 else uid,
        )
        return tensor.set_ragged_offset_multiplier(ragged_offset_multiplier)

    def tensor_like(self, source: Any, name: str = "") -> Tensor:
        """A tensor described by another: a graph tensor, a ``torch.Tensor`` or any object with ``__dlpack__``.

        A CPU array of one element is passed by value.
        """
        return Tensor.like(source, name)

    def tensor_scalar(self, value: int | float, scalar_type: scalar_type = scalar_type.RUNTIME_PARAM) -> Tensor:
        """A constant: FLOAT for a float, INT32 (INT64 where it does not fit) for an int."""
        integer = types.INT32 if -(2**31) <= value < 2**31 else types.INT64
        dtype = types.FLOAT if isinstance(value, float) else integer
        tensor = Tensor.constant(value, dtype)
        tensor.is_compile_time_constant = scalar_type.name == "COMPILE_TIME_CONST"
        return tensor
