"""How a fused GEMM runs on each architecture: which kernel, in which configuration, called with which tensors.

Blackwell's tensor cores take every operand as it is. Hopper's multiply 16-bit elements of both majors, 8-bit and 32-bit
ones K-major only, and know no block scales. So, in the same call,

- block-scaled operands are dequantised to bfloat16. That is exact, for an element of 4 or 8 bits times its factor has
  at most 6 significant bits; only beyond bfloat16's exponents does the product become infinite or lose bits;
- 8-bit and 32-bit operands that are not K-major are transposed.

Both go into a workspace.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cudnn import launch, settings
from cudnn.api_base import ceil_div
from cudnn.gemm.formats import BITS, FLOAT4
from cudnn.lazy import torch
from cudnn_kernels.configuration import (
    GemmConfiguration,
    GemmProblem,
    OperandConfiguration,
    PreparedGemmConfiguration,
)
from cudnn_kernels.epilogue import StoreTile
from cudnn_kernels.sm90.heuristics import configure as configure_hopper
from cudnn_kernels.sm100.heuristics import configure as configure_blackwell

_ROW_BYTES = 16  # rows of a prepared operand begin at multiples of as many
_START_BYTES = 256  # prepared operands begin at multiples of as many in the workspace


@dataclass(frozen=True)
class Operand:
    """A or B: its type and major by name; the type of its scale factors, and how many elements share one."""

    name: str
    dtype: str
    major: str
    scales: str | None = None
    vector: int = 0


@dataclass(frozen=True)
class Request:
    """What a fused GEMM asks for. ``tile`` and ``cluster`` are the caller's wishes; the size m plays no part."""

    operands: tuple[Operand, Operand]
    epilogue: tuple[Any, ...]
    schedule: Any
    n: int
    k: int
    tile: tuple[int, int]
    cluster: tuple[int, int]


class Plan:
    """A kernel, not loaded yet, and the names of the tensors that it is called with, in order."""

    source: str
    configuration: Any
    names: list[str]

    def __init__(self, request: Request) -> None:
        self.request = request

    def _arguments(self) -> list[str]:
        """The epilogue's."""
        fields = ("tensor", "norm_const")
        return [getattr(o, field) for o in self.request.epilogue for field in fields if hasattr(o, field)]

    @property
    def gemm(self) -> GemmConfiguration:
        """The configuration of the GEMM itself."""
        return self.configuration

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        m, n = self.gemm.cluster
        return m * n

    def workspace_size(self, m: int, n: int, k: int, batch: int) -> int:
        """Bytes that prepared operands take."""
        return 0

    def load(self, kernel: Callable[[str, Any], Callable[..., None]], name: str) -> LoadedGemm:
        """The kernel, ready to be called, by what loads one. ``name`` is for the log."""
        return LoadedGemm(self, kernel(self.source, self.configuration))


class BlackwellPlan(Plan):
    """One kernel for everything."""

    source = "cudnn_kernels.sm100.gemm:Gemm"

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        a, b = request.operands
        self.configuration = configure_blackwell(
            GemmProblem(
                a.dtype,
                b.dtype,
                request.epilogue,
                request.schedule,
                request.n,
                request.k,
                a.major,
                b.major,
                a.scales or "",
                a.vector if a.scales else 0,
                request.tile,
                request.cluster,
            )
        )
        self.names = ["a", "b", *(["sfa", "sfb"] if a.scales else []), *self._arguments()]


