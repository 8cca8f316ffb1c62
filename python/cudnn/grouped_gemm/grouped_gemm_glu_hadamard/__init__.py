"""Grouped GEMM + gated activation + largest magnitudes before and after a Hadamard transform, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_glu_hadamard.api import (
    GroupedGemmGluHadamard,
    GroupedGemmGluHadamardSm100,
    grouped_gemm_glu_hadamard_wrapper,
    grouped_gemm_glu_hadamard_wrapper_sm100,
)

__all__ = [
    "GroupedGemmGluHadamard",
    "GroupedGemmGluHadamardSm100",
    "grouped_gemm_glu_hadamard_wrapper",
    "grouped_gemm_glu_hadamard_wrapper_sm100",
]
