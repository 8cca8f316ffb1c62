"""The cache of compiled objects of wrappers and operators, and helpers of wrappers that allocate their results."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from cudnn.api_base import TupleDict
from cudnn.runtime import recording

MAX_OBJECTS = 1024
"""Cached objects of an API: a bound for programs whose sizes keep changing."""
_lock = threading.Lock()


def cache_object(objects: dict[Any, Any], key: Any, operation: Any) -> None:
    """Caches a compiled object; evicts the oldest if the cache is full."""
    with _lock:
        while len(objects) >= MAX_OBJECTS:
            del objects[next(iter(objects))]
        objects[key] = operation


def run(
    api: Any, tensors: Mapping[str, Any], options: Mapping[str, Any], stream: Any = None, key: tuple[Any, ...] = ()
) -> None:
    """Executes the cached object for these tensors, by name; the first call creates and compiles it.

    ``key``: what the object depends on besides the options, where that is not the shapes and strides of all tensors.
    """
    key = (key or api.tensor_key(tensors), tuple(options.items()))
    tensors = api.resolved(tensors, stream)
    recorder = recording.current()
    operation = api.objects.get(key) if recorder is None else None
    if operation is None:
        operation = api(**{f"sample_{name}": x for name, x in tensors.items()}, **options)
        operation.check_support()
        operation.compile()
        if recorder is None:
            cache_object(api.objects, key, operation)
    operation.execute(**{api.parameters[name]: x for name, x in tensors.items()}, current_stream=stream)


def written(api: Any, arguments: Mapping[str, Any], **results: Any) -> TupleDict:
    """Runs an API on a wrapper's ``locals()`` and the results that it allocated, and returns the results."""
    inputs = {name: arguments[f"{name}_tensor"] for name in api.parameters if f"{name}_tensor" in arguments}
    options = {name: arguments[name] for name in options_of(api) if name in arguments}
    options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
    run(api, inputs | results, options, arguments.get("stream", arguments.get("current_stream")))
    return TupleDict({f"{name}_tensor": x for name, x in results.items()})


@functools.cache
def options_of(api: Any) -> tuple[str, ...]:
    """The names of a constructor's options."""
    return tuple(n for n in inspect.signature(api.__init__).parameters if n != "self" and not n.startswith("sample_"))
