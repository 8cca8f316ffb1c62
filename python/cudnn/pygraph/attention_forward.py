"""Scaled dot-product attention, forward: as one operation of cuDNN, or as a pattern of smaller ones."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from cudnn.backend import enums as be
from cudnn.backend.attributes import Attribute as A
from cudnn.enums import attention_implementation, data_type, reduction_mode
from cudnn.pygraph import attention_support as support
from cudnn.pygraph.attention_ops import Softmax
from cudnn.pygraph.attention_scores import BAND_MASK_SINCE, Attention, ScoreGraph
from cudnn.pygraph.layout import row_major, strides_like
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import NOT_SET, Context
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.attention import attention_forward

if TYPE_CHECKING:
    from cudnn.backend.descriptor import Descriptor

_log = logging.getLogger("cudnn")
AUTO, UNIFIED, COMPOSITE = (
    attention_implementation.AUTO,
    attention_implementation.UNIFIED,
    attention_implementation.COMPOSITE,
)


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionForward(Attention):
    """O ``[b, h_q, s_q, d_v]`` and, for training, Stats ``[b, h_q, s_q, 1]``, the log of the softmax's denominator."""

    tag = "SDPA"
    method = "sdpa"

    implementation: attention_implementation = AUTO
    unified_refused: bool = dataclasses.field(default=False, init=False)  # cuDNN found no engine for the one operation

    MASK_STEPS = (ScoreGraph.biased, ScoreGraph.right_bounded, ScoreGraph.left_bounded)
    SCORE_STEPS = (
        ScoreGraph.scaled, ScoreGraph.biased, ScoreGraph.padded, ScoreGraph.right_bounded, ScoreGraph.left_bounded
    )  # fmt: skip

    def infer(self, context: Context) -> None:
        self.check_shapes()
        q, v = self.inputs["Q"], self.inputs["V"]
        dims = [*q.dim[:3], v.dim[3]]
        self.check_shape("O", lambda dim: dim == dims, f"dim={dims}")
        self.outputs["O"].fill(dims, lambda dims: strides_like(q.stride, q.dim, dims))
        stats = self.outputs.get("Stats")
        if stats is not None:
            stats_dims = [*q.dim[:3], 1]
            self.check_shape("Stats", lambda dim: dim == stats_dims, f"dim={stats_dims}")
            stats.fill(stats_dims)
            if stats.data_type is NOT_SET:
                stats.data_type = data_type.FLOAT

    def check(self, context: Context) -> None:
        version = support.loaded_version()
        support.check_forward(self, context, version)
        if self.implementation == UNIFIED:
            support.refuse_unified(self, support.unified_obstacle(self, version))

    # Lowering.
    def lower(self, lowering: Lowering) -> None:
        support.check_types(self)
        apart = self.apart(lowering)
        if apart is not self:
            return apart.lower(lowering)
        stats = self._stats(lowering)
        reason = self._reason_for_composite(lowering.version)
        if reason:
            _log.info("%s: COMPOSITE implementation: %s", self.where, reason)
            graph = ScoreGraph(self, lowering.context, lowering.version)
            self.compose(graph, self.transposed(lowering, "K"), stats)
            lowering.expand(graph)
        else:
            _log.info("%s: UNIFIED implementation, cuDNN's one operation for attention", self.where)
            self._lower_unified(lowering, stats)

    def _reason_for_composite(self, version: int) -> str:
        if self.implementation == COMPOSITE:
            return "asked for"
        if self.implementation == UNIFIED:
            return ""
        if self.unified_refused:
            return "cuDNN has no engine for the UNIFIED one"
        return support.unified_obstacle(self, version)

    def fall_back(self) -> bool:
        if self.implementation == AUTO and not self.unified_refused:
            self.unified_refused = True
            return True
        return False

    def _stats(self, lowering: Lowering) -> Tensor | None:
        """Where cuDNN writes the statistics: FLOAT, even into a tensor of another type, which they would overrun."""
        stats = self.outputs.get("Stats")
        if stats is None or stats.is_virtual or stats.data_type is data_type.FLOAT:
            return stats
        support.check_narrow_stats(self, stats)
        return lowering.narrowed(stats)

    def _lower_unified(self, lowering: Lowering, stats: Tensor | None) -> None:
        graph = ScoreGraph(self, lowering.context, lowering.version)
        scores = graph.scores(Tensor(is_virtual=True, data_type=lowering.context.intermediate_data_type))
        masked = graph.apply(self.MASK_STEPS, scores)
        subgraph = self._subgraph(lowering, graph) if graph.nodes else None
        softmax = None
        if stats is not None and lowering.version >= BAND_MASK_SINCE:
            softmax = self._softmax(lowering, stats)
        scale = self.inputs.get("Attn_scale")
        if scale is None and self.attn_scale is not None:
            scale = graph.number(self.attn_scale)
        lowering.operation(
            be.DescriptorType.OPERATION_SDPA_FWD,
            {
                A.OPERATION_SDPA_FWD_QDESC: self.inputs["Q"],
                A.OPERATION_SDPA_FWD_KDESC: self.inputs["K"],
                A.OPERATION_SDPA_FWD_VDESC: self.inputs["V"],
                A.OPERATION_SDPA_FWD_ODESC: self.outputs["O"],
                A.OPERATION_SDPA_FWD_STATSDESC: stats if softmax is None else None,
                A.OPERATION_SDPA_FWD_SOFTMAX_DESC: softmax,
                A.OPERATION_SDPA_FWD_SCALEDESC: scale,
                A.OPERATION_SDPA_FWD_SEQ_LEN_QDESC: self.inputs.get("Seq_len_q"),
                A.OPERATION_SDPA_FWD_SEQ_LEN_KVDESC: self.inputs.get("Seq_len_kv"),
                A.OPERATION_SDPA_FWD_SUBGRAPH: subgraph,
                A.OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID: lowering.uid(scores) if subgraph else None,
                A.OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID: lowering.uid(masked) if subgraph else None,
            },
        )

    @staticmethod
    def _subgraph(lowering: Lowering, graph: ScoreGraph) -> Descriptor:
        """The masks as an operation graph of their own, which becomes an attribute of the attention operation."""
        outer, lowering.operations = lowering.operations, []
        lowering.expand(graph)
        inner, lowering.operations = lowering.operations, outer
        return lowering.descriptor(be.DescriptorType.OPERATIONGRAPH, {A.OPERATIONGRAPH_OPS: inner})

    def _softmax(self, lowering: Lowering, stats: Tensor) -> Descriptor:
        """Names the softmax's extra outputs; cuDNN wants input and output too, and ignores them."""
        kind = lowering.context.intermediate_data_type
        x, y = (Tensor(self.score_dim, row_major(self.score_dim), kind, is_virtual=True) for _ in range(2))
        return Softmax(inputs={"X": x}, outputs={"Y": y, "Stats": stats}).descriptor(lowering)

    def compose(self, graph: ScoreGraph, key: Tensor, stats: Tensor | None) -> None:
        """Attention in smaller operations; ``key`` is K as ``[b, h_k, d_qk, s_kv]``."""
        q, seq_len_q, seq_len_kv = self.inputs["Q"], *graph.lengths
        scores = graph.scores(graph.product(q, key, m=seq_len_q, n=seq_len_kv))
        scores = graph.apply(self.SCORE_STEPS, scores)
        softmax = self._one_softmax if graph.version >= BAND_MASK_SINCE else self._small_softmax
        weights = softmax(graph, scores, stats).set_data_type(q.data_type)
        graph.product(weights, self.inputs["V"], m=seq_len_q, k=seq_len_kv)
        graph.into(self.outputs["O"])

    @staticmethod
    def _one_softmax(graph: ScoreGraph, scores: Tensor, stats: Tensor | None) -> Tensor:
        return graph.scores(graph.softmax(scores, stats))

    @staticmethod
    def _small_softmax(graph: ScoreGraph, scores: Tensor, stats: Tensor | None) -> Tensor:
        largest = graph.reduced(scores, reduction_mode.MAX)
        powers = graph.scores(graph.exp(graph.scores(graph.sub(scores, largest))))
        total = graph.reduced(powers, reduction_mode.ADD)
        # Also where nobody reads it: the engines match a softmax with statistics only.
        graph.add(graph.log(total), largest)
        if stats is not None:
            graph.into(stats)
        return graph.scores(graph.div(powers, total))

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        o, stats = attention_forward(values["Q"], values["K"], values["V"], self.masks(values))
        return {"O": o, "Stats": stats}
