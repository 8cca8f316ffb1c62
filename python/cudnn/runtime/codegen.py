"""Functions that are generated for one graph or one kernel. Tracebacks and debuggers show their source."""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any


def define(name: str, source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function of a name that the source defines. Its globals are ``scope``."""
    exec(_compiled(name, source), scope)
    return scope[name]


def with_parameters_of(function: Callable[..., Any], body: str) -> Callable[..., Any]:
    """A function with the name, parameters and defaults of another one, and this body."""
    parameters = inspect.signature(function).parameters
    named = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    order = [name for name in parameters if name not in named] + ["*"] * bool(named) + named
    name, plain = function.__name__, inspect.unwrap(function)
    result = define(name, f"def {name}({', '.join(order)}):\n    {body}\n", {})
    result.__defaults__, result.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__  # pyright: ignore
    return functools.update_wrapper(result, plain)


@functools.cache
def _compiled(name: str, source: str) -> CodeType:
    digest = hashlib.sha256(source.encode()).hexdigest()
    filename = f"<cudnn {name} {digest[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return compile(source, filename, "exec")
