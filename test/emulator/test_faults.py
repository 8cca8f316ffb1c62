"""Faults that the emulator must report, each with its place."""

from __future__ import annotations

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run
from ptx_emulator import (
    BarrierError,
    CollectiveError,
    Deadlock,
    Misaligned,
    OutOfBounds,
    RaceError,
    TensorMemoryError,
    UninitializedRead,
    UnsupportedPTX,
    machine,
)

SHARED = ".shared .align 16 .b8 buffer[1024];\n  .shared .align 8 .b64 bar;"
ADDRESS = "mov.u32 %r1, buffer; shl.b32 %r2, %r99, 2; add.s32 %r2, %r1, %r2; mov.u32 %r3, bar;"


def test_global_out_of_bounds_names_block_and_threads() -> None:
    code = "mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %rd90; st.global.b32 [%rd1], %r99;"
    with pytest.raises(OutOfBounds, match=r"st\.global\.b32(.|\n)*block \(0, 0, 0\), threads 30, 31"):
        run(code, np.zeros(30, np.uint32))


def test_shared_out_of_bounds_and_misaligned() -> None:
    with pytest.raises(OutOfBounds, match="shared access out of bounds"):
        run(f"{ADDRESS} st.shared.b32 [%r2+1024], %r99;", shared=SHARED)
    with pytest.raises(Misaligned, match="not a multiple of 8"):
        run(f"{ADDRESS} st.shared.b64 [%r2], %rd1;", shared=SHARED)


def test_read_of_what_nobody_wrote() -> None:
    with pytest.raises(UninitializedRead, match=r"shared memory \+0x"):
        run(f"{ADDRESS} ld.shared.b32 %r4, [%r2];", shared=SHARED, races=True)


def test_missing_barrier_is_a_race() -> None:
    code = f"{ADDRESS} st.shared.b32 [%r2], %r99; BAR xor.b32 %r4, %r2, 128; ld.shared.b32 %r5, [%r4];"
    run(code.replace("BAR", "bar.sync 0;"), block=64, shared=SHARED, races=True)
    with pytest.raises((RaceError, UninitializedRead)):
        run(code.replace("BAR", ""), block=64, shared=SHARED, races=True, scheduler="random")
    twice = code.replace("BAR", "bar.sync 0;") + "st.shared.b32 [%r2], %r99;"
    with pytest.raises(RaceError, match=r"write by warp . .* is not ordered after the read by warp"):
        run(twice, block=64, shared=SHARED, races=True)


def test_missing_warp_barrier_is_a_race() -> None:
    """Between lanes of one warp, in shared memory. Collectives, and lanes with separate data, need no barrier."""
    neighbour = "xor.b32 %r4, %r2, 4;"
    code = f"""{ADDRESS} {neighbour} st.shared.b32 [%r2], %r99; SYNC
      ld.shared.b32 %r5, [%r4]; AGAIN st.shared.b32 [%r2], %r5;"""

    def go(sync: str, again: str) -> None:
        run(code.replace("SYNC", sync).replace("AGAIN", again), shared=SHARED, races=True)

    together = "bar.warp.sync -1;"
    go(together, together)
    go("shfl.sync.bfly.b32 %r6, %r5, 1, 31, -1;", together)
    with pytest.raises(
        RaceError, match=r"read by lane \d+ of warp 0 .* the write by another lane .* no bar\.warp\.sync"
    ):
        go("", together)
    with pytest.raises(
        RaceError, match=r"write by lane \d+ of warp 0 .* the read by another lane .* no bar\.warp\.sync"
    ):
        go(together, "")
    run(
        f"{ADDRESS} st.shared.b32 [%r2], %r99; ld.shared.b32 %r5, [%r2]; st.shared.b32 [%r2], %r5;",
        shared=SHARED,
        races=True,
    )
    uniform = "mov.u32 %r1, buffer; {0} st.shared.b32 [%r1], 5; ld.shared.b32 %r5, [%r1]; {1} st.shared.b32 [%r1], 6;"
    run(uniform.format("", together), shared=SHARED, races=True)
    with pytest.raises(RaceError, match="the read by another lane"):
        run(uniform.format("", ""), shared=SHARED, races=True)


