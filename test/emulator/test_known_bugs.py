"""Bugs that public kernels have had: each is found under every schedule, with its line; the right kernel has none.

a. A tensor-memory accumulator is overwritten by the next MMA before `tcgen05.wait::ld`.
b. A tensor map is edited in memory, and another warp or block uses it without release or acquire.
c. `fence.proxy.async` is missing between ordinary stores and a TMA store, a `wgmma` or a `tcgen05.mma`.
d. The barriers of ping-pong warpgroups are swapped.
e. The source of a TMA store is reused before `cp.async.bulk.wait_group.read`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run
from emulator.test_in_flight import multiply
from emulator.test_tensor_core import FREE as TENSOR_FREE
from emulator.test_tensor_core import SETUP, SHARED, descriptor, instruction
from emulator.test_tensor_maps import ACQUIRE, RELEASE, aligned, encode

SCHEDULES = [("lowest-pc", 0), *((name, seed) for name in ("lazy", "random") for seed in range(3))]


@dataclass
class Bug:
    """A right kernel, and how the bug changes it. `line`: a piece of the PTX line that the finding must name."""

    body: str
    wrong: tuple[str, str]
    code: str
    line: str
    arrays: list[Any]
    options: dict[str, Any] = field(default_factory=dict)

    def launch(self, wrong: bool, scheduler: str, seed: int) -> ptx_emulator.Launch:
        body = self.body
        if wrong:
            assert body.count(self.wrong[0]) == 1
            body = body.replace(*self.wrong)
        arrays = [array.copy() if array.dtype != np.uint8 else array for array in self.arrays]
        body = body.replace("; ", ";\n")
        return run(body, *arrays, races=True, scheduler=scheduler, seed=seed, on_error="report", **self.options)


def zeros(size: int = 64) -> np.ndarray:
    return np.zeros(size, np.uint32)


# -- a. One accumulator for two tiles. The operands are zeros: A, 128 x 16 bf16, at +1024; B, 32 x 16, at +0.
STRIDE = 256
MMA = f"@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r10], %rd11, %rd12, {instruction('bf16', 'bf16', 128)}, %p3;"
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r40, %r41}, [%r11];"
LOAD_WAIT = "tcgen05.wait::ld.sync.aligned;"


def wait(phase: int) -> str:
    return f"W{phase}: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], {phase}; @!%p2 bra W{phase};"


CLEAR = "mad.lo.s32 %r5, %r99, 48, %r1; " + "".join(
    f"st.shared.v4.b32 [%r5+{at}], {{%r80, %r80, %r80, %r80}}; " for at in (0, 16, 32)
)
TILES = f"""{SETUP.replace("{g}", "1")} mov.b32 %r80, 0; {CLEAR} fence.proxy.async.shared::cta; bar.sync 0;
  {descriptor(1024, 128, STRIDE).replace("%d", "11")} {descriptor(0, 128, STRIDE).replace("%d", "12")}
  setp.ne.s32 %p3, %r99, %r99; {MMA} {COMMIT} {wait(0)} {LOAD} {LOAD_WAIT} bar.sync 0; {MMA} {COMMIT} {wait(1)}
  add.s32 %r42, %r40, %r41; {LOAD} {LOAD_WAIT} {TENSOR_FREE.replace("{g}", "1")}"""
TENSOR: dict[str, Any] = {"block": 128, "shared": SHARED}

# -- b. Block 0 (or warp 0) edits the map at p0 and sets the flag at p2; another one loads from p1 with it.
MAP_SHARED = ".shared .align 128 .b8 buffer[1024];\n .shared .align 8 .b64 bar;"
READER = f"""mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, FIRST; mov.u32 %r4, WHO;
  @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
  setp.ne.s32 %p3, %r4, 0; @%p3 bra READ; setp.eq.s32 %p4, %r99, 0; @!%p4 bra END; mov.b32 %r20, 3;
  tensormap.replace.tile.global_dim.global.b1024.b32 [%rd90], 1, %r20; {RELEASE} mov.b32 %r21, 1;
  st.release.gpu.global.b32 [%rd92], %r21; bra END;
  READ: ld.acquire.gpu.global.b32 %r22, [%rd92]; setp.eq.s32 %p5, %r22, 0; @%p5 bra READ;
  {ACQUIRE.replace("%rd91", "%rd90")} @!%p1 bra W; mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 128;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd90, {{0, 0}}], [%r3];
  W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra W; END:"""
BY_BLOCK = READER.replace("FIRST", "0").replace("WHO", "%ctaid.x")
BY_WARP = READER.replace("FIRST", "32").replace("mov.u32 %r4, WHO", "shr.u32 %r4, %r99, 5")
MATRIX = aligned(np.zeros((4, 8), np.uint32))


def edited_map(wrong: str, body: str, line: str, **options: Any) -> Bug:
    bug = Bug(body, (wrong, ""), "PE106", line, [], {"shared": MAP_SHARED, "memory": [MATRIX], **options})
    bug.arrays = [encode(MATRIX, "u32", (8, 4)).view(np.uint8), MATRIX.view(np.uint8), zeros(1)]
    return bug


# -- c, e. Ordinary stores, then what the async proxy reads.
FENCE = "fence.proxy.async.shared::cta;"
STAGE = "mov.u32 %r1, buffer; mad.lo.s32 %r2, %r99, 16, %r1; setp.eq.s32 %p1, %r99, 0;"
WRITE = "st.shared.v4.b32 [%r2], {%r99, %r99, %r99, %r99};"
TMA_STORE = """@%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd90, {0, 0}], [%r1];
  @%p1 cp.async.bulk.commit_group;"""
READ_WAIT, ALL_WAIT = "@%p1 cp.async.bulk.wait_group.read 0;", "@%p1 cp.async.bulk.wait_group 0;"
STORED = aligned(np.zeros((8, 16), np.uint32))
STORE = {"block": 32, "shared": ".shared .align 128 .b8 buffer[512];", "memory": [STORED]}
STORE_MAP = [encode(STORED, "u32", (16, 8)).view(np.uint8)]
WGMMA = f"""{STAGE} {WRITE} {FENCE} bar.sync 0; shr.u32 %r6, %r1, 4; cvt.u64.u32 %rd12, %r6;
  wgmma.fence.sync.aligned; {multiply()} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"""

# -- d. Two warpgroups take turns with one buffer. Barrier 1 lets warpgroup 0 go on, barrier 2 warpgroup 1.
PING_PONG = """mov.u32 %r1, buffer; shr.u32 %r3, %r99, 7; and.b32 %r4, %r99, 127; mad.lo.s32 %r2, %r4, 4, %r1;
  xor.b32 %r5, %r2, 256; setp.eq.s32 %p1, %r3, 1; mov.b32 %r10, 0; @%p1 bar.arrive 1, 256; @%p1 bra SECOND;
  FIRST: bar.sync 1, 256; st.shared.b32 [%r2], %r99; bar.sync 3, 128; ld.shared.b32 %r6, [%r5]; bar.arrive 2, 256;
  add.s32 %r10, %r10, 1; setp.lt.s32 %p2, %r10, 2; @%p2 bra FIRST; bra END;
  SECOND: bar.sync 2, 256; st.shared.b32 [%r2], %r99; bar.sync 4, 128; ld.shared.b32 %r7, [%r5];
  setp.eq.s32 %p3, %r10, 1; @!%p3 bar.arrive 1, 256;
  add.s32 %r10, %r10, 1; setp.lt.s32 %p2, %r10, 2; @%p2 bra SECOND; END:"""
SWAPPED = PING_PONG.replace("FIRST: bar.sync 1", "FIRST: bar.sync 2").replace("bar.arrive 2", "bar.arrive 1")
TURNS: dict[str, Any] = {"block": 256, "shared": ".shared .align 16 .b8 buffer[512];"}

BUGS = {
    "a: accumulator overwritten before tcgen05.wait::ld": Bug(
        TILES, (f"{LOAD_WAIT} bar.sync 0; {MMA}", f"bar.sync 0; {MMA} {LOAD_WAIT}"), "PE101", "tcgen05.mma", [], TENSOR
    ),
    "b: tensor map used by another block without acquire": edited_map(
        ACQUIRE.replace("%rd91", "%rd90"), BY_BLOCK, "cp.async.bulk.tensor", grid=2
    ),
    "b: tensor map used by another block without release": edited_map(
        RELEASE, BY_BLOCK, "cp.async.bulk.tensor", grid=2
    ),
    "b: tensor map used by another warp without acquire": edited_map(
        ACQUIRE.replace("%rd91", "%rd90"), BY_WARP, "cp.async.bulk.tensor", block=64
    ),
    "c: no proxy fence before a TMA store": Bug(
        f"{STAGE} {WRITE} {FENCE} bar.sync 0; {TMA_STORE} {ALL_WAIT}",
        (FENCE, ""),
        "PE102",
        "cp.async.bulk.tensor",
        STORE_MAP,
        STORE,
    ),
    "c: no proxy fence before wgmma": Bug(
        WGMMA,
        (FENCE, ""),
        "PE102",
        "wgmma.mma_async",
        [],
        {"block": 128, "shared": ".shared .align 128 .b8 buffer[2048];"},
    ),
    "c: no proxy fence before tcgen05.mma": Bug(TILES, (FENCE, ""), "PE102", "tcgen05.mma", [], TENSOR),
    "d: a warpgroup waits at the other one's barrier": Bug(
        PING_PONG, (PING_PONG, SWAPPED), "PE101", "st.shared", [], TURNS
    ),
    "d: a warpgroup opens its own barrier": Bug(
        PING_PONG, ("bar.arrive 2, 256;", "bar.arrive 1, 256;"), "PE301", "", [], TURNS
    ),
    "e: source of a TMA store reused too early": Bug(
        f"{STAGE} {WRITE} {FENCE} bar.sync 0; {TMA_STORE} {READ_WAIT} bar.sync 0; {WRITE} {FENCE} bar.sync 0; "
        f"{TMA_STORE} {ALL_WAIT}",
        (READ_WAIT, ""),
        "PE101",
        "st.shared",
        STORE_MAP,
        STORE,
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found_under_every_schedule_with_its_line(name: str) -> None:
    bug = BUGS[name]
    for schedule in SCHEDULES:
        errors = bug.launch(True, *schedule).errors
        assert bug.code in [error.code for error in errors], schedule
        found = next(error for error in errors if error.code == bug.code)
        if bug.line:
            texts = [at.text for at in (found.at, found.other) if at]
            assert any(bug.line in text for text in texts), (schedule, texts)
            assert f"PTX line {found.at.line} " in found.where
        else:
            assert " threads at PTX line" in found.message
            assert found.fatal


@pytest.mark.parametrize("name", BUGS)
def test_the_right_kernel_has_no_finding_under_any_schedule(name: str) -> None:
    for schedule in SCHEDULES:
        assert BUGS[name].launch(False, *schedule).findings == [], schedule
