"""Scaled dot-product attention on MXFP8 tensors: fp8 with a scale for every block of 32 elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from cudnn.enums import attention_implementation, diagonal_alignment
from cudnn.pygraph.attention import support
from cudnn.pygraph.attention.backward import AttentionBackward
from cudnn.pygraph.attention.forward import AttentionForward
from cudnn.pygraph.attention.methods import AttentionNodes, Dropout
from cudnn.pygraph.attention.scores import ScoreGraph, swapped
from cudnn.pygraph.lowering import Lowering
from cudnn.pygraph.node import NOT_SET, Context, Operand
from cudnn.pygraph.tensor import Results, Tensor
from cudnn.reference.attention import attention_forward, attention_gradients, largest

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
    BLOCKS: ClassVar = {"Q": 3, "K": 3, "V": 2}  # along which dimension 32 elements have one scale

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
        q, k, v = (_dequantize(values, port, axis) for port, axis in self.BLOCKS.items())
        results = attention_forward(q, k, v, self.masks(values))
        return {**results, "Amax_O": largest(results["O"])}


@dataclasses.dataclass(eq=False, kw_only=True)
class AttentionMxfp8Backward(AttentionBackward):
    """dQ, dK, dV (and dSink), and the amax of each; only the reference executor runs it.

    Q, K and dO come twice, each with a scale for 32 elements along the dimension that a product sums over: along the
    head size for the scores and their gradient, and, as Q_T, K_T and dO_T, along the sequence for dK, dQ and dV. O and
    dO_f16, of 16 bits, are for the sums of dO * O over rows.
    """

    tag = "SDPA_MXFP8_BWD"
    method = "sdpa_mxfp8_backward"
    fp8_ports = ("Q", "Q_T", "K", "K_T", "V", "dO", "dO_T")
    BLOCKS: ClassVar = {"Q": 3, "Q_T": 2, "K": 3, "K_T": 2, "V": 3, "dO": 3, "dO_T": 2}

    def infer(self, context: Context) -> None:
        for port, like in {"Q_T": "Q", "K_T": "K", "dO_T": "dO", "dO_f16": "dO"}.items():
            dims = self.inputs[like].dim
            self.check_shape(port, lambda dim, dims=dims: dim == dims, f"dim={dims}, as {like}")
        super().infer(context)

    def check(self, context: Context) -> None:
        support.check_mxfp8_backward(self, context, support.loaded_version())

    def evaluate(self, values: dict[str, Any]) -> dict[str, Any]:
        exact = {port: _dequantize(values, port, axis) for port, axis in self.BLOCKS.items()}
        q, k, v, d_o = (exact[port] for port in ("Q", "K", "V", "dO"))
        gradients = attention_gradients(
            q,
            k,
            v,
            values["O"],
            d_o,
            values["Stats"],
            self.masks(values),
            d_o_of_rows=values["dO_f16"],
            again=[exact[port] for port in ("Q_T", "K_T", "dO_T")],
        )
        return {**gradients, **{f"Amax_{port}": largest(gradients[port]) for port in ("dQ", "dK", "dV")}}


def _dequantize(values: Mapping[str, Any], port: str, axis: int) -> Any:
    x = values[port]
    scale = values[support.scale_of(port)].repeat_interleave(BLOCK, axis)
    return x * scale[:, :, : x.shape[2], : x.shape[3]]


class Mxfp8AttentionMethods(AttentionNodes[Operand]):
    """The methods that add attention on MXFP8 tensors; shapes and strides as in ``sdpa``."""

    def sdpa_mxfp8(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        descale_q: Operand,
        descale_k: Operand,
        descale_v: Operand,
        attn_scale: float | Operand | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        generate_stats: bool | None = None,
        sink_token: Operand | None = None,
        unfuse_fma: bool = False,
    ) -> Results:
        """Scaled dot-product attention on MXFP8 tensors: compute capability 10, cuDNN 9.21.

        Args:
            q, k, v: As for ``sdpa``, FP8_E4M3 or FP8_E5M2.
            descale_q, descale_k: FP8_E8M0 ``[b, h, s, d / 32]``, the last two extents rounded up to 128 and 4,
                reordering F8_128x4: the scale of every 32 elements along the head size.
            descale_v: The same ``[b, h_v, s_kv / 32, d_v]`` for 32 elements along the sequence.
            generate_stats: Whether Stats are wanted; to be given.
            attn_scale ... diagonal_band_right_bound, sink_token, unfuse_fma: As for ``sdpa``.

        Returns:
            ``[O, Stats, Amax_O]``: O ``[b, h_q, s_q, d_v]``; Stats as from ``sdpa``, or None; the largest absolute
            value of O, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.
        """
        composite = attention_implementation.COMPOSITE
        return self._attend(AttentionMxfp8Forward, locals(), ("O", "Stats", "Amax_O"), implementation=composite)

    def sdpa_mxfp8_backward(
        self,
        q: Operand,
        q_T: Operand,
        k: Operand,
        k_T: Operand,
        v: Operand,
        o_f16: Operand,
        dO_f16: Operand,
        dO: Operand,
        dO_T: Operand,
        stats: Operand,
        descale_q: Operand,
        descale_q_T: Operand,
        descale_k: Operand,
        descale_k_T: Operand,
        descale_v: Operand,
        descale_dO: Operand,
        descale_dO_T: Operand,
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
        """Gradients of scaled dot-product attention on MXFP8 tensors: on the reference executor only.

        Args:
            q, k, v, dO: Inputs of ``sdpa_mxfp8``, and the gradient of O, FP8_E4M3 or FP8_E5M2, with a scale for 32
                elements along the head size: V too, unlike in the forward pass.
            q_T, k_T, dO_T: The same values and logical shapes, with a scale for 32 elements along the sequence.
            o_f16, dO_f16: O and its gradient, HALF or BFLOAT16.
            stats: What ``sdpa_mxfp8`` returned with ``generate_stats=True``.
            descale_q, descale_k, descale_v, descale_dO: FP8_E8M0 ``[b, h, s, d / 32]``, as for ``sdpa_mxfp8``.
            descale_q_T, descale_k_T, descale_dO_T: The same ``[b, h, s / 32, d]``.
            left_bound, right_bound: As for ``sdpa_fp8``; all others as for ``sdpa_backward``.

        Returns:
            ``[dQ, dK, dV, Amax_dQ, Amax_dK, Amax_dV]``: the gradients, by default with the shapes and stride orders of
            q, k and v, and their largest absolute values, FLOAT ``[1, 1, 1, 1]``.

        Raises:
            RuntimeError, ValueError, TypeError: as ``sdpa``.
            cudnnGraphNotSupportedError: from ``validate()``, on a GPU.
        """
        ports = ("dQ", "dK", "dV", "Amax_dQ", "Amax_dK", "Amax_dV")
        return self._attend(AttentionMxfp8Backward, locals(), ports)
