"""Cluster launch control: running blocks take over blocks that have not started, each exactly once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run

SHARED = ".shared .align 16 .b8 response[16];\n  .shared .align 8 .b64 bar;"


def kernel(cluster: int) -> str:
    """Counts its block at %rd90 + 8 x and stores the worker next to it; requests clusters until one is declined."""
    synchronise = "bar.sync 0;" if cluster == 1 else "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
    form = "" if cluster == 1 else ".multicast::cluster::all"
    return f"""
      mov.u32 %r1, response; mov.u32 %r2, bar; setp.eq.s32 %p1, %r99, 0; mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ctaid.x;
      mov.u32 %r5, %cluster_ctarank; mov.b32 %r6, 0;
      @%p1 mbarrier.init.shared.b64 [%r2], 1; @%p1 fence.mbarrier_init.release.cluster;
      setp.eq.s32 %p3, %r5, 0; and.pred %p3, %p3, %p1;
    WORK: @!%p1 bra ASK; mul.wide.u32 %rd1, %r4, 8; add.s64 %rd1, %rd1, %rd90;
      mov.b32 %r7, 1; red.global.add.u32 [%rd1], %r7; st.global.b32 [%rd1+4], %r3;
      mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 16;
    ASK: {synchronise}
      @%p3 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{form}.b128 [%r1], [%r2];
    L: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r6; @!%p2 bra L;
      xor.b32 %r6, %r6, 1; ld.shared.b128 %q1, [%r1];
      clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %q1;
      @%p4 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r4, %q1; add.s32 %r4, %r4, %r5;
      @%p4 bra WORK;"""


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("scheduler", "seed"), [("lowest-pc", 0), ("random", 1), ("random", 2), ("lazy", 3)])
def test_each_block_runs_once(cluster: int, scheduler: str, seed: int) -> None:
    results = []
    for _ in range(2):
        out = np.zeros((22, 2), np.uint32)
        launch = run(
            kernel(cluster),
            out,
            grid=22,
            cluster=cluster,
            block=64,
            shared=SHARED,
            races=True,
            multiprocessors=4,
            scheduler=scheduler,
            seed=seed,
        )
        assert out[:, 0].tolist() == [1] * 22
        results.append(out[:, 1].tolist())
    assert results[0] == results[1]
    own = [i for i in range(22) if results[0][i] == i]
    assert set(range(4)) <= set(own)
    assert launch.operations["clusters handed out"] == (22 - len(own)) // cluster > 0


def test_blocks_that_end_make_room() -> None:
    """Block 1 leaves at once: the hardware starts the next block there, unless it was handed out already."""
    quits = kernel(1).replace("WORK:", "WORK: setp.eq.s32 %p5, %r3, 1; @%p5 mov.b32 %r8, 1; @%p5 bra END;") + " END:"
    beside = set()
    for seed in range(8):
        out = np.zeros((9, 2), np.uint32)
        run(quits, out, grid=9, block=64, shared=SHARED, multiprocessors=2, scheduler="random", seed=seed)
        assert out[:, 0].tolist() == [1, 0, *[1] * 7]
        beside |= set(out[:, 1].tolist())
    assert beside - {0}


def test_asking_again_after_a_refusal_is_a_fault() -> None:
    out = np.zeros((2, 2), np.uint32)
    with pytest.raises(ptx_emulator.Fault, match="try_cancel by a thread that saw one fail"):
        run(kernel(1).replace("@%p4 bra WORK", "bra WORK"), out, grid=2, block=64, shared=SHARED, multiprocessors=2)


def test_the_first_block_by_vector_and_by_axis() -> None:
    out = np.zeros((2, 6), np.uint32)
    axes = "".join(
        f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{a}.b32.b128 %r2{i}, %q1;" for i, a in enumerate("xyz")
    )
    code = f"""mov.u32 %r1, response; mov.u32 %r2, bar; mov.u32 %r3, %ctaid.x; mbarrier.init.shared.b64 [%r2], 1;
      fence.mbarrier_init.release.cluster; mbarrier.arrive.expect_tx.shared.b64 %rd2, [%r2], 16;
      clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
    L: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], 0; @!%p2 bra L; ld.shared.b128 %q1, [%r1]; {axes}
      clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r30, %r31, %r32, _}}, %q1;
      mul.wide.u32 %rd1, %r3, 24; add.s64 %rd1, %rd1, %rd90;"""
    code += "".join(
        f"st.global.b32 [%rd1+{4 * i}], %r{20 + i}; st.global.b32 [%rd1+{12 + 4 * i}], %r{30 + i};" for i in range(3)
    )
    options: dict[str, Any] = {"shared": SHARED, "races": True, "multiprocessors": 2}
    run(code, out, grid=(2, 1, 2), block=1, **options)
    assert out.tolist() == [[0, 0, 1] * 2, [1, 0, 1] * 2]
