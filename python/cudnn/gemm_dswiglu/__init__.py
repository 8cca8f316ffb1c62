"""A GEMM and the backward pass of SwiGLU, in one kernel."""

from cudnn.gemm_dswiglu.api import GemmDswiglu, GemmDswigluSm100, gemm_dswiglu_wrapper, gemm_dswiglu_wrapper_sm100

__all__ = ["GemmDswiglu", "GemmDswigluSm100", "gemm_dswiglu_wrapper", "gemm_dswiglu_wrapper_sm100"]
