"""Which memory of PyTorch a kernel may reach."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ptx_emulator.memory import torch_storages


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
