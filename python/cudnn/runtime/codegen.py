"""Functions that are generated for one graph or one kernel. Tracebacks and debuggers show their source."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from types import CodeType
from typing import Any


def define(name: str, source: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """The function of a name that the source defines. Its globals are ``scope``."""
    exec(_compiled(name, source), scope)
    return scope[name]


@functools.cache
def _compiled(name: str, source: str) -> CodeType:
    digest = hashlib.sha256(source.encode()).hexdigest()
    filename = f"<cudnn {name} {digest[:12]}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return compile(source, filename, "exec")
