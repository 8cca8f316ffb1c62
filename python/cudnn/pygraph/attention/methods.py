"""The methods that add scaled dot-product attention and its backward pass."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from cudnn.enums import Enumeration, attention_implementation, data_type, diagonal_alignment
from cudnn.errors import make_error
from cudnn.pygraph.attention.backward import AttentionBackward
from cudnn.pygraph.attention.forward import AttentionForward
from cudnn.pygraph.attention.scores import Attention, ScoreModifier
from cudnn.pygraph.node import NOT_SET, NodeList, Operand, where_of
from cudnn.pygraph.tensor import Results, Tensor

CUSTOM_DROPOUT = ("Dropout_mask", "Dropout_scale", "Dropout_scale_inv")
Dropout = float | tuple[Any, ...] | None
OTHER_NAMES = {
    "diagonal_band_left_bound": "left_bound",
    "diagonal_band_right_bound": "right_bound",
    "fn": "score_mod",
    "paged_attention_max_seq_len_kv": "paged_max_seq_len_kv",
    "sliding_window": "sliding_window_length",
}
"""Of arguments that a node, or another method, calls otherwise."""
FIRST = ("q", "k", "v", "attn_scale", "bias", "seq_len_q", "seq_len_kv", "sink_token")
LATER = re.compile(r"[qk]_T|o|o_f16|dO|dO_f16|dO_T|stats|block_mask|paged_attention_[kv]_table|(de)?scale_\w+")
"""The arguments that are inputs, in their order."""
PORTS = {
    "o_f16": "O",
    "paged_attention_k_table": "Page_table_K",
    "paged_attention_v_table": "Page_table_V",
    "sink_token": "Sink",
}
"""Names of inputs that are not those of their arguments."""
MADE = {
    "score_max": "Max",
    "score_sum_exp": "Sum_exp",
    "dBias": "dBias",
    "dSink_token": "dSink",
    "rng_dump": "RNG_DUMP",
}
"""Outputs that the user makes."""
FLAGS = ("use_alibi_mask", "use_padding_mask", "unfuse_fma", "use_deterministic_algorithm")
AS_GIVEN = ("score_mod", "score_mod_bprop", "paged_max_seq_len_kv", "max_total_seq_len_q", "max_total_seq_len_kv")


class AttentionNodes(NodeList[Operand]):
    """What the methods that add attention share."""

    def _attend(
        self, node_type: type[Attention], arguments: Mapping[str, Any], ports: Sequence[str], **attributes: Any
    ) -> list[Any]:
        """Adds a node by a method's arguments. Its outputs ``ports``; None for Stats that are not wanted."""
        arguments = {OTHER_NAMES.get(name, name): value for name, value in arguments.items()}
        where = where_of(arguments["name"], node_type.method)
        inputs, mask_attributes = _described(where, arguments)
        attributes |= mask_attributes | {name: bool(arguments[name]) for name in FLAGS if name in arguments}
        attributes |= {name: arguments[name] for name in AS_GIVEN if name in arguments}
        stats = "Stats" not in ports or _wants_stats(where, arguments.get("is_inference"), arguments["generate_stats"])
        if "implementation" in arguments:
            value = arguments["implementation"]
            attributes["implementation"] = _member(where, "implementation", value, attention_implementation)
        outputs = [port for port in ports if port != "Stats" or stats]
        node = self._add(node_type, arguments["name"], arguments["compute_data_type"], inputs, outputs, **attributes)
        for name, port in MADE.items():
            tensor = arguments.get(name)
            if tensor is None or (port == "RNG_DUMP" and not node.dropout_probability):
                continue
            if not isinstance(tensor, Tensor):
                raise make_error(
                    TypeError, where, port, type(tensor).__name__, "a cudnn.tensor", "make one with graph.tensor()"
                )
            node.outputs[port] = tensor
        return [node.outputs.get(port) for port in ports]


