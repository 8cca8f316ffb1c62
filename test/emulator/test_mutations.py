"""Every barrier, fence, commit and wait dropped one at a time: found, or listed here with the reason why it cannot be.

Also the other side: unmodified kernels raise nothing under many seeds of the random and the lazy scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ptx_emulator
from cudnn.runtime.kernels import compile_kernel
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
from emulator import harness
from emulator.mutation import RACES, mutants, unexplained
from emulator.test_launch_control import SHARED as RESPONSE
from emulator.test_launch_control import kernel as launch_control_kernel
from emulator.test_tensor_maps import IN_GLOBAL, THROUGH_SHARED, edited
from support.selection import brief

SELF = "of the team's only warp lane 0 alone wrote what it reads"
Run = Callable[[str, int], bool]


def rmsnorm(threads: int) -> Run:
    """Two launches of one kernel: groups that a team has for itself, and groups that all teams share."""
    configuration = RmsNormRhtAmaxConfiguration("bfloat16", 512, threads=threads, teams=4, stages=2)
    with ptx_emulator.emulate("sm_90a"):
        compiled = compile_kernel("cudnn_kernels.norm.rmsnorm_rht_amax:RmsNormRhtAmax", configuration, "sm_90a")
    torch.manual_seed(0)
    x, w = torch.randn(12, 512).bfloat16(), torch.ones(512, dtype=torch.bfloat16)

    def run(scheduler: str, seed: int) -> bool:
        right = True
        for groups in (12, 1):
            o, amax = torch.zeros_like(x), torch.zeros(groups)
            with ptx_emulator.emulate("sm_90a", **RACES, scheduler=scheduler, seed=seed):
                compiled(x, w, o, amax, 1e-5, 0)
            y = x.float() * x.float().square().mean(1, keepdim=True).add(1e-5).rsqrt()
            # The orthogonal H16 / 4 keeps the norm.
            right &= torch.allclose(o.float().square().sum(1), y.square().sum(1), rtol=1e-2)
            right &= torch.allclose(amax, o.float().abs().reshape(groups, -1).amax(1), rtol=1e-2)
        return right

    return run


def maps(code: str) -> Run:
    def run(scheduler: str, seed: int) -> bool:
        edited(code, scheduler=scheduler, seed=seed)
        return True

    return run


def launch_control(cluster: int) -> Run:
    def run(scheduler: str, seed: int) -> bool:
        out = np.zeros((10, 2), np.uint32)
        options: dict[str, Any] = {"cluster": cluster, "races": True, "multiprocessors": 4, "shared": RESPONSE}
        harness.run(launch_control_kernel(cluster), out, grid=10, block=64, scheduler=scheduler, seed=seed, **options)
        return out[:, 0].tolist() == [1] * 10

    return run


CASES: dict[str, tuple[Callable[[], Run], dict[str, tuple[int, str]]]] = {
    "rmsnorm": (lambda: rmsnorm(64), {}),
    "rmsnorm, one warp": (lambda: rmsnorm(32), {"bar.warp.sync": (1, SELF)}),
    "tensor map through shared memory": (lambda: maps(THROUGH_SHARED), {}),
    "tensor map in global memory": (lambda: maps(IN_GLOBAL), {}),
    "launch control": (lambda: launch_control(1), {}),
    "launch control of a cluster": (lambda: launch_control(2), {}),
}


@functools.cache
def run_of(name: str) -> Run:
    """A case's kernel, compiled once for all tests."""
    return CASES[name][0]()


BRIEFLY = brief(list(CASES), 0, 2, 3, 5)


@pytest.mark.parametrize("name", BRIEFLY)
def test_each_synchronisation_is_missed(name: str) -> None:
    _, equivalent = CASES[name]
    results = mutants(run_of(name), [("lowest-pc", 0), ("random", 1), ("lazy", 2)])
    assert len(results) >= 5
    assert not unexplained(results, equivalent)


@pytest.mark.parametrize("name", BRIEFLY)
def test_no_false_alarm_over_many_seeds(name: str, pytestconfig: pytest.Config) -> None:
    run = run_of(name)
    for seed in range(20 if pytestconfig.getoption("full") else 4):
        assert run("random" if seed % 2 else "lazy", seed)
