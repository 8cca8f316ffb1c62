"""Two operations that cuDNN has from 9.21 and that only attention uses: softmax, and the mask of a diagonal band."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cudnn.backend import enums as be
from cudnn.backend.attributes import Attribute as A
from cudnn.lazy import torch
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.reduction import Reduction

if TYPE_CHECKING:
    from cudnn.backend.descriptor import Descriptor
    from cudnn.pygraph.lowering import Lowering


@dataclasses.dataclass(eq=False, kw_only=True)
class Softmax(Node):
    """``Y = softmax(X)`` over the last dimension; optional output Stats = ``log(sum(exp(X)))``."""

    tag = "SOFTMAX"
    method = "softmax"

    def infer(self, context: Context) -> None:
        x = self.inputs["X"]
        self.outputs["Y"].fill(x.dim)
        if "Stats" in self.outputs:
            self.outputs["Stats"].fill([*x.dim[:-1], 1])

    def lower(self, lowering: Lowering) -> None:
        lowering.operations.append(self.descriptor(lowering))

    def descriptor(self, lowering: Lowering) -> Descriptor:
        """The operation's descriptor. Unified attention takes it as an attribute, not as an operation of the graph."""
        return lowering.descriptor(
            be.DescriptorType.OPERATION_SOFTMAX,
            {
                A.OPERATION_SOFTMAX_XDESC: self.inputs["X"],
                A.OPERATION_SOFTMAX_YDESC: self.outputs["Y"],
                A.OPERATION_SOFTMAX_STATS_DESC: self.outputs.get("Stats"),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        stats = torch.logsumexp(values["X"], -1, keepdim=True)
        return {"Y": torch.exp(values["X"] - stats), "Stats": stats}


@dataclasses.dataclass(eq=False, kw_only=True)
class DiagonalBandMask(Node):
    """Keeps the scores X on one side of a diagonal and puts the constant Fill elsewhere.

    ``CMP_GE`` keeps columns up to the diagonal, shifted right by ``Shift_right``; ``CMP_GT`` keeps columns greater than
    the diagonal less ``Left``. With ``Seq_len_q`` and ``Seq_len_kv`` it ends at the last valid row and column.
    """

    tag = "DIAGONAL_BAND_MASK"
    method = "diagonal_band_mask"
    exact_ports = frozenset({"Seq_len_q", "Seq_len_kv", "Shift_right"})

    comparison: str

    def infer(self, context: Context) -> None:
        self.outputs["Y"].fill(self.inputs["X"].dim)

    def lower(self, lowering: Lowering) -> None:
        lowering.operation(
            be.DescriptorType.OPERATION_DIAGONAL_BAND_MASK,
            {
                A.OPERATION_DIAGONAL_BAND_MASK_XDESC: self.inputs["X"],
                A.OPERATION_DIAGONAL_BAND_MASK_BDESC: self.inputs["Fill"],
                A.OPERATION_DIAGONAL_BAND_MASK_YDESC: self.outputs["Y"],
                A.OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE: be.PointwiseMode[self.comparison],
                A.OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_QDESC: self.inputs.get("Seq_len_q"),
                A.OPERATION_DIAGONAL_BAND_MASK_SEQ_LEN_KVDESC: self.inputs.get("Seq_len_kv"),
                A.OPERATION_DIAGONAL_BAND_MASK_LEFT_BOUND_DESC: self.inputs.get("Left"),
                A.OPERATION_DIAGONAL_BAND_MASK_SHIFT_RIGHT_BOUND_DESC: self.inputs.get("Shift_right"),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        x = values["X"]
        row = torch.arange(x.shape[-2], device=x.device).view(-1, 1)
        column = torch.arange(x.shape[-1], device=x.device)
        if "Seq_len_q" in values:
            row = row + values["Seq_len_kv"] - values["Seq_len_q"]
        if self.comparison == "CMP_GE":
            keep = column <= row + values.get("Shift_right", 0)
        else:
            keep = column > row - values["Left"]
        return {"Y": torch.where(keep, x, values["Fill"])}


class HeadReduction(Reduction):
    """Sums groups of consecutive heads, ``[b, h_q, s, d]`` to ``[b, h_kv, s, d]``, by cuDNN's ordinary reduction."""

    def infer(self, context: Context) -> None:
        """The shape of Y is set where the node is made."""

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": values["X"].unflatten(1, (self.outputs["Y"].dim[1], -1)).sum(2)}
