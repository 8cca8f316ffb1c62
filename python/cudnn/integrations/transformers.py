"""Hugging Face transformers 5: experts and attention named ``"cudnn"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn.errors import refused
from cudnn.ops._moe_mlp import moe_mlp
from cudnn.ops._scaled_dot_product_attention import scaled_dot_product_attention

NAME = "cudnn"
_WHERE = "cudnn.integrations.transformers"
_SILU = ("SiLU", "SiLUActivation")
_GPT_OSS = "GptOssExperts._apply_gate"


def register() -> None:
    """Adds "cudnn" to the implementations of experts and of attention that transformers knows.

        cudnn.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="cudnn",
                                                     experts_implementation="cudnn")

    Either can be asked for alone. Weights stay those of the model's own classes, so checkpoints load and save as ever.

    Raises:
        ImportError: transformers 5 is not there.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface  # pyright: ignore[reportMissingImports]
        from transformers.integrations.moe import ExpertsInterface  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        cure = "pip install transformers"
        raise refused(ImportError, _WHERE, "transformers", str(error), "version 5", cure) from error
    ExpertsInterface.register(NAME, experts)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a module with transformers' weights, by :func:`cudnn.ops.moe_mlp`.

    SiLU gates, gpt-oss's clamped ones, and squared ReLU without gates; with or without biases. Weights that are stored
    transposed, or with gates and the others in pairs, as gpt-oss's are, are copied in every pass, and so are their
    gradients.

    Args:
        module: What transformers' ``use_experts_implementation`` made of a class of experts.
        hidden_states: (T, H), bfloat16 or float16, or any under autocast; on the CPU also float32 and float64.
        top_k_index, top_k_weights: (T, K); experts outside of 0 to E - 1 are left out.

    Raises:
        ValueError: an activation that the kernels do not have; types and shapes.
    """
    activation, numbers = _activation(module)
    up, down = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    if module.is_transposed:
        up, down = up.mT, down.mT
    if module.has_gate and not module.is_concatenated:
        up = _in_halves(up)
        up_bias = None if up_bias is None else _in_halves(up_bias)
    kind = torch.float64 if hidden_states.dtype is torch.float64 else torch.float32
    layout = "concatenated" if module.has_gate else "interleaved"
    return moe_mlp(
        hidden_states,
        (top_k_index, top_k_weights.to(kind)),
        up.contiguous(),
        down.contiguous(),
        up_bias,
        down_bias,
        activation=activation,
        glu_layout=layout,
        **numbers,
    )


def _activation(module: Any) -> tuple[str, dict[str, Any]]:
    """The name and the numbers of a module's activation for :func:`cudnn.ops.moe_mlp`."""
    act, gate = getattr(module, "act_fn", None), _gate_of(type(module))
    if module.has_gate and gate == "_default_apply_gate" and type(act).__name__ in _SILU:
        return "swiglu", {}
    if module.has_gate and gate == _GPT_OSS:
        limits = {"glu_clamp_max": module.limit, "glu_clamp_min": -module.limit}
        return "geglu", {"linear_offset": 1.0, "geglu_alpha": module.alpha, **limits}
    if not module.has_gate and type(act).__name__ == "ReLUSquaredActivation":
        return "srelu", {}
    got = f"{type(act).__name__} through {gate} in {type(module).__name__}"
    allowed = "SiLU gates, those of gpt-oss, or squared ReLU without gates"
    raise refused(ValueError, f"{_WHERE}.experts", "activation", got, allowed, 'choose the "grouped_mm" experts')


@torch.compiler.assume_constant_result
def _gate_of(kind: type[Any]) -> str:
    """The name of the function of a class of experts; ``torch.compile`` cannot trace it."""
    return kind._apply_gate.__qualname__


def _in_halves(x: Tensor) -> Tensor:
    """(E, 2 I, ...) with a gate first in each pair, gates as the first half."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a model, by :func:`cudnn.ops.scaled_dot_product_attention`: causal, windows, sinks, any mask.

    Args:
        module: Its ``is_causal`` counts where the argument is None.
        query, key, value: ``[B, H, S, D]``; fewer heads of key and value are shared.
        attention_mask: What :func:`mask` made: ``[B, 1, S_q, S_kv]``, or None for a causal one or a window of one.
        s_aux: The logit of each head's sink, (H,).
        others: Of these, ``sliding_window`` counts where there is no mask: the keys that a row sees, its own included,
            or None for all. Some models do not pass it on; then it is that of the module's layer.

    Returns:
        ``[B, S, H, D]``, and None: the weights are not formed.

    Raises:
        ValueError: softcap or position_bias.
    """
    for name, given in (("softcap", softcap), ("position_bias", position_bias)):
        if given is not None:
            cure = 'choose the "eager" attention'
            raise refused(ValueError, f"{_WHERE}.attention", name, "a value", "None", cure)
    rows, keys = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal = bool(is_causal) and attention_mask is None and rows > 1
    left = -1
    if is_causal:
        if keys > rows:  # room of a static cache
            key, value = key[:, :, :rows], value[:, :, :rows]
        window = others["sliding_window"] if "sliding_window" in others else _window_of(module)
        left = window if window is not None and window < rows else -1
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal, scaling, True, left_bound=left, sinks=s_aux
    )
    return out.transpose(1, 2), None


def _window_of(module: Any) -> int | None:
    """The window of a layer of attention, by the layer or by the model's configuration."""
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds is not None and index is not None and kinds[index] != "sliding_attention":
        return None
    return getattr(module, "sliding_window", None) or getattr(config, "sliding_window", None) or None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    *,
    mask_function: Any,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """As transformers' mask of "sdpa", but None also for a causal sliding window over a whole sequence."""
    from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]

    whole = allow_is_causal_skip and isinstance(q_offset, int) and q_offset == 0 and q_length > 1
    if local_size is not None and whole and _is_window(mask_function, local_size, device):
        local_size = None  # it decides from now on as for a causal mask
    given = {"mask_function": mask_function, "local_size": local_size, "device": device, **others}
    given["allow_is_causal_skip"] = allow_is_causal_skip
    return sdpa_mask(batch_size, q_length, kv_length, q_offset, **given)


def _is_window(mask_function: Any, size: int, device: Any) -> bool:
    """Whether a local mask is a causal window of a size, and not one of chunks, or of both sides.

    Chunks begin behind the padding, which is counted in a tensor on the ``device``.
    """
    if torch.compiler.is_compiling():
        return False
    first = torch.tensor(0, dtype=torch.int64, device=device)
    rows, keys = torch.tensor([[size, size, 0], [1, 0, 1]], dtype=torch.int64, device=device)
    return mask_function(first, first, rows, keys).tolist() == [True, False, False]
