from __future__ import annotations

import logging
import threading

import pytest

from cudnn.backend import handle as module
from cudnn.backend.handle import (
    Handle,
    create_handle,
    default_handle,
    destroy_handle,
    device_capability,
    get_stream,
    gpu_available,
    resolve,
    set_stream,
)
from support.threads import together

no_gpu = pytest.mark.skipif(gpu_available(), reason="about machines without a GPU")


@no_gpu
def test_without_a_gpu_a_handle_selects_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    module._log_reference.cache_clear()
    with caplog.at_level(logging.INFO, "cudnn"):
        handles = [create_handle(), create_handle()]
    assert [record.message for record in caplog.records] == [
        "no CUDA device: this handle runs graphs on the reference executor"
    ]
    assert all(handle.is_reference and handle.device == -1 for handle in handles)
    assert device_capability(0) is None
    for handle in handles:
        destroy_handle(handle)


def test_a_handle_is_like_its_number() -> None:
    handle = create_handle()
    assert int(handle) == handle.ptr == handle.__index__()
    assert resolve(handle) is resolve(int(handle)) is handle
    assert {handle: 1}[handle] == 1
    destroy_handle(int(handle))


@no_gpu
def test_stream_by_position_and_by_keyword() -> None:
    handle = create_handle()
    assert get_stream(handle) == 0
    set_stream(handle, 64)
    assert get_stream(handle) == 64
    set_stream(handle=int(handle), stream=128)
    assert get_stream(handle) == 128
    destroy_handle(handle)


def test_each_handle_has_an_object_for_each_stream() -> None:
    first, second = Handle(0x7000, 0), Handle(0x7000, 0)
    found = [first.queue]
    for stream in (64, 0, 128, 64):
        first.put_on(stream)
        found.append(first.queue)
    assert found[2] is found[0]
    assert found[4] is found[1]
    assert len({id(queue) for queue in [*found, second.queue]}) == 4


def test_a_destroyed_handle_is_refused_everywhere() -> None:
    handle = create_handle()
    number = int(handle)
    destroy_handle(handle)
    for call in (resolve, destroy_handle, get_stream, int, lambda gone: set_stream(gone, 0)):
        with pytest.raises(ValueError, match="handle: got a destroyed handle; allowed: a live handle"):
            call(handle)
    with pytest.raises(ValueError, match="no live handle of this library"):
        resolve(number)
    assert "destroyed" in repr(handle)


def test_foreign_handles_are_refused() -> None:
    for number in (0xDEAD0000, 0, -1):
        with pytest.raises(ValueError, match="no live handle of this library"):
            destroy_handle(number)
    with pytest.raises(ValueError, match="destroyed handle"):
        resolve(Handle(0x1234, 0))  # not from create_handle()
    with pytest.raises(TypeError, match=r"handle: got str; allowed: a cudnn\.Handle"):
        resolve("handle")  # type: ignore[arg-type]


def test_default_handles_are_per_thread_and_reused() -> None:
    mine = default_handle(0)
    assert default_handle(0) is mine
    others: list[Handle] = []
    barrier = threading.Barrier(4)

    def work(_: int) -> None:
        others.append(default_handle(0))
        barrier.wait(10)

    together(work, 4)
    assert len({mine, *others}) == 5
    together(lambda _: others.append(default_handle(0)), 1)
    assert others.pop() in others  # the handle of a thread that has ended


def test_a_destroyed_default_handle_is_replaced() -> None:
    gone = default_handle(0)
    destroy_handle(gone)
    assert default_handle(0).ptr
    assert default_handle(0) is not gone


def test_handles_from_many_threads() -> None:
    def work(_: int) -> None:
        for _ in range(200 if not gpu_available() else 3):
            handle = create_handle()
            assert resolve(int(handle)) is handle
            destroy_handle(handle)

    together(work, 8)
