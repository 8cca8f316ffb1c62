"""The kernel itself, run on the CPU for both architectures with race detection, against the definition."""

from __future__ import annotations

import pytest
import torch

import cudnn
from cudnn.rmsnorm_rht_amax import RmsNormRhtAmax, rmsnorm_rht_amax_wrapper
from cudnn.runtime.launch import emulate
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
from support.rmsnorm import assert_right
from support.selection import in_turn

ptx_emulator = pytest.importorskip("ptx_emulator")

SOURCE = "cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax"


def problem(m: int, n: int, rows: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, w, and results of NaN."""
    x = torch.randn(m, n).to(dtype)
    w = (torch.rand(n) + 0.5).to(dtype)
    return [x, w, torch.full_like(x, float("nan")), torch.full((m // rows,), float("nan"))]


@pytest.mark.parametrize(
    ("arch", "m", "n", "rows", "threads", "dtype"),
    in_turn(
        [
            (64, 512, 8, 64, torch.bfloat16),  # teams share a group
            (64, 512, 2, 64, torch.float16),  # several groups at once, several teams for each
            (62, 512, 1, 64, torch.bfloat16),  # a group for each team
            (48, 512, 3, 64, torch.bfloat16),  # more teams than rows: some rest
            (96, 256, 32, 32, torch.bfloat16),  # one warp a team; more threads than blocks
            (64, 768, 16, 96, torch.float16),
            (16, 7168, 2, 128, torch.bfloat16),  # blocks that threads share unevenly
            (2, 16384, 2, 1024, torch.bfloat16),
            (1, 512, 1, 64, torch.bfloat16),
            (3, 65536, 3, 1024, torch.bfloat16),  # two CTAs share a row
        ]
    ),
)
def test_values_without_races(arch: str, m: int, n: int, rows: int, threads: int, dtype: torch.dtype) -> None:
    x, w, o, amax = problem(m, n, rows, dtype)
    with cudnn.emulation(arch, races=True) as report:
        norm = RmsNormRhtAmax(x, w, o, amax, 1e-3, threads, rows)
        norm(x_tensor=x, w_tensor=w, o_tensor=o, amax_tensor=amax)
    assert_right(x, w, o, amax, eps=1e-3)
    (launch,) = report.launches
    assert launch.bank_conflicts == 0


ORDERS = [("random", 1), ("lazy", 2), ("random", 2), ("lazy", 1)]


@pytest.mark.parametrize(("arch", "scheduler", "seed"), in_turn(ORDERS, 2))
def test_whatever_the_order_of_things(arch: str, scheduler: str, seed: int) -> None:
    x, w, _, _ = problem(64, 512, 4)
    with cudnn.emulation(arch, races=True, scheduler=scheduler, seed=seed):
        o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=4)
    assert_right(x, w, o, amax)


@pytest.mark.parametrize(("arch", "scheduler", "seed"), in_turn(ORDERS, 2))
@pytest.mark.parametrize("rows", [1, 5])
def test_two_ctas_share_rows(arch: str, scheduler: str, seed: int, rows: int) -> None:
    """As the longest rows are, here with shorter ones."""
    x, w, o, amax = problem(4 * rows, 1024, rows)
    configuration = RmsNormRhtAmaxConfiguration("bfloat16", 1024, threads=64, teams=1, stages=2, ctas=2)
    with cudnn.emulation(arch, races=True, scheduler=scheduler, seed=seed):
        emulate(SOURCE, configuration, arch, x, w, o, amax, 1e-5, 0)
    assert_right(x, w, o, amax)


def test_by_environment_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CUDNN_EMULATE", "sm_90a")
    x, w, o, amax = problem(8, 512, 2)
    o, amax = rmsnorm_rht_amax_wrapper(x, w, rows_per_cta=2)
    assert_right(x, w, o, amax)
    assert not [message for message in caplog.messages if "reference" in message]
