"""A GEMM on operands that Hopper's tensor cores cannot read: first prepared in a workspace, all in one call."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr

from cudnn_kernels.call import stand_ins
from cudnn_kernels.configuration import PreparedGemmConfiguration as Configuration
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.operand import PrepareOperand
from cudnn_kernels.types import DTYPES, fake, fake_operand, fake_scales

ROW = 16  # bytes: rows of a prepared operand begin at multiples
START = 256  # bytes: so do the operands in the workspace


class PreparedGemm:
    """The kernels for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        self.c = configuration
        self.gemm = Gemm(configuration.gemm)
        self.steps = tuple(step and PrepareOperand(step) for step in (configuration.a, configuration.b))

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, *rest: Any) -> None:
        """``rest``: the factors of A and of B, where there are some, the workspace, and what :class:`Gemm` takes."""
        operands, (workspace, *others) = self.factors((a, b), rest)
        *_, multiprocessors, stream = others
        ready, offset = [], Int64(0)
        for i in cutlass.range_constexpr(2):
            tensor, *scales = operands[i]
            if const_expr(self.steps[i] is not None):
                target, end = self.place(self.steps[i].c, tensor, workspace, offset)
                self.steps[i](tensor, *scales, target, multiprocessors, stream)
                tensor, offset = target, end
            ready.append(tensor)
        self.gemm(*ready, *others)

    def factors(self, operands: tuple, rest: Any) -> tuple[list[Any], Any]:
        """Each operand with its factors, and what is left of the arguments."""
        found = []
        for tensor, step in zip(operands, self.steps, strict=True):
            scaled = step is not None and step.c.scale_dtype
            found.append((tensor, rest[0]) if scaled else (tensor,))
            rest = rest[1:] if scaled else rest
        return found, rest

    def place(self, step: Any, source: cute.Tensor, workspace: cute.Tensor, offset: Int64) -> tuple[Any, Int64]:
        """The prepared operand in the workspace, and the first byte after it that another one may begin at."""
        element = DTYPES[step.to]
        mn, k, batch = source.shape
        if step.dtype == "float4_e2m1fn_x2":
            k = k * 2
        inner, outer = (k, mn) if step.to_major == "k" else (mn, k)
        values = ROW * 8 // element.width
        pitch = cute.assume(cute.ceil_div(Int64(inner), values) * values, values)
        stride = (pitch, 1, pitch * outer) if step.to_major == "k" else (1, pitch, pitch * outer)
        start = cute.recast_ptr((workspace.iterator + cute.assume(offset, START)).align(ROW), dtype=element)
        size = pitch * outer * batch * (element.width // 8)
        target = cute.make_tensor(start, cute.make_layout((mn, k, batch), stride=stride))
        return target, offset + cute.ceil_div(size, START) * START


def arguments(configuration: Configuration) -> tuple[Any, ...]:
    """Stand-ins for the arguments of :class:`PreparedGemm`."""
    c, gemm = configuration, PreparedGemm(configuration).gemm
    m, n, k, batch = (cute.sym_int() for _ in range(4))
    operands, scales = [], []
    for i, (mn, step) in enumerate(((m, c.a), (n, c.b))):
        if step is None:
            dtype, major = ((c.gemm.a, c.gemm.a_major), (c.gemm.b, c.gemm.b_major))[i]
            operands.append(fake_operand(dtype, mn, k, batch, major))
        else:
            operands.append(fake_operand(step.dtype, mn, k, batch, step.major))
            if step.scale_dtype:
                scales.append(fake_scales(step.scale_dtype))
    workspace = fake("uint8", (cute.sym_int64(),), 0)
    return (*operands, *scales, workspace, *stand_ins(c.gemm, gemm.epilogue)[2:])
