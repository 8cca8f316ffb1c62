"""What the GPU tests share: the bound on errors, graphs that cuDNN runs, one of them with its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.pygraph import known_faults
from support.graphs import FLOAT, HALF, buffer, configurations

IO_TYPES = [torch.float16, torch.bfloat16, torch.float32]
_ROUNDING = {
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float32: 2**-10,
}  # of float32: tensor cores round to TF32


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether PyTorch may use TF32 for float32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def assert_accurate(result: torch.Tensor, formula: Callable[[torch.dtype], torch.Tensor], kind: torch.dtype) -> None:
    """Compares with float32 PyTorch.

    The error may be twice that of ``formula`` computed in ``kind``, plus the rounding of ``kind`` of the largest value.
    """
    with tf32(False):
        exact = formula(torch.float32).float()
    with tf32(True):
        typed = formula(kind).float()
    assert result.shape == exact.shape
    assert torch.isfinite(result.float()).all(), "not every element was written"
    error = (result.float() - exact).abs().max().item()
    # PyTorch may overflow inside a chain that is computed in float16 throughout: such elements bound nothing.
    typed = torch.where(torch.isfinite(typed), typed, exact)
    allowed = 2 * (typed - exact).abs().max().item() + _ROUNDING[kind] * exact.abs().max().item()
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"


def gpu_graph(io: object, intermediate: object = FLOAT, compute: object = FLOAT) -> cudnn.pygraph:
    """A graph that cuDNN runs."""
    return cudnn.pygraph(
        io_data_type=io, intermediate_data_type=intermediate, compute_data_type=compute, backend="cudnn"
    )


def every_plan(
    graph: cudnn.pygraph, data: Mapping[cudnn.tensor, torch.Tensor], *outputs: cudnn.tensor
) -> dict[str, list[torch.Tensor]]:
    """What each plan that can be built writes, by its name."""
    actual: dict[str, list[torch.Tensor]] = {}
    try:
        count = configurations(graph)
    except cudnn.cudnnGraphNotSupportedError as error:
        if library.version() > known_faults.SEEN_IN:
            raise
        pytest.skip(str(error))
    for index in range(count):
        try:
            graph.build_plan_at_index(index)
        except (RuntimeError, cudnn.cudnnGraphNotSupportedError):
            continue
        results = {tensor: buffer(tensor, "cuda") for tensor in outputs}
        workspace = torch.empty(max(graph.get_workspace_size_plan_at_index(index), 1), dtype=torch.uint8, device="cuda")
        graph.execute_plan_at_index({**data, **results}, workspace, index)
        actual[graph.get_plan_name_at_index(index)] = list(results.values())
    assert actual
    return actual


def assert_allocates_nothing_and_waits_for_nothing(call: Callable[[], object]) -> None:
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)  # about 0.1 s
    done = torch.cuda.Event()
    for _ in range(10):
        call()
    done.record()
    assert not done.query()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The CUDA graph of a call, which has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


BATCH, M, K, N = 2, 128, 64, 96
FP16: Any = {"dtype": torch.float16, "device": "cuda"}


def product(**options: Any) -> cudnn.pygraph:
    """A (uid 1) B (2) = C (3), not planned yet."""
    graph = cudnn.pygraph(io_data_type=HALF, intermediate_data_type=FLOAT, compute_data_type=FLOAT, **options)
    a = graph.tensor([BATCH, M, K], [M * K, K, 1], uid=1, name="a")
    b = graph.tensor([BATCH, K, N], [K * N, N, 1], uid=2, name="b")
    graph.matmul(a, b, name="mm").set_output(True).set_uid(3)
    return graph


def data(m: int = M) -> dict[int, torch.Tensor]:
    """Fresh operands of ``product``, and a result full of NaN."""
    operands = {1: torch.randn(BATCH, m, K, **FP16), 2: torch.randn(BATCH, K, N, **FP16)}
    return {**operands, 3: torch.full((BATCH, m, N), float("nan"), **FP16)}


def compare(pack: dict[int, torch.Tensor]) -> None:
    """On the current stream."""
    torch.testing.assert_close(pack[3].float(), pack[1].float() @ pack[2].float(), atol=3e-2, rtol=3e-3)


def check(pack: dict[int, torch.Tensor]) -> None:
    torch.cuda.synchronize()
    compare(pack)


def workspace(graph: cudnn.pygraph) -> torch.Tensor:
    return torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device="cuda")
