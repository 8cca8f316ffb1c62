"""Hugging Face transformers 5: experts, gated MLPs and attention named ``"cudnn"``."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from cudnn.attention.flash_interface import flash_attn_func, flash_attn_varlen_func
from cudnn.attention.operator import scaled_dot_product_attention
from cudnn.enums import diagonal_alignment
from cudnn.errors import make_error
from cudnn.integrations import _gated_mlp
from cudnn.integrations._causal_mask import MASKS, CausalMask
from cudnn.moe.operator import moe_mlp
from cudnn.runtime.call import warn_once
from cudnn.sdpa import SdpaForward

NAME = "cudnn"
_WHERE = "cudnn.integrations.transformers"
_DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
_GPT_OSS_GATE = "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate"
_SILU_CLASSES = ("torch.nn.modules.activation.SiLU", "transformers.activations.SiLUActivation")
_SILU_FUNCTIONS = (
    torch.nn.functional.silu,
    torch._C._nn.silu,  # pyright: ignore[reportAttributeAccessIssue]
    torch.ops.aten.silu,
    torch.ops.aten.silu.default,
    torch.ops.aten.silu_,
    torch.ops.aten.silu_.default,
)
_WEIGHTS = {True: ("gate_up_proj", "down_proj"), False: ("up_proj", "down_proj")}  # by has_gate
# The options of use_experts_implementation that experts() reads, or that make no difference to it:
_OPTIONS = ("experts_class", "experts_interface", "is_concatenated", "is_transposed", "has_bias", "has_gate")

# Arguments of attention functions that concern other parts of a model, so that any value may be ignored:
_ELSEWHERE = frozenset(
    (
        "output_hidden_states",
        "output_router_logits",
        "num_items_in_batch",
        "logits_to_keep",
        "use_cache",
    )
)
_FLAGS = frozenset(("output_attentions", "deterministic"))  # False is what these functions do
_LENGTHS = "pass cu_seq_lens_q and cu_seq_lens_k, or position_ids that begin again with each sequence"
_CURES: dict[str, str] = dict.fromkeys(("max_length_q", "max_length_k", "seq_idx"), _LENGTHS)
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"

# Attention that compares its implementation's name with "sdpa", or has a class for each name. The modules below do so
# for a reason that does not concern "cudnn".
_BY_NAME = re.compile(
    r"""_attn_implementation\s*(?:==|!=|in|not in)[^:]*"sdpa"|CLASSES\[(?:self\.)?config\._attn_implementation\]"""
)
_KNOWN_BRANCHES = frozenset(
    f"transformers.models.{name}.modeling_{name}"
    for name in (
        "gemma4",  # slices the mask for the last rows, where "sdpa" may have none; a CausalMask can be sliced
        "gemma4_unified",
    )
)


def register() -> None:
    """Adds "cudnn" to the implementations of experts and of attention that transformers knows.

        cudnn.integrations.transformers.register()
        model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="cudnn",
                                                     experts_implementation="cudnn")

    Either can be asked for alone. ``experts_implementation`` is for the MLPs of dense models too, such as Llama and
    Qwen3: those of gate_proj, up_proj and down_proj with SiLU, by :func:`cudnn.ops.gated_mlp`. Weights stay those of
    the model's own classes, so checkpoints load and save as ever.

    Raises:
        ImportError: transformers 5 is not there.
    """
    try:
        from transformers import (  # pyright: ignore[reportMissingImports]
            AttentionInterface,
            AttentionMaskInterface,
            PreTrainedModel,
        )
        from transformers.integrations.moe import ExpertsInterface  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        hint = "pip install transformers"
        raise make_error(ImportError, _WHERE, "transformers", str(error), "version 5", hint) from error
    ExpertsInterface.register(NAME, experts)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    _check_models(PreTrainedModel)
    _gated_mlp.switch_on(PreTrainedModel, NAME, _is_silu)


def adjoin(model: torch.nn.Module) -> None:
    """Puts gate_proj.weight and up_proj.weight of each MLP side by side in memory, so that no pass copies them.

    Parameters stay the same objects with the same values. A pass does it by itself, unless ``torch.compile`` traces it
    or ``torch.distributed`` is initialized, whose wrappers hold the memory of parameters: call this before
    ``torch.compile`` and DDP, when the model is on its device.
    """
    for module in model.modules():
        if _gated_mlp.obstacle(module, _is_silu) == "":
            _gated_mlp.adjoin(module)


def _check_models(base: Any) -> None:
    """Makes transformers' check of an implementation, which every model calls when it is built, check ours too."""
    check = base.get_correct_attn_implementation
    if getattr(check, "knows_cudnn", False):
        return

    @functools.wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = check(self, *args, **kwargs)
        if chosen == NAME:
            _check_model(type(self), base)
        return chosen

    checked.knows_cudnn = True  # pyright: ignore[reportAttributeAccessIssue]
    base.get_correct_attn_implementation = checked


