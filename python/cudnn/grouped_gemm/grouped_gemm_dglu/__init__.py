"""A GEMM of the tokens of several experts, and the backward pass of a gated activation, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_dglu.api import (
    GroupedGemmDglu,
    GroupedGemmDgluSm100,
    grouped_gemm_dglu_wrapper,
    grouped_gemm_dglu_wrapper_sm100,
)

__all__ = [
    "GroupedGemmDglu",
    "GroupedGemmDgluSm100",
    "grouped_gemm_dglu_wrapper",
    "grouped_gemm_dglu_wrapper_sm100",
]
