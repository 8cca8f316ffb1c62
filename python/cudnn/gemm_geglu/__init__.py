"""A GEMM and the GeGLU of its columns in one kernel, as gpt-oss has it: clamped, with an offset."""

from cudnn.gemm_geglu.api import GemmGeglu, GemmGegluSm100, gemm_geglu_wrapper, gemm_geglu_wrapper_sm100

__all__ = ["GemmGeglu", "GemmGegluSm100", "gemm_geglu_wrapper", "gemm_geglu_wrapper_sm100"]
