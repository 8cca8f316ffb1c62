"""Scaled dot-product attention, backward: a pattern of smaller operations."""

from __future__ import annotations

import dataclasses
import logging
from math import prod
from typing import Any, NamedTuple

from cudnn.arrays.layout import broadcast, row_major, strides_like
from cudnn.enums import data_type, reduction_mode
from cudnn.pygraph.attention import faults, support
from cudnn.pygraph.attention.scores import Attention, ScoreGraph, ScoreModifier, swapped
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import Context
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.attention import attention_gradients

_log = logging.getLogger("cudnn")


class DropoutFactors(NamedTuple):
    """The mask, the factor on what it keeps, and the inverse of that factor; None without dropout."""

    graph: ScoreGraph
    mask: Tensor | None
    scale: Tensor | None
    scale_inv: Tensor

    def dropped(self, x: Tensor) -> Tensor:
        """``x`` under the mask."""
        return x if self.mask is None else self.graph.scores(self.graph.mul(x, self.mask))

    def rescaled(self, x: Tensor) -> Tensor:
        """``x`` times the factor."""
        return x if self.scale is None else self.graph.scores(self.graph.mul(x, self.scale))


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionBackward(Attention):
    """dQ, dK, dV (and dBias, dSink) from the forward pass's inputs, O, Stats ``[b, h_q, s_q, 1]``, and the gradient dO.

    ``max_total_seq_len_q`` bounds the rows of Q of all entries of ragged tensors together, so that scratch memory is
    not as long as the padded tensors. K and V have no such bound: ``max_total_seq_len_kv`` has no effect.
    """

    tag = "SDPA_BWD"
    method = "sdpa_backward"

    max_total_seq_len_q: int | None = None
    max_total_seq_len_kv: int | None = None
    use_deterministic_algorithm: bool = False
    score_mod_bprop: ScoreModifier | None = None

    SCORE_STEPS = (ScoreGraph.scaled, ScoreGraph.modified, ScoreGraph.biased, ScoreGraph.with_alibi, ScoreGraph.padded)
    BAND_STEPS = (ScoreGraph.right_bounded, ScoreGraph.left_bounded)

    @property
    def functions(self) -> tuple[ScoreModifier | None, ...]:
        return self.score_mod, self.score_mod_bprop

    def infer(self, context: Context) -> None:
        self.check_shapes()
        q, v = self.inputs["Q"].dim, self.inputs["V"].dim
        shapes = {"O": [*q[:3], v[3]], "dO": [*q[:3], v[3]], "Stats": [*q[:3], 1]}
        for port, dims in shapes.items():
            self.check_shape(port, lambda dim, dims=dims: dim == dims, f"dim={dims}")
        for port in "QKV":
            like = self.inputs[port]
            self.check_shape(f"d{port}", lambda dim, like=like: dim == like.dim, f"dim={like.dim}, as {port}")
            self.outputs[f"d{port}"].fill(like.dim, lambda dims, like=like: strides_like(like.stride, like.dim, dims))
        if "dBias" in self.outputs:
            self.check_shape(
                "dBias",
                lambda dim: broadcast([dim, self.score_dim]) == self.score_dim and len(dim) == 4,
                f"a shape that broadcasts to [b, h_q, s_q, s_kv] = {self.score_dim}",
            )
        if "dSink" in self.outputs:
            self.check_shape("dSink", lambda dim: dim == [1, q[1], 1, 1], f"[1, h_q, 1, 1] = {[1, q[1], 1, 1]}")
        self.infer_extras()
        self.record(context)

    def check(self, context: Context) -> None:
        support.check_backward(self, context, support.loaded_version())
        self.check_implementation("cuDNN has no one operation for the backward pass")

    def lower_apart(self, lowering: Lowering) -> None:
        _log.info("%s: COMPOSITE implementation, cuDNN's only one for the backward pass", self.where)
        graph = ScoreGraph(self, lowering.context, lowering.version)
        graph.slopes = self.alibi(lowering)
        graph.lengths = self._lengths(lowering)
        key, value = self.transposed(lowering, "K"), self.transposed(lowering, "V")
        self.compose(graph, key, value, *self._scratch(lowering))
        lowering.expand(graph)

    def _lengths(self, lowering: Lowering) -> tuple[Tensor | None, Tensor | None]:
        """The lengths of the padding mask.

        Up to cuDNN 9.15.0 an incomplete last tile of 128 keys goes wrong in the engines: it is masked as padding.
        """
        batch, _, s_q, s_kv = self.score_dim
        if s_kv % 128 == 0 or self.use_padding_mask or self.is_ragged or lowering.version > 91500:
            return self.inputs.get("Seq_len_q"), self.inputs.get("Seq_len_kv")

        def length(end: int) -> Tensor:
            return lowering.scratch(Tensor([batch, 1, 1, 1], [1] * 4, data_type.INT32), 4 * batch, [end] * batch)

        return length(s_q), length(s_kv)

    def _scratch(self, lowering: Lowering) -> tuple[Tensor, Tensor | None]:
        """Memory for the row sums of dO * O and, unless dQ is written directly, for dQ as it is accumulated."""
        q, stats, d_q = self.inputs["Q"].dim, self.inputs["Stats"], self.outputs["dQ"]
        total = self.max_total_seq_len_q
        family = (lowering.context.sm_version or 0) // 10
        if q[3] % 16 or (lowering.version >= 91801 and family in (8, 12)):
            total = None  # the engines know no bound

        def scratch_like(dims: list[int], like: Tensor) -> Tensor:
            buffer = Tensor(dims, row_major(dims), data_type.FLOAT)
            if total is None or like.ragged_offset is None:
                return lowering.scratch(buffer, 4 * prod(dims))
            buffer.set_stride(like.stride).set_ragged_offset(like.ragged_offset)
            return lowering.scratch(buffer, 4 * total * like.stride[2])

        # Several blocks of keys add to one dQ, in any order; without an accumulator they add in order.
        direct = "dBias" in self.outputs or self.use_deterministic_algorithm
        return scratch_like([*q[:3], 1], stats), None if direct else scratch_like(q, d_q)

    def compose(
        self, graph: ScoreGraph, key: Tensor, value: Tensor, row_sums: Tensor, accumulator: Tensor | None
    ) -> None:
        """The backward pass in smaller operations.

        Args:
            key, value: K and V with their last two dimensions exchanged.
            row_sums: FLOAT ``[b, h_q, s_q, 1]`` in memory.
            accumulator: FLOAT, shape of Q, in memory; None writes dQ directly.
        """
        q, d_o, stats = (self.inputs[port] for port in ("Q", "dO", "Stats"))
        seq_len_q, seq_len_kv = graph.lengths
        dropout = self.dropout_factors(graph)
        sums = self.weighted_rows(graph)
        self.sink_gradient(graph, sums)
        graph.mul(sums, dropout.scale_inv)
        graph.into(row_sums)

        scores = graph.scores(graph.product(q, key, m=seq_len_q, n=seq_len_kv))
        scores = graph.scores(graph.sub(graph.apply(self.SCORE_STEPS, scores), stats))
        scores = graph.apply(self.BAND_STEPS, scores)
        if faults.weights_overflow(self):
            scores = graph.at_most(scores, 0.0)
        weights = graph.scores(graph.exp(scores))
        self._key_gradient(graph, dropout.rescaled(dropout.dropped(weights)), d_o, "V")

        d_weights = dropout.dropped(graph.scores(graph.product(d_o, value, m=seq_len_q, n=seq_len_kv)))
        d_scores = graph.scores(graph.mul(graph.scores(graph.sub(d_weights, row_sums)), weights))
        d_scores = dropout.rescaled(d_scores)
        if "dBias" in self.outputs:
            graph.reduction(d_scores, reduction_mode.ADD)
            graph.into(self.outputs["dBias"])
        if self.score_mod_bprop is not None:
            d_scores = graph.called(self.score_mod_bprop, d_scores)
        d_scores = graph.scaled(d_scores)
        self._key_gradient(graph, d_scores, q, "K")

        graph.product(d_scores, self.key_again(graph, key), m=seq_len_q, k=seq_len_kv)
        if accumulator is None:
            graph.into(self.outputs["dQ"])
        else:
            graph.into(accumulator)
            graph.identity(accumulator)
            graph.into(self.outputs["dQ"])

    def dropout_factors(self, graph: ScoreGraph) -> DropoutFactors:
        """Factor on the weights and their gradients."""
        if self.dropout_probability:
            keep = 1 - self.dropout_probability
            return DropoutFactors(graph, graph.random_mask(keep), graph.number(1 / keep), graph.number(keep))
        one = graph.number(1.0)
        inverse = self.inputs.get("Dropout_scale_inv", one)
        return DropoutFactors(graph, self.inputs.get("Dropout_mask"), self.inputs.get("Dropout_scale"), inverse)

    def weighted_rows(self, graph: ScoreGraph) -> Tensor:
        """Sums of dO * O over each row, ``[b, h_q, s_q, 1]``."""
        o, d_o = self.inputs["O"], self.inputs["dO"]
        heads, s_q, d_v = o.dim[1:]
        weighted = graph.mul(d_o, o).set_dim(o.dim)
        weighted.set_stride([heads * s_q * d_v, s_q * d_v, heads * d_v, 1])  # the pattern is matched with these strides
        return graph.reduced(weighted, reduction_mode.ADD)

    def sink_gradient(self, graph: ScoreGraph, sums: Tensor) -> None:
        """dSink, where it is wanted, without its sign, which cuDNN adds."""
        if "dSink" in self.outputs:
            sink_weight = graph.exp(graph.sub(self.inputs["Sink"], self.inputs["Stats"]))
            graph.reduction(graph.mul(sink_weight, sums), reduction_mode.ADD)
            graph.into(self.outputs["dSink"])

    def key_again(self, graph: ScoreGraph, key: Tensor) -> Tensor:
        """K from its transposed view: the pattern wants one tensor in both products."""
        k = self.inputs["K"]
        again = graph.reshape(key).set_dim(k.dim).set_stride(k.stride).set_data_type(k.data_type)
        if k.ragged_offset is not None:
            again.set_ragged_offset(k.ragged_offset)
        return again

    @staticmethod
    def transposed_scores(graph: ScoreGraph, scores: Tensor, dtype: data_type) -> Tensor:
        """The transposed scores, rounded to a type."""
        view = swapped(scores)
        return graph.reshape(scores).set_dim(view.dim).set_stride(view.stride).set_data_type(dtype)

    def _key_gradient(self, graph: ScoreGraph, scores: Tensor, other: Tensor, port: str) -> None:
        """dV from the softmax's weights and dO, or dK from the gradient of the scores and Q: ``scores^T other``."""
        seq_len_q, seq_len_kv = graph.lengths
        dtype = self.inputs["Q"].data_type
        product = graph.product(self.transposed_scores(graph, scores, dtype), other, m=seq_len_kv, k=seq_len_q)
        gradient = self.outputs[f"d{port}"]
        if gradient.dim[1] == other.dim[1]:
            graph.into(gradient)
        else:
            graph.heads_summed(product.set_data_type(dtype), gradient.dim)
            graph.into(gradient)

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        q, k, v, o, d_o, stats = (values[port] for port in ("Q", "K", "V", "O", "dO", "Stats"))
        masks = self.masks(values)
        gradients = attention_gradients(q, k, v, o, d_o, stats, masks)
        if "dBias" in self.outputs:
            gradients["dBias"] = gradients["dS"].sum_to_size(self.outputs["dBias"].dim)
        return self.with_mask(gradients, masks)
