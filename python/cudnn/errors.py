"""The error classes and the one helper that words every refusal."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

E = TypeVar("E", bound=Exception)


class cudnnGraphNotSupportedError(Exception):  # noqa: N801  (the public name of the cuDNN Python API)
    """cuDNN, or this library on its behalf, cannot run the graph: no engine, no plan, or outside the support surface.

    Not a subclass of ``RuntimeError``: test suites turn this class, and only this one, into a skip.

    Attributes:
        detail: Where plans are missing: what cuDNN said about each mode or configuration, without the graph's name and
            without advice.
    """

    detail: str = ""


class CudnnError(RuntimeError):
    """A call of libcudnn failed. ``status`` is the number and ``status_name`` the name of its ``cudnnStatus_t``."""

    def __init__(self, message: str, status: int, status_name: str) -> None:
        super().__init__(message)
        self.status = status
        self.status_name = status_name

    @property
    def not_supported(self) -> bool:
        """True for the ``CUDNN_STATUS_NOT_SUPPORTED_*`` family."""
        return self.status // 1000 == 3


class CudnnLibraryError(RuntimeError):
    """libcudnn cannot be found, cannot be loaded or is too old."""


def refusal(where: str, what: str, got: object, allowed: str, hint: str = "") -> str:
    """Words a refusal: which call or node and argument, what it got, what is allowed, what to do.

    >>> refusal("conv2d (conv_fprop)", "stride", "nothing", "one per spatial dimension", "pass stride=[1, 1]")
    'conv2d (conv_fprop): stride: got nothing; allowed: one per spatial dimension. To fix it, pass stride=[1, 1].'
    """
    text = f"{where}: {what}: got {got}; allowed: {allowed}."
    return f"{text} To fix it, {hint}." if hint else text


def make_error(kind: type[E], where: str, what: str, got: object, allowed: str, hint: str = "") -> E:
    """The exception of a kind whose text is a refusal, to be raised."""
    return kind(refusal(where, what, got, allowed, hint))


def find_signature_error(
    where: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TypeError | None:
    """What is wrong with the number or the names of a call's arguments; None where they fit."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return TypeError(f"{where}: {error}; allowed: {', '.join(signature.parameters)}.")
    return None


def checked_number(
    where: str, what: str, value: Any, allowed: str = "", integer: bool = False, limit: bool = False
) -> Any:
    """A number that an argument gave, as a Python ``float`` or, of an ``integer``, ``int``.

    Args:
        allowed: For the message: what the argument may be.
        limit: Infinite numbers stand for no limit.

    Raises:
        TypeError: it is a bool, no real number or, of an integer, no whole one.
        ValueError: it is NaN, or infinite.
    """
    if type(value) is float and not integer and abs(value) < math.inf:  # comparisons are what torch.compile traces
        return value
    if type(value) is int and integer:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral if integer else numbers.Real):
        hint = f"pass {what}.item()" if hasattr(value, "item") else ""
        allowed = allowed or ("an int" if integer else "a float")
        raise make_error(TypeError, where, what, type(value).__name__, allowed, hint)
    if math.isnan(value) or (math.isinf(value) and not limit):
        raise make_error(ValueError, where, what, value, "numbers" if limit else "finite numbers")
    kind: Any = int if integer else float
    return kind(value)
