"""Operands dequantised and transposed in the emulator, with race detection, against PyTorch's own arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from cudnn.runtime.launch import emulate, emulation
from cudnn_kernels.gemm.configuration import OPERANDS, OperandConfiguration
from cudnn_kernels.gemm.problem import BlockScale, Operand
from support import oracle
from support.compiled import compile_kernel
from support.selection import brief

ptx_emulator = pytest.importorskip("ptx_emulator")

SOURCE = "cudnn_kernels.gemm.prepare_operand:PrepareOperand"
MULTIPROCESSORS = 3
PLAIN = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]
SCALED = [operand for operand in sorted(OPERANDS, key=str) if operand[2]]

GROUPED = [(o,) for o in SCALED if o[0] != "float8_e5m2"]


def configured(
    dtype: str, major: str, scale: str | None = None, vector: int = 0, **options: Any
) -> OperandConfiguration:
    return OperandConfiguration(Operand(dtype, major, BlockScale(scale, vector) if scale else None), **options)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def with_major(x: torch.Tensor, major: str) -> torch.Tensor:
    """(l, mn, k) as (mn, k, l), k or mn contiguous."""
    return x.permute(1, 2, 0) if major == "k" else x.transpose(1, 2).contiguous().permute(2, 1, 0)


def atoms(codes: torch.Tensor) -> torch.Tensor:
    """Scale codes (l, mn, blocks) in atoms; what no operand reaches is a NaN."""
    return oracle.in_atoms(codes.permute(1, 2, 0), beyond=255)


def scale_values(codes: torch.Tensor, dtype: str) -> torch.Tensor:
    if dtype == "float8_e4m3fn":
        return codes.view(torch.float8_e4m3fn).float()
    return torch.where(codes == 255, torch.nan, torch.exp2(codes.double() - 127)).float()


def run(configuration: OperandConfiguration, *tensors: torch.Tensor, **options: Any) -> Any:
    with emulation("sm_90a", races=True, **options) as report:
        emulate(SOURCE, configuration, "sm_90a", *tensors, MULTIPROCESSORS, 0)
    (launch,) = report.launches
    return launch


def matrices(c: OperandConfiguration, codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (l, mn, k) and scale codes (l, mn, blocks) as the kernel takes them."""
    if c.source.packed > 1:
        source = with_major(codes[:, :, ::2] | codes[:, :, 1::2] << 4, "k")
    else:
        source = with_major(codes, c.source.major).view(getattr(torch, c.source.dtype))
    return source, atoms(scales).view(getattr(torch, c.source.scale.dtype))