def _check_model(model_class: Any, base: Any) -> None:
    """Refuses a class of models whose attention does not run, or not as with "sdpa", by a function of ours."""
    calls = model_class._can_set_attn_implementation()  # transformers looks for the interface in the module's source
    with_sinks = model_class._supports_attention_backend and (
        model_class._supports_flash_attn or model_class._supports_flex_attn
    )
    modules = {each.__module__ for each in model_class.__mro__ if issubclass(each, base) and each is not base}
    if not (calls and (model_class._supports_sdpa or with_sinks)):
        got = model_class.__name__
        allowed = 'classes that support "sdpa", or sinks, through transformers\' AttentionInterface'
    elif any(_BY_NAME.search(inspect.getsource(sys.modules[each])) for each in modules - _KNOWN_BRANCHES):
        got = f"{model_class.__name__}, whose attention has steps by the name of the implementation"
        allowed = "classes whose attention is the same for every name"
    else:
        return
    other = "sdpa" if model_class._supports_sdpa else "eager"
    hint = f'choose attn_implementation="{other}"; a dict, as {{"text_config": "cudnn"}}, chooses for parts of a model'
    raise make_error(ValueError, f"{_WHERE}.attention", "model", got, allowed, hint)


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
    _check_experts(module)
    activation, paired, act_params = _activation(module)
    up, down = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    up_bias = down_bias = None
    if module.has_bias:
        up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
        down_bias = module.down_proj_bias
    if module.is_transposed:
        up, down = up.mT, down.mT
    if paired:
        up = _in_halves(up)
        up_bias = None if up_bias is None else _in_halves(up_bias)
    weights_dtype = torch.float64 if hidden_states.dtype is torch.float64 else torch.float32
    layout = "concatenated" if module.has_gate else "interleaved"
    return moe_mlp(
        hidden_states,
        (top_k_index, top_k_weights.to(weights_dtype)),
        up.contiguous(),
        down.contiguous(),
        up_bias,
        down_bias,
        activation=activation,
        glu_layout=layout,
        **act_params,
    )


def _check_experts(module: Any) -> None:
    """Refuses a class of experts that has a step, or weights, that :func:`experts` does not know."""
    known = set(_WEIGHTS[module.has_gate])
    known.update(f"{name}_bias" for name in _WEIGHTS[module.has_gate] if module.has_bias)
    tensors = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    got = [f"{name}={getattr(module, name)!r}" for name in _unknown_steps() if getattr(module, name, False)]
    # A parametrization, such as peft's LoRA of a parameter, gives the weight of that name another value.
    allowed_prefixes = ("act_fn.", *(f"parametrizations.{name}." for name in known))
    got += [name for name in tensors if name not in known and not name.startswith(allowed_prefixes)]
    if got:
        got_text = f"{', '.join(got)} in {type(module).__name__}"
        allowed = "two products with an activation between them"
        hint = 'choose experts_implementation="grouped_mm" or "eager"'
        raise make_error(ValueError, f"{_WHERE}.experts", "module", got_text, allowed, hint)


@torch.compiler.assume_constant_result
def _unknown_steps() -> list[str]:
    """The options of transformers' decorator for experts, which are attributes of each module, that we do not know."""
    from transformers.integrations.moe import use_experts_implementation  # pyright: ignore[reportMissingImports]

    return [name for name in inspect.signature(use_experts_implementation).parameters if name not in _OPTIONS]


