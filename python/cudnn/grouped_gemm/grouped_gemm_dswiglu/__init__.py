"""Grouped GEMM + dGLU as programs call it that know SwiGLU alone."""

from cudnn.grouped_gemm.grouped_gemm_dswiglu.api import (
    GroupedGemmDswiglu,
    GroupedGemmDswigluSm100,
    grouped_gemm_dswiglu_wrapper,
    grouped_gemm_dswiglu_wrapper_sm100,
)

__all__ = [
    "GroupedGemmDswiglu",
    "GroupedGemmDswigluSm100",
    "grouped_gemm_dswiglu_wrapper",
    "grouped_gemm_dswiglu_wrapper_sm100",
]
