"""Block scales in PyTorch against layouts and formats worked out index by index."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cudnn.gemm import (
    dequantize,
    empty_scales,
    pack_float4,
    pack_scales,
    quantize_rows,
    round_scales,
    round_to,
    scale_shape,
    scale_values,
    unpack_float4,
    unpack_scales,
)
from cudnn.gemm.scales import compute_block_scales
from support import block_scales, oracle
from support.oracle import E4M3, E5M2, E8M0, F32, FP4

SIZES = st.tuples(st.integers(1, 300), st.integers(1, 20), st.integers(1, 3))


@given(SIZES)
def test_atoms(size: tuple[int, int, int]) -> None:
    mn, blocks, l = size  # noqa: E741
    factors = torch.randint(0, 255, size).to(torch.uint8)
    packed = pack_scales(factors.view(E8M0))
    assert packed.dtype == E8M0
    assert packed.shape == scale_shape(mn, blocks * 32, l, 32) == (32, 4, -(-mn // 128), 4, -(-blocks // 4), l)
    rk, rm = packed.shape[4], packed.shape[2]
    assert packed.stride() == (16, 4, 512 * rk, 1, 512, 512 * rk * rm)
    assert torch.equal(packed.view(torch.uint8), oracle.in_atoms(factors))
    assert torch.equal(unpack_scales(packed, mn, blocks).view(torch.uint8), factors)
    # The offset in bytes, as the layout's definition has it.
    r, j, i = mn - 1, blocks - 1, l - 1
    offset = ((i * rm + r // 128) * rk + j // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + j % 4
    assert packed.view(torch.uint8).permute(5, 2, 4, 0, 1, 3).flatten()[offset] == factors[r, j, i]


def test_empty_scales_are_zero_bytes() -> None:
    scales = empty_scales(130, 96, 2, 32, E8M0)
    assert scales.shape == (32, 4, 2, 4, 1, 2)
    assert not scales.view(torch.uint8).any()


def test_four_bit_values() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] + 16 * codes[1::2]).view(1, 8, 1)
    assert unpack_float4(packed).flatten().tolist() == oracle.fp4_values(codes).tolist()
    assert unpack_float4(packed.view(FP4)).shape == (1, 16, 1)


@given(st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=40).filter(lambda values: len(values) % 2 == 0))
def test_rounding_to_four_bits(values: list[float]) -> None:
    """To the nearest of all 16 values; of two that are equally near, to the one with an even code."""
    x = torch.tensor(values, dtype=torch.float32).view(1, -1, 1)
    actual = unpack_float4(pack_float4(x)).flatten()
    table = oracle.fp4_values(torch.arange(8, dtype=torch.uint8))
    distance = (x.double().abs().view(-1, 1) - table).abs()
    nearest = [min(range(8), key=lambda code: (float(row[code]), code % 2)) for row in distance]
    assert torch.equal(actual.abs().double(), table[nearest])
    assert torch.equal(torch.signbit(actual), torch.signbit(x.flatten()))


@pytest.mark.parametrize("size", [(5, 64, 1), (1, 64, 2), (5, 64, 3), (1, 32, 1)])
@pytest.mark.parametrize("dtype", [E4M3, FP4])
def test_quantised_operands_are_k_major_with_exact_strides(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """In dimensions of size 1 too: the fused GEMMs compare them."""
    m, n, l = size  # noqa: E741
    for x in (torch.randn(size), torch.randn(l, n, m).permute(2, 1, 0), torch.randn(l, m, n).permute(1, 2, 0)):
        q, _ = quantize_rows(x, dtype, E8M0, 32)
        columns = n // 2 if dtype == FP4 else n
        assert (q.shape, q.stride()) == ((m, columns, l), (columns, 1, m * columns))


def test_packed_layout_is_k_major_whatever_the_source() -> None:
    x = torch.randn(2, 8, 6).permute(2, 1, 0)
    packed = pack_float4(x)
    assert (packed.shape, packed.stride()) == ((6, 4, 2), (4, 1, 24))
    assert torch.equal(unpack_float4(packed), unpack_float4(pack_float4(x.contiguous())))


@given(st.floats(0, 2.0**127, width=32))
def test_e8m0_rounds_up(value: float) -> None:
    x = torch.tensor([value])
    assert torch.equal(round_scales(x, E8M0).view(torch.uint8), oracle.e8m0_code_above(x.double()))


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (0.0, 0),
        (2.0**-149, 0),
        (2.0**-127, 0),
        (2.0**-127 * 1.0000002, 1),
        (2.0**-126, 1),
        (2.0**-126 * 1.0000002, 2),
        (1.0, 127),
        (1.5, 128),
        (2.0**127, 254),
        (3e38, 254),
        (float("inf"), 254),
        (float("nan"), 255),
    ],
)
def test_e8m0_at_its_ends(value: float, byte: int) -> None:
    assert int(round_scales(torch.tensor([value]), E8M0).view(torch.uint8)) == byte


@pytest.mark.parametrize("norm", [1.0, 100.0, 1e30, 1e-30])
@pytest.mark.parametrize(("kind", "power_of_two"), [(E8M0, False), (E4M3, False), (F32, False), (F32, True)])
@pytest.mark.parametrize("limit", [448.0, 128.0, 6.0])
def test_scales_of_any_magnitude(limit: float, kind: torch.dtype, power_of_two: bool, norm: float) -> None:
    """0, subnormal, tiny, largest, infinity, NaN: the rule, also in float64, up to the rounding of float32."""
    amax, name = torch.tensor(block_scales.AMAX), str(kind).removeprefix("torch.")
    scales, multipliers = compute_block_scales(amax, limit, kind, norm, power_of_two)
    expected = block_scales.rules(limit, name, norm, power_of_two)
    assert block_scales.same(scale_values(scales), expected[0])
    assert block_scales.same(multipliers, expected[1])
    wide, _ = compute_block_scales(amax.double(), limit, kind, norm, power_of_two)
    finite = amax.isfinite()
    assert scale_values(wide)[finite].isfinite().all()
    assert torch.equal(scale_values(wide).isnan(), scale_values(scales).isnan())


@pytest.mark.parametrize(
    ("dtype", "limit", "kind", "vector"),
    [
        (E4M3, 448.0, E8M0, 32),
        (E5M2, 128.0, E8M0, 32),
        (E4M3, 448.0, F32, 128),
        (torch.float4_e2m1fn_x2, 6.0, E8M0, 16),
        (torch.float4_e2m1fn_x2, 6.0, E4M3, 16),
    ],
)
def test_quantised_rows_of_any_magnitude(dtype: torch.dtype, limit: float, kind: torch.dtype, vector: int) -> None:
    x = block_scales.values(vector)
    q, scales = quantize_rows(x[..., None], dtype, kind, vector)
    q = unpack_float4(q) if dtype == torch.float4_e2m1fn_x2 else q.float()
    scales = scales[:, 0, 0] if kind == F32 else scale_values(unpack_scales(scales, len(x), 1))[:, 0, 0]
    name = str(kind).removeprefix("torch.")
    assert block_scales.same(scales, block_scales.rules(limit, name)[0])
    block_scales.check(x, q[..., 0], scales, limit, name)


def test_e4m3_scales_saturate() -> None:
    assert round_scales(torch.tensor([1e6, 0.0, 1.0625]), E4M3).float().tolist() == [448.0, 0.0, 1.0]
    assert round_scales(torch.tensor([torch.inf, torch.nan]), E4M3).float().isnan().all()


def test_scale_values() -> None:
    codes = torch.tensor([0, 1, 127, 254, 255], dtype=torch.uint8)
    for scales in (codes.view(E8M0), codes.view(torch.int8)):
        assert scale_values(scales)[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
        assert scale_values(scales)[4].isnan()
    assert scale_values(torch.tensor([1.5]).to(E4M3)).tolist() == [1.5]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_saturates(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([1e9, -1e9, float("inf"), largest, 1.0])
    assert round_to(x, dtype).float().tolist() == [largest, -largest, largest, largest, 1.0]
    assert round_to(torch.tensor([float("nan")]), dtype).float().isnan().all()


@pytest.mark.parametrize(
    ("dtype", "limit", "scale", "vector"),
    [
        (E4M3, 448.0, E8M0, 32),
        (E5M2, 128.0, E8M0, 32),
        (FP4, 6.0, E8M0, 32),
        (FP4, 6.0, E8M0, 16),
        (FP4, 6.0, E4M3, 16),
    ],
)
@pytest.mark.parametrize("norm", [1.0, 0.01])
def test_quantize_rows(dtype: torch.dtype, limit: float, scale: torch.dtype, vector: int, norm: float) -> None:
    m, n, l = 5, 80, 2  # noqa: E741
    x = torch.randn(m, n, l)
    x[0] *= 100
    x[1, :vector] = 0
    q, factors = quantize_rows(x, dtype, scale, vector, torch.tensor([norm]))
    blocks = -(-n // vector)
    codes = oracle.from_atoms(factors, m, blocks)
    for row in range(m):
        for block in range(blocks):
            part = x[row, block * vector : (block + 1) * vector].double()
            largest = part.abs().amax(0) * norm / limit
            code = codes[row, block]
            value = oracle.e8m0_values(code) if scale == E8M0 else code.view(E4M3).double()
            if scale == E8M0:
                assert bool(((value >= largest * (1 - 1e-6)) & (value < 2 * largest + 2.0**-126)).all())
            else:
                assert bool(((value - largest).abs() <= torch.maximum(largest / 16, torch.tensor(2.0**-10))).all())
    back = dequantize(q, factors, vector).double() / norm
    step = {E4M3: 1 / 8, E5M2: 1 / 4, FP4: 1 / 2}[dtype]  # twice the relative spacing, for scales that were rounded
    block_max = torch.nn.functional.pad(x, (0, 0, 0, -n % vector)).unflatten(1, (-1, vector)).abs().amax(2)
    bound = (step * block_max.repeat_interleave(vector, 1)[:, :n]).double()
    coarse = scale == E4M3 and norm < 1  # scale factors this small have few bits left
    assert coarse or bool(((back - x.double()).abs() <= bound + 1e-30).all())
    assert not dequantize(q, factors, vector)[1, :vector].any()
    assert not oracle.in_atoms(codes).ne(factors.view(torch.uint8)).any()  # padding is 0


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
def test_float32_factors_of_128(rows: int, power_of_two: bool) -> None:
    """Of rows or of blocks, the last ones partial; where ``torch._scaled_mm`` looks for them."""
    m, n, l = 200, 400, 2  # noqa: E741
    x = torch.randn(m, n, l)
    x[:128, :128] = 0
    q, factors = quantize_rows(x, E4M3, F32, 128, rows=rows, power_of_two=power_of_two)
    assert factors.shape == (-(-m // rows), 4, l)
    assert factors[..., 0].stride() == ((1, m) if rows == 1 else (4, 1))
    for i, j in [(0, 0), (0, 1), (factors.shape[0] - 1, 3)]:
        block = x[i * rows : (i + 1) * rows, j * 128 : (j + 1) * 128, 1].double()
        exact = float(block.abs().max()) / 448
        requested = 2.0 ** math.ceil(math.log2(exact)) if power_of_two and exact else exact
        assert float(factors[i, j, 1]) == pytest.approx(requested, rel=0 if power_of_two else 1e-6)
    back = dequantize(q, factors, 128)
    step = (factors * 32).repeat_interleave(rows, 0)[:m].repeat_interleave(128, 1)[:, :n]  # of e4m3 at 448
    assert bool(((back - x).abs() <= 0.5001 * step).all())


def test_dequantize_is_the_inverse_of_the_formats() -> None:
    for a in (
        oracle.scaled(40, 64, 2, FP4, E8M0, 16),
        oracle.scaled(40, 64, 2, FP4, E4M3, 16),
        oracle.scaled(33, 96, 1, E4M3, E8M0, 32),
        oracle.scaled(33, 96, 1, E5M2, E8M0, 32, major="mn"),
    ):
        assert a.scales is not None
        vector = 32 if a.tensor.dtype in (E4M3, E5M2) else 16
        assert torch.equal(dequantize(a.tensor, a.scales, vector).double(), a.values)
