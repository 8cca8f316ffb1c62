"""The objects that wrappers and operators keep, one for tensors of a kind, and wrappers that allocate by themselves."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict

MOST = 1024
"""Objects that are kept of an API: more would be of programs whose sizes keep changing, which would never end."""
_keeping = threading.Lock()


def keep(objects: dict[Any, Any], key: Any, made: Any) -> None:
    """Keeps an object for the next call of its kind. The oldest makes room."""
    with _keeping:
        while len(objects) >= MOST:
            del objects[next(iter(objects))]
        objects[key] = made


def run(api: Any, tensors: Mapping[str, Any], options: Mapping[str, Any], stream: Any = None) -> None:
    """Executes the object that there is for tensors like these, by name: made and compiled at the first call."""
    key = (api.kinds_of(tensors), tuple(options.items()))
    tensors = api.resolved(tensors, stream)
    made = api.objects.get(key)
    if made is None:
        made = api(**{f"sample_{name}": x for name, x in tensors.items()}, **options)
        made.check_support()
        made.compile()
        keep(api.objects, key, made)
    made.execute(**{api.parameters[name]: x for name, x in tensors.items()}, current_stream=stream)


def written(api: Any, arguments: Mapping[str, Any], **results: Any) -> TupleDict:
    """What a wrapper returns that has allocated its results: runs an API on its ``locals()`` and on them."""
    known = {name: arguments[f"{name}_tensor"] for name in api.parameters if f"{name}_tensor" in arguments}
    options = {name: arguments[name] for name in options_of(api) if name in arguments}
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    run(api, known | results, options, arguments.get("stream", arguments.get("current_stream")))
    return TupleDict({f"{name}_tensor": x for name, x in results.items()})


@functools.cache
def options_of(api: Any) -> tuple[str, ...]:
    """The names of a constructor's options."""
    return tuple(n for n in inspect.signature(api.__init__).parameters if n != "self" and not n.startswith("sample_"))