def test_global_race_between_blocks_and_its_release() -> None:
    data, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    code = """
      mov.u32 %r1, %ctaid.x; setp.ne.s32 %p1, %r1, 0; @%p1 bra READ;
      st.global.b32 [%rd90], 42; FENCE mov.u32 %r2, 1; atom.global.RELEASE.exch.b32 %r3, [%rd91], %r2; ret;
    READ: ld.ACQUIRE.global.b32 %r4, [%rd91]; setp.eq.s32 %p2, %r4, 0; @%p2 bra READ;
      ld.global.b32 %r5, [%rd90]; st.global.b32 [%rd92], %r5;"""
    out = np.zeros(1, np.uint32)

    def go(release: str, acquire: str) -> None:
        text = code.replace("FENCE", "").replace("RELEASE", release).replace("ACQUIRE", acquire)
        data[0] = flag[0] = 0
        run(text, data, flag, out, block=1, grid=2, races=True)

    go("release.gpu", "acquire.gpu")
    assert out[0] == 42
    with pytest.raises(RaceError, match="global memory"):
        go("relaxed.gpu", "relaxed.gpu")


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_a_flag_that_is_set_after_a_copy_may_be_polled(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 1 polls what block 0 sets when its copy has arrived. If nothing sets the flag, it is a deadlock."""
    code = f"""{ADDRESS} mov.u32 %r9, %ctaid.x; setp.ne.s32 %p1, %r9, 0; @%p1 bra POLL;
      mbarrier.init.shared.b64 [%r3], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r3], 128;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd90], 128, [%r3];
    W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra W; ld.shared.b32 %r4, [%r1];
      st.release.gpu.global.b32 [%rd91], %r4; ret;
    POLL: ld.acquire.gpu.global.b32 %r5, [%rd91]; setp.eq.s32 %p3, %r5, 0; @%p3 bra POLL;"""
    options = {"shared": SHARED, "grid": 2, "block": 1, "races": True, "scheduler": scheduler}
    monkeypatch.setattr(machine, "IDLE_LIMIT", 3 * machine.PATIENCE)
    run(code, np.ones(32, np.uint32), np.zeros(1, np.uint32), **options)
    with pytest.raises(Deadlock, match=r"threads at PTX line \d+ \(ld\.acquire|no progress"):
        run(code, np.zeros(32, np.uint32), np.zeros(1, np.uint32), **options)


def test_deadlock_lists_the_barriers() -> None:
    code = f"""{ADDRESS} setp.eq.s32 %p1, %r99, 0; @%p1 mbarrier.init.shared.b64 [%r3], 2; bar.sync 0;
      @%p1 mbarrier.arrive.shared.b64 %rd1, [%r3];
    L: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra L;"""
    with pytest.raises(Deadlock, match=r"32 threads at PTX line \d+ (.|\n)*1 of 2 arrivals, 0 bytes outstanding"):
        run(code, shared=SHARED)
    with pytest.raises(Deadlock, match=r"named barrier 1 of block \(0, 0, 0\): 32 of 64 threads"):
        run("setp.lt.u32 %p1, %r99, 32; @%p1 bar.sync 1, 64;", block=64)


def test_barrier_misuse() -> None:
    init = f"{ADDRESS} setp.eq.s32 %p1, %r99, 0; @%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0;"
    with pytest.raises(BarrierError, match=r"before mbarrier\.init"):
        run(f"{ADDRESS} mbarrier.arrive.shared.b64 %rd1, [%r3];", shared=SHARED)
    with pytest.raises(BarrierError, match="more arrivals than its count"):
        run(f"{init} mov.u32 %r4, 2; @%p1 mbarrier.arrive.shared.b64 %rd1, [%r3], %r4;", shared=SHARED)
    with pytest.raises(BarrierError, match="not a multiple of 32"):
        run("bar.sync 1, 40;", block=64)


def test_broken_collectives() -> None:
    with pytest.raises(CollectiveError, match="member mask 0xffffffff, executed by 0x0000ffff"):
        run("setp.lt.u32 %p1, %r99, 16; @%p1 shfl.sync.bfly.b32 %r1, %r99, 1, 31, -1;")
    with pytest.raises(CollectiveError, match=r"wgmma\.fence executed by 64 of 128 threads"):
        run("setp.lt.u32 %p1, %r99, 64; @%p1 wgmma.fence.sync.aligned;", block=128)


def test_warp_barrier_waits_for_lanes_that_wait_elsewhere() -> None:
    """Lane 0 waits on an mbarrier, the others go ahead to the barrier of the warp; what it orders is seen behind it."""
    code = f"""{ADDRESS} setp.eq.s32 %p1, %r99, 0; setp.eq.s32 %p2, %r99, 32;
      @%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0; setp.ge.u32 %p3, %r99, 32; @%p3 bra OTHER;
      @!%p1 bra JOIN;
    L: mbarrier.try_wait.parity.shared.b64 %p4, [%r3], 0; @!%p4 bra L;
    JOIN: WAIT
      ld.shared.b32 %r10, [%r1]; mul.wide.u32 %rd1, %r99, 4; add.s64 %rd1, %rd1, %rd90;
      st.global.b32 [%rd1], %r10; ret;
    OTHER: @!%p2 bra DONE; st.shared.b32 [%r1], 7; ARRIVE DONE: """
    arrive = "mbarrier.arrive.shared.b64 %rd5, [%r3];"
    for scheduler in ("lowest-pc", "random", "lazy"):
        out = np.zeros(32, np.uint32)
        options = {"block": 64, "shared": SHARED, "races": True, "scheduler": scheduler}
        run(code.replace("WAIT", "bar.warp.sync -1;").replace("ARRIVE", arrive), out, **options)
        assert (out == 7).all()
        with pytest.raises((RaceError, UninitializedRead)):
            run(code.replace("WAIT", "").replace("ARRIVE", arrive), out, **options)
        with pytest.raises(Deadlock, match=r"31 threads at PTX line \d+ \(bar\.warp\.sync"):
            run(code.replace("WAIT", "bar.warp.sync -1;").replace("ARRIVE", ""), out, **options)


def test_warp_barrier_of_lanes_that_have_ended() -> None:
    code = "setp.ge.u32 %p1, %r99, 16; @%p1 bra DONE; bar.warp.sync {}; DONE: "
    run(code.format("0xffff"))
    with pytest.raises(CollectiveError, match=r"bar\.warp\.sync executed by 16 of 32 threads: the others have ended"):
        run(code.format("-1"))
    with pytest.raises(CollectiveError, match=r"0x000000ff does not name the lane 8"):
        run(code.format("0xff"))


def test_arrivals_that_nobody_waits_for() -> None:
    """Threads may end after `bar.arrive`; a thread that waits for more than arrive is a deadlock."""
    launch = run("bar.arrive 1, 64;")
    assert launch.warnings == ["PE307: named barrier 1 of block (0, 0, 0): 32 of 64 threads when the kernel ended"]
    with pytest.raises(Deadlock, match=r"named barrier 1 of block \(0, 0, 0\): 64 of 96 threads"):
        run("setp.lt.u32 %p1, %r99, 32; @%p1 bar.arrive 1, 96; @!%p1 bar.sync 1, 96;", block=64)


ALLOC = f"""{ADDRESS} setp.lt.u32 %p1, %r99, 32; @%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 64;
  bar.sync 0; ld.shared.b32 %r10, [%r3]; """
FREE = "bar.sync 0; @%p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;"


def test_tensor_memory_faults() -> None:
    run(ALLOC + FREE, block=128, shared=SHARED, races=True)
    with pytest.raises(TensorMemoryError, match="ended with 64 tensor memory columns allocated"):
        run(ALLOC, block=128, shared=SHARED)
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r11}, [%r12];"
    with pytest.raises(TensorMemoryError, match="warp 1 reaches only lanes 32 to 63"):
        run(f"{ALLOC} mov.b32 %r12, %r10; {load} {FREE}", block=128, shared=SHARED)
    own = "shl.b32 %r13, %r99, 16; and.b32 %r13, %r13, 0x600000; add.s32 %r12, %r10, %r13;"
    with pytest.raises(TensorMemoryError, match=r"columns 64\.\.64 .* not all allocated"):
        run(f"{ALLOC} {own} add.s32 %r12, %r12, 64; {load} {FREE}", block=128, shared=SHARED)
    with pytest.raises(UninitializedRead, match="tensor memory lane 0 column 0"):
        run(f"{ALLOC} {own} {load} {FREE}", block=128, shared=SHARED, races=True)


def test_unknown_opcodes_and_modifiers_are_named() -> None:
    with pytest.raises(UnsupportedPTX, match=r"PTX line \d+: opcode vabsdiff"):
        run("vabsdiff.u32.u32.u32 %r1, %r2, %r3, %r4;")
    with pytest.raises(UnsupportedPTX, match=r"div\.rp\.f32: modifier \.rp"):
        run("div.rp.f32 %r1, %r2, %r3;")
    with pytest.raises(UnsupportedPTX, match="special register %envreg3"):
        run("mov.u32 %r1, %envreg3;")


def test_trap_and_bad_arguments() -> None:
    with pytest.raises(ptx_emulator.Fault, match="trap"):
        run("trap;")
    with pytest.raises(ValueError, match="scheduler must be one of"):
        run("mov.u32 %r1, 0;", scheduler="fast")
    with pytest.raises(ValueError, match="takes 1 arguments, got 2"):
        ptx_emulator.run_ptx(".visible .entry k(.param .b64 a) { ret; }", "k", 1, 1, [0, 0])
    with pytest.raises(ValueError, match="arch must be one of"), ptx_emulator.emulate("sm_80"):
        pass
