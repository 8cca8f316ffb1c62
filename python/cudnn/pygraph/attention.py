"""The methods that add scaled dot-product attention and its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cudnn.enums import attention_implementation, diagonal_alignment
from cudnn.errors import refusal
from cudnn.pygraph.attention_backward import AttentionBackward
from cudnn.pygraph.attention_forward import AttentionForward
from cudnn.pygraph.node import NOT_SET, NodeList
from cudnn.pygraph.tensor import Tensor

Dropout = float | tuple[Any, ...] | None
ScoreModifier = Callable[..., Tensor] | None


class AttentionMethods(NodeList):
    """The methods that add attention.

    Logical shapes are batch, heads, sequence, head size, whatever the strides; the last stride is 1. More heads in Q
    than in K or V, by a whole factor, make grouped-query attention.
    """

    def sdpa(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_inference: bool | None = None,
        attn_scale: float | Tensor | None = None,
        bias: Tensor | None = None,
        block_mask: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | None = None,
        paged_attention_k_table: Tensor | None = None,
        paged_attention_v_table: Tensor | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        score_mod: ScoreModifier = None,
        generate_stats: bool | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        score_max: Tensor | None = None,
        score_sum_exp: Tensor | None = None,
        sink_token: Tensor | None = None,
        unfuse_fma: bool = False,
        *,
        attn_bias: Tensor | None = None,
        dropout_seed: Any = None,
        dropout_offset: Any = None,
    ) -> list[Tensor | None]:
        """Scaled dot-product attention ``O = softmax(attn_scale * Q K^T + bias, masked) V``.

        Args:
            q, k, v: ``[b, h_q, s_q, d_qk]``, ``[b, h_k, s_kv, d_qk]``, ``[b, h_v, s_kv, d_v]``; HALF or
                BFLOAT16 on a GPU.
            is_inference, generate_stats: Give one; ``is_inference=x`` is ``generate_stats=not x``. Neither: inference.
            attn_scale: A number, or a tensor of one element on the device or passed by value. None: no scaling.
            bias: Added to the scores; broadcasts to ``[b, h_q, s_q, s_kv]``. ``attn_bias`` is another name for it.
            use_padding_mask: Rows from ``seq_len_q`` and columns from ``seq_len_kv`` on take no part.
            seq_len_q, seq_len_kv: INT32 ``[b, 1, 1, 1]``; for the padding mask.
            use_causal_mask: Column up to row. The same as ``diagonal_band_right_bound=0``.
            use_causal_mask_bottom_right: Column up to row + s_kv - s_q (with a padding mask, its lengths).
            diagonal_alignment: Whether the band below starts top left or ends bottom right.
            diagonal_band_left_bound: Column greater than the diagonal less this. ``sliding_window_length`` is the same.
            diagonal_band_right_bound: Column up to the diagonal plus this.
            implementation: One operation of cuDNN (UNIFIED), a pattern of several (COMPOSITE), or what fits (AUTO).
            block_mask, use_alibi_mask, dropout, rng_dump, paged_attention_k_table, paged_attention_v_table,
                paged_attention_max_seq_len_kv, score_mod, score_max, score_sum_exp, sink_token, unfuse_fma: Not
                supported yet.

        Returns:
            ``[O, Stats]``: O ``[b, h_q, s_q, d_v]``, by default in Q's stride order; Stats ``[b, h_q, s_q, 1]`` for the
            backward pass, by default FLOAT, or None. In BFLOAT16 they are rounded towards zero, and the backward pass
            refuses them.

        Raises:
            RuntimeError: arguments that contradict each other.
            NotImplementedError: an argument that is not supported yet.
            cudnnGraphNotSupportedError: from ``validate()`` or the build, a combination that cuDNN does not support.

        The formula and the name of the statistics are those of Dao et al., FlashAttention (2022).
        """
        where = _where(name, "sdpa")
        _not_yet(
            where,
            block_mask=block_mask,
            use_alibi_mask=use_alibi_mask,
            dropout=dropout,
            rng_dump=rng_dump,
            paged_attention_k_table=paged_attention_k_table,
            paged_attention_v_table=paged_attention_v_table,
            paged_attention_max_seq_len_kv=paged_attention_max_seq_len_kv,
            score_mod=score_mod,
            score_max=score_max,
            score_sum_exp=score_sum_exp,
            sink_token=sink_token,
            unfuse_fma=unfuse_fma,
        )
        if attn_bias is not None:
            _conflict(where, bias is not None, "bias and attn_bias", "both", "one of them, they are the same")
            bias = attn_bias
        inputs, attributes = _shared(
            where, q, k, v, attn_scale, bias, use_padding_mask, seq_len_q, seq_len_kv, use_causal_mask,
            use_causal_mask_bottom_right, sliding_window_length, diagonal_alignment, diagonal_band_left_bound,
            diagonal_band_right_bound,
        )  # fmt: skip
        outputs = ["O", "Stats"] if _wants_stats(where, is_inference, generate_stats) else ["O"]
        node = self._add(
            AttentionForward, name, compute_data_type, inputs, outputs,
            implementation=attention_implementation(implementation), **attributes,
        )  # fmt: skip
        return [node.outputs["O"], node.outputs.get("Stats")]

    def sdpa_backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        attn_scale: float | Tensor | None = None,
        bias: Tensor | None = None,
        dBias: Tensor | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Tensor | None = None,
        seq_len_kv: Tensor | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Tensor | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: object = NOT_SET,
        name: str = "",
        score_mod: ScoreModifier = None,
        score_mod_bprop: ScoreModifier = None,
        sink_token: Tensor | None = None,
        dSink_token: Tensor | None = None,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention.

        Args:
            q, k, v: As for ``sdpa``.
            o, stats: What ``sdpa`` returned with ``generate_stats=True``.
            dO: Gradient of O.
            dBias: A tensor made by ``graph.tensor()`` for the gradient of ``bias``, in a shape that broadcasts to
                ``[b, h_q, s_q, s_kv]``; broadcast dimensions are summed over.
            attn_scale ... diagonal_band_right_bound: As given to ``sdpa``.
            use_alibi_mask, max_total_seq_len_q, max_total_seq_len_kv, dropout, rng_dump, use_deterministic_algorithm,
                score_mod, score_mod_bprop, sink_token, dSink_token: Not supported yet.

        Returns:
            ``[dQ, dK, dV]``, by default with the shapes and stride orders of q, k and v.

        Raises:
            RuntimeError, NotImplementedError, cudnnGraphNotSupportedError: as ``sdpa``.

        The formulas are those of Dao et al., FlashAttention (2022), appendix B.2.
        """
        where = _where(name, "sdpa_backward")
        _not_yet(
            where,
            use_alibi_mask=use_alibi_mask,
            max_total_seq_len_q=max_total_seq_len_q,
            max_total_seq_len_kv=max_total_seq_len_kv,
            dropout=dropout,
            rng_dump=rng_dump,
            use_deterministic_algorithm=use_deterministic_algorithm,
            score_mod=score_mod,
            score_mod_bprop=score_mod_bprop,
            sink_token=sink_token,
            dSink_token=dSink_token,
        )
        inputs, attributes = _shared(
            where, q, k, v, attn_scale, bias, use_padding_mask, seq_len_q, seq_len_kv, use_causal_mask,
            use_causal_mask_bottom_right, sliding_window_length, diagonal_alignment, diagonal_band_left_bound,
            diagonal_band_right_bound,
        )  # fmt: skip
        inputs |= {"O": o, "dO": dO, "Stats": stats}
        node = self._add(AttentionBackward, name, compute_data_type, inputs, ["dQ", "dK", "dV"], **attributes)
        gradients = [*node.outputs.values()]
        if dBias is not None:
            node.outputs["dBias"] = dBias
        return gradients

    scaled_dot_product_flash_attention = sdpa
    scaled_dot_product_flash_attention_backward = sdpa_backward


