"""Which memory of PyTorch a kernel may reach."""

from __future__ import annotations

import gc
import threading
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ptx_emulator.memory import storages, torch_storages


class Subclass(torch.Tensor):
    pass


def test_tensors_of_every_type_are_found() -> None:
    tensors = [torch.zeros(24), torch.nn.Parameter(torch.zeros(3)), torch.zeros(5).as_subclass(Subclass)]
    found = torch_storages()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        assert (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) in found


def spans(*tensors: torch.Tensor) -> set[tuple[int, int]]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages}


def test_a_call_leads_to_its_tensors_and_where_it_may_hold_addresses_to_all() -> None:
    """Also to those that the collector was told to forget."""
    a, b, other = torch.zeros(24), torch.zeros(7, dtype=torch.int32), torch.zeros(9)
    table = torch.tensor([other.data_ptr()])
    gc.collect()
    gc.freeze()
    try:
        assert storages([a, b[2:], 1.5, 3, None]) == spans(a, b)
    finally:
        gc.unfreeze()
    for holder in (table, other.data_ptr(), object()):
        assert spans(other) < storages([a, holder])


def test_the_search_does_not_disturb_other_threads() -> None:
    """A tuple grows while it is filled, which fails where somebody else refers to it."""
    done, failures = threading.Event(), list[BaseException]()

    def fill() -> None:
        try:
            while not done.is_set():
                tuple(number for number in range(2000))
        except SystemError as error:
            failures.append(error)

    threads = [threading.Thread(target=fill) for _ in range(4)]
    for thread in threads:
        thread.start()
    end = time.perf_counter() + 2
    while time.perf_counter() < end and not failures:
        torch_storages()
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_tensors_of_a_trace_own_no_memory() -> None:
    """torch.compile leaves fake tensors behind, with symbols for sizes."""
    real = torch.zeros(24)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.zeros(3, 5))
    symbol = fake.new_empty(mode.shape_env.create_unbacked_symint())
    found = torch_storages()
    first = real.untyped_storage().data_ptr()
    assert (first, first + 96) in found
    assert all(type(bound) is int for pair in found for bound in pair)
    del fake, symbol
