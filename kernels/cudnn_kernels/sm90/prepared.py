"""A GEMM on operands that Hopper's tensor cores cannot read: first prepared in a workspace, all in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_kernels.configuration import ROW, PreparedOperand
from cudnn_kernels.configuration import PreparedGemmConfiguration as Configuration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.signature import sizes_of
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.operand import PrepareOperand


class PreparedGemm(Kernel):
    """The kernels for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.gemm = Gemm(configuration.gemm)

    def launch(self, given: Mapping[str, Any]) -> None:
        slots, steps = self.c.slots(), self.c.steps
        sizes, regions = sizes_of(slots, given, Int64), self.c.regions
        ready = {**given, **divided(slots, given, regions)}
        prepared = []
        for (name, step), region in zip(steps.items(), regions, strict=False):
            target = ready[name] = self.target(region, sizes, ready[name])
            mine = {other: given[other] for other in ("multiprocessors", "stream")}
            form = f"{name}_ptrs" if step.source.pointers else name
            mine |= {"source": given[form], "scales": given.get(f"sf{form}"), "target": target}
            if step.splits_k:
                mine["offsets"] = given[self.c.gemm.schedule.offsets]
            prepared.append(mine)
        PrepareOperand(*steps.values()).launch(prepared)
        self.gemm.launch(ready)

    def target(self, region: PreparedOperand, sizes: Mapping[str, Int64], start: cute.Pointer) -> cute.Tensor:
        """The prepared operand in its region of the workspace, which begins there."""
        element, step = DTYPES[region.operand.dtype], ROW * 8 // region.operand.bits
        rows, k, batch = sizes[region.rows], sizes["k"], sizes[region.batch]
        pitch = cute.assume(region.pitch(sizes), step)
        k_major = region.operand.major == "k"
        far = pitch * (rows if k_major else k)
        stride = (pitch, 1, far) if k_major else (1, pitch, far)
        first = cute.recast_ptr(start, dtype=element)
        return cute.make_tensor(first, cute.make_layout((Int32(rows), Int32(k), Int32(batch)), stride=stride))
