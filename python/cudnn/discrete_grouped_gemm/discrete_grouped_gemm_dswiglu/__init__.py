"""Grouped GEMM with weights behind addresses + backward pass of a gated activation, in one kernel."""

from cudnn.discrete_grouped_gemm.discrete_grouped_gemm_dswiglu.api import (
    DiscreteGroupedGemmDswiglu,
    DiscreteGroupedGemmDswigluSm100,
    discrete_grouped_gemm_dswiglu_wrapper,
    discrete_grouped_gemm_dswiglu_wrapper_sm100,
)

__all__ = [
    "DiscreteGroupedGemmDswiglu",
    "DiscreteGroupedGemmDswigluSm100",
    "discrete_grouped_gemm_dswiglu_wrapper",
    "discrete_grouped_gemm_dswiglu_wrapper_sm100",
]
