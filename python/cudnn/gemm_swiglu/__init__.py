"""A GEMM and the SwiGLU of its columns in one kernel, plain or block-scaled, its result quantized or not."""

from cudnn.gemm_swiglu.api import GemmSwiglu, GemmSwigluSm100, gemm_swiglu_wrapper, gemm_swiglu_wrapper_sm100
from cudnn.gemm_swiglu.weights import interleave_gate_up, interleave_glu_weights

__all__ = [
    "GemmSwiglu",
    "GemmSwigluSm100",
    "gemm_swiglu_wrapper",
    "gemm_swiglu_wrapper_sm100",
    "interleave_gate_up",
    "interleave_glu_weights",
]
