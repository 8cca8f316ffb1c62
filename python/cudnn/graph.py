"""``cudnn.graph``, ``cudnn.jit`` and ``cudnn.graph_cache``: graphs as functions that build them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from cudnn.backend.handle import Handle
from cudnn.enums import data_type, heur_mode
from cudnn.errors import make_error
from cudnn.pygraph.graph import pygraph

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def graph(
    handle: Handle | int | None,
    name: str = "cudnn_graph",
    io_data_type: object = data_type.HALF,
    intermediate_data_type: object = data_type.FLOAT,
    compute_data_type: object = data_type.FLOAT,
) -> Iterator[tuple[pygraph, list[Any]]]:
    """A new graph to describe in a ``with`` block: ``with cudnn.graph(handle) as (g, tensors):``.

    ``tensors`` is an empty list for the caller's use. Nothing is built at the end of the block.
    """
    yield (
        pygraph(
            name=name,
            io_data_type=io_data_type,
            intermediate_data_type=intermediate_data_type,
            compute_data_type=compute_data_type,
            handle=handle,
        ),
        [],
    )


def jit(
    heur_modes: heur_mode | Sequence[heur_mode] = heur_mode.A, **options: Any
) -> Callable[[Callable[P, tuple[pygraph, Sequence[Any]]]], Callable[P, tuple[pygraph, list[int]]]]:
    """Decorates a function returning ``(graph, tensors)``: builds the graph if needed; returns ``(graph, uids)``.

    ``options`` are accepted for compatibility and have no effect.

    Raises:
        TypeError: ``heur_modes`` is something else, such as the function itself, where ``@cudnn.jit`` lacks its ``()``.
    """
    modes: list[Any] = [*heur_modes] if isinstance(heur_modes, Iterable) else [heur_modes]
    if any(not isinstance(mode, heur_mode) for mode in modes):
        got = "a function" if callable(heur_modes) else repr(heur_modes)
        hint = "write @cudnn.jit(), with parentheses" if callable(heur_modes) else "pass cudnn.heur_mode.A, say"
        raise make_error(TypeError, "jit", "heur_modes", got, "a cudnn.heur_mode, or a list of them", hint)

    def decorate(function: Callable[P, tuple[pygraph, Sequence[Any]]]) -> Callable[P, tuple[pygraph, list[int]]]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[pygraph, list[int]]:
            returned: Any = function(*args, **kwargs)
            if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not isinstance(returned[0], pygraph):
                what, allowed = f"what {function.__name__}() returned", "(graph, tensors)"
                raise make_error(
                    TypeError, "jit", what, type(returned).__name__, allowed, "return both, as `g, [a, b, out]`"
                )
            graph_, tensors = returned
            if graph_.get_execution_plan_count() <= 0:
                graph_.build(modes)
            return graph_, [tensor.get_uid() for tensor in tensors]

        return wrapper

    return decorate


def graph_cache(key_fn: Callable[..., Hashable], maxsize: int = 256) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: one result per ``key_fn(*args, **kwargs)``; beyond ``maxsize`` the oldest is dropped.

    Raises:
        TypeError: ``key_fn`` is no function; later, it returned a value that is not hashable, such as a list.
    """
    if not callable(key_fn):
        raise make_error(TypeError, "graph_cache", "key_fn", repr(key_fn), "a function of the same arguments")

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        results: dict[Hashable, R] = {}
        lock = threading.Lock()

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            key = key_fn(*args, **kwargs)
            try:
                return results[key]
            except KeyError:  # also if another thread has just evicted it
                pass
            except TypeError as error:
                what, hint = f"what key_fn of {function.__name__} returned", "return tuples in place of lists"
                raise make_error(TypeError, "graph_cache", what, repr(key), "a hashable value", hint) from error
            result = function(*args, **kwargs)
            with lock:
                result = results.setdefault(key, result)
                while len(results) > maxsize:
                    del results[next(iter(results))]
            return result

        return wrapper

    return decorate
