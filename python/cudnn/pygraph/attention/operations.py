"""Operations of cuDNN that only attention uses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from cudnn.backend import enums as be
from cudnn.backend.attributes import Attribute as A
from cudnn.lazy import torch
from cudnn.pygraph.node import Context, Node
from cudnn.pygraph.reduction import Reduction
from cudnn.reference.attention import gathered, random_mask, softmax

if TYPE_CHECKING:
    from cudnn.backend.descriptor import Descriptor
    from cudnn.pygraph.lowering import Lowering


@dataclasses.dataclass(eq=False, kw_only=True)
class Softmax(Node):
    """``Y = softmax(X)`` over the last dimension, an operation that cuDNN has from 9.21.

    Optional outputs: Stats = ``log(sum(exp(X)))``, Max = ``max(X)``, Sum_exp = ``sum(exp(X - Max))``. The optional
    input Sink is one more score in every row, whose weight is dropped.
    """

    tag = "SOFTMAX"
    method = "softmax"
    optional = frozenset({"Sink"})

    def infer(self, context: Context) -> None:
        x = self.inputs["X"]
        self.outputs["Y"].fill(x.dim)
        for port in self.outputs.keys() - {"Y"}:
            self.outputs[port].fill([*x.dim[:-1], 1])

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
                A.OPERATION_SOFTMAX_MAX_DESC: self.outputs.get("Max"),
                A.OPERATION_SOFTMAX_SUM_EXP_DESC: self.outputs.get("Sum_exp"),
                A.OPERATION_SOFTMAX_SINK_DESC: self.inputs.get("Sink"),
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        probabilities, statistics = softmax(values["X"], values.get("Sink"))
        return {"Y": probabilities, **statistics}


@dataclasses.dataclass(eq=False, kw_only=True)
class DiagonalBandMask(Node):
    """Keeps the scores X on one side of a diagonal and puts the constant Fill elsewhere.

    ``CMP_GE`` keeps columns up to the diagonal, shifted right by ``Shift_right``; ``CMP_GT`` keeps columns greater than
    the diagonal less ``Left``. With ``Seq_len_q`` and ``Seq_len_kv`` it ends at the last valid row and column.
    """

    tag = "DIAGONAL_BAND_MASK"
    method = "diagonal_band_mask"
    optional = frozenset({"Seq_len_q", "Seq_len_kv", "Left", "Shift_right"})
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
        row = torch.arange(x.shape[-2], dtype=torch.int64, device=x.device).view(-1, 1)
        column = torch.arange(x.shape[-1], dtype=torch.int64, device=x.device)
        if "Seq_len_q" in values:
            row = row + values["Seq_len_kv"] - values["Seq_len_q"]
        if self.comparison == "CMP_GE":
            keep = column <= row + values.get("Shift_right", 0)
        else:
            keep = column > row - values["Left"]
        return {"Y": torch.where(keep, x, values["Fill"])}


@dataclasses.dataclass(eq=False, kw_only=True)
class PagedCacheLoad(Node):
    """Y ``[b, h, s_kv, d]``: the tokens of each batch entry, from the pages ``[pages, h, tokens, d]`` of Container.

    Page_table ``[b, 1, pages, 1]`` numbers the pages of each entry in order; Sequence holds the entries' lengths. The
    shape of Y, which may have its last two dimensions exchanged, is set where the node is made.
    """

    tag = "PAGED_CACHE_LOAD"
    method = "paged_cache_load"
    optional = frozenset({"Sequence"})
    exact_ports = frozenset({"Page_table", "Sequence"})

    def infer(self, context: Context) -> None:
        """The shape of Y is set where the node is made."""

    def lower(self, lowering: Lowering) -> None:
        lowering.operation(
            be.DescriptorType.OPERATION_PAGED_CACHE_LOAD,
            {
                A.OPERATION_PAGED_CACHE_LOAD_CONTAINER_DESC: self.inputs["Container"],
                A.OPERATION_PAGED_CACHE_LOAD_SEQUENCE_DESC: self.inputs.get("Sequence"),
                A.OPERATION_PAGED_CACHE_LOAD_PAGE_TABLE_DESC: self.inputs["Page_table"],
                A.OPERATION_PAGED_CACHE_LOAD_YDESC: self.outputs["Y"],
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        y = self.outputs["Y"]
        exchanged = y.stride[2] == 1
        rows = gathered(values["Container"], values["Page_table"], y.dim[3 if exchanged else 2])
        return {"Y": rows.transpose(2, 3) if exchanged else rows}


@dataclasses.dataclass(eq=False, kw_only=True)
class RandomMask(Node):
    """Y: 1 with ``probability``, else 0; the same for the same Seed and Offset. Its shape is set by who makes it."""

    tag = "RNG"
    method = "rng"
    exact_ports = frozenset({"Seed", "Offset"})

    probability: float

    def infer(self, context: Context) -> None:
        """The shape of Y is set where the node is made."""

    def lower(self, lowering: Lowering) -> None:
        bernoulli = lowering.descriptor(
            be.DescriptorType.RNG,
            {
                A.RNG_DISTRIBUTION: be.RngDistribution.BERNOULLI,
                A.RNG_BERNOULLI_DIST_PROBABILITY: self.probability,
            },
        )
        lowering.operation(
            be.DescriptorType.OPERATION_RNG,
            {
                A.OPERATION_RNG_DESC: bernoulli,
                A.OPERATION_RNG_SEED: self.inputs["Seed"],
                A.OPERATION_RNG_OFFSET_DESC: self.inputs["Offset"],
                A.OPERATION_RNG_YDESC: self.outputs["Y"],
            },
        )

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": random_mask(values["Seed"], values["Offset"], self.probability, self.outputs["Y"].dim)}


class HeadReduction(Reduction):
    """Sums groups of consecutive heads, ``[b, h_q, s, d]`` to ``[b, h_kv, s, d]``, by cuDNN's ordinary reduction."""

    def infer(self, context: Context) -> None:
        """The shape of Y is set where the node is made."""

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        return {"Y": values["X"].unflatten(1, (self.outputs["Y"].dim[1], -1)).sum(2)}
