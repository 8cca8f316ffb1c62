"""A GEMM of the tokens of several experts, and the squared ReLU of its columns, in one kernel."""

from cudnn.grouped_gemm.grouped_gemm_srelu.api import (
    GroupedGemmSrelu,
    GroupedGemmSreluSm100,
    grouped_gemm_srelu_wrapper,
    grouped_gemm_srelu_wrapper_sm100,
)

__all__ = [
    "GroupedGemmSrelu",
    "GroupedGemmSreluSm100",
    "grouped_gemm_srelu_wrapper",
    "grouped_gemm_srelu_wrapper_sm100",
]