def _activation(module: Any) -> tuple[str, bool, dict[str, Any]]:
    """For :func:`cudnn.ops.moe_mlp`: an activation's name, whether gates are in pairs with the others, its numbers."""
    act, gate = getattr(module, "act_fn", None), _gate_of(type(module))
    if module.has_gate and gate == _DEFAULT_GATE and module.is_concatenated and _is_silu(act):
        return "swiglu", False, {}
    if module.has_gate and gate == _GPT_OSS_GATE and not module.is_concatenated:
        limits = {"glu_clamp_max": module.limit, "glu_clamp_min": -module.limit}
        return "geglu", True, {"linear_offset": 1.0, "geglu_alpha": module.alpha, **limits}
    if not module.has_gate and _class_of(act) == "transformers.activations.ReLUSquaredActivation":
        return "srelu", False, {}
    order = "concatenated" if module.is_concatenated else "in pairs"
    through = f" through {gate}, {order}," if module.has_gate else " without gates"
    got = f"{_name_of(act)}{through} in {type(module).__name__}"
    allowed = "SiLU gates, those of gpt-oss, or squared ReLU without gates"
    hint = 'choose experts_implementation="grouped_mm" or "eager"'
    raise make_error(ValueError, f"{_WHERE}.experts", "activation", got, allowed, hint)


@torch.compiler.assume_constant_result
def _gate_of(model_class: type[Any]) -> str:
    """The full name of the function of a class of experts; ``torch.compile`` cannot trace it."""
    return f"{model_class._apply_gate.__module__}.{model_class._apply_gate.__qualname__}"


