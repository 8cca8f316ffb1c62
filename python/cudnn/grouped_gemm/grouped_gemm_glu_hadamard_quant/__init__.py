"""Grouped GEMM + gated activation + Hadamard transform + quantisation to four bits, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_glu_hadamard_quant.api import (
    GroupedGemmGluHadamardQuant,
    GroupedGemmGluHadamardQuantSm100,
    grouped_gemm_glu_hadamard_quant_wrapper,
    grouped_gemm_glu_hadamard_quant_wrapper_sm100,
)

__all__ = [
    "GroupedGemmGluHadamardQuant",
    "GroupedGemmGluHadamardQuantSm100",
    "grouped_gemm_glu_hadamard_quant_wrapper",
    "grouped_gemm_glu_hadamard_quant_wrapper_sm100",
]
