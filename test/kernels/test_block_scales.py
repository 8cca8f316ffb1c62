"""Scale factors of blocks whose largest magnitude is 0, subnormal, tiny, huge, infinite or NaN, in emulated kernels."""

from __future__ import annotations

import pytest
import torch

from cudnn.gemm import scale_values
from cudnn_kernels.epilogue import AddRow, QuantizeColumns, QuantizeRows, StoreColumns, StoreTile
from support import block_scales, kernel_inputs, oracle
from support.block_scales import AMAX, E4M3, E8M0, F32

FP4, E5M2 = "float4_e2m1fn_x2", "float8_e5m2"
LIMITS = {E4M3: 448.0, E5M2: 128.0, FP4: 6.0}


def run(arch: str, epilogue: tuple, row: torch.Tensor, m: int, norm: float, **more: object) -> dict:
    """What an epilogue makes of m rows of these values, and that the reference makes the same bits of them."""

    def change(a: torch.Tensor, b: torch.Tensor, arguments: dict) -> None:
        a.zero_()
        arguments["bias"].copy_(row[:, None])
        if isinstance(arguments.get("norm_const"), torch.Tensor):
            arguments["norm_const"].fill_(norm)
        arguments.update(more)

    options = {"epi_tile_n": 128} if any(isinstance(o, QuantizeRows) and o.vector > 64 for o in epilogue) else {}
    c = kernel_inputs.configuration((AddRow("bias", "float32"), *epilogue), **options)
    actual, expected, _ = kernel_inputs.run(arch, c, m, len(row), 8, change=change)
    for name, x in actual.items():
        if isinstance(x, torch.Tensor) and x.ndim < 6:  # scales in atoms: those of rows beyond the last are any
            assert torch.equal(kernel_inputs.bits(x), kernel_inputs.bits(expected[name])), name
    return actual


@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
@pytest.mark.parametrize(
    ("dtype", "kind", "vector", "norm", "power_of_two"),
    [
        (E4M3, F32, 128, 1.0, False),
        (E4M3, F32, 128, 1.0, True),
        (E4M3, F32, 128, 1e30, True),
        (E4M3, F32, 128, 1e-30, False),
        (E4M3, E8M0, 32, 1.0, False),
        (E5M2, E8M0, 32, 1e30, False),
        (FP4, E8M0, 16, 1.0, False),
        (FP4, E4M3, 16, 1.0, False),
        (FP4, E4M3, 16, 100.0, False),
    ],
)
def test_rows(arch: str, dtype: str, kind: str, vector: int, norm: float, power_of_two: bool) -> None:
    x = block_scales.values(vector)
    quantizer = QuantizeRows("s", dtype, kind, vector, power_of_two=power_of_two)
    actual = run(arch, (quantizer, StoreTile("d", "float32")), x.flatten(), 2, norm)
    scales, multipliers = block_scales.rules(LIMITS[dtype], kind, norm, power_of_two)
    values = actual["s"][0, :, 0]
    if kind != F32:
        codes = oracle.from_atoms(actual["s"], 2, len(AMAX))[0, :, 0]
        values = scale_values(codes.view(getattr(torch, kind)))
    assert block_scales.same(values, scales)
    made = actual["d"][0, :, 0].view(x.shape)
    assert block_scales.same(made, x * multipliers[:, None])
    rounded = made.clamp(-LIMITS[dtype], LIMITS[dtype]).nan_to_num(LIMITS[dtype] if dtype == FP4 else torch.nan)
    if norm == 1.0 or kind == F32:  # else the largest float32 bounds the multipliers of tiny blocks
        block_scales.check(x, rounded, scales, LIMITS[dtype], kind, norm)


@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
@pytest.mark.parametrize(("dtype", "kind"), [(E4M3, E8M0), (E5M2, E4M3)])
def test_columns(arch: str, dtype: str, kind: str) -> None:
    row = torch.tensor([*AMAX, *(0.0,) * (-len(AMAX) % 16)])
    epilogue = (QuantizeColumns("s", dtype, kind), StoreTile("d", "float32", value="columns"))
    actual = run(arch, epilogue, row, 64, 1.0)
    codes = oracle.from_atoms(actual["s"], len(row), 2)[: len(AMAX), 0, 0]
    scales, multipliers = block_scales.rules(LIMITS[dtype], kind)
    assert block_scales.same(scale_values(codes.view(getattr(torch, kind))), scales)
    assert block_scales.same(actual["d"][7, : len(AMAX), 0], row[: len(AMAX)] * multipliers)


@pytest.mark.parametrize("arch", kernel_inputs.ARCHES)
@pytest.mark.parametrize("norm", [1.0, 2.0**-140, 1e37])
def test_columns_of_four_bits(arch: str, norm: float) -> None:
    """The constant is huge or subnormal: a block of zeros stays one."""
    row = torch.tensor([*AMAX, *(0.0,) * (128 - len(AMAX))])
    data, scales = torch.full((64 * 128 // 2,), 0xFF, dtype=torch.uint8), torch.empty(64 * 8).to(torch.float8_e4m3fn)
    more = {"d": data, "s": scales, "norm_const": norm}
    actual = run(arch, (StoreColumns("d", "s", "norm_const"),), row, 64, norm, **more)
    places = [i % 32 * 4 + i // 32 % 4 for i in range(len(AMAX))]
    expected, _ = block_scales.rules(6.0, E4M3, norm)
    assert block_scales.same(actual["s"].view(128, 4, 1)[places, 0, 0], expected)
    codes = actual["d"].view(128, 32)
    assert not (codes[[i for i, amax in enumerate(AMAX) if amax == 0]] & 0x77).any()
    if norm == 1.0:
        assert (codes[AMAX.index(5.0)] == 0x77).all()  # 6
