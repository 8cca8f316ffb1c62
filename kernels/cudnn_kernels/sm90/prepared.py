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
from cudnn_kernels.signature import START, Workspace
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.operand import PrepareOperand


class PreparedGemm(Kernel):
    """The kernels for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self.gemm = Gemm(configuration.gemm)

    def launch(self, given: Mapping[str, Any]) -> None:
        (workspace,) = (slot for slot in self.c.slots() if isinstance(slot, Workspace))
        regions = {region.name: region for region in workspace.regions}
        sizes = self.sizes(given)
        places, _ = Workspace(workspace.regions[: len(self.c.steps)]).places(sizes)
        ready = {**given, **divided(self.c.slots(), given, self.c.gemm.regions)}
        prepared = []
        for name, step in self.c.steps.items():
            target = self.target(regions[name], sizes, given[workspace.name], places[name])
            mine = {other: given[other] for other in ("multiprocessors", "stream")}
            form = f"{name}_ptrs" if step.source.pointers else name
            mine |= {"source": given[form], "scales": given.get(f"sf{form}"), "target": target}
            if step.splits_k:
                mine["offsets"] = given[self.c.gemm.schedule.offsets]
            prepared.append(mine)
            ready[name] = target
        PrepareOperand(*self.c.steps.values()).launch(prepared)
        self.gemm.launch(ready)

    def sizes(self, arguments: Mapping[str, Any]) -> dict[str, Int64]:
        """The sizes of the operands by name."""
        found = {}
        for name, (rows, batch) in self.c.gemm.operand_sizes.items():
            step = self.c.steps.get(name)
            source = step.source if step else getattr(self.c.gemm, name)
            if source.pointers:
                found |= {rows: Int64(arguments[rows]), batch: Int64(arguments[f"{name}_ptrs"].shape[0])}
            else:
                count, k, matrices = arguments[name].shape
                found |= {rows: Int64(count), "k": Int64(k * source.packed), batch: Int64(matrices)}
        return found

    def target(self, region: PreparedOperand, sizes: dict[str, Int64], workspace: cute.Tensor, start: Any) -> Any:
        """The prepared operand in its region of the workspace."""
        element, step = DTYPES[region.operand.dtype], ROW * 8 // region.operand.bits
        rows, k, batch = sizes[region.rows], sizes["k"], sizes[region.batch]
        pitch = cute.assume(region.pitch(sizes), step)
        k_major = region.operand.major == "k"
        far = pitch * (rows if k_major else k)
        stride = (pitch, 1, far) if k_major else (1, pitch, far)
        first = cute.recast_ptr((workspace.iterator + cute.assume(Int64(start), START)).align(ROW), dtype=element)
        return cute.make_tensor(first, cute.make_layout((Int32(rows), Int32(k), Int32(batch)), stride=stride))
