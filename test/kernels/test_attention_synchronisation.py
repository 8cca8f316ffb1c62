"""Attention's barriers, fences, arrivals, commits and waits: dropped one at a time, and seen missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

ptx_emulator = pytest.importorskip("ptx_emulator")

from cudnn_kernels import compiler, fakes  # noqa: E402
from cudnn_kernels.attention import (  # noqa: E402
    BackwardConfiguration,
    DecodeConfiguration,
    ForwardConfiguration,
    GradientsConfiguration,
)
from cudnn_kernels.signature import workspace_size  # noqa: E402
from emulator.mutation import LANES, RACES, holds_registers, mutants, unexplained  # noqa: E402
from kernels import test_attention as attention  # noqa: E402
from kernels.test_attention import BLACKWELL, TWO_TILES, Problem  # noqa: E402

SMALL = ForwardConfiguration("bfloat16", 64, 64, (128, 32))
DECODE = DecodeConfiguration("bfloat16", 64, 64, (64, 32))
STEPS = BackwardConfiguration("bfloat16", 64, 64, (64, 128))
AHEAD = BackwardConfiguration("bfloat16", 128, 128, (16, 128))
PAIRS = BackwardConfiguration("bfloat16", 128, 128, (64, 32), pair=True)
CASES: dict[str, tuple[str, Any, Problem]] = {
    # small tiles, and enough steps to fill each buffer again after its release
    "forward": (  # a CTA takes both heads' tiles, and blocks are repeated with maxima
        "sm_90a",
        SMALL,
        Problem(((128, 192),), heads=(2, 1), right=0, grows=1000.0),
    ),
    "forward, dynamic scheduler": (
        "sm_90a",
        replace(SMALL, dynamic_scheduler=True),
        Problem(((128, 96), (1, 40), (70, 96), (2, 96)), packed=True, right=0),
    ),
    "forward, 8 bits": (
        "sm_90a",
        SMALL,
        Problem(((128, 192),), heads=(2, 1), right=0, dtype=torch.float8_e4m3fn),
    ),
    "decode": ("sm_90a", DECODE, Problem(((32, 208),), heads=(2, 1), right=0)),
    "decode, Blackwell": ("sm_100a", replace(DECODE, tile=(128, 128)), Problem(((3, 1152),), heads=(2, 1), right=0)),
    "forward, Blackwell, two tiles": (
        "sm_100a",
        replace(TWO_TILES, head_dim=128, head_dim_v=128),
        Problem(((130, 768),), right=0),
    ),
    "forward, Blackwell": ("sm_100a", replace(BLACKWELL, head_dim=64, head_dim_v=64), Problem(((130, 1152),), right=0)),
    "backward": ("sm_90a", STEPS, Problem(((320, 128),))),
    "backward, ahead": ("sm_90a", AHEAD, Problem(((80, 128),))),
    "pairs": ("sm_90a", PAIRS, Problem(((320, 64),))),
    "backward, deterministic": ("sm_90a", replace(STEPS, deterministic=True), Problem(((192, 256),))),
    "pairs, deterministic": ("sm_90a", replace(PAIRS, deterministic=True), Problem(((192, 128),))),
    "backward, Blackwell": (
        "sm_100a",
        GradientsConfiguration("bfloat16", 64, 64),
        Problem(((64, 320), (320, 64)), packed=True),
    ),
}
ATTEMPTS = [("lowest-pc", 0), *((scheduler, seed) for seed in range(2) for scheduler in ("random", "lazy"))]
WAIT, COMMIT = "wait_loop.mbarrier.try_wait.parity.shared.b64", "wgmma.commit_group.sync.aligned"
TURNS = "ping-pong order is for speed; shared buffers have separate barriers; the last wait is missed as PE307"
FIRST = "the first stages that are loaded: their buffers are empty"
HANDED = "the detector takes what a lane hands on as all of its warp's"
FENCE = "no register of these products was written since the fence of the ones before"
STEP = {
    WAIT: (1, "a stage of dO: that of Q is released later and waited for earlier"),
    COMMIT: (1, "dV: it joins the group of dQ, which is waited for next"),
    "bar.warp.sync": (2, LANES),
    "wgmma.fence.sync.aligned": (3, FENCE),
}
ORDER = "additions do not race: only their order depends on it, and here each is done before the next one begins"
LATE = "missed if copies are late, as the cases without ordered dQ show"
PAIR = {
    COMMIT: (2, "the first part of dP, and dK: each joins the next group, with which it is waited for"),
    "wgmma.fence.sync.aligned": (6, FENCE),
}
EQUIVALENT: dict[str, dict[str, tuple[int, str]]] = {  # how many of an instruction are not missed, and why
    "forward": {"bar.sync": (3, TURNS)},
    "forward, 8 bits": {"bar.sync": (3, TURNS), "bar.warp.sync": (1, HANDED)},
    "forward, dynamic scheduler": {
        "bar.sync": (2, TURNS),
        "bar.warp.sync": (2, HANDED),
        "barrier.cta.red.or.pred": (1, "no sum is so large that a block is repeated"),
        WAIT: (1, "a work-tile stage: the scheduler warp waits for Q's stage before, and so for all its readers"),
    },
    "decode": {
        "mbarrier.init.shared.b64": (1, "a CTA has one tile: no warp waits until Q was read"),
        "mbarrier.arrive.shared.b64": (1, "the last V, after which no warp fills its stage"),
        "bar.warp.sync": (1, HANDED),
    },
    "decode, Blackwell": {WAIT: (2, FIRST), "bar.warp.sync": (1, HANDED)},
    "forward, Blackwell, two tiles": {
        WAIT: (5, "the first piece; P V, before the next S; three times the second tile, for what the first has"),
        "bar.warp.sync": (1, HANDED),
    },
    "forward, Blackwell": {
        WAIT: (2, FIRST),
        "bar.warp.sync": (1, LANES),
        "bar.sync": (1, "all have met since they read O"),
    },
    "backward, Blackwell": {
        WAIT: (4, "V's stage is released before K's, which is waited for; S and dP waited for what their sums read"),
        "bar.warp.sync": (2, LANES),
        "bar.sync": (2, "all have met since they read the sums"),
    },
    "backward": STEP,
    "backward, ahead": STEP | {"wgmma.fence.sync.aligned": (4, FENCE)},
    "pairs": PAIR,
    "backward, deterministic": STEP
    | {
        "fence.proxy.async.global": (2, ORDER),
        "cp.async.bulk.wait_group": (1, ORDER),
        "fence.proxy.async.shared::cta": (1, LATE),
    },
    "pairs, deterministic": PAIR
    | {
        "fence.acq_rel.gpu": (2, ORDER),
        "bar.warp.sync": (4, LANES),
        "barrier.cluster.arrive": (1, LATE),
        "barrier.cluster.wait": (1, LATE),
    },
}


def entry(name: str) -> str:
    """In the kernels' names, and not in the preprocess and postprocess kernels."""
    return "" if isinstance(CASES[name][1], ForwardConfiguration) else "_sm"