def _is_silu(act: Any) -> bool:
    """Whether an activation is SiLU: a module of PyTorch or transformers, a function, or a partial of one of these."""
    if isinstance(act, functools.partial):
        return not act.args and set(act.keywords) <= {"inplace"} and _is_silu(act.func)
    return act in _SILU_FUNCTIONS or _class_of(act) in _SILU_CLASSES


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _name_of(act: Any) -> str:
    """An activation in a message."""
    if isinstance(act, functools.partial):
        arguments = [*map(repr, act.args), *(f"{name}={value!r}" for name, value in act.keywords.items())]
        return f"partial({', '.join((_name_of(act.func), *arguments))})"
    if isinstance(act, torch.nn.Module):
        return repr(act)
    return getattr(act, "__name__", None) or str(act)


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a model: causal, windows, sinks, any mask, packed sequences and softcap.

    Packed sequences and a softcap are computed by :func:`cudnn.ops.flash_attn_varlen_func` and
    :func:`cudnn.ops.flash_attn_func`, all else by :func:`cudnn.ops.scaled_dot_product_attention`.

    Args:
        module: Its ``is_causal`` counts where the argument is None.
        query, key, value: ``[B, H, S, D]``; fewer heads of key and value are shared.
        attention_mask: What :func:`mask` made, or any mask that the operator takes. It alone decides which keys a row
            sees. None: all keys, or with ``is_causal``, those up to the row's own.
        s_aux: The logit of each head's sink, (H,).
        sliding_window: Has to be in the mask, where it is shorter than the sequence.
        softcap: Scores s become ``softcap * tanh(s / softcap)``. Not with a mask that has to be stored.
        cu_seq_lens_q, cu_seq_lens_k: Where the sequences of a padding-free batch of one row end, 0 first; with
            ``max_length_q`` and ``max_length_k``, their longest. These, ``is_causal`` and ``sliding_window`` decide
            which keys a row sees. Without them, a mask that :func:`mask` made of ``position_ids`` has the sequences.
        position_ids: Where no mask is stored, sequences begin where these do not go on by one, in a batch of one row
            and without a cache: not every model has them in its mask.
        others: Arguments of other parts of the model are ignored; every other one has to be None.

    Returns:
        ``[B, S, H, D]``, contiguous, and None: the weights are not formed.

    Raises:
        ValueError: an argument without a meaning here; a causal call without a mask, of other numbers of rows and keys
            or with a window; a stored mask with a softcap or with ``cu_seq_lens``.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap, "dropout_p": dropout}
    options |= {"learnable_sink": s_aux, "causal": causal}
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        ends = _checked_ends(cu_seq_lens_q, cu_seq_lens_k, attention_mask)
        longest = others.pop("max_length_q", None), others.pop("max_length_k", None)
        others.pop("seq_idx", None)  # the same sequences, for layers of other kinds
        _check_arguments(others)
        window = -1 if sliding_window is None else sliding_window - 1
        return _packed(query, key, value, ends, longest, {**options, "window_size": (window, window)}), None
    _check_arguments(others)
    if causal and query.shape[2] == key.shape[2]:
        attention_mask = _with_sequences(attention_mask, position_ids, query)
    if isinstance(attention_mask, CausalMask) and attention_mask.ends is not None:
        if _has_kernels(query, value):
            ends, longest = (attention_mask.ends, attention_mask.ends), (attention_mask.longest, attention_mask.longest)
            window = -1 if attention_mask.window is None else attention_mask.window - 1
            options |= {"causal": True, "window_size": (window, -1)}
            return _packed(query, key, value, ends, longest, options), None
        warn_once(f"{_WHERE}.attention", f"head sizes {query.shape[-1], value.shape[-1]}: packed sequences by a mask")
        attention_mask = attention_mask.dense()
    rows, keys = query.shape[2], key.shape[2]
    bounds: dict[str, Any] = {}
    if isinstance(attention_mask, CausalMask) and attention_mask.shape[2:] == (rows, keys):
        seen, window = rows + attention_mask.offset, attention_mask.window
        if seen <= keys:
            key, value = key[:, :, :seen], value[:, :, :seen]  # the other keys are seen by no row
            alignment = diagonal_alignment.BOTTOM_RIGHT if seen > rows else diagonal_alignment.TOP_LEFT
            bounds = {"is_causal": True, "diagonal_alignment": alignment}
            bounds["left_bound"] = window if window is not None and window < seen else -1
            attention_mask = None
    elif attention_mask is None and rows > 1 and causal:
        _check_causal(rows, keys, sliding_window)
        bounds = {"is_causal": True}
    if softcap:
        _check_softcap(softcap, attention_mask)
        left = bounds.get("left_bound", -1)
        options |= {"causal": bool(bounds), "window_size": (left - 1 if left != -1 else -1, -1)}
        flipped: Any = [x.transpose(1, 2) for x in (query, key, value)]
        return flash_attn_func(*flipped, **options), None
    if isinstance(attention_mask, MASKS):
        attention_mask = attention_mask.dense()
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, scale=scaling, enable_gqa=True, sinks=s_aux, **bounds
    )
    return out.transpose(1, 2).contiguous(), None


