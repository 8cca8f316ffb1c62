"""A GEMM of the tokens of several experts, weighted, biased and quantised in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_quant.api import (
    GroupedGemmQuant,
    GroupedGemmQuantSm100,
    grouped_gemm_quant_wrapper,
    grouped_gemm_quant_wrapper_sm100,
)

__all__ = [
    "GroupedGemmQuant",
    "GroupedGemmQuantSm100",
    "grouped_gemm_quant_wrapper",
    "grouped_gemm_quant_wrapper_sm100",
]
