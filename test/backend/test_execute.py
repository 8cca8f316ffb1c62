"""The backend on a GPU, except for running plans, which the tests of graphs cover."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch

from cudnn.backend.handle import (
    Handle,
    create_handle,
    default_handle,
    destroy_handle,
    device_capability,
    device_count,
    get_stream,
    set_stream,
)
from cudnn.backend.memory import copy_to_device

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("libcudnn")]


@pytest.fixture
def handle() -> Iterator[Handle]:
    made = create_handle()
    set_stream(made, torch.cuda.current_stream().cuda_stream)
    yield made
    torch.cuda.synchronize()
    destroy_handle(made)


def test_the_device_is_described(handle: Handle) -> None:
    assert not handle.is_reference
    assert handle.device == torch.cuda.current_device()
    assert device_capability(handle.device) == torch.cuda.get_device_capability()
    assert device_capability(device_count()) is None
    assert device_count() == torch.cuda.device_count()
    assert get_stream(handle) == torch.cuda.current_stream().cuda_stream


def test_default_handles_follow_the_stream_into_a_capture() -> None:
    default_handle(0)  # a capture would not survive its making
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert get_stream(default_handle(0)) == torch.cuda.current_stream().cuda_stream
    assert get_stream(default_handle(0)) == torch.cuda.current_stream().cuda_stream


def test_copy_to_device(handle: Handle) -> None:
    words = (ctypes.c_int32 * 5)(*range(5))
    target = torch.full((6,), -1, dtype=torch.int32, device="cuda")
    copy_to_device(target.data_ptr(), words, handle)
    torch.cuda.synchronize()
    assert target.tolist() == [0, 1, 2, 3, 4, -1]

    thread = threading.Thread(target=lambda: copy_to_device(target.data_ptr() + 4, words, handle))
    thread.start()  # without a current context
    thread.join()
    torch.cuda.synchronize()
    assert target.tolist() == [0, 0, 1, 2, 3, 4]
