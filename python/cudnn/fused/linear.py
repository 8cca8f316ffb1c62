"""The operators of dense GEMMs in the shapes of ``torch.nn.functional.linear``: (..., k) by (n, k)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn.errors import make_error
from cudnn.fused.dense import DenseGemm
from cudnn.fused.layouts import BlockScales, Column, Contiguous, Matrix
from cudnn.gemm.formats import BLOCKWISE_DTYPE, name_of
from cudnn.lazy import torch
from cudnn.runtime.registration import autocast_type, differentiating

ABOUT = """

As ``cudnn.ops.{name}`` with a ``b`` of two dimensions, (n, k): ``a`` is (..., k), and so are the other matrices with a
row for each row of ``a``; ``prob`` is (...). Matrices without a stride of 1 are copied. Returns ``{primary}`` alone,
(..., columns), or the tensors that ``returns`` names, of {results}, in that order. Types that are not passed are those
of ``a``, or bfloat16 where that has not 16 bits; what is optional is computed only if ``returns`` names it{saved}. With
a ``b`` of three dimensions, (n, k, l), all results are returned, as by the wrapper; absent ones have no elements.
"""


def linear_operator(api: type[DenseGemm], operator: Any) -> Callable[..., Any]:
    """The operator of a dense GEMM as ``cudnn.ops`` has it: see ``ABOUT``."""
    parameters = inspect.signature(operator).parameters
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    required = {name for name, p in parameters.items() if p.default is p.empty}
    names, primary = list(parameters), api.result[0]
    layouts = {spec.name: spec.layout for spec in api.tensors if spec.name in parameters}
    dtypes = {n: n.removesuffix("_dtype") for n in names if n.endswith("_dtype") and n[:-6] in api.returns}
    stored = [name for name in dtypes.values() if api.spec(name).optional]
    saves = "ab12" in stored and api.gradients is not None

    def call(*args: Any, returns: Sequence[str] | None = None, **kwargs: Any) -> Any:
        b: Any = args[1] if len(args) > 1 else kwargs.get("b")
        if getattr(b, "ndim", 0) != 2:
            if returns is not None:
                got, allowed = f"{returns!r} with b {_shape(b)}", "only with b (n, k)"
                raise make_error(ValueError, f"cudnn::{api.folder()}", "returns", got, allowed)
            return operator(*args, **kwargs)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        a: Any = arguments.get("a")
        fits = len(args) + len(kwargs) == len(arguments) and required <= arguments.keys() <= defaults.keys()
        if not fits or not isinstance(a, torch.Tensor) or not a.ndim:
            return operator(*args, **kwargs)  # raises
        wanted = (primary,) if returns is None else _checked(api, returns)
        default = autocast_type(a) or a.dtype
        default = default if default in (torch.float16, torch.bfloat16) else torch.bfloat16
        for name, result in dtypes.items():
            if arguments.get(name) is None:
                computed = (
                    result not in stored or result in wanted or (result == "ab12" and saves and _needs_gradient(a, b))
                )
                arguments[name] = default if computed else None
        values = {**defaults, **arguments}
        for name, layout in layouts.items():
            if values[name] is not None:
                values[name] = _as_operand(layout, values[name])
        results = operator(*(values[name] for name in names))
        by_name = dict(zip(api.returns, results if isinstance(results, tuple) else (results,), strict=True))
        restored = tuple(_restored(api, name, by_name[name], a.shape[:-1]) for name in wanted)
        return restored[0] if returns is None else restored

    functools.update_wrapper(call, operator._init_fn)
    call.__signature__ = signature_of(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    saved = ", or if the gradient needs it" if saves else ""
    about = ABOUT.format(name=api.folder(), primary=primary, results=", ".join(api.returns), saved=saved)
    call.__doc__ = inspect.cleandoc(operator.__doc__ or "") + about
    call.operator = operator  # pyright: ignore[reportFunctionMemberAccess]
    return call


def signature_of(parameters: Mapping[str, inspect.Parameter]) -> inspect.Signature:
    """The signature with a ``b`` of two dimensions: types default to None, and there is ``returns``."""
    shown = [p.replace(default=None) if n.endswith("_dtype") else p for n, p in parameters.items()]
    returns = inspect.Parameter("returns", inspect.Parameter.KEYWORD_ONLY, default=None)
    return inspect.Signature([*shown, returns])


def _checked(api: type[DenseGemm], returns: Sequence[str]) -> list[str]:
    names = list(returns) if isinstance(returns, (tuple, list)) else []
    if not names or not all(name in api.returns for name in names):
        allowed = f"a tuple of names, of {', '.join(api.returns)}"
        raise make_error(ValueError, f"cudnn::{api.folder()}", "returns", repr(returns), allowed)
    return names


def _needs_gradient(a: Any, b: Any) -> bool:
    """Whether there is a gradient, which reads a stored ab12."""
    asked = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return a.element_size() > 1 and (asked or differentiating())


def _as_operand(layout: Any, x: Any) -> Any:
    """An argument as the operator takes it, with a batch of one."""
    if not isinstance(x, torch.Tensor):
        return x
    is_matrix = isinstance(layout, BlockScales) and name_of(x.dtype) == BLOCKWISE_DTYPE
    if x.ndim and (is_matrix or isinstance(layout, Matrix)):
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        return (rows if 1 in rows.stride() else rows.contiguous()).unsqueeze(-1)
    if isinstance(layout, Column):
        return x.reshape(-1, 1, 1)
    return x.reshape(-1) if isinstance(layout, Contiguous) and layout.dims == ("m",) else x


def _restored(api: type[DenseGemm], name: str, x: Any, lead: Sequence[int]) -> Any:
    """A result in the caller's dimensions."""
    layout = api.spec(name).layout
    if not x.numel() and 0 not in lead:
        hint = "pass the types or tensors that it needs, or leave it out"
        raise make_error(ValueError, f"cudnn::{api.folder()}", "returns", name, "results that the call has", hint)
    if isinstance(layout, Matrix) or (isinstance(layout, BlockScales) and x.ndim == 3):
        rows = x.squeeze(-1)
        return rows if len(lead) == 1 else rows.unflatten(0, lead) if lead else rows[0]
    if isinstance(layout, Column):
        return x.reshape(lead)
    return x.reshape(()) if x.numel() == 1 and not isinstance(layout, BlockScales) else x


def _shape(x: Any) -> Any:
    return tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
