"""Old spellings of public names, which work for one more release and warn."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def renamed_arguments(**new_names: str) -> Callable[[F], F]:
    """Decorates a function that also takes arguments by their old keywords: ``renamed_arguments(old="new")``."""

    pairs = tuple(new_names.items())

    def decorate(function: F) -> F:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def with_old_names(*args: Any, **kwargs: Any) -> Any:
            for old, new in pairs:
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{name}() got both {new!r} and {old!r}, its old name")
                    warnings.warn(f"{name}({old}=...) is deprecated: use {new}", DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(F, with_old_names)

    return decorate