def dequantised(
    configuration: OperandConfiguration, codes: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel makes of codes (l, mn, k) and scale codes (l, mn, blocks), and what is right."""
    c, fp4 = configuration, configuration.source.packed > 1
    values = oracle.fp4_values(codes).float() if fp4 else codes.view(getattr(torch, c.source.dtype)).float()
    target = with_major(torch.full_like(values, 12345, dtype=torch.bfloat16), c.source.major)
    run(c, *matrices(c, codes, scales), target)
    factor = scale_values(scales, c.source.scale.dtype).repeat_interleave(c.source.scale.vector, dim=2)
    factor = factor[:, :, : values.shape[2]]
    return target, (values * factor).bfloat16().permute(1, 2, 0)


def random_codes(c: OperandConfiguration, l: int, mn: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: E741
    codes = torch.randint(0, 16 if c.source.dtype == "float4_e2m1fn_x2" else 256, (l, mn, k), dtype=torch.uint8)
    return codes, torch.randint(0, 256, (l, mn, -(-k // c.source.scale.vector)), dtype=torch.uint8)


def assert_same_bits(target: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN is NaN whatever its bits; zeros have signs."""
    nan = expected.isnan()
    assert torch.equal(target.isnan(), nan)
    assert torch.equal(target.view(torch.int16)[~nan], expected.contiguous().view(torch.int16)[~nan])


@pytest.mark.parametrize("operand", brief([(operand,) for operand in SCALED], 0, 2, 4), ids=str)
def test_every_code_times_every_scale(operand: tuple[Any, ...]) -> None:
    """Infinities, NaN, subnormals of the source, the scale and the result included."""
    c = configured(*operand, resident=1)
    scales = torch.arange(256, dtype=torch.uint8).reshape(1, 256, 1).expand(1, 256, 256 // c.source.scale.vector)
    codes = torch.arange(256, dtype=torch.uint8).expand(1, 256, 256)
    target, expected = dequantised(c, codes % 16 if c.source.dtype == "float4_e2m1fn_x2" else codes, scales)
    assert_same_bits(target, expected)
    small = expected.isfinite() & (expected.abs() < torch.finfo(torch.bfloat16).tiny) & (expected != 0)
    assert expected.isnan().any()
    assert bool(small.any()) == (c.source.scale.dtype == "float8_e8m0fnu")


@pytest.mark.parametrize(("mn", "k", "l"), [(1, 32, 1), (144, 288, 2), (272, 96, 3), (37, 1056, 1)])
@pytest.mark.parametrize("operand", [o for o in SCALED if o[0] != "float8_e5m2"], ids=str)
def test_dequantised_sizes(operand: tuple[Any, ...], mn: int, k: int, l: int) -> None:  # noqa: E741
    """Partial tiles, more tiles than CTAs."""
    c = configured(*operand, resident=1)
    if c.source.major == "mn":
        mn, k = -(-mn // 16) * 16, k - 13
    assert_same_bits(*dequantised(c, *random_codes(c, l, mn, k)))


@pytest.mark.parametrize("operand", brief(GROUPED, 0), ids=str)
def test_dequantised_from_pointers(operand: tuple[Any, ...]) -> None:
    """Matrices and their scale factors at any address."""
    c = configured(*operand, resident=1)
    codes, scales = random_codes(c, 3, 144, 320)
    pairs = [matrices(c, codes[i : i + 1], scales[i : i + 1]) for i in range(3)]
    target = with_major(torch.full(codes.shape, 12345, dtype=torch.bfloat16), c.source.major)
    tables = (torch.tensor([x.data_ptr() for x in column]) for column in zip(*pairs, strict=True))
    run(replace(c, source=replace(c.source, pointers=True)), *tables, target)
    for i in range(3):
        assert_same_bits(target[:, :, i : i + 1], dequantised(c, codes[i : i + 1], scales[i : i + 1])[1])


@pytest.mark.parametrize("operand", brief(GROUPED, len(GROUPED) - 1), ids=str)
def test_dequantised_parts_of_k(operand: tuple[Any, ...]) -> None:
    """Every segment has separate scale factors, and elements after the last segment are not read."""
    c = configured(*operand, resident=1, varlen_k=True)
    vector, (mn, k) = c.source.scale.vector, (272, 1024)
    ends = [part * vector for part in (0, 4, 4, 16, 18)]
    codes, scales = random_codes(c, 1, mn, k)
    dense = configured(*operand, resident=1)
    _, expected = dequantised(dense, codes, scales)
    source, factors = matrices(c, codes, scales)
    by_part = oracle.atoms_by_part(factors, ends, vector, 0xFF)
    target = with_major(torch.full((1, mn, k), 12345, dtype=torch.bfloat16), c.source.major)
    run(c, source, by_part, torch.tensor(ends, dtype=torch.int32), target)
    assert_same_bits(target[:, : ends[-1]], expected[:, : ends[-1]])


@pytest.mark.parametrize(("mn", "k", "l"), brief([(16, 16, 1), (144, 288, 2), (37, 1056, 1)], 1))
@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_widened(dtype: str, major: str, mn: int, k: int, l: int) -> None:  # noqa: E741
    """Every code comes through: to the same value, infinity and NaN too."""
    if major == "mn":
        mn = -(-mn // 16) * 16
    codes = torch.randint(0, 256, (l, mn, k), dtype=torch.uint8)
    codes.view(-1)[:256] = torch.arange(256)
    values = codes.view(getattr(torch, dtype))
    target = with_major(torch.full(codes.shape, 12345, dtype=torch.bfloat16), major)
    run(OperandConfiguration(Operand(dtype, major), resident=1, widen=True), with_major(values, major), target)
    assert_same_bits(target, values.bfloat16().permute(1, 2, 0))


@pytest.mark.parametrize(
    "operand", [Operand("bfloat16"), Operand("float8_e4m3fn", "k", BlockScale("float8_e8m0fnu", 32))], ids=str
)
def test_what_cannot_be_widened(operand: Operand) -> None:
    with pytest.raises(ValueError, match="got neither float8_e4m3fn nor float8_e5m2 without scale factors"):
        OperandConfiguration(operand, widen=True)


@pytest.mark.parametrize("major", ["k", "mn"])
def test_widening_spills_nothing(major: str) -> None:
    from cudnn_kernels import fakes
    from cudnn_kernels.gemm import prepare_operand as module

    c = OperandConfiguration(Operand("float8_e4m3fn", major), widen=True)
    compiled = compile_kernel("sm_90a", module.PrepareOperand(c), *fakes.arguments(c))
    assert compiled.stack == 0
    assert set(re.findall(r"st\.global\S*", compiled.ptx)) == {"st.global.v4.b32"}


@pytest.mark.parametrize(("mn", "k", "l"), brief([(16, 16, 1), (144, 80, 2), (304, 272, 3), (16, 400, 1)], 1))
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_transposed(dtype: torch.dtype, mn: int, k: int, l: int) -> None:  # noqa: E741
    """All bits stay, NaN's too; no two threads of a warp meet in a bank of shared memory."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    codes = torch.randint(0, 256, (l, mn, k * dtype.itemsize), dtype=torch.uint8).view(integer)
    target = torch.zeros_like(codes)
    c = configured(name(dtype), "mn", resident=1)
    launch = run(c, with_major(codes, "mn").view(dtype), with_major(target, "k").view(dtype))
    assert torch.equal(target, codes)
    assert launch.bank_conflicts == 0


def test_strided_parts() -> None:
    """Of larger tensors: strides are the caller's, memory around is not written."""
    codes = torch.randint(0, 256, (3, 64, 96), dtype=torch.uint8)
    scales = torch.full((3, 64, 3), 127, dtype=torch.uint8)
    target = torch.zeros(3, 64, 96, dtype=torch.bfloat16)
    source = codes.view(torch.float8_e5m2)[::2, :40, 32:].permute(1, 2, 0)
    sf = atoms(scales[::2, :40, 1:]).view(torch.float8_e8m0fnu)
    run(
        configured("float8_e5m2", "k", "float8_e8m0fnu", 32, resident=1),
        source,
        sf,
        target[::2, :40, 32:].permute(1, 2, 0),
    )
    expected = torch.zeros_like(target)
    expected[::2, :40, 32:] = codes.view(torch.float8_e5m2)[::2, :40, 32:].bfloat16()
    assert_same_bits(target, expected)

    target = torch.zeros(3, 64, 96, dtype=torch.uint8)
    source = codes.transpose(1, 2).contiguous().transpose(1, 2).view(torch.float8_e5m2)[1:, 16:, :48].permute(1, 2, 0)
    run(
        configured("float8_e5m2", "mn", resident=1),
        source,
        target.view(torch.float8_e5m2)[1:, 16:, :48].permute(1, 2, 0),
    )
    assert torch.equal(target[1:, 16:, :48], codes[1:, 16:, :48])
    target[1:, 16:, :48] = 0
    assert not target.any()


@pytest.mark.parametrize(("mn", "k"), [(37, 41), (140, 267)])
@pytest.mark.parametrize("operand", [o for o in sorted(OPERANDS, key=str) if o[0] == "float8_e4m3fn"], ids=str)
def test_rows_that_end_anywhere(operand: tuple[Any, ...], mn: int, k: int) -> None:
    """Their strides are multiples of 16 bytes all the same."""
    c = configured(*operand, resident=1)
    codes = torch.randint(0, 256, (2, -(-mn // 16) * 16, -(-k // 16) * 16), dtype=torch.uint8)
    source = with_major(codes, c.source.major).view(torch.float8_e4m3fn)[:mn, :k]
    expected = codes[:, :mn, :k].permute(1, 2, 0)
    target = with_major(torch.zeros_like(codes, dtype=getattr(torch, c.result.dtype)), c.result.major)[:mn, :k]
    if c.source.scale is None:
        run(c, source, target)
        assert torch.equal(target.view(torch.uint8), expected)
        return
    scales = torch.randint(0, 256, (2, mn, -(-k // 32)), dtype=torch.uint8)
    run(c, source, atoms(scales).view(torch.float8_e8m0fnu), target)
    factor = scale_values(scales, c.source.scale.dtype).repeat_interleave(32, dim=2)[:, :, :k].permute(1, 2, 0)
    assert_same_bits(target, (expected.view(torch.float8_e4m3fn).float() * factor).bfloat16())


@pytest.mark.parametrize("scheduler", ["random", "lazy"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32], ids=str)
def test_transposed_whatever_the_order_of_things(dtype: torch.dtype, scheduler: str) -> None:
    codes = torch.randint(0, 256, (1, 400, 400 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    target = torch.zeros_like(codes)
    c = configured(name(dtype), "mn", resident=1)
    run(c, with_major(codes.view(torch.uint8).view(dtype), "mn"), with_major(target, "k"), scheduler=scheduler, seed=1)
    assert torch.equal(target.view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize(
    ("operand", "arch"),
    brief(
        [(operand, "sm_90a") for operand in sorted(OPERANDS, key=str)]
        + [(operand, "sm_100a") for operand in SCALED if operand[0] != "float8_e5m2"],
        *range(0, 20, 4),
    ),
    ids=str,
)
def test_no_local_memory_and_wide_accesses(operand: tuple[Any, ...], arch: str) -> None:
    from cudnn_kernels import fakes
    from cudnn_kernels.gemm import prepare_operand as module

    c = configured(*operand)
    compiled = compile_kernel(arch, module.PrepareOperand(c), *fakes.arguments(c))
    assert compiled.stack == 0
    assert compiled.registers <= 128
    assert set(re.findall(r"st\.global\S*", compiled.ptx)) == {"st.global.v4.b32"}
    assert set(re.findall(r"ld\.global\S*", compiled.ptx)) <= {f"ld.global.{v}b32" for v in ("", "v2.", "v4.")}


@pytest.mark.parametrize(
    "operand",
    [
        ("float4_e2m1fn_x2", "mn", "float8_e8m0fnu", 32),
        ("float8_e4m3fn", "k", "float8_e4m3fn", 32),
        ("float8_e4m3fn", "k", "float8_e8m0fnu", 16),
        ("bfloat16", "k", None, 0),
        ("uint8", "mn", None, 0),
    ],
)
def test_refused(operand: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="neither a block-scaled format nor an MN-major operand"):
        configured(*operand)
