"""Scaled dot-product attention on fp8 tensors, forward and backward, each with its scales.

An fp8 tensor represents its elements times a *descale*; a value is scaled by a *scale* before rounding to fp8. Both
are FLOAT tensors of one element, as are the largest absolute values (amax) that the next step's scales come from.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from cudnn.enums import attention_implementation, diagonal_alignment
from cudnn.pygraph.attention import support
from cudnn.pygraph.attention.backward import AttentionBackward
from cudnn.pygraph.attention.forward import AttentionForward
from cudnn.pygraph.attention.methods import AttentionNodes, Dropout
from cudnn.pygraph.attention.scores import ScoreGraph, ScoreModifier
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import NOT_SET, Context, Operand
from cudnn.pygraph.tensor import Results, Tensor
from cudnn.reference.attention import attention_gradients, attention_weights, largest, weighted_sum
from cudnn.reference.memory import rounded

_log = logging.getLogger("cudnn")


def _descaled(values: Mapping[str, Any], scale: Any, *ports: str) -> Any:
    for port in ports:
        scale = (1.0 if scale is None else scale) * values[port]
    return scale


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionFp8Forward(AttentionForward):
    """O, Stats, Max and Sum_exp as in the pass without scales, and the amax of the weights (S) and of O.

    Inputs besides those of the pass without scales: Descale_q, Descale_k, Descale_v, Descale_s, Scale_s, Scale_o.
    """

    tag = "SDPA_FP8_FWD"
    method = "sdpa_fp8"
    fp8_ports = ("Q", "K", "V")

    SCORE_STEPS = (ScoreGraph.scaled, ScoreGraph.descaled, *AttentionForward.SCORE_STEPS[1:])

    def check(self, context: Context) -> None:
        support.check_fp8_forward(self, context, support.loaded_version())

    def sum_values(self, graph: ScoreGraph, weights: Tensor) -> None:
        graph.amax(weights, "Amax_S")
        weights = graph.times(weights, "Scale_s").set_data_type(self.inputs["Q"].data_type)
        product = graph.product(weights, self.values(graph), m=graph.lengths[0], k=graph.lengths[1])
        total = graph.times(product, "Descale_s", "Descale_v")
        graph.times(total, "Scale_o")
        graph.into(self.outputs["O"])
        graph.amax(total, "Amax_O")

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        masks = self.masks(values)
        masks.scale = _descaled(values, masks.scale, "Descale_q", "Descale_k")
        weights, statistics = attention_weights(values["Q"], self.dense(values, "K"), masks)
        stored = rounded(weights * values["Scale_s"], self.inputs["Q"].data_type, self.where).to(weights.dtype)
        total = weighted_sum(stored, self.dense(values, "V"), masks) * values["Descale_s"] * values["Descale_v"]
        results = {"O": total * values["Scale_o"], "Amax_S": largest(weights), "Amax_O": largest(total), **statistics}
        return self.with_mask(results, masks)


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionFp8Backward(AttentionBackward):
    """dQ, dK, dV, and the amax of each and of dP, the gradient of the scores.

    Inputs besides those of the pass without scales: Descale_x for x in q, k, v, o, dO, s, dP and Scale_x for x in s,
    dQ, dK, dV, dP.
    """

    tag = "SDPA_FP8_BWD"
    method = "sdpa_fp8_backward"
    fp8_ports = ("Q", "K", "V", "O", "dO")

    SCORE_STEPS = (ScoreGraph.scaled, ScoreGraph.descaled, ScoreGraph.padded)

    def check(self, context: Context) -> None:
        support.check_fp8_backward(self, context, support.loaded_version())

    def lower_apart(self, lowering: Lowering) -> None:
        _log.info("%s: COMPOSITE implementation, cuDNN's only one for the backward pass", self.where)
        graph = ScoreGraph(self, lowering.context, lowering.version)
        self.compose_fp8(graph, self.transposed(lowering, "K"), self.transposed(lowering, "V"))
        lowering.expand(graph)

    def compose_fp8(self, graph: ScoreGraph, key: Tensor, value: Tensor) -> None:
        """The backward pass in smaller operations; ``key``, ``value``: K and V, last two dimensions exchanged."""
        q, d_o, stats = (self.inputs[port] for port in ("Q", "dO", "Stats"))
        seq_len_q, seq_len_kv = graph.lengths
        dropout = self.dropout_factors(graph)
        sums = graph.times(self.weighted_rows(graph), "Descale_dO", "Descale_o")
        self.sink_gradient(graph, sums)
        if "Sink" in self.inputs:
            sums = graph.mul(sums, graph.number(1.0))
        if dropout.mask is not None:
            sums = graph.mul(sums, dropout.scale_inv)

        scores = graph.apply(self.SCORE_STEPS, graph.scores(graph.product(q, key, m=seq_len_q, n=seq_len_kv)))
        scores = graph.scores(graph.sub(graph.apply(self.BAND_STEPS, scores), stats))
        weights = graph.scores(graph.exp(scores))
        stored = graph.times(dropout.rescaled(dropout.dropped(weights)), "Scale_s")
        stored.set_data_type(q.data_type)
        self._gradient(graph, self.transposed_scores(graph, stored, q.data_type), d_o, "V", "s", "dO")

        d_weights = graph.scores(graph.product(d_o, value, m=seq_len_q, n=seq_len_kv))
        d_weights = dropout.dropped(graph.times(d_weights, "Descale_dO", "Descale_v"))
        d_scores = graph.scores(graph.mul(graph.scores(graph.sub(d_weights, sums)), weights))
        d_scores = graph.scaled(dropout.rescaled(d_scores))
        graph.amax(d_scores, "Amax_dP")
        d_scores = graph.times(d_scores, "Scale_dP").set_data_type(d_o.data_type)
        self._gradient(graph, d_scores, self.key_again(graph, key), "Q", "dP", "k")
        self._gradient(graph, self.transposed_scores(graph, d_scores, d_o.data_type), q, "K", "dP", "q")

    def _gradient(self, graph: ScoreGraph, a: Tensor, b: Tensor, port: str, a_name: str, b_name: str) -> None:
        """One gradient: ``a b`` with the scales of both, its amax, and rounded with its own scale."""
        seq_len_q, seq_len_kv = graph.lengths
        lengths = {"m": seq_len_q, "k": seq_len_kv} if port == "Q" else {"m": seq_len_kv, "k": seq_len_q}
        out = self.outputs[f"d{port}"]
        product = graph.product(a, b, **lengths)
        if out.dim[1] != self.inputs["Q"].dim[1]:
            product = graph.heads_summed(product, out.dim)
        total = graph.times(product, f"Descale_{a_name}", f"Descale_{b_name}")
        graph.times(total, f"Scale_d{port}")
        graph.into(out)
        graph.amax(total, f"Amax_d{port}")

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        masks = self.masks(values)
        score_scale = 1.0 if masks.scale is None else masks.scale
        masks.scale = _descaled(values, score_scale, "Descale_q", "Descale_k")
        results: dict[str, Any] = {}

        def stored(x: Any, scale: str, like: str) -> Any:
            return rounded(x * values[scale], self.inputs[like].data_type, self.where).to(x.dtype)

        def store_scores(x: Any) -> Any:
            results["Amax_dP"] = largest(x)
            return stored(x, "Scale_dP", "dO")

        q, k, v, o, d_o, stats = (values[port] for port in ("Q", "K", "V", "O", "dO", "Stats"))
        gradients = attention_gradients(
            q,
            k,
            v,
            o,
            d_o,
            stats,
            masks,
            row_scale=_descaled(values, None, "Descale_dO", "Descale_o"),
            d_weights_scale=_descaled(values, None, "Descale_dO", "Descale_v"),
            score_scale=score_scale,
            store_weights=lambda x: stored(x, "Scale_s", "Q"),
            store_scores=store_scores,
        )
        for port, a, b in (("dQ", "dP", "k"), ("dK", "dP", "q"), ("dV", "s", "dO")):
            total = gradients[port] * values[f"Descale_{a}"] * values[f"Descale_{b}"]
            results[f"Amax_{port}"] = largest(total)
            results[port] = total * values[f"Scale_{port}"]
        if "dSink" in self.outputs:
            results["dSink"] = gradients["dSink"]
        return results


class Fp8AttentionMethods(AttentionNodes[Operand]):
    """The methods that add attention on fp8 tensors; shapes and strides as in ``sdpa``."""

    def sdpa_fp8(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_s: Operand,
        scale_s: Operand,
        scale_o: Operand,
        is_inference: bool | None = None,
        attn_scale: float | Operand | None = None,
        bias: Operand | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Operand | None = None,
        paged_attention_k_table: Operand | None = None,
        paged_attention_v_table: Operand | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        fn: ScoreModifier | None = None,
        generate_stats: bool | None = None,
        score_max: Operand | None = None,
        score_sum_exp: Operand | None = None,
        sink_token: Operand | None = None,
    ) -> Results:
        """Scaled dot-product attention on fp8 tensors.

        Args:
            q, k, v: As for ``sdpa``, FP8_E4M3 or FP8_E5M2, compute capability 9.0 or newer.
            descale_q, descale_k, descale_v, descale_s: FLOAT ``[1, 1, 1, 1]``: what the stored values of q, k, v and of
                the factor on the softmax's weights.
            scale_s, scale_o: FLOAT ``[1, 1, 1, 1]``: factors on the weights, and on O, before they are
                rounded.
            sliding_window, left_bound, right_bound, fn: ``sliding_window_length``, ``diagonal_band_left_bound``,
                ``diagonal_band_right_bound`` and ``score_mod`` of ``sdpa``; all others are called the same there.

        Returns:
            ``[O, Stats, Amax_S, Amax_O]``: O ``[b, h_q, s_q, d_v]``; Stats as from ``sdpa``, or None; the largest
            absolute weight, and the largest absolute value of O before ``scale_o``, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
        ports = ("O", "Stats", "Amax_S", "Amax_O")
        return self._attend(AttentionFp8Forward, locals(), ports, implementation=attention_implementation.COMPOSITE)

    def sdpa_fp8_backward(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        o: Operand,
        dO: Operand,
        stats: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        descale_o: Operand,
        descale_dO: Operand,
        descale_s: Operand,
        descale_dP: Operand,
        scale_s: Operand,
        scale_dQ: Operand,
        scale_dK: Operand,
        scale_dV: Operand,
        scale_dP: Operand,
        attn_scale: float | Operand | None = None,
        use_padding_mask: bool = False,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        left_bound: int | None = None,
        right_bound: int | None = None,
        use_deterministic_algorithm: bool = False,
        dropout: Dropout = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        sink_token: Operand | None = None,
        dSink_token: Operand | None = None,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention on fp8 tensors.

        Args:
            q, k, v, o, stats: Inputs and results of ``sdpa_fp8`` with ``generate_stats=True``.
            dO: Gradient of O, fp8.
            descale_q ... descale_dP: FLOAT ``[1, 1, 1, 1]``: the factor on the stored values of the tensor of that
                name; s are the weights, dP the gradients of the scores.
            scale_s ... scale_dP: FLOAT ``[1, 1, 1, 1]``: factor on the tensor before it is rounded.
            left_bound, right_bound: As for ``sdpa_fp8``; all others as for ``sdpa_backward``.

        Returns:
            ``[dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV, Amax_dP]``: the gradients, by default with the shapes and stride
            orders of q, k and v, and the largest absolute values before scaling, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
        ports = ("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV", "Amax_dP")
        return self._attend(AttentionFp8Backward, locals(), ports)
