"""The projection of MLA's queries on any architecture: views of its tensors, factors in atoms, then the GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.pipeline.arrange import ArrangeScales, matrix, turned
from cudnn_kernels.pipeline.regions import divided
from cudnn_kernels.projection import BLOCK, E8M0, HEAD


class ViewedProjection(Kernel):
    """The kernels for one ``ProjectionConfiguration``; ``gemm`` is the architecture's class of GEMMs."""

    gemm: ClassVar[Any]

    def launch(self, given: Mapping[str, Any]) -> None:
        x, w = (matrix(given[name]) for name in self.c.operands)
        n = given["out_fp8_row"].shape[1] * HEAD
        ready = {**given, "a": x, "b": w if self.c.w_out_in else turned(w)}
        for out in ("out_fp8_row", "out_fp8_col"):
            ready[out] = matrix(given[out], n)
        ready["out_scales_row"] = matrix(given["out_scales_row"], n // BLOCK)
        ready["out_scales_col"] = turned(matrix(given["out_scales_col"], n))
        starts = divided(self.c.slots(), given, [region for region in self.c.regions if region.name in self.c.scales])
        for name, scales in self.c.scales.items():
            ready[name] = ArrangeScales().launch(matrix(given[scales]), starts[name], DTYPES[E8M0], given["stream"])
        self.gemm(self.c.gemm).launch(ready)
