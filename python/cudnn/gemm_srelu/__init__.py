"""A GEMM and the squared ReLU of its result times a probability for each row, in one kernel."""

from cudnn.gemm_srelu.api import GemmSrelu, GemmSreluSm100, gemm_srelu_wrapper, gemm_srelu_wrapper_sm100

__all__ = ["GemmSrelu", "GemmSreluSm100", "gemm_srelu_wrapper", "gemm_srelu_wrapper_sm100"]
