"""The gated MLPs of Hugging Face transformers: Llama's, Qwen3's and all that have the same ``forward``."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cudnn import settings
from cudnn.gated_mlp.layer import are_adjacent
from cudnn.gated_mlp.operator import gated_mlp

_FORWARD = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) return down_proj"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LINEAR = ("gate_proj", "up_proj", "down_proj")


def switch_on(base: Any, name: str, is_silu: Callable[[Any], bool]) -> None:
    """Makes transformers' check of an experts' implementation, which every model calls when it is built, replace the
    ``forward`` of MLPs of the model's modules by one that follows the configuration.
    """
    check = base.get_correct_experts_implementation
    if getattr(check, "knows_cudnn", False):
        return

    @functools.wraps(check)
    def checked(self: Any, *args: Any, **kwargs: Any) -> str:
        chosen = check(self, *args, **kwargs)
        if chosen == name:
            modules = {c.__module__ for c in type(self).__mro__ if issubclass(c, base) and c is not base}
            found = [_replace(mlp, name, is_silu) for module in modules for mlp in _classes(module)]
            if found:
                type(self)._can_set_experts_implementation_cached_value = True
        return chosen

    checked.knows_cudnn = True  # pyright: ignore[reportAttributeAccessIssue]
    base.get_correct_experts_implementation = checked


@functools.cache
def _classes(module: str) -> list[Any]:
    """The classes of a module whose ``forward`` is that of Llama's MLP."""
    classes = [c for c in vars(sys.modules[module]).values() if isinstance(c, type) and "forward" in vars(c)]
    return [c for c in classes if issubclass(c, torch.nn.Module) and _body(vars(c)["forward"]) == _FORWARD]


def _body(function: Any) -> str:
    try:
        _, _, body = inspect.getsource(function).partition(":\n")
    except (OSError, TypeError):
        return ""
    return " ".join(body.split())


def _replace(mlp: Any, name: str, is_silu: Callable[[Any], bool]) -> None:
    """Replaces the ``forward`` of a class, once."""
    forward = mlp.forward
    if getattr(forward, "knows_cudnn", False):
        return

    @functools.wraps(forward)
    def chosen(self: Any, x: Tensor) -> Tensor:
        if getattr(getattr(self, "config", None), "_experts_implementation", None) != name:
            return forward(self, x)
        reason = obstacle(self, is_silu)
        if reason:
            _log_once(type(self).__name__, reason)
            return forward(self, x)
        return run(self, x)

    chosen.knows_cudnn = True  # pyright: ignore[reportAttributeAccessIssue]
    mlp.forward = chosen


def obstacle(module: Any, is_silu: Callable[[Any], bool]) -> str:
    """Why a module is no gated MLP that the kernels compute; ``""`` if it is one."""
    layers = [getattr(module, name, None) for name in _LINEAR]
    if not all(type(layer) is torch.nn.Linear for layer in layers):
        return f"linear layers of the classes {', '.join(type(layer).__name__ for layer in layers)}"
    if not is_silu(getattr(module, "act_fn", None)):
        return f"the activation {getattr(module, 'act_fn', None)!r}"
    if any(getattr(layer, hooks) for layer in layers for hooks in _HOOKS) or any("forward" in vars(x) for x in layers):
        return "hooks of its linear layers"
    if not all(type(x.weight) in (torch.nn.Parameter, Tensor) for x in layers):  # pyright: ignore[reportOptionalMemberAccess]
        return "weights of another class than Parameter"
    gate, up, down = layers
    if (gate.bias is None) != (up.bias is None):  # pyright: ignore[reportOptionalMemberAccess]
        return "a bias of gate_proj or up_proj alone"
    weight = down.weight  # pyright: ignore[reportOptionalMemberAccess]
    if weight.shape[1] % 32 or weight.shape[0] % 8:
        return f"sizes {tuple(weight.shape)} of down_proj, which are no multiples of 8 and 32"
    return ""


def run(module: Any, x: Tensor) -> Tensor:
    """The MLP of a module without an :func:`obstacle`."""
    if not (torch.compiler.is_compiling() or torch.distributed.is_initialized()):
        adjoin(module)
    gate, up, down = (getattr(module, name) for name in _LINEAR)
    bias = None if gate.bias is None else (gate.bias, up.bias)
    return gated_mlp(x, (gate.weight, up.weight), down.weight, bias, down.bias)


@torch.no_grad()
def adjoin(module: Any) -> None:
    """Puts the weights of gate_proj and up_proj side by side in memory, unless they are, or are no plain tensors."""
    weights = [module.gate_proj.weight, module.up_proj.weight]
    gate, up = weights
    plain = all(type(w) is torch.nn.Parameter and w.device.type in ("cuda", "cpu") for w in weights)
    if not plain or are_adjacent(gate, up) or gate.dtype is not up.dtype or gate.device != up.device:
        return
    if gate.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    joined = torch.cat([gate, up])
    gate.data, up.data = joined.split([gate.shape[0], up.shape[0]])


_logged: set[tuple[str, str]] = set()


@torch.compiler.assume_constant_result
def _log_once(name: str, reason: str) -> bool:
    """Logs why a class runs transformers' own forward, once; ``torch.compile`` calls it while it traces."""
    if (name, reason) not in _logged:
        _logged.add((name, reason))
        logger = settings.configure_logging()
        logger.warning("%s runs transformers' own forward, since it has %s", name, reason)
    return True
