"""``cudnn.graph``, ``cudnn.jit`` and ``cudnn.graph_cache``: graphs as functions that build them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

from cudnn.backend.handle import Handle
from cudnn.enums import data_type, heur_mode
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
    """Decorates a function returning ``(graph, tensors)``: builds the graph if need be; returns ``(graph, uids)``.

    ``options`` are accepted for programs that pass any; none has an effect.
    """
    modes = [heur_modes] if isinstance(heur_modes, heur_mode) else list(heur_modes)

    def decorate(function: Callable[P, tuple[pygraph, Sequence[Any]]]) -> Callable[P, tuple[pygraph, list[int]]]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> tuple[pygraph, list[int]]:
            built, tensors = function(*args, **kwargs)
            if built.get_execution_plan_count() <= 0:
                built.build(modes)
            return built, [tensor.get_uid() for tensor in tensors]

        return wrapper

    return decorate


def graph_cache(key_fn: Callable[..., Hashable], maxsize: int = 256) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function: one result per ``key_fn(*args, **kwargs)``; beyond ``maxsize`` the oldest is dropped."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        results: dict[Hashable, R] = {}

        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            key = key_fn(*args, **kwargs)
            if key not in results:
                while len(results) >= maxsize:
                    del results[next(iter(results))]
                results[key] = function(*args, **kwargs)
            return results[key]

        return wrapper

    return decorate
