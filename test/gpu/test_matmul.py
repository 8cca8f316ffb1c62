"""Matrix products on the GPU."""

from __future__ import annotations

import math

import pytest
import torch

import cudnn
from gpu.common import IO_TYPES, assert_accurate, gpu_graph
from support.graphs import HALF, MODES, like, run

pytestmark = pytest.mark.gpu
INT32 = cudnn.data_type.INT32


@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul(kind: torch.dtype, transposed: bool) -> None:
    a = torch.randn(3, 192, 256, device="cuda", dtype=kind)
    b = (
        torch.randn(3, 128, 256, device="cuda", dtype=kind).mT
        if transposed
        else torch.randn(3, 256, 128, device="cuda").to(kind)
    )
    graph = gpu_graph(io=kind)
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(first, second).set_output(True)
    (result,) = run(graph, {first: a, second: b}, c)
    assert_accurate(result, lambda dtype: a.to(dtype) @ b.to(dtype), kind)


def test_int8_is_exact() -> None:
    a = torch.randint(-128, 128, (2, 64, 256), device="cuda", dtype=torch.int8)
    b = torch.randint(-128, 128, (2, 128, 256), device="cuda", dtype=torch.int8).mT
    graph = gpu_graph(io=INT32, intermediate=INT32, compute=INT32)
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(first, second).set_output(True)
    (result,) = run(graph, {first: a, second: b}, c)
    assert torch.equal(result.double(), a.double() @ b.double())


def test_fp8() -> None:
    a = torch.randn(1, 64, 128, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(1, 96, 128, device="cuda").to(torch.float8_e4m3fn).mT
    graph = gpu_graph(io=torch.float8_e4m3fn)
    first, second = like(graph, a), like(graph, b)
    c = graph.matmul(first, second).set_output(True).set_data_type(HALF)
    (result,) = run(graph, {first: a, second: b}, c)
    # fp8 tensor cores of Hopper keep about 14 bits of a sum, so float16 is the type to compare with.
    assert_accurate(result, lambda dtype: a.to(dtype) @ b.to(dtype), torch.float16)


def test_broadcast_operand_and_prologue() -> None:
    a, b = torch.randn(4, 128, 64, device="cuda").half(), torch.randn(1, 64, 256, device="cuda").half()
    row_scale = torch.rand(4, 128, 1, device="cuda").half()
    graph = gpu_graph(io=torch.float16)
    first, second, scale = like(graph, a), like(graph, b), like(graph, row_scale)
    scaled = graph.mul(first, scale).set_data_type(HALF)
    c = graph.matmul(scaled, second).set_output(True)
    (result,) = run(graph, {first: a, second: b, scale: row_scale}, c)
    assert_accurate(
        result, lambda dtype: (a.to(dtype) * row_scale.to(dtype)).half().to(dtype) @ b.to(dtype), torch.float16
    )  # fmt: skip


@pytest.mark.parametrize("options", [{"negative_slope": 0.1}, {"lower_clip": -1.0}, {"upper_clip": 3.0}])
@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
def test_relu_with_options(kind: torch.dtype, options: dict[str, float]) -> None:
    """Engines over cuBLASLt ignore them."""
    a, b = torch.randn(1, 256, 240, device="cuda").to(kind), torch.randn(1, 240, 192, device="cuda").to(kind)
    graph = gpu_graph(io=kind)
    first, second = like(graph, a), like(graph, b)
    c = graph.relu(graph.matmul(first, second), **options).set_output(True)
    (result,) = run(graph, {first: a, second: b}, c)
    low, slope = options.get("lower_clip", 0.0), options.get("negative_slope", 0.0)

    def formula(dtype: torch.dtype) -> torch.Tensor:
        x = a.to(dtype) @ b.to(dtype)
        return torch.where(x > low, x, low + slope * (x - low)).clamp(max=options.get("upper_clip", float("inf")))

    assert_accurate(result, formula, kind)


def at(offset: int, *dims: int) -> torch.Tensor:
    """A packed tensor of float16, so many elements from an address that 16 bytes divide."""
    count = math.prod(dims)
    return torch.randn(count + offset, device="cuda").half()[offset:].view(dims)


def replayed(graph: cudnn.pygraph, data: dict[cudnn.tensor, torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """The result of a captured call, replayed with other data in the same places; ``data`` has the result too."""
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")
    graph.execute(data, workspace)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        graph.execute(data, workspace)
    for tensor in data.values():
        tensor.random_(-4, 5)
    result.fill_(float("nan"))
    captured.replay()
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
    """With rows of 45 bytes the cast runs in a plan of its own, for what cuDNN 9.19 makes of one plan is wrong."""
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
    workspace = torch.empty(max(1, restored.get_workspace_size()), dtype=torch.uint8, device="cuda")
    uids = [tensor.get_uid() for tensor in (first, second, c)]
    result.fill_(float("nan"))
    restored.execute(dict(zip(uids, (a, b, result), strict=True)), workspace)
    torch.testing.assert_close(result, (a.double() @ b.double()).half())
