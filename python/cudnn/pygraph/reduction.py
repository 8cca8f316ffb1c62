"""Reductions over dimensions, and the statistics that batch normalization starts from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import channels_last
from cudnn.backend import enums as be
from cudnn.enums import data_type, reduction_mode
from cudnn.errors import cudnnGraphNotSupportedError, make_error
from cudnn.lazy import torch
from cudnn.pygraph.node import NOT_SET, Context, Node, NodeList, Operand, where_of
from cudnn.pygraph.pointwise import PointwiseMethods
from cudnn.pygraph.tensor import Tensor

if TYPE_CHECKING:
    from cudnn.pygraph.lowering import Lowering


FLOATING = (data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE)


@dataclasses.dataclass(eq=False, kw_only=True)
class Reduction(Node):
    """Y = X reduced over the dimensions in which Y has extent 1 and X has not.

    With the optional input GROUP_OFFSET, ``[1, rows, N]`` becomes ``[groups, 1, N]``: each group of rows separately.
    """

    tag = "REDUCTION"
    method = "reduction"
    optional = exact_ports = frozenset({"GROUP_OFFSET"})

    mode: reduction_mode

    def infer(self, context: Context) -> None:
        x, y, first = self.inputs["X"], self.outputs["Y"], self.inputs.get("GROUP_OFFSET")
        if first is not None:
            return self._infer_groups(x, y, first)
        y.fill(x.dim, channels_last)
        if len(y.dim) != len(x.dim) or any(out not in (1, extent) for extent, out in zip(x.dim, y.dim, strict=True)):
            allowed, hint = "the input's shape with 1 in the dimensions to reduce", "call set_dim() with such a shape"
            raise self.make_error(ValueError, "Y", f"dim={y.dim} for an input of dim={x.dim}", allowed, hint)

    def _infer_groups(self, x: Tensor, y: Tensor, first: Tensor) -> None:
        self.rank_check([3], "X", "GROUP_OFFSET")
        y.fill([first.dim[0], 1, x.dim[2]], channels_last)
        groups = y.dim[0]
        valid_offsets = first.dim == [first.dim[0], 1, 1] and first.data_type is data_type.INT32 and x.dim[0] == 1
        if not valid_offsets or groups not in (first.dim[0], first.dim[0] - 1) or y.dim[1:] != [1, x.dim[2]]:
            raise make_error(
                ValueError,
                self.where,
                "group_offset",
                f"{first.data_type.name} dim={first.dim} for dim={x.dim} to dim={y.dim}",
                f"INT32 [groups, 1, 1], or one more, for [1, rows, {x.dim[2]}] to [groups, 1, {x.dim[2]}]",
                "correct the shapes",
            )

    def lower(self, lowering: Lowering) -> None:
        a, (operator, x) = be.Attribute, self._prologue(lowering)
        lowering.operation(
            be.DescriptorType.OPERATION_REDUCTION,
            {
                a.OPERATION_REDUCTION_XDESC: x,
                a.OPERATION_REDUCTION_YDESC: self.outputs["Y"],
                a.OPERATION_REDUCTION_GROUP_OFFSET_DESC: self.inputs.get("GROUP_OFFSET"),
                a.OPERATION_REDUCTION_DESC: lowering.descriptor(
                    be.DescriptorType.REDUCTION,
                    {
                        a.REDUCTION_COMP_TYPE: lowering.data_type(self.compute_data_type),
                        a.REDUCTION_OPERATOR: operator,
                        a.REDUCTION_IS_DETERMINISTIC: False if lowering.version >= 91100 else None,
                    },
                ),
            },
        )

    def _prologue(self, lowering: Lowering) -> tuple[be.ReduceTensorOp, Tensor]:
        """The operator and its input. cuDNN refuses four operators; element-wise operations before another make three.

        NORM2 would need a root after the reduction, where its engines fuse nothing.
        """
        x, mode = self.inputs["X"], self.mode
        plain = {reduction_mode.AVG: "ADD", reduction_mode.NORM1: "ADD", reduction_mode.MUL_NO_ZEROS: "MUL"}
        if mode is reduction_mode.NORM2:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "mode",
                mode.name,
                "any other mode with cuDNN",
                "reduce x * x with ADD and take the root in a second graph, or run this one with backend='reference'",
            )
        if mode is reduction_mode.AVG and "GROUP_OFFSET" in self.inputs:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                "mode",
                "AVG of groups",
                "AVG of whole dimensions with cuDNN",
                "use ADD and divide",
            )
        if mode not in plain:
            return be.ReduceTensorOp[mode.name], x
        if self.compute_data_type not in FLOATING:
            raise make_error(
                cudnnGraphNotSupportedError,
                self.where,
                f"compute_data_type for mode {mode.name}",
                self.compute_data_type.name,
                ", ".join(dtype.name for dtype in FLOATING),
                "set one of these",
            )
        smaller: PointwiseMethods[Tensor] = PointwiseMethods(
            dataclasses.replace(
                lowering.context,
                intermediate_data_type=self.compute_data_type,
                compute_data_type=self.compute_data_type,
            )
        )

        def constant(value: float) -> Tensor:
            return Tensor.constant(value, data_type.FLOAT, len(x.dim))

        if mode is reduction_mode.AVG:
            input_ = smaller.mul(x, constant(math.prod(self.outputs["Y"].dim) / math.prod(x.dim)))
        elif mode is reduction_mode.NORM1:
            input_ = smaller.abs(x)
        else:
            zero = smaller.cmp_eq(x, constant(0.0)).set_data_type(data_type.BOOLEAN)
            input_ = smaller.binary_select(constant(1.0), x, zero)
        lowering.expand(smaller)
        return be.ReduceTensorOp[plain[mode]], input_

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x = values["X"]
        reduced_dim = self.outputs["Y"].dim
        if "GROUP_OFFSET" in values:
            return {"Y": self._by_group(x, values["GROUP_OFFSET"].flatten().tolist())}
        axes = [axis for axis, extent in enumerate(x.shape) if extent != reduced_dim[axis]]
        # PyTorch takes an empty list of dimensions for all of them, so there is always one of extent 1.
        return {"Y": _REDUCE[self.mode.name](x.unsqueeze(-1), [*axes, -1]).squeeze(-1)}

    def _by_group(self, x: Any, first: list[int]) -> Any:
        ends = [*first[1:], x.shape[1]][: self.outputs["Y"].dim[0]]
        if any(not 0 <= start < end <= x.shape[1] for start, end in zip(first, ends, strict=False)):
            raise make_error(
                ValueError,
                self.where,
                "group_offset",
                str(first),
                f"rising values from 0 to {x.shape[1]}",
                "sort the rows by group and pass where each group begins",
            )
        groups = [x[:, start:end] for start, end in zip(first, ends, strict=False)]
        return torch.cat([_REDUCE[self.mode.name](rows, [1]) for rows in groups])


def _product(x: Any, axes: list[int]) -> Any:
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x


_REDUCE: dict[str, Callable[[Any, list[int]], Any]] = {
    "ADD": lambda x, axes: x.sum(axes, keepdim=True),
    "MUL": _product,
    "MIN": lambda x, axes: x.amin(axes, keepdim=True),
    "MAX": lambda x, axes: x.amax(axes, keepdim=True),
    "AMAX": lambda x, axes: x.abs().amax(axes, keepdim=True),
    "AVG": lambda x, axes: x.mean(axes, keepdim=True),
    "NORM1": lambda x, axes: x.abs().sum(axes, keepdim=True),
    "NORM2": lambda x, axes: (x * x).sum(axes, keepdim=True).sqrt(),
    "MUL_NO_ZEROS": lambda x, axes: _product(torch.where(x == 0, 1, x), axes),
}


@dataclasses.dataclass(eq=False, kw_only=True)
class GenStats(Node):
    """SUM and SQ_SUM: sums of X and of its squares per channel (dimension 1)."""

    tag = "GENSTATS"
    method = "genstats"

    def infer(self, context: Context) -> None:
        x = self.inputs["X"]
        self.rank_check(range(3, 9), "X")
        for port in self.outputs:
            self.fill_output(port, [1, x.dim[1], *[1] * (len(x.dim) - 2)], channels_last)

    def lower(self, lowering: Lowering) -> None:
        a, x = be.Attribute, self.inputs["X"]
        lowering.operation(
            be.DescriptorType.OPERATION_GEN_STATS,
            {
                a.OPERATION_GENSTATS_MODE: be.GenStatsMode.SUM_SQSUM,
                # cuDNN takes the type of X here, not that of the arithmetic.
                a.OPERATION_GENSTATS_MATH_PREC: lowering.data_type(x.data_type),
                a.OPERATION_GENSTATS_XDESC: x,
                a.OPERATION_GENSTATS_SUMDESC: self.outputs["SUM"],
                a.OPERATION_GENSTATS_SQSUMDESC: self.outputs["SQ_SUM"],
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x = values["X"]
        axes = [axis for axis in range(x.dim()) if axis != 1]
        return {"SUM": x.sum(axes, keepdim=True), "SQ_SUM": (x * x).sum(axes, keepdim=True)}


class ReductionMethods(NodeList[Operand]):
    """The methods that add reductions."""

    def reduction(
        self,
        input: Operand,
        mode: reduction_mode,
        compute_data_type: object = NOT_SET,
        name: str = "",
        group_offset: Operand | None = None,
    ) -> Tensor:
        """Reduces ``input`` over every dimension in which the shape set on the result with ``set_dim()`` has extent 1.

        ``mode`` is a ``cudnn.reduction_mode``: ADD, MUL, MIN, MAX, AMAX (largest absolute value), AVG, NORM1 (sum of
        absolute values), NORM2 (root of the sum of squares) or MUL_NO_ZEROS (product of what is not 0). cuDNN has the
        first five; AVG, NORM1 and MUL_NO_ZEROS become element-wise operations and one of these, and NORM2 is for the
        reference executor. Returns Y, which has the shape of ``input`` until it is set and channels-last strides.

        ``group_offset``, INT32 ``[groups, 1, 1]``, divides the rows of an input ``[1, rows, N]`` at rising offsets into
        groups, which are reduced each to a row of ``[groups, 1, N]``. The last group ends with the rows, or at one more
        offset. cuDNN describes it from 9.24; 9.28 has no engine for it alone.
        """
        if not isinstance(mode, reduction_mode) or mode is reduction_mode.NOT_SET:  # pyright: ignore[reportUnnecessaryIsInstance]
            allowed = ", ".join(member.name for member in reduction_mode if member)
            where = where_of(name, "reduction")
            raise make_error(
                ValueError, where, "mode", repr(mode), f"cudnn.reduction_mode. {allowed}", "pass one of them"
            )
        inputs = {"X": input, "GROUP_OFFSET": group_offset}
        return self._add(Reduction, name, compute_data_type, inputs, ["Y"], mode=mode).outputs["Y"]

    def genstats(self, input: Operand, compute_data_type: object = NOT_SET, name: str = "") -> list[Tensor]:
        """Sums per channel of ``input`` ``[N, C, ...]`` and of its squares, the start of batch normalization.

        Returns ``[SUM, SQ_SUM]``, each ``[1, C, 1, ...]``.
        """
        node = self._add(GenStats, name, compute_data_type, {"X": input}, ["SUM", "SQ_SUM"])
        node.outputs["SUM"].name, node.outputs["SQ_SUM"].name = f"{name}_sum_output", f"{name}_sq_sum_output"
        return [*node.outputs.values()]
