"""Checks data from outside, such as a serialized graph, against the type annotations of what they become."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import Any, cast

from cudnn import enums

# The enumerations that a serialized graph may name, and no other attribute of their module.
ENUMERATIONS: dict[str, type[enums.Enumeration]] = {
    name: cls
    for name, cls in vars(enums).items()
    if isinstance(cls, type) and issubclass(cls, enums.Enumeration) and cls is not enums.Enumeration
}


def conforms(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type: numbers, texts, enumerations, lists, tuples, dicts, unions of them.

    A bool is no int, an int is a float, and the name of a function stands for it.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(conforms(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(conforms(item, inner[0]) for item in cast(list[object], value))
    if origin is tuple:
        items = cast(tuple[object, ...], value)
        return isinstance(value, tuple) and len(items) == len(inner) and all(map(conforms, items, inner))
    if origin is dict:
        items = cast(dict[object, object], value)
        return isinstance(value, dict) and all(
            conforms(k, inner[0]) and conforms(v, inner[1]) for k, v in items.items()
        )
    if origin is Callable:
        return isinstance(value, str)
    if hint is float:
        return type(value) in (int, float)
    if hint in (int, bool, str, types.NoneType):
        return type(value) is hint
    return isinstance(value, hint)


def conforming(value: Any, hint: Any, what: str) -> Any:
    """The value; ValueError where it is of another type than annotated."""
    if not conforms(value, hint):
        raise ValueError(f"{what} is {value!r:.80}, which is no {getattr(hint, '__name__', hint)}")
    return value
