"""Grouped GEMM + GLU as programs call it that know SwiGLU alone."""

from cudnn.grouped_gemm.grouped_gemm_swiglu.api import (
    GroupedGemmSwiglu,
    GroupedGemmSwigluSm100,
    grouped_gemm_swiglu_wrapper,
    grouped_gemm_swiglu_wrapper_sm100,
)

__all__ = [
    "GroupedGemmSwiglu",
    "GroupedGemmSwigluSm100",
    "grouped_gemm_swiglu_wrapper",
    "grouped_gemm_swiglu_wrapper_sm100",
]
