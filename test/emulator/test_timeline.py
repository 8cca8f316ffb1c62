"""The timeline of a thread block: who waits for whom, and what is in flight meanwhile."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import ptx_emulator
from emulator.harness import run
from ptx_emulator.timeline import COPY, COPY_BYTES, MULTIPLY_ADDS, Recorder

SHARED = ".shared .align 128 .b8 buffer[1024];\n .shared .align 8 .b64 bar;"
# Warp 0 loads; warp 1 waits for the copy, then both meet.
PRODUCER = """mov.u32 %r1, buffer; mov.u32 %r3, bar; setp.eq.s32 %p1, %r99, 0; setp.ge.u32 %p4, %r99, 32;
  @%p1 mbarrier.init.shared.b64 [%r3], 1; @%p1 fence.mbarrier_init.release.cluster; bar.sync 0;
  @%p4 bra CONSUMER; @!%p1 bra END; mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r3], 1024;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd90], 1024, [%r3]; bra END;
  CONSUMER: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra CONSUMER; ld.shared.b32 %r5, [%r1];
  END: bar.warp.sync -1; bar.sync 0;"""


@pytest.mark.parametrize("scheduler", ["lowest-pc", "random", "lazy"])
def test_a_consumer_waits_for_the_copy_of_its_producer(scheduler: str) -> None:
    launch = run(PRODUCER, np.zeros(256, np.uint32), shared=SHARED, block=64, scheduler=scheduler, timeline=0)
    timeline = launch.timeline
    assert timeline is not None
    (copy,) = timeline.copies
    assert copy.end - copy.start == COPY + 1024 // COPY_BYTES
    consumer = next(span for span in timeline.waits[1] if span.what == "mbarrier")
    assert consumer.end == copy.end
    assert consumer.start < copy.end
    meeting = timeline.waits[0][-1]  # at the last barrier, for the consumer
    assert meeting.what == "bar.sync"
    assert meeting.end > copy.end
    assert meeting.start < copy.end
    assert [span.what for span in timeline.waits[0]].count("mbarrier") == 0


def test_a_copy_to_global_memory_ends_with_its_wait() -> None:
    body = """mov.u32 %r1, buffer; mov.b32 %r5, 1; st.shared.b32 [%r1], %r5; setp.eq.s32 %p1, %r99, 0; @!%p1 bra END;
      cp.async.bulk.global.shared::cta.bulk_group [%rd90], [%r1], 64; cp.async.bulk.commit_group;
      cp.async.bulk.wait_group 0; END: bar.warp.sync -1;"""
    timeline = run(body, np.zeros(16, np.uint32), shared=SHARED, timeline=0).timeline
    assert timeline is not None
    (copy,), (wait,) = timeline.copies, timeline.waits[0]
    assert wait.end == copy.end == copy.start + COPY + 64 // COPY_BYTES


def test_only_the_block_that_was_asked_for_is_drawn() -> None:
    timeline = run("bar.sync 0;", block=64, grid=3, timeline=1).timeline
    assert timeline is not None
    assert timeline.block == (1, 0, 0)
    assert set(timeline.runs) == {0, 1}
    assert run("bar.sync 0;", block=64, grid=3, timeline=(3,)).timeline is None
    assert run("bar.sync 0;", block=64).timeline is None
    with pytest.raises(ValueError, match="timeline must be the one to three coordinates of a block; got -1"):
        run("bar.sync 0;", timeline=-1)


def test_tensor_cores_multiply_one_after_the_other() -> None:
    from emulator.test_known_bugs import SHARED as TENSOR_SHARED
    from emulator.test_known_bugs import TILES

    timeline = run(TILES, block=128, shared=TENSOR_SHARED, timeline=0).timeline
    assert timeline is not None
    first, second = timeline.mmas
    assert first.end - first.start == 128 * 32 * 16 // MULTIPLY_ADDS["tcgen05.mma"]
    assert first.end <= second.start
    assert any(span.end == first.end for warp in range(4) for span in timeline.waits[warp])


def test_the_drawing() -> None:
    launch = run(PRODUCER, np.zeros(256, np.uint32), shared=SHARED, block=64, timeline=0)
    assert isinstance(launch.timeline, ptx_emulator.Timeline)
    text = launch.timeline.svg()
    root = ElementTree.fromstring(text)
    kinds = [each.get("class") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds.count("copy") == 2  # one in the legend
    assert kinds.count("wait") > 2
    assert "warp 1" in text
    assert "prefers-color-scheme: dark" in text
    assert launch.timeline._repr_svg_() == text


def test_without_a_timeline_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recorder, "step", lambda *_: pytest.fail("recorded"))
    run(PRODUCER, np.zeros(256, np.uint32), shared=SHARED, block=64)
