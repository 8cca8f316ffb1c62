"""Scaled dot-product attention on MXFP8 tensors: fp8 with a scale for every block of 32 elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cudnn.enums import attention_implementation, diagonal_alignment
from cudnn.pygraph.attention import support
from cudnn.pygraph.attention.forward import AttentionForward
from cudnn.pygraph.attention.methods import shared, wants_stats
from cudnn.pygraph.attention.scores import ScoreGraph, swapped
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import NOT_SET, Context, NodeList, where_of
from cudnn.pygraph.tensor import Results, Tensor
from cudnn.reference.attention import attention_forward, largest

BLOCK = 32


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionMxfp8Forward(AttentionForward):
    """O, Stats as in the pass without scales, and the amax of O.

    Inputs besides those of the pass without scales: Descale_q, Descale_k, Descale_v, FP8_E8M0 with reordering F8_128x4,
    each with one scale for 32 elements along the head size (Q, K) or the sequence (V).
    """

    tag = "SDPA_MXFP8_FWD"
    method = "sdpa_mxfp8"
    fp8_ports = ("Q", "K", "V")

    def check(self, context: Context) -> None:
        support.check_mxfp8_forward(self, context, support.loaded_version())

    def key(self, graph: ScoreGraph, lowering: Lowering) -> Tensor:
        scale = swapped(self.inputs["Descale_k"])
        lowering.alias(scale, self.inputs["Descale_k"], axes=[0, 1, 3, 2])
        return self._dequantized(graph, self.transposed(lowering, "K"), scale, [BLOCK, 1])

    def query(self, graph: ScoreGraph) -> Tensor:
        return self._dequantized(graph, self.inputs["Q"], self.inputs["Descale_q"], [1, BLOCK])

    def values(self, graph: ScoreGraph) -> Tensor:
        return self._dequantized(graph, self.inputs["V"], self.inputs["Descale_v"], [BLOCK, 1])

    def sum_values(self, graph: ScoreGraph, weights: Tensor) -> None:
        super().sum_values(graph, weights)
        graph.amax(self.outputs["O"], "Amax_O")

    @staticmethod
    def _dequantized(graph: ScoreGraph, x: Tensor, scale: Tensor, block: list[int]) -> Tensor:
        y = graph.block_scale_dequantize(x, scale, block)
        return y.set_dim(x.dim).set_stride(x.stride)

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        q, k, v = (_dequantize(values, port, axis) for port, axis in (("Q", 3), ("K", 3), ("V", 2)))
        found = attention_forward(q, k, v, self.masks(values))
        return {**found, "Amax_O": largest(found["O"])}


def _dequantize(values: Mapping[str, Any], port: str, axis: int) -> Any:
    x = values[port]
    scale = values[f"Descale_{port.lower()}"].repeat_interleave(BLOCK, axis)
    return x * scale[:, :, : x.shape[2], : x.shape[3]]


class Mxfp8AttentionMethods(NodeList):
    """The method that adds attention on MXFP8 tensors; shapes and strides as in ``sdpa``."""

    def sdpa_mxfp8(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        descale_q: Tensor,
        descale_k: Tensor,
        descale_v: Tensor,
        attn_scale: float | Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
    ) -> Results:
        """Scaled dot-product attention on MXFP8 tensors: compute capability 10, cuDNN 9.21.

        Args:
            q, k, v: As for ``sdpa``, FP8_E4M3 or FP8_E5M2.
            descale_q, descale_k: FP8_E8M0 ``[b, h, s, d / 32]``, the last two extents rounded up to 128 and 4,
                reordering F8_128x4: what every 32 elements along the head size are multiplied with.
            descale_v: The same ``[b, h_v, s_kv / 32, d_v]`` for 32 elements along the sequence.
            generate_stats: Whether Stats are wanted; to be given.
            attn_scale ... diagonal_band_right_bound, sink_token, unfuse_fma: As for ``sdpa``.

        Returns:
            ``[O, Stats, Amax_O]``: O ``[b, h_q, s_q, d_v]``; Stats as from ``sdpa``, or None; the largest absolute
            value of O, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
        where = where_of(name, "sdpa_mxfp8")
        inputs, attributes = shared(
            where, q, k, v, attn_scale, None, False, None, None, use_causal_mask, use_causal_mask_bottom_right, None,
            diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound, None, sink_token, False,
        )  # fmt: skip
        inputs |= {"Descale_q": descale_q, "Descale_k": descale_k, "Descale_v": descale_v}
        stats = ["Stats"] if wants_stats(where, None, generate_stats) else []
        node = self._add(
            AttentionMxfp8Forward, name, compute_data_type, inputs, ["O", *stats, "Amax_O"],
            implementation=attention_implementation.COMPOSITE, unfuse_fma=bool(unfuse_fma), **attributes,
        )  # fmt: skip
        return [node.outputs.get(port) for port in ("O", "Stats", "Amax_O")]
