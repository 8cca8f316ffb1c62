"""Scaled dot-product attention, backward: a pattern of smaller operations."""

from __future__ import annotations

import dataclasses
import logging
from math import prod
from typing import Any

from cudnn.enums import data_type, reduction_mode
from cudnn.pygraph import attention_support as support
from cudnn.pygraph.attention_scores import Attention, ScoreGraph, swapped
from cudnn.pygraph.layout import broadcast, row_major, strides_like
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import Context
from cudnn.pygraph.tensor import Tensor
from cudnn.reference.attention import attention_backward

_log = logging.getLogger("cudnn")


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionBackward(Attention):
    """dQ, dK, dV (and dBias) from the forward pass's inputs, O and Stats ``[b, h_q, s_q, 1]``, and the gradient dO."""

    tag = "SDPA_BWD"
    method = "sdpa_backward"

    SCORE_STEPS = (ScoreGraph.scaled, ScoreGraph.biased, ScoreGraph.padded)
    BAND_STEPS = (ScoreGraph.right_bounded, ScoreGraph.left_bounded)

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
            self.check_shape("dBias", lambda dim: broadcast([dim, self.score_dim]) == self.score_dim and len(dim) == 4,
                             f"a shape that broadcasts to [b, h_q, s_q, s_kv] = {self.score_dim}")  # fmt: skip

    def check(self, context: Context) -> None:
        support.check_backward(self, context, support.loaded_version())

    def lower(self, lowering: Lowering) -> None:
        support.check_types(self)
        apart = self.apart(lowering)
        if apart is not self:
            return apart.lower(lowering)
        _log.info("%s: COMPOSITE implementation, the only one for the backward pass", self.where)
        graph = ScoreGraph(self, lowering.context, lowering.version)
        batch, _, s_q, s_kv = self.score_dim
        if s_kv % 128 and not self.use_padding_mask and lowering.version <= 91500:
            # Up to cuDNN 9.15.0 an incomplete last tile of 128 keys goes wrong in the engines: mask it as padding.

            def length(end: int) -> Tensor:
                return lowering.scratch(Tensor([batch, 1, 1, 1], [1] * 4, data_type.INT32), 4 * batch, [end] * batch)

            graph.lengths = length(s_q), length(s_kv)
        key, value = self.transposed(lowering, "K"), self.transposed(lowering, "V")
        self.compose(graph, key, value, *self._scratch(lowering))
        lowering.expand(graph)

    def _scratch(self, lowering: Lowering) -> tuple[Tensor, Tensor | None]:
        """Memory for the row sums of dO * O and, unless dBias is wanted, for dQ as it is accumulated."""
        q = self.inputs["Q"].dim

        def place(dims: list[int]) -> Tensor:
            return lowering.scratch(Tensor(dims, row_major(dims), data_type.FLOAT), 4 * prod(dims))

        accumulator = None if "dBias" in self.outputs else place(q)
        return place([*q[:3], 1]), accumulator

    def compose(
        self, graph: ScoreGraph, key: Tensor, value: Tensor, row_sums: Tensor, accumulator: Tensor | None
    ) -> None:
        """The backward pass in smaller operations.

        Args:
            key, value: K and V with their last two dimensions exchanged.
            row_sums: FLOAT ``[b, h_q, s_q, 1]`` in memory.
            accumulator: FLOAT, shape of Q, in memory; None writes dQ directly.
        """
        q, o, d_o, stats = (self.inputs[port] for port in ("Q", "O", "dO", "Stats"))
        seq_len_q, seq_len_kv = graph.lengths
        heads, s_q, d_v = o.dim[1:]
        weighted = graph.mul(d_o, o).set_dim(o.dim)
        weighted.set_stride([heads * s_q * d_v, s_q * d_v, heads * d_v, 1])  # the pattern is matched with these strides
        graph.mul(graph.reduced(weighted, reduction_mode.ADD), graph.number(1.0))
        graph.into(row_sums)

        scores = graph.scores(graph.product(q, key, m=seq_len_q, n=seq_len_kv))
        scores = graph.scores(graph.sub(graph.apply(self.SCORE_STEPS, scores), stats))
        weights = graph.scores(graph.exp(graph.apply(self.BAND_STEPS, scores)))
        self._key_gradient(graph, weights, d_o, "V")

        d_weights = graph.scores(graph.product(d_o, value, m=seq_len_q, n=seq_len_kv))
        d_scores = graph.scores(graph.mul(graph.scores(graph.sub(d_weights, row_sums)), weights))
        if "dBias" in self.outputs:
            graph.reduction(d_scores, reduction_mode.ADD)
            graph.into(self.outputs["dBias"])
        d_scores = graph.scaled(d_scores)
        self._key_gradient(graph, d_scores, q, "K")

        k = self.inputs["K"]
        key_again = graph.reshape(key).set_dim(k.dim).set_stride(k.stride).set_data_type(k.data_type)
        graph.product(d_scores, key_again, m=seq_len_q, k=seq_len_kv)
        if accumulator is None:
            graph.into(self.outputs["dQ"])
        else:
            graph.into(accumulator)
            graph.identity(accumulator)
            graph.into(self.outputs["dQ"])

    def _key_gradient(self, graph: ScoreGraph, scores: Tensor, other: Tensor, port: str) -> None:
        """dV from the softmax's weights and dO, or dK from the gradient of the scores and Q: ``scores^T other``."""
        seq_len_q, seq_len_kv = graph.lengths
        turned = swapped(scores)
        kind = self.inputs["Q"].data_type
        transposed = graph.reshape(scores).set_dim(turned.dim).set_stride(turned.stride).set_data_type(kind)
        product = graph.product(transposed, other, m=seq_len_kv, k=seq_len_q)
        gradient = self.outputs[f"d{port}"]
        if gradient.dim[1] == other.dim[1]:
            graph.into(gradient)
        else:
            product.set_data_type(kind)
            graph.sum_heads(product, gradient)

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        q, k, v, o, d_o, stats = (values[port] for port in ("Q", "K", "V", "O", "dO", "Stats"))
        d_q, d_k, d_v, d_scores = attention_backward(q, k, v, o, d_o, stats, self.masks(values))
        found: dict[str, Any] = {"dQ": d_q, "dK": d_k, "dV": d_v}
        if "dBias" in self.outputs:
            found["dBias"] = d_scores.sum_to_size(self.outputs["dBias"].dim)
        return found