class HopperPlan(Plan):
    """The GEMM alone or, where operands must be prepared, with that before it in the same call."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        steps = [_preparation(operand) for operand in request.operands]
        (a, a_major), (b, b_major) = (
            (step.to, operand.major if step.to_major == step.major else "k") if step else (operand.dtype, operand.major)
            for operand, step in zip(request.operands, steps, strict=True)
        )
        gemm = configure_hopper(
            GemmProblem(a, b, request.epilogue, request.schedule, request.n, request.k, a_major, b_major)
        )
        self._steps = steps
        if any(steps):
            self.source = "cudnn_kernels.sm90.prepared:PreparedGemm"
            self.configuration = PreparedGemmConfiguration(gemm, *steps)
            factors = [f"sf{o.name}" for o, step in zip(request.operands, steps, strict=True) if step and o.scales]
            self.names = ["a", "b", *factors, "workspace", *self._arguments()]
        else:
            self.source = "cudnn_kernels.sm90.gemm:Gemm"
            self.configuration = gemm
            self.names = ["a", "b", *self._arguments()]

    @property
    def gemm(self) -> GemmConfiguration:
        return getattr(self.configuration, "gemm", self.configuration)

    def workspace_size(self, m: int, n: int, k: int, batch: int) -> int:
        size = 0
        for mn, step in zip((m, n), self._steps, strict=True):
            if step is not None:
                bits = BITS[step.to]
                inner, outer = (k, mn) if step.to_major == "k" else (mn, k)
                row = ceil_div(inner * bits // 8, _ROW_BYTES) * _ROW_BYTES
                size += ceil_div(row * outer * batch, _START_BYTES) * _START_BYTES
        return size

    def load(self, kernel: Callable[[str, Any], Callable[..., None]], name: str) -> LoadedGemm:
        if any(operand.scales for operand in self.request.operands):
            say_dequantised(name)
        return super().load(kernel, name)


PLANS: dict[str, type[Plan]] = {"sm_90a": HopperPlan, "sm_100a": BlackwellPlan}
"""By architecture."""


def _preparation(operand: Operand) -> OperandConfiguration | None:
    """What an operand needs on Hopper."""
    if operand.scales is None and (operand.major == "k" or BITS[operand.dtype] == 16):
        return None
    major = "k" if operand.major == "k" else "mn"
    return OperandConfiguration(operand.dtype, major, operand.scales, operand.vector if operand.scales else 0)


@functools.cache
def say_dequantised(name: str) -> None:
    """Says in the log, once for each API, that block-scaled operands are multiplied in bfloat16."""
    text = "%s: block-scaled operands are dequantised to bfloat16 on sm_90a, whose tensor cores know no block scales"
    settings.configure_logging().warning(text, name)


class LoadedGemm:
    """The kernel of a fused GEMM, callable."""

    def __init__(self, plan: Plan, run: Callable[..., None]) -> None:
        self.plan, self._run = plan, run
        self._take = operator.itemgetter(*plan.names)
        self._workspace = "workspace" in plan.names
        request = plan.request
        packed = [operand.name for operand in request.operands if operand.dtype == FLOAT4]
        packed += [o.tensor for o in request.epilogue if isinstance(o, StoreTile) and o.dtype == FLOAT4]
        factors = [name for name in ("sfa", "sfb") if name in plan.names]
        self._views = [(name, torch.float4_e2m1fn_x2, torch.uint8) for name in packed]
        self._views += [(name, torch.int8, torch.float8_e8m0fnu) for name in factors]

    def __call__(self, tensors: dict[str, Any], multiprocessors: int, stream: int, workspace: Any) -> None:
        """Runs the kernel on a call's arguments by name."""
        for name, given, taken in self._views:
            if tensors[name].dtype is given:
                tensors[name] = tensors[name].view(taken)
        if self._workspace:
            tensors["workspace"] = self._allocated(tensors, stream) if workspace is None else workspace
        self._run(*self._take(tensors), multiprocessors, stream)

    def _allocated(self, tensors: dict[str, Any], stream: int) -> Any:
        """Memory of this call."""
        a, b = tensors["a"], tensors["b"]
        m, k, batch = a.shape
        packed = self.plan.request.operands[0].dtype == FLOAT4
        size = self.plan.workspace_size(m, b.shape[0], k * 2 if packed else k, batch)
        with _allocating_for(stream, a):
            return torch.empty(size, dtype=torch.uint8, device=a.device)


def _allocating_for(stream: int, tensor: Any) -> Any:
    """A context in which PyTorch's allocator knows that memory is used on ``stream``."""
    if not tensor.is_cuda or stream == launch.raw_stream(None, tensor.get_device()):
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=tensor.device))
