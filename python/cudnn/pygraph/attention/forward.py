"""Scaled dot-product attention, forward: as one operation of cuDNN, or as a pattern of smaller ones."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn.arrays.layout import strides_like
from cudnn.backend import enums as be
from cudnn.backend.attributes import Attribute as A
from cudnn.enums import attention_implementation, data_type
from cudnn.pygraph.attention import support
from cudnn.pygraph.attention.operations import Softmax
from cudnn.pygraph.attention.scores import BAND_MASK_SINCE, Attention, ScoreGraph
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
    """O ``[b, h_q, s_q, d_v]`` and, ``[b, h_q, s_q, 1]`` each where wanted, Stats, Max and Sum_exp of the softmax.

    Stats is ``log(sum(exp(scores)))``. RNG_DUMP ``[b, h_q, s_q, s_kv]`` is the dropout mask. The input Block_mask is
    UINT8 ``[b, h_q, ceil(s_q / 128), ceil(ceil(s_kv / 128) / 8)]``.
    """

    tag = "SDPA"
    method = "sdpa"

    unfuse_fma: bool = False
    unified_refused: bool = dataclasses.field(default=False, init=False)  # cuDNN found no engine for the one operation

    STATISTICS = ("Stats", "Max", "Sum_exp")
    MASK_STEPS = (
        ScoreGraph.modified,
        ScoreGraph.biased,
        ScoreGraph.with_alibi,
        ScoreGraph.right_bounded,
        ScoreGraph.left_bounded,
    )
    SCORE_STEPS = (
        ScoreGraph.scaled,
        ScoreGraph.modified,
        ScoreGraph.biased,
        ScoreGraph.with_alibi,
        ScoreGraph.padded,
        ScoreGraph.right_bounded,
        ScoreGraph.left_bounded,
    )

    def infer(self, context: Context) -> None:
        self.check_shapes()
        q, v = self.inputs["Q"], self.inputs["V"]
        dims = [*q.dim[:3], v.dim[3]]
        self.check_shape("O", lambda dim: dim == dims, f"dim={dims}")
        self.outputs["O"].fill(dims, lambda dims: strides_like(q.stride, q.dim, dims))
        self.infer_statistics([*q.dim[:3], 1])
        self.record(context)

    def infer_statistics(self, dims: list[int]) -> None:
        """Shapes and types of the outputs that describe the softmax, and of the other outputs."""
        for port in self.STATISTICS:
            if port in self.outputs:
                tensor = self.outputs[port]
                self.check_shape(port, lambda dim: dim == dims, f"dim={dims}")
                tensor.fill(dims)
                if tensor.data_type is NOT_SET:
                    tensor.data_type = data_type.FLOAT
        self.infer_extras()

    def check(self, context: Context) -> None:
        version = support.loaded_version()
        support.check_forward(self, context, version)
        self.check_implementation(support.unified_unsupported_reason(self, version))
        if self.implementation == COMPOSITE:
            support.refuse_composite(self)

    # Lowering.
    def lower_apart(self, lowering: Lowering) -> None:
        statistics = {port: self.outputs[port] for port in self.STATISTICS if port in self.outputs}
        if "Stats" in statistics:
            statistics["Stats"] = self._stats(lowering, statistics["Stats"])
        graph = ScoreGraph(self, lowering.context, lowering.version)
        graph.slopes = self.alibi(lowering)
        reason = self._reason_for_composite(lowering.version)
        if reason:
            support.refuse_composite(self)
            unheard = "; unfuse_fma has no effect on it" if self.unfuse_fma else ""
            _log.info("%s: COMPOSITE implementation: %s%s", self.where, reason, unheard)
            self.compose(graph, self.key(graph, lowering), statistics)
            lowering.expand(graph)
        else:
            _log.info("%s: UNIFIED implementation, cuDNN's one operation for attention", self.where)
            self._lower_unified(graph, lowering, statistics)

    def _reason_for_composite(self, version: int) -> str:
        if self.implementation == COMPOSITE:
            return "asked for"
        if self.implementation == UNIFIED:
            return ""
        if self.unified_refused:
            return "cuDNN has no engine for the UNIFIED one"
        return support.unified_unsupported_reason(self, version)

    def fall_back(self) -> bool:
        if self.implementation == AUTO and not self.unified_refused and "Block_mask" not in self.inputs:
            self.unified_refused = True
            return True
        return False

    def _stats(self, lowering: Lowering, stats: Tensor) -> Tensor:
        """Where cuDNN writes the statistics: FLOAT, even into a tensor of another type, which they would overrun."""
        if stats.is_virtual or stats.data_type is data_type.FLOAT:
            return stats
        support.check_narrow_stats(self, stats)
        return lowering.narrowed(stats)

    def _lower_unified(self, graph: ScoreGraph, lowering: Lowering, statistics: Mapping[str, Tensor]) -> None:
        inputs = self.inputs
        scores = self.virtual_scores(lowering.context)
        masked = graph.apply(self.MASK_STEPS, scores)
        subgraph = self._subgraph(lowering, graph) if graph.nodes else None
        softmax = None
        if (statistics or "Sink" in inputs) and lowering.version >= BAND_MASK_SINCE:
            softmax = self._softmax(lowering, statistics)
        scale = inputs.get("Attn_scale")
        if scale is None and self.attn_scale is not None:
            scale = graph.number(self.attn_scale)
        lowering.operation(
            be.DescriptorType.OPERATION_SDPA_FWD,
            {
                A.OPERATION_SDPA_FWD_QDESC: inputs["Q"],
                A.OPERATION_SDPA_FWD_KDESC: inputs["K"],
                A.OPERATION_SDPA_FWD_VDESC: inputs["V"],
                A.OPERATION_SDPA_FWD_ODESC: self.outputs["O"],
                A.OPERATION_SDPA_FWD_STATSDESC: statistics.get("Stats") if softmax is None else None,
                A.OPERATION_SDPA_FWD_SOFTMAX_DESC: softmax,
                A.OPERATION_SDPA_FWD_SCALEDESC: scale,
                A.OPERATION_SDPA_FWD_BLOCK_MASK_DESC: inputs.get("Block_mask"),
                A.OPERATION_SDPA_FWD_PAGE_TABLE_KDESC: inputs.get("Page_table_K"),
                A.OPERATION_SDPA_FWD_PAGE_TABLE_VDESC: inputs.get("Page_table_V"),
                A.OPERATION_SDPA_FWD_SEQ_LEN_QDESC: inputs.get("Seq_len_q"),
                A.OPERATION_SDPA_FWD_SEQ_LEN_KVDESC: inputs.get("Seq_len_kv"),
                A.OPERATION_SDPA_FWD_SUBGRAPH: subgraph,
                A.OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID: lowering.uid(scores) if subgraph else None,
                A.OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID: lowering.uid(masked) if subgraph else None,
                A.OPERATION_SDPA_FWD_DROPOUT_PROBABILITY: self.dropout_probability or None,
                A.OPERATION_SDPA_FWD_DROPOUT_SEED_DESC: inputs.get("Dropout_seed"),
                A.OPERATION_SDPA_FWD_DROPOUT_OFFSET_DESC: inputs.get("Dropout_offset"),
                A.OPERATION_SDPA_FWD_DROPOUT_RNG_DUMP_DESC: self.outputs.get("RNG_DUMP"),
                A.OPERATION_SDPA_FWD_UNFUSE_FMA: (self.unfuse_fma and lowering.version >= 92200) or None,
            },
        )

    @staticmethod
    def _subgraph(lowering: Lowering, graph: ScoreGraph) -> Descriptor:
        """The masks as a separate operation graph, which becomes an attribute of the attention operation."""
        outer, lowering.operations = lowering.operations, []
        lowering.expand(graph)
        inner, lowering.operations = lowering.operations, outer
        return lowering.descriptor(be.DescriptorType.OPERATIONGRAPH, {A.OPERATIONGRAPH_OPS: inner})

    def _softmax(self, lowering: Lowering, statistics: Mapping[str, Tensor]) -> Descriptor:
        """Names the softmax's extra inputs and outputs; cuDNN requires the other two too, and ignores them."""
        x, y = (self.virtual_scores(lowering.context) for _ in range(2))
        sink = {"Sink": self.inputs["Sink"]} if "Sink" in self.inputs else {}
        return Softmax(inputs={"X": x, **sink}, outputs={"Y": y, **statistics}).descriptor(lowering)

    def compose(self, graph: ScoreGraph, key: Tensor, statistics: Mapping[str, Tensor]) -> None:
        """Attention in smaller operations; ``key`` is K as ``[b, h_k, d_qk, s_kv]``."""
        seq_len_q, seq_len_kv = graph.lengths
        scores = graph.scores(graph.product(self.query(graph), key, m=seq_len_q, n=seq_len_kv))
        scores = graph.apply(self.SCORE_STEPS, scores)
        softmax = graph.softmax if graph.version >= BAND_MASK_SINCE else graph.small_softmax
        weights = graph.dropped(softmax(scores, self.inputs.get("Sink"), statistics))
        self.sum_values(graph, weights)

    def query(self, graph: ScoreGraph) -> Tensor:
        """Q ``[b, h_q, s_q, d_qk]``."""
        return self.inputs["Q"]

    def key(self, graph: ScoreGraph, lowering: Lowering) -> Tensor:
        """K as ``[b, h_k, d_qk, s_kv]``."""
        paged = "Page_table_K" in self.inputs
        return graph.pages("K", transposed=True) if paged else self.transposed(lowering, "K")

    def values(self, graph: ScoreGraph) -> Tensor:
        """V ``[b, h_v, s_kv, d_v]``."""
        return graph.pages("V", transposed=False) if "Page_table_V" in self.inputs else self.inputs["V"]

    def sum_values(self, graph: ScoreGraph, weights: Tensor) -> None:
        """O = weights V."""
        weights.set_data_type(self.inputs["Q"].data_type)
        graph.product(weights, self.values(graph), m=graph.lengths[0], k=graph.lengths[1])
        graph.into(self.outputs["O"])

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        masks = self.masks(values)
        masks.block_mask = values.get("Block_mask")
        results = attention_forward(values["Q"], self.dense(values, "K"), self.dense(values, "V"), masks)
        return self.with_mask(results, masks)
