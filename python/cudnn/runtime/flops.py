"""FLOPs of operators for ``torch.utils.flop_counter``, by its rules: 2 m n k for a GEMM, masks do not count."""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Any, Callable[..., int]]] = []
Shape = Sequence[int]


def none() -> int:
    """Data movement, and element-wise operations, of which PyTorch counts none."""
    return 0


def attention(q: Shape, k: Shape, v: Shape) -> int:
    """Q K^T and P V, of ``[B, H, S, D]``."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def attention_backward(q: Shape, k: Shape, v: Shape) -> int:
    """Five GEMMs: the scores again, dP, dV, dQ and dK."""
    return 2 * q[0] * q[1] * q[2] * k[2] * (3 * q[3] + 2 * v[3])


def flash_attention(*arguments: Any) -> int:
    """:func:`attention` of ``cudnn::flash_attn``: (b, s, h, d), or packed sequences (t, h, d)."""
    q, k, v, cu_q, cu_k, _, _, longest, *_ = arguments
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, longest) * (q.shape[-1] + v.shape[-1])


def flash_attention_backward(*arguments: Any) -> int:
    """:func:`attention_backward` of ``cudnn::flash_attn_bwd``."""
    _, _, q, k, v, _, _, cu_q, cu_k, _, _, longest, *_ = arguments
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, longest) * (3 * q.shape[-1] + 2 * v.shape[-1])


def flash_attention_cached(*arguments: Any) -> int:
    """:func:`attention` of ``cudnn::flash_attn_kvcache``, as if caches were full."""
    q, k, v, _, table, *_ = arguments
    keys = k.shape[1] * (1 if table is None else table.shape[1])
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * keys * (q.shape[3] + v.shape[3])


def _pairs(q: torch.Tensor, k: torch.Tensor, cu_q: Any, cu_k: Any, longest: int) -> int:
    """Pairs of a query and a key of its sequence. Offsets without values count as the longest sequence of keys."""
    if cu_q is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if cu_q.is_meta or type(cu_q) is not torch.Tensor:
        return q.shape[0] * longest
    return int((cu_q.diff().long() * cu_k.diff()).sum())


def register(operator: Any, formula: Callable[..., int]) -> None:
    """Registers a formula, which gets those of the operator's arguments that it names: the shapes of tensors.

    ``out`` are those of the results. A formula of ``*arguments`` gets all, and the tensors themselves.

    PyTorch's counter is not loaded for it, since it loads Triton: the formulas wait until a program imports it.
    """
    packet = operator._opoverload._overloadpacket
    defaults = {a.name: a.default_value for a in operator._opoverload._schema.arguments}  # a call leaves those out
    names = list(defaults)
    parameters = inspect.signature(formula).parameters.values()
    requested = [p.name for p in parameters if p.name in (*names, "out") or p.default is p.empty]
    takes_all = inspect.getfullargspec(formula).varargs is not None

    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs, "out": out_val}
        if takes_all:
            return formula(*(values[name] for name in names))
        return formula(**{name: _shapes(values[name]) for name in requested})

    _waiting.append((packet, count))
    if _COUNTER in sys.modules:
        _register_formulas(sys.modules[_COUNTER])
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _shapes(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return tuple(x.shape)
    return type(x)(_shapes(each) for each in x) if type(x) in (list, tuple) else x


def _register_formulas(counter: Any) -> None:
    """Also to the modes that are counting: each copied the formulas when it was made, maybe before the first use of an
    operator registered it.
    """
    modes = [getattr(mode, "counter", None) for mode in _get_current_dispatch_mode_stack()]
    counting: list[Any] = [mode for mode in modes if isinstance(mode, counter.FlopCounterMode)]
    while _waiting:
        packet, count = _waiting.pop()
        counter.register_flop_formula(packet, get_raw=True)(count)
        for mode in counting:
            mode.flop_registry.setdefault(packet, count)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Hands the formulas to PyTorch's counter as soon as a program imports it."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_register(module: ModuleType) -> None:
                execute(module)
                _register_formulas(module)

            spec.loader.exec_module = then_register
        return spec
