"""Megatron-Core's core attention on our kernels, with packed sequences (``thd``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn.attention.flash_interface import flash_attn_func, flash_attn_varlen_func
from cudnn.errors import make_error

_WHERE = "cudnn.integrations.megatron_attention.CoreAttention"
_MASKS = {"causal": True, "padding_causal": True, "causal_bottom_right": True, "no_mask": False, "padding": False}
_VANILLA, _LEARNABLE = "vanilla", "learnable"


class CoreAttention(torch.nn.Module):
    """A ``core_attention`` of Megatron-Core's layer specifications, with the arguments of its own classes.

        submodules.self_attention.submodules.core_attention = CoreAttention

    The configuration's ``window_size``, ``softmax_scale``, ``softmax_type`` ("learnable": a sink of each head, the
    parameter ``softmax_offset``), ``attn_logit_softcapping`` and ``deterministic_mode`` count. Grouped queries need no
    repeated keys.

    Args:
        config: Megatron's ``TransformerConfig``.
        layer_number, attention_type, cp_comm_type, pg_collection, others: Not needed.
        attn_mask_type: Its name is "causal", "no_mask" or, of packed sequences, "padding_causal" or "padding".
        attention_dropout: None: the configuration's. Only 0.
        softmax_scale: None: the configuration's, or ``d ** -0.5``.

    Raises:
        NotImplementedError: dropout, context parallelism, another softmax or mask.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str = "self",
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        softmax_type = getattr(config, "softmax_type", _VANILLA)
        for what, got, allowed in (
            ("attention_dropout", dropout, (0.0,)),
            ("context_parallel_size", getattr(config, "context_parallel_size", 1), (1,)),
            ("softmax_type", softmax_type, (_VANILLA, _LEARNABLE)),
        ):
            if got not in allowed:
                names = " or ".join(map(str, allowed))
                hint = "leave Megatron's own core_attention in the specification"
                raise make_error(NotImplementedError, _WHERE, what, got, names, hint)
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = getattr(config, "softmax_scale", None) if softmax_scale is None else softmax_scale
        self.window_size = tuple(getattr(config, "window_size", None) or (-1, -1))
        self.softcap = getattr(config, "attn_logit_softcapping", None) or 0.0
        self.deterministic = bool(getattr(config, "deterministic_mode", False))
        self.softmax_offset: torch.nn.Parameter | None = None
        if softmax_type == _LEARNABLE:
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            device = (
                None if getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available() else "cuda"
            )
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Tensor:
        """
        Args:
            query, key, value: (s, b, h, d); with ``packed_seq_params`` (t, h, d).
            attention_mask: Only None, or ignored with a causal mask type, which needs none.
            attn_mask_type: None: the constructor's.
            packed_seq_params: Megatron's ``PackedSeqParams`` of the format "thd". Padded offsets count, if any:
                the tensors have the padding.

        Returns:
            (s, b, h * d), or (t, h * d).

        Raises:
            NotImplementedError: a bias, a mask, a mask type.
        """
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        name = getattr(mask_type, "name", str(mask_type))
        if name not in _MASKS:
            raise make_error(NotImplementedError, _WHERE, "attn_mask_type", name, ", ".join(_MASKS))
        stored = attention_mask is not None and name != "causal"
        for what, refused in (("attention_bias", attention_bias is not None), ("attention_mask", stored)):
            if refused and packed_seq_params is None:
                hint = "pack the batch, or leave Megatron's own core_attention in the specification"
                raise make_error(NotImplementedError, _WHERE, what, "a tensor", "None", hint)
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": _MASKS[name]}
        options |= {"window_size": self.window_size, "softcap": self.softcap, "deterministic": self.deterministic}
        options["learnable_sink"] = self.softmax_offset
        if packed_seq_params is None:
            flipped: Any = [x.transpose(0, 1) for x in (query, key, value)]
            out = flash_attn_func(*flipped, **options)
            return out.transpose(0, 1).flatten(2)
        out = flash_attn_varlen_func(query, key, value, *_packing(packed_seq_params), **options)
        return out.flatten(1)


def _packing(parameters: Any) -> tuple[Any, ...]:
    """Offsets and longest lengths of queries and keys."""
    if getattr(parameters, "qkv_format", "thd") not in ("thd", None):
        raise make_error(ValueError, _WHERE, "packed_seq_params.qkv_format", parameters.qkv_format, "thd")
    ends = []
    for side in ("q", "kv"):
        padded = getattr(parameters, f"cu_seqlens_{side}_padded", None)
        ends.append(getattr(parameters, f"cu_seqlens_{side}") if padded is None else padded)
    return *ends, parameters.max_seqlen_q, parameters.max_seqlen_kv