def _where(name: str, method: str) -> str:
    return f"{name} ({method})" if name else method


def _not_yet(where: str, **arguments: Any) -> None:
    """Refuses arguments that a later version will take. None, False and 0.0 ask for nothing."""
    for argument, value in arguments.items():
        if value is not None and (not isinstance(value, (bool, int, float)) or value):
            got = repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__
            raise NotImplementedError(
                refusal(where, argument, got, "its default: it is not supported yet", "leave it out")
            )


def _conflict(where: str, broken: bool, what: str, got: str, allowed: str) -> None:
    if broken:
        raise RuntimeError(refusal(where, what, got, allowed, "leave one of them out"))


def _wants_stats(where: str, is_inference: object, generate_stats: object) -> bool:
    for argument, value in (("is_inference", is_inference), ("generate_stats", generate_stats)):
        if value is not None and not isinstance(value, bool):
            raise RuntimeError(refusal(where, argument, repr(value), "True, False or None", "pass a bool"))
    both = is_inference is not None and generate_stats is not None
    _conflict(where, both and is_inference == generate_stats, "is_inference and generate_stats", f"both {is_inference}",
              "one of them, since one is the negation of the other")  # fmt: skip
    return generate_stats is True or is_inference is False


def _shared(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_scale: float | Tensor | None,
    bias: Tensor | None,
    use_padding_mask: bool,
    seq_len_q: Tensor | None,
    seq_len_kv: Tensor | None,
    causal: bool,
    causal_bottom_right: bool,
    sliding_window_length: int | None,
    alignment: diagonal_alignment,
    left_bound: int | None,
    right_bound: int | None,
) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """The inputs and attributes that both passes have."""
    _conflict(
        where, causal and causal_bottom_right, "use_causal_mask and use_causal_mask_bottom_right", "both", "one of them"
    )
    if causal or causal_bottom_right:
        flag = "use_causal_mask" if causal else "use_causal_mask_bottom_right"
        _conflict(where, right_bound is not None, f"{flag} and diagonal_band_right_bound", f"True and {right_bound}",
                  "one of them: a causal mask is a right bound of 0")  # fmt: skip
        right_bound = 0
        alignment = diagonal_alignment.TOP_LEFT if causal else diagonal_alignment.BOTTOM_RIGHT
    if sliding_window_length is not None:
        _conflict(where, left_bound is not None, "sliding_window_length and diagonal_band_left_bound",
                  f"{sliding_window_length} and {left_bound}", "one of them, they are the same")  # fmt: skip
        left_bound = sliding_window_length
    scale_tensor, scale = None, None
    if isinstance(attn_scale, Tensor):
        scale_tensor = attn_scale
    elif isinstance(attn_scale, (int, float)):
        scale = float(attn_scale)
    elif attn_scale is not None:
        raise TypeError(
            refusal(where, "attn_scale", type(attn_scale).__name__, "a number, a cudnn.tensor or None", "pass float(x)")
        )
    inputs = {
        "Q": q, "K": k, "V": v, "Attn_scale": scale_tensor, "Bias": bias, "Seq_len_q": seq_len_q,
        "Seq_len_kv": seq_len_kv,
    }  # fmt: skip
    attributes = {
        "attn_scale": scale,
        "use_padding_mask": bool(use_padding_mask),
        "diagonal_alignment": diagonal_alignment(alignment),
        "left_bound": _bound(where, "diagonal_band_left_bound", left_bound),
        "right_bound": _bound(where, "diagonal_band_right_bound", right_bound),
    }
    return inputs, attributes


def _bound(where: str, argument: str, value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise TypeError(refusal(where, argument, type(value).__name__, "a Python int or None", "pass int(x)"))
    return value
