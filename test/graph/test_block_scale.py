"""Microscaling: quantize, dequantize, layouts in memory, block-scaled GEMMs; plans of cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cudnn
from cudnn.pygraph.lowering import Lowering
from support import block_scales
from support.graphs import FLOAT, HALF, MODES, configurations, like, planned_graph, reference_graph, run
from support.oracle import atoms_of, e8m0_code_above, e8m0_values, fp4_values, from_atoms, in_atoms, memory_of
from support.refusals import check_refused

KIND = cudnn.data_type
E4M3, E5M2, E8M0, FP4 = KIND.FP8_E4M3, KIND.FP8_E5M2, KIND.FP8_E8M0, KIND.FP4_E2M1
TILED = cudnn.tensor_reordering.F8_128x4
LARGEST = {E4M3: 448.0, E5M2: 57344.0, FP4: 6.0}


def padded(rows: int, blocks: int) -> tuple[int, int]:
    return -(-rows // 128) * 128, -(-blocks // 4) * 4


def tiled(codes: torch.Tensor) -> torch.Tensor:
    """Bytes of scales (batch, rows, blocks) as they lie in memory in the layout F8_128x4."""
    return memory_of(in_atoms(codes.permute(1, 2, 0)))


def from_tiles(memory: torch.Tensor, batch: int, rows: int, blocks: int) -> torch.Tensor:
    return from_atoms(atoms_of(memory, rows, blocks, batch), rows, blocks).permute(2, 0, 1)


def packed(nibbles: torch.Tensor) -> torch.Tensor:
    """FP4 codes along the last dimension, the even ones in the low bits."""
    return (nibbles[..., ::2] + 16 * nibbles[..., 1::2]).contiguous()


def nearest(x: torch.Tensor, dtype: object) -> torch.Tensor:
    """The value of a type that is nearest to x, the one of even code where two are."""
    if dtype is FP4:
        codes = torch.arange(8, dtype=torch.uint8)
        distance = (x.abs().unsqueeze(-1) - fp4_values(codes)).abs() + 1e-12 * (codes % 2)
        return fp4_values(codes)[distance.argmin(-1)] * x.sign()
    return x.float().to({E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}[dtype]).double()  # type: ignore[index]


def scale_above(x: torch.Tensor, dtype: object) -> torch.Tensor:
    """The least number of a type of scales that is not below x."""
    if dtype is E8M0:
        return e8m0_values(e8m0_code_above(x))
    every = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return every[torch.searchsorted(every, x)]


@pytest.mark.parametrize(("kind", "scale_kind", "size"), [(E4M3, E8M0, 32), (E5M2, E5M2, 32), (E4M3, E4M3, 16)])
def test_quantize_blocks_of_any_magnitude(kind: Any, scale_kind: Any, size: int) -> None:
    """Finite blocks have finite elements and scales; those with an infinity or a NaN dequantise to such there."""
    x = block_scales.values(size)[None]
    graph = reference_graph()
    tensor = like(graph, x)
    y, scale = graph.block_scale_quantize(tensor, size)
    y.set_output(True).set_data_type(kind)
    scale.set_output(True).set_data_type(scale_kind)
    graph.build(MODES)
    data, scales = torch.zeros(x.numel(), dtype=torch.uint8), torch.zeros(x.shape[1], dtype=torch.uint8)
    graph.execute({tensor: x, y: data, scale: scales})
    types = {E8M0: torch.float8_e8m0fnu, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
    values, factors = data.view(types[kind]).float().view(x.shape[1:]), scales.view(types[scale_kind]).float()
    finite = x[0].isfinite().all(1)
    assert values[finite].isfinite().all()
    assert factors[finite].isfinite().all()
    assert not (values * factors[:, None])[~x[0].isfinite()].isfinite().any()
    ordinary = block_scales.AMAX.index(5.0)
    torch.testing.assert_close((values * factors[:, None])[ordinary], x[0, ordinary], rtol=0.13, atol=1e-3)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 140),
    blocks=st.integers(1, 5),
    batch=st.integers(1, 2),
    seed=st.integers(0, 2**31),
    types=st.sampled_from([(E4M3, E8M0, 32), (E5M2, E8M0, 32), (FP4, E4M3, 16), (FP4, E8M0, 32)]),
    tiles=st.booleans(),
)
def test_quantize(rows: int, blocks: int, batch: int, seed: int, types: Any, tiles: bool) -> None:
    dtype, scale_dtype, size = types
    x = torch.randn(batch, rows, blocks * size, generator=torch.Generator().manual_seed(seed)) * 10
    x[0, 0, :size] = 0
    grouped = x.double().unflatten(-1, (-1, size))
    factors = scale_above((grouped.abs().amax(-1) / LARGEST[dtype]).float().double(), scale_dtype)
    expected = nearest((grouped / factors.unsqueeze(-1)).nan_to_num().flatten(-2), dtype)

    graph = reference_graph()
    tensor = like(graph, x)
    y, scale = graph.block_scale_quantize(tensor, size, name="q")
    y.set_output(True).set_data_type(dtype)
    scale.set_output(True).set_data_type(scale_dtype)
    if tiles:
        scale.set_reordering_type(TILED)
    graph.build(MODES)
    assert (y.get_name(), scale.get_name()) == ("q::Y", "q::scale")
    tall, wide = padded(rows, blocks) if tiles else (rows, blocks)
    assert (scale.get_dim(), scale.get_stride()) == ([batch, tall, wide], [tall * wide, wide, 1])
    data = torch.zeros(x.numel() // (2 if dtype is FP4 else 1), dtype=torch.uint8)
    scales = torch.zeros(batch * tall * wide, dtype=torch.uint8)
    graph.execute({tensor: x, y: data, scale: scales})

    codes = from_tiles(scales, batch, rows, blocks) if tiles else scales.view(batch, rows, blocks)
    found = e8m0_values(codes) if scale_dtype is E8M0 else codes.contiguous().view(torch.float8_e4m3fn).double()
    assert torch.equal(found, factors)
    if dtype is FP4:
        values = fp4_values(torch.stack([data & 15, data >> 4], -1).flatten())
    else:
        values = data.view(torch.float8_e4m3fn if dtype is E4M3 else torch.float8_e5m2).double()
    assert torch.equal(values.view(x.shape), expected)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 140),
    blocks=st.integers(1, 5),
    batch=st.integers(1, 2),
    seed=st.integers(0, 2**31),
    fp4=st.booleans(),
    tiles=st.booleans(),
    negative=st.booleans(),
    short=st.booleans(),
)
def test_dequantize(
    rows: int, blocks: int, batch: int, seed: int, fp4: bool, tiles: bool, negative: bool, short: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(110, 140, (batch, rows, blocks), generator=generator).to(torch.uint8)
    size, columns = 32, blocks * 32
    if fp4:
        nibbles = torch.randint(0, 16, (batch, rows, columns), generator=generator).to(torch.uint8)
        data, values = packed(nibbles), fp4_values(nibbles)
    else:
        data = torch.randn(batch, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        values = data.double()
    expected = values * e8m0_values(codes).repeat_interleave(size, -1) * (-1 if negative else 1)

    graph = reference_graph()
    x = graph.tensor([batch, rows, columns], [rows * columns, columns, 1], FP4 if fp4 else E4M3)
    tall, wide = padded(rows, blocks) if tiles else (rows, blocks)
    scale = graph.tensor(
        [batch, tall, wide],
        [tall * wide, wide, 1],
        E8M0,
        reordering_type=TILED if tiles else cudnn.tensor_reordering.NONE,
    )
    y = graph.block_scale_dequantize(x, scale, [size] if short else [1, size], negative).set_output(True)
    (result,) = run(graph, {x: data, scale: tiled(codes) if tiles else codes.view(torch.float8_e8m0fnu)}, y)
    assert torch.equal(result.double(), expected)


def test_the_wrapper_allocates_whole_tiles() -> None:
    x = torch.randn(1, 5, 64)
    with cudnn.Graph() as graph:
        y, scale = graph.block_scale_quantize(x, 32, name="q")
        y.set_output(True).set_data_type(E4M3)
        scale.set_output(True).set_data_type(E8M0).set_reordering_type(TILED)
    data, scales = graph(x)
    assert list(scales.shape) == [1, 128, 4]
    factors = e8m0_values(from_tiles(scales.view(torch.uint8).flatten(), 1, 5, 2))
    torch.testing.assert_close(data.double() * factors.repeat_interleave(32, 2), x.double(), rtol=2**-4, atol=0.01)


def test_scales_along_columns_and_squares() -> None:
    x = torch.randn(6, 8)
    for size, dims in (([2, 1], [3, 8]), ([3, 4], [2, 2]), ([2], [3, 8]), ([4], [6, 2])):
        scales = torch.rand(dims) + 0.5
        graph = reference_graph()
        tx, ts = like(graph, x), like(graph, scales)
        y = graph.block_scale_dequantize(tx, ts, size).set_output(True)
        (result,) = run(graph, {tx: x, ts: scales}, y)
        expected = [[x[r, c] * scales[r * dims[0] // 6, c * dims[1] // 8] for c in range(8)] for r in range(6)]
        assert torch.equal(result, torch.tensor(expected))


def test_transposed_quantisation_has_the_blocks_fastest() -> None:
    x = torch.randn(3, 64, 128)
    graph = reference_graph()
    tensor = like(graph, x)
    y, scale = graph.block_scale_quantize(tensor, 32, axis=1, transpose=True)
    y.set_output(True).set_data_type(E4M3)
    scale.set_output(True).set_data_type(E8M0)
    graph.validate()
    assert (y.get_dim(), y.get_stride()) == ([3, 64, 128], [64, 1, 192])
    assert (scale.get_dim(), scale.get_stride()) == ([3, 2, 128], [2, 1, 6])
    graph.build(MODES)
    data = torch.empty_strided((3, 64, 128), (64, 1, 192), dtype=torch.float8_e4m3fn)
    scales = torch.empty_strided((3, 2, 128), (2, 1, 6), dtype=torch.float8_e8m0fnu)
    graph.execute({tensor: x, y: data, scale: scales})
    grouped = x.double().view(3, 2, 32, 128)
    factors = scale_above(grouped.abs().amax(2) / 448.0, E8M0)
    assert torch.equal(scales.double(), factors)
    assert torch.equal(data.double(), nearest((grouped / factors.unsqueeze(2)).view(3, 64, 128), E4M3))

    graph = reference_graph()
    _, tiles = graph.block_scale_quantize(like(graph, x), 32, axis=1, transpose=True)
    tiles.set_reordering_type(TILED).set_output(True)
    graph.validate()
    assert (tiles.get_dim(), tiles.get_stride()) == ([3, 4, 128], [512, 1, 4])  # batch, row, block


@pytest.mark.parametrize(("dtype", "scale_dtype", "size"), [(FP4, E4M3, 16), (E4M3, E8M0, 32)], ids=["nvfp4", "mxfp8"])
def test_product_of_block_scaled_matrices(dtype: object, scale_dtype: object, size: int) -> None:
    m, n, k, batch = 40, 24, 96, 2
    blocks = k // size
    operands = []
    for rows in (m, n):
        if scale_dtype is E8M0:
            codes = torch.randint(125, 130, (batch, rows, blocks)).to(torch.uint8)
            factors = e8m0_values(codes)
        else:
            codes = (torch.rand(batch, rows, blocks) + 0.1).to(torch.float8_e4m3fn).view(torch.uint8)
            factors = codes.view(torch.float8_e4m3fn).double()
        nibbles = torch.randint(0, 16, (batch, rows, k)).to(torch.uint8)
        data = packed(nibbles) if dtype is FP4 else torch.randn(batch, rows, k).to(torch.float8_e4m3fn)
        values = fp4_values(nibbles) if dtype is FP4 else data.double()
        operands.append((data, tiled(codes), values * factors.repeat_interleave(size, -1)))
    (a, sa, va), (b, sb, vb) = operands

    graph = reference_graph(intermediate=FLOAT)
    tensors = block_scaled(graph, batch, m, n, k, dtype, scale_dtype, size)
    c = graph.matmul(
        graph.block_scale_dequantize(tensors[0], tensors[1], [1, size]),
        graph.block_scale_dequantize(tensors[2], tensors[3], [size, 1]),
    ).set_output(True)
    (result,) = run(graph, dict(zip(tensors, (a, sa, b, sb), strict=True)), c)
    rounding = 1e-6 * (va.abs() @ vb.abs().mT)  # of float32 sums of 96 products, in any order
    assert ((result.double() - va @ vb.mT).abs() <= rounding).all()


def block_scaled(
    graph: cudnn.pygraph,
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: object,
    scale_dtype: object,
    size: int,
    layout: cudnn.tensor_reordering = TILED,
) -> list[cudnn.tensor]:
    """A ``[batch, m, k]`` with its scales, B ``[batch, k, n]`` with its own, k fastest everywhere."""
    pad = padded if layout is TILED else lambda rows, blocks: (rows, blocks)
    (tall, wide), (tall_b, _) = pad(m, k // size), pad(n, k // size)
    return [
        graph.tensor([batch, m, k], [m * k, k, 1], dtype),
        graph.tensor([batch, tall, wide], [tall * wide, wide, 1], scale_dtype, reordering_type=layout),
        graph.tensor([batch, k, n], [n * k, 1, k], dtype),
        graph.tensor([batch, wide, tall_b], [tall_b * wide, 1, wide], scale_dtype, reordering_type=layout),
    ]


def reordered(graph: cudnn.pygraph, layout: str, dtype: object = E8M0) -> cudnn.tensor:
    return graph.tensor([4, 128, 4], [512, 4, 1], dtype, reordering_type=cudnn.tensor_reordering[layout])


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda g, x: g.block_scale_quantize(x, 5)[0], ValueError, ["block_size: got 5", "divisor of 6"]),
        (lambda g, x: g.block_scale_quantize(x, 2, axis=-1)[0], ValueError, ["axis: got -1", "0 to 1"]),
        (lambda g, x: g.block_scale_quantize(x, 2)[1].set_dim([4, 2]), ValueError, ["scale", "dim=[4, 3]"]),
        (lambda g, x: g.block_scale_quantize(x, 2)[0].set_dim([4, 2]), ValueError, ["output Y", "dim=[4, 6]"]),
        (lambda g, x: g.block_scale_dequantize(x, x, []), ValueError, ["block_size: got []", "1 to 2"]),
        (lambda g, x: g.block_scale_dequantize(x, x, [1, 0]), ValueError, ["positive"]),
        (lambda g, x: g.block_scale_dequantize(x, x, [1, 2]), ValueError, ["descale", "dim=[4, 3]", "[1, 2]"]),
        (lambda g, x: g.block_scale_dequantize(x, reordered(g, "F8_128x4"), [1, 2]), ValueError, ["as padding"]),
        (lambda g, x: g.block_scale_dequantize(x, torch.ones(4, 3), [1, 2]), TypeError, ["input scale"]),
    ],
)
def test_refusals(build: Callable[..., Any], error: type[Exception], words: list[str]) -> None:
    check_refused(lambda graph: build(graph, graph.tensor([4, 6], [6, 1])), error, ["block_scale", *words])


def test_what_the_reference_executor_does_not_have() -> None:
    x = torch.randn(4, 6)
    graph = reference_graph()
    tensor = like(graph, x)
    y, _ = graph.block_scale_quantize(tensor, 2)
    y.set_output(True)
    with pytest.raises(NotImplementedError, match="output Y: got FLOAT; allowed: FP8_E4M3"):
        run(graph, {tensor: x}, y)
    for layout, dtype in (("INT8x32", E8M0), ("F8_128x4", FLOAT)):
        graph = reference_graph()
        tensor = reordered(graph, layout, dtype)
        y = graph.identity(tensor).set_output(True)
        with pytest.raises(NotImplementedError, match=f"{layout} of {dtype.name}"):
            run(graph, {tensor: torch.zeros(8192, dtype=torch.uint8)}, y)


def product(graph: cudnn.pygraph, dtype: object, scale_dtype: object, size: int, **options: Any) -> None:
    a, sa, b, sb = block_scaled(graph, 1, 256, 128, 512, dtype, scale_dtype, size, **options)
    c = graph.matmul(graph.block_scale_dequantize(a, sa, [1, size]), graph.block_scale_dequantize(b, sb, [size, 1]))
    c.set_output(True).set_data_type(HALF)


@pytest.mark.deviceless_919
@pytest.mark.parametrize(("dtype", "scale_dtype", "size"), [(FP4, E4M3, 16), (E4M3, E8M0, 32)], ids=["nvfp4", "mxfp8"])
def test_cudnn_multiplies_tiled_formats_on_blackwell_only(
    dtype: object, scale_dtype: object, size: int, b200: Any, h200: Any
) -> None:
    graph = planned_graph(b200)
    product(graph, dtype, scale_dtype, size)
    assert configurations(graph) > 0
    graph = planned_graph(h200)
    product(graph, dtype, scale_dtype, size)
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration"):
        configurations(graph)


@pytest.mark.deviceless_919
@pytest.mark.parametrize(
    ("dtype", "scale_dtype", "size"), [(E4M3, FLOAT, 128), (E4M3, E8M0, 32), (KIND.INT8, FLOAT, 64), (HALF, FLOAT, 32)]
)
def test_cudnn_multiplies_scales_in_rows(dtype: object, scale_dtype: object, size: int, device_properties: Any) -> None:
    graph = planned_graph(device_properties)
    product(graph, dtype, scale_dtype, size, layout=cudnn.tensor_reordering.NONE)
    assert configurations(graph) > 0


@pytest.mark.deviceless_919
@pytest.mark.parametrize(("axis", "transpose"), [(2, False), (1, True)])
def test_cudnn_quantises_a_product_on_blackwell_only(axis: int, transpose: bool, b200: Any, h200: Any) -> None:
    def build(device: Any) -> cudnn.pygraph:
        graph = planned_graph(device)
        a, b = graph.tensor([3, 224, 512], [114688, 512, 1]), graph.tensor([3, 512, 96], [49152, 96, 1])
        y, scale = graph.block_scale_quantize(graph.matmul(a, b), 32, axis, transpose)
        y.set_output(True).set_data_type(E4M3)
        scale.set_output(True).set_data_type(E8M0).set_reordering_type(TILED)
        return graph

    assert configurations(build(b200)) > 0
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match="no engine configuration"):
        configurations(build(h200))


@pytest.mark.parametrize(("dims", "layout"), [([1, 256, 512], "NONE"), ([256, 512], "F8_128x4")])
def test_cudnn_takes_tiled_scales_for_rank_three_only(dims: list[int], layout: str, b200: Any) -> None:
    graph = planned_graph(b200)
    x = graph.relu(graph.tensor(dims, [131072, 512, 1][-len(dims) :]))
    y, scale = graph.block_scale_quantize(x, 32, name="q")
    y.set_output(True).set_data_type(E4M3)
    scale.set_output(True).set_data_type(E8M0).set_reordering_type(cudnn.tensor_reordering[layout])
    with pytest.raises(RuntimeError, match=rf"q \(block_scale_quantize\): output scale.*{layout} and rank {len(dims)}"):
        configurations(graph)


def test_negative_scales_need_cudnn_914(h200: Any) -> None:
    graph = planned_graph(h200)
    a, sa, b, _ = block_scaled(graph, 1, 256, 128, 512, E4M3, FLOAT, 128, cudnn.tensor_reordering.NONE)
    graph.matmul(graph.block_scale_dequantize(a, sa, [1, 128], True), b).set_output(True)
    graph.validate()
    with pytest.raises(cudnn.cudnnGraphNotSupportedError, match=r"is_negative_scale.*9\.14"):
        Lowering(graph.context, graph.nodes, 91301).run(graph.nodes)
