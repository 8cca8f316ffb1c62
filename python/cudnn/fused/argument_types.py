"""Checks the arguments of constructors and wrappers against the Python types of their annotations."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from cudnn.api_base import check_tensor
from cudnn.errors import checked_number, make_error
from cudnn.gemm.formats import torch_type
from cudnn.lazy import torch

_OR_NONE = " | None"


def checked(where: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function's arguments. Types of another library become PyTorch's, lists of two integers tuples.

    Raises:
        TypeError: one is not of the Python type of its annotation.
    """
    converted = {}
    for name, (accepted, convert) in _checks(function).items():
        value = arguments.get(name)
        if type(value) not in accepted:
            converted[name] = convert(where, name, value)
    return {**arguments, **converted} if converted else arguments


@functools.cache
def _checks(function: Callable[..., Any]) -> dict[str, tuple[frozenset[type], Callable[[str, str, Any], Any]]]:
    """For each parameter with a supported annotation: the types accepted as they are, and the converter of others."""
    converters: dict[str, tuple[tuple[type, ...], Callable[[str, str, Any], Any]]] = {
        "Tensor": ((torch.Tensor, torch.nn.Parameter), _tensor),
        "dtype": ((torch.dtype,), _dtype),
        "bool": ((bool,), _bool),
        "int": ((int,), _int),
        "float": ((float,), _float),
        "str": ((str,), _str),
        "tuple[int, int]": ((), _pair),
    }
    checks = {}
    for p in inspect.signature(function).parameters.values():
        annotation = str(p.annotation)
        if (short := annotation.removesuffix(_OR_NONE)) in converters:
            accepted, convert = converters[short]
            none = (type(None),) if annotation.endswith(_OR_NONE) or p.default is None else ()
            checks[p.name] = frozenset((*accepted, *none)), convert
    return checks


def _refused(where: str, name: str, value: Any, allowed: str) -> TypeError:
    return make_error(TypeError, where, name, repr(value), allowed)


def _tensor(where: str, name: str, value: Any) -> Any:
    if value is None:  # required tensors are checked elsewhere
        return None
    check_tensor(where, name.removeprefix("sample_").removesuffix("_tensor"), value)
    return value


def _dtype(where: str, name: str, value: Any) -> Any:
    dtype = torch_type(value)
    if not isinstance(dtype, torch.dtype):
        raise _refused(where, name, value, "a torch.dtype")
    return dtype


def _bool(where: str, name: str, value: Any) -> Any:
    try:
        return {0: False, 1: True}[operator.index(value)]
    except (KeyError, TypeError) as error:
        raise _refused(where, name, value, "True or False") from error


def _int(where: str, name: str, value: Any) -> Any:
    return checked_number(where, name, value, integer=True)


def _float(where: str, name: str, value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return checked_number(where, name, value, limit=True)


def _str(where: str, name: str, value: Any) -> Any:
    raise _refused(where, name, value, "a str")


def _pair(where: str, name: str, value: Any) -> Any:
    try:
        first, second = map(operator.index, value)
    except (TypeError, ValueError) as error:
        of_tiles = ", of rows and columns" * name.endswith("_mn")
        raise _refused(where, name, value, f"two integers{of_tiles}") from error
    return first, second
