"""Grouped GEMMs of experts on the GPU."""

from __future__ import annotations

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.pygraph.known_faults import SEEN_IN
from gpu.common import IO_TYPES, assert_accurate, every_plan, gpu_graph
from support.graphs import evaluate, like, run

MODE = cudnn.moe_grouped_matmul_mode
# Segments that are empty, of one row, off every tile's edge, and to the end.
OFFSETS = {"even": [0, 128, 256, 384], "uneven": [0, 1, 1, 333], "first empty": [0, 0, 200, 511]}
ROWS, K, N = 512, 256, 128


def operands(kind: torch.dtype, first: list[int], tokens: int = ROWS) -> list[torch.Tensor]:
    """Tokens, weights ``[E, K, N]`` with K fastest, offsets."""
    token = torch.randn(1, tokens, K, device="cuda").to(kind)
    weight = torch.randn(len(first), N, K, device="cuda").to(kind).mT
    return [token, weight, torch.tensor(first, dtype=torch.int32, device="cuda").view(-1, 1, 1)]


def product(rows: torch.Tensor, weight: torch.Tensor, first: list[int]) -> torch.Tensor:
    ends = [*first[1:], rows.shape[0]]
    return torch.cat([rows[a:b] @ weight[e] for e, (a, b) in enumerate(zip(first, ends, strict=True))])[None]


@pytest.mark.parametrize("kind", IO_TYPES, ids=str)
@pytest.mark.parametrize("name", OFFSETS)
def test_rows_by_expert(name: str, kind: torch.dtype) -> None:
    first = OFFSETS[name]
    values = operands(kind, first)
    _, (result,) = evaluate("moe_grouped_matmul", *values, graph=gpu_graph(kind))
    assert_accurate(result, lambda dtype: product(values[0][0].to(dtype), values[1].to(dtype), first), kind)


@pytest.mark.parametrize("name", OFFSETS)
def test_gathered_rows(name: str) -> None:
    first, kind = OFFSETS[name], torch.bfloat16
    values = operands(kind, first, ROWS // 2)
    index = torch.randint(ROWS // 2, (1, ROWS, 1), dtype=torch.int32, device="cuda")
    graph = gpu_graph(kind)
    tensors = [like(graph, value) for value in (*values, index)]
    y = graph.moe_grouped_matmul(*tensors, mode=MODE.GATHER).set_output(True)
    if library.version() <= SEEN_IN:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="mode: got GATHER"):
            graph.validate()
        return
    (result,) = run(graph, dict(zip(tensors, (*values, index), strict=True)), y)
    rows = values[0][0][index.flatten().long()]
    assert_accurate(result, lambda dtype: product(rows.to(dtype), values[1].to(dtype), first), kind)


def test_scattered_rows() -> None:
    """Row r goes to output row ``token_index[r] * top_k + token_ks[r]``: what the reference executor does."""
    first, kind = OFFSETS["uneven"], torch.float16
    values = operands(kind, first)
    place = torch.randperm(ROWS, device="cuda").int().view(1, ROWS, 1)
    values += [place // 2, place % 2]
    try:
        _, (result,) = evaluate("moe_grouped_matmul", *values, mode=MODE.SCATTER, top_k=2, graph=gpu_graph(kind))
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error)[:200])

    def formula(dtype: torch.dtype) -> torch.Tensor:
        rows = product(values[0][0].to(dtype), values[1].to(dtype), first)
        return torch.empty_like(rows).index_copy_(1, place.flatten().long(), rows)

    assert_accurate(result, formula, kind)


def test_every_plan() -> None:
    first, kind = OFFSETS["uneven"], torch.float16
    values = operands(kind, first)
    graph = gpu_graph(kind)
    tensors = [like(graph, value) for value in values]
    y = graph.moe_grouped_matmul(*tensors).set_output(True)
    for (result,) in every_plan(graph, dict(zip(tensors, values, strict=True)), y).values():
        assert_accurate(result, lambda dtype: product(values[0][0].to(dtype), values[1].to(dtype), first), kind)


def test_gradient_of_the_weight() -> None:
    first, kind = OFFSETS["uneven"], torch.bfloat16
    token, _, offsets = operands(kind, first)
    dy = torch.randn(1, ROWS, N, device="cuda").to(kind)
    try:
        _, (result,) = evaluate("moe_grouped_matmul_bwd", dy, token, offsets, graph=gpu_graph(kind))
    except cudnn.cudnnGraphNotSupportedError as error:
        pytest.skip(str(error)[:200])

    def formula(dtype: torch.dtype) -> torch.Tensor:
        ends = [*first[1:], ROWS]
        parts = [token[0, a:b].to(dtype).T @ dy[0, a:b].to(dtype) for a, b in zip(first, ends, strict=True)]
        return torch.stack(parts)

    assert_accurate(result, formula, kind)
