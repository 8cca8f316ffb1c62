"""Two threads, each with a handle and a stream of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend.plan import ExecutionPlan
from support.graphs import FLOAT, HALF, MODES

pytestmark = pytest.mark.gpu
ROUNDS = 50


def together(work: Callable[[int], None], count: int = 2) -> None:
    """Runs ``work(0)``, ``work(1)`` ... at once; raises what any of them raised."""
    barrier, errors = threading.Barrier(count), []

    def run(number: int) -> None:
        try:
            barrier.wait(60)
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def product(**options: Any) -> tuple[cudnn.pygraph, cudnn.tensor, cudnn.tensor, cudnn.tensor]:
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, **options)
    a = graph.tensor(dim=[2, 128, 256], stride=[128 * 256, 256, 1], name="a")
    b = graph.tensor(dim=[2, 256, 64], stride=[256 * 64, 64, 1], name="b")
    c = graph.matmul(a, b, name="mm").set_output(True)
    graph.build(MODES)
    return graph, a, b, c


def work_on(
    graph: cudnn.pygraph, a: cudnn.tensor, b: cudnn.tensor, c: cudnn.tensor, seed: int, handle: Any, stream: Any
) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    half: Any = {"dtype": torch.float16, "device": "cuda"}
    with torch.cuda.stream(stream):
        workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
        for _ in range(ROUNDS):
            x = torch.randn(2, 128, 256, generator=generator, **half)
            y = torch.randn(2, 256, 64, generator=generator, **half)
            out = torch.full((2, 128, 64), float("nan"), **half)
            graph.execute({a: x, b: y, c: out}, workspace, handle=handle)
            torch.testing.assert_close(out.float(), x.float() @ y.float(), atol=3e-2, rtol=3e-3)


@pytest.mark.parametrize("shared", [True, False], ids=["one graph", "a graph each"])
@pytest.mark.parametrize("own_handles", [True, False], ids=["own handles", "default handles"])
def test_two_threads(shared: bool, own_handles: bool) -> None:
    one = product()

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        handle = None
        if own_handles:
            handle = cudnn.create_handle()
            cudnn.set_stream(handle, stream.cuda_stream)
        work_on(*(one if shared else product()), seed=number, handle=handle, stream=stream)
        stream.synchronize()
        if handle is not None:
            cudnn.destroy_handle(handle)

    together(work)


def test_threads_with_a_cuda_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one plan, kept since the addresses come again."""
    monkeypatch.setattr(ExecutionPlan, "CALLS_BEFORE_GRAPH", 2)
    graph, a, b, c = product()
    half: Any = {"dtype": torch.float16, "device": "cuda"}
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
            x, y, out = (
                torch.empty(2, 128, 256, **half),
                torch.empty(2, 256, 64, **half),
                torch.empty(2, 128, 64, **half),
            )
            for _ in range(ROUNDS):
                x.normal_()
                y.normal_()
                out.fill_(float("nan"))
                graph.execute({a: x, b: y, c: out}, workspace)
                torch.testing.assert_close(out.float(), x.float() @ y.float(), atol=3e-2, rtol=3e-3)

    together(work, 4)


def test_default_handles_are_of_the_thread() -> None:
    found: dict[int, int] = {}
    both = threading.Barrier(2)

    def work(number: int) -> None:
        found[number] = int(cudnn.wrapper.get_default_handle())
        both.wait(60)  # a thread that ends leaves its handle to the next one

    together(work)
    assert found[0] != found[1]


def test_wrapper_with_a_workspace_per_call() -> None:
    a = torch.randn(2, 128, 256, dtype=torch.float16, device="cuda")
    b = torch.randn(2, 256, 64, dtype=torch.float16, device="cuda")
    with cudnn.Graph(workspace_alloc=False) as graph:
        graph.matmul(a, b)

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            workspace = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
            for scale in range(1, ROUNDS):
                x = a * ((number + 1) * scale / ROUNDS)
                torch.testing.assert_close(
                    graph(x, b, workspace=workspace).float(), x.float() @ b.float(), atol=5e-2, rtol=3e-3
                )

    torch.cuda.synchronize()
    together(work)