class AttentionMethods(AttentionNodes[Operand]):
    """The methods that add attention.

    Logical shapes are batch, heads, sequence, head size, whatever the strides; the last stride is 1. More heads in Q
    than in K or V, by a whole factor, make grouped-query attention.
    """

    def sdpa(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        is_inference: bool | None = None,
        attn_scale: float | Operand | None = None,
        bias: Operand | None = None,
        block_mask: Operand | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Operand | None = None,
        paged_attention_k_table: Operand | None = None,
        paged_attention_v_table: Operand | None = None,
        paged_attention_max_seq_len_kv: int | None = None,
        compute_data_type: object = NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        generate_stats: bool | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
        score_max: Operand | None = None,
        score_sum_exp: Operand | None = None,
        sink_token: Operand | None = None,
        unfuse_fma: bool = False,
        *,
        attn_bias: Operand | None = None,
        dropout_seed: Any = None,
        dropout_offset: Any = None,
    ) -> Results:
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
            implementation: One operation of cuDNN (UNIFIED), a pattern of several (COMPOSITE), the kernels of
                :mod:`cudnn.sdpa` (FUSED: this node alone in its graph), or the fastest that fits (AUTO).
            block_mask: UINT8 ``[b, h_q, ceil(s_q / 128), ceil(ceil(s_kv / 128) / 8)]``: bit i of byte j keeps the tile
                of 128 columns number 8 j + i. UNIFIED only.
            use_alibi_mask: Adds ``slope * (column - row)`` with a slope for each head (Press et al., 2022); with
                ``diagonal_band_right_bound=0``.
            dropout: ``(probability, seed, offset)``, seed and offset INT64 tensors of one element, on the device or
                passed by value; or ``(mask, scale)``, where mask broadcasts to the scores; or a probability with
                ``dropout_seed`` and ``dropout_offset``, each a tensor or a number.
            rng_dump: A tensor ``[b, h_q, s_q, s_kv]`` that gets the random mask: 1 kept, 0 dropped.
            paged_attention_k_table, paged_attention_v_table: INT32 ``[b, 1, pages of an entry, 1]``. ``k`` and ``v``
                are then containers ``[pages, h, tokens of a page, d]``; needs a padding mask.
            paged_attention_max_seq_len_kv: s_kv of paged K and V.
            score_mod: A function ``(graph, scores) -> scores`` that adds operations to ``graph``; applied to the scaled
                scores. It runs when the graph is validated and when it is built.
            score_max, score_sum_exp: Tensors ``[b, h_q, s_q, 1]`` that get each row's largest score, and the sum of
                ``exp(score - largest)``.
            sink_token: FLOAT ``[1, h_q, 1, 1]``: one more score in each row of the softmax, whose weight is dropped.
            unfuse_fma: Asks cuDNN (9.22) not to fuse multiplication and addition in the softmax.

        Returns:
            ``[O, Stats]``: O ``[b, h_q, s_q, d_v]``, by default in Q's stride order; Stats ``[b, h_q, s_q, 1]`` for the
            backward pass, by default FLOAT, or None. In BFLOAT16 they are rounded towards zero, and the backward pass
            refuses them.

        Raises:
            RuntimeError, ValueError, TypeError: arguments that contradict each other or are of the wrong kind.
            cudnnGraphNotSupportedError: from ``validate()`` or the build, a combination that cuDNN does not support.

        The formula and the name of the statistics are those of Dao et al., FlashAttention (2022).
        """
        where = where_of(name, "sdpa")
        if attn_bias is not None:
            _conflict(where, bias is not None, "bias and attn_bias", "both", "one of them, they are the same")
            bias = attn_bias
        if dropout_seed is not None or dropout_offset is not None:
            dropout = (dropout, _random_state(dropout_seed), _random_state(dropout_offset))
        return self._attend(AttentionForward, locals(), ("O", "Stats"))

    def sdpa_backward(
        self,
        q: Operand,
        k: Operand,
        v: Operand,
        o: Operand,
        dO: Operand,
        stats: Operand,
        attn_scale: float | Operand | None = None,
        bias: Operand | None = None,
        dBias: Operand | None = None,
        use_alibi_mask: bool = False,
        use_padding_mask: bool = False,
        seq_len_q: Operand | None = None,
        seq_len_kv: Operand | None = None,
        max_total_seq_len_q: int | None = None,
        max_total_seq_len_kv: int | None = None,
        use_causal_mask: bool = False,
        use_causal_mask_bottom_right: bool = False,
        sliding_window_length: int | None = None,
        diagonal_alignment: diagonal_alignment = diagonal_alignment.TOP_LEFT,
        diagonal_band_left_bound: int | None = None,
        diagonal_band_right_bound: int | None = None,
        dropout: Dropout = None,
        rng_dump: Operand | None = None,
        use_deterministic_algorithm: bool = False,
        compute_data_type: object = NOT_SET,
        name: str = "",
        score_mod: ScoreModifier | None = None,
        score_mod_bprop: ScoreModifier | None = None,
        sink_token: Operand | None = None,
        dSink_token: Operand | None = None,
        implementation: attention_implementation = attention_implementation.AUTO,
    ) -> list[Tensor]:
        """Gradients of scaled dot-product attention.

        Args:
            q, k, v: As for ``sdpa``.
            o, stats: What ``sdpa`` returned with ``generate_stats=True``.
            dO: Gradient of O.
            dBias: A tensor made by ``graph.tensor()`` for the gradient of ``bias``, in a shape that broadcasts to
                ``[b, h_q, s_q, s_kv]``; broadcast dimensions are summed over.
            attn_scale ... diagonal_band_right_bound, dropout, score_mod, sink_token: As given to ``sdpa``; the second
                form of dropout is ``(mask, scale, inverse of scale)``.
            rng_dump: As for ``sdpa``.
            max_total_seq_len_q: The largest number of rows of Q in all entries of ragged tensors together: less scratch
                memory.
            max_total_seq_len_kv: Has no effect: there is no scratch memory for K and V.
            use_deterministic_algorithm: Adds in a fixed order: the same bits every time, more slowly.
            score_mod_bprop: A function ``(graph, gradient) -> gradient``: that of ``score_mod``.
            dSink_token: A tensor ``[1, h_q, 1, 1]`` for the gradient of ``sink_token``.
            implementation: cuDNN's pattern of operations (COMPOSITE), the kernels of :mod:`cudnn.sdpa` (FUSED: this
                node alone in its graph), or the faster of both (AUTO).

        Returns:
            ``[dQ, dK, dV]``, by default with the shapes and stride orders of q, k and v.

        Raises:
            RuntimeError, ValueError, TypeError, cudnnGraphNotSupportedError: as ``sdpa``.

        The formulas are those of Dao et al., FlashAttention (2022), appendix B.2.
        """
        return self._attend(AttentionBackward, locals(), ("dQ", "dK", "dV"))

    scaled_dot_product_flash_attention = sdpa
    scaled_dot_product_flash_attention_backward = sdpa_backward


def _conflict(where: str, broken: bool, what: str, got: str, allowed: str) -> None:
    if broken:
        raise make_error(RuntimeError, where, what, got, allowed, "leave one of them out")


def _wants_stats(where: str, is_inference: object, generate_stats: object) -> bool:
    for argument, value in (("is_inference", is_inference), ("generate_stats", generate_stats)):
        if value is not None and not isinstance(value, bool):
            raise make_error(RuntimeError, where, argument, repr(value), "True, False or None", "pass a bool")
    both_set = is_inference is not None and generate_stats is not None
    _conflict(
        where,
        both_set and is_inference == generate_stats,
        "is_inference and generate_stats",
        f"both {is_inference}",
        "one of them, since one is the negation of the other",
    )
    return generate_stats is True or is_inference is False


def _port(argument: str) -> str:
    """What a node calls an input."""
    return PORTS.get(argument) or (argument if argument.startswith("dO") else argument[0].upper() + argument[1:])


def _described(where: str, arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs of a node and the attributes that are not as they were given."""
    causal, bottom_right = arguments["use_causal_mask"], arguments["use_causal_mask_bottom_right"]
    alignment, left, right = arguments["diagonal_alignment"], arguments["left_bound"], arguments["right_bound"]
    _conflict(where, causal and bottom_right, "use_causal_mask and use_causal_mask_bottom_right", "both", "one of them")
    if causal or bottom_right:
        flag = "use_causal_mask" if causal else "use_causal_mask_bottom_right"
        _conflict(
            where,
            right is not None,
            f"{flag} and diagonal_band_right_bound",
            f"True and {right}",
            "one of them: a causal mask is a right bound of 0",
        )
        right = 0
        alignment = diagonal_alignment.TOP_LEFT if causal else diagonal_alignment.BOTTOM_RIGHT
    window = arguments.get("sliding_window_length")
    if window is not None:
        _conflict(
            where,
            left is not None,
            "sliding_window_length and diagonal_band_left_bound",
            f"{window} and {left}",
            "one of them, they are the same",
        )
        left = window
    scale = arguments["attn_scale"]
    if scale is not None and not isinstance(scale, (int, float, Tensor)):
        raise make_error(
            TypeError, where, "attn_scale", type(scale).__name__, "a number, a cudnn.tensor or None", "pass float(x)"
        )
    tensor, number = (scale, None) if isinstance(scale, Tensor) else (None, scale)
    dropout, probability = _dropout(where, arguments.get("dropout"))
    inputs: dict[str, Any] = {_port(name): arguments.get(name) for name in FIRST} | {"Attn_scale": tensor} | dropout
    inputs |= {_port(name): value for name, value in arguments.items() if LATER.fullmatch(name)}
    attributes = {
        "dropout_probability": probability,
        "attn_scale": None if number is None else float(number),
        "diagonal_alignment": _member(where, "diagonal_alignment", alignment, diagonal_alignment),
        "left_bound": _bound(where, "diagonal_band_left_bound", left),
        "right_bound": _bound(where, "diagonal_band_right_bound", right),
    }
    return inputs, attributes


