"""The projection on Hopper."""

from __future__ import annotations

from typing import Any

from cudnn_kernels.configuration import PreparedGemmConfiguration
from cudnn_kernels.pipeline.projection import ViewedProjection
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.prepared import PreparedGemm


class Projection(ViewedProjection):
    """Block-scaled operands are dequantised first."""

    def gemm_of(self, inner: Any) -> Gemm | PreparedGemm:
        return PreparedGemm(inner) if isinstance(inner, PreparedGemmConfiguration) else Gemm(inner)
