"""A GEMM of the tokens of several experts with the experts' weights, and nothing fused but weights and a bias."""

from cudnn.grouped_gemm.grouped_gemm.api import (
    GroupedGemm,
    GroupedGemmSm100,
    grouped_gemm_wrapper,
    grouped_gemm_wrapper_sm100,
)

__all__ = ["GroupedGemm", "GroupedGemmSm100", "grouped_gemm_wrapper", "grouped_gemm_wrapper_sm100"]
