"""PyTorch's switch of its FlashAttention: ``scaled_dot_product_attention`` and ``varlen_attn`` on our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cudnn.attention.flash_op import flash_attn, flash_attn_bwd
from cudnn.attention.fused import fused_sdpa, fused_sdpa_bwd
from cudnn.errors import make_error

NAME = "cudnn"
_WHERE = "torch.nn.attention"
_RESTORE = "call torch.nn.attention.restore_flash_attention_impl(), or choose another backend with sdpa_kernel()"


def register() -> None:
    """Adds "cudnn" to the implementations that PyTorch's switch knows; it is off until a program activates it.

        cudnn.integrations.torch_attention.register()
        torch.nn.attention.activate_flash_attention_impl("cudnn")
        ...
        torch.nn.attention.restore_flash_attention_impl()

    While it is active, PyTorch's FlashAttention backend is our kernels: of ``scaled_dot_product_attention`` where
    PyTorch chooses that backend, and of ``torch.nn.attention.varlen.varlen_attn``. What the kernels do not have raises
    RuntimeError: dropout, head sizes other than 64, 96, 128, 192 and 256, caches.

    Raises:
        ImportError: a PyTorch without the switch.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        hint = "call cudnn.ops.flash_attn_varlen_func, or upgrade PyTorch"
        raise make_error(ImportError, _WHERE, "PyTorch", torch.__version__, "one with the switch", hint) from error
    register_flash_attention_impl(NAME, register_fn=activate)


class Handle:
    """Keeps the registrations; :meth:`remove` gives PyTorch its own kernels back."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library: torch.library.Library | None = library

    def remove(self) -> None:
        """Drops the registrations."""
        if self._library is not None:
            self._library._destroy()
        self._library = None


def activate(device: str = "CUDA") -> Handle:
    """Registers the kernels in place of PyTorch's, of the operators that this PyTorch has."""
    library = torch.library.Library("aten", "IMPL", device)
    for name, function in _OPERATORS.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, function, device)
    return Handle(library)


def _check(q: Tensor, dropout_p: float, return_debug_mask: bool = False, **others: Any) -> None:
    if dropout_p != 0:
        raise make_error(RuntimeError, _WHERE, "dropout_p", dropout_p, "0 with the cudnn implementation", _RESTORE)
    if return_debug_mask:
        raise make_error(RuntimeError, _WHERE, "return_debug_mask", True, "False", _RESTORE)
    for name, value in others.items():
        if value is not None and not (name == "num_splits" and value <= 1):
            hint = "call cudnn.ops.flash_attn_with_kvcache, or restore_flash_attention_impl()"
            raise make_error(
                RuntimeError, _WHERE, name, type(value).__name__, "None with the cudnn implementation", hint
            )


def _numbers(q: Tensor, max_q: int, max_k: int, causal: bool, options: dict[str, Any]) -> tuple[Any, ...]:
    """Of :func:`flash_attn`, from those of PyTorch's operators: None is no bound, and the default scale."""
    scale = options.get("scale")
    bounds = (options.get(f"window_size_{side}") for side in ("left", "right"))
    left, right = (-1 if bound is None else int(bound) for bound in bounds)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    return int(max_q), int(max_k), scale, causal, left, right, 0.0, deterministic, False


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states of random numbers, and the mask of dropout, that PyTorch's operators return."""
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return seed, torch.zeros((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``, of (b, s, h, d), or of packed sequences."""
    bounds = {name: options.pop(name, None) for name in ("scale", "window_size_left", "window_size_right")}
    _check(query, dropout_p, return_debug_mask, **options)
    numbers = _numbers(query, max_q, max_k, is_causal, bounds)
    with torch.no_grad():
        out, lse = flash_attn(query, key, value, cum_seq_q, cum_seq_k, None, *numbers)
    return out, lse, *_no_dropout(query)


def _forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """``aten::_flash_attention_forward_no_dropout_inplace``: the result is written into ``out``."""
    result, lse, *_ = _forward(*arguments, **options)
    out.copy_(result)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``."""
    _check(query, dropout_p)
    numbers = _numbers(query, max_q, max_k, is_causal, options)
    tensors = (grad_out, None, query, key, value, out, logsumexp.contiguous(), cum_seq_q, cum_seq_k, None)
    with torch.no_grad():
        return flash_attn_bwd(*tensors, *numbers)[:3]


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """``aten::_scaled_dot_product_flash_attention``, whose result lies in memory as query does."""
    _check(query, dropout_p, return_debug_mask)
    max_q, max_k = query.shape[2], key.shape[2]
    with torch.no_grad():
        if query.is_contiguous():
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            _check_sizes(query, value)
            out, lse = fused_sdpa(query, key, value, factor, is_causal, -1, -1, False)
        else:
            numbers = _numbers(query, max_q, max_k, is_causal, {"scale": scale})
            flipped = [x.transpose(1, 2) for x in (query, key, value)]
            arguments: tuple[Any, ...] = (*flipped, None, None, None, *numbers)
            out, lse = flash_attn(*arguments)
            out = out.transpose(1, 2)
    return out, lse, None, None, max_q, max_k, *_no_dropout(query)


def _check_sizes(query: Tensor, value: Tensor) -> None:
    """Refuses head sizes without kernels, as :func:`flash_attn` does."""
    from cudnn.sdpa import SdpaForward

    heads = query.shape[-1], value.shape[-1]
    if heads not in SdpaForward.head_sizes:
        allowed = ", ".join(map(str, SdpaForward.head_sizes))
        raise make_error(RuntimeError, _WHERE, "head sizes of query and value", heads, allowed, _RESTORE)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_scaled_dot_product_flash_attention_backward``."""
    _check(query, dropout_p)
    deterministic, lse = torch.are_deterministic_algorithms_enabled(), logsumexp.contiguous()
    with torch.no_grad():
        if query.is_contiguous():
            factor = query.shape[-1] ** -0.5 if scale is None else scale
            tensors = (grad_out, query, key, value, out, lse)
            return fused_sdpa_bwd(*tensors, factor, is_causal, -1, deterministic, -1, False)
        flipped = [x.transpose(1, 2) for x in (grad_out, query, key, value, out)]
        numbers = _numbers(query, max_q, max_k, is_causal, {"scale": scale})
        arguments: tuple[Any, ...] = (flipped[0], None, *flipped[1:], lse, None, None, None, *numbers)
        *gradients, _ = flash_attn_bwd(*arguments)
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    return dq, dk, dv


_OPERATORS = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
