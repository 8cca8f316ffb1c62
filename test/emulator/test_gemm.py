"""A CuTe DSL GEMM for Blackwell, with operands and accumulators that the library's own lacks; and block scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn_kernels.epilogue import StoreTile
from emulator import gemm
from emulator.kernels.blackwell_gemm import BlackwellGemm
from support import kernel_inputs as library
from support.selection import brief

bf16, f16, f32, e4m3, e5m2, i8 = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)


@pytest.mark.parametrize(
    ("mnk", "tile", "pair", "dtype"),
    [
        ((256, 256, 192), (128, 128), False, bf16),
        ((128, 128, 128), (64, 128), False, f16),
        ((512, 256, 192), (256, 128), True, bf16),
        ((256, 256, 128), (128, 128), True, bf16),
        ((128, 128, 256), (128, 128), False, e4m3),
        ((128, 128, 256), (128, 64), False, e5m2),
        ((128, 128, 256), (128, 128), False, i8),
        ((128, 128, 64), (128, 128), False, f32),
    ],
    ids=str,
)
@pytest.mark.parametrize("scheduler", brief(["lowest-pc", "random", "lazy"], 2))
def test_blackwell(mnk: Any, tile: Any, pair: bool, dtype: torch.dtype, scheduler: str) -> None:
    out = torch.int32 if dtype is i8 else f32
    gemm.run(BlackwellGemm(tile, pair), "sm_100a", mnk, dtype, out, races=True, scheduler=scheduler, seed=7)


@pytest.mark.parametrize(
    ("tile", "pair", "dtype", "majors"),
    [
        *[((128, 128), False, dtype, "mm") for dtype in (bf16, f32, e4m3, i8)],
        *[((256, 128), True, dtype, majors) for dtype, majors in ((bf16, "mk"), (f32, "km"), (e4m3, "mm"))],
        ((64, 64), False, f16, "km"),
    ],
    ids=str,
)
def test_blackwell_major_modes(tile: Any, pair: bool, dtype: torch.dtype, majors: str) -> None:
    out = torch.int32 if dtype is i8 else f32
    gemm.run(BlackwellGemm(tile, pair, majors), "sm_100a", (256, 128, 128), dtype, out, majors, races=True)


@pytest.mark.parametrize("kind", brief(list(gemm.BLOCK_SCALED), 0, 3))
def test_block_scales(kind: str) -> None:
    gemm.block_scaled(kind)


def test_report_counts_the_work() -> None:
    c = library.configuration((StoreTile("d", "bfloat16"),))
    *_, report = library.run("sm_90a", c, 128, 256, 128)
    launch = report.launches[0]
    assert launch.operations["wgmma multiply-adds"] == 128 * 256 * 128
    assert launch.tensor_cycles == 128 * 256 * 128 // 2048
    issue = sum(launch.instructions.values()) / 4
    steps = 2 * 2 * 128 // 16  # of 64 x 128 x 16: tiles, warpgroups, steps along k
    assert launch.wgmma_wavefronts == steps * (64 + 128) * 16 * 2 // 128
    assert launch.l1_wavefronts >= launch.wavefronts + launch.wgmma_wavefronts
    assert launch.tensor_bound == launch.tensor_cycles / max(launch.tensor_cycles, issue, launch.l1_wavefronts) > 0.1
    assert f"tensor cores: {launch.tensor_cycles} cycles" in str(launch)
    assert launch.bytes["global to shared TMA"] == (128 * 2 + 256) * 128 * 2
    assert launch.bytes["shared to global TMA"] == 128 * 256 * 2
    assert launch.bank_conflicts == 0
    assert "wgmma" in report.to_json()
