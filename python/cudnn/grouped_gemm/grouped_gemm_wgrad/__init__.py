"""The gradients of the weights of several experts, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_wgrad.api import (
    GroupedGemmWgrad,
    GroupedGemmWgradSm100,
    get_grouped_gemm_wgrad_workspace_size,
    get_grouped_gemm_wgrad_workspace_size_sm100,
    grouped_gemm_wgrad_wrapper,
    grouped_gemm_wgrad_wrapper_sm100,
)

__all__ = [
    "GroupedGemmWgrad",
    "GroupedGemmWgradSm100",
    "get_grouped_gemm_wgrad_workspace_size",
    "get_grouped_gemm_wgrad_workspace_size_sm100",
    "grouped_gemm_wgrad_wrapper",
    "grouped_gemm_wgrad_wrapper_sm100",
]
