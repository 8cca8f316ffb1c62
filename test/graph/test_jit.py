"""``cudnn.graph``, ``cudnn.jit`` and ``cudnn.graph_cache``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cudnn


def describe(handle: Any, x: torch.Tensor, calls: list[int] | None = None) -> tuple[cudnn.pygraph, list[cudnn.tensor]]:
    """ReLU of ``x``."""
    if calls is not None:
        calls.append(1)
    with cudnn.graph(handle, io_data_type=x.dtype) as (g, tensors):
        tensors.append(g.tensor_like(x))
        tensors.append(g.relu(tensors[0], name="act").set_output(True))
        return g, tensors


def test_the_context_gives_a_graph_and_an_empty_list() -> None:
    with cudnn.graph(None) as (g, tensors):
        assert isinstance(g, cudnn.pygraph)
        assert tensors == []
    assert g.get_execution_plan_count() == 0


def test_default_types() -> None:
    with cudnn.graph(cudnn.create_handle(), name="named") as (g, _):
        pass
    assert '"name": "named"' in repr(g)
    assert '"io_data_type": "HALF"' in repr(g)
    assert '"intermediate_data_type": "FLOAT"' in repr(g)
    assert '"compute_data_type": "FLOAT"' in repr(g)


@pytest.mark.parametrize("modes", [cudnn.heur_mode.A, [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]])
def test_jit_builds_and_returns_uids(modes: Any) -> None:
    x = torch.randn(3, 4)
    g, uids = cudnn.jit(heur_modes=modes)(describe)(None, x)
    out = torch.empty(3, 4)
    g.execute(dict(zip(uids, (x, out), strict=True)))
    torch.testing.assert_close(out, torch.relu(x))


def test_the_wrapped_function_is_within_reach() -> None:
    decorated = cudnn.jit()(describe)
    assert decorated.__wrapped__ is describe  # pyright: ignore[reportFunctionMemberAccess]
    assert decorated.__name__ == "describe"
    again, tensors = cudnn.jit()(decorated.__wrapped__)(None, torch.ones(1, 2))  # pyright: ignore
    assert len(tensors) == 2
    assert again.get_execution_plan_count() > 0


def test_a_cached_graph_is_described_and_built_once() -> None:
    calls: list[int] = []

    @cudnn.jit(heur_modes=cudnn.heur_mode.A)
    @cudnn.graph_cache(key_fn=lambda handle, x, calls: (tuple(x.shape), x.dtype))
    def cached(handle: Any, x: torch.Tensor, calls: list[int]) -> Any:
        return describe(handle, x, calls)

    first, uids = cached(None, torch.ones(2, 3), calls)
    plan = first._program
    second, again = cached(None, torch.zeros(2, 3), calls=calls)
    assert second is first
    assert second._program is plan
    assert again == uids
    assert len(calls) == 1
    other, _ = cached(None, torch.ones(3, 3), calls)
    assert other is not first
    assert len(calls) == 2


def test_the_oldest_goes_first() -> None:
    made: list[int] = []

    @cudnn.graph_cache(key_fn=lambda n: n, maxsize=2)
    def make(n: int) -> object:
        made.append(n)
        return object()

    one, two = make(1), make(2)
    assert make(1) is one
    make(3)  # drops 1, the oldest made, though it was used last
    assert make(2) is two
    assert make(1) is not one
    assert made == [1, 2, 3, 1]


def test_a_cache_of_none_and_of_threads() -> None:
    assert cudnn.graph_cache(key_fn=lambda n: n, maxsize=0)(lambda n: n)(3) == 3
    double = cudnn.graph_cache(key_fn=lambda n: n, maxsize=1)(lambda n: 2 * n)  # each thread drops the others' results
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(double, [*range(8)] * 200)] == [*range(0, 16, 2)] * 200


def test_jit_says_what_a_function_has_to_return() -> None:
    with pytest.raises(TypeError, match=r"jit: what <lambda>\(\) returned: got int; allowed: \(graph, tensors\)"):
        cudnn.jit()(lambda: 1)()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("modes", "message"),
    [(lambda: 0, r"got a function; .* write @cudnn\.jit\(\)"), ("A", r"got 'A'; .* pass cudnn\.heur_mode\.A")],
)
def test_jit_refuses_what_is_no_mode(modes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"jit: heur_modes: {message}"):
        cudnn.jit(modes)


def test_keys_of_a_cache() -> None:
    with pytest.raises(TypeError, match="graph_cache: key_fn: got None; allowed: a function"):
        cudnn.graph_cache(key_fn=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"what key_fn of <lambda> returned: got \[3\]; .* return tuples"):
        cudnn.graph_cache(key_fn=lambda n: [n])(lambda n: n)(3)  # type: ignore[arg-type]


def test_keywords_reach_the_key_function() -> None:
    seen: list[Any] = []

    def key(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs))
        return 0

    cudnn.graph_cache(key)(lambda a, b: a + b)(1, b=2)
    assert seen == [((1,), {"b": 2})]
