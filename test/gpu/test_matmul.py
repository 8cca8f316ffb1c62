"""Matrix products on the GPU."""

from __future__ import annotations

import pytest
import torch

import cudnn
from gpu.common import IO_TYPES, assert_accurate, gpu_graph
from support.graphs import HALF, like, run

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
