"""The GEMMs' barriers, fences, arrivals, commits and waits: dropped one at a time, and kept under random schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn_kernels.epilogue import (  # noqa: E402
    Amax,
    GatedBackward,
    LoadTile,
    Rotate,
    SquaredReluBackward,
    StoreTile,
    SumRow,
)
from cudnn_kernels.schedule import VarlenK, VarlenM  # noqa: E402
from emulator.mutation import LANES, RACES, holds_registers, mutants, unexplained  # noqa: E402
from support import kernel_inputs  # noqa: E402
from support.kernel_inputs import BLACKWELL, E4M3, E8M0, HOPPER  # noqa: E402
from support.selection import brief  # noqa: E402

EPILOGUE = (
    LoadTile("c", "bfloat16"),
    SquaredReluBackward(),
    SumRow("s", "prob_gradient"),
    Amax(),
    StoreTile("d", "bfloat16"),
)
STORE = (StoreTile("d", "bfloat16"),)
ROTATE = (Rotate(128, 128, "bfloat16", positions="places"), LoadTile("c", "bfloat16"), SquaredReluBackward(), *STORE)
PARTS = (0, 200, 200, 328, 904)
WIDER = (
    LoadTile("c", "bfloat16", times=2),
    GatedBackward(),
    SumRow("s", "prob_gradient"),
    StoreTile("y", "float32", value="activation"),
    StoreTile("d", "float32"),
)
CASES: dict[str, tuple[str, Any, tuple[int, int, int]]] = {
    # with sizes m, n, k: enough tiles to fill each buffer again after a tile's last release
    "cooperative": (
        HOPPER,
        kernel_inputs.configuration(EPILOGUE, tile=(128, 64, 128), cluster=(2, 1), epi_tile_n=32),
        (768, 64, 384),
    ),
    "two buffers": (
        HOPPER,
        kernel_inputs.configuration(STORE, tile=(128, 64, 128), epi_tile_n=32, epi_stages=2),
        (768, 64, 384),
    ),
    "ping-pong": (
        HOPPER,
        kernel_inputs.configuration(EPILOGUE, tile=(64, 64, 64), pingpong=True, epi_tile_n=32),
        (512, 64, 192),
    ),
    "wider": (
        HOPPER,
        kernel_inputs.configuration(WIDER, tile=(64, 64, 64), pingpong=True, epi_tile_n=32),
        (512, 64, 192),
    ),
    "wider, one CTA": (
        BLACKWELL,
        kernel_inputs.configuration(WIDER, tile=(128, 64, 256), epi_tile_n=32),
        (768, 64, 320),
    ),
    "plain": (BLACKWELL, kernel_inputs.configuration(STORE, tile=(128, 64, 256), epi_tile_n=32), (768, 64, 320)),
    "one CTA": (BLACKWELL, kernel_inputs.configuration(EPILOGUE, tile=(128, 64, 256), epi_tile_n=32), (768, 64, 320)),
    "pair": (BLACKWELL, kernel_inputs.configuration(STORE, tile=(256, 64, 256), cluster=(2, 2)), (1024, 128, 320)),
    "pieces, cooperative": (
        HOPPER,
        kernel_inputs.configuration(ROTATE, tile=(128, 128, 128), cluster=(2, 1), epi_tile_n=32),
        (768, 128, 384),
    ),
    "pieces": (BLACKWELL, kernel_inputs.configuration(ROTATE, tile=(128, 128, 128), epi_tile_n=32), (768, 128, 320)),
    "block-scaled": (
        BLACKWELL,
        kernel_inputs.configuration(STORE, E4M3, scale=E8M0, vector=32, tile=(128, 128, 256)),
        (1024, 128, 320),
    ),
    "rows of experts": (
        HOPPER,
        kernel_inputs.configuration(STORE, tile=(64, 64, 64), pingpong=True, epi_tile_n=32, schedule=VarlenM()),
        (928, 64, 192),
    ),
    "rows with scale factors": (
        HOPPER,
        kernel_inputs.configuration(
            STORE, E4M3, scale="float32", vector=128, tile=(128, 64, 128), epi_tile_n=32, schedule=VarlenM()
        ),
        (928, 256, 384),
    ),
    "last rows sideways": (
        HOPPER,
        kernel_inputs.configuration(
            STORE, tile=(128, 64, 64), cluster=(2, 1), pingpong=True, epi_tile_n=32, schedule=VarlenM(split_tail_n=True)
        ),
        (928, 192, 192),
    ),
    "weights behind pointers": (
        BLACKWELL,
        replace(
            rows := kernel_inputs.configuration(
                STORE, tile=(128, 64, 256), cluster=(2, 1), epi_tile_n=32, schedule=VarlenM()
            ),
            b=replace(rows.b, pointers=True),
        ),
        (928, 64, 320),
    ),
    "k of experts, Hopper": (
        HOPPER,
        kernel_inputs.configuration(
            STORE, tile=(128, 64, 128), cluster=(2, 1), epi_tile_n=32, majors="mn", schedule=VarlenK()
        ),
        (512, 64, 928),
    ),
    "k of experts": (
        BLACKWELL,
        kernel_inputs.configuration(STORE, tile=(128, 64, 128), epi_tile_n=32, schedule=VarlenK()),
        (256, 64, 928),
    ),
    "gathered rows": (
        HOPPER,
        kernel_inputs.configuration(
            STORE, tile=(64, 64, 64), pingpong=True, epi_tile_n=32, schedule=VarlenM(), index="a"
        ),
        (928, 64, 192),
    ),
    "gathered k": (
        HOPPER,
        kernel_inputs.configuration(
            STORE, tile=(128, 64, 64), cluster=(2, 1), epi_tile_n=32, majors="mn", schedule=VarlenK(), index="a"
        ),
        (512, 64, 928),
    ),
    "dynamic scheduler": (
        HOPPER,
        kernel_inputs.configuration(
            STORE,
            tile=(128, 64, 64),
            cluster=(1, 2),
            epi_tile_n=32,
            schedule=VarlenM(),
            index="a",
            dynamic_scheduler=True,
        ),
        (928, 128, 704),
    ),
}


def launcher(arch: str, c: Any, m: int, n: int, k: int) -> Callable[[str, int], bool]:
    """Experts have the rows, or the k, of ``PARTS``."""
    torch.manual_seed(0)
    ends = PARTS if c.schedule.slots() else ()
    made = kernel_inputs.operands(c, m, n, k, 1, len(ends) if isinstance(c.schedule, VarlenM) else 0)
    inputs = kernel_inputs.arguments(c.epilogue, m, n, len(ends) if c.schedule.varlen_k else 1)
    fresh, expected = ({name: x.clone() for name, x in inputs.items()} for _ in range(2))
    kernel_inputs.reference.evaluate(c.epilogue, kernel_inputs.product(c, made, ends), expected)
    if ends:
        made["offsets"] = torch.tensor(ends, dtype=torch.int32)
    if c.b.pointers:
        made |= kernel_inputs.pointer_arguments({"b": made["b"]}) | {"n": n}
    kernel, count = kernel_inputs.compiled(arch, c), max(2, c.cluster[0] * c.cluster[1])

    def run(scheduler: str, seed: int) -> bool:
        for name, x in inputs.items():
            x.copy_(fresh[name])
        with ptx_emulator.emulate(arch, **RACES, scheduler=scheduler, seed=seed, multiprocessors=count):
            kernel_inputs.call(kernel, c, {**made, **inputs}, count)
        return all(
            torch.allclose(x.float(), expected[name].float(), rtol=1e-5, atol=1e-4, equal_nan=True)
            for name, x in inputs.items()
        )

    return run


WAIT = "wait_loop.mbarrier.try_wait.parity.shared.b64"
TAIL = "the producers' tails wait, buffer by buffer, for what the accumulator's or the cluster's barrier waits for"
FREE = "the pair's freeing of tensor memory waits for the other CTA, as the cluster's barrier does"
END = "the cluster's last barrier waits for what the producers' tails and the freeing of tensor memory wait for"
SHUFFLES = "the shuffles that add up the lanes' tiles wait for all lanes, too"
IDLE = "a warpgroup without rows reads nothing of what it waits for"
READ = "accumulators were only read since the MMAs before, and the check is for writes"
DONE = "warpgroups have waited for all copies when the warps that copy end"
CLUSTER = {"barrier.cluster.arrive": (1, END), "barrier.cluster.wait": (1, END)}
EQUIVALENT: dict[str, dict[str, tuple[int, str]]] = {  # how many of an instruction are not missed, and why
    "plain": {WAIT: (4, TAIL)},
    "pieces": {WAIT: (5, TAIL)},
    "one CTA": {WAIT: (4, TAIL)},
    "wider, one CTA": {WAIT: (4, TAIL)},
    "pair": {WAIT: (5, f"{TAIL}; {FREE}"), **CLUSTER},
    "block-scaled": {WAIT: (5, TAIL)},
    "k of experts": {WAIT: (6, TAIL)},
    "rows of experts": {"bar.warp.sync": (1, SHUFFLES)},
    "last rows sideways": {WAIT: (1, IDLE), "bar.warp.sync": (1, SHUFFLES), **CLUSTER},
    "weights behind pointers": {WAIT: (6, TAIL), "bar.warp.sync": (1, SHUFFLES), **CLUSTER},
}
EQUIVALENT["gathered rows"] = {"bar.warp.sync": (3, LANES)}
EQUIVALENT["rows with scale factors"] = {
    WAIT: (1, IDLE),
    "bar.warp.sync": (4, f"{SHUFFLES}; {LANES}"),
    "wgmma.fence.sync.aligned": (1, READ),
}
EQUIVALENT["gathered k"] = {
    "bar.warp.sync": (2, f"{LANES}; {DONE}"),
    "cp.async.wait_group": (1, DONE),
    "fence.proxy.async.shared::cta": (1, DONE),
}
EQUIVALENT["dynamic scheduler"] = {"bar.warp.sync": (2, LANES), **CLUSTER}


def names(*brief: str) -> list[Any]:
    """All cases; others than these only with ``--full``."""
    return [pytest.param(name, marks=[] if name in brief else pytest.mark.full) for name in CASES]


@pytest.mark.parametrize("scheduler", brief(["lowest-pc", "random", "lazy"], 0, 1))
@pytest.mark.parametrize("name", names("ping-pong", "plain"))
@pytest.mark.timeout(600)
def test_waits_for_registers_are_missed_under_every_schedule(name: str, scheduler: str) -> None:
    """wgmma.commit_group and wait_group, tcgen05.wait::ld: dropped one at a time."""
    arch, configuration, sizes = CASES[name]
    results = mutants(launcher(arch, configuration, *sizes), [(scheduler, 0)], holds_registers)
    assert len(results) >= (3 if arch == HOPPER else 1)
    assert {mutant.outcome for mutant in results} == {"RaceError"}


@pytest.mark.parametrize("name", names("ping-pong", "plain"))
def test_no_false_alarm_over_many_seeds(name: str, pytestconfig: pytest.Config) -> None:
    run = launcher(*CASES[name][:2], *CASES[name][2])
    for seed in range(20 if pytestconfig.getoption("full") else 2):
        assert run("random" if seed % 2 else "lazy", seed)


@pytest.mark.parametrize("name", names("ping-pong", "plain"))
@pytest.mark.timeout(1200)
def test_each_synchronisation_is_missed(name: str, pytestconfig: pytest.Config) -> None:
    """Barriers, fences, arrivals, commits and waits, dropped one at a time; without ``--full``, every third one."""
    arch, configuration, sizes = CASES[name]
    full = pytestconfig.getoption("full")
    few = name in EQUIVALENT and not full  # what is not missed takes all attempts
    seeds = range(1 if few else 3)
    attempts = [("lowest-pc", 0), *((scheduler, seed) for seed in seeds for scheduler in ("random", "lazy"))]
    results = mutants(launcher(arch, configuration, *sizes), attempts, every=1 if full else 3)
    assert len(results) > (30 if full else 10)
    assert not unexplained(results, EQUIVALENT.get(name, {}))
