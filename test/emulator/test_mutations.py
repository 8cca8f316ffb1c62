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
from cutlass import cute

import ptx_emulator
from cudnn.launch.kernels import compile_kernel
from cudnn_kernels.norm.heuristics import RmsNormRhtAmaxConfiguration
from emulator import gemm, harness
from emulator.kernels.blackwell_gemm import BlackwellGemm
from emulator.kernels.hopper_gemm import HopperGemm
from emulator.mutation import holds_registers, mutants, unexplained
from emulator.test_launch_control import SHARED as RESPONSE
from emulator.test_launch_control import kernel as launch_control_kernel
from emulator.test_tensor_maps import IN_GLOBAL, THROUGH_SHARED, edited
from support.selection import brief

TAIL = "producer's tail: stage by stage it waits for consumers that the accumulator's barrier waits for as well"
FIRST = "acquires the accumulator's only buffer, which is free from the start"
LAST = "hands back the accumulator's only buffer, which nobody takes again"
TWICE = (
    "the pipelines initialise their barriers one after the other, a fence and a barrier each: the last ones cover all"
)

SELF = "of the team's only warp lane 0 alone wrote what it reads"
Run = Callable[[str, int], bool]


def gemm_of(kernel: Any, arch: str, mnk: tuple[int, int, int], out: torch.dtype) -> Run:
    m, n, k = mnk
    torch.manual_seed(0)
    a, b = gemm.operand(m, k, torch.bfloat16), gemm.operand(n, k, torch.bfloat16)
    c = torch.zeros(m, n, dtype=out)
    arguments = [gemm.dsl_tensor(x) for x in (a, b, c)]
    with ptx_emulator.emulate(arch):
        compiled = cute.compile(kernel, *arguments)
    expected = (a.double() @ b.double().T).to(out)

    def run(scheduler: str, seed: int) -> bool:
        c.zero_()
        with ptx_emulator.emulate(arch, races=True, scheduler=scheduler, seed=seed):
            compiled(*arguments)
        return torch.equal(c, expected)

    return run


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
            with ptx_emulator.emulate("sm_90a", races=True, scheduler=scheduler, seed=seed):
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


WAITS, FENCE = "wait_loop.mbarrier.try_wait.parity.shared.b64", "fence.mbarrier_init.release.cluster"
HOPPER, BLACKWELL = (128, 128, 320), (128, 64, 320)
CASES: dict[str, tuple[Callable[[], Run], dict[str, tuple[int, str]]]] = {
    "hopper": (lambda: gemm_of(HopperGemm(), "sm_90a", HOPPER, torch.bfloat16), {WAITS: (3, TAIL)}),
    "hopper multicast": (
        lambda: gemm_of(HopperGemm(cluster_m=2), "sm_90a", HOPPER, torch.bfloat16), {WAITS: (3, TAIL)}
    ),
    "blackwell": (
        lambda: gemm_of(BlackwellGemm((128, 64)), "sm_100a", BLACKWELL, torch.float32),
        {WAITS: (3, f"{TAIL}; {FIRST}"), FENCE: (1, TWICE), "bar.sync": (2, TWICE),
         "mbarrier.arrive.shared.b64": (1, LAST)},
    ),
    "blackwell pair": (
        lambda: gemm_of(BlackwellGemm((256, 64), True), "sm_100a", (256, 64, 320), torch.float32),
        {WAITS: (3, f"{TAIL}; {FIRST}"), FENCE: (3, TWICE), "barrier.cluster.arrive.relaxed": (1, TWICE),
         "barrier.cluster.wait": (1, TWICE), "mbarrier.arrive.shared::cluster.b64": (1, LAST)},
    ),
    "rmsnorm": (lambda: rmsnorm(64), {}),
    "rmsnorm, one warp": (lambda: rmsnorm(32), {"bar.warp.sync": (1, SELF)}),
    "tensor map through shared memory": (lambda: maps(THROUGH_SHARED), {}),
    "tensor map in global memory": (lambda: maps(IN_GLOBAL), {}),
    "launch control": (lambda: launch_control(1), {}),
    "launch control of a cluster": (lambda: launch_control(2), {}),
}  # fmt: skip


@functools.cache
def made(name: str) -> Run:
    """A case's kernel, compiled once for all tests."""
    return CASES[name][0]()


BRIEFLY = brief(list(CASES), 1, 2, 4, 6, 7, 9)


@pytest.mark.parametrize("name", BRIEFLY)
def test_each_synchronisation_is_missed(name: str) -> None:
    _, equivalent = CASES[name]
    results = mutants(made(name), [("lowest-pc", 0), ("random", 1), ("lazy", 2)])
    assert len(results) >= 5
    assert not unexplained(results, equivalent)


@pytest.mark.parametrize("name", ["hopper multicast", "blackwell"])
@pytest.mark.parametrize("attempt", [("lowest-pc", 0), ("random", 1), ("lazy", 2)], ids=lambda x: x[0])
def test_waits_for_registers_are_missed_under_every_schedule(name: str, attempt: tuple[str, int]) -> None:
    results = mutants(made(name), [attempt], holds_registers)
    assert len(results) >= (1 if name == "blackwell" else 2)
    assert {mutant.outcome for mutant in results} == {"RaceError"}


@pytest.mark.parametrize("name", BRIEFLY)
def test_no_false_alarm_over_many_seeds(name: str, pytestconfig: pytest.Config) -> None:
    run = made(name)
    for seed in range(20 if pytestconfig.getoption("full") else 4):
        assert run("random" if seed % 2 else "lazy", seed)
