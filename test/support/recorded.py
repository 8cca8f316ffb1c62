"""Calls of compiled kernels without a GPU: tensors that say they are on one, and kernels that remember calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cudnn import launch
from cudnn.fused.host import FusedAPI


class OnGpu:
    """A CPU tensor that says it is on a GPU; a slice or view of it is an ordinary one."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)

    def get_device(self) -> int:
        return 0


class Recorded:
    """Kernels that only remember how they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refusing = False
        monkeypatch.setattr(launch, "kernel", self.load)
        monkeypatch.setattr(launch, "raw_stream", lambda stream, index: 17 if stream is None else stream)
        monkeypatch.setattr(FusedAPI, "multiprocessors", staticmethod(lambda index: 78))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17, raising=False)

    def load(self, source: str, configuration: Any, arch: str) -> Any:
        def run(*arguments: Any) -> None:
            if self.refusing:
                raise ValueError("Mismatched Tensor on argument #0")
            self.calls.append((source.rpartition(":")[2], arguments))

        return run
