"""A GEMM on operands that Hopper's tensor cores cannot read: first prepared in a workspace, all in one call."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cudnn_kernels.configuration import ROW, PreparedOperand
from cudnn_kernels.configuration import PreparedGemmConfiguration as Configuration
from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.signature import START, Workspace, bind
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.operand import PrepareOperand


class PreparedGemm:
    """The kernels for one :class:`Configuration`."""

    def __init__(self, configuration: Configuration) -> None:
        self.c = configuration
        self.gemm = Gemm(configuration.gemm)

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """The arguments that the configuration's signature lists."""
        slots = self.c.slots()
        named = bind(slots, arguments)
        (workspace,) = (slot for slot in slots if isinstance(slot, Workspace))
        regions = {region.name: region for region in workspace.regions}
        sizes = self.sizes(named)
        places, _ = workspace.places(sizes)
        ready = dict(named)
        for name, step in self.c.steps.items():
            target = self.target(regions[name], sizes, named[workspace.name], places[name])
            same = {other: named[other] for other in ("multiprocessors", "stream")}
            scales = {"scales": named[f"sf{name}"]} if step.source.scale else {}
            PrepareOperand(step).launch({"source": named[name], **scales, "target": target, **same})
            ready[name] = target
        self.gemm.launch(ready)

    def sizes(self, arguments: dict[str, Any]) -> dict[str, Int64]:
        """The sizes of the operands by name."""
        found = {}
        for slots in self.c.gemm.operand_slots():
            name = slots[0].name
            step = self.c.steps.get(name)
            packed = step.source.packed if step else 1
            shape = arguments[name].shape
            for dim, size in zip(slots[0].shape, (shape[0], shape[1] * packed, shape[2]), strict=True):
                found.setdefault(str(dim), Int64(size))
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
