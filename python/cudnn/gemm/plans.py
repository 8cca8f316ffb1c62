"""How a fused GEMM runs on an architecture: which kernel, in which configuration, called with which tensors.

The kernels choose their configuration and list their arguments as named slots; this module binds a call's tensors to
them by name. On Hopper, operands that the tensor cores cannot read are prepared in a workspace, in the same call.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from cudnn import launch, settings
from cudnn.lazy import torch
from cudnn_kernels.architecture import ARCHITECTURES
from cudnn_kernels.configuration import PreparedGemmConfiguration
from cudnn_kernels.formats import FP4
from cudnn_kernels.problem import GemmProblem
from cudnn_kernels.signature import Tensor, Workspace, signature, workspace_size


class Plan:
    """The kernel for a problem on an architecture, not loaded yet."""

    def __init__(self, arch: str, problem: GemmProblem) -> None:
        architecture = ARCHITECTURES[arch]
        self.configuration = architecture.configure(problem)
        self.source = architecture.source(self.configuration)
        self.slots = signature(self.configuration)

    @property
    def gemm(self) -> Any:
        """The configuration of the GEMM itself."""
        return self.configuration.gemm

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        m, n = self.gemm.cluster
        return m * n

    def workspace_size(self, sizes: Mapping[str, int]) -> int:
        """Bytes of the workspace for a call's sizes, by name as the slots have them."""
        return workspace_size(self.slots, sizes)

    def load(self, kernel: Callable[[str, Any], Callable[..., None]], name: str) -> LoadedGemm:
        """The kernel, ready to be called, by what loads one. ``name`` is for the log."""
        steps = self.configuration.steps if isinstance(self.configuration, PreparedGemmConfiguration) else {}
        if any(step.source.scale for step in steps.values()):
            say_dequantised(name)
        return LoadedGemm(self, kernel(self.source, self.configuration))


@functools.cache
def say_dequantised(name: str) -> None:
    """Says in the log, once for each API, that block-scaled operands are multiplied in bfloat16."""
    text = "%s: block-scaled operands are dequantised to bfloat16 on sm_90a, whose tensor cores know no block scales"
    settings.configure_logging().warning(text, name)


class LoadedGemm:
    """The kernel of a fused GEMM, callable."""

    def __init__(self, plan: Plan, run: Callable[..., None]) -> None:
        self.plan, self._run = plan, run
        self._take = operator.itemgetter(*(slot.name for slot in plan.slots))
        self._workspace = any(isinstance(slot, Workspace) for slot in plan.slots)
        tensors = [slot for slot in plan.slots if isinstance(slot, Tensor)]
        self._views = [(slot.name, torch.float4_e2m1fn_x2, torch.uint8) for slot in tensors if slot.dtype == FP4]
        self._views += [
            (slot.name, torch.int8, torch.float8_e8m0fnu) for slot in tensors if slot.dtype == "float8_e8m0fnu"
        ]

    def __call__(self, tensors: dict[str, Any], multiprocessors: int, stream: int, workspace: Any) -> None:
        """Runs the kernel on a call's arguments by name."""
        for name, given, taken in self._views:
            if tensors[name].dtype is given:
                tensors[name] = tensors[name].view(taken)
        tensors["multiprocessors"], tensors["stream"] = multiprocessors, stream
        if self._workspace:
            tensors["workspace"] = self._allocated(tensors, stream) if workspace is None else workspace
        self._run(*self._take(tensors))

    def sizes(self, tensors: Mapping[str, Any]) -> dict[str, int]:
        """A call's sizes by name, from the tensors."""
        found: dict[str, int] = {}
        for slot in self.plan.slots:
            if isinstance(slot, Tensor):
                steps = [slot.packed if stride == 1 else 1 for stride in slot.strides]
                for name, size, step in zip(slot.shape, tensors[slot.name].shape, steps, strict=True):
                    found.setdefault(str(name), size * step)
        return found

    def _allocated(self, tensors: dict[str, Any], stream: int) -> Any:
        """Memory of this call."""
        a = tensors["a"]
        with _allocating_for(stream, a):
            return torch.empty(self.plan.workspace_size(self.sizes(tensors)), dtype=torch.uint8, device=a.device)


def _allocating_for(stream: int, tensor: Any) -> Any:
    """A context in which PyTorch's allocator knows that memory is used on ``stream``."""
    if not tensor.is_cuda or stream == launch.raw_stream(None, tensor.get_device()):
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=tensor.device))
