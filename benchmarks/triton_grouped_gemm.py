"""A grouped GEMM in Triton, a peer of the grouped APIs in ``cudnn bench``.

A persistent kernel. Operands load through TMA descriptors; rows are stored through masked pointers, because experts
have any number of rows. Accumulators are float32. Every program derives the tile schedule from the experts' end rows on
the device. Autotuned per problem over a few tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def configurations() -> list[triton.Config]:
    """Tiles that fit into Hopper's shared memory."""
    tiles = ((128, 256, 64, 3, 8), (128, 128, 64, 4, 4))
    return [
        triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k}, num_stages=stages, num_warps=warps)
        for m, n, k, stages, warps in tiles
    ]


@triton.jit
def grouped_gemm_kernel(
    a,
    b,
    d,
    ends,
    m,
    n,
    k,
    experts,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CTAS: tl.constexpr,
):
    """d (m, n) = a (m, k) b[e] (n, k)^T for the rows of each expert e, which end at ``ends``."""
    source_a = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    source_b = tl.make_tensor_descriptor(b, [experts * n, k], [k, 1], [TILE_N, TILE_K])
    expert_ids = tl.arange(0, EXPERTS)
    last = tl.load(ends + expert_ids, mask=expert_ids < experts, other=0)
    first = tl.load(ends + expert_ids - 1, mask=(expert_ids > 0) & (expert_ids < experts), other=0)
    columns = tl.cdiv(n, TILE_N)
    tiles = tl.where(expert_ids < experts, tl.cdiv(last - first, TILE_M) * columns, 0)
    upto = tl.cumsum(tiles, 0)
    for tile in tl.range(tl.program_id(0), tl.sum(tiles, 0), CTAS, flatten=True):
        expert = tl.sum((upto <= tile).to(tl.int32), 0)
        is_expert = expert_ids == expert
        begin, end = tl.sum(tl.where(is_expert, first, 0), 0), tl.sum(tl.where(is_expert, last, 0), 0)
        tile_of_expert = tile - tl.sum(tl.where(is_expert, upto - tiles, 0), 0)
        row, column = begin + tile_of_expert // columns * TILE_M, tile_of_expert % columns * TILE_N
        x = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for block in range(tl.cdiv(k, TILE_K)):
            tile_a = source_a.load([row, block * TILE_K])
            tile_b = source_b.load([expert * n + column, block * TILE_K])
            x = tl.dot(tile_a, tile_b.T, x)
        rows, columns_n = row + tl.arange(0, TILE_M), column + tl.arange(0, TILE_N)
        target = d + rows[:, None].to(tl.int64) * n + columns_n[None, :]
        tl.store(target, x.to(d.dtype.element_ty), mask=(rows < end)[:, None] & (columns_n < n)[None, :])


_tuned = triton.autotune(configurations(), key=["m", "n", "k", "experts"])(grouped_gemm_kernel)


def _workspace(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def grouped_gemm(a: Any, b: Any, ends: Any, d: Any) -> None:
    """Writes d (m, n); from a (m, k), b (experts, n, k), all of them row-major, and int32 ends (experts,)."""
    (m, k), (experts, n, _) = a.shape, b.shape
    triton.set_allocator(_workspace)
    ctas = torch.cuda.get_device_properties(a.device).multi_processor_count
    power = triton.next_power_of_2(experts)
    _tuned[(ctas,)](a, b, d, ends, m, n, k, experts, EXPERTS=power, CTAS=ctas)