def _has_kernels(query: Tensor, value: Tensor) -> bool:
    """Whether there are kernels for packed sequences of these head sizes."""
    return (query.shape[-1], value.shape[-1]) in SdpaForward.head_sizes


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: tuple[Tensor, Tensor],
    longest: tuple[Any, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attention of packed sequences, ``[B, H, S, D]``, whose tokens are those of all of the batch: ``[B, S, H, D]``."""
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    lengths = (None if isinstance(x, Tensor) else x for x in longest)  # the host does not wait for them
    arguments: tuple[Any, ...] = (*flat, *ends, *lengths)
    out = flash_attn_varlen_func(*arguments, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def _with_sequences(attention_mask: Any, position_ids: Tensor | None, query: Tensor) -> Any:
    """A causal mask, or None for one, with the sequences of packed positions."""
    batch, _, rows, _ = query.shape
    stored = attention_mask is not None and not isinstance(attention_mask, CausalMask)
    if position_ids is None or position_ids.shape != (1, rows) or batch != 1 or rows == 1 or stored:
        return attention_mask
    if torch.compiler.is_compiling() or (attention_mask is not None and attention_mask.ends is not None):
        return attention_mask
    ends, longest = _sequences(position_ids)
    if longest == rows:
        return attention_mask
    offset, window = (0, None) if attention_mask is None else (attention_mask.offset, attention_mask.window)
    anchor = torch.empty(0, dtype=torch.bool, device=query.device)
    return CausalMask(anchor, (1, 1, rows, rows), offset, window, ends, longest)


_last_sequences: list[Any] = [lambda: None, 0, None]


def _sequences(position_ids: Tensor) -> tuple[Tensor, int]:
    """Offsets of the sequences of positions (1, S), int32, and the length of the longest. Found once for all layers."""
    kept, version, found = _last_sequences
    if kept() is not position_ids or version != position_ids._version:
        found = _offsets(position_ids.diff(dim=1) != 1)
        _last_sequences[:] = [weakref.ref(position_ids), position_ids._version, found]
    return found


def _offsets(begins: Tensor) -> tuple[Tensor, int]:
    """Offsets, int32, and the longest length, of rows (B, S) in which sequences begin at these places (B, S - 1), and
    in the first one.
    """
    first = torch.nn.functional.pad(begins, (1, 0), value=True).flatten()
    starts = first.nonzero().flatten()
    ends = torch.cat([starts, starts.new_tensor([first.numel()])]).to(torch.int32)
    return ends, int(ends.diff().max())


def _checked_ends(q: Tensor | None, k: Tensor | None, attention_mask: Any) -> tuple[Tensor, Tensor]:
    """Both offsets, int32. A stored mask beside them would be another choice of keys; a compiled model has one of the
    same sequences, which nothing reads.
    """
    where = f"{_WHERE}.attention"
    if q is None or k is None:
        missing = "cu_seq_lens_q" if q is None else "cu_seq_lens_k"
        raise make_error(ValueError, where, missing, "None", "both cu_seq_lens_q and cu_seq_lens_k, or neither")
    if not (attention_mask is None or isinstance(attention_mask, CausalMask) or torch.compiler.is_compiling()):
        got = f"a mask of the shape {tuple(attention_mask.shape)} with cu_seq_lens_q"
        raise make_error(ValueError, where, "attention_mask", got, "None", "leave attention_mask out")
    return q.to(torch.int32), k.to(torch.int32)


def _check_softcap(softcap: float, attention_mask: Any) -> None:
    """Refuses a stored mask with a softcap: no kernel has both."""
    if attention_mask is not None:
        got = f"{softcap} with a mask of the shape {tuple(attention_mask.shape)}"
        allowed = "a softcap with causal masks, windows and packed sequences"
        hint = 'pack the batch in place of padding, or choose attn_implementation="eager"'
        raise make_error(ValueError, f"{_WHERE}.attention", "softcap", got, allowed, hint)


def _check_arguments(others: dict[str, Any]) -> None:
    """Refuses every argument that has a value and a meaning for attention, or an unknown one."""
    for name, value in others.items():
        if value is None or name in _ELSEWHERE or (value is False and name in _FLAGS):
            continue
        got = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        hint = _CURES.get(name, 'choose attn_implementation="eager", or "sdpa" where the model supports it')
        allowed = "None or False" if name in _FLAGS else "None"
        raise make_error(ValueError, f"{_WHERE}.attention", name, got, allowed, hint)


def _check_causal(rows: int, keys: int, window: int | None) -> None:
    """Refuses causal attention without a mask, where it is not known which keys a row sees."""
    hint = 'pass the mask, or choose attn_implementation="eager", or "sdpa" where the model supports it'
    if rows != keys:
        got, allowed = f"None, with {rows} rows and {keys} keys", "None with equal numbers of keys and rows, or a mask"
        raise make_error(ValueError, f"{_WHERE}.attention", "attention_mask", got, allowed, hint)
    if window is not None and window < rows:
        got, allowed = f"{window} without a mask for {rows} rows", "a window that the mask has"
        raise make_error(ValueError, f"{_WHERE}.attention", "sliding_window", got, allowed, hint)


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
    """As transformers' mask of "sdpa", but a :class:`CausalMask` if a band over the whole sequence describes the mask.

    Those are causal sliding windows, packed sequences, and the first pass of a static cache, which has room for more
    keys.
    """
    from transformers.masking_utils import sdpa_mask  # pyright: ignore[reportMissingImports]

    starts_at_0 = q_length > 1 and _is_zero(q_offset) and _is_zero(others.get("kv_offset", 0))
    if starts_at_0 and q_length == kv_length and others.get("attention_mask") is None:
        packed = _packed_mask(mask_function, batch_size, q_length, device)
        if packed is not None:
            return packed
    arguments: dict[str, Any] = {"mask_function": mask_function, "device": device, **others}
    is_whole_sequence = allow_is_causal_skip and starts_at_0
    sees_all = is_whole_sequence or _is_in_window(q_length, q_offset, others.get("kv_offset", 0), local_size)
    window = (
        local_size if sees_all and local_size is not None and _is_window(mask_function, local_size, device) else None
    )
    # Without the window's size it decides as for a causal mask.
    arguments["local_size"] = local_size if window is None else None
    arguments["allow_is_causal_skip"] = allow_is_causal_skip
    sdpa_mask_result = sdpa_mask(batch_size, q_length, kv_length, q_offset, **arguments)
    if sdpa_mask_result is not None or not is_whole_sequence or (window is None and kv_length == q_length):
        return sdpa_mask_result
    if torch.compiler.is_compiling():
        arguments["allow_is_causal_skip"] = False
        return sdpa_mask(batch_size, q_length, kv_length, q_offset, **arguments)
    return CausalMask(torch.empty(0, dtype=torch.bool, device=device), (batch_size, 1, q_length, kv_length), 0, window)


def _packed_mask(mask_function: Any, batch_size: int, length: int, device: Any) -> CausalMask | None:
    """The mask of packed sequences, causal or of a causal window, if the function is exactly that."""
    if torch.compiler.is_compiling():
        return None
    parts = _mask_parts(mask_function)
    ids = parts.pop(_PACKED, {}).get("packed_sequence_mask")
    window = parts.pop(_WINDOW, {}).get("sliding_window")
    if ids is None or [*parts] != ["causal_mask_function"]:
        return None
    ends, longest = _offsets((ids[:, 1:] != ids[:, :-1]).expand(batch_size, -1))
    anchor = torch.empty(0, dtype=torch.bool, device=device)
    return CausalMask(anchor, (batch_size, 1, length, length), 0, window, ends, longest)


def _mask_parts(mask_function: Any) -> dict[str, dict[str, Any]]:
    """The functions of transformers that a mask is the intersection of, by name, with what they hold. Others, and two
    of a name, are ``{"": {}}``.
    """
    if getattr(mask_function, "__module__", "") != "transformers.masking_utils":
        return {"": {}}
    held = inspect.getclosurevars(mask_function).nonlocals
    if mask_function.__qualname__ != "and_masks.<locals>.and_mask":
        return {mask_function.__qualname__: dict(held)}
    parts: dict[str, dict[str, Any]] = {}
    for one in held["mask_functions"]:
        for name, values in _mask_parts(one).items():
            parts["" if name in parts else name] = values
    return parts


def _is_in_window(q_length: int, q_offset: Any, kv_offset: Any, size: int | None) -> bool:
    """Whether one row sees all keys that it has, which end at its own, for all of a causal window."""
    if q_length != 1 or size is None or isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return False
    return kv_offset > q_offset - size


def _is_zero(offset: Any) -> bool:
    """Whether an offset is 0; a static cache has it in a tensor, which ``torch.compile`` cannot read."""
    return not (isinstance(offset, Tensor) and torch.compiler.is_compiling()) and int(offset) == 0


def _is_window(mask_function: Any, size: int, device: Any) -> bool:
    """Whether a local mask is a causal window of a size, and not one of chunks, or of both sides.

    Chunks begin behind the padding, which is counted in a tensor on the ``device``.
    """
    if torch.compiler.is_compiling():
        return False
    first = torch.tensor(0, dtype=torch.int64, device=device)
    rows, keys = torch.tensor([[size, size, 0], [1, 0, 1]], dtype=torch.int64, device=device)
    return mask_function(first, first, rows, keys).tolist() == [True, False, False]
