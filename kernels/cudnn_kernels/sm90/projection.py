"""The projection on Hopper."""

from __future__ import annotations

from typing import ClassVar

from cudnn_kernels.configuration import GemmConfiguration, PreparedGemmConfiguration
from cudnn_kernels.pipeline.projection import ViewedProjection
from cudnn_kernels.sm90.gemm import Gemm
from cudnn_kernels.sm90.prepared import PreparedGemm


class Projection(ViewedProjection):
    """Block-scaled operands are dequantised first."""

    gemms: ClassVar = {GemmConfiguration: Gemm, PreparedGemmConfiguration: PreparedGemm}
