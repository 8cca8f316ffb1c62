"""How a fused GEMM runs on Hopper: which operands are prepared first, and the calls of its kernels.

Hopper multiplies 16-bit elements of both majors, 8-bit and 32-bit ones K-major only, and knows no block scales. So

- block-scaled operands are dequantised to bfloat16. That is exact, for an element of 4 or 8 bits times its factor has
  at most 6 significant bits; only beyond bfloat16's exponents does the product become infinite or lose bits;
- 8-bit and 32-bit operands that are not K-major are transposed.

Both go into a workspace.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cudnn import launch, settings
from cudnn.api_base import ceil_div
from cudnn.errors import refusal
from cudnn.gemm.formats import BITS, FLOAT4
from cudnn.lazy import torch
from cudnn_kernels.configuration import GemmProblem, OperandConfiguration
from cudnn_kernels.epilogue import StoreTile
from cudnn_kernels.sm90.heuristics import configure

GEMM = "cudnn_kernels.sm90.gemm:Gemm"
PREPARE = "cudnn_kernels.sm90.operand:PrepareOperand"
ROW_BYTES = 16  # rows of an operand begin at multiples of as many
WORKSPACE_BYTES = 256  # operands in the workspace begin at multiples of as many


@dataclass(frozen=True)
class Operand:
    """A or B: its type and major by name; the type of its scale factors, and how many elements share one."""

    name: str
    dtype: str
    major: str
    scales: str | None = None
    vector: int = 0


class Preparation:
    """What is done to an operand before it is multiplied. ``result`` is the operand that comes of it."""

    def __init__(self, operand: Operand) -> None:
        major = "k" if operand.major == "k" else "mn"
        self.configuration = OperandConfiguration(
            operand.dtype, major, operand.scales, operand.vector if operand.scales else 0
        )
        kept = self.configuration.to_major == major
        self.result = Operand(operand.name, self.configuration.to, operand.major if kept else "k")
        self.packed = operand.dtype == FLOAT4
        self.scales = f"sf{operand.name}" if operand.scales else None

    def geometry(self, mn: int, k: int, batch: int) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
        """Shape, strides and bytes of the result."""
        step = ROW_BYTES * 8 // BITS[self.result.dtype]
        inner, outer = (k, mn) if self.result.major == "k" else (mn, k)
        pitch = ceil_div(inner, step) * step
        stride = (pitch, 1, pitch * outer) if self.result.major == "k" else (1, pitch, pitch * outer)
        return (mn, k, batch), stride, pitch * outer * batch * BITS[self.result.dtype] // 8


def prepare(operand: Operand) -> Preparation | None:
    """What an operand needs."""
    if operand.scales is None and (operand.major == "k" or BITS[operand.dtype] == 16):
        return None
    return Preparation(operand)


@functools.cache
def say_dequantised(name: str) -> None:
    """Says in the log, once for each API, that block-scaled operands are multiplied in bfloat16."""
    text = "%s: block-scaled operands are dequantised to bfloat16 on sm_90a, whose tensor cores know no block scales"
    settings.configure_logging().warning(text, name)


class HopperGemm:
    """The kernels of a fused GEMM, not loaded yet. ``configuration`` is that of the GEMM itself."""

    def __init__(
        self, operands: tuple[Operand, Operand], epilogue: Sequence[Any], schedule: Any, n: int, k: int
    ) -> None:
        for operation in epilogue:
            if isinstance(operation, StoreTile) and operation.dtype == FLOAT4:
                where = f"{operation.tensor} tensor dtype"
                raise NotImplementedError(refusal("sm_90a", where, FLOAT4, "types of 8 bits and more"))
        self.preparations: list[Preparation] = []
        used: list[Operand] = []
        for operand in operands:
            preparation = prepare(operand)
            if preparation is not None:
                self.preparations.append(preparation)
                operand = preparation.result
            used.append(operand)
        a, b = used
        self.configuration = configure(
            GemmProblem(a.dtype, b.dtype, tuple(epilogue), schedule, n, k, a_major=a.major, b_major=b.major)
        )
        self.arguments = [
            getattr(operation, field)
            for operation in epilogue
            for field in ("tensor", "norm_const")
            if hasattr(operation, field)
        ]

    @property
    def cluster_size(self) -> int:
        """CTAs that start together."""
        m, n = self.configuration.cluster
        return m * n

    def workspace_size(self, m: int, n: int, k: int, batch: int) -> int:
        """Bytes that the prepared operands take."""
        rows = {"a": m, "b": n}
        return sum(_up(part.geometry(rows[part.result.name], k, batch)[2]) for part in self.preparations)

    def load(self, kernel: Callable[[str, Any], Callable[..., None]], name: str) -> LoadedHopperGemm:
        """The kernels, ready to be called, by what loads one. ``name`` is for the log."""
        if any(preparation.scales for preparation in self.preparations):
            say_dequantised(name)
        steps = [(preparation, kernel(PREPARE, preparation.configuration)) for preparation in self.preparations]
        return LoadedHopperGemm(self, kernel(GEMM, self.configuration), steps)


class LoadedHopperGemm:
    """The kernels of a fused GEMM, callable."""

    def __init__(
        self, plan: HopperGemm, gemm: Callable[..., None], steps: list[tuple[Preparation, Callable[..., None]]]
    ) -> None:
        self.plan, self._gemm, self._steps = plan, gemm, steps
        self._arguments = operator.itemgetter("a", "b", *plan.arguments)
        self._places: tuple[Any, list[Any]] = (None, [])  # of the results, for the sizes of the last call
        self._views: tuple[Any, Any, list[Any]] | None = None  # workspace, sizes, the results within it

    def __call__(self, tensors: dict[str, Any], multiprocessors: int, stream: int, workspace: Any) -> None:
        """Runs the kernels, one after the other, on a call's arguments by name."""
        if self._steps:
            tensors = self._prepare(tensors, multiprocessors, stream, workspace)
        self._gemm(*self._arguments(tensors), multiprocessors, stream)

    def _prepare(self, tensors: dict[str, Any], multiprocessors: int, stream: int, workspace: Any) -> dict[str, Any]:
        """The arguments with prepared operands instead of those that need it."""
        results = self._results(tensors["a"], tensors["b"], stream, workspace)
        prepared = tensors.copy()
        for (step, run), result in zip(self._steps, results, strict=True):
            source = tensors[step.result.name]
            if step.packed:
                source = source.view(torch.uint8)
            if step.scales is None:
                run(source, result, multiprocessors, stream)
            else:
                scales = tensors[step.scales]
                if scales.dtype == torch.int8:
                    scales = scales.view(torch.float8_e8m0fnu)
                run(source, scales, result, multiprocessors, stream)
            prepared[step.result.name] = result
        return prepared

    def _results(self, a: Any, b: Any, stream: int, workspace: Any) -> list[Any]:
        """Where the prepared operands go: into the caller's workspace, else into memory of this call."""
        sizes, views = (a.shape, b.shape), self._views
        if workspace is not None and views is not None and views[0]() is workspace and views[1] == sizes:
            return views[2]
        seen, places = self._places
        if seen != sizes:
            m, k, batch = sizes[0]
            rows = {"a": m, "b": sizes[1][0]}
            k *= 2 if is_packed(a) else 1
            places = [
                (*step.geometry(rows[step.result.name], k, batch), getattr(torch, step.result.dtype))
                for step, _ in self._steps
            ]
            self._places = (sizes, places)
        if workspace is None:
            device = a.device
            if a.is_cuda and stream != launch.raw_stream(None, a.get_device()):
                # PyTorch's allocator must know which stream uses the memory.
                with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
                    return [torch.empty_strided(p[0], p[1], dtype=p[3], device=device) for p in places]
            return [torch.empty_strided(p[0], p[1], dtype=p[3], device=device) for p in places]
        results, offset = [], 0
        for shape, stride, size, dtype in places:
            results.append(workspace[offset : offset + size].view(dtype).as_strided(shape, stride))
            offset += _up(size)
        self._views = (weakref.ref(workspace, self._forget), sizes, results)
        return results

    def _forget(self, _: Any) -> None:
        self._views = None


def is_packed(tensor: Any) -> bool:
    """Whether an operand has two elements a byte."""
    return tensor.dtype in (torch.float4_e2m1fn_x2, torch.uint8)


def _up(size: int) -> int:
    return ceil_div(size, WORKSPACE_BYTES) * WORKSPACE_BYTES
