"""Precision of the reference executor: arithmetic in the compute type, every tensor rounded to its own type."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cudnn
from cudnn.reference.memory import rounded
from support.graphs import FLOAT, HALF, MODES, like, reference_graph, run

BF16, INT8, INT32, INT64 = (cudnn.data_type[name] for name in ("BFLOAT16", "INT8", "INT32", "INT64"))
E4M3, E5M2, FP4, BOOLEAN = (cudnn.data_type[name] for name in ("FP8_E4M3", "FP8_E5M2", "FP4_E2M1", "BOOLEAN"))


def cast(x: torch.Tensor, data_type: cudnn.data_type, out: torch.Tensor, compute: object = FLOAT) -> torch.Tensor:
    """``identity`` of x, stored as ``data_type``."""
    graph = reference_graph(compute=compute)
    tx = like(graph, x)
    y = graph.identity(tx, name="cast").set_output(True).set_data_type(data_type)
    graph.build(MODES)
    graph.execute({tx: x, y: out})
    return out


def test_virtual_half_tensors_round() -> None:
    """1 + 2**-12 is 1 in half precision: what is added to it is lost in the virtual tensor, not in the sum."""
    x = torch.full((4, 4), 2.0**-12)
    for intermediate, wanted in ((HALF, 0.0), (FLOAT, 2.0**-12)):
        graph = reference_graph(intermediate=intermediate)
        tx = like(graph, x)
        one = graph.tensor_scalar(1.0)
        y = graph.sub(graph.add(tx, one), one).set_output(True)
        (out,) = run(graph, {tx: x}, y)
        assert bool((out == wanted).all())


@pytest.mark.parametrize("data_type", [HALF, BF16])
def test_virtual_tensors_round_like_pytorch(data_type: cudnn.data_type) -> None:
    a, b, c = torch.randn(2, 16, 32), torch.randn(2, 32, 8), torch.randn(2, 16, 8)
    graph = reference_graph(intermediate=data_type)
    ta, tb, tc = like(graph, a), like(graph, b), like(graph, c)
    y = graph.add(graph.matmul(ta, tb), tc).set_output(True)
    (out,) = run(graph, {ta: a, tb: b, tc: c}, y)
    dtype = {HALF: torch.float16, BF16: torch.bfloat16}[data_type]
    assert torch.equal(out, (a @ b).to(dtype).float() + c)


def test_arithmetic_is_in_the_compute_type() -> None:
    """2048 + 1 is 2048 in half precision: the compute type decides, not the type of the inputs."""
    x, one = torch.full((2, 3), 2048.0, dtype=torch.float16), torch.ones(2, 3, dtype=torch.float16)
    for compute, wanted in ((FLOAT, 2049.0), (HALF, 2048.0)):
        graph = reference_graph(compute=compute)
        tx, to = like(graph, x), like(graph, one)
        y = graph.add(tx, to).set_output(True).set_data_type(FLOAT)
        (out,) = run(graph, {tx: x, to: one}, y)
        assert bool((out == wanted).all())


def test_double_precision() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    out = cast(x, cudnn.data_type.DOUBLE, torch.empty(3, 5, dtype=torch.float64), compute=torch.float64)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("data_type", "dtype", "limit"), [(E4M3, torch.float8_e4m3fn, 448.0), (E5M2, torch.float8_e5m2, 57344.0)]
)
def test_fp8_saturates(data_type: cudnn.data_type, dtype: torch.dtype, limit: float) -> None:
    x = torch.tensor(
        [[1e6, -1e6, float("inf"), float("-inf")], [limit, -limit, 0.0, 1.1], [300.0, 1e-9, -0.3, float("nan")]]
    )
    out = cast(x, data_type, torch.empty(3, 4, dtype=dtype)).float()
    assert out[0].tolist() == [limit, -limit, limit, -limit]
    assert torch.equal(out[1:].nan_to_num(7.0), x[1:].to(dtype).float().nan_to_num(7.0))
    assert bool(out[2, 3].isnan())


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [(INT8, torch.int8), (INT32, torch.int32), (INT64, torch.int64), (cudnn.data_type.UINT8, torch.uint8)],
)
def test_integers_round_to_nearest_even_and_saturate(data_type: cudnn.data_type, dtype: torch.dtype) -> None:
    x = torch.tensor([[0.5, 1.5, 2.5, 2.4, 2.6, 100.49]])
    assert cast(x, data_type, torch.empty(1, 6, dtype=dtype)).tolist() == [[0, 2, 2, 2, 3, 100]]
    if data_type is not INT64:
        huge = torch.tensor([[1e12, -1e12, 3e9, -3e9, 300.0, -300.0]])
        limits = torch.iinfo(dtype)
        wanted = [[max(limits.min, min(limits.max, int(value))) for value in huge[0].tolist()]]
        assert cast(huge, data_type, torch.empty(1, 6, dtype=dtype)).tolist() == wanted


def test_integer_arithmetic_saturates_on_storage() -> None:
    x = torch.tensor([[100, -100, 7]], dtype=torch.int32)
    graph = reference_graph(io=INT32, intermediate=INT32, compute=INT32)
    tx = like(graph, x)
    y = graph.mul(tx, tx).set_output(True).set_data_type(INT8)
    (out,) = run(graph, {tx: x}, y)
    assert out.tolist() == [[127, 127, 49]]


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=20))
def test_rounding_is_idempotent(values: list[float]) -> None:
    x = torch.tensor(values)
    for data_type in (HALF, BF16, E4M3, E5M2, FP4, INT8, INT32, BOOLEAN):
        once = rounded(x, data_type, "here")
        assert torch.equal(rounded(once.float(), data_type, "here").float(), once.float())


def test_fp4_rounds_to_nearest_even_and_saturates() -> None:
    x = torch.tensor([0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 99.0, -0.3, -2.5, -1e30, 1.0])
    wanted = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, -0.5, -2.0, -6.0, 1.0])
    assert torch.equal(rounded(x, FP4, "here"), wanted)


def test_fp4_elements_are_half_bytes() -> None:
    """Codes: the sign, two bits of exponent, one of mantissa; the first element of a pair in the low bits."""
    graph = reference_graph()
    x = graph.tensor([2, 3], [4, 1], FP4)  # the fourth element of each row is not of the tensor
    y = graph.neg(x).set_output(True).set_data_type(FP4).set_dim([2, 3]).set_stride([4, 1])
    z = graph.identity(x).set_output(True)
    graph.build(MODES)
    data, out, values = (
        torch.tensor([0x21, 0x43, 0x65, 0xF7], dtype=torch.uint8),
        torch.full((4,), 0x55),
        torch.empty(8),
    )
    out = out.to(torch.uint8)
    graph.execute({x: data.view(torch.float4_e2m1fn_x2), y: out, z: values[:7].as_strided((2, 3), (4, 1))})
    assert values[[0, 1, 2, 4, 5, 6]].tolist() == [0.5, 1.0, 1.5, 3.0, 4.0, 6.0]
    assert out.tolist() == [0xA9, 0x5B, 0xED, 0x5F]


def test_types_without_arithmetic_are_refused() -> None:
    results = {
        cudnn.data_type.INT4: torch.zeros(2, 4, dtype=torch.uint8),
        cudnn.data_type.INT8x4: torch.zeros(2, 8, 4, dtype=torch.int8),
    }
    for data_type, out in results.items():
        with pytest.raises(
            NotImplementedError, match=f"cast.*data type: got {data_type.name}; .*run this graph on a GPU"
        ):
            cast(torch.zeros(2, 8), data_type, out)


# Booleans.
def compared(x: torch.Tensor, out: Any) -> None:
    graph = reference_graph()
    tx = like(graph, x)
    y = graph.cmp_gt(tx, graph.tensor_scalar(0.0), name="positive").set_output(True).set_data_type(BOOLEAN)
    graph.build(MODES)
    graph.execute({tx: x, y: out})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_booleans_are_bytes(dtype: torch.dtype) -> None:
    x = torch.randn(2, 16, 3, 3)
    out = torch.full((2, 16, 3, 3), 1, dtype=dtype)
    compared(x, out)
    assert torch.equal(out.bool(), x > 0)
    assert set(out.view(torch.uint8).flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_booleans_are_bits_where_the_buffer_has_an_eighth_of_the_channels(dtype: torch.dtype) -> None:
    x = torch.randn(2, 24, 3, 5)
    packed = torch.zeros(2, 3, 3, 5, dtype=torch.uint8).to(memory_format=torch.channels_last)
    compared(x, packed.view(dtype))
    for channel in range(24):
        bit = (packed[:, channel // 8] >> (channel % 8)) & 1
        assert torch.equal(bit.bool(), x[:, channel] > 0)


def test_bits_are_read_back() -> None:
    x, other = torch.randn(2, 16, 3, 3), torch.randn(2, 16, 3, 3)
    packed = torch.zeros(2, 2, 3, 3, dtype=torch.uint8)
    compared(x, packed)
    graph = reference_graph()
    mask = graph.tensor(list(x.shape), list(x.stride()), BOOLEAN, name="mask")
    first, second = like(graph, x), like(graph, other)
    y = graph.binary_select(first, second, mask).set_output(True)
    (out,) = run(graph, {mask: packed, first: x, second: other}, y)
    assert torch.equal(out, torch.where(x > 0, x, other))


def test_logic_on_bytes_that_are_neither_zero_nor_one() -> None:
    raw = torch.tensor([[0, 1, 2, 255]], dtype=torch.uint8)
    graph = reference_graph(io=BOOLEAN, intermediate=BOOLEAN, compute=BOOLEAN)
    tx = graph.tensor([1, 4], [4, 1], BOOLEAN)
    y = graph.logical_not(tx).set_output(True)
    (out,) = run(graph, {tx: raw}, y)
    assert out.tolist() == [[True, False, False, False]]
