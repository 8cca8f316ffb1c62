"""Positional arguments in the order of an older version, told by their types."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn import settings
from cudnn.errors import make_error
from cudnn.lazy import torch
from cudnn.runtime.codegen import define, with_parameters_of


def older_order(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Lets a function be called with positional arguments in an older order of its parameters, ``names``.

    Calls that go no further than both orders agree cost a comparison. Beyond that the types of the arguments tell which
    order is meant: one that they fit, if need be that which has experts' ends where they are, else that of the version
    whose meaning the call has.

    Raises:
        TypeError: they fit neither; the message has the function's own order.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        annotations = {name: str(p.annotation) for name, p in inspect.signature(function).parameters.items()}
        newer, older = list(annotations), names.split()
        unknown = set(older) - set(newer)
        assert not unknown, unknown
        same = next((i for i, (a, b) in enumerate(zip(newer, older, strict=False)) if a != b), len(older))

        @functools.wraps(function)
        def call(*positional: Any, **named: Any) -> Any:
            if len(positional) <= same:
                return function(*positional, **named)
            semantics = named.get("semantics") or getattr(positional[0], "semantics", None) or settings.SEMANTICS.get()
            orders = (older, newer) if semantics == "1.23" else (newer, older)
            fitting = [order for order in orders if _fit(positional, order, annotations)]
            for order in sorted(fitting, key=lambda order: not _has_int32_tensors_in_place(positional, order)):
                return function(**dict(zip(order, positional, strict=False)), **named)
            got = ", ".join(type(x).__name__ for x in positional)
            hint = "pass arguments by name"
            raise make_error(TypeError, function.__qualname__, "positional arguments", got, ", ".join(newer), hint)

        declared: Any = call
        declared.older_order, declared.agreed = names, tuple(newer[:same])
        return declared

    return decorate


def with_body(declared: Callable[..., Any], body: str) -> Callable[..., Any]:
    """A function with the name, parameters and defaults of another one, and its ``older_order`` if it has one.

    A call that names its arguments, but for those that both orders agree on, passes no dictionary of them on.
    """
    function, names = with_parameters_of(declared, body), getattr(declared, "older_order", None)
    if names is None:
        return function
    ordered: Any = older_order(names)(function)
    parameters = inspect.signature(declared).parameters
    defaults = {name: _MISSING if p.default is p.empty else p.default for name, p in parameters.items()}
    rest = {name: default for name, default in defaults.items() if name not in ordered.agreed}

    def call(positional: Sequence[Any], named: Mapping[str, Any]) -> Any:
        return ordered(*positional, **{name: x for name, x in named.items() if x is not defaults[name]})

    agreed = ", ".join(ordered.agreed)
    source = _WITH_BODY.format(
        name=function.__name__,
        agreed=agreed,
        rest=", ".join(rest),
        differs=" or ".join(["positional", *(f"{name} is _MISSING" for name, x in rest.items() if x is _MISSING)]),
        named=", ".join(f"{name!r}: {name}" for name in rest),
        body=body,
    )
    result = define(function.__name__, source, {"call": call, "_MISSING": _MISSING})
    result.__defaults__ = tuple(defaults[name] for name in ordered.agreed if defaults[name] is not _MISSING)
    result.__kwdefaults__ = rest
    return functools.update_wrapper(result, ordered)


_MISSING = object()
"""The default of a parameter that has none."""
_WITH_BODY = """
def {name}({agreed}, *positional, {rest}):
    if {differs}:
        return call(({agreed}, *positional), {{{named}}})
    {body}
"""


def _fit(positional: Sequence[Any], names: Sequence[str], annotations: dict[str, str]) -> bool:
    return len(positional) <= len(names) and all(
        _is(x, annotations[name]) for x, name in zip(positional, names, strict=False)
    )


def _has_int32_tensors_in_place(positional: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether tensors of 32-bit integers, which experts' ends are, are where an order has such, and no others."""
    pairs = [(x, name) for x, name in zip(positional, names, strict=False) if hasattr(x, "data_ptr")]
    int32_names = ("offsets", "counter", "index")
    return all((x.dtype == torch.int32) == any(int32_name in name for int32_name in int32_names) for x, name in pairs)


def _is(value: Any, annotation: str) -> bool:
    """Whether a value may be meant for a parameter of that annotation."""
    if value is None:
        return "None" in annotation or annotation == "Any"
    type_name = annotation.removesuffix(" | None")
    if type_name.startswith("tuple"):
        return isinstance(value, (tuple, list))
    checks: dict[str, Callable[[Any], bool]] = {
        "Tensor": lambda x: hasattr(x, "data_ptr"),
        "dtype": lambda x: isinstance(x, (torch.dtype, type)),
        "bool": lambda x: isinstance(x, bool),
        "int": lambda x: isinstance(x, numbers.Integral) and not isinstance(x, bool),
        "float": lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool),
        "str": lambda x: isinstance(x, str),
    }
    return type_name not in checks or checks[type_name](value)
