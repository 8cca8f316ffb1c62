"""Grouped GEMM with weights behind addresses + gated activation, in one kernel."""

from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_swiglu.api import (
    DiscreteGroupedGemmSwiglu,
    DiscreteGroupedGemmSwigluSm100,
    discrete_grouped_gemm_swiglu_wrapper,
    discrete_grouped_gemm_swiglu_wrapper_sm100,
)

__all__ = [
    "DiscreteGroupedGemmSwiglu",
    "DiscreteGroupedGemmSwigluSm100",
    "discrete_grouped_gemm_swiglu_wrapper",
    "discrete_grouped_gemm_swiglu_wrapper_sm100",
]
