"""``cudnn.Graph`` on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudnn
from gpu.common import captured

HALF: Any = {"dtype": torch.float16, "device": "cuda"}


def arrays() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 128, 256, **HALF), torch.randn(2, 256, 64, **HALF), torch.randn(1, 128, 64, **HALF)


def product(**options: Any) -> cudnn.Graph:
    a, b, d = arrays()
    with cudnn.Graph(**options) as graph:
        graph.bias(name="shift", input=graph.matmul(name="mm", A=a, B=b), bias=d)
    return graph


def check(result: torch.Tensor, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> None:
    assert result.is_cuda
    torch.testing.assert_close(result.float(), a.float() @ b.float() + d.float(), atol=3e-2, rtol=3e-3)


@pytest.mark.parametrize("handle", [None, "auto", "own"])
def test_calls(handle: Any) -> None:
    arguments = cudnn.create_handle() if handle == "own" else handle
    data = arrays()
    for graph in (product(handle=arguments), product()):
        assert graph.get_plan_name().startswith("eng")
        for _ in range(3):
            check(graph(*data, handle=arguments), *data)
        pack = dict(zip(("mm::A", "mm::B", "shift::bias"), data, strict=True))
        check(graph(pack, handle=arguments)["shift::OUT_0"], *data)


def test_the_result_is_a_new_tensor_each_time() -> None:
    graph, data = product(), arrays()
    first = graph(*data)
    kept = first.clone()
    graph(*arrays())
    assert torch.equal(first, kept)


def test_current_stream() -> None:
    graph, data = product(), arrays()
    late = data[0].clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for handle in (None, "auto"):
        with torch.cuda.stream(stream):
            data[0].zero_()
            torch.cuda._sleep(20_000_000)
            data[0].copy_(late)
            result = graph(*data, handle=handle)
        stream.synchronize()
        check(result, *data)


def test_capture_and_replay() -> None:
    graph, data = product(), arrays()
    out = torch.empty(2, 128, 64, **HALF)
    pack = {**dict(zip(("mm::A", "mm::B", "shift::bias"), data, strict=True)), "shift::OUT_0": out}
    graph(pack)
    torch.cuda.synchronize()
    again = captured(lambda: graph(pack))
    for _ in range(2):
        for tensor in data:
            tensor.normal_()
        out.fill_(float("nan"))
        again.replay()
        torch.cuda.synchronize()
        check(out, *data)


def test_workspace_alloc_false() -> None:
    x = torch.randn(2, 4, 256, 64, **HALF)
    with cudnn.Graph(workspace_alloc=False) as graph:
        graph.sdpa(x, x, x, name="attention")
    size = graph.get_workspace_size()
    if size:
        with pytest.raises(RuntimeError, match=f"workspace: got none; allowed: {size} bytes"):
            graph(x)
    result = graph(x, workspace=torch.empty(size, dtype=torch.uint8, device="cuda"))
    wanted = torch.nn.functional.scaled_dot_product_attention(x, x, x, scale=1.0)
    torch.testing.assert_close(result, wanted, atol=1e-2, rtol=1e-2)