def attempts(name: str) -> list[tuple[str, int]]:
    """Not with lazy copies where CTAs ask again and again whether it is their turn: copies would wait for them."""
    lazy = not getattr(CASES[name][1], "deterministic", False)
    return [x for x in ATTEMPTS if lazy or x[0] != "lazy"]


def launcher(arch: str, configuration: Any, problem: Problem) -> Callable[[str, int], bool]:
    c, forward = problem.configured(configuration), isinstance(configuration, ForwardConfiguration)
    inputs = (
        attention.drawn(problem, c.head_dim, c.head_dim_v)
        if forward
        else attention.backward_arguments(configuration, problem)
    )
    inputs["num_sms"] = 1
    if isinstance(c, DecodeConfiguration):
        sizes = {"sq": inputs["q"].shape[2], "hq": inputs["q"].shape[1], "b": len(problem.lengths), "splits": 1}
        workspace = torch.full((workspace_size(c.slots(), sizes),), 255, dtype=torch.uint8)
        inputs |= {"splits": 1, "workspace": workspace}
    written = {name: inputs[name].clone() for name in (("o", "lse") if forward else ("dq", "dk", "dv", "workspace"))}
    with ptx_emulator.emulate(arch):
        compiled = compiler.compile_for(arch, attention.kernel(arch, c), *fakes.arguments(c))

    first: dict[str, torch.Tensor] = {}

    def run(scheduler: str, seed: int) -> bool:
        for name, fresh in written.items():
            inputs[name].copy_(fresh)
        with ptx_emulator.emulate(arch, **RACES, scheduler=scheduler, seed=seed):
            compiled(*(inputs[slot.name] for slot in c.slots()))
        try:
            attention.assert_right(inputs, problem, ("o",) if forward else ("dq", "dk", "dv"))
        except AssertionError:
            return False
        if not getattr(c, "deterministic", False):
            return True
        actual = {name: inputs[name].clone() for name in ("dq", "dk", "dv")}
        return all(torch.equal(x, first.setdefault(name, x)) for name, x in actual.items())

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(3600)
def test_each_synchronisation_is_missed(name: str) -> None:
    """Barriers, fences, arrivals, commits and waits, dropped one at a time."""
    results = mutants(launcher(*CASES[name]), attempts(name), entry=entry(name))
    assert len(results) > 20
    assert not unexplained(results, EQUIVALENT.get(name, {}))


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_waits_for_registers_are_missed(name: str) -> None:
    """wgmma.commit_group and wait_group, tcgen05.wait::ld: dropped one at a time, under one schedule."""
    results = mutants(launcher(*CASES[name]), [("lowest-pc", 0)], holds_registers, entry(name))
    assert len(results) >= (3 if CASES[name][0] == "sm_90a" else 1)
    outcomes = Counter(mutant.outcome for mutant in results)
    assert outcomes["RaceError"] == len(results) - EQUIVALENT.get(name, {}).get(COMMIT, (0, ""))[0]
