"""The projection of MLA's queries on any architecture: views, packed scale factors, the GEMM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cudnn_kernels.fakes import DTYPES
from cudnn_kernels.kernel import Kernel
from cudnn_kernels.pipeline.scale_factor_atoms import PackScaleFactors, matrix_view, transposed
from cudnn_kernels.pipeline.workspace import workspace_pointers
from cudnn_kernels.projection import BLOCK, E8M0, HEAD


class ViewedProjection(Kernel):
    """The kernels for one ``ProjectionConfiguration``; ``gemm`` is the architecture's class of GEMMs."""

    gemm: ClassVar[Any]

    def launch(self, arguments: Mapping[str, Any]) -> None:
        x, w = (matrix_view(arguments[name]) for name in self.c.operands)
        n = arguments["out_fp8_row"].shape[1] * HEAD
        views = {**arguments, "a": x, "b": w if self.c.w_out_in else transposed(w)}
        for out in ("out_fp8_row", "out_fp8_col"):
            views[out] = matrix_view(arguments[out], n)
        views["out_scales_row"] = matrix_view(arguments["out_scales_row"], n // BLOCK)
        views["out_scales_col"] = transposed(matrix_view(arguments["out_scales_col"], n))
        starts = workspace_pointers(
            self.c.slots(), arguments, [region for region in self.c.regions if region.name in self.c.scales]
        )
        for name, scales in self.c.scales.items():
            views[name] = PackScaleFactors().launch(
                matrix_view(arguments[scales]), starts[name], DTYPES[E8M0], arguments["stream"]
            )
        self.gemm(self.c.gemm).launch(views)
