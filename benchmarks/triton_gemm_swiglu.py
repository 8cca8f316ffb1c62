"""GEMM + SwiGLU in Triton, a peer of ``cudnn bench gemm_swiglu``.

A persistent kernel. Operands and results move through TMA descriptors, and the next tile's operands load during the
epilogue. Accumulators are float32, for fp8 operands promoted at every K block. Autotuned per problem over a few tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 32  # interleaved columns: an even block is "up", an odd one "gate"


def configurations() -> list[triton.Config]:
    """Tiles and stages that fit into Hopper's shared memory together with the output buffers."""
    tiles = ((128, 256, 3, 8), (256, 128, 3, 8), (128, 128, 4, 4), (128, 256, 4, 8))
    return [
        triton.Config({"TILE_M": m, "TILE_N": n, "K_BYTES": 128, "GROUP_M": 8}, num_stages=stages, num_warps=warps)
        for m, n, stages, warps in tiles
    ]


@triton.jit
def gemm_swiglu_kernel(
    a,
    b,
    ab12,
    c,
    alpha,
    m,
    n,
    k,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    K_BYTES: tl.constexpr,
    GROUP_M: tl.constexpr,
    CTAS: tl.constexpr,
    KEEP: tl.constexpr,
):
    """c (m, n / 2) = up * gate * sigmoid(gate); ab12 (m, n) = alpha a (m, k) b (n, k)^T, written with ``KEEP``."""
    TILE_K: tl.constexpr = K_BYTES * 8 // a.dtype.element_ty.primitive_bitwidth
    PROMOTION: tl.constexpr = TILE_K if a.dtype.element_ty.primitive_bitwidth == 8 else 0
    source_a = tl.make_tensor_descriptor(a, [m, k], [k, 1], [TILE_M, TILE_K])
    source_b = tl.make_tensor_descriptor(b, [n, k], [k, 1], [TILE_N, TILE_K])
    target_c = tl.make_tensor_descriptor(c, [m, n // 2], [n // 2, 1], [TILE_M, TILE_N // 2])
    if KEEP:
        target_ab12 = tl.make_tensor_descriptor(ab12, [m, n], [n, 1], [TILE_M, TILE_N // 2])
    rows, columns = tl.cdiv(m, TILE_M), tl.cdiv(n, TILE_N)
    for tile in tl.range(tl.program_id(0), rows * columns, CTAS, flatten=True):
        group = tile // (GROUP_M * columns)
        group_rows = min(rows - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + tile % (GROUP_M * columns) % group_rows) * TILE_M
        column = tile % (GROUP_M * columns) // group_rows
        x = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
        for block in range(tl.cdiv(k, TILE_K)):
            tile_a = source_a.load([row, block * TILE_K])
            tile_b = source_b.load([column * TILE_N, block * TILE_K])
            x = tl.dot(tile_a, tile_b.T, x, max_num_imprecise_acc=PROMOTION)
        x *= alpha
        if KEEP:  # two stores of c's tile shape reuse one buffer, which leaves shared memory for another stage
            left, right = x.reshape(TILE_M, 2, TILE_N // 2).permute(0, 2, 1).split()
            target_ab12.store([row, column * TILE_N], left.to(ab12.dtype.element_ty))
            target_ab12.store([row, column * TILE_N + TILE_N // 2], right.to(ab12.dtype.element_ty))
        pairs = x.reshape(TILE_M, TILE_N // 64, 2, 32).permute(0, 1, 3, 2)
        up, gate = pairs.split()
        y = (up * gate * tl.sigmoid(gate)).reshape(TILE_M, TILE_N // 2)
        target_c.store([row, column * (TILE_N // 2)], y.to(c.dtype.element_ty))


_tuned = triton.autotune(configurations(), key=["m", "n", "k", "KEEP"])(gemm_swiglu_kernel)


def _workspace(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def gemm_swiglu(a: Any, b: Any, ab12: Any | None, c: Any, alpha: float = 1.0) -> None:
    """Writes c (m, n / 2) and, where it is given, ab12 (m, n); from a (m, k) and b (n, k), all of them row-major."""
    (m, k), n = a.shape, b.shape[0]
    triton.set_allocator(_workspace)
    ctas = torch.cuda.get_device_properties(a.device).multi_processor_count
    _tuned[(ctas,)](a, b, c if ab12 is None else ab12, c, alpha, m, n, k, CTAS=ctas, KEEP=ab12 is not None)