def _random_state(value: object) -> object:
    """A seed or an offset as a tensor, where it is a number."""
    return Tensor.constant(value, data_type.INT64, 4) if isinstance(value, int) else value


def _dropout(where: str, dropout: Dropout) -> tuple[dict[str, Tensor], float]:
    """The inputs and the probability of dropout, in any of its forms. A probability of 0 alone asks for none."""
    if dropout is None or (isinstance(dropout, (int, float)) and dropout == 0):
        return {}, 0.0
    items = dropout if isinstance(dropout, tuple) else (dropout,)
    tensors = [isinstance(item, Tensor) for item in items]
    if len(items) in (2, 3) and all(tensors):
        return {port: item for port, item in zip(CUSTOM_DROPOUT, items, strict=False) if isinstance(item, Tensor)}, 0.0
    if len(items) == 3 and isinstance(items[0], (int, float)):
        probability = float(items[0])
        if not 0 <= probability < 1:
            raise make_error(
                ValueError,
                where,
                "dropout",
                f"a probability of {probability}",
                "0 or more and less than 1",
                "pass the share of weights to drop",
            )
        if probability == 0:
            return {}, 0.0
        if all(tensors[1:]):
            return {"Dropout_seed": items[1], "Dropout_offset": items[2]}, probability
    got = ", ".join(type(item).__name__ for item in items)
    raise make_error(
        TypeError,
        where,
        "dropout",
        f"({got})",
        "(probability, seed tensor, offset tensor), or (mask tensor, scale tensor) and, backward, its inverse",
        "pass one of these",
    )


E = TypeVar("E", bound=Enumeration)


def _member(where: str, argument: str, value: object, enum: type[E]) -> E:
    """A member of an enumeration, which may be given by its number."""
    if value not in [*enum]:
        allowed = f"a cudnn.{enum.__name__}: {', '.join(member.name for member in enum)}"
        raise make_error(ValueError, where, argument, repr(value), allowed, "pass one of them")
    return enum(value)


def _bound(where: str, argument: str, value: object) -> int | None:
    if value is not None and not isinstance(value, int):
        raise make_error(TypeError, where, argument, type(value).__name__, "a Python int or None", "pass int(x)")
    return value
