"""A GEMM and the largest magnitude of its result, in one kernel."""

from cudnn.gemm_amax.api import GemmAmax, GemmAmaxSm100, gemm_amax_wrapper, gemm_amax_wrapper_sm100

__all__ = ["GemmAmax", "GemmAmaxSm100", "gemm_amax_wrapper", "gemm_amax_wrapper_sm100"]
