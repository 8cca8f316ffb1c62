"""Matrix products on the GPU: data at any address, in captured calls. Random graphs (``test_fuzz``) have the others."""

from __future__ import annotations

import math

import pytest
import torch

import cudnn
from gpu.common import captured, gpu_graph, workspace
from support.graphs import HALF, MODES, like


def at(offset: int, *dims: int) -> torch.Tensor:
    """A contiguous float16 tensor, ``offset`` elements after a 16-byte aligned address."""
    count = math.prod(dims)
    return torch.randn(count + offset, device="cuda").half()[offset:].view(dims)


def replayed(graph: cudnn.pygraph, data: dict[cudnn.tensor, torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """The result of a captured call, replayed with other data in the same places; ``data`` has the result too."""
    space = workspace(graph)
    graph.execute(data, space)
    torch.cuda.synchronize()
    again = captured(lambda: graph.execute(data, space))
    for tensor in data.values():
        tensor.random_(-4, 5)
    result.fill_(float("nan"))
    again.replay()
    torch.cuda.synchronize()
    return result


@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 0, 0), (0, 4, 0), (0, 0, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("extents", [(96, 64, 128), (63, 5, 97)], ids=str)
def test_data_at_any_address(offsets: tuple[int, ...], extents: tuple[int, ...]) -> None:
    (m, n, k), (x, y, z) = extents, offsets
    a, b, result = at(x, 2, m, k), at(y, 2, k, n), at(z, 2, m, n)
    graph = gpu_graph(io=torch.float16)
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(first, second).set_output(True)
    graph.build(MODES)
    replayed(graph, {first: a, second: b, c: result}, result)
    torch.testing.assert_close(result, (a.double() @ b.double()).half())


@pytest.mark.parametrize("k", [44, 45])
def test_an_operand_that_is_widened(k: int) -> None:
    """With rows of 45 bytes the cast runs in a separate plan, because what cuDNN 9.19 makes of one plan is wrong."""
    a = torch.randint(-4, 5, (2, 32, k), device="cuda", dtype=torch.int8)
    b, result = at(0, 2, k, 100), at(0, 2, 32, 100)
    graph = gpu_graph(io=torch.float16)
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(graph.identity(first).set_data_type(HALF), second).set_output(True)
    graph.build(MODES)
    replayed(graph, {first: a, second: b, c: result}, result)
    torch.testing.assert_close(result, (a.double() @ b.double()).half())
    restored = cudnn.pygraph()
    restored.deserialize(graph.serialize())
    uids = [tensor.get_uid() for tensor in (first, second, c)]
    result.fill_(float("nan"))
    restored.execute(dict(zip(uids, (a, b, result), strict=True)), workspace(restored))
    torch.testing.assert_close(result, (a.double() @ b.double()).half())
