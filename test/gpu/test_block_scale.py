"""Block-scaled matrix products on the GPU: on Hopper with scales in rows, on Blackwell with scales in tiles."""

from __future__ import annotations

import pytest
import torch

import cudnn
from cudnn.backend import library
from cudnn.pygraph.known_faults import SEEN_IN
from gpu.common import assert_accurate, gpu_graph
from support.graphs import HALF, like, run
from support.oracle import in_atoms

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
M, N, K = 256, 128, 512


def scales(*dims: int, kind: torch.dtype) -> torch.Tensor:
    if kind is E8M0:
        return torch.randint(124, 131, dims, dtype=torch.uint8, device="cuda").view(E8M0)
    return torch.rand(dims, device="cuda").to(kind) + 0.5


@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize(
    ("kind", "scale_kind", "size"),
    [(E4M3, torch.float32, 128), (E4M3, E8M0, 32), (torch.int8, torch.float32, 64), (torch.float16, torch.float32, 32)],
)
def test_rows_and_columns(kind: torch.dtype, scale_kind: torch.dtype, size: int, negative: bool) -> None:
    """One operand with negative scales: the sign of the result shows."""
    blocks = K // size
    a, b = (torch.randn(2, rows, K, device="cuda") for rows in (M, N))
    if kind is torch.int8:
        a, b = a * 40, b * 40
    a, b = a.to(kind), b.to(kind).mT
    sa, sb = scales(2, M, blocks, kind=scale_kind), scales(2, N, blocks, kind=scale_kind).mT
    graph = gpu_graph(HALF)
    tensors = [like(graph, value) for value in (a, sa, b, sb)]
    left = graph.block_scale_dequantize(tensors[0], tensors[1], [1, size], negative)
    right = graph.block_scale_dequantize(tensors[2], tensors[3], [size, 1])
    y = graph.matmul(left, right).set_output(True).set_data_type(torch.float32)
    if negative and library.version() <= SEEN_IN:
        with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="is_negative_scale: got True"):
            graph.validate()
        return
    try:
        (result,) = run(graph, dict(zip(tensors, (a, sa, b, sb), strict=True)), y)
    except cudnn.cudnnGraphNotSupportedError as error:
        if torch.cuda.get_device_capability()[0] == 9:
            raise
        pytest.skip(str(error)[:200])

    def formula(dtype: torch.dtype) -> torch.Tensor:
        wide = sa.to(dtype).repeat_interleave(size, 2), sb.to(dtype).repeat_interleave(size, 1)
        return (a.to(dtype) * wide[0]) @ (b.to(dtype) * wide[1]) * (-1 if negative else 1)

    assert_accurate(result, formula, torch.bfloat16)  # the type in which an engine may multiply


def test_tiles_on_blackwell() -> None:
    if torch.cuda.get_device_capability()[0] < 10:
        pytest.skip("cuDNN multiplies tiled block scales on Blackwell")
    a, b = (torch.randn(1, rows, K, device="cuda").to(E4M3) for rows in (M, N))
    sa, sb = (scales(1, rows, K // 32, kind=E8M0) for rows in (M, N))
    packed = [in_atoms(s.view(torch.uint8).permute(1, 2, 0)) for s in (sa, sb)]
    graph = gpu_graph(HALF)
    tiled = cudnn.tensor_reordering.F8_128x4
    ta, tb = like(graph, a), like(graph, b.mT)
    tsa = graph.tensor([1, M, K // 32], [M * K // 32, K // 32, 1], E8M0, reordering_type=tiled)
    tsb = graph.tensor([1, K // 32, N], [N * K // 32, 1, K // 32], E8M0, reordering_type=tiled)
    left, right = graph.block_scale_dequantize(ta, tsa, [1, 32]), graph.block_scale_dequantize(tb, tsb, [32, 1])
    y = graph.matmul(left, right).set_output(True).set_data_type(HALF)
    (result,) = run(graph, {ta: a, tsa: packed[0], tb: b, tsb: packed[1]}, y)
    wide = [(x.double() * s.double().repeat_interleave(32, 2)) for x, s in ((a, sa), (b, sb))]
    assert_accurate(result, lambda dtype: wide[0].to(dtype) @ wide[1].mT.to(dtype), torch.float16)
