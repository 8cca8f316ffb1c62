"""The projection on Blackwell."""

from __future__ import annotations

from typing import ClassVar

from cudnn_kernels.configuration import GemmConfiguration
from cudnn_kernels.pipeline.projection import ViewedProjection
from cudnn_kernels.sm100.gemm import Gemm


class Projection(ViewedProjection):
    """The GEMM multiplies what it is given."""

    gemms: ClassVar = {GemmConfiguration: Gemm}
