"""Calls of compiled kernels without a GPU: tensors that say they are on one, kernels and a driver that remember."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch

from cudnn.backend import cuda_graph
from cudnn.fused.host import FusedAPI
from cudnn.runtime import launch


class OnGpu(torch.Tensor):
    """A CPU tensor that reports a GPU device; a slice or view of it is an ordinary one."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl
    is_cuda = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    @staticmethod
    def __new__(cls: Any, tensor: torch.Tensor) -> Any:
        return tensor.detach().as_subclass(cls)

    def get_device(self) -> int:
        return 0


class Recorded:
    """Kernels that only remember how they were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refusing = False
        monkeypatch.setattr(launch, "kernel", self.load)
        monkeypatch.setattr(launch, "raw_stream", lambda stream, index: 17 if stream is None else stream)
        monkeypatch.setattr(FusedAPI, "num_sms", staticmethod(lambda index: 78))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 17, raising=False)

    def load(self, source: str, configuration: Any, arch: str) -> Any:
        def run(*arguments: Any) -> None:
            if self.refusing:
                raise ValueError("Mismatched Tensor on argument #0")
            self.calls.append((source.rpartition(":")[2], arguments))

        return run


class GraphDriver:
    """Makes, launches and destroys executable CUDA graphs that are numbers, as are events."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.launched: list[tuple[int, int]] = []  # graphs, and the streams
        self.capturing, self.left, self.refusal, self._next = 0, 0, 0, 100
        functions = {"cuStreamIsCapturing": self.ask, "cuEventQuery": self.query, "cuGraphLaunch": self.launch}
        monkeypatch.setattr(cuda_graph, "_driver", self)
        monkeypatch.setattr(cuda_graph, "unchecked", functions.__getitem__)
        monkeypatch.setattr(cuda_graph, "on_device", lambda device: contextlib.nullcontext(ctypes.c_void_p()))

    def __call__(self, name: str, *arguments: Any) -> None:
        if name in ("cuGraphCreate", "cuGraphInstantiateWithFlags", "cuEventCreate"):
            self._next += 1
            arguments[0]._obj.value = self._next
        target = getattr(arguments[0], "_obj", arguments[0])
        read = ctypes.addressof(target) if isinstance(target, ctypes.c_char) else target.value  # never the data
        self.calls.append((name, read))

    def ask(self, queue: Any, result: Any) -> int:
        result._obj.value = self.capturing
        return 0

    def query(self, marker: Any) -> int:
        self.calls.append("cuEventQuery")
        return self.left

    def launch(self, graph: Any, queue: Any) -> int:
        self.launched.append((ctypes.addressof(graph._obj), ctypes.addressof(queue._obj)))
        return self.refusal
