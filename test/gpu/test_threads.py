"""Two threads, each with a separate handle and stream."""

from __future__ import annotations

import pytest
import torch

import cudnn
from cudnn.backend.plan import Pack
from gpu.common import compare, data, product, workspace
from support.graphs import MODES
from support.threads import together

ROUNDS = 50


def built() -> cudnn.pygraph:
    graph = product()
    graph.build(MODES)
    return graph


@pytest.mark.parametrize("shared", [True, False], ids=["one graph", "a graph each"])
@pytest.mark.parametrize("own_handles", [True, False], ids=["own handles", "default handles"])
def test_two_threads(shared: bool, own_handles: bool) -> None:
    one = built()

    def work(number: int) -> None:
        stream, graph = torch.cuda.Stream(), one if shared else built()
        handle = None
        if own_handles:
            handle = cudnn.create_handle()
            cudnn.set_stream(handle, stream.cuda_stream)
        with torch.cuda.stream(stream):
            space = workspace(graph)
            for _ in range(ROUNDS):
                pack = data()
                graph.execute(pack, space, handle=handle)
                compare(pack)
        stream.synchronize()
        if handle is not None:
            cudnn.destroy_handle(handle)

    together(work)


def test_threads_with_a_cuda_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one plan, kept since the addresses come again."""
    monkeypatch.setattr(Pack, "CALLS_BEFORE_GRAPH", 2)
    graph = built()
    torch.cuda.synchronize()

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            space, pack = workspace(graph), data()
            for _ in range(ROUNDS):
                pack[1].normal_()
                pack[2].normal_()
                pack[3].fill_(float("nan"))
                graph.execute(pack, space)
                compare(pack)

    together(work, 4)


def test_wrapper_with_a_workspace_per_call() -> None:
    operands = data()
    with cudnn.Graph(workspace_alloc=False) as graph:
        graph.matmul(operands[1], operands[2])

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            space = torch.empty(graph.get_workspace_size(), dtype=torch.uint8, device="cuda")
            for scale in range(1, ROUNDS):
                pack = {**operands, 1: operands[1] * ((number + 1) * scale / ROUNDS)}
                pack[3] = graph(pack[1], pack[2], workspace=space)
                compare(pack)

    torch.cuda.synchronize()
    together(work)
