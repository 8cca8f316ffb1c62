"""A GEMM and the backward pass of a squared ReLU, in one kernel."""

from cudnn.gemm_dsrelu.api import GemmDsrelu, GemmDsreluSm100, gemm_dsrelu_wrapper, gemm_dsrelu_wrapper_sm100

__all__ = ["GemmDsrelu", "GemmDsreluSm100", "gemm_dsrelu_wrapper", "gemm_dsrelu_wrapper_sm100"]
